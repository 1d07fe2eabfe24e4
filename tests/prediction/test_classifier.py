"""The scikit-learn classifier: its conventions, its ensemble, and input of every type."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.utils.estimator_checks import estimator_checks_generator
from tiny_classifier import FILE, NETWORK, ROWS, classifier, table

from priors.real.preprocessing import FeatureEncoder, Member, Normalizer
from tabicl_train import TabICLClassifier
from tabicl_train.errors import ConfigError
from tabicl_train.model.pack import Pack
from tabicl_train.prediction.predict import predict_logits

CHECKS = list(
    estimator_checks_generator(
        TabICLClassifier(FILE, n_estimators=1),
        expected_failed_checks={"check_classifiers_train": "the weights are random, so accuracy is too"},
        mark="xfail",
    )
)


@pytest.mark.parametrize("estimator, check", CHECKS, ids=lambda value: getattr(value, "func", str).__name__)
def test_scikit_learns_conventions(estimator, check):
    check(estimator)


def test_a_file_and_a_network_predict_alike_and_the_network_stays_as_it_was():
    X, y = table()
    NETWORK.train()
    of_network = classifier().fit(X, y).predict_proba(X)
    assert NETWORK.training
    assert np.array_equal(of_network, TabICLClassifier(FILE, n_estimators=3).fit(X, y).predict_proba(X))
    with pytest.raises(ConfigError, match="no such file or run directory"):
        TabICLClassifier("nowhere").fit(X, y)


@pytest.mark.parametrize("features, shift", [([0, 1, 2, 3, 4, 5], 0), ([3, 1, 5, 0, 4, 2], 2)])
def test_a_member_is_one_pass_of_the_network(features, shift):
    X, y = table()
    numbers = FeatureEncoder().fit(X[:40]).transform(X)
    rows = torch.from_numpy(Normalizer("none").fit(numbers[:40]).transform(numbers)[:, features])
    classes, labels = np.unique(y[:40], return_inverse=True)
    with torch.no_grad():
        logits = NETWORK.eval()(Pack.stack(rows[None], torch.from_numpy((labels + shift) % 3)[None]))[:, :3]
    p = (logits / 0.5).softmax(-1)[:, [(c + shift) % 3 for c in range(3)]]
    model = classifier(n_estimators=1, norm_methods=("none",), softmax_temperature=0.5).fit(X[:40], y[:40])
    if shift:
        model.members_ = [Member("none", np.array(features), shift)]
    assert np.allclose(model.predict_proba(X[40:]), p, atol=1e-6)
    assert list(model.classes_) == list(classes) == ["maybe", "no", "yes"]


def test_an_ensemble_averages_logits_of_different_members():
    X, y = table()
    classes = 3
    y = np.arange(ROWS) % classes
    options = dict(n_estimators=2 * classes)
    whole = classifier(**options).fit(X[:40], y[:40])
    assert len({(m.norm_method, m.shift) for m in whole.members_}) == 2 * classes  # each with each
    assert len({tuple(m.features) for m in whole.members_}) == 2 * classes
    logs = []
    for member in whole.members_:
        one = classifier(**options).fit(X[:40], y[:40])
        one.members_ = [member]
        logs.append(np.log(one.predict_proba(X[40:])))
    mean = np.exp(np.mean(logs, axis=0))
    assert np.allclose(whole.predict_proba(X[40:]), mean / mean.sum(axis=1, keepdims=True), atol=1e-6)
    assert np.std(logs, axis=0).max() > 1e-3


@pytest.mark.parametrize("classes", [3, 14])
def test_memory_limit_changes_nothing_but_the_size_of_packs(classes, monkeypatch):
    sizes = []

    def watched(network, pack, *rest):
        sizes.append(len(pack))
        return predict_logits(network, pack, *rest)

    monkeypatch.setattr("tabicl_train.prediction.classifier.predict_logits", watched)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(400, 5)), np.arange(60) % classes
    whole, some, single = (
        classifier(n_estimators=4, memory_gb=gb).fit(X[:60], y).predict_proba(X[60:]) for gb in (4.0, 5e-3, 1e-4)
    )
    assert sizes == [4, 2, 2, 1, 1, 1, 1]
    assert np.allclose(whole, some, atol=1e-5) and np.allclose(whole, single, atol=1e-5)


@pytest.mark.parametrize("method", ["none", "power", "quantile"])
def test_units_of_columns_make_no_difference(method):
    rng = np.random.default_rng(0)
    X, y = rng.uniform(-1, 1, size=(60, 5)), np.arange(40) % 3

    def predict(units: list[float]) -> np.ndarray:
        model = classifier(norm_methods=(method,)).fit(X[:40] * units, y)
        return model.predict_proba(X[40:] * units)

    expected = predict([1, 1, 1, 1, 1])
    assert np.allclose(predict([1e-8, 1, 1e20, 1e-100, 1e8]), expected, atol=1e-5)
    tiny = predict([1, 1e-200, 1, 1e-160, 1e-310])  # whose squares underflow
    assert np.isfinite(tiny).all() and np.abs(tiny - tiny[0]).max() > 1e-3


def test_query_rows_do_not_change_preprocessing():
    X, y = table()
    model = classifier().fit(X[:40], y[:40])
    p = model.predict_proba(X[40:])
    assert np.allclose(model.predict_proba(X[40:41]), p[:1], atol=1e-6)
    odd = X[40:].copy()
    odd.loc[59, "number"] = 1e9
    assert np.allclose(model.predict_proba(odd)[:-1], p[:-1], atol=1e-6)
    assert np.isfinite(model.predict_proba(odd)).all()


def test_numpy_arrays_of_objects_and_strings():
    y = np.arange(15) % 3
    objects = np.array([[1, "a"], [10, None], [None, "b"]] * 5, dtype=object)
    assert np.allclose(classifier().fit(objects, y).X_[:3], [[1, 0], [10, -1], [5.5, 1]])
    strings = np.array([["1", "a"], ["10", "b"], ["9", "a"]] * 5)
    assert np.allclose(classifier().fit(strings, y).X_[:3], [[1, 0], [10, 1], [9, 0]])


@pytest.mark.parametrize("kind", [bool, float, "category", "string"])
def test_kinds_of_labels(kind):
    X, _ = table()
    y = pd.Series(np.arange(ROWS) % 2).astype(kind)
    predicted = classifier().fit(X, y).predict(X)
    assert set(predicted) <= set(y) and len(predicted) == ROWS


def test_unseen_categories_and_missing_columns_are_answered():
    X, y = table()
    model = classifier().fit(X, y)
    for query in (X.assign(string="new"), X.assign(string=np.nan), X.assign(number=np.nan)):
        p = model.predict_proba(query)
        assert np.isfinite(p).all() and np.allclose(p.sum(axis=1), 1)


def test_many_classes_and_a_class_that_appears_once():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 4)), np.append(np.arange(59) % 25, 25)
    p = classifier().fit(X, y).predict_proba(rng.normal(size=(7, 4)))
    assert p.shape == (7, 26) and np.allclose(p.sum(axis=1), 1) and (p > 0).all()
