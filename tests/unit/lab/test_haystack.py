"""Tables with queries of different sharpness, and the network with gates on outputs of attention."""

import numpy as np
import pytest
import torch
from networks import SMALL, draw_batch, randomize, small_network

from priors import TableSpec, build_prior
from tabicl_train.lab.haystack import EVEN
from tabicl_train.lab.identity_start import IdentityStart, IdentityStartConfig
from tabicl_train.lab.output_gate import OutputGate, OutputGateConfig
from tabicl_train.model import TabICL
from tabicl_train.model.pack import Pack
from tabicl_train.model.predict import forward_differs, predict
from tabicl_train.model.scaling import gate_flops


def test_the_nearest_row_answers_queries_at_needles_and_many_rows_those_in_the_crowd():
    needles, negatives, queries = 4, 3000, 80
    spec = TableSpec(needles + negatives + queries, needles + negatives, 2, needles)
    table = build_prior("haystack", needles=needles).sample(spec, 0)
    n = table.train_size
    distances = torch.cdist(table.X[n:], table.X[:n])
    labels, truth = table.y[:n], table.y[n:]
    near = (labels[distances.argsort(1)[:, :200]][..., None] == torch.arange(needles)).sum(1)  # (queries, classes)
    nearest = labels[distances.argmin(1)] == truth
    many = near.argmax(1) == truth
    assert nearest[0::2].all() and many[1::2].all()
    assert nearest[1::2].double().mean() < 0.6
    assert many[0::2].double().mean() < 0.6
    share = near[1::2].gather(1, truth[1::2, None]).double().mean() / 200
    assert share.item() == pytest.approx(0.4, abs=0.05)
    # Whoever counts the labels of all rows is right as often as the dotted lines of the figure say.
    guess = labels.bincount().argmax()
    for name, asked in (("needle", truth[0::2]), ("crowd", truth[1::2])):
        assert (asked == guess).double().mean().item() == pytest.approx(EVEN[name], abs=0.15)
    assert table.rejections.total() == 0  # every second query is beside a needle, so they keep their order


def gated(random: bool, **options) -> OutputGate:
    torch.manual_seed(0)
    network = OutputGate(OutputGateConfig(**{**SMALL, **options}))
    if random:
        randomize(network)
    return network.eval()


@torch.no_grad()
def test_gates_of_outputs_start_at_one_and_multiply_the_output_of_each_head():
    network = gated(random=True)
    X, y_train, y_query = draw_batch(1, 30, 4, 20)
    pack = Pack.of([(X[0], torch.cat([y_train, y_query], 1)[0], 20)])
    weights = network.state_dict()
    plain = small_network(icl_scaling="ssmax_mlp_elementwise").eval()
    plain.load_state_dict({name: weight for name, weight in weights.items() if "output_gate" not in name})
    assert not torch.allclose(network(pack), plain(pack), atol=1e-3)

    # A constant gate of 1 + tanh(b) is a larger output projection.
    for block in network.icl_predictor.tf_icl["blocks"]:
        last = block.attn.output_gate[-1]
        last.weight.zero_()
        last.bias.fill_(0.3)
    for block in plain.icl_predictor.tf_icl["blocks"]:
        block.attn.out_proj.weight.mul_(1 + np.tanh(0.3))
    torch.testing.assert_close(network(pack), plain(pack), rtol=1e-4, atol=1e-5)

    fresh = gated(random=False)
    same = [name for name, weight in fresh.state_dict().items() if "output_gate.2" in name and weight.abs().max() == 0]
    assert len(same) == 2 * fresh.config.icl_num_blocks
    assert forward_differs(network) is None
    torch.testing.assert_close(predict(network, pack), network(pack), rtol=0, atol=1e-5)
    more = OutputGate.forward_flops(network.config, 30, 20, 4) - TabICL.forward_flops(network.config, 30, 20, 4)
    queries = 30 * (network.config.icl_num_blocks - 1) + 10
    assert more == queries * gate_flops(network.config.row_dim, network.config.icl_num_heads, elementwise=True)


def test_gates_are_for_rules_with_softmax():
    (problem,) = OutputGateConfig(**{**SMALL, "icl_scaling": "ssa"}).problems()
    assert "a gate on the output needs a rule of softmax" in problem


@torch.no_grad()
def test_a_network_that_starts_at_identity_is_plain_softmax_before_training():
    torch.manual_seed(0)
    network = IdentityStart(IdentityStartConfig(**SMALL)).eval()
    weights = {name: weight for name, weight in network.state_dict().items() if "ssmax" not in name}
    plain = small_network(col_scaling="none", icl_scaling="none").eval()
    plain.load_state_dict(weights)
    X, y_train, y_query = draw_batch(1, 30, 4, 20)
    pack = Pack.of([(X[0], torch.cat([y_train, y_query], 1)[0], 20)])
    torch.testing.assert_close(network(pack), plain(pack), rtol=0, atol=1e-5)
    (problem,) = IdentityStartConfig(**{**SMALL, "col_scaling": "none", "icl_scaling": "ssmax"}).problems()
    assert problem.startswith("neither col_scaling nor icl_scaling is a QASSMax")
