"""What the network must do whatever its weights: no leakage, symmetries, exact recomputation, clear refusals."""

import pytest
import torch
import torch.nn.functional as F
from small_networks import draw, logits_of, small_network

from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.column import feature_index
from tabicl_train.model.layout import column_layout
from tabicl_train.model.pack import Pack

V1 = dict(col_affine=True, col_grouping="none", col_target_aware=False, col_scaling="none", icl_scaling="none")
SSA = dict(col_scaling="ssa", icl_scaling="ssa_trainable")
both_versions = pytest.mark.parametrize("options", [{}, V1], ids=["v2", "v1"])
and_averaging = pytest.mark.parametrize("options", [{}, V1, SSA], ids=["v2", "v1", "ssa"])


@and_averaging
def test_a_query_row_does_not_see_another(options):
    network = small_network(**options)
    X, y_train, _ = draw(2, 20, 4, 12)
    changed = X.clone()
    changed[0, 15] += 1.0  # the fourth query row of the first table
    with torch.no_grad():
        difference = (
            (logits_of(network, X, y_train) - logits_of(network, changed, y_train)).abs().amax(-1)
        )  # (B, n_query)
    assert difference[0, 3] > 1e-3
    difference[0, 3] = 0
    assert difference.max() == 0


@and_averaging
def test_order_of_labelled_rows_does_not_matter_but_their_labels_do(options):
    network = small_network(**options)
    X, y_train, _ = draw(2, 20, 4, 12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    permuted = torch.cat([X[:, :12][:, order], X[:, 12:]], 1)
    with torch.no_grad():
        logits = logits_of(network, X, y_train)
        torch.testing.assert_close(logits_of(network, permuted, y_train[:, order]), logits, rtol=0, atol=1e-5)
        assert (logits_of(network, X, y_train[:, order]) - logits).abs().max() > 1e-2


@both_versions
def test_tables_of_a_batch_are_independent(options):
    network = small_network(**options)
    X, y_train, _ = draw(3, 20, 4, 12)
    with torch.no_grad():
        alone = torch.cat([logits_of(network, X[i : i + 1], y_train[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(logits_of(network, X, y_train), alone, rtol=0, atol=1e-5)


def test_order_of_features_matters():
    network = small_network()
    X, y_train, _ = draw(1, 20, 4, 12)
    with torch.no_grad():
        assert (logits_of(network, X, y_train) - logits_of(network, X.flip(2), y_train)).abs().max() > 1e-2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("grouping", ["none", "circular", "disjoint"])
def test_feature_groups(grouping, size):
    """Tables of 1, 2, 3 and 7 features in one pack; the tokens of labelled rows come first."""
    shapes = [(5, 2, 1), (4, 3, 2), (6, 1, 7), (6, 5, 3)]
    pack = Pack.of((torch.rand(N, M), torch.zeros(N, dtype=torch.int64), n) for N, n, M in shapes)
    size = 1 if grouping == "none" else size
    groups = [-(-M // size) if grouping == "disjoint" else M for _, _, M in shapes]
    expected = []
    for labelled in (True, False):
        for (X, _, n), G in zip(pack.tables(), groups, strict=True):
            N, M = X.shape
            for j in range(G):
                seen = {
                    "none": [j],
                    "circular": [(j + 2**i) % M for i in range(size)],
                    "disjoint": range(j * size, j * size + size),
                }[grouping]
                rows = range(n) if labelled else range(n, N)
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
    X, y_train, y_query = draw(2, 21, 4, 12)
    results = {}
    for threshold in (0, 20, 21):
        network = small_network(dropout=dropout, checkpoint_rows=threshold, **options).train()
        recomputed.clear()
        torch.manual_seed(5)
        logits = logits_of(network, X, y_train)
        F.cross_entropy(logits.flatten(0, 1), y_query.flatten()).backward()
        results[threshold] = [logits, *(p.grad for p in network.parameters() if p.requires_grad)]
        assert len(recomputed) == (6 if threshold == 20 else 0)  # every block of tables with more than 20 rows
    for a, b, c in zip(*results.values(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_dropout_is_off_in_evaluation():
    X, y_train, _ = draw(1, 20, 4, 12)
    network, without = small_network(dropout=0.5), small_network()
    with torch.no_grad():
        assert torch.equal(logits_of(network.eval(), X, y_train), logits_of(without.eval(), X, y_train))
        assert not torch.equal(logits_of(network.train(), X, y_train), logits_of(without.train(), X, y_train))


@and_averaging
def test_bf16_autocast_is_close_to_float32(options):
    torch.manual_seed(0)
    network = TabICL(TabICLConfig(embed_dim=32, icl_num_blocks=2, **options))
    X, y_train, _ = draw(2, 60, 5, 40)
    with torch.no_grad():
        exact = logits_of(network, X, y_train)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = logits_of(network, X, y_train)
    assert (rounded.float() - exact).norm() < 0.03 * exact.norm()


def test_every_parameter_learns():
    X, y_train, y_query = draw(2, 20, 4, 12)
    for options in ({}, V1, SSA):
        network = small_network(**options)
        F.cross_entropy(logits_of(network, X, y_train).flatten(0, 1), y_query.flatten()).backward()
        for name, p in network.named_parameters():
            assert not p.requires_grad or p.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    "X, y_train, message",
    [
        (torch.zeros(2, 9), torch.zeros(2, 4).long(), "X must be (tables, rows, features)"),
        (torch.zeros(2, 9, 3).double(), torch.zeros(2, 4).long(), "X must be float32"),
        (torch.zeros(2, 9, 0), torch.zeros(2, 4).long(), "X must be (tables, rows, features)"),
        (torch.zeros(2, 9, 3), torch.zeros(4).long(), "y_train (tables, labelled rows)"),
        (torch.zeros(2, 9, 3), torch.zeros(3, 4).long(), "y_train (tables, labelled rows)"),
        (torch.zeros(2, 9, 3), torch.zeros(2, 4), "labels int64"),
        (torch.zeros(2, 9, 3), torch.zeros(2, 0).long(), "of 9 rows 0 are labelled"),
        (torch.zeros(2, 9, 3), torch.zeros(2, 9).long(), "of 9 rows 9 are labelled"),
        (torch.zeros(2, 9, 3), torch.full((2, 4), 10), "labels must be in 0..9, are in 0..10"),
        (torch.zeros(2, 9, 3), torch.full((2, 4), -1), "labels must be in 0..9, are in -1..0"),
    ],
)
def test_wrong_input_is_refused(X, y_train, message):
    with pytest.raises(ValueError) as error:
        logits_of(small_network(), X, y_train)
    assert message in str(error.value)
