"""The filter of finished tables whose target is a number."""

import numpy as np
import pytest
import torch
from filter_verdicts import assert_same_verdicts, reference_verdict, verdict
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import ExtraTreesRegressor

from priors.graph.predictability import NumericExtraTrees, count_failures
from priors.finish import standardize_target
from priors.random import rng_at
from priors.table import Table


def make_table(X: np.ndarray, y: np.ndarray) -> Table:
    X = torch.from_numpy(np.ascontiguousarray(X, dtype=np.float32))
    return Table(X, standardize_target(torch.from_numpy(y)), len(y) // 2, 0)


def draw_table(seed: int, signal: float, num_rows: int, num_features: int) -> Table:
    """The target is signal * (a nonlinear function of two features) + noise, and then as it is, skewed, or counts."""
    rng = rng_at("numeric filter table", seed)
    X = rng.standard_normal((num_rows, num_features))
    if seed % 3 == 0:
        X[:, 1:] = X[:, 1:].round()
    score = signal * (X[:, 0] + np.sin(2 * X[:, -1])) + rng.standard_normal(num_rows)
    return make_table(X, [score, np.exp(0.5 * score), np.maximum(score, 0).round()][seed // 3 % 3])


def reference_errors(table: Table, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Squared errors per row of the mean and of sklearn's out-of-bag predictions."""
    X, y = table.X.numpy(), table.y.double().numpy()
    model = ExtraTreesRegressor(25, max_depth=6, max_features=1.0, bootstrap=True, oob_score=True, random_state=seed)
    return np.square(y - y.mean()), np.square(y - model.fit(X, y).oob_prediction_)


def mixed_tables() -> list[Table]:
    rng = rng_at("mixed numeric tables")
    tables = []
    for seed in range(60):
        signal = 0.0 if seed % 2 else (0.3 if seed % 10 == 0 else rng.uniform(0.7, 4))
        tables.append(draw_table(seed, signal, *map(int, rng.integers([60, 1], [400, 12]))))
    tables[5] = draw_table(5, 0.0, 2000, 5)  # long enough for a first look at some of the rows
    tables[6] = draw_table(6, 1.0, 2000, 5)
    return tables


@pytest.mark.filterwarnings("ignore:Some inputs do not have OOB scores")
def test_the_filter_decides_as_the_test_of_the_paper_does():
    tables = mixed_tables()
    reference = [reference_verdict(*reference_errors(table, seed), seed) for seed, table in enumerate(tables)]
    assert_same_verdicts(tables, reference)


def test_the_early_stages_decide_as_all_trees_with_all_resamples_do():
    share, full = 0.0, 0.0
    for seed in range(40):  # weak signals, which are often at the border
        table = draw_table(seed, 0.25 * (seed % 4), 150, 4)
        X, y = table.X.numpy(), table.y.numpy()
        staged = [verdict(table, k) == "unpredictable" for k in range(6)]
        whole = [NumericExtraTrees(X, y, rng_at("full", seed, k)).grow(25).failures(200) >= 10 for k in range(6)]
        assert abs(np.mean(staged) - np.mean(whole)) < 0.7
        share, full = share + np.mean(staged) / 40, full + np.mean(whole) / 40
    assert share == pytest.approx(full, abs=0.05) and 0.2 < full < 0.8


@pytest.mark.filterwarnings("ignore:Some inputs do not have OOB scores")
def test_the_trees_have_the_errors_of_those_of_sklearn():
    for seed, signal in [(1, 8.0), (4, 2.0), (7, 1.0), (10, 0.0)]:  # each kind of target
        table = draw_table(seed, signal, 400, 6)
        X, y = table.X.numpy(), table.y.numpy()
        ours = [NumericExtraTrees(X, y, rng_at(k)).grow(25).relative_error() for k in range(12)]
        theirs = [model.sum() / mean.sum() for mean, model in (reference_errors(table, k) for k in range(6))]
        assert np.mean(ours) == pytest.approx(np.mean(theirs), abs=0.025)


def test_scores_of_trees_are_those_of_the_errors_row_by_row():
    table = draw_table(1, 1.0, 200, 4)
    trees = NumericExtraTrees(table.X.numpy(), table.y.numpy(), rng_at("scores")).grow(2)
    y, seen = table.y.double().numpy(), trees.counts > 0
    assert 0.6 < seen.mean() < 0.9
    mean = np.square(y - y.mean())[seen]
    model = np.square(y[seen] - trees.votes[seen] / trees.counts[seen])
    gain = mean - model
    assert trees.z_score() == pytest.approx(gain.mean() / gain.std() * np.sqrt(len(gain)), rel=1e-5)
    assert trees.relative_error() == pytest.approx(model.sum() / mean.sum(), rel=1e-6)


def test_a_tree_predicts_the_weighted_mean_of_its_leaf():
    X = (np.arange(60, dtype=np.float32) % 3)[:, None]
    y = rng_at("leaf").standard_normal(60).astype(np.float32)
    trees = NumericExtraTrees(X, y, rng_at("bag")).grow(1)
    out = trees.counts == 1
    weight = np.zeros(60)  # of the bag, from the same random numbers with a target that tells the rows apart
    for row in np.flatnonzero(~out):
        alone = NumericExtraTrees(X, np.eye(60, dtype=np.float32)[row], rng_at("bag")).grow(1)
        weight[row] = alone.votes[out & (X[:, 0] == X[row, 0])].max(initial=0)  # its share of its leaf
    for value in range(3):
        leaf = X[:, 0] == value
        assert trees.votes[leaf & out] == pytest.approx((weight * y)[leaf].sum(), abs=1e-5)
        assert weight[leaf].sum() == pytest.approx(1, abs=1e-5)


def test_depth_is_six():
    X = np.arange(4096, dtype=np.float32)[:, None]
    trees = NumericExtraTrees(X, X[:, 0], rng_at("depth")).grow(1)
    assert 20 < len(np.unique(trees.votes[trees.counts > 0])) <= 64


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(2, 60), st.integers(0, 2**32))
def test_failures_are_counted_as_by_resampling(num_rows, seed):
    rng = np.random.default_rng(seed)
    improvement = rng.standard_t(1.5, num_rows) + rng.normal(0.5)
    resampled = improvement[rng.integers(num_rows, size=(4000, num_rows))].mean(1)
    share = count_failures(improvement, 4000, seed + 1) / 4000
    assert share == pytest.approx(np.mean(resampled <= 0), abs=0.06)  # 5 standard errors of the difference


def test_the_lone_outlier_is_in_63_percent_of_the_resamples():
    improvement = np.full(500, -1e-3)
    improvement[123] = 10.0
    assert count_failures(improvement, 20_000, 1) / 20_000 == pytest.approx((1 - 1 / 500) ** 500, abs=0.02)
    assert count_failures(np.zeros(30), 200, 1) == 200  # no improvement at all


def test_a_lone_outlier_that_no_tree_has_predicted_yet_does_not_decide():
    rng = rng_at("lone outlier")
    for seed in range(40):
        y = np.zeros(60)
        y[seed] = 1.0
        assert verdict(make_table(rng.standard_normal((60, 3)), y), seed) == "unpredictable"


def test_rare_values_of_a_long_table_are_not_overlooked():
    # Two rows of 6,000 hold nearly all of the variance, at random; all others are predictable.
    X = rng_at("rare").standard_normal((6000, 3))
    y = 1e-3 * X[:, 0]
    y[[100, 4000]] = 1.0
    table = make_table(X, np.where(y == 1.0, 5.0, y))
    table.y = torch.from_numpy((y / y.std(ddof=1)).astype(np.float32))  # without the clamping of outliers
    assert [verdict(table, seed) for seed in range(5)] == ["unpredictable"] * 5


def test_trivial_tables_are_dropped_and_others_kept():
    for seed in range(5):
        X = rng_at("trivial", seed).standard_normal((400, 4))
        trivial = make_table(X, 3 * X[:, 0])
        assert verdict(trivial, seed, trivial=True) == "trivial"
        assert verdict(trivial, seed, unpredictable=False, trivial=True) == "trivial"
        assert verdict(trivial, seed) == "kept"
        hard, noise = draw_table(9 * seed, 1.5, 400, 4), draw_table(9 * seed, 0.0, 400, 4)
        assert verdict(hard, seed, trivial=True) == "kept"
        assert verdict(noise, seed, unpredictable=False, trivial=True) == "kept"
        assert verdict(noise, seed, trivial=True) == "unpredictable"


def test_extreme_tables_can_be_judged():
    rng = rng_at("extreme")
    y = rng.standard_normal(40)
    assert verdict(make_table(np.zeros((40, 2)), y), 0) == "unpredictable"
    assert verdict(make_table(y[:, None], np.sign(y)), 0) == "kept"
    tiny = make_table(rng.standard_normal((10, 1)), rng.standard_normal(10))
    assert verdict(tiny, 0) in ("kept", "unpredictable")


def test_a_verdict_is_a_pure_function_of_table_and_generator():
    table = draw_table(1, 0.5, 100, 4)
    verdicts = [verdict(table, seed) for seed in range(30)]
    assert verdicts == [verdict(table, seed) for seed in range(30)] and len(set(verdicts)) == 2
