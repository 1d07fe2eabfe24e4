"""Random activations of graph_scm."""

import numpy as np
import pytest
import torch
from closed_forms import SHARED_FORMS
from graph_draws import draw_scalars
from scipy.special import expit

from priors.graph.activations import FIXED, KINDS, PLAIN_KINDS, Activation, PlainActivation, normalize, standardize
from priors.graph.elementwise import CODES, apply
from priors.graph.noise import Noise

CLOSED_FORMS = {  # float64 (features, rows)
    **SHARED_FORMS,
    "heaviside": lambda x: (x > 0).astype(float),
    "gauss": lambda x: np.exp(-(x**2)),
    "box": lambda x: (np.abs(x) <= 1).astype(float),
    "log_abs": lambda x: np.log(np.maximum(np.abs(x), 1e-6)),
    "rank": lambda x: (x[:, None] > x[None]).sum(1),
    "sigmoid": expit,
    "round": np.round,
    "fraction": lambda x: x - np.floor(x),
    "softmax": lambda x: np.exp(x - x.max(0)) / np.exp(x - x.max(0)).sum(0),
    "one_hot_max": lambda x: (x == x.max(0)).astype(float),
    "argsort": lambda x: np.argsort(x, axis=0),
    "logsigmoid": lambda x: -np.logaddexp(-x, 0),
}


def test_there_are_27_fixed_functions():
    assert set(CLOSED_FORMS) == set(FIXED) and len(FIXED) == 27


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_fixed_functions_are_their_closed_forms(name: str):
    x = np.random.default_rng(0).standard_normal((6, 200)) * 4
    expected = CLOSED_FORMS[name](x)
    x = torch.from_numpy(x)
    before = x.clone()
    np.testing.assert_allclose(PlainActivation(name)(x, 0), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(PlainActivation(name)(x.T.contiguous(), 1), expected.T, rtol=1e-9, atol=1e-12)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", CODES)
def test_compiled_functions_are_those_of_torch_in_float64(name: str):
    # Standardized values times a scale of up to 10 reach sqrt(rows) * 10, where powers and exponentials still hold.
    x = (np.random.default_rng(0).standard_normal((3, 501)) * 4).astype(np.float32)
    x[0, :8] = [0, -0.0, 1, -1, 80, -80, 320, -320]
    for power in (0.1, 2.3, 10.0):
        got = x.copy()
        apply(got.reshape(-1), CODES[name], np.float32(power))
        expected = PlainActivation(name, float(np.float32(power)))(torch.from_numpy(x).double(), 0).numpy()
        finite = np.abs(expected) < 1e38
        np.testing.assert_allclose(got[finite], expected[finite], rtol=2e-5, atol=2e-5)
        assert np.isinf(got[~finite]).all()
    lost = np.full(4, np.nan, np.float32)
    apply(lost, CODES[name], np.float32(2.0))
    of_torch = PlainActivation(name, 2.0)(torch.full((4, 1), torch.nan), 0)
    assert np.isnan(lost).all() or not of_torch.isnan().any(), "a table with such a node must stay rejected"


def test_activation_matches_the_path_of_torch_for_every_function():
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32)) * 3 + 1
    for name in (*FIXED, "relu_power", "signed_power"):
        got = Activation(PlainActivation(name, 1.7), 2.0)(x.clone(), Noise(("a",)))
        z = standardize(x)
        z = (z - z.gather(1, Noise(("a",)).rows(300, 5)[:, None])) * 2.0
        expected = standardize(PlainActivation(name, 1.7)(z, 0))
        same = (got - expected).abs() < 2e-3
        assert same.float().mean() > 0.99, name  # a value beside a jump may fall on its other side


def test_sign_of_zero_is_one():
    assert FIXED["sign"](torch.zeros(1, 1), 0).item() == 1


@pytest.mark.parametrize(
    ("name", "power", "form"),
    [
        ("relu_power", 2.3, lambda x: np.maximum(x, 0) ** 2.3),
        ("signed_power", 0.4, lambda x: np.sign(x) * np.abs(x) ** 0.4),
        ("inverse_power", 1.7, lambda x: (np.abs(x) + 1e-3) ** -1.7),
        ("integer_power", 3, lambda x: x**3),
    ],
)
def test_powers(name: str, power: float, form):
    x = np.random.default_rng(0).standard_normal((3, 100))
    np.testing.assert_allclose(PlainActivation(name, power)(torch.from_numpy(x), 0), form(x), rtol=1e-9)


@pytest.mark.parametrize(("kinds", "shares"), [(KINDS, (4, 1, 1, 0, 0)), (PLAIN_KINDS, (8, 1, 1, 1, 1))])
def test_activation_kinds_and_scalars(kinds, shares):
    drawn = [PlainActivation.draw(draw_scalars(seed), kinds) for seed in range(3000)]
    names = ["fixed" if a.name in FIXED else a.name for a in drawn]
    for name, share in zip(
        ("fixed", "relu_power", "signed_power", "inverse_power", "integer_power"), shares, strict=True
    ):
        assert names.count(name) / 3000 == pytest.approx(share / sum(shares), abs=0.03)
    assert {a.name for a in drawn} >= set(FIXED)
    powers = [a.power for a in drawn if a.name == "signed_power"]
    assert 0.1 <= min(powers) < 0.2 and 5 < max(powers) <= 10
    assert {a.power for a in drawn if a.name == "integer_power"} in (set(), {2, 3, 4, 5})


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e6])
def test_standardize_and_normalize(scale: float):
    x = np.random.default_rng(0).standard_normal((4, 300)) * scale + 2 * scale
    std = x.std(1, keepdims=True)
    expected = (x - x.mean(1, keepdims=True)) / (std + 1e-4)
    given = torch.from_numpy(x.astype(np.float32))
    np.testing.assert_allclose(standardize(given.clone()), expected, atol=2e-4)
    unit, factor = normalize(given)
    np.testing.assert_allclose((unit * factor).numpy(), expected, atol=2e-4)
    np.testing.assert_allclose(factor.numpy(), std / (std + 1e-4), rtol=1e-3)


def test_constant_features_become_zero():
    assert (standardize(torch.full((2, 50), 3.7)).abs() < 1e-3).all()


def test_activation_is_standardize_shift_scale_apply_standardize():
    x = np.random.default_rng(0).standard_normal((5, 200)) * 3 + 1
    given = torch.from_numpy(x.astype(np.float32))
    for scale in (1.0, 7.0):
        got = Activation(PlainActivation("tanh"), scale)(given.clone(), Noise(("a",)))
        rows = Noise(("a",)).rows(200, 5).numpy()
        z = (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-4)
        y = np.tanh((z - z[np.arange(5), rows][:, None]) * scale)
        expected = (y - y.mean(1, keepdims=True)) / (y.std(1, keepdims=True) + 1e-4)
        np.testing.assert_allclose(got, expected, atol=1e-3)
    scales = [Activation.draw(draw_scalars(seed)).scale for seed in range(300)]
    assert 1 <= min(scales) < 1.1 and 9 < max(scales) <= 10
