"""Estimators on tables with gaps, for a network that sees them and one that does not."""

import dataclasses
import pickle
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
from dense_network import Tiny, TinyConfig, TinyModule
from networks import TINY, TINY_REGRESSOR, tiny_network

from tabicl_train import TabICLClassifier, TabICLRegressor
from tabicl_train.model.dense import dense
from tabicl_train.model.family import Network


@dataclasses.dataclass
class SeeingConfig(TinyConfig):
    missing_values: ClassVar[bool] = True


def networks() -> tuple[Network, Network]:
    """One of one's own to which a missing value is a 2, and one that does not see any; with the same weights."""
    seeing = dense(TinyModule, call=lambda module, X, y: module(X.nan_to_num(2.0), y))(SeeingConfig())
    blind = Tiny(TinyConfig())
    blind.load_state_dict(seeing.state_dict())
    return seeing, blind


def table() -> tuple[pd.DataFrame, np.ndarray]:
    """60 rows of numbers that are standardized among the first 40, and a category; the cells at hand may be emptied."""
    rng = np.random.default_rng(0)
    numbers = rng.choice([-1.0, 1.0], (60, 3))
    X = pd.DataFrame(numbers, columns=list("abc")).assign(kind=rng.choice(["x", "y", "z"], 60))
    return X, rng.integers(0, 3, 60)


def test_a_gap_is_seen_by_a_network_that_reads_them():
    def probabilities(network, X):
        return TabICLClassifier(network, n_estimators=3).fit(X[:40], y[:40]).predict_proba(X[40:])

    X, y = table()
    network, blind = networks()
    assert np.array_equal(probabilities(network, X), probabilities(blind, X))  # there are no gaps
    gaps = X.copy()
    gaps.loc[[3, 12, 45], "a"], gaps.loc[[5, 50], "kind"] = np.nan, None
    found = probabilities(network, gaps)
    assert np.isfinite(found).all()
    assert not np.allclose(found, probabilities(blind, gaps), atol=1e-4)
    filled = gaps.assign(a=gaps["a"].fillna(gaps["a"][:40].mean()))
    assert np.array_equal(probabilities(blind, gaps), probabilities(blind, filled))
    assert not np.allclose(found, probabilities(network, filled), atol=1e-4)


def test_columns_that_only_gaps_make_vary_and_rows_of_gaps_alone_are_predicted():
    X, y = table()
    X["flag"] = np.where(X["a"] > 0, 1.0, np.nan)
    X.loc[7] = X.loc[44] = np.nan
    network, blind = networks()
    # Each count includes the copy of "kind" with its categories in the order of their targets.
    for model, columns in ((network, 6), (blind, 5)):
        fitted = TabICLClassifier(model, n_estimators=2).fit(X[:40], y[:40])
        assert fitted.X_.shape == (40, columns)
        assert np.isnan(fitted.X_).any() == (model is network)
        assert np.isfinite(fitted.predict_proba(X[40:])).all()


@pytest.mark.parametrize("config", [TINY, TINY_REGRESSOR], ids=["classes", "numbers"])
def test_a_network_without_gaps_sees_those_that_tell_the_target(config):
    """Members have different numbers of columns; a missing value and the mean are the same without an indicator."""
    X, y = table()
    X.loc[np.arange(60) % 2 == 0, "a"] = np.nan
    telling = np.where(np.arange(60) % 2 == 0, 0, 1 + y // 2)
    filled = X.fillna({"a": X["a"][:40].mean()})
    estimator = TabICLRegressor if config.is_regression else TabICLClassifier
    for target, is_seen in ((telling, True), (y, False)):
        fitted = estimator(tiny_network(config), n_estimators=4).fit(X[:40], target[:40])
        assert {len(member.features) for member in fitted.members_} == ({4, 5} if is_seen else {4})
        predict = fitted.predict if config.is_regression else fitted.predict_proba
        together = predict(pd.concat([X, filled]))
        assert np.allclose(together[:60], together[60:], atol=1e-6) != is_seen
        loaded = pickle.loads(pickle.dumps(fitted))
        predict = loaded.predict if config.is_regression else loaded.predict_proba
        assert np.array_equal(predict(X[40:]), together[40:60])


def test_labeled_rows_are_not_told_their_own_targets_by_effects_of_levels():
    levels = np.repeat([f"level {number}" for number in range(60)], 2)
    X = pd.DataFrame({"level": levels})
    y = np.random.default_rng(0).integers(0, 2, 120)
    fitted = TabICLClassifier(tiny_network(TINY), n_estimators=4).fit(X, y)
    column = fitted.encoder_.views[0][0]
    as_query = fitted.encoder_.transform(X)[:, column]
    as_labeled = fitted.X_[:, column]
    assert abs(np.corrcoef(as_query, y)[0, 1]) > 0.5
    assert abs(np.corrcoef(as_labeled, y)[0, 1]) < 0.2
