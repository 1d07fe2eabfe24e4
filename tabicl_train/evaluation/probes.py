"""The tasks of suite=probes: synthetic tables whose answer is known, at three numbers of labeled rows, in twenty draws.

Each probe asks for one ability. Its function returns the features and a signal with mean 0 and variance 1. Numbers are
the signal and noise with a third of its standard deviation, so that an R2 of 0.9 is possible; classes are drawn with
the probability sigmoid(4 signal). All draws are fixed: they depend on the probe, the number of labeled rows, and the
number of the draw, which takes the place of a split.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from scipy.special import expit
from scipy.stats import norm, t

from priors.real.preprocessing import TargetScale
from tabicl_train.config.schema import PROBE
from tabicl_train.evaluation.scores import LEVELS, class_scores, score_numbers
from tabicl_train.evaluation.suites import VALIDATION_ROWS, Source, Split, Task, refuse_folder

DRAWS = 20
QUERY_ROWS = 500
SIZES = (50, 200, 800)  # labeled rows
NOISE = 1 / 3
SLOPE = 4.0
POSSIBLE = "possible"  # the method that knows the probabilities, or the signal and the noise
LEAST_CLASS_ROWS = 2  # among the labeled rows and among the query rows; a draw with fewer is drawn again
HEAVY_TAIL = 3  # degrees of freedom of noise with heavy tails

Columns = dict[str, np.ndarray]


def binary_product(rng: np.random.Generator, rows: int, relevant: int, features: int) -> tuple[Columns, np.ndarray]:
    """Return the sign of the product of some columns: XOR of two, parity of three."""
    X = rng.uniform(-1, 1, (rows, features))
    return numbered(X), np.sign(X[:, :relevant]).prod(axis=1)


def lookup(rng: np.random.Generator, rows: int, keys: int = 16, features: int = 7) -> tuple[Columns, np.ndarray]:
    """Return the entry of a random table at the key in the first column; the others hold keys of nothing."""
    X = rng.integers(0, keys, (rows, features)).astype(float)
    return numbered(X), heights(rng, keys)[X[:, 0].astype(int)]


def two_relevant(rng: np.random.Generator, rows: int, features: int) -> tuple[Columns, np.ndarray]:
    """Return a line in the first column and a parabola in the second, the others being irrelevant."""
    X = rng.standard_normal((rows, features))
    return numbered(X), line_and_parabola(X[:, 0], X[:, 1])


def missing(rng: np.random.Generator, rows: int) -> tuple[Columns, np.ndarray]:
    """Return whether a value of the first column is missing, and the second; the third misses values at random."""
    X = rng.standard_normal((rows, 3))
    is_missing = rng.random(rows) < 0.5
    X[is_missing, 0] = np.nan
    X[rng.random(rows) < 0.2, 2] = np.nan
    return numbered(X), 0.8 * np.where(is_missing, 1.0, -1.0) + 0.6 * X[:, 1]


def effects_of_levels(rng: np.random.Generator, rows: int, number: int) -> tuple[Columns, np.ndarray]:
    """Return random effects of the levels of a category, and the second column; the third is irrelevant."""
    level = rng.integers(0, number, rows)
    others = rng.standard_normal((rows, 2))
    names = [f"level {i}" for i in range(number)]
    columns = {"category": pd.Categorical.from_codes(level, names)} | numbered(others)
    return columns, 0.8 * heights(rng, number)[level] + 0.6 * others[:, 0]


def sine(rng: np.random.Generator, rows: int, periods: int) -> tuple[Columns, np.ndarray]:
    """Return a sine of the first of two columns, with a random phase."""
    X = rng.random((rows, 2))
    return numbered(X), math.sqrt(2) * np.sin(2 * np.pi * (periods * X[:, 0] + rng.random()))


def steps(rng: np.random.Generator, rows: int, number: int = 8) -> tuple[Columns, np.ndarray]:
    """Return equally wide steps of the first of two columns, with random heights."""
    X = rng.random((rows, 2))
    return numbered(X), heights(rng, number)[(number * X[:, 0]).astype(int)]


def near_duplicates(rng: np.random.Generator, rows: int, copies: int = 5) -> tuple[Columns, np.ndarray]:
    """Return the signal of `two_relevant` for two hidden columns; the table has slightly different copies of both."""
    hidden = rng.standard_normal((rows, 2))
    X = np.repeat(hidden, copies, axis=1) + 0.05 * rng.standard_normal((rows, 2 * copies))
    return numbered(X), line_and_parabola(*hidden.T)


def heavy_tails(rng: np.random.Generator, rows: int) -> tuple[Columns, np.ndarray]:
    """Return the sum of the ranks of two of five columns with Cauchy's distribution."""
    X = rng.standard_cauchy((rows, 5))
    return numbered(X), math.sqrt(1.5) * 2 / np.pi * np.arctan(X[:, :2]).sum(axis=1)


def smooth(rng: np.random.Generator, rows: int) -> tuple[Columns, np.ndarray]:
    """Return Friedman's first function of five of six columns (Annals of Statistics 19(1), 1991)."""
    X = rng.random((rows, 6))
    value = 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]
    return numbered(X), (value - 14.4133) / 4.8812  # mean and standard deviation


def linear_sum(rng: np.random.Generator, rows: int) -> tuple[Columns, np.ndarray]:
    """Return the sum of two of five columns."""
    X = rng.standard_normal((rows, 5))
    return numbered(X), X[:, :2].sum(axis=1) / math.sqrt(2)


def numbered(X: np.ndarray) -> Columns:
    return {f"x{i}": X[:, i] for i in range(X.shape[1])}


def line_and_parabola(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a + b**2 - 1) / math.sqrt(3)  # of normal columns


def heights(rng: np.random.Generator, number: int) -> np.ndarray:
    """Draw values with mean 0 and variance 1."""
    values = rng.standard_normal(number)
    return (values - values.mean()) / values.std()


@dataclass(frozen=True)
class Kind:
    """A probe: the function that draws features and signal, and what differs from the other probes."""

    draw: Callable[[np.random.Generator, int], tuple[Columns, np.ndarray]]
    sizes: tuple[int, ...] = SIZES
    slope: float = SLOPE
    shift: float = 0.0  # of the logit
    for_numbers: bool = True
    has_heavy_noise: bool = False

    def probability(self, signal: np.ndarray) -> np.ndarray:
        return expit(self.slope * signal + self.shift)

    def noise(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        if self.has_heavy_noise:
            return NOISE / math.sqrt(HEAVY_TAIL / (HEAVY_TAIL - 2)) * rng.standard_t(HEAVY_TAIL, rows)
        return NOISE * rng.standard_normal(rows)

    def noise_levels(self) -> np.ndarray:
        """Return the quantiles of the noise at LEVELS."""
        if self.has_heavy_noise:
            return NOISE / math.sqrt(HEAVY_TAIL / (HEAVY_TAIL - 2)) * t.ppf(LEVELS, HEAVY_TAIL)
        return NOISE * norm.ppf(LEVELS)


KINDS = {
    "xor": Kind(partial(binary_product, relevant=2, features=4)),
    "parity of 3": Kind(partial(binary_product, relevant=3, features=4)),
    "lookup": Kind(lookup),
    "2 of 32": Kind(partial(two_relevant, features=32)),
    "2 of 100": Kind(partial(two_relevant, features=100)),
    "missing": Kind(missing),
    "10 levels": Kind(partial(effects_of_levels, number=10)),
    "60 levels": Kind(partial(effects_of_levels, number=60)),
    "200 levels": Kind(partial(effects_of_levels, number=200)),
    "sine of 1": Kind(partial(sine, periods=1)),
    "sine of 3": Kind(partial(sine, periods=3)),
    "sine of 6": Kind(partial(sine, periods=6)),
    "steps": Kind(steps),
    # 3 % positives: the mean of sigmoid(2 z - 5.0919) over a normal z is 0.03
    "rare": Kind(linear_sum, sizes=(200, 400, 800), slope=2.0, shift=-5.0919, for_numbers=False),
    "near duplicates": Kind(near_duplicates),
    "heavy tails": Kind(heavy_tails, has_heavy_noise=True),
    "smooth": Kind(smooth, sizes=(1000, 3000, 10_000)),
}


@dataclass
class Draw:
    """A table of a probe; the first rows are the labeled ones."""

    X: pd.DataFrame
    y: np.ndarray
    signal: np.ndarray


class Probe(Task):
    """A probe with so many labeled rows. Its `X` and `y` are those of the first draw."""

    def __init__(self, name: str, labeled_rows: int, numbers: bool) -> None:
        self.probe = name
        self.kind = KINDS[name]
        self.labeled_rows = labeled_rows
        self.seed = (zlib.crc32(name.encode()), labeled_rows, int(numbers))
        first = self.draw(0, numbers)
        super().__init__(title(name, labeled_rows), first.X, first.y)

    @property
    def sizes(self) -> dict[str, int]:
        """Those of all draws."""
        return super().sizes | {"labeled_rows": self.labeled_rows}

    def draw(self, number: int, numbers: bool) -> Draw:
        """Draw one of the tables."""
        rng = np.random.default_rng((*self.seed, number))
        rows = self.labeled_rows + QUERY_ROWS
        while True:
            columns, signal = self.kind.draw(rng, rows)
            X = pd.DataFrame(columns)
            if numbers:
                return Draw(X, signal + self.kind.noise(rng, rows), signal)
            y = (rng.random(rows) < self.kind.probability(signal)).astype(np.int64)
            counts = [np.bincount(part, minlength=2).min() for part in np.split(y, [self.labeled_rows])]
            if min(counts) >= LEAST_CLASS_ROWS:
                return Draw(X, y, signal)

    def splits(self, number: int | None) -> Iterator[Split]:
        """Yield the first draws, or all of them; their labeled rows are fixed."""
        labeled, query = np.split(np.arange(self.labeled_rows + QUERY_ROWS), [self.labeled_rows])
        for i in range(number or DRAWS):
            draw = self.draw(i, self.is_regression)
            yield Split(draw.X, draw.y, labeled, query)

    def known_scores(self, number: int | None) -> list[dict]:
        """Return what is possible on the first draws, or on all of them."""
        sizes = {"rows": len(self.X), **self.sizes}
        rows = []
        for i in range(number or DRAWS):
            rows.append({"data": self.name, "split": i, "method": POSSIBLE, **sizes, **self.possible(i)})
        return rows

    def possible(self, number: int) -> dict[str, float]:
        """Score the probabilities, or the signal and the quantiles of the noise, on the query rows of a draw."""
        draw = self.draw(number, self.is_regression)
        y = draw.y[self.labeled_rows :]
        signal = draw.signal[self.labeled_rows :]
        if self.is_regression:
            scale = TargetScale(draw.y[: self.labeled_rows])
            quantiles = signal[:, None] + self.kind.noise_levels()
            return score_numbers(*(scale.standardize(values) for values in (y, signal, quantiles)))
        p = self.kind.probability(signal)
        return class_scores(y, np.column_stack([1 - p, p]))


@dataclass
class ProbeSource(Source):
    """A probe before it is drawn; `read` returns its first draw."""

    kind: str = ""
    labeled_rows: int = 0
    most_splits: int | None = DRAWS
    takes_rows: bool = False

    def for_validation(self, numbers: bool) -> Probe | None:
        """Draw it if it has the number of labeled rows of its kind that is nearest to VALIDATION_ROWS."""
        sizes = KINDS[self.kind].sizes
        if self.labeled_rows != min(sizes, key=lambda size: abs(size - VALIDATION_ROWS)):
            return None
        probe = self.load(None)
        probe.name = PROBE + self.kind
        return probe

    def load(self, rows: int | None) -> Probe:
        """Draw it; it has its own number of rows."""
        return Probe(self.kind, self.labeled_rows, self.numbers)


def probes(folder: str | None, numbers: bool) -> list[Source]:
    """List the probes for classes or numbers, each at its three sizes."""
    refuse_folder("probes", folder)
    found: list[Source] = []
    for kind, probe in KINDS.items():
        if numbers and not probe.for_numbers:
            continue
        for size in probe.sizes:
            read = partial(first_table, kind, size, numbers)
            found.append(ProbeSource(title(kind, size), read, numbers, kind=kind, labeled_rows=size))
    return found


def title(kind: str, labeled_rows: int) -> str:
    return f"{kind} ({labeled_rows})"


def probe_of(title: str) -> str:
    """Return the key in KINDS from the name of a task."""
    return title.rpartition(" (")[0]


def first_table(kind: str, labeled_rows: int, numbers: bool) -> tuple[pd.DataFrame, str]:
    probe = Probe(kind, labeled_rows, numbers)
    return probe.X.assign(target=probe.y), "target"
