"""Fine-tuning of an estimator's network on the rows that it is fitted on, never below where it began.

N rows of a draw of which the first n are labeled, M features.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from torch import Tensor, nn
from tqdm import tqdm

from priors.finish import Rejected
from priors.random import rng_at
from priors.real.row_draws import Rows, shuffled, split_by_content
from priors.table import MIN_ROWS
from tabicl_train.model.pack import Pack
from tabicl_train.model.tabicl import TabICL
from tabicl_train.statistics import gain_in_words, paired_gain

DRAWS = 4  # tables of a step
LABELED = 0.5, 0.9  # range of the labeled share of a draw
WARMUP = 10  # steps over which the learning rate rises
CLIP = 1.0  # norm of the gradients
VIEWS = 4  # of a check: as long as a quarter of a step, and less noisy than two
ATTEMPTS = 100  # at a draw whose features and target vary
clock = time.monotonic
NO_GAIN = "no gain: the weights you started from are returned"


class FineTune(BaseEstimator):
    """How `fit` trains the network of a TabICLClassifier or TabICLRegressor on the rows it is given.

    The rows are split by their content, so that copies of a row stay together. Each step takes four draws of labeled
    rows and queries among the training rows, each in a view as in prediction. The selection rows are scored, with
    training rows as context, before the first step, every few steps and at the end. The weights of the lowest mean loss
    are kept if they are better than the first ones by more than the standard error of the difference, else the first
    ones. Predictions use them and all rows.

    learning_rate: of AdamW, reached after 10 steps
    max_steps: after which it ends
    max_minutes: after which no step begins; a fit that ends so may differ from another one
    every: steps from one check to the next
    patience: checks without a lower loss after which it ends
    frozen: parts of the network that stay as they are, some of "column", "row" and "icl"
    selection: share of the rows by which the weights are chosen
    answer: share of the rows that take part in nothing, and show in the end what was gained
    max_rows: most rows of a draw, and most labeled rows and queries of a check; fewer are drawn if the activations of
        a draw would not fit into the estimator's memory_gb
    """

    def __init__(
        self,
        learning_rate: float = 1e-4,
        max_steps: int = 500,
        max_minutes: float = 10.0,
        every: int = 10,
        patience: int = 10,
        frozen: tuple[str, ...] = (),
        selection: float = 0.2,
        answer: float = 0.0,
        max_rows: int = 1000,
    ):
        self.learning_rate = learning_rate
        self.max_steps = max_steps
        self.max_minutes = max_minutes
        self.every = every
        self.patience = patience
        self.frozen = frozen
        self.selection = selection
        self.answer = answer
        self.max_rows = max_rows

    def check(self) -> None:
        """Raise ValueError with everything wrong with the parameters."""
        parts = TabICL.parts
        count = (lambda number: number >= 1 and isinstance(number, Integral), "a whole number, at least 1")
        bounds: dict[str, tuple[Callable[[Any], bool], str]] = {
            "learning_rate": (lambda rate: 0 < rate < math.inf, "a number above 0"),
            "max_steps": count,
            "max_minutes": (lambda minutes: minutes > 0, "a number above 0"),
            "every": count,
            "patience": count,
            "frozen": (
                lambda names: not isinstance(names, str) and set(names) < parts.keys(),
                f"a tuple of some of {', '.join(parts)}, but not of all of them",
            ),
            "selection": (lambda share: 0 < share < 1, "a number between 0 and 1"),
            "answer": (lambda share: 0 <= share < 1, "a number in [0, 1)"),
            "max_rows": (
                lambda rows: rows >= MIN_ROWS and isinstance(rows, Integral),
                f"a whole number, at least {MIN_ROWS}",
            ),
        }
        problems = []
        for name, (is_right, bound) in bounds.items():
            value = getattr(self, name)
            try:
                if is_right(value):
                    continue
            except TypeError:  # it is not of the kind that can be compared
                pass
            problems.append(f"fine_tune: {name} is {value!r}; it must be {bound}")
        if not problems and self.selection + self.answer >= 1:
            problems.append("fine_tune: selection and answer leave no rows for training")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class Check:
    """The mean loss of the selection rows after so many steps and seconds: cross entropy, or pinball loss in standard
    deviations of the target."""

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class FineTuning:
    """What a fine-tuning did.

    history: its checks, the first one before the first step
    kept_start: whether the network is the one it began with
    ended_by: "steps", "time", "patience", or "loss" after a loss that was not finite
    answer: what was gained, in words
    """

    history: list[Check]
    kept_start: bool
    ended_by: str
    answer: str


def fine_tune(estimator: BaseEstimator, options: FineTune, X: pd.DataFrame) -> FineTuning:
    """Train the network of a TabICLClassifier or TabICLRegressor that is fitted on X but for this.

    Raises ValueError for more classes than the network has, and rows too few or too much alike.
    """
    network, y = estimator.network_, estimator.y_
    num_classes = 0 if network.config.is_regression else int(y.max()) + 1
    if num_classes > network.config.max_classes:
        raise ValueError(
            f"y has {num_classes} classes, but the network was trained for at most {network.config.max_classes}; "
            "with more it predicts, but cannot be fine-tuned"
        )
    seed = int(check_random_state(estimator.random_state).randint(2**31))
    rows = Rows(X, y, num_classes, estimator.norm_methods, network.config.missing_values)
    training, selected, answering = split_by_content(rows, options.selection, options.answer)
    rng, most = rng_at(seed, "check"), options.max_rows
    order, _ = shuffled(y[training], num_classes, rng)
    judge = Judge(estimator, X, training[order[:most]])
    selected, answering = rng.permutation(selected)[:most], rng.permutation(answering)[:most]
    unseen_before = judge.losses(answering) if len(answering) else None
    trainer = Trainer(network, rows, training, options, estimator.memory_gb * 2**30, seed)
    history, ended_by, before, best = search(trainer, judge, selected)
    if best is None:
        words = NO_GAIN
    elif unseen_before is not None:
        words = gain_in_words(paired_gain(unseen_before, judge.losses(answering)), len(answering), "rows")
    else:
        words = (
            f"better by {paired_gain(before, best):.4f} on the {len(selected)} rows by which the weights were chosen "
            "(mean loss, 95 % confidence interval), and judged on no others; FineTune(answer=0.1) holds some out"
        )
    return FineTuning(history, best is None, ended_by, words)


def search(
    trainer: Trainer, judge: Judge, selected: np.ndarray
) -> tuple[list[Check], str, np.ndarray, np.ndarray | None]:
    """Train, and leave the network with the best weights.

    returns: the checks, what ended the training, and the losses of the selection rows at the start and with the best
        weights; the latter are None if the start was kept
    """
    options, network, started = trainer.options, trainer.network, clock()
    before = judge.losses(selected)
    weights, best, lowest, since = copy.deepcopy(network.state_dict()), None, float(before.mean()), 0
    history, ended_by = [Check(0, lowest, clock() - started)], "steps"
    try:
        with tqdm(total=options.max_steps, unit="step", desc="fine-tuning", disable=None) as bar:
            for step in range(1, options.max_steps + 1):
                if not trainer.step(step):
                    ended_by = "loss"
                    break
                bar.update()
                is_late = clock() - started >= 60 * options.max_minutes
                if not (step % options.every == 0 or step == options.max_steps or is_late):
                    continue
                losses = judge.losses(selected)
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
    finally:  # if it is interrupted, the estimator predicts all the same, and not with half-trained weights
        network.load_state_dict(weights)
    return history, ended_by, before, best


class Judge:
    """Losses of rows, predicted by an estimator with the network as it is and other rows as context."""

    def __init__(self, estimator: BaseEstimator, X: pd.DataFrame, context: np.ndarray) -> None:
        own = {"model": estimator.network_, "n_estimators": VIEWS, "fine_tune": None}
        self.X, self.y = X, estimator.y_
        self.estimator = type(estimator)(**{**estimator.get_params(deep=False), **own})
        self.quietly(self.estimator.fit, X.iloc[context], self.y[context])
        self.estimator.network_ = estimator.network_  # itself, of which fit has made a copy

    def losses(self, rows: np.ndarray) -> np.ndarray:
        """float64 (rows,)"""
        return self.quietly(self.estimator._losses, self.X.iloc[rows], self.y[rows])

    @staticmethod
    def quietly(method, *values):
        """Warnings of parts of the rows are about what `fit` has warned of already."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return method(*values)


class Trainer:
    """Steps of AdamW on draws of the training rows."""

    def __init__(
        self, network: TabICL, rows: Rows, training: np.ndarray, options: FineTune, memory: float, seed: int
    ) -> None:
        """memory: that activations may take, in bytes"""
        self.network, self.rows, self.training, self.options, self.seed = network, rows, training, options, seed
        self.trained: list[nn.Parameter] = [
            p
            for part, name in network.parts.items()
            if part not in options.frozen
            for p in getattr(network, name).parameters()
            if p.requires_grad
        ]
        if not self.trained:
            raise ValueError("fine_tune: no weight of the network that is not frozen takes gradients (requires_grad)")
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.0, weight_decay=0.0)
        self.num_rows = min(options.max_rows, len(training))
        self.recomputes = self.kept_bytes(False) > memory
        while self.kept_bytes(self.recomputes) > memory and self.num_rows >= 2 * MIN_ROWS:
            self.num_rows //= 2
        self.together = max(1, int(memory / self.kept_bytes(self.recomputes)))

    def kept_bytes(self, recomputed: bool) -> float:
        """Of the activations of a draw; recomputed: whether the backward pass computes them again."""
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
