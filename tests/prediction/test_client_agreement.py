"""The classifier beside the public client, with the same weights."""

import numpy as np
import pytest
from tiny_classifier import FILE

from tabicl_train import TabICLClassifier


def client_and_ours(X: np.ndarray, y: np.ndarray, method: str, units: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of the rows without a label; ours with the columns in other units."""
    tabicl = pytest.importorskip("tabicl")
    client = tabicl.TabICLClassifier(
        model_path=FILE, allow_auto_download=False, n_estimators=1, norm_methods=method,
        feat_shuffle_method="none", class_shuffle_method="none", device="cpu",
    )  # fmt: skip
    ours = TabICLClassifier(FILE, n_estimators=1, norm_methods=(method,), device="cpu")
    n = len(y)
    return client.fit(X[:n], y).predict_proba(X[n:]), ours.fit(X[:n] * units, y).predict_proba(X[n:] * units)


@pytest.mark.parametrize("method", ["none", "power"])
@pytest.mark.parametrize("classes", [2, 10, 11, 25, 57, 101])
def test_agreement_with_the_public_client(classes, method):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(5 * classes + 40, 6)) * [1, 10, 0.1, 5, 3, 2] + 1  # outliers are clamped differently
    y = np.resize(np.arange(classes), 5 * classes)
    client, ours = client_and_ours(X, y, method)
    assert np.abs(ours - client).max() < 1e-5
    assert np.abs(client - client[0]).max() > 1e-3


@pytest.mark.parametrize("method", ["none", "power"])
def test_agreement_with_the_public_client_on_small_units_and_two_labelled_rows(method):
    X, y = np.random.default_rng(0).uniform(-1, 1, size=(60, 6)), np.arange(40) % 3
    client, ours = client_and_ours(X, y, method, units=1e-8)  # where the client itself would let the columns fade
    assert np.abs(ours - client).max() < 1e-5
    X[:2] = [[-1] * 6, [1] * 6]  # two labelled rows, and none further away than they are
    client, ours = client_and_ours(X, np.arange(2), method)
    assert np.abs(ours - client).max() < 1e-5
    assert np.abs(client - client[0]).max() > 1e-3
