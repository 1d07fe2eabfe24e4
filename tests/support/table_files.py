"""Folders of small real tables, the same ones for the same arguments."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd


def build_frame(number: int, rows: int) -> pd.DataFrame:
    """A table of numbers with gaps, categories, dates and truth values, whose target depends on two columns."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=rows)
    group = rng.choice(["red", "green", "blue"], rows)
    return pd.DataFrame(
        {
            "x": np.round(x, 6),
            "gaps": np.where(rng.random(rows) < 0.2, np.nan, np.round(rng.exponential(size=rows), 6)),
            "group": group,
            "day": pd.date_range("2020-01-01", periods=rows).strftime("%Y-%m-%d"),
            "flag": rng.random(rows) < 0.4,
            "size": rng.integers(0, 5, rows),
            "price": np.round(rng.normal(size=rows) + x, 6),
            "label": np.where(x + (group == "red") > 0.5, "yes", "no"),
        }
    )


def write_table_files(folder: Path, tables: int = 4) -> Path:
    """CSV files of 150, 200, 250, ... rows, whose target is guessed."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(tables):
        build_frame(number, 150 + 50 * number).to_csv(folder / f"table{number}.csv", index=False)
    return folder


@functools.cache
def shared_table_files() -> str:
    """Such a folder, until this process ends."""
    place = tempfile.TemporaryDirectory()
    LASTING.append(place)
    return str(write_table_files(Path(place.name)))


LASTING: list[tempfile.TemporaryDirectory] = []
