"""Fine-tuning of an estimator's network on the rows that it is fitted on, never below where it began.

N rows of a draw of which the first n are labeled, M features.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from dataclasses import dataclass
from numbers import Integral, Real
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval
from torch import Tensor, nn
from tqdm import tqdm

from priors.finish import Rejected
from priors.random import rng_at
from priors.real.draws import Rows, shuffled, split_by_content
from priors.table import MIN_ROWS
from tabicl_train.console import print_line
from tabicl_train.model.pack import Pack
from tabicl_train.model.tabicl import TabICL
from tabicl_train.statistics import gain_in_words, paired_gain

__all__ = ["Check", "FineTune", "FineTuning"]

DRAWS = 4  # tables of a step
MAX_ROWS = 1000  # of a draw; of a check, labeled rows and queries
EVERY = 10  # steps from one check to the next
LABELED = 0.5, 0.9  # range of the labeled share of a draw
WARMUP = 10  # steps over which the learning rate rises
CLIP = 1.0  # norm of the gradients
MEMBERS = 4  # of a check: as long as a quarter of a step, and less noisy than two
ATTEMPTS = 100  # at a draw whose features and target vary
LINE_SECONDS = 10.0  # from one line to the next, where there is no terminal
clock = time.monotonic
NO_GAIN = "no gain: the weights you started from are returned"


@dataclass(repr=False, eq=False)
class FineTune(BaseEstimator):
    """Describe how `fit` trains the network of a TabICLClassifier or TabICLRegressor on the rows it is given.

    The rows are split by their content, so that copies of a row stay together. Each step takes four draws of labeled
    rows and queries among the training rows, each as a member of an ensemble sees it and of at most 1,000 rows; fewer
    if their activations would not fit into the estimator's `memory_gb`. At most 1,000 validation rows are scored, with
    as many training rows as context, before the first step, every ten steps and at the end. The weights of the lowest
    mean loss are kept if they are better than the first ones by more than the standard error of the difference, else
    the first ones. Predictions use them and all rows.

    Parameters
    ----------
    learning_rate : float
        Of AdamW, reached after 10 steps.
    max_steps : int
        Steps after which it ends.
    max_minutes : float
        Time after which no step begins; a fit that ends so may differ from another one.
    patience : int
        Checks without a lower loss after which it ends.
    validation_fraction : float
        Of the rows, by which the weights are chosen.
    test_fraction : float
        Of the rows, which take part in nothing and show in the end what was gained.
    """

    learning_rate: float = 1e-4
    max_steps: int = 500
    max_minutes: float = 10.0
    patience: int = 10
    validation_fraction: float = 0.2
    test_fraction: float = 0.0
    _parameter_constraints: ClassVar[dict[str, list]] = {
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "max_steps": [Interval(Integral, 1, None, closed="left")],
        "max_minutes": [Interval(Real, 0, None, closed="neither")],
        "patience": [Interval(Integral, 1, None, closed="left")],
        "validation_fraction": [Interval(Real, 0, 1, closed="neither")],
        "test_fraction": [Interval(Real, 0, 1, closed="left")],
    }

    def check(self) -> None:
        """Raise ValueError for a wrong parameter."""
        self._validate_params()
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("fine_tune: validation_fraction and test_fraction leave no rows for training")


@dataclass(frozen=True)
class Check:
    """Hold the mean loss of the validation rows after so many steps and seconds.

    The loss is the cross entropy, or the pinball loss in standard deviations of the target.
    """

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class FineTuning:
    """Hold what a fine-tuning did.

    Attributes
    ----------
    history : list of Check
        Its checks, the first one before the first step.
    kept_start : bool
        Whether the network is the one it began with.
    ended_by : str
        "steps", "time", "patience", "interrupt", or "loss" after a loss that was not finite.
    result : str
        What was gained, in words.
    """

    history: list[Check]
    kept_start: bool
    ended_by: str
    result: str


def fine_tune(estimator: BaseEstimator, options: FineTune, X: pd.DataFrame) -> None:
    """Train the network of a TabICLClassifier or TabICLRegressor that is fitted on X but for this."""
    # Raises KeyboardInterrupt once `fine_tuning_` says what was done until then, and ValueError for more classes than
    # the network has, and rows too few or too much alike.
    network, y = estimator.network_, estimator.y_
    num_classes = 0 if network.config.is_regression else int(y.max()) + 1
    if num_classes > network.config.max_classes:
        raise ValueError(
            f"y has {num_classes} classes, but the network was trained for at most {network.config.max_classes}; "
            "with more it predicts, but cannot be fine-tuned"
        )
    seed = int(check_random_state(estimator.random_state).randint(2**31))
    rows = Rows(X, y, num_classes, estimator.norm_methods, network.config.missing_values)
    training, validation, test = split_by_content(rows, options.validation_fraction, options.test_fraction)
    rng = rng_at(seed, "check")
    order, _ = shuffled(y[training], num_classes, rng)
    judge = Judge(estimator, X, training[order[:MAX_ROWS]])
    validation, test = rng.permutation(validation)[:MAX_ROWS], rng.permutation(test)[:MAX_ROWS]
    test_before = judge.losses(test) if len(test) else None
    trainer = Trainer(network, rows, training, options, estimator.memory_gb * 2**30, seed)
    history, ended_by, before, best = search(trainer, judge, validation)
    if best is None:
        words = NO_GAIN
    elif test_before is not None and ended_by != "interrupt":
        words = gain_in_words(paired_gain(test_before, judge.losses(test)), len(test), "rows")
    else:
        words = gain_in_words(paired_gain(before, best), len(validation), "rows", "by which the weights were chosen")
        if test_before is None:
            words += "; to judge them on others, set FineTune(test_fraction=0.1)"
    estimator.fine_tuning_ = FineTuning(history, best is None, ended_by, words)
    if ended_by == "interrupt":
        raise KeyboardInterrupt


def search(
    trainer: Trainer, judge: Judge, validation: np.ndarray
) -> tuple[list[Check], str, np.ndarray, np.ndarray | None]:
    """Train, and leave the network with the best weights."""
    # returns: the checks, what ended the training, and the losses of the validation rows at the start and with the best
    # weights; the latter are None if the start was kept
    options, network, started = trainer.options, trainer.network, clock()
    before = judge.losses(validation)
    weights, best, lowest, since = copy.deepcopy(network.state_dict()), None, float(before.mean()), 0
    history, ended_by = [Check(0, lowest, clock() - started)], "steps"
    next_line = LINE_SECONDS
    try:
        with tqdm(total=options.max_steps, unit="step", desc="fine-tuning", disable=None) as bar:
            for step in range(1, options.max_steps + 1):
                if not trainer.step(step):
                    ended_by = "loss"
                    break
                bar.update()
                seconds = clock() - started
                is_late = seconds >= 60 * options.max_minutes
                if bar.disable and seconds >= next_line:  # no terminal
                    next_line = seconds + LINE_SECONDS
                    latest = f"loss {history[-1].loss:.4f} (start {history[0].loss:.4f})"
                    print_line(f"fine-tuning: step {step} of {options.max_steps}, {seconds:.0f} s, {latest}")
                if not (step % EVERY == 0 or step == options.max_steps or is_late):
                    continue
                losses = judge.losses(validation)
                loss = float(losses.mean())
                history.append(Check(step, loss, clock() - started))
                bar.set_postfix_str(f"loss {loss:.4f} (start {history[0].loss:.4f})")
                if not np.isfinite(loss):
                    ended_by = "loss"
                    break
                since = since + 1 if loss >= lowest else 0
                lowest = min(lowest, loss)
                if paired_gain(before, losses).exceeds_error and (best is None or loss < best.mean()):
                    weights, best = copy.deepcopy(network.state_dict()), losses
                if is_late or since == options.patience:
                    ended_by = "time" if is_late else "patience"
                    break
    except KeyboardInterrupt:
        ended_by = "interrupt"
    finally:  # if it is interrupted, the estimator predicts all the same, and not with half-trained weights
        network.load_state_dict(weights)
    return history, ended_by, before, best


class Judge:
    """Losses of rows, predicted by an estimator with the network as it is and other rows as context."""

    def __init__(self, estimator: BaseEstimator, X: pd.DataFrame, context: np.ndarray) -> None:
        own = {"model": estimator.network_, "n_estimators": MEMBERS, "fine_tune": None}
        self.X, self.y = X, estimator.y_
        self.estimator = type(estimator)(**{**estimator.get_params(deep=False), **own})
        with warnings.catch_warnings(action="ignore"):  # `fit` has warned of the whole table
            self.estimator.fit(X.iloc[context], self.y[context])
        self.estimator.network_ = estimator.network_  # itself, of which fit has made a copy

    def losses(self, rows: np.ndarray) -> np.ndarray:
        """Return the losses of rows, float64 (rows,)."""
        self.estimator._kept.clear()  # the network has changed
        with warnings.catch_warnings(action="ignore"):
            return self.estimator._losses(self.X.iloc[rows], self.y[rows])


class Trainer:
    """Steps of AdamW on draws of the training rows."""

    def __init__(
        self, network: TabICL, rows: Rows, training: np.ndarray, options: FineTune, memory: float, seed: int
    ) -> None:
        """Choose how many rows and draws fit into the memory (bytes) of activations."""
        self.network, self.rows, self.training, self.options, self.seed = network, rows, training, options, seed
        self.trained = [p for p in network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.0, weight_decay=0.0)
        self.num_rows = min(MAX_ROWS, len(training))
        self.recomputes = self.kept_bytes(False) > memory
        while self.kept_bytes(self.recomputes) > memory and self.num_rows >= 2 * MIN_ROWS:
            self.num_rows //= 2
        self.together = max(1, int(memory / self.kept_bytes(self.recomputes)))

    def kept_bytes(self, recomputed: bool) -> float:
        """Return the bytes that the activations of a draw take; recomputed: the backward pass computes them again."""
        N, M = self.num_rows, self.rows.X.shape[1]
        return 4 * self.network.kept_values(self.network.config, N, round(N * LABELED[1]), M, recomputed)

    @torch.enable_grad()  # `fit` may be called where gradients are off
    def step(self, number: int) -> bool:
        """Take step `number`, from 1, if its loss and gradients are finite, and tell whether they are."""
        device, total = self.trained[0].device, 0.0
        tables = [self.draw(number, i) for i in range(DRAWS)]
        for start in range(0, DRAWS, self.together):
            pack = Pack.of(tables[start : start + self.together]).to(device)
            losses = self.network.losses(self.network(pack, int(self.recomputes)), pack)
            torch.autograd.backward(losses.sum() / DRAWS, inputs=self.trained)
            total += losses.sum().item()
        norm = nn.utils.clip_grad_norm_(self.trained, CLIP)
        if is_finite := math.isfinite(total + norm.item()):
            self.optimizer.param_groups[0]["lr"] = self.options.learning_rate * min(1.0, number / WARMUP)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return is_finite

    def draw(self, number: int, i: int) -> tuple[Tensor, Tensor, int]:
        """X (N, M), y (N,) and n of draw i of a step; raises ValueError if the rows are too much alike."""
        for attempt in range(ATTEMPTS):
            rng = rng_at(self.seed, number, i, attempt)
            n = round(self.num_rows * rng.uniform(*LABELED))
            try:
                table = self.rows.draw(self.training, self.num_rows, n, None, rng)
            except Rejected:
                continue
            return table.X, table.y, table.train_size
        raise ValueError("the training rows are too much alike: their features or target hardly vary")
