"""The names in tables of scores: kinds of validation tables and columns, which training and evaluation share."""

from __future__ import annotations

from collections.abc import Iterable

# Kinds of validation tables: synthetic ones of a prior, own ones that a prior draws from real tables, and public ones.
SYNTHETIC, OWN, REAL = "synthetic", "own", "real"

CLASS_SCORES = ("loss", "accuracy", "roc_auc", "guess_loss")  # columns of validation.csv; for regression the next ones
NUMBER_SCORES = ("loss", "crps", "rmse", "r2", "coverage", "guess_loss")
INTERVAL = (0.1, 0.9)  # levels of the ends of the interval whose coverage is measured
QUERY_SHARE = 0.3  # of the rows of a real table
REAL_SCORES = {"roc_auc": "ROC AUC", "r2": "R2"}  # the main score on real data, of classification and of regression


def judged_by(columns: Iterable[str]) -> str:
    """Return which of the REAL_SCORES a table of scores with these columns has; raises ValueError if it is not one."""
    (score,) = REAL_SCORES.keys() & set(columns)
    return score


def kind_of(data: str) -> str:
    """Return the kind of validation tables, synthetic, own or real, from the column `data` of validation.csv."""
    return data if data in (SYNTHETIC, OWN) else REAL
