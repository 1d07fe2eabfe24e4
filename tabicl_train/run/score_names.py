"""The names in tables of scores: kinds of validation tables and columns, which training and evaluation share."""

from __future__ import annotations

from collections.abc import Iterable

# Kinds of validation tables.
SYNTHETIC = "synthetic"  # that a prior computes
OWN = "own"  # that a prior draws from real tables
REAL = "real"  # public ones
PROBES = "probes"  # made tables with a known answer
PROBE = "probe "  # what the names of probes begin with in the column `data` of validation.csv

# Columns of validation.csv; for regression the next ones.
CLASS_SCORES = ("loss", "accuracy", "roc_auc", "guess_loss", "possible")
NUMBER_SCORES = ("loss", "crps", "rmse", "r2", "coverage", "guess_loss", "possible")
INTERVAL = (0.1, 0.9)  # levels of the ends of the interval whose coverage is measured
QUERY_SHARE = 0.3  # of the rows of a real table
REAL_SCORES = {"roc_auc": "ROC AUC", "r2": "R2"}  # the main score on real data and probes, of classes and of numbers


def judged_by(columns: Iterable[str]) -> str:
    """Return which of the REAL_SCORES a table of scores with these columns has; raises ValueError if it is not one."""
    (score,) = REAL_SCORES.keys() & set(columns)  # a ValueError unless it is exactly one
    return score


def validation_kind(data: str) -> str:
    """Return the kind of validation tables, synthetic, own, real or probes, from the cell `data` of validation.csv."""
    if data in (SYNTHETIC, OWN):
        return data
    if data.startswith(PROBE):
        return PROBES
    return REAL  # the name of a data set
