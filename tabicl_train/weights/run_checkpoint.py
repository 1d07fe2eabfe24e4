"""Reads weights from the checkpoint of a run, and their origin from the checkpoint and the run directory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from tabicl_train.doors import plugins
from tabicl_train.errors import ConfigError
from tabicl_train.run.checkpoint import averaged_weights
from tabicl_train.run.records import Records, number
from tabicl_train.run.score_names import judged_by
from tabicl_train.weights.choice import BEST, TRAINED, no_average
from tabicl_train.weights.pretrained import (
    NEEDED,
    Pretrained,
    check_weights,
    checked_origin,
    network_config,
    trained_range,
)

SCORES = {"roc_auc": ("roc_auc", "log_loss", "accuracy"), "r2": ("r2", "pinball", "coverage")}  # by judged_by


def run_weights(path: Path, content: dict, kind: str) -> Pretrained:
    """Return weights from the checkpoint of a run.

    Parameters
    ----------
    path : Path
        The file, which errors name. Scores are read from its run directory.
    content : dict
        Its content.
    kind : str
        trained, best or ema.

    Returns
    -------
    Pretrained

    Raises
    ------
    ConfigError
        If the content is damaged, has no such weights, or needs a plug-in that is not loaded.
    """
    for name in ("model", "curriculum", "trainer"):
        if not isinstance(content["config"].get(name), dict):
            raise ConfigError([f"{path} is not a checkpoint of a run: its config has no {name}"])
    start = content.get("run") or {}
    plugins.require(start.get("plugins", []), NEEDED, path)
    config = network_config(path, content["config"]["model"])
    tensors = tensors_of(path, content, kind)
    check_weights(path, config, tensors)
    return Pretrained(config, tensors, checked_origin(path, origin_of(path, content, kind)))


def tensors_of(path: Path, content: dict, weights: str) -> dict[str, Tensor]:
    """Return the weights of one kind from the content of a run's checkpoint."""
    if weights in (TRAINED, BEST):
        return {name.removeprefix("model."): tensor for name, tensor in content["state_dict"].items()}
    tensors = averaged_weights(content)
    if not tensors:
        raise ConfigError([no_average(path)])
    return tensors


def origin_of(path: Path, content: dict, weights: str) -> dict:
    """Return the origin of the weights in a run's checkpoint as JSON values; exports remove folders from it.

    Parameters
    ----------
    path : Path
        The checkpoint. If it is in a run directory, scores are read from there.
    content : dict
        Its content.
    weights : str
        trained, best or ema.

    Returns
    -------
    dict
        With the keys of `KINDS_OF_ORIGIN`, and `plugins`.
    """
    # How the run was started is in the checkpoint or, if it lacks `run`, in provenance.jsonl.
    records = Records(path.resolve().parent.parent)
    config = content["config"]
    step = content["global_step"]
    start = content.get("run") or start_before(step, records.lines("provenance.jsonl"))
    steps = sum(stage["steps"] for stage in config["curriculum"]["stages"].values())
    origin = {
        "run": str(Path(config["run_dir"])),
        "step": step,
        "steps": min(steps, config["trainer"]["max_steps"] or steps),
        "weights": weights,
        "commit": start.get("commit"),
        "uncommitted_changes": bool(start.get("diff")),
        "command": [word for word in start.get("command", [])[1:] if not word.startswith("run_dir=")],
        "versions": start.get("versions", {}),
        "stream_version": start.get("stream_version"),
        "trained_range": trained_range(content).recorded(config["model"]["max_classes"]),
        "plugins": start.get("plugins", []),
        "config": {key: value for key, value in config.items() if key != "run_dir"},
        "validation": validation_rows(records, step),
        "evaluation": evaluation_means(records),
    }
    return json_values(origin)


def start_before(step: int, starts: list[dict]) -> dict:
    """Return the last start of a run before a step, from the lines of its provenance.jsonl; {} without any."""
    earlier = [start for start in starts if start["step"] < max(step, 1)]
    return earlier[-1] if earlier else {}


def validation_rows(records: Records, step: int) -> list[dict]:
    """Return the rows of the last validation up to this step."""
    rows = records.rows("validation.csv")
    steps = [number(row.get("step", "")) for row in rows]
    last = max((done for done in steps if isinstance(done, int) and done <= step), default=None)
    found = []
    for done, row in zip(steps, rows, strict=True):
        if done == last:
            found.append({key: number(value) for key, value in row.items() if value})
    return found


def evaluation_means(records: Records) -> list[dict]:
    """Return a row of mean scores for each trained range and method in evaluation.csv.

    Each has the weights and the number of ensemble members, if recorded. An R2 below 0 counts as 0.
    """
    import pandas as pd

    rows = records.rows("evaluation.csv")
    if not rows:
        return []
    results = pd.DataFrame(rows)
    scores = list(SCORES[judged_by(results)])
    results[scores] = results[scores].apply(pd.to_numeric)
    # Means over the splits of each task, and then over tasks.
    task_means = results.groupby(["trained_range", "method", "data"], sort=False)[scores].mean()
    if "r2" in scores:
        task_means["r2"] = task_means["r2"].clip(lower=0)
    by_method = task_means.groupby(level=["trained_range", "method"], sort=False)
    means = by_method.mean().reset_index()
    means.insert(2, "tasks", by_method.size().to_numpy())

    # Columns with one value for each method, which earlier versions did not write.
    for column in ("n_estimators", "weights"):
        if column in results:
            means[column] = means["method"].map(results.groupby("method")[column].first())
    if "n_estimators" in means:  # in a column with empty cells, 8 is written as 8.0
        means["n_estimators"] = means["n_estimators"].str.removesuffix(".0")
    return means.sort_values("trained_range", kind="stable").to_dict("records")


def json_values(value: Any) -> Any:
    """Convert tuples to lists, and inf and nan, which JSON lacks, to text."""
    if isinstance(value, dict):
        return {key: json_values(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [json_values(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
