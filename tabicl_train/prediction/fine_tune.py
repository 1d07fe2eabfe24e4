"""Fine-tuning of an estimator's network on the rows that it is fitted on, with its first weights as a fallback.

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
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack
from tabicl_train.statistics import gain_in_words, paired_gain

__all__ = ["Check", "FineTune", "FineTuning"]

DRAWS = 4  # tables of a step
MAX_ROWS = 1000  # of a draw; of a check, labeled rows as well as queries
EVERY = 10  # steps between checks
LABELED = (0.5, 0.9)  # range of the labeled share of a draw
WARMUP = 10  # steps over which the learning rate rises
CLIP = 1.0  # norm of the gradients
MEMBERS = 4  # of a check, which takes a quarter of the time of a step, and is less noisy than with two
ATTEMPTS = 100  # to draw a table whose features and target vary
LINE_SECONDS = 10.0  # between lines without a terminal
clock = time.monotonic
NO_GAIN = "no gain: the weights you started from are returned"


@dataclass(repr=False, eq=False)
class FineTune(BaseEstimator):
    """Options of fine-tuning in `fit` of a TabICLClassifier or TabICLRegressor.

    The rows are split by their content, so that copies of a row stay together. Each step takes four draws of labeled
    rows and queries from the training rows, each prepared as for a member of an ensemble, and of at most 1,000 rows, or
    fewer if their activations do not fit into the estimator's `memory_gb`. At most 1,000 validation rows are scored,
    with as many training rows as context, before the first step, every ten steps and at the end. The weights with the
    lowest mean loss are kept if they are better than the first ones by more than the standard error of the difference;
    otherwise the first ones are kept. Predictions use them and all rows.

    Parameters
    ----------
    learning_rate : float
        Of AdamW, reached after 10 steps.
    max_steps : int
        Steps after which it ends.
    max_minutes : float
        Time after which no step begins; the result of a fit that ends this way may vary.
    patience : int
        Checks without a lower loss after which it ends.
    validation_fraction : float
        Share of the rows, by which the weights are chosen.
    test_fraction : float
        Share of the rows on which the gain is measured at the end, and which are not used before.
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
    """Mean loss of the validation rows after some steps and seconds of fine-tuning.

    The loss is the cross entropy, or the pinball loss in standard deviations of the target.
    """

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class FineTuning:
    """Result of fine-tuning in `fit`.

    Attributes
    ----------
    history : list of Check
        Its checks, the first one before the first step.
    kept_start : bool
        Whether the first weights were kept.
    ended_by : str
        "steps", "time", "patience", "interrupt", or "loss" after a loss that was not finite.
    result : str
        A description of the gain.
    """

    history: list[Check]
    kept_start: bool
    ended_by: str
    result: str


def fine_tune(estimator: BaseEstimator, options: FineTune, X: pd.DataFrame) -> None:
    """Train the network of a TabICLClassifier or TabICLRegressor that is otherwise fitted on X."""
    # Raises KeyboardInterrupt after `fine_tuning_` is set, and ValueError for more classes than the network has, and
    # for rows that are too few or too similar.
    network = estimator.network_
    y = estimator.y_
    num_classes = 0 if network.config.is_regression else int(y.max()) + 1
    if num_classes > network.config.max_classes:
        raise ValueError(
            f"y has {num_classes} classes, but the network was trained for at most {network.config.max_classes}; "
            "with more it predicts, but cannot be fine-tuned"
        )
    seed = int(check_random_state(estimator.random_state).randint(2**31))
    rows = Rows(X, y, num_classes, estimator._norm_methods, network.config.missing_values)
    names = getattr(estimator, "classes_", None)
    training, validation, test = split_by_content(rows, options.validation_fraction, options.test_fraction, names)
    rng = rng_at(seed, "check")
    order, _ = shuffled(y[training], num_classes, rng)
    judge = Judge(estimator, X, training[order[:MAX_ROWS]])
    validation = rng.permutation(validation)[:MAX_ROWS]
    test = rng.permutation(test)[:MAX_ROWS]

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
    """Train, and leave the network with the best weights; returns what FineTuning and its gain are made from."""
    # These are the checks, what ended the training, and the losses of the validation rows with the first weights and
    # with the best ones, which are None if the first ones were kept.
    options = trainer.options
    network = trainer.network
    started = clock()
    before = judge.losses(validation)
    weights = copy.deepcopy(network.state_dict())  # the best ones so far
    best = None  # their losses
    lowest = float(before.mean())
    since = 0  # checks without a lower loss
    history = [Check(0, lowest, clock() - started)]
    ended_by = "steps"
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
                    weights = copy.deepcopy(network.state_dict())
                    best = losses
                if is_late:
                    ended_by = "time"
                    break
                if since == options.patience:
                    ended_by = "patience"
                    break
    except KeyboardInterrupt:
        ended_by = "interrupt"
    finally:  # after an interrupt too, so that the estimator does not predict with half-trained weights
        network.load_state_dict(weights)
    return history, ended_by, before, best


class Judge:
    """Computes losses of rows, predicted by an estimator with the current network and other rows as context."""

    def __init__(self, estimator: BaseEstimator, X: pd.DataFrame, context: np.ndarray) -> None:
        self.X = X
        self.y = estimator.y_
        parameters = estimator.get_params(deep=False)
        parameters |= {"model": estimator.network_, "n_estimators": MEMBERS, "fine_tune": None}
        self.estimator = type(estimator)(**parameters)
        with warnings.catch_warnings(action="ignore"):  # `fit` has warned about the whole table
            self.estimator.fit(X.iloc[context], self.y[context])
        self.estimator.network_ = estimator.network_  # instead of the copy that fit has made

    def losses(self, rows: np.ndarray) -> np.ndarray:
        """Return the losses of rows, float64 (rows,)."""
        self.estimator._kept.clear()  # the network has changed
        with warnings.catch_warnings(action="ignore"):
            return self.estimator._losses(self.X.iloc[rows], self.y[rows])


class Trainer:
    """Steps of AdamW on draws of the training rows."""

    def __init__(
        self, network: Network, rows: Rows, training: np.ndarray, options: FineTune, memory: float, seed: int
    ) -> None:
        """Choose how many rows and draws fit into the memory (bytes) of activations."""
        self.network = network
        self.rows = rows
        self.training = training
        self.options = options
        self.seed = seed
        self.trained = [p for p in network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.0, weight_decay=0.0)
        self.num_rows = min(MAX_ROWS, len(training))
        self.recomputes = self.kept_bytes(False) > memory
        while self.kept_bytes(self.recomputes) > memory and self.num_rows >= 2 * MIN_ROWS:
            self.num_rows //= 2
        self.together = max(1, int(memory / self.kept_bytes(self.recomputes)))

    def kept_bytes(self, recomputed: bool) -> float:
        """Return the bytes of the activations of a draw; recomputed: whether the backward pass recomputes them."""
        N = self.num_rows
        M = self.rows.X.shape[1]
        return 4 * self.network.kept_values(self.network.config, N, round(N * LABELED[1]), M, recomputed)

    @torch.enable_grad()  # `fit` may be called with gradients disabled
    def step(self, number: int) -> bool:
        """Take step `number`, from 1, if its loss and gradients are finite; returns whether they are."""
        device = self.trained[0].device
        total = 0.0
        tables = [self.draw(number, i) for i in range(DRAWS)]
        for start in range(0, DRAWS, self.together):
            pack = Pack.of(tables[start : start + self.together]).to(device)
            losses = self.network.losses(self.network(pack, int(self.recomputes)), pack)
            torch.autograd.backward(losses.sum() / DRAWS, inputs=self.trained)
            total += losses.sum().item()
        norm = nn.utils.clip_grad_norm_(self.trained, CLIP)
        is_finite = math.isfinite(total + norm.item())
        if is_finite:
            self.optimizer.param_groups[0]["lr"] = self.options.learning_rate * min(1.0, number / WARMUP)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return is_finite

    def draw(self, number: int, i: int) -> tuple[Tensor, Tensor, int]:
        """Return X (N, M), y (N,) and n of draw i of a step; raises ValueError if the rows are too similar."""
        for attempt in range(ATTEMPTS):
            rng = rng_at(self.seed, number, i, attempt)
            n = round(self.num_rows * rng.uniform(*LABELED))
            try:
                table = self.rows.draw(self.training, self.num_rows, n, None, rng)
            except Rejected:
                continue
            return table.X, table.y, table.train_size
        raise ValueError("the training rows are too much alike: their features or target hardly vary")
