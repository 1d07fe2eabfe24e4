"""Networks that take dense batches."""

import pytest
import torch
from dense_network import Tiny, TinyConfig
from torch import nn

from tabicl_train.model.dense import dense
from tabicl_train.model.pack import Pack


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
