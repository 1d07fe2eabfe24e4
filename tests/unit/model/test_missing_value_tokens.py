"""Missing values, NaN, as tokens that the network learns."""

import dataclasses

import pytest
import torch
from networks import draw_batch, forward_batch, small_network

from tabicl_train.model import TabICL
from tabicl_train.model.pack import Pack, column_layout, log_counts
from tabicl_train.model.stages import feature_index
from tabicl_train.prediction.predict import predict_logits

V1 = dict(col_affine=True, col_grouping="none", col_target_aware=False, col_scaling="none", icl_scaling="none")
NUMBERS = dict(max_classes=0, num_quantiles=30)
DISJOINT = dict(col_grouping="disjoint")
kinds = pytest.mark.parametrize("options", [{}, V1, DISJOINT, NUMBERS], ids=["v2", "v1", "disjoint", "numbers"])


def with_gaps(B: int, N: int, M: int, n: int, **options):
    """draw, with 30 % of the cells missing, and which ones."""
    X, *y = draw_batch(B, N, M, n, **options)
    gaps = torch.rand(X.shape, generator=torch.Generator().manual_seed(2)) < 0.3
    return X.masked_fill(gaps, torch.nan), gaps, *y


def seeing(network: TabICL) -> TabICL:
    """The network with the option, as it begins."""
    other = TabICL(dataclasses.replace(network.config, missing_values=True))
    begin = other.col_embedder.missing_values
    assert begin.abs().max() == 0
    other.load_state_dict(network.state_dict() | {"col_embedder.missing_values": begin})
    return other


@kinds
@pytest.mark.parametrize("N, M, n", [(24, 5, 15), (300, 7, 200), (9, 1, 3)])
def test_a_new_token_is_the_mean_of_a_standardized_column(options, N, M, n):
    network = small_network(**options)
    X, _, y, _ = with_gaps(2, N, M, n, classes=network.config.max_classes)
    with torch.no_grad():
        found, expected = forward_batch(seeing(network), X, y), forward_batch(network, X.nan_to_num(0.0), y)
    if options is V1:  # a product of one number and one weight is rounded otherwise than a sum of two products
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    else:
        assert torch.equal(found, expected)


@kinds
def test_tokens_before_attention_are_those_of_the_formula_in_float64(options):
    network = small_network(missing_values=True, **options)
    config, column = network.config, network.col_embedder
    X, _, y, _ = with_gaps(2, 12, 7, 8, classes=config.max_classes)
    pack = Pack.stack(X, y)
    sizes, shapes = network.groups(pack)
    columns = column_layout(sizes, shapes, config.col_num_inducing)
    column.tf_col["blocks"] = torch.nn.ModuleList()
    affine, column.config = config.col_affine, dataclasses.replace(config, col_affine=False)
    with torch.no_grad():
        tokens = column(pack, columns, log_counts(sizes))

    padded = torch.cat([pack.X, torch.zeros(12)]).double()  # disjoint groups may reach behind the last column
    places = feature_index(pack.sizes, pack.shapes, columns, config.col_grouping, config.group_size)
    labels = pack.y.index_select(0, columns.labels)
    weight, missing = column.in_linear.weight.double(), column.missing_values.double()
    for token, place in enumerate(places):
        expected = column.in_linear.bias.double().clone()
        for k, value in enumerate(padded[place]):
            expected += missing[:, k] if value.isnan() else value * weight[:, k]
        if token < columns.labeled and not affine:
            label, encoder = labels[token], column.y_encoder
            expected += encoder.bias + (
                label * encoder.weight[:, 0] if config.is_regression else encoder.weight[:, label]
            )
        torch.testing.assert_close(tokens[token].double(), expected, rtol=0, atol=1e-5)


@kinds
def test_which_cells_are_missing_matters_and_their_rows_order_does_not(options):
    network = small_network(missing_values=True, **options)
    X, gaps, y, _ = with_gaps(1, 20, 4, 12, classes=network.config.max_classes)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    permuted = torch.cat([X[:, :12][:, order], X[:, 12:]], 1)
    query = X.clone()
    query[0, 15] = torch.nan
    with torch.no_grad():
        found = forward_batch(network, X, y)
        torch.testing.assert_close(forward_batch(network, permuted, y[:, order]), found, rtol=0, atol=1e-5)
        values = X.nan_to_num(0.0)
        for other in (values, values.masked_fill(gaps.roll(1, 2), torch.nan)):
            assert (forward_batch(network, other, y) - found).abs().max() > 1e-2
        difference = (forward_batch(network, query, y) - found).abs().amax(-1)[0]  # of the query rows
    assert difference[3] > 1e-3
    difference[3] = 0
    assert difference.max() == 0  # a query row does not see the gaps of another


@pytest.mark.parametrize("options", [{}, V1, DISJOINT], ids=["v2", "v1", "disjoint"])
@pytest.mark.parametrize("classes", [5, 23])
def test_tables_of_a_pack_are_predicted_one_by_one_and_in_parts(options, classes):
    network = small_network(missing_values=True, **options).eval()
    tables = []
    for N, M, n in ((60, 3, 40), (31, 8, 25), (60, 3, 40)):
        X, _, y, _ = with_gaps(1, N, M, n, seed=N + M)
        tables.append((X[0], torch.cat([torch.arange(n) % classes, y.new_zeros(N - n)]), n))
    pack = Pack.of(tables)
    together = predict_logits(network, pack, classes)
    alone = [predict_logits(network, Pack.of([table]), classes) for table in tables]
    assert together.isfinite().all()
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-4)
    torch.testing.assert_close(predict_logits(network, pack, classes, tokens=90), together, rtol=0, atol=1e-4)
    if classes <= 10:
        with torch.no_grad():
            torch.testing.assert_close(network(pack)[:, :classes], together, rtol=0, atol=1e-5)
