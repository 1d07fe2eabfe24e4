"""Networks that take dense batches."""

import io
import pickle

import joblib
import numpy as np
import pytest
import torch
from dense_network import Tiny, TinyConfig, TinyModule
from torch import nn

from tabicl_train import TabICLClassifier, register
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


def through_file(dump, load):
    def sent(value):
        file = io.BytesIO()
        dump(value, file)
        file.seek(0)
        return load(file)

    return sent


BY_LAMBDA = dense(lambda config: TinyModule(config), lambda module, X, y: module(X, y))


@pytest.mark.parametrize(("made", "registered"), [(Tiny, True), (Tiny, False), (BY_LAMBDA, True)])
def test_estimators_with_a_dense_network_are_pickled(made, registered, monkeypatch):
    if registered:
        monkeypatch.setattr(register.network, "_entries", dict(register.network._entries))
        register.network("tiny_dense", made, settings=TinyConfig)
    X = np.random.default_rng(0).normal(size=(24, 3))
    fitted = TabICLClassifier(made(TinyConfig()), n_estimators=1).fit(X, X[:, 0] > 0)
    expected = fitted.predict_proba(X)
    for sent in (
        lambda estimator: pickle.loads(pickle.dumps(estimator)),
        lambda estimator: pickle.loads(pickle.dumps(estimator, protocol=2)),
        through_file(joblib.dump, joblib.load),
        through_file(torch.save, lambda file: torch.load(file, weights_only=False)),
    ):
        received = sent(fitted)
        assert np.array_equal(received.predict_proba(X), expected)
        assert type(received.network_) is made or not registered
        assert np.array_equal(received.fit(X, X[:, 0] > 0).predict_proba(X), expected)  # its parameter, too
