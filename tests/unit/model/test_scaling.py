"""Scalable softmax rules against their formulas in float64, under bf16 autocast, which must not touch them."""

import math

import pytest
import torch
from networks import forward_batch, small_network

from tabicl_train import register
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.scaling import Scaling

RULES = [name for name, rule in register.scaling.items() if name != "none" and not rule.averages]


def scaling(rule, num_heads=3, head_dim=8, bound=None) -> Scaling:
    return register.scaling[rule].entry(num_heads, head_dim, TabICLConfig(scaling_bound=bound))


def mlp(layers, x):
    """Linear, exact GELU, linear, in float64."""
    hidden = x @ layers[0].weight.double().T + layers[0].bias.double()
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    return hidden @ layers[2].weight.double().T + layers[2].bias.double()


def closed_form(rule, layer, q, n):
    log_n = torch.tensor([math.log(max(n, 1))], dtype=torch.float64)
    q = q.double()
    H = q.shape[2]
    if rule == "ssmax":
        return q * (layer.scales.double() * log_n)[:, None]
    if rule in ("ssmax_mlp", "ssmax_mlp_elementwise"):
        return q * mlp(layer.mlp, log_n).view(H, -1)
    assert "qassmax" in rule, f"closed_form has no formula of {rule}: add it (ARCHITECTURE.md)"
    gate = 1 + torch.tanh(mlp(layer.query_mlp, q))
    return q * mlp(layer.base_mlp, log_n).view(H, -1) * gate


def rescaled(layer, q, n):
    """q (B, L, H, d), n keys in each table."""
    table = torch.arange(len(q)).repeat_interleave(q.shape[1])
    log_n = torch.full((len(q),), math.log(max(n, 1)))
    return layer(q.flatten(0, 1), log_n, table).view(q.shape)


def make(rule, seed=0):
    torch.manual_seed(seed)
    layer = scaling(rule)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return layer


@pytest.mark.parametrize("n", [0, 1, 2, 700, 60_000])
@pytest.mark.parametrize("rule", RULES)
def test_rule_is_computed_in_float32_under_bf16_autocast(rule, n):
    layer = make(rule)
    q = torch.randn(2, 5, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = rescaled(layer, q, n)
    assert found.dtype == torch.float32
    expected = closed_form(rule, layer, q, n)
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()  # bf16 anywhere would give 4e-3


@pytest.mark.parametrize("rule", RULES)
def test_half_precision_queries_are_rounded_once(rule):
    layer = make(rule)
    q = torch.randn(2, 5, 3, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = rescaled(layer, q, 700)
    assert found.dtype == torch.bfloat16
    expected = closed_form(rule, layer, q, 700)
    assert ((found.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("rule", RULES)
def test_multipliers_are_the_base_of_the_rule(rule):
    layer = make(rule)
    if "qassmax" in rule:  # with the gate at 1 the rule is q * base
        layer.query_mlp = scaling(rule).query_mlp  # as it starts
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.multipliers(512)
    assert found.shape == (3, 8 if rule.endswith("elementwise") else 1)
    assert found.dtype == torch.float32 and not found.requires_grad
    expected = closed_form(rule, layer, torch.ones(1, 1, 3, 8), 512)[0, 0]
    torch.testing.assert_close(found.double().expand(3, 8), expected, rtol=1e-5, atol=1e-5)


def test_named_scalings_are_the_layers_in_use():
    network = small_network()
    assert [name for name, _ in network.named_scalings()] == ["column.0", "column.1", "icl.0", "icl.1"]
    assert len(list(small_network(icl_scaling="none").named_scalings())) == 2
    seen = []
    layers = dict(network.named_scalings())
    for name, layer in layers.items():
        layer.register_forward_hook(lambda module, args, out, name=name: seen.append((name, args[1].item())))
    forward_batch(network, torch.randn(1, 20, 3), torch.zeros(1, 12, dtype=torch.int64))
    assert [name for name, _ in seen] == list(layers)
    assert {log_n for _, log_n in seen} == {torch.tensor(math.log(12)).item()}  # keys are the labeled rows


def test_a_bound_is_smooth_and_harmless_where_multipliers_are_small():
    for rule in ("ssmax", "ssmax_mlp", "qassmax_elementwise"):
        torch.manual_seed(0)
        plain = scaling(rule, 2, 4)
        bounded = scaling(rule, 2, 4, bound=5.0)
        bounded.load_state_dict(plain.state_dict())  # the same weights: a bound adds none
        for factor in (0.01, 1.0, 100.0):
            last = [p for name, p in plain.named_parameters() if not name.startswith("query_mlp")][-1]
            with torch.no_grad():
                last.mul_(factor)
                bounded.load_state_dict(plain.state_dict())
            base, kept = plain.multipliers(512), bounded.multipliers(512)
            torch.testing.assert_close(kept, 5 * torch.tanh(base / 5))
            assert kept.abs().max() <= 5
        bounded.base(torch.tensor([math.log(512)])).sum().backward()
        assert all(p.grad is not None for name, p in bounded.named_parameters() if not name.startswith("query_mlp"))


def test_gradients_of_the_scaling_are_fp32_under_autocast():
    torch.manual_seed(0)
    layer = scaling("qassmax_elementwise", 2, 4)
    torch.nn.init.normal_(layer.query_mlp[-1].weight)
    q = torch.randn(3, 5, 2, 4).bfloat16()
    weights = torch.randn(3, 5, 2, 4).bfloat16()
    found = []
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            scaled = rescaled(layer, q, 403)
        found.append(torch.autograd.grad((scaled * weights).float().sum(), list(layer.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gates_are_summed_where_asked_for_and_change_nothing():
    layer = make("qassmax_elementwise")
    q = torch.randn(2, 5, 3, 8)
    plain = rescaled(layer, q, 700)
    assert layer.gate_sums is None
    layer.gate_sums = torch.zeros(3)
    assert torch.equal(rescaled(layer, q, 700), plain)
    assert torch.equal(rescaled(layer, q, 700), plain)
    gate = 1 + torch.tanh(mlp(layer.query_mlp, q.double()))
    expected = 2 * torch.stack([gate.mean(), gate.square().mean(), torch.tensor(1.0)])
    torch.testing.assert_close(layer.gate_sums.double(), expected, rtol=1e-6, atol=0)
    assert not layer.gate_sums.requires_grad
