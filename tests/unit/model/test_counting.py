"""Costs of networks without formulas, and networks that take dense batches."""

import pytest
import torch
from dense_network import Tiny, TinyConfig
from networks import small_network
from torch import nn

from tabicl_train.model import TabICL
from tabicl_train.model.counting import counted_costs
from tabicl_train.model.dense import dense
from tabicl_train.model.pack import Pack

LARGE = [(200, 140, 12), (1000, 500, 30), (120, 10, 3)]


class Counted(TabICL):
    """A TabICL without its formulas."""


@pytest.mark.parametrize("shape", LARGE)
def test_costs_that_are_counted_on_small_tables_agree_with_formulas_on_large_ones(shape):
    config = small_network(icl_scaling="ssmax", col_scaling="none").config
    costs = counted_costs(Counted, config)
    assert costs.forward_flops(*shape) == pytest.approx(TabICL.forward_flops(config, *shape), rel=0.1)
    assert costs.kept_values(*shape) == pytest.approx(TabICL.kept_values(config, *shape), rel=0.5)


def test_flops_of_a_linear_network_are_exact():
    class Linear(dense(lambda config: nn.Linear(1, 10, bias=False), lambda net, X, y: net(X[:, y.shape[1] :, :1]))):
        pass

    costs = counted_costs(Linear, TinyConfig())
    for N, n, M in LARGE:  # a multiplication and an addition for each query row and output
        assert costs.forward_flops(N, n, M) == pytest.approx(max(2 * 10 * (N - n), N * M), rel=1e-4)


def test_counting_changes_no_random_state():
    config = small_network(embed_dim=8, row_num_heads=2, col_num_heads=2).config
    state = torch.random.get_rng_state()
    counted_costs(Counted, config)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_dense_batches_are_the_tables_of_a_pack_in_their_order():
    network = Tiny(TinyConfig()).eval()
    generator = torch.Generator().manual_seed(0)
    shapes = [(9, 4, 2), (9, 4, 2), (12, 4, 2), (9, 4, 3)]
    tables = []
    for N, n, M in shapes:
        X = torch.randn(N, M, generator=generator)
        tables.append((X, torch.randint(3, (N,), generator=generator), n))
    together = network(Pack.of(tables))
    alone = torch.cat([network(Pack.of([table])) for table in tables])
    torch.testing.assert_close(together, alone)
    sizes = network.network.sizes
    assert sizes[:3] == [2, 1, 1]  # two tables of the same shape are one batch


def test_a_module_whose_predictions_have_another_shape_is_named():
    wrong = dense(lambda config: nn.Linear(1, 10), lambda net, X, y: net(X[:, :, :1]))
    with pytest.raises(ValueError, match=r"predictions have the shape \(1, 9, 10\); it must be \(1, 5, outputs\)"):
        wrong(TinyConfig())(Pack.of([(torch.zeros(9, 2), torch.zeros(9, dtype=torch.int64), 4)]))
