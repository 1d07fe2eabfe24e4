import numpy as np
import pytest
import torch
from filter_verdicts import assert_same_verdicts, reference_verdict, verdict
from sklearn.ensemble import ExtraTreesRegressor

from priors.graph.predictability import ExtraTrees
from priors.random import rng_at
from priors.table import Table


def make_table(X: np.ndarray, y: np.ndarray) -> Table:
    X = torch.from_numpy(np.ascontiguousarray(X, dtype=np.float32))
    return Table(X, torch.from_numpy(y.astype(np.int64)), len(y) // 2, int(y.max()) + 1)


def draw_table(seed: int, signal: float, num_rows: int, num_features: int, num_classes: int) -> Table:
    """Classes are ranges of signal * (a nonlinear function of two features) + noise."""
    rng = rng_at("filter table", seed)
    X = rng.standard_normal((num_rows, num_features))
    if seed % 3 == 0:
        X[:, 1:] = X[:, 1:].round()
    score = signal * (X[:, 0] + np.sin(2 * X[:, -1])) + rng.standard_normal(num_rows)
    bounds = np.sort(rng.uniform(0.1, 0.9, num_classes - 1))
    return make_table(X, np.searchsorted(np.quantile(score, bounds), score))


def reference_errors(table: Table, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Squared errors per row of the mean and of sklearn's out-of-bag predictions."""
    X, y = table.X.numpy(), table.y.numpy()
    present, codes = np.unique(y, return_inverse=True)
    target = np.eye(len(present))[codes]
    if len(present) == 2:
        target = target[:, 1:]
    model = ExtraTreesRegressor(25, max_depth=6, max_features=1.0, bootstrap=True, oob_score=True, random_state=seed)
    model.fit(X, target if target.shape[1] > 1 else target[:, 0])
    prediction = model.oob_prediction_.reshape(target.shape)
    return np.square(target - target.mean(0)).sum(1), np.square(target - prediction).sum(1)


def mixed_tables() -> list[Table]:
    rng = rng_at("mixed tables")
    tables = []
    for seed in range(60):
        signal = 0.0 if seed % 2 else (0.25 if seed % 10 == 0 else rng.uniform(0.7, 4))
        sizes = rng.integers([60, 1, 2], [400, 12, 8])
        tables.append(draw_table(seed, signal, *map(int, sizes)))
    tables[5] = draw_table(5, 0.0, 2000, 5, 4)  # long enough for a first look at some of the rows
    tables[6] = draw_table(6, 1.0, 2000, 5, 4)
    return tables


@pytest.mark.filterwarnings("ignore:Some inputs do not have OOB scores")
def test_the_filter_decides_as_the_test_of_the_paper_does():
    tables = mixed_tables()
    reference = [reference_verdict(*reference_errors(table, seed), seed) for seed, table in enumerate(tables)]
    assert_same_verdicts(tables, reference)


@pytest.mark.filterwarnings("ignore:Some inputs do not have OOB scores")
def test_the_trees_have_the_errors_of_those_of_sklearn():
    # Relative error of the forest, mean of several seeds, from a near-perfect table to one of noise.
    for i, (signal, classes) in enumerate([(8.0, 2), (2.0, 5), (1.0, 3), (0.0, 4)]):
        table = draw_table(100 + i, signal, 400, 6, classes)
        X, y = table.X.numpy(), table.y.numpy()
        ours = [ExtraTrees(X, y, rng_at(seed)).grow(25).relative_error() for seed in range(12)]
        errors = [reference_errors(table, seed) for seed in range(6)]
        theirs = [model.sum() / mean.sum() for mean, model in errors]
        assert np.mean(ours) == pytest.approx(np.mean(theirs), abs=0.025)


def test_37_percent_of_the_rows_are_out_of_the_bag_of_a_tree():
    table = draw_table(0, 1.0, 500, 4, 3)
    trees = ExtraTrees(table.X.numpy(), table.y.numpy(), rng_at("bag")).grow(200)
    assert trees.counts.mean() / 200 == pytest.approx(np.exp(-1), abs=0.01)
    assert trees.size == 200
    # predictions are shares of classes
    np.testing.assert_allclose(trees.votes.sum(1), trees.counts, rtol=1e-4)
    assert (trees.votes >= 0).all()


def test_depth_is_six():
    # One feature of 4096 values, a class a block of 32 rows: 64 leaves at best cannot tell 128 classes apart.
    X = np.arange(4096, dtype=np.float32)[:, None]
    trees = ExtraTrees(X, np.arange(4096) // 32, rng_at("depth")).grow(1)
    seen = trees.counts > 0
    assert len(np.unique(trees.votes[seen], axis=0)) <= 64
    assert len(np.unique(trees.votes[seen], axis=0)) > 20


def test_the_z_score_is_the_mean_improvement_in_standard_errors():
    table = draw_table(1, 1.0, 300, 4, 3)
    trees = ExtraTrees(table.X.numpy(), table.y.numpy(), rng_at("z")).grow(25)
    truth = np.eye(3)[trees.y]
    seen = trees.counts > 0
    prediction = trees.votes[seen] / trees.counts[seen, None]
    improvement = np.square(truth - truth.mean(0)).sum(1)[seen] - np.square(truth[seen] - prediction).sum(1)
    expected = improvement.mean() / (improvement.std() / np.sqrt(seen.sum()))
    assert trees.z_score() == pytest.approx(expected, rel=1e-3)


def test_rows_may_come_in_any_order_and_classes_may_be_absent():
    table = draw_table(2, 3.0, 300, 4, 3)
    table.y[table.y == 2] = 7
    order = torch.from_numpy(rng_at("order").permutation(300))
    shuffled = Table(table.X[order], table.y[order], 150, 8)
    assert verdict(table, 0) == verdict(shuffled, 0) == "kept"


def test_extreme_tables_can_be_judged():
    rng = rng_at("extreme")
    y = rng.integers(2, size=40)
    assert verdict(make_table(np.zeros((40, 2)), y), 0) == "unpredictable"
    assert verdict(make_table(y[:, None] * 2.0 - 1, y), 0) == "kept"
    tiny = rng.integers(2, size=10)
    assert verdict(make_table(rng.standard_normal((10, 1)), tiny), 0) in ("kept", "unpredictable")


def test_trivial_tables_are_dropped_and_others_kept():
    for seed in range(5):
        X = rng_at("trivial", seed).standard_normal((400, 4))
        trivial = make_table(X, X[:, 0] > 0)
        assert verdict(trivial, seed, trivial=True) == "trivial"
        assert verdict(trivial, seed, unpredictable=False, trivial=True) == "trivial"
        assert verdict(trivial, seed) == "kept"
        hard = draw_table(seed, 1.5, 400, 4, 3)
        assert verdict(hard, seed, trivial=True) == "kept"
        noise = draw_table(seed, 0.0, 400, 4, 3)
        assert verdict(noise, seed, unpredictable=False, trivial=True) == "kept"
        assert verdict(noise, seed, trivial=True) == "unpredictable"


def test_a_verdict_is_a_pure_function_of_table_and_generator():
    table = draw_table(0, 0.3, 100, 4, 3)
    verdicts = [verdict(table, seed) for seed in range(30)]
    assert verdicts == [verdict(table, seed) for seed in range(30)]


def test_long_noise_is_rejected_and_long_signal_kept():
    assert verdict(draw_table(0, 0.0, 5000, 4, 3), 0) == "unpredictable"
    assert verdict(draw_table(0, 1.0, 5000, 4, 3), 0) == "kept"


def test_scores_of_trees_are_those_of_the_errors_row_by_row():
    table = draw_table(1, 1.0, 200, 4, 3)
    trees = ExtraTrees(table.X.numpy(), table.y.numpy() * 3, rng_at("scores")).grow(2)  # labels with gaps
    seen, truth = trees.counts > 0, np.eye(3)[table.y.numpy()]
    assert 0.6 < seen.mean() < 0.9
    mean = np.square(truth - truth.mean(0)).sum(1)[seen]
    model = np.square(truth[seen] - trees.votes[seen] / trees.counts[seen, None]).sum(1)
    gain = mean - model
    assert trees.z_score() == pytest.approx(gain.mean() / gain.std() * np.sqrt(len(gain)), rel=1e-5)
    assert trees.relative_error() == pytest.approx(model.sum() / mean.sum(), rel=1e-6)
