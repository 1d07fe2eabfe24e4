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
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from small_networks import small_network
from tiny_network import TINY_REGRESSOR, tiny_network
from torch import nn

from priors.real.row_draws import Rows, split_by_content
from tabicl_train import FineTune, TabICLClassifier, TabICLRegressor
from tabicl_train.model import TabICL
from tabicl_train.model.quantiles import levels
from tabicl_train.prediction import fine_tune as module
from tabicl_train.prediction.fine_tune import Trainer

NETWORK = small_network().eval()
QUICK = {"max_steps": 4, "every": 2}
LEARNS = {"learning_rate": 3e-3, "max_steps": 20, "every": 10, "patience": 99}  # enough of the rule


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


def sides(X, y, answer: float = 0.0) -> tuple[np.ndarray, ...]:
    labels = np.unique(y, return_inverse=True)[1]
    return split_by_content(Rows(pd.DataFrame(X), labels, len(np.unique(y))), 0.2, answer)


def selection_loss(model, X, y) -> float:
    """Log loss of the selection rows from the training rows, with the network of a model."""
    training, selected, _ = sides(X, y)
    judge = TabICLClassifier(model.network_, n_estimators=module.VIEWS).fit(X[training], y[training])
    p = judge.predict_proba(X[selected])
    return -np.log(p[np.arange(len(selected)), np.searchsorted(judge.classes_, y[selected])]).mean()


def test_what_follows_a_rule_gets_better_also_on_rows_that_took_no_part():
    X, y = rule()
    model = tuned(X, y, **LEARNS, answer=0.15)
    found = model.fine_tuning_
    assert not found.kept_start
    assert found.ended_by == "steps"
    assert [check.step for check in found.history] == [0, 10, 20]
    answering = len(sides(X, y, 0.15)[2])
    assert found.answer.startswith("better by ")
    assert f"on {answering} rows that took no part in training or selection" in found.answer
    fresh, truth = rule(200, seed=1)
    losses = [one._losses(fresh, (truth == "yes").astype(int)).mean() for one in (untuned(X, y), model)]
    assert losses[1] < losses[0] - 0.1


def test_the_lowest_loss_of_the_selection_rows_is_kept():
    X, y = rule()
    model = tuned(X, y, **{**LEARNS, "every": 4})
    history = model.fine_tuning_.history
    np.testing.assert_allclose(history[0].loss, selection_loss(untuned(X, y), X, y), rtol=1e-5)
    np.testing.assert_allclose(min(check.loss for check in history), selection_loss(model, X, y), rtol=1e-5)
    assert "rows by which the weights were chosen" in model.fine_tuning_.answer
    assert "judged on no others" in model.fine_tuning_.answer


def test_training_that_only_does_harm_leaves_the_start_to_the_bit():
    X, y = rule()
    y = np.random.default_rng(0).permutation(y)
    model = tuned(X, y, learning_rate=1.0, max_steps=20, patience=3)
    found = model.fine_tuning_
    assert found.kept_start
    assert found.ended_by == "patience"
    losses = [check.loss for check in found.history]
    assert len(losses) == 1 + np.argmin(losses) + 3
    assert losses[-1] > losses[0]
    assert found.answer == "no gain: the weights you started from are returned"
    assert equal(weights(model), weights(untuned(X, y)))
    assert np.array_equal(model.predict_proba(X), untuned(X, y).predict_proba(X))


@pytest.mark.parametrize(("gain", "kept_start"), [(0.9, True), (1.1, False)])
def test_a_gain_within_its_standard_error_keeps_the_start(gain, kept_start, monkeypatch):
    X, y = rule()
    noise = np.tile([0.1, -0.1], len(sides(X, y)[1]))[: len(sides(X, y)[1])]  # of the losses of the selection rows
    error = noise.std(ddof=1) / np.sqrt(len(noise))
    checks = iter([1 + 0 * noise, 1 - gain * error + noise - noise.mean(), 1 + 0 * noise])
    monkeypatch.setattr(module.Judge, "losses", lambda self, rows: next(checks))
    model = tuned(X, y, learning_rate=1e-3)
    losses = [check.loss for check in model.fine_tuning_.history]
    assert losses[1] < losses[0]
    assert model.fine_tuning_.kept_start == kept_start
    assert equal(weights(model), weights(untuned(X, y))) == kept_start


@pytest.mark.parametrize("where", ["loss", "check"])
def test_a_loss_that_is_not_finite_ends_it_with_the_best_weights_so_far(where, monkeypatch):
    X, y = rule()
    undisturbed = tuned(X, y, **LEARNS)
    assert not undisturbed.fine_tuning_.kept_start
    calls = {"loss": 0, "check": 0}
    last = {"loss": 20, "check": 3}[where]  # checks are counted with the one at the start

    def counted(name, function):
        def call(*values):
            calls[name] += 1
            return function(*values) * (np.nan if name == where and calls[name] > last else 1.0)

        return call

    monkeypatch.setattr(TabICL, "losses", counted("loss", TabICL.losses))
    monkeypatch.setattr(TabICLClassifier, "_losses", counted("check", TabICLClassifier._losses))
    model = tuned(X, y, **{**LEARNS, "max_steps": 40})
    assert model.fine_tuning_.ended_by == "loss"
    assert calls["loss"] == {"loss": 21, "check": 30}[where]
    assert equal(weights(model), weights(undisturbed))


def test_rows_that_choose_or_answer_and_their_copies_are_never_trained_on(monkeypatch):
    X, y = rule(60)
    X, y = np.concatenate([X, X[:20]]), np.concatenate([y, y[:20]])
    drawn, scored = [], []
    table, losses = Rows.table, module.Judge.losses

    def draw(self, labeled, queries, *rest):
        assert not set(labeled) & set(queries)
        drawn.extend([*labeled, *queries])
        return table(self, labeled, queries, *rest)

    def judge(self, rows):
        scored.extend(rows)
        drawn.extend(np.flatnonzero((X[:, None] == self.estimator.X_).all(2).any(1)))  # its context
        return losses(self, rows)

    monkeypatch.setattr(Rows, "table", draw)
    monkeypatch.setattr(module.Judge, "losses", judge)
    tuned(X, y, answer=0.2, max_steps=20)
    trained, apart = {tuple(X[i]) for i in drawn}, {tuple(X[i]) for i in scored}
    assert len(apart) > 10
    assert not trained & apart
    assert trained | apart == set(map(tuple, X))


@pytest.mark.parametrize("frozen", [("column",), ("column", "row")])
def test_frozen_parts_keep_their_weights_and_others_do_not(frozen):
    X, y = rule()
    model = tuned(X, y, **LEARNS, frozen=frozen)
    assert not model.fine_tuning_.kept_start
    before = dict(NETWORK.named_parameters())
    stays = {TabICL.parts[part] for part in frozen}
    for part in TabICL.parts.values():
        own = [torch.equal(p, before[name]) for name, p in model.network_.named_parameters() if name.startswith(part)]
        assert all(own) if part in stays else not all(own)
    assert all(p.grad is None for p in model.network_.parameters())


def test_the_time_limit(monkeypatch):
    """With a clock that moves a minute at each look; it is looked at once a step, and once more after each check."""
    looks = iter(range(1000))
    monkeypatch.setattr(module, "clock", lambda: 60.0 * next(looks))
    X, y = rule()
    found = tuned(X, y, max_steps=100, max_minutes=5.5, every=3, patience=99).fine_tuning_
    assert found.ended_by == "time"
    assert [check.step for check in found.history] == [0, 3, 4]
    assert [check.seconds for check in found.history] == [60, 300, 420]


@pytest.mark.parametrize("kind", [TabICLClassifier, TabICLRegressor])
def test_two_fits_are_equal_to_the_bit_and_draw_no_numbers_of_torch(kind):
    X, y = rule()
    network, y = (NETWORK, y) if kind is TabICLClassifier else (tiny_network(TINY_REGRESSOR), X[:, 0])
    options = {"n_estimators": 2, "fine_tune": FineTune(**{**LEARNS, "max_steps": 10})}
    state = torch.random.get_rng_state()
    first, second = kind(network, **options).fit(X, y), kind(network, **options).fit(X, y)
    assert torch.equal(state, torch.random.get_rng_state())
    assert equal(weights(first), weights(second))
    assert not equal(weights(first), network.state_dict())
    losses = [[check.loss for check in one.fine_tuning_.history] for one in (first, second)]
    assert losses[0] == losses[1]
    other = kind(network, **options, random_state=1).fit(X, y)
    assert not equal(weights(first), weights(other))


def test_scikit_learns_conventions():
    X, y = rule(60)
    model = tiny_classifier.classifier(n_estimators=1, fine_tune=FineTune(max_steps=1))
    copied = clone(model).set_params(fine_tune__max_steps=2)
    assert (model.fine_tune.max_steps, copied.fine_tune.max_steps) == (1, 2)
    assert copied.fit(X, y).fine_tuning_.history[-1].step == 2
    assert copied.set_params(fine_tune=None).fit(X, y).fine_tuning_ is None
    search = GridSearchCV(model, {"fine_tune__learning_rate": [1e-4, 1e-3]}, cv=2).fit(X, y)
    assert search.best_estimator_.fine_tuning_.history[-1].step == 1


def test_a_tuned_estimator_can_be_pickled():
    X, y = rule()
    model = tuned(X, y, **LEARNS)
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded.fine_tuning_ == model.fine_tuning_
    assert np.array_equal(loaded.predict_proba(X), model.predict_proba(X))


def test_a_data_frame_with_columns_of_every_type_and_gaps():
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
    training, selected, _ = split_by_content(Rows(pd.DataFrame(X), model.y_, 0), 0.2, 0.0)
    judge = tiny_regressor.regressor(n_estimators=module.VIEWS).fit(X[training], y[training])
    a = levels(judge.network_.config.outputs).double().numpy()
    error = y[selected, None] - judge.predict_quantiles(X[selected], a)
    expected = np.maximum(a * error, (a - 1) * error).mean() / y.std()
    np.testing.assert_allclose(model.fine_tuning_.history[0].loss, expected, rtol=1e-4)


def trainer(memory: float = 2**30, max_rows: int = 1000) -> Trainer:
    X, y = rule()
    rows = Rows(pd.DataFrame(X), np.unique(y, return_inverse=True)[1], 2)
    return Trainer(NETWORK, rows, np.arange(len(y)), FineTune(max_rows=max_rows), memory, 0)


def test_draws_fit_into_the_memory_and_hold_at_most_max_rows():
    whole = trainer()
    assert (whole.num_rows, whole.recomputes, whole.together >= module.DRAWS) == (120, False, True)
    assert trainer(max_rows=50).num_rows == 50
    small = trainer(whole.kept_bytes(True) / 3)
    assert (small.num_rows, small.recomputes, small.together) == (30, True, 1)
    X, y, n = small.draw(1, 0)
    assert len(X) == len(y) == 30 > n


def test_gradients_do_not_depend_on_how_many_draws_go_through_the_network_together():
    norms = []
    for together, recomputes in ((4, False), (1, True), (3, False)):
        some = trainer()
        some.together, some.recomputes, some.network = together, recomputes, untuned(*rule()).network_
        some.trained = [p for p in some.network.parameters() if p.requires_grad]
        with mock.patch.object(nn.utils, "clip_grad_norm_", wraps=nn.utils.clip_grad_norm_) as clip:
            clip.side_effect = lambda *values: norms.append(clip._mock_wraps(*values)) or norms[-1]
            some.step(1)
    np.testing.assert_allclose(norms, norms[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be a number above 0"),
        ({"max_steps": 0, "max_minutes": -1}, "max_steps is 0; .* max_minutes is -1; it must be a number above 0"),
        ({"frozen": ("head",)}, r"frozen is \('head',\); it must be a tuple of some of column, row, icl"),
        ({"frozen": ("column", "row", "icl")}, "not of all"),
        ({"frozen": "icl"}, "it must be a tuple"),
        ({"selection": 0.5, "answer": 0.5}, "leave no rows for training"),
        (
            {"max_steps": 2.5, "every": None},
            "max_steps is 2.5; .* every is None; it must be a whole number",
        ),
        ({"learning_rate": "1e-4"}, "learning_rate is '1e-4'; it must be a number above 0"),
        ({"selection": 0.95}, "rows are for training, where at least 10 are needed"),
    ],
)
def test_wrong_parameters_are_told(options, message):
    X, y = rule()
    with pytest.raises(ValueError, match=message):
        tuned(X, y, **options)


@pytest.mark.parametrize("wrong", [True, False, {"max_steps": 3}, FineTune])
def test_options_of_another_type_are_told(wrong):
    with pytest.raises(TypeError, match=r"fine_tune is .*; it must be None or FineTune\(\.\.\.\)"):
        TabICLClassifier(NETWORK, fine_tune=wrong).fit(*rule())


def test_an_interruption_leaves_the_best_weights_so_far(monkeypatch):
    X, y = rule()
    undisturbed, step = tuned(X, y, **LEARNS), Trainer.step
    assert undisturbed.fine_tuning_.history[-1].step == 20

    def interrupted(self, number):
        if number == 25:
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(Trainer, "step", interrupted)
    model = clone(undisturbed).set_params(model=NETWORK, fine_tune__max_steps=40)
    model.fine_tuning_ = undisturbed.fine_tuning_  # of an earlier fit
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, y)
    assert equal(weights(model), weights(undisturbed))
    assert model.fine_tuning_ is None


def test_fit_where_gradients_are_off():
    X, y = rule(60)
    with torch.no_grad():
        model = tuned(X, y)
    assert model.fine_tuning_ is not None
    assert model.fine_tuning_.history[1].loss != model.fine_tuning_.history[0].loss


def test_a_network_without_gradients_is_told():
    fixed = copy.deepcopy(NETWORK).requires_grad_(False)
    with pytest.raises(ValueError, match="no weight of the network that is not frozen takes gradients"):
        TabICLClassifier(fixed, fine_tune=FineTune()).fit(*rule(60))


def test_tables_that_cannot_be_trained_on_are_told():
    X, _ = rule()
    with pytest.raises(ValueError, match="y has 12 classes, but the network was trained for at most 10"):
        tuned(X, np.arange(120) % 12)
    with pytest.raises(ValueError, match="too much alike"):
        TabICLRegressor(tiny_regressor.NETWORK, fine_tune=FineTune()).fit(X, np.ones(120))
