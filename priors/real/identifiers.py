"""Columns that tell rows apart and hardly say anything else: identifiers, row numbers, names, texts such as tweets.

They are used like other columns, but a model can learn from them how the rows were ordered or collected, and it learns
nothing from a text that no other row has. So whoever passes them is told.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Sequence

import numpy as np
import pandas as pd

from priors.real.preprocessing import CATEGORY, NUMBER, as_numbers, column_kind, resemblance
from priors.real.tasks import ROWS_TO_TELL, are_names, is_identifier, shortened

# Row numbers that begin at 0 or 1 reach at most twice the number of rows as long as half of the rows are there, so also
# after a split. 30 other whole numbers as small as that are all different in 0.02 % of all tables.
NUMBERS_PER_ROW = 2
# Names of whole numbers only, since there are price indices. pandas calls a column without a name Unnamed: 0.
INDEX = re.compile(r"index|unnamed: \d+", re.IGNORECASE)


class IdentifierWarning(UserWarning):
    """Some columns look like identifiers."""


def identifying_columns(X: pd.DataFrame, kinds: Sequence[str] | None = None) -> dict[Hashable, str]:
    """Return why columns look like identifiers.

    Parameters
    ----------
    X : DataFrame
        The columns.
    kinds : sequence of str, optional
        Their kinds, if they are known; see `column_kind`.

    Returns
    -------
    dict of str
        The reasons by the names of the columns; others are left out.
    """
    reasons = {}
    if kinds is None:
        kinds = [column_kind(column) for _, column in X.items()]
    for (name, column), kind in zip(X.items(), kinds, strict=True):
        reason = None
        if kind == CATEGORY:
            reason = identifying_texts(str(name), column)
        elif kind == NUMBER:
            reason = identifying_numbers(str(name), column, is_alone=X.shape[1] == 1)
        if reason is not None:
            reasons[name] = reason
    return reasons


def identifying_texts(name: str, column: pd.Series) -> str | None:
    """Return why a column of categories looks like an identifier, or None."""
    try:
        distinct = column.nunique()
    except TypeError:
        # Lists and the like have no hash, and `fit` refuses them.
        return None
    if is_identifier(name, distinct, len(column)):
        return "a different value in each row"
    # Ranks that the user has declared.
    if getattr(column.dtype, "ordered", False):
        return None
    if not are_names(distinct, int(column.notna().sum())):
        return None
    texts = column.dropna().astype(object)
    if pd.api.types.infer_dtype(texts) != "string":
        return None
    # Numbers and dates have a warning of their own.
    if resemblance(texts) is not None:
        return None
    return "texts that differ from row to row"


def identifying_numbers(name: str, column: pd.Series, is_alone: bool) -> str | None:
    """Return why a column of numbers looks like an identifier, or None; is_alone: whether there is no other column."""
    numbers = as_numbers(column)
    if np.isnan(numbers).any():
        return None
    is_whole = bool((numbers == np.floor(numbers)).all())
    is_small = is_whole and numbers.min() >= 0 and numbers.max() <= NUMBERS_PER_ROW * len(numbers)
    if len(numbers) < ROWS_TO_TELL:
        are_row_numbers = False
    else:
        is_index = is_whole and INDEX.fullmatch(name) is not None
        are_row_numbers = is_index or (is_small and not is_alone)  # what else would predict?
    # Whether they all differ takes longer to find out than all of the above.
    has_name = is_identifier(name, len(numbers), len(numbers))
    if not (are_row_numbers or has_name) or len(np.unique(numbers)) < len(numbers):
        return None
    return "row numbers" if are_row_numbers else "a different value in each row"


def warn_of_identifiers(X: pd.DataFrame, kinds: Sequence[str]) -> None:
    """Warn of columns that look like identifiers, on behalf of an estimator's `fit`."""
    reasons = identifying_columns(X, kinds)
    if reasons:
        examples = shortened(f"{name!r} ({reason})" for name, reason in reasons.items())
        warnings.warn(
            f"X has columns that look like identifiers: {examples}. They are used like others: numbers by their size "
            "and texts by their alphabetical order, where a text that no labeled row has counts as missing. Leave them "
            "out if they only tell rows apart",
            IdentifierWarning,
            stacklevel=4,  # where `fit` is called
        )
