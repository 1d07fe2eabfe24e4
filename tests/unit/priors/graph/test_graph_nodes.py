"""The causal graph: its plan, and from the plan to raw columns, node by node."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from graph_draws import PRESETS, SPEC, columns_of, draw_plans, draw_points, draw_scalars
from scipy.stats import kstest

from priors import TableSpec
from priors.finish import Rejected
from priors.graph import nodes
from priors.graph.converters import Numeric
from priors.graph.functions import Linear
from priors.graph.nodes import TARGET, ancestors, combine, compute_node, draw_parents, execute_plan
from priors.graph.scalars import Weights
from priors.random import rng_at


@cache
def plans(preset: str, max_classes: int = 10) -> list:
    return draw_plans(200, replace(SPEC, max_classes=max_classes), preset=preset)


@pytest.fixture
def any_labels(monkeypatch):
    """Execute tables whose labels cannot be split, too."""
    monkeypatch.setattr(nodes, "split_rows", lambda *arguments: None)


# The plan


def test_edges_have_the_cauchy_probability():
    graphs = []
    for seed in range(2000):
        parents = draw_parents(rng_at("edges", seed), 6)
        assert all(parent < child for child, of_child in enumerate(parents) for parent in of_child)
        adjacent = np.zeros((6, 6), bool)  # [child, parent]
        for child, of_child in enumerate(parents):
            adjacent[child, of_child] = True
        graphs.append(adjacent)
    edges = np.array(graphs)
    np.testing.assert_allclose(edges.mean(0)[np.tril_indices(6, -1)], 0.5, atol=0.04)  # A + B + C is symmetric


def test_ancestors_are_the_transitive_closure():
    for seed in range(50):
        parents = draw_parents(rng_at(seed), 9)
        reach = np.eye(9, dtype=int)
        for child, of_child in enumerate(parents):
            for parent in of_child:
                reach[child] |= reach[parent]
        masks = ancestors(parents)
        assert [[mask >> i & 1 for i in range(9)] for mask in masks] == reach.tolist()


def reach_of(plan) -> dict[int, set[int]]:
    """Each computed node with its ancestors and itself; a parent that is not computed before is a KeyError."""
    reach: dict[int, set[int]] = {}
    for node in plan.nodes:
        reach[node.index] = {node.index}.union(*(reach[parent] for parent in node.parents))
    return reach


def is_connected(plan) -> bool:
    reach = reach_of(plan)
    target = next(reach[node.index] for node, column in columns_of(plan) if column.index == TARGET)
    return any(target & reach[node.index] for node, column in columns_of(plan) if column.index != TARGET)


@pytest.mark.parametrize("max_classes", [10, 0])
@pytest.mark.parametrize("preset", PRESETS)
def test_plans_hold_what_the_columns_need_the_target_first(preset: str, max_classes: int):
    spare = []  # columns of a node that no feature uses
    modes = set()
    pruned = 0
    for plan in plans(preset, max_classes):
        # The nodes are those that the columns need, and those of the target come first.
        reach = reach_of(plan)
        needed = set()
        for node in plan.nodes:
            if node.columns:
                needed |= reach[node.index]
        assert set(reach) == needed
        has_target = [TARGET in [column.index for column in node.columns] for node in plan.nodes]
        position = has_target.index(True)
        assert {node.index for node in plan.nodes[: position + 1]} == reach[plan.nodes[position].index]
        assert is_connected(plan)
        pruned += len(reach) < len(plan.parents)

        assert sorted(column.index for _, column in columns_of(plan)) == [TARGET, *range(8)]
        for node in plan.nodes:
            assert_valid_node(node)
            spare.append(node.width - sum(column.converter.width for column in node.columns))
        (target,) = [column.converter for _, column in columns_of(plan) if column.index == TARGET]
        if isinstance(target, Numeric):
            modes.add((target.mode, target.warp_flow))
        else:
            modes.add(target.cardinality)
        assert_readable(plan, max_classes)

    sizes = [len(plan.parents) for plan in plans(preset, max_classes)]
    assert min(sizes) == 2
    assert 25 < max(sizes) <= 32
    assert pruned > 100
    assert min(spare) == 1
    assert 25 < max(spare) <= 31
    if max_classes:
        assert modes == set(range(2, 11))
    else:
        assert modes == {("identity", False), ("warp", preset == "released")}


def assert_valid_node(node) -> None:
    is_numeric = [isinstance(column.converter, Numeric) for column in node.columns]
    assert is_numeric == sorted(is_numeric, reverse=True)
    assert node.weights.size == node.width
    assert 0.1 <= node.importance <= 10
    assert node.noise == 0
    assert (node.points is not None) == (not node.parents)
    if node.combine == "concat" and node.parents:
        assert len(node.functions) == 1
    elif node.parents:
        assert len(node.functions) == len(node.parents)


def assert_readable(plan, max_classes: int) -> None:
    """The text has a line for the table, each node and each column, and no memory addresses or arrays."""
    text = str(plan)
    lines = text.splitlines()
    target = f"{plan.num_classes} classes;" if max_classes else "numeric target;"
    assert f"60 rows, 8 features, {target}" in lines[0]
    assert len(lines) == 1 + len(plan.nodes) + 9
    for name in ("y", "x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7"):
        assert f"    {name}: " in text
    for part in ("object at", "array(", "Tree("):
        assert part not in text


def test_options_of_the_graph():
    unconnected = [plan for plan in draw_plans(200, filter_unpredictable_graphs=False) if not is_connected(plan)]
    assert 6 < len(unconnected) < 170


# Execution


def test_combinations():
    a, b = draw_points(2, 40, 1), draw_points(2, 40, 2)
    expected = {"sum": a + b, "product": a * b, "max": np.where(a > b, a, b), "logsumexp": np.logaddexp(a, b)}
    for how, values in expected.items():
        np.testing.assert_allclose(combine(how, a, b), values, rtol=1e-5, atol=1e-6)
    b[0, 3] = np.nan
    for one, other in ((a, b), (b, a)):
        assert np.isnan(combine("logsumexp", one, other)[0, 3])


def test_nodes_combine_functions_of_their_parents():
    with_parents = [node for plan in draw_plans(60) for node in plan.nodes if node.parents]
    assert {node.combine for node in with_parents} == {"concat", "sum", "product", "max", "logsumexp"}

    values = {0: draw_points(2, 40, 1), 3: draw_points(5, 40, 2)}
    node = with_parents[0]
    node.parents = [0, 3]
    node.combine = "max"
    of_first = Linear.draw(draw_scalars(0), 2, 4, 40)
    of_second = Linear.draw(draw_scalars(1), 5, 4, 40)
    node.functions = [of_first, of_second]
    rng = rng_at("c")
    expected = np.maximum(of_first(values[0], rng), of_second(values[3], rng))
    np.testing.assert_allclose(compute_node(node, values, 40, rng_at("c")), expected, rtol=1e-5)

    node.combine = "concat"
    of_both = Linear.draw(draw_scalars(2), 7, 4, 40)
    node.functions = [of_both]
    expected = of_both(np.concatenate([values[0], values[3]]), rng_at("c"))
    np.testing.assert_allclose(compute_node(node, values, 40, rng_at("c")), expected, rtol=1e-5)


def test_nodes_are_standardized_weighted_and_of_unit_norm():
    weights = Weights(4, np.array([1.0]), np.array([0.5])).compute(rng_at("w"))[0]
    x = draw_points(4, 500) * np.array([[1.0], [30.0], [1e-5], [0.0]], np.float32) + 3
    got = x.copy()
    nodes.scale_features(got, weights)
    z = x.astype(np.float64)
    z = (z - z.mean(1, keepdims=True)) / (z.std(1, keepdims=True) + 1e-4)
    z *= weights.astype(np.float64)[:, None]
    expected = z / (np.sqrt(np.square(z).sum(0).mean()) + 1e-8)
    assert np.sqrt(np.square(got.astype(np.float64)).sum(0).mean()) == pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(got[[0, 1, 3]], expected[[0, 1, 3]], atol=1e-3)
    np.testing.assert_allclose(got[2], expected[2], atol=0.05)  # 1e-5 beside 3: float32 rounds it


@pytest.fixture
def read(monkeypatch, any_labels) -> dict[int, np.ndarray]:
    """What the children of each node read."""
    values_read = {}

    def record(node, values, num_rows, rng):
        values_read.update({parent: values[parent].copy() for parent in node.parents})
        return compute_node(node, values, num_rows, rng)

    monkeypatch.setattr(nodes, "compute_node", record)
    return values_read


@pytest.mark.parametrize("std", [0.01, 1.0])
def test_the_noise_of_a_node_is_normal_with_the_standard_deviation_of_its_plan(std: float, read):
    added = []
    for plan in draw_plans(30, TableSpec(400, 200, 4)):
        first = plan.nodes[0]  # the random numbers before its noise are the same with and without noise
        if any(first.index in node.parents for node in plan.nodes):
            drawn = []
            for first.noise in (0.0, std):
                execute_plan(plan)
                drawn.append(read[first.index].astype(np.float64) / first.importance)
            added.append((drawn[1] - drawn[0]).flatten())
    assert len(added) > 10
    assert kstest(np.concatenate(added) / std, "norm").pvalue > 1e-3


def test_a_plan_that_is_read_before_it_is_executed_is_the_same():
    tables = 0
    for read, executed in zip(draw_plans(12), draw_plans(12), strict=True):
        text = str(read)
        try:
            expected = execute_plan(executed)
        except Rejected:
            with pytest.raises(Rejected):
                execute_plan(read)
        else:
            assert all(map(np.array_equal, execute_plan(read), expected))
            tables += 1
        assert str(executed) == text
        assert executed == read
    assert tables > 3


def test_labels_that_cannot_be_split_are_rejected_before_other_nodes_are_computed(monkeypatch):
    computed = []

    def record(node, *arguments):
        computed.append(node.index)
        return compute_node(node, *arguments)

    monkeypatch.setattr(nodes, "compute_node", record)
    rejected = 0
    spec = TableSpec(num_rows=20, train_size=10, num_features=8)
    for plan in draw_plans(40, spec):
        computed.clear()
        try:
            _, labels = execute_plan(plan)
        except Rejected as reason:
            assert reason.reason == "split"
            assert len(plan.drawn) == len(computed)
            assert TARGET in [column.index for column in plan.drawn[-1].columns]
            rejected += 1
        else:
            assert set(labels[:10]) == set(labels[10:])
            assert len(set(labels)) > 1
    assert 10 < rejected < 35


def test_columns_and_labels_are_put_in_the_order_of_a_valid_split(monkeypatch):
    order = np.roll(np.arange(60), 1)
    for plan in draw_plans(5):
        drawn = []
        for rows in (None, order):
            monkeypatch.setattr(nodes, "split_rows", lambda *arguments, rows=rows: rows)
            drawn.append(execute_plan(plan))
        (columns, labels), (moved_columns, moved_labels) = drawn
        assert np.array_equal(moved_columns, columns[order])
        assert np.array_equal(moved_labels, labels[order])
