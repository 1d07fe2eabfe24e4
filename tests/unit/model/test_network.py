"""What the network must do whatever its weights: no leakage, symmetries, exact recomputation, clear refusals."""

from dataclasses import replace

import averaging_flops  # noqa: F401  # formulas for the counter
import pytest
import torch
import torch.nn.functional as F
from networks import draw_batch, forward_batch, small_network
from torch.utils.flop_counter import FlopCounterMode

from tabicl_train.model import TabICL, TabICLConfig, attention
from tabicl_train.model.pack import Pack, column_layout
from tabicl_train.model.quantiles import PinballFunction, pinball
from tabicl_train.model.stages import feature_index
from tabicl_train.training.module import query_losses

V1 = dict(col_affine=True, col_grouping="none", col_target_aware=False, col_scaling="none", icl_scaling="none")
SSA = dict(col_scaling="ssa", icl_scaling="ssa_trainable")
NUMBERS = dict(max_classes=0, num_quantiles=30)
and_numbers = pytest.mark.parametrize("options", [{}, V1, SSA, NUMBERS], ids=["v2", "v1", "ssa", "numbers"])
and_averaging = pytest.mark.parametrize("options", [{}, V1, SSA], ids=["v2", "v1", "ssa"])


@and_numbers
def test_a_query_row_does_not_see_another(options):
    network = small_network(**options)
    X, y_train, _ = draw_batch(2, 20, 4, 12, classes=network.config.max_classes)
    changed = X.clone()
    changed[0, 15] += 1.0  # the fourth query row of the first table
    with torch.no_grad():
        difference = (
            (forward_batch(network, X, y_train) - forward_batch(network, changed, y_train)).abs().amax(-1)
        )  # (B, n_query)
    assert difference[0, 3] > 1e-3
    difference[0, 3] = 0
    assert difference.max() == 0


@and_numbers
def test_order_of_labeled_rows_does_not_matter_but_their_labels_do(options):
    network = small_network(**options)
    X, y_train, _ = draw_batch(2, 20, 4, 12, classes=network.config.max_classes)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    permuted = torch.cat([X[:, :12][:, order], X[:, 12:]], 1)
    with torch.no_grad():
        logits = forward_batch(network, X, y_train)
        torch.testing.assert_close(forward_batch(network, permuted, y_train[:, order]), logits, rtol=0, atol=1e-5)
        assert (forward_batch(network, X, y_train[:, order]) - logits).abs().max() > 1e-2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("grouping", ["none", "circular", "disjoint"])
def test_feature_groups(grouping, size):
    """Tables of 1, 2, 3 and 7 features in one pack; the tokens of labeled rows come first."""
    shapes = [(5, 2, 1), (4, 3, 2), (6, 1, 7), (6, 5, 3)]
    pack = Pack.of((torch.rand(N, M), torch.zeros(N, dtype=torch.int64), n) for N, n, M in shapes)
    size = 1 if grouping == "none" else size
    groups = [-(-M // size) if grouping == "disjoint" else M for _, _, M in shapes]
    expected = []
    for labeled in (True, False):
        for (X, _, n), G in zip(pack.tables(), groups, strict=True):
            N, M = X.shape
            for j in range(G):
                seen = {
                    "none": [j],
                    "circular": [(j + 2**i) % M for i in range(size)],
                    "disjoint": range(j * size, j * size + size),
                }[grouping]
                rows = range(n) if labeled else range(n, N)
                expected += [[float(X[row, k]) if k < M else 0.0 for k in seen] for row in rows]
    counts = [(N, n, G) for (N, n, _), G in zip(shapes, groups, strict=True)]
    columns = column_layout(torch.tensor(counts), counts, inducing=4)
    padded = torch.cat([pack.X, torch.zeros(6)])
    assert padded[feature_index(pack.sizes, shapes, columns, grouping, size)].tolist() == expected


@pytest.mark.parametrize("options, dropout", [({}, 0.0), ({}, 0.2), (V1, 0.0), (V1, 0.2), (SSA, 0.0)])
def test_recomputing_activations_changes_no_bit(options, dropout, monkeypatch):
    recomputed = []
    from torch.utils.checkpoint import checkpoint

    monkeypatch.setattr(
        "tabicl_train.model.attention.checkpoint",
        lambda block, *args, **kwargs: (recomputed.append(block), checkpoint(block, *args, **kwargs))[1],
    )
    X, y_train, y_query = draw_batch(2, 21, 4, 12)
    results = {}
    for threshold in (0, 20, 21):
        network = small_network(dropout=dropout, checkpoint_rows=threshold, **options).train()
        recomputed.clear()
        torch.manual_seed(5)
        logits = forward_batch(network, X, y_train)
        F.cross_entropy(logits.flatten(0, 1), y_query.flatten()).backward()
        results[threshold] = [logits, *(p.grad for p in network.parameters() if p.requires_grad)]
        assert len(recomputed) == (6 if threshold == 20 else 0)  # every block of tables with more than 20 rows
    for a, b, c in zip(*results.values(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_dropout_is_off_in_evaluation():
    X, y_train, _ = draw_batch(1, 20, 4, 12)
    network, without = small_network(dropout=0.5), small_network()
    with torch.no_grad():
        assert torch.equal(forward_batch(network.eval(), X, y_train), forward_batch(without.eval(), X, y_train))
        assert not torch.equal(forward_batch(network.train(), X, y_train), forward_batch(without.train(), X, y_train))


@and_averaging
def test_bf16_autocast_is_close_to_float32(options):
    torch.manual_seed(0)
    network = TabICL(TabICLConfig(embed_dim=32, icl_num_blocks=2, **options))
    X, y_train, _ = draw_batch(2, 60, 5, 40)
    with torch.no_grad():
        exact = forward_batch(network, X, y_train)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = forward_batch(network, X, y_train)
    assert (rounded.float() - exact).norm() < 0.03 * exact.norm()


def pinball_in_float64(quantiles, y):
    """Losses (rows,), by the definition."""
    a = torch.arange(1, quantiles.shape[1] + 1).double() / (quantiles.shape[1] + 1)
    error = y.double()[:, None] - quantiles
    return torch.maximum(a * error, (a - 1) * error).mean(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantiles", [1, 999])
def test_pinball_loss_and_gradient_are_those_of_its_definition(quantiles, dtype, monkeypatch):
    monkeypatch.setattr(PinballFunction, "PART", 5 * quantiles)  # the last of three parts has two rows
    generator = torch.Generator().manual_seed(0)
    q = (2 * torch.randn(12, quantiles, generator=generator)).to(dtype).requires_grad_()
    y, weights = torch.randn(12, generator=generator), torch.rand(12, generator=generator)
    exact = q.detach().double().requires_grad_()
    expected = pinball_in_float64(exact, y)
    (expected * weights).sum().backward()
    losses = pinball(q, y)
    (losses * weights).sum().backward()
    assert losses.dtype == torch.float32 and q.grad.dtype == dtype
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    rounding = {"rtol": max(torch.finfo(dtype).eps, 1e-5), "atol": 1e-7 if dtype == torch.float16 else 1e-10}
    torch.testing.assert_close(q.grad.double(), exact.grad, **rounding)


def test_losses_are_means_over_the_query_rows_of_each_table_in_fp32():
    network = small_network(**NUMBERS)
    shapes = [(20, 8, 3), (9, 8, 1), (30, 12, 5)]
    generator = torch.Generator().manual_seed(0)
    tables = [(torch.randn(N, M, generator=generator), torch.randn(N, generator=generator), n) for N, n, M in shapes]
    pack = Pack.of(tables)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        losses, predictions = query_losses(network, pack), network(pack)
    assert predictions.dtype == torch.bfloat16
    assert losses.dtype == torch.float32
    assert losses.shape == (3,)
    found = predictions.double().split([N - n for N, n, _ in shapes])
    expected = [pinball_in_float64(q, y[n:]).mean() for q, (_, y, n) in zip(found, tables, strict=True)]
    torch.testing.assert_close(losses.double(), torch.stack(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "X, y_train, message",
    [
        (torch.zeros(2, 9), torch.zeros(2, 4).long(), "they must be (tables, rows, features)"),
        (torch.zeros(2, 9, 3).double(), torch.zeros(2, 4).long(), "they must be float32"),
        (torch.zeros(2, 9, 0), torch.zeros(2, 4).long(), "they must be (tables, rows, features)"),
        (torch.zeros(2, 9, 3), torch.zeros(4).long(), "and (tables, labeled rows)"),
        (torch.zeros(2, 9, 3), torch.zeros(3, 4).long(), "and (tables, labeled rows)"),
        (torch.zeros(2, 9, 3), torch.zeros(2, 4), "they must be float32 and int64"),
        (torch.zeros(2, 9, 3), torch.zeros(2, 0).long(), "0 of 9 rows are labeled"),
        (torch.zeros(2, 9, 3), torch.zeros(2, 9).long(), "9 of 9 rows are labeled"),
        (torch.zeros(2, 9, 3), torch.full((2, 4), 10), "labels are in 0..10; they must be in 0..9"),
        (torch.zeros(2, 9, 3), torch.full((2, 4), -1), "labels are in -1..0; they must be in 0..9"),
    ],
)
def test_wrong_input_is_refused(X, y_train, message):
    with pytest.raises(ValueError) as error:
        forward_batch(small_network(), X, y_train)
    assert message in str(error.value)


COUNTED = TabICLConfig(
    embed_dim=32, col_num_blocks=2, col_num_heads=4, col_num_inducing=16, row_num_blocks=2, row_num_heads=4,
    row_num_cls=2, icl_num_blocks=3, icl_num_heads=4,
)  # fmt: skip
V1_LIKE = replace(
    COUNTED, col_grouping="none", col_affine=True, col_target_aware=False, col_scaling="none", icl_scaling="none"
)
AVERAGED = replace(COUNTED, col_scaling="ssa", icl_scaling="ssa_trainable")


@pytest.mark.parametrize(
    "config",
    [
        COUNTED,
        V1_LIKE,
        replace(COUNTED, col_grouping="disjoint", icl_scaling="qassmax"),
        replace(COUNTED, ff_factor=3),
        AVERAGED,
        replace(COUNTED, max_classes=0, num_quantiles=300),
    ],
)
@pytest.mark.parametrize(("rows", "train", "features"), [(64, 10, 25), (300, 290, 2)])
def test_flops_agree_with_a_count_of_the_kernels(config, rows, train, features, monkeypatch):
    monkeypatch.setattr(attention, "MIN_SCORES", 0)  # products alone, since torch does not count its kernel for CPUs
    monkeypatch.setattr(attention, "MAX_SCORES", 2**60)
    monkeypatch.setattr(attention, "MIN_KEYS", 0)
    X, y = (
        torch.zeros(4, rows, features),
        torch.zeros(4, train, dtype=torch.float32 if config.is_regression else torch.int64),
    )
    model = TabICL(config)
    with FlopCounterMode(display=False) as counter:
        model(Pack.stack(X, y))
    # left out: once a forward pass, the projection and gate of the inducing vectors, and label embeddings of columns
    assert 4 * TabICL.forward_flops(config, rows, train, features) == pytest.approx(counter.get_total_flops(), rel=0.02)
