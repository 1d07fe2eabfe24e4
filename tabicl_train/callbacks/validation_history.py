"""Reads validation.csv: the scores of each validation, the best weights, and whether the run ends."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tabicl_train.config.schema import PROBES, REAL, REAL_SCORES, ValidationConfig, judged_by, kind_of
from tabicl_train.console import counted
from tabicl_train.run_dir.curves import counts

FALLS = 3  # consecutive falls of the mean score on real data after which there is a warning

Row = Mapping[str, Any]  # cells of validation.csv by column, as text or as numbers


@dataclass(frozen=True)
class History:
    """The validations of a run so far."""

    scores: dict[int, dict[str, float]]  # by optimizer steps done and kind of data: mean loss, or ROC AUC or R2
    best_step: int | None  # steps after which the best weights were saved
    ended: str | None  # why the run ends by validation.patience; None if it goes on


def read_history(rows: Iterable[Row], settings: ValidationConfig, until: int | None = None) -> History:
    """Read rows of validation.csv up to the step `until`."""
    rows = [row for row in rows if until is None or int(row["step"]) <= until]
    scores, tables = read_scores(rows), set[tuple]()
    best, since, without = math.nan, "", 0
    for step, of_step in scores.items():
        if settings.best not in of_step:
            continue
        if (scored := tables_of((row for row in rows if int(row["step"]) == step), settings.best)) != tables:
            best, since, without, tables = math.nan, "", 0, scored
        if is_better(of_step[settings.best], best, settings.best):
            best, since, without = of_step[settings.best], f" since that of step {step}", 0
        else:
            without += 1
    ended = None
    if 0 < settings.patience <= without:
        without_better = f"no better score in {counted(without, 'validation')}{since}"
        ended = f"{without_better} (validation.patience={settings.patience})"
    return History(scores, max((int(row["step"]) for row in rows if int(row["is_best"])), default=None), ended)


def read_scores(rows: Iterable[Row]) -> dict[int, dict[str, float]]:
    """Return the scores of a History: means over the sets inside the trained range."""
    by_step: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        of_step = by_step.setdefault(int(row["step"]), {})
        if counts(row):
            kind = kind_of(row["data"])
            score = float(row[judged_by(row) if kind in (REAL, PROBES) else "loss"])
            of_step.setdefault(kind, []).append(score)
    return {
        step: {kind: statistics.fmean(values) for kind, values in scores.items()} for step, scores in by_step.items()
    }


def is_better(score: float, best: float, kind: str) -> bool:
    """Whether a score beats the best one so far: a lower loss, or a higher score on real data."""
    if not math.isfinite(score) or not math.isfinite(best):
        return math.isfinite(score)
    return score > best if kind == REAL else score < best


def is_improvement(rows: list[Row], of_best: list[Row], settings: ValidationConfig) -> bool:
    """Whether the rows of a validation beat those of the best weights so far; always if the tables have changed."""
    score, best = (next(iter(read_scores(some).values()), {}).get(settings.best, math.nan) for some in (rows, of_best))
    same = tables_of(rows, settings.best) == tables_of(of_best, settings.best)
    return is_better(score, best if same else math.nan, settings.best)


def tables_of(rows: Iterable[Row], kind: str) -> set[tuple]:
    """Identify the tables of this kind that count in the rows of a validation."""
    # guess_loss distinguishes tables of the same size; it is rounded, since its last digits depend on the machine.
    return {
        (row["data"], int(row["rows"]), f"{float(row['guess_loss'] or 0):.5g}")
        for row in rows
        if kind_of(row["data"]) == kind and counts(row)
    }


def real_score(rows: list[Row]) -> str:
    """Return the name of the main score of these rows on real data and probes."""
    return REAL_SCORES[judged_by(rows[0])]


def falling(scores: dict[int, dict[str, float]], name: str) -> str | None:
    """Return a warning if the score on real data, of this name, fell in each of the last validations, or None."""
    last = [score.get(REAL, math.nan) for score in scores.values()][-FALLS - 1 :]
    if len(last) <= FALLS or not all(a > b for a, b in itertools.pairwise(last)):
        return None
    return f"the mean {name} on real data fell {FALLS} times in a row: {', '.join(f'{v:.4f}' for v in last)}"
