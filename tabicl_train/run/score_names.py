"""The names in tables of scores, which training and evaluation share: kinds of validation tables, and columns."""

from __future__ import annotations

from collections.abc import Iterable

# Kinds of validation tables.
SYNTHETIC = "synthetic"  # computed by a prior
OWN = "own"  # drawn by a prior from real tables
REAL = "real"  # public data sets
PROBES = "probes"  # constructed tables with a known answer
PROBE = "probe "  # prefix of the names of probes in the column `data` of validation.csv

# Columns of validation.csv, of classification and of regression.
CLASS_SCORES = ("loss", "accuracy", "roc_auc", "guess_loss", "possible")
NUMBER_SCORES = ("loss", "crps", "rmse", "r2", "coverage", "guess_loss", "possible")
INTERVAL = (0.1, 0.9)  # levels of the ends of the interval whose coverage is measured
QUERY_SHARE = 0.3  # of the rows of a real table
REAL_SCORES = {"roc_auc": "ROC AUC", "r2": "R2"}  # the main score on real data and probes, of classes and of numbers


def judged_by(columns: Iterable[str]) -> str:
    """Return which of the REAL_SCORES a table with these columns has; raises ValueError unless it is exactly one."""
    (score,) = REAL_SCORES.keys() & set(columns)
    return score


def validation_kind(data: str) -> str:
    """Return the kind of validation tables, synthetic, own, real or probes, from the cell `data` of validation.csv."""
    if data in (SYNTHETIC, OWN):
        return data
    if data.startswith(PROBE):
        return PROBES
    return REAL  # the name of a data set
