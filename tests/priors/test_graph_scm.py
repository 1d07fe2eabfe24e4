import numpy as np
import pytest
import torch

from priors import PriorError, TableSpec, build_prior
from priors.graph import nodes, predictability
from priors.graph.converters import Numeric

SPEC = TableSpec(num_rows=80, train_size=40, num_features=6)
PRESETS = ("corrected", "released")


def check_table(table, spec: TableSpec):
    assert table.X.dtype == torch.float32 and table.y.dtype == torch.int64
    assert table.X.shape[0] == spec.num_rows and 1 <= table.X.shape[1] <= spec.num_features
    assert torch.isfinite(table.X).all() and table.X.abs().max() <= 100
    np.testing.assert_allclose(table.X.double().mean(0), 0, atol=1e-3)
    assert table.train_size == spec.train_size
    train, query = table.y[: spec.train_size].unique(), table.y[spec.train_size :].unique()
    assert torch.equal(train, query) and len(train) >= 2
    assert 0 <= train.min() and train.max() < table.num_classes <= spec.max_classes


@pytest.mark.parametrize(
    ("num_rows", "num_features", "options"),
    [
        (100, 1, {}),
        (100, 2, {"preset": "released"}),
        (100, 100, {}),
        (100, 100, {"preset": "released"}),
        (20, 4, {}),
        (20000, 4, {}),
        (80, 6, {"min_nodes": 1, "max_nodes": 1, "node_noise": True}),
        (80, 6, {"min_nodes": 32, "max_nodes": 32, "node_noise": True}),
    ],
)
def test_tables_of_any_size(num_rows: int, num_features: int, options: dict):
    spec = TableSpec(num_rows, num_rows // 2, num_features)
    prior = build_prior("graph_scm", **options)
    for seed in range(3):
        check_table(prior.sample(spec, seed), spec)


def test_the_classes_are_capped():
    spec = TableSpec(num_rows=60, train_size=30, num_features=3, max_classes=2)
    assert {build_prior("graph_scm").sample(spec, seed).num_classes for seed in range(8)} == {2}


def test_the_presets_differ():
    assert build_prior("graph_scm").preset == "corrected"
    purity, warps = {}, {}
    for preset in PRESETS:
        plans = [build_prior("graph_scm", preset=preset).plan(SPEC, (seed,)) for seed in range(100)]
        kinds = [[f.kind for node in plan.nodes for f in node.functions] for plan in plans]
        # share of the commonest kind of function in a large plan
        purity[preset] = np.mean([max(map(own.count, own)) / len(own) for own in kinds if len(own) >= 12])
        converters = [column.converter for plan in plans for node in plan.nodes for column in node.columns]
        warps[preset] = {c.warp_flow for c in converters if isinstance(c, Numeric) and c.mode == "warp"}
    # choices are independent, or share probabilities
    assert purity["released"] < 0.4 < 0.45 < purity["corrected"]
    assert warps == {"released": {True}, "corrected": {False}}


@pytest.mark.parametrize(("reason", "spoil"), [("nan", "columns"), ("split", "labels"), ("constant", "constant")])
def test_spoiled_draws_are_rejected_and_counted(reason: str, spoil: str, monkeypatch):
    calls = []
    execute_plan = nodes.execute_plan

    def spoiled(plan):
        columns, labels = execute_plan(plan)
        calls.append(plan.address)
        if len(calls) <= 3:
            if spoil == "columns":
                columns = columns.clone()
                columns[5, 2] = float("nan")
            elif spoil == "constant":
                columns = torch.ones_like(columns)
                labels = torch.arange(len(labels)) % 2
            else:
                labels = torch.zeros_like(labels)
        elif spoil == "constant":
            columns[:, 0] = torch.arange(len(columns))
        return columns, labels

    monkeypatch.setattr(nodes, "execute_plan", spoiled)
    monkeypatch.setattr(nodes, "check_classes", lambda labels: None)
    if spoil == "columns":
        monkeypatch.setattr("priors.finish.split_rows", lambda *a: None)
    table = build_prior("graph_scm", filter_unpredictable_tables=False).sample(SPEC, 5)
    assert table.rejections[reason] >= 3
    assert table.rejections.total() == len(calls) - 1
    assert calls == [(5, attempt) for attempt in range(len(calls))]


def test_a_request_that_is_always_rejected_ends_with_an_error_that_names_the_reasons(monkeypatch):
    monkeypatch.setattr("priors.prior.MAX_REJECTIONS", 5)
    monkeypatch.setattr(nodes, "execute_plan", lambda plan: (torch.randn(80, 6), torch.zeros(80, dtype=torch.long)))
    with pytest.raises(PriorError, match="split 5x"):
        build_prior("graph_scm").sample(SPEC, 0)


def test_the_filter_of_unpredictable_tables_rejects_some_and_is_an_option(monkeypatch):
    counts = [build_prior("graph_scm").sample(SPEC, seed).rejections["unpredictable"] for seed in range(20)]
    assert sum(counts) > 2
    calls = []
    monkeypatch.setattr(predictability, "check_predictability", lambda *arguments: calls.append(arguments))
    build_prior("graph_scm", filter_unpredictable_tables=False).sample(SPEC, 0)
    assert calls == []
    build_prior("graph_scm").sample(SPEC, 0)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "original"}, "preset is 'original'; it must be one of corrected, released"),
        ({"min_nodes": 0}, "min_nodes is 0"),
        ({"min_nodes": 9, "max_nodes": 4}, "min_nodes is 9, max_nodes is 4"),
        ({"max_cardinality": 1}, "max_cardinality is 1; at least 2"),
    ],
)
def test_wrong_options_are_reported(options: dict, message: str):
    with pytest.raises(PriorError, match=message):
        build_prior("graph_scm", **options)
