"""Weights of every kind: reads those of runs and exports, and writes them for `tabicl`, the Hugging Face Hub and ONNX.

Some weights come with the package, in files called FAMILY-YEAR-MONTH-classifier.safetensors or -regressor.safetensors.
The metadata of such a file hold the configuration of the network as the `tabicl` package writes it (`config`) and the
origin of the weights (`origin`), both in JSON. This module resolves their names; scores.csv holds their mean scores.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from tabicl_train.outputs import expand_home

FOLDER = Path(__file__).parent


def names(regression: bool = False) -> dict[str, Path]:
    """Return the names of the weights in the package, and their files.

    Parameters
    ----------
    regression : bool, optional
        The task that names without an ending refer to.

    Returns
    -------
    dict of str to Path
        `mini-2026-12-classifier`, and without a date the newest of its family, `mini-classifier`; also both without
        the ending if they are of the task.
    """
    kind = "regressor" if regression else "classifier"
    found: dict[str, Path] = {}
    for path in sorted(FOLDER.glob("*.safetensors")):
        dated, _, own = path.stem.rpartition("-")
        for name in (dated.rsplit("-", 2)[0], dated):
            found |= {f"{name}-{own}": path} | ({name: path} if own == kind else {})
    return found


def resolve(checkpoint: str | Path, regression: bool = False) -> Path:
    """Return the file of a name of weights in the package; any other text is a path, and so is `./mini`."""
    if not isinstance(checkpoint, str):
        return Path(expand_home(checkpoint))
    # A name that only the other task has resolves to it, so that the error can say what these weights predict.
    return names(regression).get(checkpoint) or names(not regression).get(checkpoint) or Path(expand_home(checkpoint))


def no_such_weights(option: str, checkpoint: str | Path) -> str:
    known = ", ".join(sorted(names()))
    return f"{option} is {str(checkpoint)!r}; there is no such file or run directory, and the names are {known}"


def architecture(path: Path) -> dict[str, Any]:
    """Read the settings of the network from one of the files, without dropout, which does not affect its weights."""
    # Both imports are slow, and listing names needs neither.
    from safetensors import safe_open

    from tabicl_train.model.public_config import NAMES, from_public

    with safe_open(path, "np") as file:
        config = from_public(json.loads(file.metadata()["config"]))
    return {name: getattr(config, name) for name in NAMES if name != "dropout"}


def shipped_scores(origin: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of scores.csv for the weights with this origin, without empty columns.

    Empty if the weights are not those of a file in the package.
    """
    from safetensors import safe_open

    # Exports of such weights have other files, so they are recognized by their origin.
    for path in sorted(FOLDER.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            stored = json.loads(file.metadata()["origin"])
        if all(stored[key] == origin.get(key) for key in ("run", "commit", "command", "step", "weights")):
            with (FOLDER / "scores.csv").open(newline="", encoding="utf-8") as table:
                rows = [row for row in csv.DictReader(table) if row.pop("file") == path.stem]
            filled = {column for row in rows for column, cell in row.items() if cell}
            return [{column: cell for column, cell in row.items() if column in filled} for row in rows]
    return []
