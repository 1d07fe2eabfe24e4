"""Which weights are the best of a run, and when it ends because there are no better ones any more."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable
from pathlib import Path

import numpy as np
from torch import Tensor

from tabicl_train.config.monitoring import REAL, REAL_SCORES, judged_by, kind_of
from tabicl_train.config.schema import RunConfig, ValidationConfig
from tabicl_train.console import counted
from tabicl_train.errors import ConfigError
from tabicl_train.prediction.export import tensors_of
from tabicl_train.resume import initial_weights
from tabicl_train.run_dir.checkpoint import DamagedCheckpoint, read
from tabicl_train.statistics import Estimate, paired_gain

START, BEST = "checkpoints/start.ckpt", "checkpoints/best.ckpt"  # in the folder of a run


def read_scores(rows: list[dict[str, str]]) -> dict[int, dict[str, float]]:
    """Scores by step, from the rows of validation.csv: the mean losses on held-out tables (`synthetic`, `own`) and the
    mean ROC AUC or R2 on real data (`real`), of those that were measured."""
    by_step: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        kind = kind_of(row["data"])
        score = float(row[judged_by(row) if kind == REAL else "loss"])
        by_step.setdefault(int(row["step"]), {}).setdefault(kind, []).append(score)
    return {
        step: {kind: statistics.fmean(values) for kind, values in scores.items()} for step, scores in by_step.items()
    }


def real_score(rows: list[dict]) -> str:
    """The name of the score by which these rows of validation.csv judge real data."""
    return REAL_SCORES[judged_by(rows[0])]


def is_better(scores: dict[str, float], best: dict[str, float] | None, kind: str) -> bool:
    """Whether scores beat the best ones so far: a lower loss, or a higher score on real data."""
    score, best_score = scores[kind], (best or {}).get(kind, math.nan)
    if not math.isfinite(score) or not math.isfinite(best_score):
        return math.isfinite(score)
    return score > best_score if kind == REAL else score < best_score


def out_of_patience(settings: ValidationConfig, rows: list[dict[str, str]], step: int) -> str | None:
    """Why the run ends after this many steps, judged by the rows of validation.csv up to there; None if it goes on."""
    best, best_step, without = None, None, 0
    for at, scores in read_scores(rows).items():
        if at > step or settings.best not in scores:
            continue
        if is_better(scores, best, settings.best):
            best, best_step, without = scores, at, 0
        else:
            without += 1
    if not settings.patience or without < settings.patience:
        return None
    since = "" if best_step is None else f" since that of step {best_step}"
    return f"no better score in {counted(without, 'validation')}{since} (validation.patience={settings.patience})"


def start_weights(config: RunConfig) -> dict[str, Tensor] | None:
    """The weights that a run with `init_weights` started from: as it has kept them or, if it began with an older
    version of the program, as that file holds them now. None if both are gone."""
    path = Path(config.run_dir, START)
    try:
        return tensors_of(path, read(path), "trained")
    except (DamagedCheckpoint, OSError):
        pass
    try:
        return initial_weights(config)
    except (ConfigError, OSError):
        return None


def paired(before: dict[Hashable, float], after: dict[Hashable, float]) -> Estimate:
    """By how much the mean loss of the same units fell."""
    return paired_gain(np.array(list(before.values())), np.array([after[unit] for unit in before]))
