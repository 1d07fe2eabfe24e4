"""Weights, and where they come from: the run, commit and step that made them, the recipe, the data and the scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from tabicl_train.config.monitoring import judged_by
from tabicl_train.errors import ConfigError
from tabicl_train.model.families import settings_of
from tabicl_train.prediction.trained_range import TrainedRange, trained_range
from tabicl_train.run_dir.records import Records, number

SCORES = {"roc_auc": ("roc_auc", "log_loss", "accuracy"), "r2": ("r2", "pinball", "coverage")}  # by judged_by


@dataclass(frozen=True)
class Pretrained:
    """Weights of a network.

    origin: what `origin_of` returns; empty where nothing is known, as for files of the public client
    """

    config: Any  # the settings of any family, see model/family.py
    tensors: dict[str, Tensor]
    origin: dict = field(default_factory=dict)

    @property
    def trained_range(self) -> TrainedRange | None:
        """The sizes of the tables that the network was trained on; None if they are not known."""
        sizes = self.origin.get("trained_range")
        return TrainedRange(**{name: tuple(bounds) for name, bounds in sizes.items()}) if sizes else None

    @property
    def summary(self) -> dict[str, str]:
        """The most important entries of the origin as text, for the metadata of file formats."""
        entries: dict[str, Any] = {key: self.origin.get(key) for key in ("run", "step", "weights", "commit")}
        if self.origin.get("uncommitted_changes"):
            entries["commit"] += " with uncommitted changes"
        if trained := self.trained_range:
            entries["trained_range"] = str(trained)
        return {key: str(value) for key, value in entries.items() if value is not None}


def network_config(source: Path, settings: dict) -> Any:
    """The settings of a network from their values in a file; those that it lacks take their defaults.

    Raises ConfigError that names the file if this version of the program does not have all of them.
    """
    try:
        cls = settings_of(settings)
    except ConfigError as error:
        raise ConfigError([f"{source}: {problem}" for problem in error.problems]) from None
    known = {f.name for f in dataclasses.fields(cls)}
    if unknown := [f"model.{name}={value}" for name, value in settings.items() if name not in known]:
        raise ConfigError([f"{source} has {', '.join(unknown)}, which this version of tabicl-train does not have"])
    return cls(**settings)


def origin_of(path: Path, content: dict, weights: str) -> dict:
    """What an export records about the checkpoint of a run: values that JSON can express.

    The scores are read from the folder of the run, if the checkpoint lies in one.
    """
    records = Records(path.resolve().parent.parent)
    config, step = content["config"], content["global_step"]
    made = content.get("run") or start_before(step, records.lines("provenance.jsonl"))
    steps = sum(stage["steps"] for stage in config["curriculum"]["stages"].values())
    run_dir = Path(config["run_dir"])
    origin = {
        # Folders of the machine that trained are nothing to publish.
        "run": run_dir.name if run_dir.is_absolute() else str(run_dir),
        "step": step,
        "steps": min(steps, config["trainer"]["max_steps"] or steps),
        "weights": weights,
        "commit": made.get("commit"),
        "uncommitted_changes": bool(made.get("diff")),
        "command": [word for word in made.get("command", [])[1:] if not word.startswith("run_dir=")],
        "versions": made.get("versions", {}),
        "stream_version": made.get("stream_version"),
        "trained_range": dataclasses.asdict(trained_range(content)),
        "config": {key: value for key, value in config.items() if key != "run_dir"},
        "validation": validation_rows(records, step),
        "evaluation": evaluation_means(records),
    }
    return plain(origin)


def start_before(step: int, starts: list[dict]) -> dict:
    """The last start of a run before a step was done, among the lines of its provenance.jsonl."""
    return next((start for start in reversed(starts) if start["step"] < max(step, 1)), {})


def validation_rows(records: Records, step: int) -> list[dict]:
    """The rows of the last validation up to this step."""
    rows = records.rows("validation.csv")
    last = max((done for row in rows if (done := int(row["step"])) <= step), default=None)
    return [{key: number(value) for key, value in row.items() if value} for row in rows if int(row["step"]) == last]


def evaluation_means(records: Records) -> list[dict]:
    """The mean scores of each method in evaluation.csv, inside and outside the trained range, over splits and tasks. In
    the mean, an R2 below 0 counts as 0."""
    groups: dict[tuple[str, str], dict[str, list[dict]]] = {}
    scores: tuple[str, ...] = ()
    try:
        for row in records.rows("evaluation.csv"):
            scores = SCORES[judged_by(row)]
            tasks = groups.setdefault((row["trained_range"], row["method"]), {})
            tasks.setdefault(row["data"], []).append({score: float(row[score] or math.nan) for score in scores})
    except (KeyError, ValueError):
        return []  # a file of another program

    def of_task(rows: list[dict], score: str) -> float:
        mean = fmean(row[score] for row in rows)
        return max(mean, 0.0) if score == "r2" else mean

    return [
        {"trained_range": position, "method": method, "tasks": len(tasks)}
        | {score: fmean(of_task(rows, score) for rows in tasks.values()) for score in scores}
        for (position, method), tasks in sorted(groups.items(), key=lambda group: group[0][0])
    ]


def plain(value: Any) -> Any:
    """The value with lists for tuples, and text for the numbers that JSON lacks: inf and nan."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
