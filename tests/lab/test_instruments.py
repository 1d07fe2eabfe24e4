"""The instruments against a plain softmax in float64, from the layer's input and weights alone."""

import math

import numpy as np
import pytest
import torch
from small_networks import draw, small_network

from tabicl_train.lab.instruments import INDUCING, LABELED, QUERY, logits, measure, recorded, shape, sites
from tabicl_train.model.attention import Attention
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.pack import Pack
from tabicl_train.model.scaling import RULES, Scaling
from tabicl_train.prediction.predict import forward

N, n, M = 41, 23, 3


def gelu_mlp(layers, x):
    hidden = x @ layers[0].weight.double().T + layers[0].bias.double()
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    return hidden @ layers[2].weight.double().T + layers[2].bias.double()


def plain_logits(rule, attention, x, context):
    """Logits (H, Q, K), base (H, 1 or d) and gate (Q, H, 1 or d), float64, from the formulas of the rules."""
    E, H, d = attention.dim, attention.num_heads, attention.dim // attention.num_heads
    weight, bias = attention.in_proj_weight.double(), attention.in_proj_bias.double()
    q = (x.double() @ weight[:E].T + bias[:E]).unflatten(-1, (H, d))
    k = (context.double() @ weight[E : 2 * E].T + bias[E : 2 * E]).unflatten(-1, (H, d))
    layer, log_n = attention.ssmax_layer, torch.tensor([math.log(len(k))], dtype=torch.float64)
    base = gate = None
    if rule == "ssmax":
        base = (layer.scales.double() * log_n)[:, None]
    elif rule.startswith("ssmax_mlp"):
        base = gelu_mlp(layer.mlp, log_n).view(H, -1)
    elif rule.startswith("qassmax"):
        base = gelu_mlp(layer.base_mlp, log_n).view(H, -1)
        gate = 1 + torch.tanh(gelu_mlp(layer.query_mlp, q))
    elif RULES[rule].averages:
        base = layer.log_b.double().exp()[:, None]
    scaled = q * (1 if base is None else base) * (1 if gate is None else gate)
    z = torch.einsum("qhd,khd->hqk", scaled, k) / math.sqrt(d)
    if RULES[rule].averages:
        p = torch.full((H,), 1.5).double() if rule == "ssa" else 1 + layer.log_excess.double().exp()
        z = ((1 + z.abs()) ** (z.sign() * p[:, None, None])).log()
    return z, base, gate


def plain_shape(z):
    """entropy, top weight, gap: (H, Q) each, from logits (H, Q, K)."""
    w = torch.softmax(z, -1)
    entropy = -(w * w.log()).sum(-1) / math.log(z.shape[-1])
    return entropy, w.amax(-1), z.amax(-1) - z.mean(-1)


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_the_logits_lead_to_the_output_of_the_layer(rule):
    """Whatever kernel the layer uses, softmax of the recorded logits and its values give what it hands on."""
    network = small_network(col_scaling=rule, icl_scaling=rule).eval()
    calls, outputs = {}, {}
    for site in sites(network):
        site.attention.out_proj.register_forward_pre_hook(lambda _, x, key=site: outputs.setdefault(key, x[0]))
    with recorded({site: site.attention for site in sites(network)}, calls.__setitem__):
        predictor(network)()
    assert len(calls) == 4
    for site, call in calls.items():
        parts = []
        for one in call.sequences():
            w = torch.softmax(logits(site.attention, one.q, one.k), -1)  # (H, Q, K)
            parts.append(torch.einsum("hqk,khd->qhd", w, one.v.double()).flatten(1))
        torch.testing.assert_close(torch.cat(parts), outputs[site].double(), rtol=1e-4, atol=1e-5)


def predictor(network):
    X, y_train, y_query = draw(1, N, M, n)
    pack = Pack.of([(X[0], torch.cat([y_train, y_query], 1)[0], n)])
    return lambda: forward(network, pack, 10, 1.0, 2**20)


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_measures_are_those_of_a_plain_softmax(rule):
    network = small_network(col_scaling=rule, icl_scaling=rule).eval()
    found = measure(network, predictor(network)).set_index(["stage", "layer", "queries", "head"])
    inputs = {}

    def keep(name):
        def hook(_, arguments):
            inputs.setdefault(name, []).append(arguments[:2])

        return hook

    for site in sites(network):
        site.attention.register_forward_pre_hook(keep(site[:2]))
    predictor(network)()
    assert set(inputs) == {("column", 0), ("column", 1), ("icl", 0), ("icl", 1)}
    for site in sites(network):
        (x, context), *others = inputs[site[:2]]
        assert not others
        if site.stage == "column":
            kinds = {INDUCING: [(x, own) for own in context.split(n)]}
        elif site.layer == 0:
            kinds = {LABELED: [(x[:n], context)], QUERY: [(x[n:], context)]}
        else:
            kinds = {QUERY: [(x, context)]}
        for kind, sequences in kinds.items():
            assert len(sequences) == (M if kind == INDUCING else 1)
            plain = [plain_logits(rule, site.attention, *sequence) for sequence in sequences]
            expected = [torch.cat(of, 1).mean(1) for of in zip(*(plain_shape(z) for z, _, _ in plain), strict=True)]
            rows = found.loc[(site.stage, site.layer, kind)]
            names = ["entropy", "top_weight", "gap_mean"]
            np.testing.assert_allclose(rows[names], torch.stack(expected, 1), rtol=1e-4)
            assert set(rows["n"]) == {n} and set(rows["measured"]) == {sum(len(x) for x, _ in sequences)}
            _, base, _ = plain[0]
            assert rows["base_largest"].isna().all() == (rule == "none")
            if base is not None:
                np.testing.assert_allclose(rows["base_largest"], base.abs().amax(-1), rtol=1e-5)
            assert rows["gate_mean"].isna().all() == (not rule.startswith("qassmax"))
            if rule.startswith("qassmax"):
                gate = torch.cat([gate for _, _, gate in plain])  # (queries, H, 1 or d)
                np.testing.assert_allclose(rows["gate_mean"], gate.mean((0, 2)), rtol=1e-4)


def test_even_weights_and_a_single_key(monkeypatch):
    attention = Attention(16, 2, "none", TabICLConfig())
    monkeypatch.setattr("tabicl_train.lab.instruments.BLOCK", 2 * 10_000)  # a query at a time
    even = shape(attention, torch.randn(3, 2, 8), torch.ones(10_000, 2, 8))
    for found, expected in zip(even, (1, 1e-4, 0), strict=True):
        torch.testing.assert_close(
            found, torch.full((3, 2), float(expected), dtype=torch.float64), rtol=1e-12, atol=1e-11
        )
    single = shape(attention, torch.randn(3, 2, 8), torch.ones(1, 2, 8))
    assert single.top.eq(1).all() and single.gap.eq(0).all() and single.entropy.isnan().all()


def test_samples_of_queries_are_as_large_as_asked_for():
    network = small_network().eval()
    found = measure(network, predictor(network), rows=5, points=2)
    assert dict(found.groupby("queries")["measured"].unique().explode()) == {INDUCING: 2 * M, LABELED: 5, QUERY: 5}
    assert found.equals(measure(network, predictor(network), rows=5, points=2))


def test_sites_are_the_layers_with_a_scalable_softmax():
    network = small_network()
    assert [f"{site.stage}.{site.layer}" for site in sites(network)] == [name for name, _ in network.named_scalings()]
    assert all(isinstance(site.attention.ssmax_layer, Scaling) for site in sites(network))
