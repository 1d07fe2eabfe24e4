from dataclasses import replace

import numpy as np
import pytest
import torch
from closed_forms import SHARED_FORMS
from scipy.stats import kstest

from priors import TableSpec, build_prior
from priors.mlp_scm import (
    FIXED,
    KINDS,
    Choice,
    FourierFunction,
    MLPActivation,
    MLPLayer,
    MLPNetwork,
    apply_activation,
    draw_hyperparameters,
    draw_weight,
    linear_layer,
    pick_variables,
    run_mlp_network,
)
from priors.random import rng_at
from priors.scm import Discretization, LayerNoise, plan_causes, sample_causes

SPEC = TableSpec(num_rows=200, train_size=100, num_features=6, group_seed=(5,))

CLOSED_FORMS = {  # float64 -> float64
    **SHARED_FORMS,
    "gaussian": lambda x: np.exp(-(x**2)),
    "sqrt_abs": lambda x: np.sqrt(np.abs(x)),
    "indicator": lambda x: (np.abs(x) <= 1).astype(float),
}


@pytest.fixture
def rng() -> np.random.Generator:
    return rng_at("test mlp_scm")


def layer(**changes) -> MLPLayer:
    plain = MLPLayer(
        activation=None, num_inputs=20, num_units=30, weight_std=1, blocks=0, dropout=0, noise=LayerNoise(0, False)
    )
    return replace(plain, **changes)


# Activations


def test_there_are_18_fixed_functions_and_one_that_is_ten_times_as_likely():
    assert set(CLOSED_FORMS) == set(FIXED) and len(KINDS) == 28


@pytest.mark.parametrize("kind", CLOSED_FORMS)
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (0.2, 1.5), (4.0, -0.3)])
def test_fixed_functions_against_float64(rng, kind, scale, shift):
    x = rng.standard_normal((500, 3)) * [1, 20, 0.3] + [0, 7, -0.2]
    exact = (x - x.mean(0)) / x.std(0, ddof=1)
    exact = CLOSED_FORMS[kind](scale * (exact + shift))
    out = apply_activation(MLPActivation(kind, scale, shift), torch.from_numpy(x).float(), rng).numpy()
    assert np.allclose(out, exact, rtol=1e-3, atol=3e-3)  # the root of a rounding error is 1e-3


@pytest.mark.parametrize("reach", [0.001, 1, 40])
def test_fourier_functions_against_float64(rng, reach):
    function = FourierFunction.draw(rng, exponent=0.7)
    x = torch.from_numpy(rng.uniform(-reach, reach, (300, 2)).astype(np.float32))
    angles = x.double().numpy()[..., None] * function.frequencies + function.phases
    exact = (np.sin(angles) * function.amplitudes).sum(-1)
    out = function(x)
    assert out.shape == x.shape and np.abs(out.numpy() - exact).max() < 0.01


# Network


@pytest.mark.parametrize("blocks", [1, 3, 4])
def test_block_diagonal_weights_keep_the_variance(rng, blocks):
    plan = layer(weight_std=2, blocks=blocks)
    height, width = 20 // blocks, 30 // blocks
    inside = np.zeros((20, 30), bool)
    for k in range(blocks):
        inside[k * height : (k + 1) * height, k * width : (k + 1) * width] = True
    drawn = np.stack([draw_weight(plan, rng).numpy() for _ in range(200)])
    assert ((drawn != 0) == inside).all()
    assert (drawn**2).mean() == pytest.approx(2**2, rel=0.03)


@pytest.mark.parametrize("varies", [False, True])
def test_noise(rng, varies):
    silent = layer(weight_std=0.0, num_units=2000, noise=LayerNoise(0.5, varies))
    stds = linear_layer(silent, torch.ones(400, 20), rng, None).std(0).numpy() / 0.5
    assert kstest(stds, "halfnorm").pvalue > 0.001 if varies else np.abs(stds - 1).max() < 0.2
    assert (stds**2).mean() == pytest.approx(1, rel=0.1)


def test_only_the_chosen_variables_are_computed_and_they_are_the_same(rng):
    activation = MLPActivation("tanh", 1.0, 0.0)
    layers = (layer(num_inputs=4), *[layer(activation=activation, num_inputs=30)] * 3)
    all_variables = (Choice(tuple(range(89)), 89),)
    classes = Discretization("rank", 2, ())
    whole = MLPNetwork((1,), 50, plan_causes(rng, 4, "normal", False), layers, all_variables, classes)
    causes, indices, everything = run_mlp_network(whole)
    assert indices.tolist() == list(range(90)) and everything.shape == (90, 50)
    for choices in ([Choice((89, 0), 31)], [Choice((5,), 29), Choice((29, 3), 5)], [Choice(None, 40)]):
        _, indices, variables = run_mlp_network(replace(whole, choices=tuple(choices)))
        assert indices.tolist() == sorted({i for choice in choices for i in (*(choice.features or ()), choice.target)})
        assert torch.allclose(variables, everything[indices], atol=1e-4)

    rng = rng_at((1,), "network")
    assert torch.equal(causes, sample_causes(whole.causes, 50, rng))
    first, second = (draw_weight(layer, rng) for layer in layers[:2])
    by_hand = causes @ first
    by_hand = torch.tanh((by_hand - by_hand.mean(0)) / by_hand.std(0)) @ second
    assert torch.allclose(everything[:30].T, by_hand, atol=1e-4)


@pytest.mark.parametrize("in_clique", [False, True])
@pytest.mark.parametrize("target_last", [False, True])
def test_features_and_target_are_different_variables(rng, in_clique, target_last):
    group = replace(draw_hyperparameters(rng), in_clique=in_clique, target_last=target_last)
    seen = set()
    for _ in range(400):
        choice = pick_variables(rng, 4, 15, group, number=0)
        features, target = choice.features, choice.target
        assert len({*features, target}) == 5
        assert 0 <= min(features)
        assert max(features) < 14
        assert (target == 14) == target_last
        if in_clique:
            assert max(features) - min(features) <= 4
        seen |= {*features}

        other = pick_variables(rng, 4, 15, group, number=2)
        assert len({*other.features, other.target}) == 5
        assert not target_last or other.target == 12
    assert seen == set(range(14))


# Tables


@pytest.mark.parametrize(("name", "options"), [("mlp_scm", {"causal": True}), ("mlp_scm", {}), ("tree_scm", {})])
def test_attempts_share_a_network_and_differ_in_what_is_chosen_from_it(name, options):
    prior = build_prior(name, min_skill=0.2, **options)
    spec = replace(SPEC, max_classes=0)
    plans = [prior.plan(spec, (3, attempt)) for attempt in range(8)]
    shared = 2 if name == "tree_scm" else 4
    assert [plan.network is plans[0].network for plan in plans] == [attempt < shared for attempt in range(8)]
    drawn = []
    for plan in plans:
        columns, target, _ = prior.execute(plan)
        drawn.append(torch.column_stack([columns, target]))
        columns.zero_()  # as a plug-in may do, without changing the other attempts
        target.zero_()
    assert torch.equal(torch.column_stack(prior.execute(plans[-1])[:2]), drawn[-1])
    assert len({table.numpy().tobytes() for table in drawn}) == 8
    assert torch.equal(torch.column_stack(prior.execute(prior.plan(spec, (3, 1)))[:2]), drawn[1])  # without the first


@pytest.mark.parametrize("causal", [False, True])
def test_tables_of_a_group_share_their_hyper_parameters(causal):
    prior = build_prior("mlp_scm", causal=causal)

    def hyper_parameters(table):
        return [
            (layer.num_inputs, layer.num_units, layer.weight_std, layer.dropout, layer.noise)
            for layer in table.plan.network.layers
        ]

    tables = [prior.sample(SPEC, seed) for seed in range(8)]
    activations = set()
    for table in tables:
        assert hyper_parameters(table) == hyper_parameters(tables[0])
        assert (table.plan.choice.features is not None) == causal  # units of the network, or its inputs
        activations.add(tuple(layer.activation for layer in table.plan.network.layers))
    assert len(activations) == 8
    assert len({table.plan.network.discretization.num_classes for table in tables}) > 1

    of_another_group = prior.sample(replace(SPEC, group_seed=6), 0)
    assert hyper_parameters(of_another_group) != hyper_parameters(tables[0])
    without_group = replace(SPEC, group_seed=None)
    assert hyper_parameters(prior.sample(without_group, 0)) != hyper_parameters(prior.sample(without_group, 1))
