"""From a plan to raw columns, node by node."""

import numpy as np
import pytest
import torch
from graph_draws import columns_of, draw_plans, draw_points, draw_scalars
from scipy.stats import kstest

from priors import TableSpec
from priors.finish import Rejected
from priors.graph.converters import convert_numeric
from priors.graph.functions import Linear
from priors.graph.nodes import TARGET, check_classes, combine, compute_node, execute_plan, scale_features
from priors.graph.scalars import Weights
from priors.random import rng_at


def test_combinations():
    a, b = draw_points(2, 40, 1), draw_points(2, 40, 2)
    torch.testing.assert_close(combine("sum", a, b), a + b)
    torch.testing.assert_close(combine("product", a, b), a * b)
    torch.testing.assert_close(combine("max", a, b), torch.where(a > b, a, b))
    torch.testing.assert_close(combine("logsumexp", a, b), (a.exp() + b.exp()).log())
    b[0, 3] = torch.nan
    assert combine("logsumexp", a, b)[0, 3].isnan() and combine("logsumexp", b, a)[0, 3].isnan()


def test_nodes_combine_functions_of_their_parents():
    values = {0: draw_points(2, 40, 1), 3: draw_points(5, 40, 2)}
    seen = set()
    for plan in draw_plans(60):
        for node in plan.nodes:
            if node.parents:
                seen.add(node.combine)
    assert seen == {"concat", "sum", "product", "max", "logsumexp"}
    node = next(node for plan in draw_plans(60) for node in plan.nodes if node.parents)
    node.parents, node.combine = [0, 3], "max"
    node.functions = [Linear.draw(draw_scalars(i), n, 4, 40) for i, n in enumerate((2, 5))]
    noise = rng_at("c")
    expected = torch.maximum(node.functions[0](values[0], noise), node.functions[1](values[3], noise))
    torch.testing.assert_close(compute_node(node, values, 40, rng_at("c")), expected)
    node.combine, node.functions = "concat", [Linear.draw(draw_scalars(2), 7, 4, 40)]
    expected = node.functions[0](torch.cat([values[0], values[3]]), rng_at("c"))
    torch.testing.assert_close(compute_node(node, values, 40, rng_at("c")), expected)


def test_nodes_are_standardized_weighted_and_of_unit_norm():
    weights = Weights(4, np.array([1.0]), np.array([0.5])).compute(rng_at("w"))[0]
    x = draw_points(4, 500) * torch.tensor([[1.0], [30.0], [1e-5], [0.0]]) + 3
    got = x.clone()
    scale_features(got.numpy(), weights)
    z = x.double().numpy()
    z = (z - z.mean(1, keepdims=True)) / (z.std(1, keepdims=True) + 1e-4)
    z *= weights.astype(np.float64)[:, None]
    expected = z / (np.sqrt(np.square(z).sum(0).mean()) + 1e-8)
    assert np.sqrt(np.square(got.double().numpy()).sum(0).mean()) == pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(got[[0, 1, 3]], expected[[0, 1, 3]], atol=1e-3)
    np.testing.assert_allclose(got[2], expected[2], atol=0.05)  # 1e-5 beside 3: float32 rounds it


def test_noise_and_importance_reach_the_children(monkeypatch):
    monkeypatch.setattr("priors.graph.nodes.check_classes", lambda labels: None)
    # The values that a child reads have the root mean square norm of the parent's importance.
    for plan in draw_plans(60, node_noise=True):
        assert all(1e-5 <= node.noise <= 1 for node in plan.nodes)
    norms = {}

    def record(node, values, num_rows, rng):
        for parent in node.parents:
            norms[parent] = values[parent].square().sum(0).mean().sqrt().item()
        return compute_node(node, values, num_rows, rng)

    monkeypatch.setattr("priors.graph.nodes.compute_node", record)
    ratios = []
    for plan in draw_plans(60):
        norms.clear()
        assert all(node.noise == 0 for node in plan.nodes)
        execute_plan(plan)
        for node in plan.nodes:
            if node.index in norms and not node.columns and norms[node.index] > 1e-3:
                ratios.append(norms[node.index] / node.importance)
    # Where all features are nearly constant, the 1e-8 and float32 count.
    assert len(ratios) > 100 and np.mean(np.abs(np.array(ratios) - 1) < 2e-3) > 0.9


@pytest.mark.parametrize("std", [0.01, 1.0])
def test_the_noise_of_a_node_is_normal_with_the_standard_deviation_of_its_plan(std: float, monkeypatch):
    monkeypatch.setattr("priors.graph.nodes.check_classes", lambda labels: None)
    read = {}  # what children read

    def record(node, values, num_rows, rng):
        read.update({index: value.clone() for index, value in values.items()})
        return compute_node(node, values, num_rows, rng)

    monkeypatch.setattr("priors.graph.nodes.compute_node", record)
    added = []
    for plan in draw_plans(30, TableSpec(400, 200, 4)):
        first = plan.nodes[0]  # the random numbers before its noise are the same with and without noise
        if any(first.index in node.parents for node in plan.nodes):
            drawn = []
            for noise in (0.0, std):
                first.noise = noise
                execute_plan(plan)
                drawn.append(read[first.index].double() / first.importance)
            added.append((drawn[1] - drawn[0]).flatten().numpy())
    assert len(added) > 10
    assert kstest(np.concatenate(added) / std, "norm").pvalue > 1e-3


def test_the_scale_of_node_noise_is_log_uniform_from_1e_5_to_1():
    scales = np.log10([plan.nodes[0].noise for plan in draw_plans(300, node_noise=True)])
    assert -5 <= scales.min() < -4.9 and -0.1 < scales.max() <= 0 and scales.mean() == pytest.approx(-2.5, abs=0.3)


def test_a_numeric_target_is_its_column_and_the_others_are_the_features(monkeypatch):
    converted = {}

    def record(x, converters):
        raw, flow = convert_numeric(x, converters)
        converted.update({id(converter): column.clone() for converter, column in zip(converters, raw, strict=True)})
        return raw, flow

    monkeypatch.setattr("priors.graph.nodes.convert_numeric", record)
    for plan in draw_plans(30, TableSpec(60, 30, 8, max_classes=0)):
        columns, target = execute_plan(plan)
        assert columns.shape == (60, 8) and target.shape == (60,) and target.dtype == torch.float32
        for _, column in columns_of(plan):
            if id(column.converter) in converted:
                drawn = target if column.index == TARGET else columns[:, column.index]
                assert torch.equal(drawn, converted[id(column.converter)])
        assert any(id(column.converter) in converted for _, column in columns_of(plan) if column.index == TARGET)


def test_tables_whose_labels_cannot_be_split_are_rejected_at_the_target():
    for labels in ([1, 1, 1, 1], [0, 0, 0, 2], [0, 1]):
        with pytest.raises(Rejected, match="split"):
            check_classes(torch.tensor(labels))
    check_classes(torch.tensor([0, 0, 3, 3, 3]))
    for plan in draw_plans(30):
        holders = [TARGET in [c.index for c in n.columns] for n in plan.nodes]
        before = {n.index for n in plan.nodes[: holders.index(True) + 1]}
        needed = {plan.nodes[holders.index(True)].index}
        for node in reversed(plan.nodes):
            if node.index in needed:
                needed.update(node.parents)
        assert before == needed
