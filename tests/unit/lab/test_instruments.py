"""The instruments against a plain softmax in float64, and against the output of the layer."""

import math

import numpy as np
import pytest
import torch
from networks import draw_batch, small_network

from tabicl_train import register
from tabicl_train.lab.instruments import measure, query_multipliers, sites, weight_statistics
from tabicl_train.model.attention import Attention
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.pack import Pack
from tabicl_train.model.recording import INDUCING, LABELED, QUERY, logits, recorded
from tabicl_train.model.scaling import Scaling

N, n, M = 41, 23, 3


def plain_shape(z):
    """entropy, top weight, gap: (H, Q) each, from logits (H, Q, K)."""
    w = torch.softmax(z, -1)
    entropy = -(w * w.log()).sum(-1) / math.log(z.shape[-1])
    return entropy, w.amax(-1), z.amax(-1) - z.mean(-1)


@pytest.mark.parametrize("rule", register.scaling)
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
        for one in call:
            w = torch.softmax(logits(site.attention, one.q, one.k), -1)  # (H, Q, K)
            parts.append(torch.einsum("hqk,khd->qhd", w, one.v.double()).flatten(1))
        torch.testing.assert_close(torch.cat(parts), outputs[site].double(), rtol=1e-4, atol=1e-5)


def predictor(network):
    X, y_train, y_query = draw_batch(1, N, M, n)
    pack = Pack.of([(X[0], torch.cat([y_train, y_query], 1)[0], n)])
    return lambda: network(pack)


@pytest.mark.parametrize("rule", register.scaling)
@torch.no_grad()
def test_measures_are_means_over_the_queries_of_each_kind(rule):
    network = small_network(col_scaling=rule, icl_scaling=rule).eval()
    found = measure(network, predictor(network)).set_index(["stage", "layer", "queries", "head"])
    calls = {}
    with recorded({site: site.attention for site in sites(network)}, calls.__setitem__):
        predictor(network)()
    seen = set()
    for site, sequences in calls.items():
        for kind in {one.kind for one in sequences}:
            own = [one for one in sequences if one.kind == kind]
            shapes = [plain_shape(logits(site.attention, one.q, one.k)) for one in own]
            rows = found.loc[(site.stage, site.layer, kind)]
            expected = [torch.cat(of, 1).mean(1) for of in zip(*shapes, strict=True)]
            np.testing.assert_allclose(rows[["entropy", "top_weight", "gap_mean"]], torch.stack(expected, 1), rtol=1e-4)
            assert set(rows["n"]) == {n}
            assert set(rows["measured"]) == {sum(len(one.q) for one in own)}
            base, gate = query_multipliers(site.attention, torch.cat([one.projected for one in own]), n)
            assert rows["base_largest"].isna().all() == (rule == "none")
            if base is not None:
                np.testing.assert_allclose(rows["base_largest"], base.abs().amax(-1), rtol=1e-5)
            assert rows["gate_mean"].isna().all() == (not rule.startswith("qassmax"))
            if gate is not None:
                np.testing.assert_allclose(rows["gate_mean"], gate.mean((0, 2)), rtol=1e-4)
            seen.add((site.stage, site.layer, kind, len(own)))
    columns = {("column", layer, INDUCING, M) for layer in (0, 1)}
    assert seen == columns | {("icl", 0, LABELED, 1), ("icl", 0, QUERY, 1), ("icl", 1, QUERY, 1)}


def test_even_weights_and_a_single_key(monkeypatch):
    attention = Attention(16, 2, "none", TabICLConfig())
    monkeypatch.setattr("tabicl_train.lab.instruments.BLOCK", 2 * 10_000)  # a query at a time
    even = weight_statistics(attention, torch.randn(3, 2, 8), torch.ones(10_000, 2, 8))
    for found, expected in zip(even, (1, 1e-4, 0), strict=True):
        torch.testing.assert_close(
            found, torch.full((3, 2), float(expected), dtype=torch.float64), rtol=1e-12, atol=1e-11
        )
    single = weight_statistics(attention, torch.randn(3, 2, 8), torch.ones(1, 2, 8))
    assert single.top.eq(1).all()
    assert single.gap.eq(0).all()
    assert single.entropy.isnan().all()


def test_samples_of_queries_are_as_large_as_asked_for():
    network = small_network().eval()
    found = measure(network, predictor(network), rows=5, points=2)
    assert dict(found.groupby("queries")["measured"].unique().explode()) == {INDUCING: 2 * M, LABELED: 5, QUERY: 5}
    assert found.equals(measure(network, predictor(network), rows=5, points=2))


def test_sites_are_the_layers_with_a_scalable_softmax():
    network = small_network()
    assert [f"{site.stage}.{site.layer}" for site in sites(network)] == [name for name, _ in network.named_scalings()]
    assert all(isinstance(site.attention.ssmax_layer, Scaling) for site in sites(network))
