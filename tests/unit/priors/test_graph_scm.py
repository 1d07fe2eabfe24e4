from collections import Counter

import numpy as np
import pytest

from priors import TableSpec, build_prior, predictability
from priors.graph.converters import Numeric

SPEC = TableSpec(num_rows=80, train_size=40, num_features=6)
PRESETS = ("corrected", "released")


@pytest.mark.parametrize(
    ("num_rows", "num_features", "options"),
    [
        (100, 1, {}),
        (100, 2, {"preset": "released"}),
        (100, 100, {}),
        (100, 100, {"preset": "released"}),
        (20, 4, {}),
        pytest.param(20000, 4, {}, marks=pytest.mark.slow),  # more than a CPU second
        (80, 6, {"node_noise": True}),
    ],
)
def test_tables_of_any_size(num_rows: int, num_features: int, options: dict):
    spec = TableSpec(num_rows, num_rows // 2, num_features)
    prior = build_prior("graph_scm", **options)
    for seed in range(3):
        table = prior.sample(spec, seed)
        assert table.X.shape[0] == num_rows
        assert 1 <= table.X.shape[1] <= num_features
        assert table.X.isfinite().all()


def test_the_presets_differ():
    assert build_prior("graph_scm").preset == "corrected"

    purity = {}  # share of the commonest kind of function in a large plan
    warps = {}
    for preset in PRESETS:
        prior = build_prior("graph_scm", preset=preset)
        plans = [prior.plan(SPEC, (seed,)) for seed in range(100)]
        shares = []
        converters = []
        for plan in plans:
            drawn = list(plan.draw_nodes())
            kinds = Counter(type(function).__name__ for node in drawn for function in node.functions)
            if kinds.total() >= 12:
                shares.append(max(kinds.values()) / kinds.total())
            converters += [column.converter for node in drawn for column in node.columns]
        purity[preset] = np.mean(shares)
        warps[preset] = {c.warp_flow for c in converters if isinstance(c, Numeric) and c.mode == "warp"}

    # choices are independent, or share probabilities
    assert purity["released"] < 0.4
    assert purity["corrected"] > 0.45
    assert warps == {"released": {True}, "corrected": {False}}


def test_the_filter_of_unpredictable_tables_rejects_some_and_is_an_option(monkeypatch):
    counts = [build_prior("graph_scm").sample(SPEC, seed).rejections["unpredictable"] for seed in range(20)]
    assert sum(counts) > 2
    calls = []
    monkeypatch.setattr(predictability, "check_predictability", lambda *arguments: calls.append(arguments))
    build_prior("graph_scm", filter_unpredictable_tables=False).sample(SPEC, 0)
    assert calls == []
    build_prior("graph_scm").sample(SPEC, 0)
    assert len(calls) == 1
