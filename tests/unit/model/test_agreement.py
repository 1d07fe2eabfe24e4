"""Same weights, same numbers as the released client's network: logits and gradients, in fp32."""

import pytest
import torch
import torch.nn.functional as F
from networks import draw_batch, forward_batch, package_network, randomize, small_network
from torch import nn

from tabicl_train import register
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.public_config import to_public

V1 = {name: getattr(TabICLConfig.v1(), name) for name in (
    "col_affine", "col_grouping", "col_target_aware", "col_scaling", "row_rope_interleaved", "icl_scaling", "zero_init"
)}  # fmt: skip


def logits_and_gradients(network, X, y_train, y_query, compute=forward_batch):
    X = X.clone().requires_grad_()
    logits = compute(network, X, y_train)
    if y_query.is_floating_point():
        levels = torch.linspace(0, 1, logits.shape[-1] + 2)[1:-1]
        error = y_query[..., None] - logits
        torch.maximum(levels * error, (levels - 1) * error).mean().backward()
    else:
        F.cross_entropy(logits.flatten(0, 1), y_query.flatten()).backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.requires_grad}
    return logits.detach(), {"X": X.grad, **gradients}


def assert_agreement(network, batch):
    logits, gradients = logits_and_gradients(network.train(), *batch)
    peer_logits, peer_gradients = logits_and_gradients(package_network(network), *batch, compute=nn.Module.__call__)
    assert (logits - peer_logits).abs().max() < 1e-5
    assert gradients.keys() == peer_gradients.keys()
    for name, expected in peer_gradients.items():
        difference, largest = (gradients[name] - expected).abs().max(), expected.abs().max()
        assert difference < 1e-5 * max(largest, 1), name
        # small gradients too, unless they are zero but for rounding
        assert difference < 1e-4 * max(largest, 1e-3), name


@pytest.mark.parametrize("rule", [name for name, rule in register.scaling.items() if rule.public])
def test_scaling_rules(rule):
    assert_agreement(small_network(col_scaling=rule, icl_scaling=rule), draw_batch(2, 24, 5, 15))


@pytest.mark.parametrize("M", [1, 3, 30])
@pytest.mark.parametrize(
    "options",
    [
        dict(col_grouping="none"),
        dict(col_grouping="circular"),
        dict(col_grouping="circular", col_group_size=4),
        dict(col_grouping="disjoint"),
        dict(col_grouping="disjoint", col_group_size=2),
        V1,
    ],
    ids=["none", "circular", "circular-4", "disjoint", "disjoint-2", "v1"],
)
def test_features_and_groupings(options, M):
    assert_agreement(small_network(**options), draw_batch(2, 20, M, 12))


@pytest.mark.parametrize("B, N, n", [(1, 2, 1), (3, 17, 16), (1, 300, 250)])
@pytest.mark.parametrize("options", [{}, V1], ids=["v2", "v1"])
def test_rows_and_splits(options, B, N, n):
    assert_agreement(small_network(**options), draw_batch(B, N, 4, n))


@pytest.mark.parametrize(
    "options",
    [
        dict(row_rope_interleaved=True),
        dict(row_rope_base=500.0),
        dict(bias_free_ln=True),
        dict(bias_free_ln=True, **V1),
        dict(col_target_aware=False),
        dict(col_target_aware=True, **{k: v for k, v in V1.items() if k != "col_target_aware"}),
        dict(max_classes=4),
        dict(max_classes=0),
        dict(max_classes=0, num_quantiles=20, bias_free_ln=True, row_rope_interleaved=True),
        dict(max_classes=0, col_grouping="disjoint", col_scaling="none", icl_scaling="ssmax"),
        dict(max_classes=0, **V1),
        dict(row_num_cls=3, icl_num_heads=6),
        dict(ff_factor=3),
        dict(col_num_blocks=1, row_num_blocks=1, icl_num_blocks=1),
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items() if k not in V1 or len(options) == 1),
)
def test_other_options(options):
    assert_agreement(small_network(**options), draw_batch(2, 20, 6, 13, classes=options.get("max_classes", 10)))


REGRESSION = TabICLConfig(max_classes=0, bias_free_ln=True)


@pytest.mark.slow  # test_export.py compares exports of the same presets
@pytest.mark.parametrize("config", [TabICLConfig.v1(), TabICLConfig(), REGRESSION], ids=["v1", "v2", "regression"])
def test_full_size(config):
    torch.manual_seed(0)
    network = TabICL(config)
    randomize(network)
    X, y_train, _ = draw_batch(1, 30, 5, 20, classes=config.max_classes)
    peer = package_network(network)  # loads the weights, so names and shapes are the same
    frozen = [name for name, p in network.named_parameters() if not p.requires_grad]
    assert frozen == [name for name, p in peer.named_parameters() if not p.requires_grad]
    with torch.no_grad():
        difference = (forward_batch(network, X, y_train) - peer(X, y_train)).abs().max()
    assert difference < 1e-4  # logits of these 27 M random weights are an order larger than those of the small networks


@pytest.mark.parametrize("options", [dict(zero_init=True), dict(zero_init=False), V1], ids=["zero", "default", "v1"])
def test_initialization_has_the_statistics_of_the_client(options):
    from tabicl._model.tabicl import TabICL as Peer

    config = TabICLConfig(embed_dim=64, col_num_blocks=1, row_num_blocks=1, icl_num_blocks=1, **options)
    torch.manual_seed(0)
    network, peer = TabICL(config), Peer(**to_public(config))
    expected = peer.state_dict()
    for name, weight in network.state_dict().items():
        other = expected[name]
        if other.std() == 0:
            assert torch.equal(weight, other), name  # zeros and ones, exactly
        elif weight.numel() >= 512:
            sample = weight.numel() ** -0.5  # relative standard error of a standard deviation is below this
            assert abs(weight.std() / other.std() - 1) < 4 * sample, name
            assert (weight.mean() - other.mean()).abs() < 6 * sample * other.std(), name
            assert abs(weight.abs().max() / other.abs().max() - 1) < 0.5, name  # uniform or normal
    inducing = network.state_dict()["col_embedder.tf_col.blocks.0.ind_vectors"]
    assert abs(inducing.std() / 0.02 - 1) < 0.05
