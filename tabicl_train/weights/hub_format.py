"""The hub format: a folder that `hf upload` publishes on the Hugging Face Hub and `weights/files.py` loads.

model.safetensors  the weights
config.json        the settings of the network, the origin of the weights, and the checksums of the other files
README.md          the model card

A folder is written under a temporary name and then renamed, so that it is never incomplete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import safetensors.torch

from tabicl_train.console import escaped_cell
from tabicl_train.doors import plugins
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import family_name, family_of
from tabicl_train.model.public_config import beyond_public
from tabicl_train.outputs import folder_problem, locked, sync_folder, temporary_name, write_atomically
from tabicl_train.run.curves import INSIDE, OUTSIDE, THIS_MODEL
from tabicl_train.run.plain_values import steps_of_stages
from tabicl_train.run.score_names import CLASS_SCORES, INTERVAL, NUMBER_SCORES
from tabicl_train.weights import shipped_scores
from tabicl_train.weights.files import (
    CONFIG,
    HUB_VERSION,
    LIBRARY,
    WEIGHTS,
    read_description,
    recorded_checksum,
    sha256_of,
)
from tabicl_train.weights.pretrained import NEEDED, Pretrained, as_float32, plugins_argument, plugins_in

CARD = "README.md"


def save_hub(pretrained: Pretrained, folder: Path, check: Callable[[Path], None]) -> None:
    """Write or replace a folder.

    Parameters
    ----------
    pretrained : Pretrained
        The weights.
    folder : Path
        The folder.
    check : callable
        Called with the complete temporary folder. If it raises, nothing is written.

    Raises
    ------
    ConfigError
        If the origin of the weights lacks what the model card needs.
    OSError
        If the folder cannot be written.
    """
    folder = Path(os.path.realpath(folder))
    temporary = temporary_name(folder)
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process with the same number
    try:
        temporary.mkdir()
        # The lock says that the folder is in use: other processes remove temporary folders that are not locked
        # (remove_leftovers).
        with locked(temporary):
            for name, content in hub_files(pretrained, folder.name).items():
                write_atomically(temporary / name, lambda file, content=content: file.write(content))  # type: ignore[misc]
            check(temporary)
            put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Rename a complete folder, and remove the folder that it replaces."""
    if not folder.exists():
        temporary.rename(folder)
        sync_folder(folder.parent)
        return
    with locked(folder):
        old = temporary_name(folder, "old")
        folder.rename(old)
        temporary.rename(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def hub_files(pretrained: Pretrained, name: str) -> dict[str, bytes]:
    """Return the content of each file of a folder; `name` is the title of the card."""
    tensors = {key: as_float32(tensor).clone().contiguous() for key, tensor in pretrained.tensors.items()}
    weights = safetensors.torch.save(tensors, {"format": "pt", **pretrained.summary})
    try:
        card = model_card(name, pretrained).encode()
    except (LookupError, TypeError, AttributeError, ValueError, jinja2.TemplateError) as error:  # older, or edited
        lacks = f"the origin of the weights lacks what the model card needs ({error})"
        raise ConfigError([f"{lacks}; export them from their run, or to FILE.safetensors"]) from None
    description = {
        "library_name": LIBRARY,
        "model_type": family_name(type(pretrained.config)),
        "format_version": HUB_VERSION,
        "model": dataclasses.asdict(pretrained.config),
        "sha256": {WEIGHTS: sha256_of(weights), CARD: sha256_of(card)},
        "origin": pretrained.origin,
    }
    return {WEIGHTS: weights, CARD: card, CONFIG: json.dumps(description, indent=2, allow_nan=False).encode()}


def hub_problem(folder: Path) -> str | None:
    """Return why a folder cannot be written, or cannot be replaced without losing other files; None if it can."""
    if not folder.exists():
        return folder_problem(folder.parent)
    if not folder.is_dir():
        return "it is a file, not a folder"
    names = {path.name for path in folder.iterdir()}
    if not names:
        return folder_problem(folder.parent)
    others = sorted(names - {WEIGHTS, CONFIG, CARD})
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return f"the folder also holds {others[0]}{more}, which would be lost; choose another name"
    description = read_description(folder)
    if description is None:
        return "tabicl-export did not write this folder; choose another name"
    if CARD in names and sha256_of((folder / CARD).read_bytes()) != recorded_checksum(description, CARD):
        return f"its {CARD} was edited and would be lost; choose another name"
    return folder_problem(folder.parent)


def model_card(name: str, pretrained: Pretrained) -> str:
    """Return the card of a model with this name in Markdown; sections without information are left out."""
    # Only weights of a run have sections about training and scores. Those of an estimator may have plug-ins in their
    # origin, and nothing else.
    origin = pretrained.origin
    network = pretrained.config
    family = family_of(network)
    is_from_run = bool(origin.keys() - {"plugins"})
    has_scores = is_from_run and family.predicts_real_tables
    needed = plugins.uses(plugins_in(origin), NEEDED)

    # The template model_card.md.j2, in which an undefined variable is an error.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cell": card_cell,
        "interval": range_text,
        "weighted": weighted_names,
        "command": shlex.join,
    }
    card = environment.get_template("model_card.md.j2").render(
        name=name,
        library=LIBRARY,
        network=network,
        family=family,
        predicts_real_tables=family.predicts_real_tables,
        is_regression=network.is_regression,
        task="regression" if network.is_regression else "classification",
        parameters=sum(tensor.numel() for tensor in pretrained.tensors.values()),
        plugins_argument=plugins_argument(pretrained).replace("'", '"'),
        plugins=[record | {"name": plugins.name_of(record), "things": things} for record, things in needed],
        not_public=beyond_public(network) if family.predicts_real_tables else [],
        is_from_run=is_from_run,
        origin=origin,
        config=origin["config"] if is_from_run else {},
        begun_stages=begun_stages(origin) if is_from_run else {},
        has_mix=is_from_run and sets_mix(origin),
        validation_columns=validation_columns(pretrained) if has_scores else [],
        evaluation=mean_scores(pretrained) if has_scores else [],
        mean_score=mean_score(pretrained) if has_scores else None,
        this_model=THIS_MODEL,
        coverage=f"{INTERVAL[1] - INTERVAL[0]:.0%}",
        trained_range=pretrained.trained_range,
    )

    # Sections that were left out leave blank lines, of which one stays.
    return re.sub(r"\n{3,}", "\n\n", card).strip() + "\n"


def begun_stages(origin: dict) -> dict[str, int]:
    """Return the steps of the stages that have begun, by name, in order."""
    stages = origin["config"]["curriculum"]["stages"]
    return steps_of_stages({name: stage["steps"] for name, stage in stages.items()}, origin["step"])


def sets_mix(origin: dict) -> bool:
    """Whether a stage that has begun sets its own shares of the components of a mixture."""
    stages = origin["config"]["curriculum"]["stages"]
    return any(stages[name].get("mix") for name in begun_stages(origin))


def validation_columns(pretrained: Pretrained) -> list[str]:
    """Return the columns of the last validation before the weights were saved; empty without a validation."""
    rows = pretrained.origin["validation"]
    if not rows:
        return []
    scores = NUMBER_SCORES if pretrained.config.is_regression else CLASS_SCORES
    columns = ["data", "rows", *(name for name in scores if name not in ("guess_loss", "possible"))]
    if any("possible" in row for row in rows):
        columns.append("possible")
    if any(row.get("trained_range") == OUTSIDE for row in rows):
        columns.append("trained_range")
    return columns


def mean_scores(pretrained: Pretrained) -> list[dict[str, Any]]:
    """Return the mean scores of methods, from scores.csv for weights in the package, otherwise from the run."""
    return shipped_scores(pretrained.origin) or pretrained.origin["evaluation"]


def mean_score(pretrained: Pretrained) -> dict[str, Any] | None:
    """Return the mean score on real tasks that becomes metadata of the card, of the first suite if there are several.

    None if these are not the weights that were scored, or if that is unknown; the card shows such means nonetheless.
    """
    score, title = ("r2", "R2") if pretrained.config.is_regression else ("roc_auc", "ROC AUC")
    for row in mean_scores(pretrained):
        is_inside = row["method"] == THIS_MODEL and row["trained_range"] == INSIDE
        if is_inside and row.get("weights") == pretrained.name:
            return {"type": score, "title": title, "value": card_cell(row[score]), "tasks": row["tasks"]}
    return None


def weighted_names(weights: dict[str, float] | None) -> str:
    """List names with their weights."""
    return ", ".join(f"`{name}` {weight:g}" for name, weight in (weights or {}).items())


def range_text(bounds: list) -> str:
    low, high = bounds
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def card_cell(value: Any) -> str:
    """Format a value for a table in Markdown, with four digits for fractions."""
    if value == "nan":  # as run_checkpoint.py writes it
        return ""
    return escaped_cell(f"{value:.4f}" if isinstance(value, float) else value)
