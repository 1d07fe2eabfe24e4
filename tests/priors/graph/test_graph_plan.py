import math

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

from priors import TableSpec, build_prior
from priors.finish import Rejected
from priors.graph.converters import (
    CATEGORICAL_MODES,
    Categorical,
    Numeric,
    convert_numeric,
    kumaraswamy,
)
from priors.graph.execute import check_classes, combine, compute_node, execute_plan, scale
from priors.graph.functions import Linear
from priors.graph.noise import Noise
from priors.graph.plan import TARGET, ancestors, draw_cardinalities, draw_parents, place_columns
from priors.graph.points import Points
from priors.graph.scalars import Scalars, Weights
from priors.random import rng_at

PRESETS = ("corrected", "released")
SPEC = TableSpec(num_rows=60, train_size=30, num_features=8)


def draw_scalars(seed: int, skewed_choices: bool = False) -> Scalars:
    return Scalars(rng_at("plan test", seed), skewed_choices)


def draw_plans(count: int, spec: TableSpec = SPEC, **options):
    prior = build_prior("graph_scm", **options)
    return [prior.plan(spec, (seed,)) for seed in range(count)]


def columns_of(plan):
    return [(node, column) for node in plan.nodes for column in node.columns]


def draw_points(n: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(rng_at("plan points", seed).standard_normal((n, size)).astype(np.float32))


# The graph


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


def test_a_plan_reads_as_text():
    for preset in PRESETS:
        for plan in draw_plans(30, preset=preset):
            text = str(plan)
            lines = text.splitlines()
            assert "8 features" in lines[0] and "60 rows" in lines[0] and f"{plan.num_classes} classes" in lines[0]
            assert len(lines) == 1 + len(plan.nodes) + 9
            assert all(f"    {name}: " in text for name in ["y", *(f"x{i}" for i in range(8))])
            assert "object at" not in text and "array(" not in text and "Tree(" not in text


# Column types


def test_the_share_of_categorical_columns():
    # clip(U(-0.5, 1.2), 0, 1): none with probability 0.5/1.7, all with 0.2/1.7, uniform between
    shares = np.array([len(draw_cardinalities(draw_scalars(seed), 100, 9)) / 100 for seed in range(2000)])
    assert np.mean(shares <= 0.005) == pytest.approx(0.5 / 1.7, abs=0.04)
    assert np.mean(shares >= 0.995) == pytest.approx(0.2 / 1.7, abs=0.03)
    assert shares[(shares > 0.01) & (shares < 0.99)].mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("preset", "limit"), [("corrected", 200), ("released", 9)])
def test_cardinalities_stay_within_the_preset_s_limit(preset: str, limit: int):
    found, most, classes = set(), [], []
    for plan in draw_plans(400, preset=preset):
        of_plan = [
            column.converter.cardinality
            for _, column in columns_of(plan)
            if column.index != TARGET and isinstance(column.converter, Categorical)
        ]
        found |= set(of_plan)
        most.append(max(of_plan, default=0))
        target = next(column.converter for _, column in columns_of(plan) if column.index == TARGET)
        assert isinstance(target, Categorical) and target.cardinality == plan.num_classes
        classes.append(plan.num_classes)
    assert min(found) == 2 and max(found) <= limit and max(found) >= (100 if preset == "corrected" else 9)
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


# Converters


def test_kumaraswamy_is_its_closed_form():
    x = draw_points(2, 100)
    a, b = torch.tensor([[0.5], [3.0]]), torch.tensor([[2.0], [0.3]])
    z = x.double().numpy()
    u = (z - z.min(1, keepdims=True)) / (z.max(1, keepdims=True) - z.min(1, keepdims=True))
    expected = 1 - (1 - u ** a.double().numpy()) ** b.double().numpy()
    np.testing.assert_allclose(kumaraswamy(x, a, b), expected, atol=1e-4)
    assert torch.equal(kumaraswamy(torch.ones(2, 5), a, b), torch.zeros(2, 5))


@pytest.mark.parametrize("warp_flow", [True, False])
def test_warps_act_on_the_column_and_on_what_flows_on_only_if_told(warp_flow: bool):
    x = draw_points(3, 50)
    converters = [Numeric("warp", 0.5, 2.0, warp_flow), Numeric("identity"), Numeric("warp", 3.0, 0.4, warp_flow)]
    raw = x.clone()
    column, flow = convert_numeric(x, converters, Noise(("n",)))
    a, b = torch.tensor([[0.5], [1.0], [3.0]]), torch.tensor([[2.0], [1.0], [0.4]])
    warped = kumaraswamy(raw, a, b)
    warped[1] = raw[1]
    torch.testing.assert_close(column, warped)
    torch.testing.assert_close(flow, warped if warp_flow else raw)


@pytest.mark.parametrize("preset", PRESETS)
def test_tables_hold_the_warped_columns(preset: str, monkeypatch):
    seen = []

    def record(x, converters, noise):
        before = x.clone()
        column, flow = convert_numeric(x, converters, noise)
        seen.append((converters, column.clone()))
        assert torch.equal((column if preset == "released" else before).nan_to_num(7), flow.nan_to_num(7))
        return column, flow

    monkeypatch.setattr("priors.graph.execute.convert_numeric", record)
    monkeypatch.setattr("priors.graph.execute.check_classes", lambda labels: None)
    warps = 0
    for plan in draw_plans(30, preset=preset):
        seen.clear()
        features, _ = execute_plan(plan)
        nodes = [n for n in plan.nodes if any(isinstance(c.converter, Numeric) for c in n.columns)]
        for node, (converters, column) in zip(nodes, seen, strict=True):
            indices = [c.index for c in node.columns if isinstance(c.converter, Numeric)]
            assert torch.equal(features[:, indices].T.nan_to_num(7), column.nan_to_num(7))
            warps += sum(converter.mode == "warp" for converter in converters)
    assert warps > 10


def test_numeric_scalars():
    drawn = [Numeric.draw(draw_scalars(seed), True) for seed in range(600)]
    warps = [n for n in drawn if n.mode == "warp"]
    assert 230 < len(warps) < 370
    for values in ([n.a for n in warps], [n.b for n in warps]):
        assert 0.2 <= min(values) < 0.25 and 4 < max(values) <= 5


def test_categorical_modes_widths_and_scalars():
    drawn = [Categorical.draw(draw_scalars(seed), 8, 100) for seed in range(2000)]
    modes = [c.mode for c in drawn]
    assert [modes.count(mode) / 2000 for mode in CATEGORICAL_MODES] == pytest.approx([1 / 7] * 7, abs=0.03)
    for c in drawn:
        if c.mode.startswith("softmax"):
            assert c.width == 8 and 0.1 <= c.factor <= 10
        else:
            assert 1 <= c.width <= 8 and 0.5 <= c.p <= 4
        assert (c.function is not None) == (c.mode == "neighbor_func")
        assert (c.embedding is not None) == (c.mode == "softmax_disc")
    widths = [c.width for c in drawn if c.mode.startswith("neighbor")]
    assert widths.count(8) / len(widths) == pytest.approx(0.5, abs=0.06)
    # the narrow ones: floor of a log-uniform draw over [1, 8)
    narrow = [width for width in widths if width < 8]
    assert narrow.count(1) / len(narrow) == pytest.approx(math.log(2) / math.log(8), abs=0.06)


@pytest.mark.parametrize("p", [0.5, 2.0, 4.0])
def test_neighbor_categories_are_the_nearest_of_random_rows(p: float):
    x = draw_points(3, 200)
    rows = Noise(("n",)).distinct_rows(200, 7)
    centres = x[:, rows]
    distance = (x.double()[:, None] - centres.double()[:, :, None]).abs().pow(p).sum(0)
    expected = distance.argmin(0)
    function = Linear.draw(draw_scalars(0), 3, 3, 200)
    for what in ("id", "disc", "func", "int"):
        noise = Noise(("n",))
        index, flow = Categorical(f"neighbor_{what}", 7, 3, p=p, function=function)(x.clone(), noise)
        assert index.dtype == torch.int64 and (index == expected).float().mean() > 0.99
        assert index[rows].tolist() == list(range(7))
        if what == "id":
            assert torch.equal(flow, x)
        elif what == "disc":
            assert torch.equal(flow, centres[:, index])
        elif what == "func":
            noise = Noise(("n",))
            noise.distinct_rows(200, 7)
            torch.testing.assert_close(flow, function(centres[:, index], noise))
        else:
            assert torch.equal(flow, index.float().expand(3, 200))


def test_there_are_no_more_centres_than_rows():
    index, _ = Categorical("neighbor_id", 50, 3)(draw_points(3, 20), Noise(("n",)))
    assert sorted(index.tolist()) == list(range(20))


def test_softmax_categories_have_the_frequencies_of_the_softmax():
    # 20,000 rows that take four values: in each group the frequencies are those of one softmax.
    values = torch.tensor([[0.0, 1.0, 0.0, 2.0], [1.0, 0.0, 0.0, -1.0], [0.0, 0.0, 1.0, 0.5]])
    group = torch.arange(20000) % 4
    x = values[:, group]
    converter = Categorical("softmax_id", 3, 3, factor=0.8, shares=Weights(3, np.array([3.0]), np.array([0.5])))
    index, flow = converter(x.clone(), Noise(("s",)))
    assert torch.equal(flow, x) and index.dtype == torch.int64
    shares = converter.shares.compute(Noise(("s",)).rng)[0].astype(np.float64)
    z = x.double().numpy()
    z = (z - z.mean(1, keepdims=True)) / (z.std(1, keepdims=True) + 1e-4)
    logits = 0.8 * z + np.log(shares + 1e-4)[:, None]
    for g in range(4):
        frequencies = np.bincount(index[group == g], minlength=3) / 5000
        assert frequencies == pytest.approx(softmax(logits[:, g]), abs=0.03)


def test_softmax_categories_survive_values_that_are_not_finite():
    x = draw_points(3, 50)
    x[1, :25] = math.nan
    converter = Categorical("softmax_id", 3, 3, shares=Weights(3, np.array([0.7]), np.array([0.5])))
    index, _ = converter(x, Noise(("s",)))
    assert 0 <= index.min() and index.max() <= 2


def test_what_flows_on_from_softmax_categories():
    x, shares = draw_points(4, 300), Weights(4, np.array([0.1]), np.array([0.1]))
    index, flow = Categorical("softmax_int", 4, 4, shares=shares)(x, Noise(("s",)))
    assert torch.equal(flow, index.float().expand(4, 300)) and len(index.unique()) == 4
    embedding = Points("normal", 4, Linear.draw(draw_scalars(1), 4, 4, 4))
    index, flow = Categorical("softmax_disc", 4, 4, shares=shares, embedding=embedding)(x, Noise(("s",)))
    assert flow.shape == (4, 300)
    pairs = torch.cat([index[None].float(), flow]).T.unique(dim=0)
    assert len(pairs) == 4, "one row of the table of embeddings a category"
    assert len(pairs[:, 1:].unique(dim=0)) == 4


# Nodes


def test_combinations():
    a, b = draw_points(2, 40, 1), draw_points(2, 40, 2)
    torch.testing.assert_close(combine("sum", a, b), a + b)
    torch.testing.assert_close(combine("product", a, b), a * b)
    torch.testing.assert_close(combine("max", a, b), torch.where(a > b, a, b))
    torch.testing.assert_close(combine("logsumexp", a, b), (a.exp() + b.exp()).log())


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
    noise = Noise(("c",))
    expected = torch.maximum(node.functions[0](values[0], noise), node.functions[1](values[3], noise))
    torch.testing.assert_close(compute_node(node, values, 40, Noise(("c",))), expected)
    node.combine, node.functions = "concat", [Linear.draw(draw_scalars(2), 7, 4, 40)]
    expected = node.functions[0](torch.cat([values[0], values[3]]), Noise(("c",)))
    torch.testing.assert_close(compute_node(node, values, 40, Noise(("c",))), expected)


def test_nodes_are_standardised_weighted_and_of_unit_norm():
    node = draw_plans(1)[0].nodes[0]
    node.weights = Weights(4, np.array([1.0]), np.array([0.5]))
    x = draw_points(4, 500) * torch.tensor([[1.0], [30.0], [1e-5], [0.0]]) + 3
    got = scale(x.clone(), node, Noise(("w",)))
    z = x.double().numpy()
    z = (z - z.mean(1, keepdims=True)) / (z.std(1, keepdims=True) + 1e-4)
    z *= node.weights.compute(Noise(("w",)).rng)[0].astype(np.float64)[:, None]
    expected = z / (np.sqrt(np.square(z).sum(0).mean()) + 1e-8)
    assert np.sqrt(np.square(got.double().numpy()).sum(0).mean()) == pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(got[[0, 1, 3]], expected[[0, 1, 3]], atol=1e-3)
    np.testing.assert_allclose(got[2], expected[2], atol=0.05)  # 1e-5 beside 3: float32 rounds it


def test_noise_and_importance_reach_the_children(monkeypatch):
    monkeypatch.setattr("priors.graph.execute.check_classes", lambda labels: None)
    # The values that a child reads have the root mean square norm of the parent's importance.
    for plan in draw_plans(60, node_noise=True):
        assert all(1e-5 <= node.noise <= 1 for node in plan.nodes)
    norms = {}

    def record(node, values, num_rows, noise):
        for parent in node.parents:
            norms[parent] = values[parent].square().sum(0).mean().sqrt().item()
        return compute_node(node, values, num_rows, noise)

    monkeypatch.setattr("priors.graph.execute.compute_node", record)
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


def test_tables_whose_labels_cannot_be_split_are_given_up_at_the_target():
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
