"""The plan: graph, columns, text."""

import math
from dataclasses import replace

import numpy as np
import pytest
from graph_draws import PRESETS, SPEC, columns_of, draw_plans, draw_scalars
from scipy.special import expit

from priors.graph.converters import (
    Categorical,
    Numeric,
)
from priors.graph.nodes import TARGET, ancestors, draw_cardinalities, draw_parents, place_columns
from priors.random import rng_at


def test_parents_come_before_and_edges_have_the_cauchy_probability():
    edges = np.zeros((6, 6))
    for seed in range(3000):
        for child, of_child in enumerate(draw_parents(rng_at(seed), 6)):
            assert all(parent < child for parent in of_child)
            edges[child, of_child] += 1 / 3000
    below = edges[np.tril_indices(6, -1)]
    np.testing.assert_allclose(below, 0.5, atol=0.05)  # A + B + C is symmetric about zero
    shifted = np.mean([sum(map(len, draw_parents(rng_at(seed), 6, offset=3.0))) / 15 for seed in range(2000)])
    a = 3 * np.tan(np.pi * ((np.arange(100000) + 0.5) / 100000 - 0.5))  # the sum of three Cauchy draws
    assert shifted == pytest.approx(expit(a + 3).mean(), abs=0.04)


def test_edges_share_a_graph_a_parent_and_a_child_effect():
    # Correlation of pairs of edges: two of three effects shared (same child, or same parent), one shared (A only).
    same_child, same_parent, apart, chain, density = [], [], [], [], []
    for seed in range(8000):
        parents = draw_parents(rng_at("edges", seed), 6)

        def has(i, j, parents=parents):
            return i in parents[j]

        same_child.append(has(0, 5) == has(1, 5))
        same_parent.append(has(0, 4) == has(0, 5))
        apart.append(has(0, 4) == has(1, 5))
        chain.append(has(0, 3) == has(3, 5))  # a node's effects as a child and as a parent are two
        density.append(sum(map(len, parents)) / 15)
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_cauchy((200000, 2)) for _ in range(3))

    def agreement(*logits):
        p, q = map(expit, logits)
        return (p * q + (1 - p) * (1 - q)).mean()

    two = agreement(a[:, 0] + b[:, 0] + c[:, 0], a[:, 0] + b[:, 0] + c[:, 1])
    one = agreement(a[:, 0] + b[:, 0] + c[:, 0], a[:, 0] + b[:, 1] + c[:, 1])
    assert two - one > 0.05
    assert np.mean(same_child) == pytest.approx(two, abs=0.02)
    assert np.mean(same_parent) == pytest.approx(two, abs=0.02)
    assert np.mean(apart) == pytest.approx(one, abs=0.02)
    assert np.mean(chain) == pytest.approx(one, abs=0.02)
    assert np.std(density) > 0.25


def test_ancestors_are_the_transitive_closure():
    for seed in range(50):
        parents = draw_parents(rng_at(seed), 9)
        reach = np.eye(9, dtype=int)
        for child, of_child in enumerate(parents):
            for parent in of_child:
                reach[child] |= reach[parent]
        masks = ancestors(parents)
        assert [[mask >> i & 1 for i in range(9)] for mask in masks] == reach.tolist()


def test_columns_sit_on_a_random_number_of_random_nodes():
    used, first = [], []
    for seed in range(1500):
        nodes = place_columns(draw_scalars(seed), 5, 200)
        assert set(nodes) <= set(range(5)) and len(nodes) == 200
        used.append(len(set(nodes)))
        first.append(nodes[0])
    rng = np.random.default_rng(0)
    t, s = rng.random(100000), np.exp(rng.uniform(math.log(0.1), math.log(1e4), 100000))
    expected = np.floor(5 * rng.beta(s * t, s * (1 - t))).clip(0, 4).astype(int)
    expected = np.bincount(expected, minlength=5) / 100000
    assert np.bincount(used, minlength=6)[1:] / 1500 == pytest.approx(expected, abs=0.05)
    assert np.bincount(first, minlength=5) / 1500 == pytest.approx(np.full(5, 0.2), abs=0.05)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_computed_nodes_are_the_ancestors_of_the_columns(preset: str):
    sizes, pruned = [], 0
    for plan in draw_plans(200, preset=preset):
        nodes = {node.index: node for node in plan.nodes}
        order = list(nodes)
        assert all(parent in order[:k] for k, node in enumerate(plan.nodes) for parent in node.parents)
        needed = set()
        waiting = [node.index for node in plan.nodes if node.columns]
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                waiting += nodes[index].parents  # a parent that is not computed is a KeyError
        assert needed == set(nodes)
        assert all(parent < index for index, node in nodes.items() for parent in node.parents)
        sizes.append(plan.graph_nodes)
        pruned += len(nodes) < plan.graph_nodes
    assert min(sizes) == 2 and 25 < max(sizes) <= 32 and pruned > 100


def reach_of(plan) -> dict[int, set[int]]:
    reach: dict[int, set[int]] = {}
    for node in plan.nodes:
        reach[node.index] = {node.index}.union(*(reach[parent] for parent in node.parents))
    return reach


def connected(plan) -> bool:
    reach = reach_of(plan)
    target = next(reach[node.index] for node, column in columns_of(plan) if column.index == TARGET)
    return any(target & reach[node.index] for node, column in columns_of(plan) if column.index != TARGET)


def test_the_target_has_a_common_ancestor_with_a_feature():
    assert all(map(connected, draw_plans(300)))
    unfiltered = [connected(plan) for plan in draw_plans(300, filter_unpredictable_graphs=False)]
    assert 10 < unfiltered.count(False) < 250


def test_node_counts_follow_the_options():
    assert {plan.graph_nodes for plan in draw_plans(40, min_nodes=1, max_nodes=1)} == {1}
    assert {plan.graph_nodes for plan in draw_plans(200, min_nodes=3, max_nodes=5)} == {3, 4, 5}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_column_sits_on_one_node_that_is_wide_enough(preset: str):
    spare = []
    for plan in draw_plans(100, preset=preset):
        assert sorted(column.index for _, column in columns_of(plan)) == [TARGET, *range(8)]
        for node in plan.nodes:
            spare.append(node.width - sum(column.converter.width for column in node.columns))
            numeric = [isinstance(column.converter, Numeric) for column in node.columns]
            assert numeric == sorted(numeric, reverse=True)
            assert node.weights.size == node.width and 0.1 <= node.importance <= 10
            assert (node.points is not None) == (not node.parents)
            if node.parents:
                assert len(node.functions) == (1 if node.combine == "concat" else len(node.parents))
    assert min(spare) == 1 and 25 < max(spare) <= 31


@pytest.mark.parametrize("preset", PRESETS)
def test_a_numeric_target_has_a_numeric_converter_before_the_categorical_ones(preset: str):
    modes = set()
    for plan in draw_plans(100, replace(SPEC, max_classes=0), preset=preset):
        assert sorted(column.index for _, column in columns_of(plan)) == [TARGET, *range(8)]
        target = next(column.converter for _, column in columns_of(plan) if column.index == TARGET)
        assert isinstance(target, Numeric)
        modes.add((target.mode, target.warp_flow))
        for node in plan.nodes:
            numeric = [isinstance(column.converter, Numeric) for column in node.columns]
            assert numeric == sorted(numeric, reverse=True)
        assert plan.num_classes == 0 and "8 features, numeric target;" in str(plan).splitlines()[0]
        assert connected(plan)
    assert modes == {("identity", False), ("warp", preset == "released")}


def test_a_plan_reads_as_text():
    for preset in PRESETS:
        for plan in draw_plans(30, preset=preset):
            text = str(plan)
            lines = text.splitlines()
            assert "8 features" in lines[0] and "60 rows" in lines[0] and f"{plan.num_classes} classes" in lines[0]
            assert len(lines) == 1 + len(plan.nodes) + 9
            assert all(f"    {name}: " in text for name in ["y", *(f"x{i}" for i in range(8))])
            assert "object at" not in text and "array(" not in text and "Tree(" not in text


def test_the_share_of_categorical_columns():
    # clip(U(-0.5, 1.2), 0, 1): none with probability 0.5/1.7, all with 0.2/1.7, uniform between
    shares = np.array([len(draw_cardinalities(draw_scalars(seed), 100, 9)) / 100 for seed in range(2000)])
    assert np.mean(shares <= 0.005) == pytest.approx(0.5 / 1.7, abs=0.04)
    assert np.mean(shares >= 0.995) == pytest.approx(0.2 / 1.7, abs=0.03)
    assert shares[(shares > 0.01) & (shares < 0.99)].mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("preset", "limit"), [("corrected", 200), ("released", 9)])
def test_cardinalities_stay_within_the_preset_s_limit(preset: str, limit: int):
    cardinalities, most, classes = set(), [], []
    for plan in draw_plans(400, preset=preset):
        in_plan = [
            column.converter.cardinality
            for _, column in columns_of(plan)
            if column.index != TARGET and isinstance(column.converter, Categorical)
        ]
        cardinalities |= set(in_plan)
        most.append(max(in_plan, default=0))
        target = next(column.converter for _, column in columns_of(plan) if column.index == TARGET)
        assert isinstance(target, Categorical) and target.cardinality == plan.num_classes
        classes.append(plan.num_classes)
    assert min(cardinalities) == 2
    assert (100 if preset == "corrected" else 9) <= max(cardinalities) <= limit
    assert np.bincount(classes, minlength=11)[2:] / 400 == pytest.approx(np.full(9, 1 / 9), abs=0.06)


def test_cardinalities_that_are_not_local_end_at_nine():
    drawn = [draw_cardinalities(draw_scalars(seed), 40, 150) for seed in range(300)]
    large = np.array([np.mean(np.array(c) > 9) for c in drawn if len(c) > 10])
    assert np.mean(large == 0) > 0.05 and large.max() > 0.5  # all of the meta kind; all of the local kind
    assert max(max(c, default=2) for c in drawn) <= 150
    assert max(max(draw_cardinalities(draw_scalars(seed), 40, 5), default=2) for seed in range(50)) == 5


def test_max_cardinality_is_an_option():
    plans = draw_plans(200, max_cardinality=3)
    assert {
        c.converter.cardinality
        for p in plans
        for _, c in columns_of(p)
        if c.index != TARGET and isinstance(c.converter, Categorical)
    } == {2, 3}
