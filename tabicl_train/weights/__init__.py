"""Weights that are part of the package, and their names; README.md is their card.

A file is called FAMILY-YEAR-MONTH-classifier.safetensors, or -regressor. Its metadata hold the `tabicl` package's
configuration of the network (`config`) and the origin of the weights (`origin`), both in JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def names(regression: bool = False) -> dict[str, Path]:
    """Return names and their files; `mini` is the newest `mini-2026-12`."""
    # Names are of the task asked for, or with -classifier or -regressor at the end of that task.
    kind, found = "regressor" if regression else "classifier", {}
    for path in sorted(FOLDER.glob("*.safetensors")):
        dated, _, own = path.stem.rpartition("-")
        for name in (dated.rsplit("-", 2)[0], dated):
            found |= {f"{name}-{own}": path} | ({name: path} if own == kind else {})
    return found


def resolve(checkpoint: str | Path, regression: bool = False) -> Path:
    """Return the file of a name, or else the path itself, as for `./mini`."""
    if not isinstance(checkpoint, str):
        return Path(checkpoint)
    # A name that only weights of the other task have means these, so that an error says what they predict.
    return names(regression).get(checkpoint) or names(not regression).get(checkpoint) or Path(checkpoint)


def no_such_weights(option: str, checkpoint: str | Path) -> str:
    known = ", ".join(sorted(names()))
    return f"{option} is {str(checkpoint)!r}; there is no such file or run directory, and the names are {known}"


def architecture(path: Path) -> dict[str, Any]:
    """Read the settings of the network from one of the files, without dropout, which does not affect its weights."""
    # Both are slow to import, and listing names needs neither.
    from safetensors import safe_open

    from tabicl_train.model.public_config import NAMES, from_public

    with safe_open(path, "np") as file:
        config = from_public(json.loads(file.metadata()["config"]))
    return {name: getattr(config, name) for name in NAMES if name != "dropout"}


def evaluation_on_card(origin: dict[str, Any]) -> str:
    """Return the section of the card with the scores of the file of this origin; "" if none is of this origin."""
    from safetensors import safe_open

    for path in sorted(FOLDER.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            stored = json.loads(file.metadata()["origin"])
        if all(stored[key] == origin.get(key) for key in ("run", "commit", "command", "step", "weights")):
            card = (FOLDER / "README.md").read_text(encoding="utf-8")
            about_it = card.partition(f"\n## {path.stem}\n")[2]
            scores = about_it.partition("\n### Evaluation\n")[2].partition("\n### ")[0]
            return f"## Evaluation\n{scores.rstrip()}" if scores else ""
    return ""
