"""Tables compared with those of the released generator; tests/benchmarks/compare_graph_scm.py is the large version."""

import csv
import runpy
from itertools import islice
from pathlib import Path

import pytest
from scipy.stats import ks_2samp

from priors import build_prior
from priors.inspection.bench import own_tables, released_tables

TABLES, ROWS, MAX_FEATURES = 100, 200, 20
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare_graph_scm.py"
# Statistics of 100 tables of tabicl 2.2.0: it needs 20 CPU seconds to draw them.
RELEASED = {10: "released_statistics.csv", 0: "released_regression_statistics.csv"}  # by max_classes


@pytest.fixture(scope="module", params=RELEASED)
def max_classes(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def released(max_classes) -> list[dict[str, float]]:
    with open(Path(__file__).with_name(RELEASED[max_classes]), newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def statistics():
    return runpy.run_path(str(SCRIPT))["statistics"]


def p_values(one: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, float]:
    """Of the hypothesis that both have the same distribution, for each statistic."""
    # Rounded, as the last bits of a sum tell nothing.
    sides = {name: ([round(row[name], 4) for row in side] for side in (one, other)) for name in other[0]}
    return {name: ks_2samp(*values).pvalue for name, values in sides.items()}


@pytest.mark.slow
def test_released_tables_have_the_statistics_of_the_released_generator(max_classes, released, statistics):
    prior = build_prior("graph_scm", preset="released")
    ours = [statistics(t) for t in islice(own_tables(prior, ROWS, 1, MAX_FEATURES, 1, max_classes), TABLES)]
    assert len(released) == TABLES and released[0].keys() == ours[0].keys()
    p = p_values(ours, released)
    assert min(p.values()) > 1e-4, p  # 37 or 46 statistics: a false alarm in 200 seeds


@pytest.mark.campaign
def test_the_released_generator_draws_the_tables_of_the_file(max_classes, released, statistics):
    pytest.importorskip("tabicl.prior")
    tables = islice(released_tables("graph_scm", ROWS, 1, MAX_FEATURES, 1, max_classes), TABLES)
    drawn = [statistics(table) for table in tables]
    # Its tables differ between two processes from the first on that rounding rejects in one of them.
    assert min(p_values(drawn, released).values()) > 1e-4
