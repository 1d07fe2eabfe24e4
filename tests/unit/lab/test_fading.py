"""The weights of the page against those of the project's own attention layer, in float64."""

import math

import numpy as np
import pytest
import torch

from tabicl_train.lab.fading import FadingOptions, fading_curves, ssa_weight, weight
from tabicl_train.model.attention import Attention
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.pack import Spans

DIM = 4  # of the only head; a token is (score, value, 0, 0)


def layer(rule: str) -> Attention:
    """An attention layer that takes its scores and values from the tokens as they are."""
    attention = Attention(DIM, 1, rule, TabICLConfig()).double()
    with torch.no_grad():
        q, k, v = (torch.zeros(DIM, DIM, dtype=torch.float64) for _ in range(3))
        q[0, 0] = k[0, 0] = v[0, 1] = 1
        attention.in_proj_weight.copy_(torch.cat([q, k, v]))
        attention.out_proj.weight.copy_(torch.eye(DIM))
    return attention


@torch.no_grad()
def attended(attention: Attention, n: int, relevant: float, other: float) -> float:
    """Weight of one key with score `relevant` among n - 1 with score `other`."""
    tokens = torch.zeros(n, DIM, dtype=torch.float64)
    tokens[:, 0] = other
    tokens[n // 3, :2] = torch.tensor([relevant, 1.0], dtype=torch.float64)
    query = torch.tensor([[math.sqrt(DIM), 0, 0, 0]], dtype=torch.float64)
    ends = (torch.tensor([0, length], dtype=torch.int32) for length in (1, n))
    spans = Spans(torch.tensor([[1, 1, n, 0, 0]]), 1, *ends, 1, n)
    log_n = torch.tensor([math.log(n)], dtype=torch.float64)
    return attention(query, tokens, spans, log_n, torch.zeros(1, dtype=torch.int64))[0, 0].item()


NUMBERS = [10, 149, 3_000, 1_000_000]


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("gap", [0.5, 5.0, 14.0])
def test_softmax(n, gap):
    found = attended(layer("none"), n, gap - 2.0, -2.0)
    assert found == pytest.approx(float(weight(n, gap)), rel=1e-9)


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize(("gap", "scale"), [(1.5, 0.5), (2.0, 0.5), (5.0, 0.43)])
def test_ssmax(n, gap, scale):
    attention = layer("ssmax")
    attention.ssmax_layer.scales.data.fill_(scale)
    found = attended(attention, n, gap - 2.0, -2.0)
    assert found == pytest.approx(float(weight(n, gap, scale * math.log(n))), rel=1e-6)


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("gate", [0.5, 1.0, 1.5])
def test_qassmax_with_a_given_base_and_gate(n, gate, monkeypatch):
    attention, slope, gap = layer("qassmax"), 0.25, 4.0
    scaling = attention.ssmax_layer
    monkeypatch.setattr(scaling, "base", lambda log_n: (slope * log_n)[:, None, None])
    scaling.query_mlp.float()[-1].bias.data.fill_(math.atanh(gate - 1))
    found = attended(attention, n, gap - 2.0, -2.0)
    assert found == pytest.approx(float(weight(n, gap, gate * slope * math.log(n))), rel=1e-6)


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize(("relevant", "other"), [(5.0, 0.0), (2.5, -2.5), (0.0, -5.0), (8.0, 3.0)])
def test_ssa(n, relevant, other):
    found = attended(layer("ssa"), n, relevant, other)
    assert found == pytest.approx(float(ssa_weight(n, relevant, other, exponent=1.5)), rel=1e-6)


def test_limits_that_the_page_names():
    """SSMax tends to 1 or 0 as s D is above or below 1, and stays at one half where it is 1."""
    n = np.array([1e3, 1e6, 1e12])
    assert (np.diff(weight(n, 2.2, 0.5 * np.log(n))) > 0).all()
    assert (np.diff(weight(n, 1.8, 0.5 * np.log(n))) < 0).all()
    assert weight(n, 2.0, 0.5 * np.log(n)) == pytest.approx(0.5, rel=1e-3)
    assert weight(1 + math.exp(5), 5.0) == pytest.approx(0.5)


def test_the_figure_has_every_rule():
    frame = fading_curves(FadingOptions(folder="", small=True))
    assert frame["rule"].nunique() == 6
    assert frame["n"].min() == 10
    assert frame["n"].max() == 10**6
    assert frame["weight"].between(0, 1).all()
