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
import re
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
from tabicl_train.run_dir.curves import INSIDE, OUTSIDE, THIS_MODEL
from tabicl_train.run_dir.records import Records
from tabicl_train.weights import evaluation_on_card

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
CARD = "README.md"
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
    "last": "average of the last snapshots",  # of exports of version 0.2.0
    "best": "the best by validation",
}
# The score of a network beside its card, as the Hugging Face Hub reads and shows it.
MODEL_INDEX = """model-index:
- name: {name}
  results:
  - task: {{type: tabular-{task}}}
    dataset: {{type: tabicl-evaluate, name: {tasks} real tasks}}
    metrics:
    - {{type: {score}, name: mean {title}, value: {value}}}
"""
COVERAGE = f"`coverage` is that of {INTERVAL[1] - INTERVAL[0]:.0%} intervals."


def is_hub_folder(path: Path) -> bool:
    """Whether a path is a folder with one of the two files that loading needs."""
    return (path / WEIGHTS).is_file() or (path / CONFIG).is_file()


def load_hub(folder: Path) -> Pretrained:
    """Read a folder; raises ConfigError if it is incomplete, damaged or of another program."""
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise ConfigError([f"{folder} has no {name}; it is incomplete or not a folder of tabicl-export"])
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
    problems = mismatches(config, tensors)
    if problems:
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
    if CARD in names and checksum((folder / CARD).read_bytes()) != recorded_checksum(description, CARD):
        return f"its {CARD} was edited and would be lost; choose another name"
    return folder_problem(folder.parent)


def read_description(folder: Path) -> dict | None:
    """Return the content of config.json; None if it is missing, damaged, or of another program."""
    description = Records(folder).json(CONFIG)
    if not description or description.get("library_name") != LIBRARY:
        return None
    return description


def recorded_checksum(description: dict, name: str) -> Any:
    """Return the checksum of a file that config.json names; None if it names none."""
    checksums = description.get("sha256")
    return checksums.get(name) if isinstance(checksums, dict) else None


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def model_card(name: str, pretrained: Pretrained) -> str:
    """Return the card of a model with this name in Markdown; sections without information are left out."""
    origin = pretrained.origin
    is_from_run = bool(origin.keys() - {"plugins"})  # an estimator's network has no run, but perhaps plug-ins
    predicts_real_tables = family_of(pretrained.config).predicts_real_tables
    head = FRONT_MATTER.format(library=LIBRARY)
    scores = ""
    if predicts_real_tables:
        head += TAGS.format(task=task_of(pretrained))
        if is_from_run:
            scores = evaluation_on_card(origin) or evaluation(pretrained)
            head += model_index(name, pretrained, scores)
    sections = [f"{head}---\n\n# {name}", introduction(pretrained), usage(pretrained)]
    if is_from_run:
        sections += [training(origin), data(origin)]
    if is_from_run and predicts_real_tables and origin["validation"]:
        sections.append(validation(pretrained))
    if scores:
        sections.append(scores)
    if predicts_real_tables:
        sections.append(limits(pretrained))
    if is_from_run:
        sections.append("## Versions\n\n" + fact_table(["package", "version"], origin["versions"].items()))
    return "\n\n".join(sections) + "\n"


def task_of(pretrained: Pretrained) -> str:
    return "regression" if pretrained.config.is_regression else "classification"


def introduction(pretrained: Pretrained) -> str:
    count = sum(tensor.numel() for tensor in pretrained.tensors.values())
    family = family_of(pretrained.config)
    if not family.predicts_real_tables:
        first_sentence = (family.__doc__ or "").partition("\n")[0]
        return f"{first_sentence} It has {count:,} parameters."
    predicted = "the labels"
    if pretrained.config.is_regression:
        predicted = f"{pretrained.config.num_quantiles} quantiles of the labels"
    return (
        f"A TabICL-style tabular foundation model for {task_of(pretrained)}. It reads a table with some labeled rows "
        f"and predicts {predicted} of the remaining rows in one forward pass, without being trained on that table. It "
        f"has {count:,} parameters and was pretrained with `{LIBRARY}`."
    )


def usage(pretrained: Pretrained) -> str:
    plugins_named = plugins_argument(pretrained).replace("'", '"')
    family = family_of(pretrained.config)
    if not family.predicts_real_tables:
        text = f"""## Use

```python
from tabicl_train.prediction.export import load_network

network = load_network("FOLDER"{plugins_named})  # {family.__module__} describes its input and output
```"""
        return text + plugin_sentences(pretrained)
    if pretrained.config.is_regression:
        kind = "Regressor"
        result = "means"
        method = "predict"
    else:
        kind = "Classifier"
        result = "probabilities"
        method = "predict_proba"
    text = f"""## Use

```python
from huggingface_hub import snapshot_download
from tabicl_train import TabICL{kind}

folder = snapshot_download("OWNER/NAME")  # or the path of a copy of this folder
{kind.lower()} = TabICL{kind}(folder{plugins_named}).fit(X, y)
{result} = {kind.lower()}.{method}(queries)
```

The package `{LIBRARY}` is needed, and `huggingface_hub` for the download. X may be an array or a data frame, with
numbers, strings, categories, booleans, times and missing values."""
    beyond = beyond_public(pretrained.config)
    if beyond:
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
    if origin["uncommitted_changes"]:
        commit += " with uncommitted changes"
    command = None
    if origin["command"]:
        command = f"`tabicl-train {shlex.join(origin['command'])}`"
    facts = {
        "run": origin["run"],
        "weights": f"{KINDS[origin['weights']]}, after step {origin['step']:,} of {origin['steps']:,}",
        "started from": config["init_weights"],
        "commit": commit,
        "seed": config["seed"],
        "objective": objective_in_words(config.get("objective")),
        "auxiliary losses": weighted_names(config.get("auxiliary_losses") or {}),
        "optimizer": config["optimizer"]["name"],
        "precision": config["trainer"]["precision"],
        "command": command,
    }
    fact_rows = [(name, value) for name, value in facts.items() if value is not None]

    stages = config["curriculum"]["stages"]
    stage_rows = []
    has_mix = sets_mix(origin)
    for name, done in begun_stages(origin).items():
        stage = stages[name]
        steps = f"{done:,}"
        if done < stage["steps"]:
            steps += f" of {stage['steps']:,}"
        row = [
            name,
            steps,
            stage["tables"],
            interval(stage["rows"]),
            interval(stage["train_share"]),
            interval(stage["features"]),
            f"{stage['learning_rate']:g}, {stage['schedule']}",
        ]
        if has_mix:
            row.append(weighted_names(stage.get("mix") or {}) or "the weights of the components")
        stage_rows.append(row)
    header = ["stage", "steps", "tables per step", "rows", "labeled share", "features", "learning rate"]
    if has_mix:
        header.append("mixture")
    return "\n\n".join(
        [
            "## Training",
            fact_table(["", ""], fact_rows),
            fact_table(header, stage_rows),
            "All settings of the run are stored with the weights.",
        ]
    )


def begun_stages(origin: dict) -> dict[str, int]:
    """Return the steps of the stages that have begun, by name, in order."""
    stages = origin["config"]["curriculum"]["stages"]
    return steps_of_stages({name: stage["steps"] for name, stage in stages.items()}, origin["step"])


def sets_mix(origin: dict) -> bool:
    """Whether a stage that has begun has shares of its own of the components of a mixture."""
    stages = origin["config"]["curriculum"]["stages"]
    return any(stages[name].get("mix") for name in begun_stages(origin))


def objective_in_words(objective: dict | None) -> str | None:
    """Describe an objective by its name and its options; None for the network's own."""
    if objective is None:
        return None
    options = [f"{key}={value}" for key, value in objective.items() if key != "name"]
    text = f"`{objective['name']}`"
    return f"{text} with {', '.join(options)}" if options else text


def weighted_names(weights: dict[str, float]) -> str | None:
    """List names with their weights; None without any."""
    return ", ".join(f"`{name}` {weight:g}" for name, weight in weights.items()) or None


def data(origin: dict) -> str:
    prior = origin["config"]["prior"]
    text = f"## Data\n\nAll training tables were drawn from the prior `{prior['name']}`"
    if origin["stream_version"] is not None:
        text += f" (version {origin['stream_version']} of the stream of tables)"
    options = [(f"`{key}`", f"`{value}`") for key, value in prior.items() if key != "name"]
    if not options:
        return f"{text}."
    text += " with these options"
    if sets_mix(origin):
        text += ", but with the mixtures of the stages above in place of the weights of `components`"
    return f"{text}:\n\n{fact_table(['option', 'value'], options)}"


def validation(pretrained: Pretrained) -> str:
    """Return the section about the last validation before the weights were stored."""
    origin = pretrained.origin
    rows = origin["validation"]
    data = "on validation tables of the prior and on scikit-learn's bundled data sets"
    score_names: tuple[str, ...]
    if pretrained.config.is_regression:
        score_names = NUMBER_SCORES
        remarks = f" Losses and RMSE are in standard deviations of the target. {COVERAGE}"
    else:
        score_names = CLASS_SCORES
        remarks = ""
    columns = ["data", "rows", *(name for name in score_names if name not in ("guess_loss", "possible"))]
    if any("possible" in row for row in rows):
        columns.append("possible")
        data += ", and on probes, with the ROC AUC or R2 that is possible"
    if any(row.get("trained_range") == OUTSIDE for row in rows):
        columns.append("trained_range")
    which = f"After step {rows[0]['step']:,}"
    if origin["weights"] not in ("trained", "best"):
        which += ", of the weights as trained rather than these"
    cells = [[row.get(column, "") for column in columns] for row in rows]
    return f"## Validation\n\n{which}, {data}.{remarks}\n\n{fact_table(columns, cells)}"


def evaluation(pretrained: Pretrained) -> str:
    """Return the section about the scores of `tabicl-evaluate`; "" if the run has none."""
    rows = pretrained.origin["evaluation"]
    if not rows:
        return ""
    remarks = ""
    if pretrained.config.is_regression:
        remarks = f" An R2 below 0 counts as 0; `pinball` is in standard deviations of the target. {COVERAGE}"
    scored = "`weights` are those that were scored" if "weights" in rows[0] else "perhaps of another step of the run"
    if "n_estimators" in rows[0]:
        scored += ", `n_estimators` the members of the ensemble"
    return (
        f"## Evaluation\n\nMeans over tasks of real data, from `tabicl-evaluate`; {scored}. "
        f"`{THIS_MODEL}` is the pretrained network.{remarks}\n\n"
        f"{fact_table(list(rows[0]), [row.values() for row in rows])}"
    )


def model_index(name: str, pretrained: Pretrained, scores: str) -> str:
    """Return the mean score as metadata of the card, from the run's means or else the section `scores`; "" without.

    Means of other weights, or of unknown ones, are on the card, but no metadata.
    """
    score, title = ("r2", "R2") if pretrained.config.is_regression else ("roc_auc", "ROC AUC")
    means = None
    for row in pretrained.origin["evaluation"]:
        is_inside = row["method"] == THIS_MODEL and row["trained_range"] == INSIDE
        if is_inside and row.get("weights") == pretrained.name:
            means = (row["tasks"], f"{row[score]:.4f}")
    if sentence := re.search(rf"mean {title} ([\d.]+) on (\d+) real tasks", scores):
        means = (sentence[2], sentence[1])
    if means is None:
        return ""
    tasks, value = means
    quoted = json.dumps(name)  # a name may have characters with a meaning in YAML
    return MODEL_INDEX.format(name=quoted, task=task_of(pretrained), tasks=tasks, score=score, title=title, value=value)


def limits(pretrained: Pretrained) -> str:
    config = pretrained.config
    if config.is_regression:
        lowest = 1 / (config.num_quantiles + 1)
        target = f"Quantiles at levels from {lowest:g} to {1 - lowest:g}; beyond them the tails are a guess."
    else:
        target = f"Up to {config.max_classes} classes in one pass; tables with more are split into several predictions."
    points = [
        f"{task_of(pretrained).capitalize()} only.",
        target,
        "Labeled rows and features are read at once, so memory and time grow with the table.",
    ]
    trained = pretrained.trained_range
    if trained is not None:
        points.append(f"Trained on tables with {trained}. Outside this range the network extrapolates.")
    return "## Limits\n\n" + "\n".join(f"- {point}" for point in points)


def interval(bounds: list) -> str:
    low, high = bounds
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def fact_table(header: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """Format a table in Markdown, with four digits for fractions."""
    return markdown_table(header, ([cell(value) for value in row] for row in rows))


def cell(value: Any) -> str:
    if value == "nan":  # as origin.py writes it
        return ""
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value)
