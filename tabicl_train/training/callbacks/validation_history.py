"""Reads validation.csv: the scores of each validation, the best weights, and whether the run ends."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tabicl_train.config.schema import PROBES, REAL, REAL_SCORES, ValidationConfig, judged_by, validation_kind
from tabicl_train.console import counted
from tabicl_train.run.curves import counts_in_means

VALIDATION = "validation.csv"
FALLS = 3  # consecutive falls of the mean score on real data after which a warning is printed

ValidationRow = Mapping[str, Any]  # cells of validation.csv by column, as text or as numbers


@dataclass(frozen=True)
class History:
    """The validations of a run so far.

    Parameters
    ----------
    scores : dict
        Mean scores by optimizer steps done and kind of data: the loss, or ROC AUC or R2 for real data and probes.
    best_step : int or None
        Optimizer steps after which the best weights were saved.
    ended : str or None
        Why the run ends by validation.patience; None if it goes on.
    """

    scores: dict[int, dict[str, float]]
    best_step: int | None
    ended: str | None


def read_history(rows: Iterable[ValidationRow], settings: ValidationConfig, until: int | None = None) -> History:
    """Read rows of validation.csv up to the step `until`."""
    rows = [row for row in rows if until is None or int(row["step"]) <= until]
    scores = read_scores(rows)

    # Count the validations since the best score. Where the tables change, the comparison starts again.
    tables: set[tuple] = set()
    best_score = math.nan
    best_at: int | None = None
    without_better = 0
    for step, scores_of_step in scores.items():
        if settings.best not in scores_of_step:
            continue
        score = scores_of_step[settings.best]
        rows_of_step = [row for row in rows if int(row["step"]) == step]
        tables_of_step = counted_tables(rows_of_step, settings.best)
        if tables_of_step != tables:
            tables = tables_of_step
            best_score = math.nan
            best_at = None
            without_better = 0
        if is_better(score, best_score, settings.best):
            best_score = score
            best_at = step
            without_better = 0
        else:
            without_better += 1

    # Whether the run ends, and which weights were kept.
    ended = None
    if 0 < settings.patience <= without_better:
        since = "" if best_at is None else f" since that of step {best_at}"
        ended = f"no better score in {counted(without_better, 'validation')}{since}"
        ended += f" (validation.patience={settings.patience})"
    best_step = max((int(row["step"]) for row in rows if int(row["is_best"])), default=None)
    return History(scores, best_step, ended)


def read_scores(rows: Iterable[ValidationRow]) -> dict[int, dict[str, float]]:
    """Return the scores of a `History`: means over the sets inside the trained range, by step and kind of data."""
    by_step: dict[int, dict[str, list[float]]] = {}  # by step and kind of data
    for row in rows:
        by_kind = by_step.setdefault(int(row["step"]), {})
        if counts_in_means(row):
            kind = validation_kind(row["data"])
            column = judged_by(row) if kind in (REAL, PROBES) else "loss"
            by_kind.setdefault(kind, []).append(float(row[column]))
    means = {}
    for step, by_kind in by_step.items():
        means[step] = {kind: statistics.fmean(scores) for kind, scores in by_kind.items()}
    return means


def is_better(score: float, best: float, kind: str) -> bool:
    """Whether a score beats the best one so far: a lower loss, or a higher score on real data."""
    if not math.isfinite(score):
        return False
    if not math.isfinite(best):
        return True
    return score > best if kind == REAL else score < best


def is_improvement(rows: list[ValidationRow], rows_of_best: list[ValidationRow], settings: ValidationConfig) -> bool:
    """Whether the rows of a validation beat those of the best weights so far; always if the tables have changed."""
    score = score_of(rows, settings.best)
    best = math.nan
    if counted_tables(rows, settings.best) == counted_tables(rows_of_best, settings.best):
        best = score_of(rows_of_best, settings.best)
    return is_better(score, best, settings.best)


def score_of(rows: list[ValidationRow], kind: str) -> float:
    """Return the score of one validation on this kind of data; NaN if it has none."""
    for scores in read_scores(rows).values():
        return scores.get(kind, math.nan)
    return math.nan


def counted_tables(rows: Iterable[ValidationRow], kind: str) -> set[tuple]:
    """Identify the tables of this kind that count in the means of a validation."""
    # guess_loss distinguishes tables of the same size; it is rounded, since its last digits depend on the machine.
    return {
        (row["data"], int(row["rows"]), f"{float(row['guess_loss'] or 0):.5g}")
        for row in rows
        if validation_kind(row["data"]) == kind and counts_in_means(row)
    }


def real_score(rows: list[ValidationRow]) -> str:
    """Return the name of the main score of these rows on real data and probes."""
    return REAL_SCORES[judged_by(rows[0])]


def falling(scores: dict[int, dict[str, float]], name: str) -> str | None:
    """Return a warning if the score on real data fell in each of the last `FALLS` validations, or None.

    Parameters
    ----------
    scores : dict
        See `History`.
    name : str
        The name of the score in the warning.
    """
    real_scores = [scores_of_step.get(REAL, math.nan) for scores_of_step in scores.values()]
    last = real_scores[-FALLS - 1 :]
    if len(last) <= FALLS or not all(earlier > later for earlier, later in itertools.pairwise(last)):
        return None
    listed = ", ".join(f"{score:.4f}" for score in last)
    return f"the mean {name} on real data fell {FALLS} times in a row: {listed}"
