"""The scikit-learn regressor: its conventions, its ensemble, and its distribution by brute force."""

import numpy as np
import pytest
import torch
from networks import small_network
from sklearn.utils.estimator_checks import estimator_checks_generator
from tiny_classifier import table
from tiny_regressor import FILE, LABELED, NETWORK, numbers, regressor

from priors.real.preprocessing import Normalizer
from tabicl_train import TabICLRegressor
from tabicl_train.model.pack import Pack
from tabicl_train.prediction import regressor as module
from tabicl_train.prediction.regressor import interpolate_quantiles

CHECKS = list(estimator_checks_generator(TabICLRegressor()))
LEVELS = np.array([0.5, 0.9995, 1e-9, 0.0007, 0.001, 0.00125, 0.31415, 0.999, 1 - 1e-9])
X, Y = numbers()
QUERIES = X[LABELED:]


@pytest.fixture(scope="module")
def fitted() -> TabICLRegressor:
    return regressor().fit(X[:LABELED], Y)


@pytest.mark.slow  # what both share is checked of the classifier
@pytest.mark.parametrize("estimator, check", CHECKS, ids=lambda value: getattr(value, "func", str).__name__)
def test_scikit_learns_conventions_for_regressors(estimator, check):
    check(estimator)


def quantiles_of_members(model: TabICLRegressor) -> list[np.ndarray]:
    """What the network predicts for each member of the ensemble, float64 (query rows, 999), not sorted."""
    labels = torch.from_numpy((Y - Y.mean()) / Y.std()).float()
    found = []
    for member in model.members_:
        rows = Normalizer(member.norm_method).fit(X[:LABELED]).transform(X)[:, member.features]
        with torch.no_grad():
            found.append(NETWORK(Pack.stack(torch.from_numpy(rows)[None], labels[None])).double().numpy())
    return found


def at_levels(q: np.ndarray) -> list[float]:
    """The quantiles of one row (999,) at LEVELS by their definitions."""
    q, own = np.sort(q), np.arange(1, 1000) / 1000
    low, high = np.polyfit(np.log(own[:20]), q[:20], 1)[0], -np.polyfit(np.log(1 - own[-20:]), q[-20:], 1)[0]
    low, high = np.clip([low, high], 0.01, 100)
    found = []
    for a in LEVELS:
        if a < 0.001:
            found.append(q[0] + low * np.log(a / 0.001))
        elif a > 0.999:
            found.append(q[-1] - high * np.log((1 - a) / 0.001))
        else:
            found.append(np.interp(a, own, q))
    return found


def test_an_ensemble_averages_what_each_member_says_of_the_distribution(fitted):
    assert len({(member.norm_method, tuple(member.features)) for member in fitted.members_}) == 3
    of_members = quantiles_of_members(fitted)
    for quantiles in of_members:
        assert (np.diff(quantiles) < 0).any()  # they do cross
    means = [quantiles.mean(1) for quantiles in of_members]
    assert np.std(means, axis=0).max() > 1e-3

    assert np.allclose(fitted.predict(QUERIES), Y.mean() + Y.std() * np.mean(means, axis=0), atol=1e-4)
    at_wanted = [[at_levels(row) for row in quantiles] for quantiles in of_members]
    expected = Y.mean() + Y.std() * np.mean(at_wanted, axis=0)
    found = fitted.predict_quantiles(QUERIES, LEVELS)
    assert found.shape == (20, len(LEVELS))
    assert np.allclose(found, expected, atol=1e-4)
    assert np.array_equal(fitted.predict_median(QUERIES), found[:, 0])


def test_levels_come_in_any_order_and_their_quantiles_do_not_cross(fitted):
    levels = np.concatenate(
        [10.0 ** np.arange(-12, -3), np.linspace(0.0005, 0.9995, 4001), 1 - 10.0 ** np.arange(-4, -13, -1)]
    )
    q = fitted.predict_quantiles(QUERIES, levels)
    assert (np.diff(q) >= 0).all()
    assert (np.diff(q[:, :9]) > 0).all()
    assert (np.diff(q[:, -9:]) > 0).all()
    order = np.random.default_rng(0).permutation(len(levels))
    assert np.array_equal(fitted.predict_quantiles(QUERIES, levels[order]), q[:, order])
    own = fitted.predict_quantiles(QUERIES, np.arange(1, 1000) / 1000)
    assert np.allclose(own.mean(1), fitted.predict(QUERIES), atol=1e-6)


def test_intervals_grow_with_their_coverage_around_the_median(fitted):
    intervals = np.stack([fitted.predict_interval(QUERIES, c) for c in (0.1, 0.5, 0.8, 0.99, 0.9999)])
    assert intervals.shape == (5, 20, 2)
    assert (np.diff(intervals[..., 0], axis=0) < 0).all()
    assert (np.diff(intervals[..., 1], axis=0) > 0).all()
    median = fitted.predict_median(QUERIES)
    assert (intervals[0, :, 0] < median).all()
    assert (median < intervals[0, :, 1]).all()
    assert np.array_equal(fitted.predict_interval(QUERIES), intervals[2])
    assert np.allclose(intervals[2], fitted.predict_quantiles(QUERIES, [0.1, 0.9]), rtol=1e-12)


@pytest.mark.parametrize("unit, zero", [(2.0**-40, 0), (1e-300, 0), (1e300, 0), (1e-3, 5)])
def test_units_and_zero_of_the_target_make_no_difference(unit, zero, fitted):
    other = regressor().fit(X[:LABELED], Y * unit + zero)
    for predict in ("predict", "predict_median", "predict_interval"):
        expected = getattr(fitted, predict)(QUERIES)
        found = (getattr(other, predict)(QUERIES) - zero) / unit
        assert np.allclose(found, expected, atol=1e-5), predict


def test_tails_keep_their_bounds_and_few_quantiles_are_enough():
    levels = np.array([0.0001, 0.5, 0.9999])
    steps = np.log(10) * np.array([-1, 0, 1])
    assert np.allclose(interpolate_quantiles(np.zeros((1, 999)), levels), 0.01 * steps)
    steep = 1e6 * np.arange(-499, 500.0)
    assert np.allclose(interpolate_quantiles(steep[None], levels), [steep[0], 0, steep[-1]] + 100 * steps)
    exponential = -np.log1p(-np.arange(1, 1000) / 1000)  # its own tail
    assert np.allclose(interpolate_quantiles(exponential[None], levels[1:]), -np.log1p(-levels[1:]))
    assert np.allclose(
        interpolate_quantiles(np.full((1, 1), 3.0), levels), 3 + 0.01 * np.log(5000) * np.array([-1, 0, 1])
    )
    model = TabICLRegressor(small_network(max_classes=0, num_quantiles=9)).fit(X[:LABELED], Y)
    assert (np.diff(model.predict_quantiles(QUERIES, np.linspace(0.01, 0.99, 99))) > 0).all()


def test_memory_limit_and_parts_change_nothing(monkeypatch):
    X, y = numbers(rows=340, features=4)
    found = []
    for gb, part in ((4.0, 2**17), (4.0, 999 * 7), (5e-4, 2**17)):
        monkeypatch.setattr(module, "PART", part)  # values that are averaged at a time
        model = regressor(n_estimators=4, memory_gb=gb).fit(X[:LABELED], y)
        found.append(model.predict_quantiles(X[LABELED:], LEVELS))
    assert np.array_equal(found[0], found[1])
    assert np.allclose(found[0], found[2], atol=1e-5)
    assert 300 % model._sizes(0).rows != 0  # the last pass has padding


def test_a_file_and_a_network_predict_alike():
    frame, _ = table(LABELED)  # columns of every type
    NETWORK.train()
    of_network = regressor().fit(frame, Y)
    assert NETWORK.training
    NETWORK.eval()
    assert np.array_equal(of_network.predict(frame), TabICLRegressor(FILE, n_estimators=3).fit(frame, Y).predict(frame))
    assert of_network.score(frame, Y) < 1
    other = regressor(random_state=1).fit(frame, Y)
    assert not np.allclose(of_network.predict(frame), other.predict(frame), atol=1e-4)


def test_half_precision_gives_nearly_the_same_numbers(fitted):
    expected = fitted.predict_interval(QUERIES)
    with torch.autocast("cpu", torch.bfloat16):
        inside = fitted.predict_interval(QUERIES)
    half = small_network(max_classes=0, bias_free_ln=True).bfloat16()
    of_half = TabICLRegressor(half, n_estimators=3).fit(X[:LABELED], Y).predict_interval(QUERIES)
    for found in (inside, of_half):
        assert found.dtype == float
        assert 0 < np.abs(found - expected).max() < 0.05 * Y.std()
    assert next(half.parameters()).dtype == torch.bfloat16
