"""The hub format: a folder that `hf upload` publishes on the Hugging Face Hub, and that this program loads.

model.safetensors  the weights
config.json        the settings of the network, the origin of the weights, and the checksums of the other files
README.md          the model card

A folder is written under a temporary name and renamed, so that it is never incomplete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from tabicl_train import plugins
from tabicl_train.config.schema import CLASS_SCORES, INTERVAL, NUMBER_SCORES, steps_of_stages
from tabicl_train.console import first_line, markdown_table
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import family_name, family_of
from tabicl_train.model.public_config import beyond_public
from tabicl_train.outputs import folder_problem, locked, sync_folder, temporary_name, write_atomically
from tabicl_train.prediction.origin import (
    NEEDED,
    Pretrained,
    checked_origin,
    mismatches,
    network_config,
    plugins_argument,
    plugins_in,
)
from tabicl_train.run_dir.checkpoint import check_version
from tabicl_train.run_dir.curves import OUTSIDE
from tabicl_train.run_dir.records import Records

FORMAT_VERSION = 1
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
LIBRARY = "tabicl-train"
FRONT_MATTER = """---
library_name: {library}
license: bsd-3-clause
"""
TAGS = """pipeline_tag: tabular-{task}
tags:
- tabular
- tabular-{task}
- tabicl
- in-context-learning
- foundation-model
- synthetic-data
"""
KINDS = {
    "trained": "as trained",
    "ema": "exponential moving average",
    "last": "average of the last snapshots",
    "best": "the best by validation",
}


def is_hub_folder(path: Path) -> bool:
    """Whether a path is a folder with one of the two files that loading needs."""
    return (path / WEIGHTS).is_file() or (path / CONFIG).is_file()


def load_hub(folder: Path) -> Pretrained:
    """Read a folder; raises ConfigError if it is incomplete, damaged or of another program."""
    if missing := [name for name in (WEIGHTS, CONFIG) if not (folder / name).is_file()]:
        raise ConfigError([f"{folder} has no {missing[0]}; it is incomplete or not a folder of tabicl-export"])
    description = read_description(folder)
    if description is None or not isinstance(description.get("model"), dict):
        raise ConfigError([f"{folder / CONFIG} was not written by tabicl-export"])
    check_version(folder, description, FORMAT_VERSION)
    try:
        content = (folder / WEIGHTS).read_bytes()
        tensors = safetensors.torch.load(content)
    except (OSError, SafetensorError) as error:
        raise ConfigError([f"{folder / WEIGHTS} cannot be read: {first_line(error)}"]) from None
    if recorded_checksum(description, WEIGHTS) != checksum(content):
        raise ConfigError([f"{folder / WEIGHTS} is damaged, or does not belong to the {CONFIG} beside it"])
    plugins.require(plugins_in(description.get("origin")), NEEDED, folder)
    config = network_config(folder / CONFIG, description["model"])
    if problems := mismatches(config, tensors):
        raise ConfigError([f"{folder}: {problem}" for problem in problems])
    return Pretrained(config, tensors, checked_origin(folder / CONFIG, description.get("origin", {})))


def save_hub(pretrained: Pretrained, folder: Path, check: Callable[[Path], None]) -> None:
    """Write or replace a folder, unless `check`, which is called with the complete temporary folder, raises."""
    folder = Path(os.path.realpath(folder))
    temporary = temporary_name(folder)
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process with the same number
    try:
        temporary.mkdir()
        with locked(temporary):
            for name, content in hub_files(pretrained, folder.name).items():
                write_atomically(temporary / name, lambda file, content=content: file.write(content))  # type: ignore[misc]
            check(temporary)
            put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Rename a complete folder, and remove the one whose place it takes."""
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
    """Return the content of the files of a folder; `name` is the title of the card."""
    tensors = {key: tensor.to(torch.float32, copy=True).contiguous() for key, tensor in pretrained.tensors.items()}
    weights = safetensors.torch.save(tensors, {"format": "pt", **pretrained.summary})
    try:
        card = model_card(name, pretrained).encode()
    except KeyError as error:  # an older file, or one that was edited
        lacks = f"the origin of the weights has no {error}, which the model card needs"
        raise ConfigError([f"{lacks}; export them from their run, or to FILE.safetensors"]) from None
    description = {
        "library_name": LIBRARY,
        "model_type": family_name(type(pretrained.config)),
        "format_version": FORMAT_VERSION,
        "model": dataclasses.asdict(pretrained.config),
        "sha256": {WEIGHTS: checksum(weights), CARD: checksum(card)},
        "origin": pretrained.origin,
    }
    return {WEIGHTS: weights, CARD: card, CONFIG: json.dumps(description, indent=2, allow_nan=False).encode()}


def hub_problem(folder: Path) -> str | None:
    """Return why a folder cannot be written, or replaced without loss; None if it can."""
    if not folder.is_dir():
        return "it is a file, not a folder" if folder.exists() else folder_problem(folder.parent)
    names = {path.name for path in folder.iterdir()}
    if others := sorted(names - {WEIGHTS, CONFIG, CARD}):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return f"the folder also holds {others[0]}{more}, which would be lost; choose another name"
    description = read_description(folder) if names else {}
    if description is None:
        return "tabicl-export did not write this folder; choose another name"
    if CARD in names and checksum((folder / CARD).read_bytes()) != recorded_checksum(description, CARD):
        return f"its {CARD} was edited and would be lost; choose another name"
    return folder_problem(folder.parent)


def read_description(folder: Path) -> dict | None:
    """Return the content of config.json; None if it is missing, damaged, or of another program."""
    description = Records(folder).json(CONFIG)
    return description if description and description.get("library_name") == LIBRARY else None


def recorded_checksum(description: dict, name: str) -> Any:
    """Return the checksum of a file that config.json names; None if it names none."""
    checksums = description.get("sha256")
    return checksums.get(name) if isinstance(checksums, dict) else None


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def model_card(name: str, pretrained: Pretrained) -> str:
    """Return the card of a model with this name in Markdown; sections without information are left out."""
    # An estimator's network has no run, but perhaps plug-ins.
    origin = pretrained.origin if pretrained.origin.keys() - {"plugins"} else {}
    is_tabicl = family_of(pretrained.config).predicts_real_tables
    head = FRONT_MATTER.format(library=LIBRARY)
    if is_tabicl:
        head += TAGS.format(task=task_of(pretrained))
    sections = [f"{head}---\n\n# {name}", introduction(pretrained), usage(pretrained)]
    if origin:
        sections += [training(origin), data(origin)]
    if is_tabicl:
        sections += [*(scores(pretrained) if origin else []), limits(pretrained)]
    if origin:
        sections.append("## Versions\n\n" + table(["package", "version"], origin["versions"].items()))
    return "\n\n".join(sections) + "\n"


def task_of(pretrained: Pretrained) -> str:
    return "regression" if pretrained.config.is_regression else "classification"


def introduction(pretrained: Pretrained) -> str:
    parameters = f"{sum(tensor.numel() for tensor in pretrained.tensors.values()):,} parameters"
    if not family_of(pretrained.config).predicts_real_tables:
        return f"{(family_of(pretrained.config).__doc__ or '').partition(chr(10))[0]} It has {parameters}."
    quantiles = f"{pretrained.config.num_quantiles} quantiles of "
    return (
        f"A TabICL-style tabular foundation model for {task_of(pretrained)}. It reads a table with some labeled rows "
        f"and predicts {quantiles if pretrained.config.is_regression else ''}the labels of the remaining rows in one "
        f"forward pass, without being trained on that table. It has {parameters} and was pretrained with `{LIBRARY}`."
    )


def usage(pretrained: Pretrained) -> str:
    named = plugins_argument(pretrained).replace("'", '"')
    if not family_of(pretrained.config).predicts_real_tables:
        text = f"""## Use

```python
from tabicl_train.prediction.export import load_network

network = load_network("FOLDER"{named})  # {family_of(pretrained.config).__module__} describes its input and output
```"""
        return text + plugin_sentences(pretrained)
    kind, result, predict = "Classifier", "probabilities", "predict_proba"
    if pretrained.config.is_regression:
        kind, result, predict = "Regressor", "means", "predict"
    text = f"""## Use

```python
from huggingface_hub import snapshot_download
from tabicl_train import TabICL{kind}

folder = snapshot_download("OWNER/NAME")  # or the path of a copy of this folder
{kind.lower()} = TabICL{kind}(folder{named}).fit(X, y)
{result} = {kind.lower()}.{predict}(queries)
```

The package `{LIBRARY}` is needed. X may be an array or a data frame, with numbers, strings, categories, booleans, times
and missing values."""
    if beyond := beyond_public(pretrained.config):
        text += f" The `tabicl` package cannot express this network, which has {' and '.join(beyond)}."
    else:
        text += " `tabicl-export checkpoint=FOLDER output=model.ckpt` writes a file for the `tabicl` package."
    return text + plugin_sentences(pretrained)


def plugin_sentences(pretrained: Pretrained) -> str:
    """Say which code the network needs that is in no file of the folder; "" if it needs none."""
    sentences = ""
    for record, things in plugins.uses(plugins_in(pretrained.origin), NEEDED):
        name = plugins.name_of(record)
        version = f" {record['version']}" if record["version"] else ""
        sentences += (
            f"\n\nThe plug-in `{name}`{version} (SHA-256 {record['sha256'][:16]}) defines its {' and '.join(things)}. "
            "It is code, and not in this folder: get it from whoever published the weights, read it, and name it as "
            f"above, on a command line by `plugins=[{name}]`."
        )
    return sentences


def training(origin: dict) -> str:
    config = origin["config"]
    commit = origin["commit"] or "unknown"
    optimizer = config["optimizer"]
    rows = {
        "run": origin["run"],
        "weights": f"{KINDS[origin['weights']]}, after step {origin['step']:,} of {origin['steps']:,}",
        "started from": config["init_weights"],
        "commit": commit + (" with uncommitted changes" if origin["uncommitted_changes"] else ""),
        "seed": config["seed"],
        "optimizer": optimizer["name"],
        "precision": config["trainer"]["precision"],
        "command": f"`tabicl-train {shlex.join(origin['command'])}`" if origin["command"] else None,
    }
    every = config["curriculum"]["stages"]
    done = steps_of_stages({name: stage["steps"] for name, stage in every.items()}, origin["step"])
    stages = [
        [
            name,
            f"{done[name]:,}" + (f" of {stage['steps']:,}" if done[name] < stage["steps"] else ""),
            stage["tables"],
            interval(stage["rows"]),
            interval(stage["train_share"]),
            interval(stage["features"]),
            f"{stage['learning_rate']:g}, {stage['schedule']}",
        ]
        for name, stage in every.items()
        if name in done
    ]
    header = ["stage", "steps", "tables per step", "rows", "labeled share", "features", "learning rate"]
    known = [row for row in rows.items() if row[1] is not None]
    return "\n\n".join(
        [
            "## Training",
            table(["", ""], known),
            table(header, stages),
            "All settings of the run are stored with the weights.",
        ]
    )


def data(origin: dict) -> str:
    prior = dict(origin["config"]["prior"])
    text = f"## Data\n\nAll training tables were drawn from the prior `{prior.pop('name')}`"
    if origin["stream_version"] is not None:
        text += f" (version {origin['stream_version']} of the stream of tables)"
    options = table(["option", "value"], ((f"`{key}`", f"`{value}`") for key, value in prior.items()))
    return text + (f" with these options:\n\n{options}" if prior else ".")


def scores(pretrained: Pretrained) -> list[str]:
    """Return the sections about validation and evaluation, if there are any."""
    sections, origin = [], pretrained.origin
    low, high = INTERVAL
    coverage = f" `coverage` is that of {high - low:.0%} intervals." if pretrained.config.is_regression else ""
    if rows := origin["validation"]:
        step = rows[0]["step"]
        others = "" if origin["weights"] in ("trained", "best") else ", of the weights as trained rather than these"
        of_task = NUMBER_SCORES if pretrained.config.is_regression else CLASS_SCORES
        columns = ["data", "rows", *(score for score in of_task if score not in ("guess_loss", "possible"))]
        sets = "bundled data sets"
        if any("possible" in row for row in rows):
            columns.append("possible")
            sets += ", and on probes, with the ROC AUC or R2 that is possible"
        if any(row.get("trained_range") == OUTSIDE for row in rows):
            columns.append("trained_range")
        units = " Losses and RMSE are in standard deviations of the target." if pretrained.config.is_regression else ""
        sections.append(
            f"## Validation\n\nAfter step {step:,}{others}, on validation tables of the prior and on scikit-learn's "
            f"{sets}.{units}{coverage}\n\n"
            + table(columns, ([row.get(column, "") for column in columns] for row in rows))
        )
    if rows := origin["evaluation"]:
        below = ""
        if pretrained.config.is_regression:
            below = f" An R2 below 0 counts as 0; `pinball` is in standard deviations of the target.{coverage}"
        sections.append(
            "## Evaluation\n\nMeans over tasks of real data, from `tabicl-evaluate`, perhaps of another step of the "
            f"run. `this model` is the pretrained network.{below}\n\n"
            + table(list(rows[0]), (row.values() for row in rows))
        )
    return sections


def limits(pretrained: Pretrained) -> str:
    config = pretrained.config
    target = f"Up to {config.max_classes} classes in one pass; tables with more are split into several predictions."
    if config.is_regression:
        lowest = 1 / (config.num_quantiles + 1)
        target = f"Quantiles at levels from {lowest:g} to {1 - lowest:g}; beyond them the tails are a guess."
    points = [
        f"{task_of(pretrained).capitalize()} only.",
        target,
        "Labeled rows and features are read at once, so memory and time grow with the table.",
    ]
    if trained := pretrained.trained_range:
        points.append(f"Trained on tables with {trained}. Outside this range the network extrapolates.")
    return "## Limits\n\n" + "\n".join(f"- {point}" for point in points)


def interval(bounds: list) -> str:
    low, high = (f"{bound:,}" for bound in bounds)
    return low if low == high else f"{low} to {high}"


def table(header: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """Format a table in Markdown, with four digits for fractions."""
    return markdown_table(header, ([cell(value) for value in row] for row in rows))


def cell(value: Any) -> str:
    if value == "nan":  # as origin.py writes it
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)
