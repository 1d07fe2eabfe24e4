"""Tables compared with those of the released generator; tests/benchmarks/compare_graph_scm.py is the large version."""

import runpy
from itertools import islice
from pathlib import Path

import pytest
from scipy.stats import ks_2samp

from priors import build_prior
from priors.inspection.bench import own_tables, released_tables

pytest.importorskip("tabicl.prior")
TABLES, ROWS, MAX_FEATURES = 100, 200, 20


@pytest.mark.slow
def test_released_tables_have_the_statistics_of_the_released_generator():
    script = Path(__file__).parents[2] / "benchmarks" / "compare_graph_scm.py"
    statistics = runpy.run_path(str(script))["statistics"]
    prior = build_prior("graph_scm", preset="released")
    ours = [statistics(t) for t in islice(own_tables(prior, ROWS, 1, MAX_FEATURES, seed=1), TABLES)]
    theirs = [statistics(t) for t in islice(released_tables("graph_scm", ROWS, 1, MAX_FEATURES, seed=1), TABLES)]
    p = {name: ks_2samp([t[name] for t in ours], [t[name] for t in theirs]).pvalue for name in ours[0]}
    assert min(p.values()) > 1e-4, p  # 37 statistics: a false alarm in 270 seeds
