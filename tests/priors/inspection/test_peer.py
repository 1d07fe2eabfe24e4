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
RELEASED = Path(__file__).with_name("released_statistics.csv")


@pytest.fixture(scope="module")
def released() -> list[dict[str, float]]:
    with open(RELEASED, newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def statistics():
    return runpy.run_path(str(SCRIPT))["statistics"]


@pytest.mark.slow
def test_released_tables_have_the_statistics_of_the_released_generator(released, statistics):
    prior = build_prior("graph_scm", preset="released")
    ours = [statistics(t) for t in islice(own_tables(prior, ROWS, 1, MAX_FEATURES, seed=1), TABLES)]
    assert len(released) == TABLES and released[0].keys() == ours[0].keys()
    p = {name: ks_2samp([t[name] for t in ours], [t[name] for t in released]).pvalue for name in ours[0]}
    assert min(p.values()) > 1e-4, p  # 37 statistics: a false alarm in 270 seeds


@pytest.mark.campaign
def test_the_released_generator_draws_the_tables_of_the_file(released, statistics):
    pytest.importorskip("tabicl.prior")
    drawn = [statistics(t) for t in islice(released_tables("graph_scm", ROWS, 1, MAX_FEATURES, seed=1), TABLES)]
    for name in released[0]:  # another CPU rounds differently, and a few tables with it
        assert ks_2samp([t[name] for t in drawn], [t[name] for t in released]).pvalue > 0.5
