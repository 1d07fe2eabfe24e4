"""Fine-tuning in the estimators: never below the start, on rows apart from those that choose, and repeatable."""

import copy
import pickle
import warnings
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import tiny_classifier
import tiny_regressor
import torch
from networks import TINY_REGRESSOR, small_network, tiny_network
from sklearn.base import clone
from torch import nn

from priors.real.draws import Rows, split_by_content
from tabicl_train import FineTune, TabICLClassifier, TabICLRegressor
from tabicl_train.model import TabICL
from tabicl_train.model.quantiles import levels
from tabicl_train.prediction import fine_tune as module
from tabicl_train.prediction.fine_tune import Trainer

NETWORK = small_network().eval()
QUICK = {"max_steps": 4}
LEARNS = {"learning_rate": 3e-3, "max_steps": 20, "patience": 99}  # enough of the rule


def rule(rows: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A table whose column decides the class, which a network with random weights cannot know."""
    X = np.random.default_rng(seed).normal(size=(rows, 1))
    return X, np.where(X[:, 0] > 0, "yes", "no")


def tuned(X, y, **options) -> TabICLClassifier:
    return TabICLClassifier(NETWORK, n_estimators=2, fine_tune=FineTune(**{**QUICK, **options})).fit(X, y)


def untuned(X, y) -> TabICLClassifier:
    return TabICLClassifier(NETWORK, n_estimators=2).fit(X, y)


def weights(model) -> dict[str, torch.Tensor]:
    return model.network_.state_dict()


def equal(first: dict, second: dict) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def sides(X, y, test: float = 0.0) -> tuple[np.ndarray, ...]:
    labels = np.unique(y, return_inverse=True)[1]
    return split_by_content(Rows(pd.DataFrame(X), labels, len(np.unique(y))), 0.2, test)


def validation_loss(model, X, y, test: float) -> float:
    """Log loss of the validation rows from the training rows, with the network of a model."""
    training, validation, _ = sides(X, y, test)
    judge = TabICLClassifier(model.network_, n_estimators=module.MEMBERS).fit(X[training], y[training])
    p = judge.predict_proba(X[validation])
    return -np.log(p[np.arange(len(validation)), np.searchsorted(judge.classes_, y[validation])]).mean()


@pytest.fixture(scope="module")
def learned() -> TabICLClassifier:
    return tuned(*rule(), **LEARNS, test_fraction=0.15)


def test_what_follows_a_rule_gets_better_also_on_rows_that_took_no_part(learned, tmp_path):
    X, y = rule()
    found = learned.fine_tuning_
    assert not found.kept_start and found.ended_by == "steps"
    assert [check.step for check in found.history] == [0, 10, 20]
    assert found.result.startswith("better by ")
    assert f"on {len(sides(X, y, 0.15)[2])} rows that took no part in training or validation" in found.result
    fresh, truth = rule(200, seed=1)
    losses = [one._losses(fresh, (truth == "yes").astype(int)).mean() for one in (untuned(X, y), learned)]
    assert losses[1] < losses[0] - 0.1
    np.testing.assert_allclose(found.history[0].loss, validation_loss(untuned(X, y), X, y, 0.15), rtol=1e-5)
    lowest = min(check.loss for check in found.history)
    np.testing.assert_allclose(lowest, validation_loss(learned, X, y, 0.15), rtol=1e-5)
    learned.export(tmp_path / "tuned.ckpt")
    again = TabICLClassifier(tmp_path / "tuned.ckpt", n_estimators=2).fit(X, y)
    assert np.array_equal(again.predict_proba(X), learned.predict_proba(X))
    loaded = pickle.loads(pickle.dumps(learned))
    assert loaded.fine_tuning_ == found
    assert np.array_equal(loaded.predict_proba(X), learned.predict_proba(X))


def test_training_that_only_does_harm_leaves_the_start_to_the_bit(monkeypatch):
    monkeypatch.setattr(module, "EVERY", 2)
    X, y = rule()
    y = np.random.default_rng(0).permutation(y)
    model = tuned(X, y, learning_rate=1.0, max_steps=20, patience=3)
    found = model.fine_tuning_
    assert found.kept_start
    assert found.ended_by == "patience"
    losses = [check.loss for check in found.history]
    assert len(losses) == 1 + np.argmin(losses) + 3
    assert losses[-1] > losses[0]
    assert found.result == "no gain: the weights you started from are returned"
    assert equal(weights(model), weights(untuned(X, y)))
    assert np.array_equal(model.predict_proba(X), untuned(X, y).predict_proba(X))


@pytest.mark.parametrize(("gain", "kept_start"), [(0.9, True), (1.1, False)])
def test_a_gain_within_its_standard_error_keeps_the_start_and_a_small_one_is_not_shown(gain, kept_start, monkeypatch):
    X, y = rule()
    noise = np.tile([0.1, -0.1], len(sides(X, y)[1]))[: len(sides(X, y)[1])]  # of the losses of the selection rows
    error = noise.std(ddof=1) / np.sqrt(len(noise))
    monkeypatch.setattr(module, "EVERY", 2)
    checks = iter([1 + 0 * noise, 1 - gain * error + noise - noise.mean(), 1 + 0 * noise])
    monkeypatch.setattr(module.Judge, "losses", lambda self, rows: next(checks))
    model = tuned(X, y, learning_rate=1e-3)
    losses = [check.loss for check in model.fine_tuning_.history]
    assert losses[1] < losses[0]
    assert model.fine_tuning_.kept_start == kept_start
    assert kept_start or model.fine_tuning_.result.startswith("no change shown: ")  # the interval includes zero
    assert equal(weights(model), weights(untuned(X, y))) == kept_start


def test_a_loss_that_is_not_finite_ends_it_with_the_best_weights_so_far(learned, monkeypatch):
    losses, calls = TabICL.losses, []

    def broken_after_20_steps(*values):
        calls.append(1)
        return losses(*values) * (np.nan if len(calls) > 20 else 1.0)

    monkeypatch.setattr(TabICL, "losses", broken_after_20_steps)
    model = tuned(*rule(), **{**LEARNS, "max_steps": 40}, test_fraction=0.15)
    assert model.fine_tuning_.ended_by == "loss" and len(calls) == 21
    assert equal(weights(model), weights(learned))


def test_validation_and_test_rows_and_their_copies_are_never_trained_on(monkeypatch):
    X, y = rule(60)
    X, y = np.concatenate([X, X[:20]]), np.concatenate([y, y[:20]])
    drawn, scored = [], []
    table, losses = Rows.make_table, module.Judge.losses

    def draw(self, labeled, queries, *rest):
        assert not set(labeled) & set(queries)
        drawn.extend([*labeled, *queries])
        return table(self, labeled, queries, *rest)

    def judge(self, rows):
        scored.extend(rows)
        drawn.extend(np.flatnonzero((X[:, None] == self.estimator.X_).all(2).any(1)))  # its context
        return losses(self, rows)

    monkeypatch.setattr(Rows, "make_table", draw)
    monkeypatch.setattr(module.Judge, "losses", judge)
    tuned(X, y, test_fraction=0.2, max_steps=5)
    trained, apart = {tuple(X[i]) for i in drawn}, {tuple(X[i]) for i in scored}
    assert len(apart) > 10
    assert not trained & apart
    assert trained | apart == set(map(tuple, X))


def test_the_time_limit_and_a_line_every_ten_seconds_without_a_terminal(monkeypatch, capsys):
    """With a clock that moves a minute at each look; it is looked at once a step, and once more after each check."""
    looks = iter(range(1000))
    monkeypatch.setattr(module, "clock", lambda: 60.0 * next(looks))
    monkeypatch.setattr(module, "EVERY", 3)
    X, y = rule()
    found = tuned(X, y, max_steps=100, max_minutes=5.5, patience=99).fine_tuning_
    assert found.ended_by == "time"
    assert [check.step for check in found.history] == [0, 3, 4]
    assert [check.seconds for check in found.history] == [60, 300, 420]
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(", ")[0] for line in lines] == [
        f"fine-tuning: step {step} of 100, {60 * looks} s" for step, looks in ((1, 2), (2, 3), (3, 4), (4, 6))
    ]
    monkeypatch.setattr(module, "LINE_SECONDS", 150)
    looks = iter(range(1000))
    tuned(X, y, max_steps=100, max_minutes=5.5, patience=99)
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == ["2", "4"]


def test_two_fits_are_equal_to_the_bit_and_draw_no_numbers_of_torch(monkeypatch):
    monkeypatch.setattr(module, "EVERY", 2)
    X, _ = rule()
    network = tiny_network(TINY_REGRESSOR)
    options = {"n_estimators": 2, "fine_tune": FineTune(**{**LEARNS, "max_steps": 6})}
    state = torch.random.get_rng_state()
    with torch.no_grad():  # fit turns gradients on
        first, second = (TabICLRegressor(network, **options).fit(X, X[:, 0]) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert equal(weights(first), weights(second))
    assert not equal(weights(first), network.state_dict())
    losses = [[check.loss for check in one.fine_tuning_.history] for one in (first, second)]
    assert losses[0] == losses[1]
    other = TabICLRegressor(network, **options, random_state=1).fit(X, X[:, 0])
    assert not equal(weights(first), weights(other))


def test_the_default_type_of_torch_does_not_matter():
    X, _ = rule()
    y, found = X.sum(axis=1), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            model = TabICLRegressor(tiny_regressor.NETWORK, n_estimators=1, fine_tune=FineTune(max_steps=2)).fit(X, y)
            found += [model.predict(X), np.array([check.loss for check in model.fine_tuning_.history])]
        finally:
            torch.set_default_dtype(torch.float32)
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[1], found[3])


def test_scikit_learns_conventions():
    X, y = rule(60)
    model = tiny_classifier.classifier(n_estimators=1, fine_tune=FineTune(max_steps=1))
    copied = clone(model).set_params(fine_tune__max_steps=2)
    assert (model.fine_tune.max_steps, copied.fine_tune.max_steps) == (1, 2)
    assert copied.fit(X, y).fine_tuning_.history[-1].step == 2
    assert copied.set_params(fine_tune=None).fit(X, y).fine_tuning_ is None


def test_a_data_frame_with_columns_of_every_type_and_missing_values(monkeypatch):
    monkeypatch.setattr(module, "EVERY", 2)
    X, y = tiny_classifier.table(120)
    X.loc[::7, ["number", "string", "ordered", "integer", "time"]] = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tuned(X, y)
    assert len(model.fine_tuning_.history) == 3
    assert model.predict_proba(X).shape == (120, 3)


def test_the_loss_of_a_regressor_is_the_pinball_loss_in_standard_deviations():
    X, _ = rule()
    y = 1e6 + 1e3 * X[:, 0]
    model = tiny_regressor.regressor(fine_tune=FineTune(**QUICK)).fit(X, y)
    training, validation, _ = split_by_content(Rows(pd.DataFrame(X), model.y_, 0), 0.2, 0.0)
    judge = tiny_regressor.regressor(n_estimators=module.MEMBERS).fit(X[training], y[training])
    a = levels(judge.network_.config.outputs).double().numpy()
    error = y[validation, None] - judge.predict_quantiles(X[validation], a)
    expected = np.maximum(a * error, (a - 1) * error).mean() / y.std()
    np.testing.assert_allclose(model.fine_tuning_.history[0].loss, expected, rtol=1e-4)


def trainer(memory: float = 2**30, **options) -> Trainer:
    X, y = rule()
    rows = Rows(pd.DataFrame(X), np.unique(y, return_inverse=True)[1], 2)
    return Trainer(copy.deepcopy(NETWORK), rows, np.arange(len(y)), FineTune(**options), memory, 0)


def test_draws_fit_into_the_memory_and_hold_at_most_max_rows(monkeypatch):
    whole = trainer()
    assert (whole.num_rows, whole.recomputes, whole.together >= module.DRAWS) == (120, False, True)
    small = trainer(whole.kept_bytes(True) / 3)
    assert (small.num_rows, small.recomputes, small.together) == (30, True, 1)
    X, y, n = small.draw(1, 0)
    assert len(X) == len(y) == 30 > n
    monkeypatch.setattr(module, "MAX_ROWS", 50)
    assert trainer().num_rows == 50


def test_gradients_do_not_depend_on_how_many_draws_go_through_the_network_together():
    norms = []
    for together, recomputes in ((4, False), (1, True), (3, False)):
        some = trainer()
        some.together, some.recomputes = together, recomputes
        with mock.patch.object(nn.utils, "clip_grad_norm_", wraps=nn.utils.clip_grad_norm_) as clip:
            clip.side_effect = lambda *values: norms.append(clip._mock_wraps(*values)) or norms[-1]
            some.step(1)
    np.testing.assert_allclose(norms, norms[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "'learning_rate' parameter of FineTune must be a float .* Got 0.0 instead"),
        ({"max_steps": 2.5}, "'max_steps' parameter of FineTune must be an int .* Got 2.5 instead"),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "leave no rows for training"),
        ({"validation_fraction": 0.95}, "rows are for training, where at least 10 are needed"),
    ],
)
def test_wrong_parameters_are_told(options, message):
    X, y = rule()
    with pytest.raises(ValueError, match=message):
        tuned(X, y, **options)


def test_options_of_another_type_are_told():
    with pytest.raises(TypeError, match=r"fine_tune is .*; it must be None or FineTune\(\.\.\.\)"):
        TabICLClassifier(NETWORK, fine_tune={"max_steps": 3}).fit(*rule())


def test_an_interruption_leaves_the_best_weights_so_far(learned, monkeypatch):
    X, y = rule()
    step = Trainer.step

    def interrupted(self, number):
        if number == 25:
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(Trainer, "step", interrupted)
    model = clone(learned).set_params(model=NETWORK, fine_tune__max_steps=40)
    model.fine_tuning_ = learned.fine_tuning_  # of an earlier fit
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, y)
    assert equal(weights(model), weights(learned))
    found = model.fine_tuning_
    assert found.ended_by == "interrupt"
    assert [check.step for check in found.history] == [0, 10, 20]
    assert found.result.startswith("better by ")
    assert "rows by which the weights were chosen" in found.result


def test_tables_that_cannot_be_trained_on_are_told():
    X, _ = rule()
    with pytest.raises(ValueError, match="y has 12 classes, but the network was trained for at most 10"):
        tuned(X, np.arange(120) % 12)
    with pytest.raises(ValueError, match="too much alike"):
        TabICLRegressor(tiny_regressor.NETWORK, fine_tune=FineTune()).fit(X, np.ones(120))
