"""The model card of an export: a README.md for the Hugging Face Hub, with what is known of the weights."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from tabicl_train.config.monitoring import CLASS_SCORES, INTERVAL, NUMBER_SCORES
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.families import family_of
from tabicl_train.model.public_config import beyond_public
from tabicl_train.prediction.origin import Pretrained

LIBRARY = "tabicl-train"
FRONT_MATTER = """---
license: bsd-3-clause
library_name: {library}
pipeline_tag: tabular-{task}
tags:
- tabular
- tabular-{task}
- tabicl
- in-context-learning
- foundation-model
- synthetic-data
---
"""
KINDS = {
    "trained": "as trained",
    "ema": "exponential moving average",
    "last": "average of the last snapshots",
    "best": "the best by validation",
}


def model_card(name: str, pretrained: Pretrained) -> str:
    """The card of a model with this name, in Markdown; sections of which nothing is known are left out."""
    origin = pretrained.origin
    if not isinstance(pretrained.config, TabICLConfig):
        return card_of_another_family(name, pretrained)
    head = FRONT_MATTER.format(library=LIBRARY, task=task_of(pretrained))
    sections = [f"{head}\n# {name}", introduction(pretrained), usage(pretrained)]
    if origin:
        sections += [training(origin), data(origin), *scores(pretrained)]
    sections.append(limits(pretrained))
    if origin:
        sections.append("## Versions\n\n" + table(["package", "version"], origin["versions"].items()))
    return "\n\n".join(sections) + "\n"


def card_of_another_family(name: str, pretrained: Pretrained) -> str:
    """The card of a network that no estimator of this package runs."""
    family = family_of(pretrained.config)
    use = f"""## Use

```python
from {LIBRARY.replace("-", "_")}.prediction.export import load_network

network = load_network("FOLDER")  # {family.__module__} says what it reads and predicts
```"""
    parameters = sum(tensor.numel() for tensor in pretrained.tensors.values())
    what = f"{(family.__doc__ or '').partition(chr(10))[0]} It has {parameters:,} parameters."
    sections = [f"---\nlibrary_name: {LIBRARY}\n---\n\n# {name}", what, use]
    if origin := pretrained.origin:
        sections += [training(origin), data(origin)]
    return "\n\n".join(sections) + "\n"


def task_of(pretrained: Pretrained) -> str:
    return "regression" if pretrained.config.is_regression else "classification"


def introduction(pretrained: Pretrained) -> str:
    parameters = sum(tensor.numel() for tensor in pretrained.tensors.values())
    quantiles = f"{pretrained.config.num_quantiles} quantiles of "
    return (
        f"A TabICL-style tabular foundation model for {task_of(pretrained)}. It reads a table with some labeled rows "
        f"and predicts {quantiles if pretrained.config.is_regression else ''}the labels of the remaining rows in one "
        f"forward pass, without being trained on that table. It has {parameters:,} parameters and was pretrained with "
        f"`{LIBRARY}`."
    )


def usage(pretrained: Pretrained) -> str:
    kind, result, predict = "Classifier", "probabilities", "predict_proba"
    if pretrained.config.is_regression:
        kind, result, predict = "Regressor", "means", "predict"
    text = f"""## Use

```python
from huggingface_hub import snapshot_download
from tabicl_train import TabICL{kind}

folder = snapshot_download("OWNER/NAME")  # or the path of a copy of this folder
{kind.lower()} = TabICL{kind}(folder).fit(X, y)
{result} = {kind.lower()}.{predict}(queries)
```

The package `{LIBRARY}` is needed. X may be an array or a data frame, with numbers, strings, categories, booleans, times
and missing values."""
    if setting := beyond_public(pretrained.config):
        return text + f" The public client `tabicl` cannot express this network, which has {setting}."
    return text + " `tabicl-export checkpoint=FOLDER output=model.ckpt` writes a file for the public client `tabicl`."


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
    stages = [
        [
            name,
            f"{stage['steps']:,}",
            stage["tables"],
            interval(stage["rows"]),
            interval(stage["train_share"]),
            interval(stage["features"]),
            f"{stage['learning_rate']:g}, {stage['schedule']}",
        ]
        for name, stage in config["curriculum"]["stages"].items()
    ]
    header = ["stage", "steps", "tables per step", "rows", "labeled share", "features", "learning rate"]
    known = [row for row in rows.items() if row[1] is not None]
    return "\n\n".join(
        [
            "## Training",
            table(["", ""], known),
            table(header, stages),
            "`config.json` holds all settings of the run.",
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
    """The sections about validation and evaluation, if there are any."""
    sections, origin = [], pretrained.origin
    low, high = INTERVAL
    coverage = f" `coverage` is that of {high - low:.0%} intervals." if pretrained.config.is_regression else ""
    if rows := origin["validation"]:
        step = rows[0]["step"]
        others = "" if origin["weights"] in ("trained", "best") else ", of the weights as trained rather than these"
        of_task = NUMBER_SCORES if pretrained.config.is_regression else CLASS_SCORES
        columns = ["data", "rows", *(score for score in of_task if score != "guess_loss")]
        units = " Losses and RMSE are in standard deviations of the target." if pretrained.config.is_regression else ""
        sections.append(
            f"## Validation\n\nAfter step {step:,}{others}, on held-out tables of the prior and on scikit-learn's "
            f"bundled data sets.{units}{coverage}\n\n"
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
    """A table in Markdown; fractions with four digits."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def cell(value: Any) -> str:
    if value == "nan":  # as origin.py writes it
        return ""
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return text.replace("|", r"\|").replace("\n", " ")
