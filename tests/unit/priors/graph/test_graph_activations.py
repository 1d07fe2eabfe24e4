"""Random activations of graph_scm."""

import numpy as np
import pytest
import torch
from closed_forms import SHARED_FORMS
from scipy.special import expit

from priors.graph.activations import (
    CODES,
    FIXED,
    Activation,
    PlainActivation,
)
from priors.random import rng_at

CLOSED_FORMS = {  # float64 (features, rows)
    **SHARED_FORMS,
    "heaviside": lambda x: (x > 0).astype(float),
    "gauss": lambda x: np.exp(-(x**2)),
    "box": lambda x: (np.abs(x) <= 1).astype(float),
    "log_abs": lambda x: np.log(np.maximum(np.abs(x), 1e-6)),
    "rank": lambda x: ((x[None] < x[:, None]) | ((x[None] == x[:, None]) & earlier(len(x)))).sum(1),
    "sigmoid": expit,
    "round": np.round,
    "fraction": lambda x: x - np.floor(x),
    "softmax": lambda x: np.exp(x - x.max(0)) / np.exp(x - x.max(0)).sum(0),
    "one_hot_max": lambda x: (np.arange(len(x))[:, None] == x.argmax(0)).astype(float),
    "argsort": lambda x: np.argsort(x, axis=0, kind="stable"),
    "logsigmoid": lambda x: -np.logaddexp(-x, 0),
}
POWERS = {
    "relu_power": lambda x, power: np.maximum(x, 0) ** power,
    "signed_power": lambda x, power: np.sign(x) * np.abs(x) ** power,
    "inverse_power": lambda x, power: (np.abs(x) + 1e-3) ** -power,
    "integer_power": lambda x, power: x ** int(power),
}


def earlier(n: int) -> np.ndarray:
    """[i, j] whether feature j comes before feature i, as a tie counts."""
    return np.tri(n, k=-1, dtype=bool)[:, :, None]


def closed_form(name: str, x: np.ndarray, power: float) -> np.ndarray:
    return POWERS[name](x, power) if name in POWERS else CLOSED_FORMS[name](x)


def standardized(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-4)


def test_there_are_27_fixed_functions():
    assert set(CLOSED_FORMS) == set(FIXED) and len(FIXED) == 27


@pytest.mark.parametrize("name", [*CLOSED_FORMS, *POWERS])
def test_functions_are_their_closed_forms_in_float64(name: str):
    # Standardized values times a scale of up to 10 reach sqrt(rows) * 10, where powers and exponentials still hold.
    x = (np.random.default_rng(0).standard_normal((3, 601)) * 4).astype(np.float32)
    x[0, :9] = [0, -0.0, 1, -1, 80, -80, 320, -320, 1.5]
    x[1, 100:110] = x[0, 100:110]  # ties of features
    for power in (0.1, 2.3, 10.0):
        with np.errstate(over="ignore", divide="ignore"):
            expected = closed_form(name, x.astype(np.float64), float(np.float32(power)))
        finite = np.abs(expected) < 1e38
        for dim in (0, 1):
            given = np.array(x if dim == 0 else x.T, order="C")
            got = PlainActivation(name, power)(given, dim)
            got = got if dim == 0 else got.T
            np.testing.assert_allclose(got[finite], expected[finite], rtol=2e-5, atol=2e-5)
            assert np.isinf(got[~finite]).all()


@pytest.mark.parametrize("name", [*CODES, "softmax", "inverse_power", "integer_power"])
def test_nan_passes_through_functions_so_that_the_table_is_rejected(name: str):
    lost = PlainActivation(name, 2.0)(np.full((4, 1), np.nan, np.float32), 0)
    assert np.isnan(lost).all() == (name not in ("sign", "heaviside", "box"))


def test_argsort_of_nan_does_not_read_what_was_in_memory():
    torch.use_deterministic_algorithms(True)  # which fills new memory with the largest integer
    try:
        positions = PlainActivation("argsort")(np.array([[np.nan], [2.0], [np.nan], [1.0]], np.float32), 0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert positions[1] == 1 and (positions[2:] == 0).all(), "the ranks are 0, 1, 0, 0"


@pytest.mark.parametrize("name", [*CLOSED_FORMS, "relu_power", "signed_power"])
def test_activation_is_standardize_shift_scale_apply_standardize(name: str):
    x = np.random.default_rng(0).standard_normal((5, 300)) * 3 + 1
    for scale in (1.0, 4.0):
        got = Activation(PlainActivation(name, 1.7), scale)(x.astype(np.float32), rng_at("a"))
        z = standardized(x)
        z = (z - z[np.arange(5), rng_at("a").integers(300, size=5)][:, None]) * scale
        z[np.abs(z) < 1e-6] = 0  # the row that is subtracted
        close = np.abs(got - standardized(closed_form(name, z, 1.7))) < 5e-3
        assert close.mean() > 0.99  # a value beside a jump may fall on its other side
