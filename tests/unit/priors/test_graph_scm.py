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
        (20000, 4, {}),
        (80, 6, {"node_noise": True}),
    ],
)
def test_tables_of_any_size(num_rows: int, num_features: int, options: dict):
    spec = TableSpec(num_rows, num_rows // 2, num_features)
    prior = build_prior("graph_scm", **options)
    for seed in range(3):
        table = prior.sample(spec, seed)
        assert table.X.shape[0] == num_rows and 1 <= table.X.shape[1] <= num_features and table.X.isfinite().all()


def test_the_presets_differ():
    assert build_prior("graph_scm").preset == "corrected"
    purity, warps = {}, {}
    for preset in PRESETS:
        plans = [build_prior("graph_scm", preset=preset).plan(SPEC, (seed,)) for seed in range(100)]
        kinds = [[type(f).__name__ for node in plan.nodes for f in node.functions] for plan in plans]
        # share of the commonest kind of function in a large plan
        purity[preset] = np.mean([max(map(own.count, own)) / len(own) for own in kinds if len(own) >= 12])
        converters = [column.converter for plan in plans for node in plan.nodes for column in node.columns]
        warps[preset] = {c.warp_flow for c in converters if isinstance(c, Numeric) and c.mode == "warp"}
    # choices are independent, or share probabilities
    assert purity["released"] < 0.4 < 0.45 < purity["corrected"]
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
