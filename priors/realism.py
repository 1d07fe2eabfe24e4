"""What synthetic tables may share with real ones: irrelevant columns, missing values, odd values; off by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from priors.finish import SPLIT_ATTEMPTS, Rejected, clamp_and_standardize, is_valid_split
from priors.random import lasting_rng, rng_at
from priors.table import Table, TableSpec

DRAWN_ROWS = 2  # times the rows of the table, of which imbalance keeps some
DEPTHS = (1.0, 4.0)  # of the classes' log weights: that of the commonest minus that of the rarest, by strength
KEPT_CLASS_ROWS = 4  # of each class at least, as otherwise most draws would have no valid split
COPIED_SHARES = (0.02, 0.4)  # of the rows
SLOPES = (1.0, 10.0)  # of the log weight of becoming a query row, from the lowest rank to the highest
DIRECTION_COLUMNS = 5  # of a direction, at most
LOOKED_AT = 50  # rows by which numbers are told from categories
LEVELS = (10, 200)  # of a category, by strength
ROWS_OF_LEVEL = 3  # on average at least, as a level of a single row has nothing to say about others
RELEVANT_SHARES = (0.7, 0.06)  # of the columns, by strength: 2 of 32 for the strongest
FEWEST_FEATURES = 4  # of a table that gets irrelevant columns
PERMUTATIONS = 3  # of the rows of copied columns; columns with the same one depend on each other
STRETCHES = (0.5, 2.0)  # factors in the hyperbolic sine, by strength; near the mean it changes little
LOG_STDS = (0.4, 1.6)  # standard deviations of the logarithm
STEPS = (0.03, 1.0)  # between rounded values, in standard deviations
HEAP = 5  # steps from one heaped value to the next
TIES = 1e-6  # values closer than this, in standard deviations, have random ranks
RATES = (0.02, 0.5)  # mean share of missing cells, by strength, in a column that lacks some; in blocks, at most
MECHANISMS = ("at random", "by its own value", "by another value", "in blocks")
STEEPEST = 4.0  # exponent of the rank at which the chance of a missing value rises
MOST_BLOCKS = 3

Change = Callable[[np.ndarray, float, np.random.Generator], np.ndarray]


@dataclass
class Realism:
    """What synthetic tables may have in common with real ones; priors/README.md explains and shows it."""

    irrelevant: float = 0.0
    """Probability that columns of a table say nothing about its target, from a third of them to nearly all."""
    levels: float = 0.0
    """Probability that numeric columns of a table become categories of 10 to 200 levels, in no order or in the order of
    their mean target."""
    missing: float = 0.0
    """Probability that cells of a table are missing: at random, by value, or in blocks."""
    tails: float = 0.0
    """Probability that numeric columns of a table have heavy tails, on both sides or on one."""
    rounding: float = 0.0
    """Probability that numeric columns of a table are rounded: to a step, to digits, or to heaped values."""
    shift: float = 0.0
    """Probability that the query rows of a table lie toward one end of a column, or of a direction in several."""
    imbalance: float = 0.0
    """Probability that the classes of a table become more unequal; twice the rows are drawn for it."""
    duplicates: float = 0.0
    """Probability that rows of a table are copies of others, also across labeled and query rows."""
    strength: float | None = None
    """How strong all of it is, from 0 (weak) to 1; null draws the strength for each table."""

    def problems(self) -> list[str]:
        """What is wrong with the values, as messages for the user."""
        problems = []
        for name, value in vars(self).items():
            if name == "strength" and value is None:
                continue
            if type(value) not in (int, float) or not 0 <= value <= 1:
                problems.append(f"realism.{name} is {value!r}; it must lie in 0..1")
        return problems

    def draw(self, spec: TableSpec, seed: tuple[int, ...]) -> Changes:
        """Draw which changes a table gets, and how strong they are."""
        strengths = {}
        for name, probability in vars(self).items():
            if name == "strength" or not probability:
                continue
            if name == "imbalance" and spec.max_classes == 0:
                continue
            # Each change has a generator of its own, so that switching one on leaves the others as they are.
            rng = lasting_rng(seed[:-1], f"realism {name}", seed)
            if rng.random() < probability:
                strengths[name] = rng.random() if self.strength is None else self.strength
        return Changes(strengths, spec, seed)


@dataclass(frozen=True)
class Changes:
    """The changes of one table. `Realistic.attempt` makes them at three places, in this order:

    1. `planned` asks the prior for more rows, or fewer columns,
    2. `change` takes its raw columns and target,
    3. `fill_missing` takes the finished table.

    strengths: of the changes that the table gets, by the name of their option
    applied: what was done, in lines for the user
    """

    strengths: dict[str, float]
    spec: TableSpec
    seed: tuple[int, ...]
    applied: list[str] = field(default_factory=list)

    @property
    def planned(self) -> TableSpec:
        """What the prior is to plan and compute."""
        rows = self.spec.num_rows
        if "imbalance" in self.strengths:
            rows *= DRAWN_ROWS
        features = self.spec.num_features
        if "irrelevant" in self.strengths and features >= FEWEST_FEATURES:
            features = max(1, round(features * between(RELEVANT_SHARES, self.strengths["irrelevant"])))
        return replace(self.spec, num_rows=rows, num_features=features)

    def change(
        self, columns: torch.Tensor, target: torch.Tensor, num_classes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Change the columns and the target that `Prior.execute` returns."""
        raw = Raw(columns.numpy(), target.numpy(), num_classes, self.spec)
        for name, change in CHANGES.items():
            if name in self.strengths:
                text = change(raw, self.strengths[name], rng_at(self.seed, f"realism {name}"))
                self.applied.append(text)
        return torch.from_numpy(raw.columns), torch.from_numpy(raw.target)

    def fill_missing(self, table: Table) -> torch.Tensor | None:
        """Give missing cells of a finished table the mean of their column, and return which they are: bool (N, M)."""
        if "missing" not in self.strengths:
            return None
        X = table.X.numpy()
        rng = rng_at(self.seed, "realism missing")
        missing, text = draw_missing(X, table.train_size, self.strengths["missing"], rng)
        fill(X, missing, table.train_size)
        table.missing = float(missing.mean())
        self.applied.append(text)
        return torch.from_numpy(missing)

    def describe(self, plan: Any) -> Any:
        """The text of the plan, with what was done to the table; the plan itself if nothing was."""
        if not self.strengths:
            return plan
        lines = [f"realism: {line}" for line in self.applied]
        return "\n".join([str(plan), *lines])


@dataclass
class Raw:
    """Columns float32 (N, M) and target (N,) as a prior computes them, and what is asked of the finished table."""

    columns: np.ndarray
    target: np.ndarray
    num_classes: int
    spec: TableSpec

    @property
    def num_rows(self) -> int:
        """Rows of the finished table."""
        return self.spec.num_rows

    @property
    def train_size(self) -> int:
        """Labeled rows of the finished table, which come first."""
        return self.spec.train_size

    def take(self, rows: np.ndarray) -> None:
        """Keep these rows, in this order."""
        self.columns = self.columns[rows]
        self.target = self.target[rows]


def pick_columns(number: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the indices of about this share of the columns, at least one."""
    picked = np.flatnonzero(rng.random(number) < share)
    if len(picked) == 0:
        return rng.integers(number, size=1)
    return picked


def ranks(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Ranks in (0, 1), float32 (K, N), within each row of standardized values (K, N); ties are broken at random."""
    order = np.argsort(values + TIES * rng.random(values.shape), axis=1)
    ranks = np.empty(values.shape, np.float32)
    places = (np.arange(values.shape[1], dtype=np.float32) + 0.5) / values.shape[1]
    np.put_along_axis(ranks, order, np.broadcast_to(places, values.shape), 1)
    return ranks


def unbalance(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Keep num_rows of the rows, so that rare classes become rarer."""
    # The log weights of the classes, in the order of their sizes, are random from -depth to 0.
    depth = DEPTHS[0] + (DEPTHS[1] - DEPTHS[0]) * strength
    places = np.sort(rng.random(raw.num_classes))
    by_size = np.argsort(np.bincount(raw.target, minlength=raw.num_classes))
    log_weights = np.empty(raw.num_classes)
    log_weights[by_size] = depth * (places - places[-1]) / np.ptp(places)
    # The rows with the largest sums of log weight and Gumbel noise are a weighted draw without replacement.
    keys = log_weights[raw.target] + rng.gumbel(size=len(raw.target))
    for label in range(raw.num_classes):
        first_rows = np.flatnonzero(raw.target == label)[:KEPT_CLASS_ROWS]
        keys[first_rows] = np.inf
    kept = np.argpartition(-keys, raw.num_rows)[: raw.num_rows]
    raw.take(np.sort(kept))
    ratio = ", ".join(f"{weight:.2g}" for weight in np.exp(log_weights))
    return f"rows kept by class in the ratio {ratio}"


def make_levels(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Cut some numeric columns into levels with shuffled codes, or with codes in the order of the mean target.

    A level so has an effect of its own, and many levels have few rows. The order of the mean target, over the labeled
    rows, is what estimators give to categories in half of the members: rare levels look better than they are there.
    """
    most = max(2, raw.num_rows // ROWS_OF_LEVEL)
    levels = min(round(between(LEVELS, strength)), most)
    picked = pick_columns(raw.columns.shape[1], rng.uniform(0.1, 0.5), rng)
    picked = picked[is_numeric(raw.columns[:, picked])]
    by_target = rng.random() < 0.5
    outcome = raw.target
    if raw.num_classes:  # one class beside the others
        outcome = (raw.target == rng.integers(raw.num_classes)).astype(np.float32)
    for column in picked:
        values = raw.columns[:, column]
        # Levels end at the values of random rows, so their sizes differ as those of real categories do.
        ends = np.sort(rng.choice(values, levels - 1))
        codes = rng.permutation(levels)[np.searchsorted(ends, values)]
        if by_target:
            codes = rank_levels(codes, outcome, raw.train_size, levels)
        raw.columns[:, column] = codes
    if len(picked) == 0:
        return "no numeric column became levels"
    order = "by mean target" if by_target else "in no order"
    return f"columns {', '.join(map(str, picked))} became {levels} levels {order}"


def rank_levels(codes: np.ndarray, outcome: np.ndarray, train_size: int, levels: int) -> np.ndarray:
    """Number levels (N,) in the order of their mean outcome (N,) over the labeled rows."""
    codes_labeled = codes[:train_size]
    outcome_labeled = outcome[:train_size]
    rows = np.bincount(codes_labeled, minlength=levels)
    totals = np.bincount(codes_labeled, weights=outcome_labeled, minlength=levels)
    # A level without labeled rows is average.
    means = np.where(rows > 0, totals / np.maximum(rows, 1), outcome_labeled.mean())
    ranks = np.empty(levels, np.int64)
    ranks[np.argsort(means, kind="stable")] = np.arange(levels)
    return ranks[codes]


def add_irrelevant(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Append columns that say nothing about the target, up to the number of features that is asked for.

    Half of them are copies of the other columns with their rows permuted, so that no marginal distribution tells which
    columns matter; the others are noise.
    """
    rows, relevant = raw.columns.shape
    number = raw.spec.num_features - relevant
    if number <= 0:
        return "no irrelevant columns in a table of few"
    permutations = [rng.permutation(rows) for _ in range(PERMUTATIONS)]
    added = np.empty((rows, number), np.float32)
    for column in range(number):
        if rng.random() < 0.5:
            order = permutations[rng.integers(PERMUTATIONS)]
            added[:, column] = raw.columns[order, rng.integers(relevant)]
        else:
            added[:, column] = draw_noise(rows, rng)
    raw.columns = np.concatenate([raw.columns, added], axis=1)
    return f"columns {relevant} to {relevant + number - 1} are irrelevant"


def draw_noise(rows: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a column (rows,): normal, uniform, exponential, or codes of 2 to 10 categories."""
    kind = rng.integers(4)
    if kind == 0:
        return rng.standard_normal(rows)
    if kind == 1:
        return rng.random(rows)
    if kind == 2:
        return rng.exponential(size=rows)
    shares = rng.dirichlet(np.ones(rng.integers(2, 11)))
    return rng.choice(len(shares), rows, p=shares).astype(np.float64)


def duplicate(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Put copies of other rows in the place of some, with the target; part of them with one value changed."""
    rows, features = raw.columns.shape
    number = max(1, round(between(COPIED_SHARES, strength) * rows))
    order = rng.permutation(rows)
    copies = order[:number]
    originals = rng.choice(order[number:], number)
    raw.columns[copies] = raw.columns[originals]
    raw.target[copies] = raw.target[originals]
    changed = copies[rng.random(number) < rng.random()]
    columns = rng.integers(features, size=len(changed))
    raw.columns[changed, columns] = raw.columns[rng.integers(rows, size=len(changed)), columns]
    return f"{number} rows are copies, {len(changed)} of them with one value changed"


def shift(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Reorder the rows so that the query rows tend to lie high in one column, or along a direction in several."""
    slope = between(SLOPES, strength)
    varying = np.flatnonzero((raw.columns != raw.columns[0]).any(0))
    if len(varying) == 0:
        raise Rejected("constant")
    for _ in range(1 + SPLIT_ATTEMPTS):
        number = 1 if rng.random() < 0.5 else DIRECTION_COLUMNS
        picked = rng.permutation(varying)[:number]
        z = clamp_and_standardize(torch.from_numpy(raw.columns[:, picked])).numpy()
        score = z @ rng.standard_normal(len(picked))
        # The train_size rows with the lowest keys are labeled; on either side rows stay in their order.
        keys = slope * ranks(score[None], rng)[0] + rng.gumbel(size=len(score))
        by_key = np.argpartition(keys, raw.train_size)
        labeled = np.sort(by_key[: raw.train_size])
        queries = np.sort(by_key[raw.train_size :])
        order = np.concatenate([labeled, queries])
        if raw.num_classes == 0 or is_valid_split(raw.target[order], raw.num_classes, raw.train_size):
            raw.take(order)
            return f"query rows lie toward one end of columns {', '.join(map(str, picked))}, with slope {slope:.1f}"
    raise Rejected("split")


def make_tails_heavy(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Stretch numeric columns far from their mean, on both sides, or on one as in a log-normal distribution."""
    return change_columns(raw, strength, rng, (stretch_both_tails, stretch_one_tail))


def round_numbers(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Round numeric columns to a step, to one or two significant digits, or in some rows to multiples of five steps."""
    return change_columns(raw, strength, rng, (round_to_step, round_to_digits, round_to_heaps))


def change_columns(raw: Raw, strength: float, rng: np.random.Generator, changes: tuple[Change, ...]) -> str:
    """Apply one of the changes to each of some numeric columns, standardized; the others stay as they are."""
    picked = pick_columns(raw.columns.shape[1], rng.uniform(0.2, 1.0), rng)
    kinds = rng.integers(len(changes), size=len(picked))  # number of the change of each column
    numeric = is_numeric(raw.columns[:, picked])
    picked = picked[numeric]
    kinds = kinds[numeric]
    values = clamp_and_standardize(torch.from_numpy(raw.columns[:, picked])).numpy()  # (N, K)
    texts = []
    for kind, change in enumerate(changes):
        of_kind = kinds == kind
        if of_kind.any():
            columns = picked[of_kind]
            raw.columns[:, columns] = change(values[:, of_kind], strength, rng)
            texts.append(f"{change.__name__.replace('_', ' ')}: columns {', '.join(map(str, columns))}")
    return "; ".join(texts) or "no numeric column changed"


def is_numeric(columns: np.ndarray) -> np.ndarray:
    """Which of the columns (N, K) have numbers, not categories, bool (K,): most of their first values differ."""
    first = np.sort(columns[:LOOKED_AT], axis=0)
    different: np.ndarray = (np.diff(first, axis=0) > 0).sum(0)
    return different >= len(first) // 2


def between(bounds: tuple[float, float], strength: float) -> float:
    """The geometric interpolation between two positive numbers."""
    weak, strong = bounds
    return weak * (strong / weak) ** strength


def stretch_both_tails(z: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    return np.sinh(np.float32(between(STRETCHES, strength)) * z)


def stretch_one_tail(z: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    sides = np.where(rng.random(z.shape[1]) < 0.7, 1, -1).astype(np.float32)  # most long tails are on the right
    return sides * np.exp(sides * np.float32(between(LOG_STDS, strength)) * z)


def round_to_step(z: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    step = np.float32(between(STEPS, strength) * rng.uniform(0.7, 1.4))
    return np.rint(z / step) * step


def round_to_digits(z: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    digits = 2 if strength < 0.5 else 1
    scale = np.float32(10) ** rng.random(z.shape[1], dtype=np.float32)  # where the powers of ten lie
    offset = rng.uniform(0, 2, (z.shape[1],)).astype(np.float32)
    x = (z + offset) * scale
    exponent = np.floor(np.log10(np.maximum(np.abs(x), 1e-3)))  # of the first digit
    unit = np.float32(10) ** (exponent - np.float32(digits - 1))
    return np.rint(x / unit) * unit


def round_to_heaps(z: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    step = np.float32(between(STEPS, strength))
    is_heaped = rng.random(z.shape, dtype=np.float32) < rng.uniform(0.3, 0.9)
    fine_step = step / HEAP
    number_of_fine_steps = np.where(is_heaped, np.rint(z / step) * HEAP, np.rint(z / fine_step))
    return number_of_fine_steps * fine_step


def draw_missing(X: np.ndarray, train_size: int, strength: float, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    """Which cells of X (N, M) are missing, bool (N, M), and a text about them; each column keeps a labeled value."""
    rate = between(RATES, strength)
    mechanism = MECHANISMS[rng.integers(len(MECHANISMS))]
    column_share = rng.uniform(0.2, 1.0)
    missing = np.zeros(X.shape, bool)
    if mechanism == "in blocks":
        blocks = rng.integers(1, MOST_BLOCKS + 1)
        for _ in range(blocks):
            length = max(1, round(len(X) * rate / blocks * rng.uniform(0.5, 1.5)))
            start = rng.integers(len(X) - length + 1)
            columns = pick_columns(X.shape[1], column_share, rng)
            missing[start : start + length, columns] = True
    else:
        columns = pick_columns(X.shape[1], column_share, rng)
        rates = (rate * rng.uniform(0.5, 1.5, (len(columns), 1))).astype(np.float32)
        if mechanism == "by its own value":
            rates = chances(X[:, columns].T, rates, rng)
        elif mechanism == "by another value":
            drivers = rng.integers(X.shape[1], size=len(columns))
            rates = chances(X[:, drivers].T, rates, rng)
        missing[:, columns] = (rng.random((len(columns), len(X)), dtype=np.float32) < rates).T
    for column in np.flatnonzero(missing[:train_size].all(0)):  # a column keeps one labeled value at least
        missing[rng.integers(train_size), column] = False
    return missing, f"{missing.mean():.1%} of the cells missing {mechanism}"


def chances(values: np.ndarray, rates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Chance (K, N) that a value is missing: it rises or falls with the rank of values (K, N); means: rates (K, 1)."""
    places: np.ndarray = ranks(values, rng)
    falls = rng.random(rates.shape) < 0.5
    places = np.where(falls, 1 - places, places)
    exponent = np.minimum(STEEPEST, 1 / rates - 1)
    return rates * (1 + exponent) * places**exponent


def fill(X: np.ndarray, missing: np.ndarray, train_size: int) -> None:
    """Give missing cells of X (N, M), in place, the mean of the labeled rows of their column that are not missing."""
    present = ~missing[:train_size]
    sums = np.where(present, X[:train_size], 0.0).sum(0, dtype=np.float64)
    means = sums / present.sum(0)
    np.copyto(X, means.astype(X.dtype), where=missing)


CHANGES = {  # of a raw table, in this order
    "imbalance": unbalance,
    "levels": make_levels,
    "irrelevant": add_irrelevant,
    "tails": make_tails_heavy,
    "rounding": round_numbers,
    "duplicates": duplicate,
    "shift": shift,
}
