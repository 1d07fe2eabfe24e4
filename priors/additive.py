"""additive: tables of statistics and surveys, whose target is a noisy sum of few effects of correlated columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from priors.finish import Rejected
from priors.prior import Realistic
from priors.random import lasting_rng, normal_array, rng_at
from priors.table import TableSpec

__all__ = ["Additive"]

NUMERIC = ("normal", "skewed", "heavy", "uniform")
FEW_VALUES = ("binary", "ordered", "count", "categories")
EFFECTS = ("linear", "linear", "saturating", "bent", "step")  # of numbers
NOISE = (0.1, 0.9)  # share of the variance of the latent target
BINARY_SHARE = 0.5
MORE_CLASSES = 0.6  # probability of one class more, from three on
NOMINAL_SHARE = 0.5  # of the tables with three classes or more
MAX_LEVELS = 12


@dataclass(frozen=True)
class AdditivePlan:
    """Kinds of the columns, the effect of each, and how the target is made."""

    seed: tuple[int, ...]
    num_rows: int
    num_factors: int  # of the columns' correlations
    common: float  # share of a column's variance that the factors explain
    kinds: tuple[str, ...]
    effects: tuple[str, ...]
    weights: np.ndarray  # (scores, features); 0 for columns without an effect
    products: tuple[tuple[int, int], ...]  # pairs of columns whose effects are multiplied
    noise: float  # share of the variance of a score
    num_classes: int

    def __str__(self) -> str:
        rows, scores = self.num_rows, len(self.weights)
        what = f"{self.num_classes} classes" if self.num_classes else "numeric target"
        strength = np.abs(self.weights).max(0)
        columns = ", ".join(
            f"{kind} ({effect}, {weight:.2f})" if weight else kind
            for kind, effect, weight in zip(self.kinds, self.effects, strength, strict=True)
        )
        return (
            f"additive {self.seed}: {rows} rows, {what} from {scores} sums with {self.noise:.0%} noise\n"
            f"{self.num_factors} factors explain {self.common:.0%} of a column\n"
            f"columns (effect, weight): {columns}\nproducts: {self.products or 'none'}"
        )


@dataclass
class Additive(Realistic):
    """A generalized additive model: a noisy sum of effects of few columns, many of which have few values.

    Columns are correlated through a few normal factors; some are cut into few values, and some of these are codes
    without an order. Most effects are linear, some saturate, bend or jump; the weights of few of them are large.

    References
    ----------
    Hastie and Tibshirani, Generalized additive models (1986), sections 2 and 5.
    """

    numeric_targets = True

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> AdditivePlan:
        """Draw the kinds of the columns and their effects; see `Prior.plan`."""
        num_classes = 0
        if spec.max_classes:
            rng = lasting_rng(seed[:-1], "classes", seed)
            if rng.random() < BINARY_SHARE:
                num_classes = 2
            else:
                num_classes = min(spec.max_classes, 2 + int(rng.geometric(1 - MORE_CLASSES)))
        rng = rng_at(seed, "plan")
        features = spec.num_features
        few_values = rng.random(features) < rng.random()
        kinds = tuple(str(rng.choice(FEW_VALUES if few else NUMERIC)) for few in few_values)
        effects = tuple(str(rng.choice(EFFECTS)) if kind != "categories" else "levels" for kind in kinds)
        active = rng.permutation(features)[: int(np.exp(rng.uniform(0, np.log(features + 1))))]
        scores = num_classes if num_classes > 2 and rng.random() < NOMINAL_SHARE else 1
        weights = np.zeros((scores, features))
        weights[:, active] = rng.standard_normal((scores, len(active))) * rng.exponential(size=len(active))
        pairs = rng.integers(3) if len(active) > 1 and rng.random() < 0.5 else 0
        products = tuple((int(i), int(j)) for i, j in (rng.choice(active, 2, replace=False) for _ in range(pairs)))
        return AdditivePlan(
            seed=seed,
            num_rows=spec.num_rows,
            num_factors=int(rng.integers(1, 6)),
            common=rng.random() ** 2,
            kinds=kinds,
            effects=effects,
            weights=weights,
            products=products,
            noise=rng.uniform(*NOISE),
            num_classes=num_classes,
        )

    def execute(self, plan: AdditivePlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Draw correlated columns, add their effects and noise, and cut the sum; see `Prior.execute`."""
        rng = rng_at(plan.seed, "execute")
        rows, features = plan.num_rows, len(plan.kinds)
        loadings = rng.standard_normal((plan.num_factors, features))
        loadings *= np.sqrt(plan.common) / np.linalg.norm(loadings, axis=0)
        z = normal_array(rng, rows, plan.num_factors) @ loadings  # (N, M)
        z += np.sqrt(1 - plan.common) * normal_array(rng, rows, features)
        columns = np.empty((rows, features))
        f = np.empty((rows, features))
        for i, (kind, effect) in enumerate(zip(plan.kinds, plan.effects, strict=True)):
            columns[:, i], f[:, i] = make_column(z[:, i], kind, effect, rng)
        f = standardized(f)
        scores = f @ plan.weights.T  # (N, S)
        for i, j in plan.products:
            scores += f[:, [i]] * f[:, [j]] * 0.5 * (plan.weights[:, i] + plan.weights[:, j])
        scores = np.sqrt(1 - plan.noise) * standardized(scores) + np.sqrt(plan.noise) * normal_array(rng, *scores.shape)
        return torch.from_numpy(columns.astype(np.float32)), *make_target(scores, plan.num_classes, rng)


def make_column(z: np.ndarray, kind: str, effect: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Make a column (N,) of this kind from standard normal numbers z (N,), and its effect on the target (N,)."""
    if kind == "categories":
        codes = cut_at_quantiles(z, int(rng.integers(3, MAX_LEVELS + 1)), rng)
        labels = rng.permutation(MAX_LEVELS)
        return labels[codes].astype(float), rng.standard_normal(MAX_LEVELS)[codes]
    if kind in FEW_VALUES:
        levels = {"binary": 2, "ordered": int(rng.integers(3, 8)), "count": MAX_LEVELS}[kind]
        if kind == "count":
            x = np.minimum(np.floor(np.exp(rng.uniform(-1, 1.5) + rng.uniform(0.3, 1) * z)), levels)
        else:
            x = cut_at_quantiles(z, levels, rng).astype(float)
        u = standardized(x)
    elif kind == "normal":
        x, u = z, z
    elif kind == "skewed":
        x = np.exp(rng.uniform(0.3, 1.2) * z)
        u = z if rng.random() < 0.5 else standardized(x)
    elif kind == "heavy":
        x, u = np.sinh(rng.uniform(0.5, 1.2) * z), z
    else:
        x = u = np.sqrt(12) * (1 / (1 + np.exp(-1.702 * z)) - 0.5)  # nearly uniform
    if effect == "linear":
        return x, u
    place = rng.standard_normal()
    if effect == "saturating":
        return x, np.tanh(rng.uniform(1, 3) * (u - place))
    if effect == "bent":
        return x, (u - place) ** 2
    return x, (u > place).astype(float)


def cut_at_quantiles(z: np.ndarray, levels: int, rng: np.random.Generator) -> np.ndarray:
    """Number the intervals between levels - 1 random quantiles of z in which its values lie."""
    shares = rng.dirichlet(np.full(levels, 2.0))
    return np.searchsorted(np.quantile(z, np.cumsum(shares)[:-1]), z)


def standardized(x: np.ndarray) -> np.ndarray:
    """Standardize x (N, ...) along the rows; what is constant becomes 0."""
    std = x.std(0)
    return (x - x.mean(0)) / np.where(std > 1e-9, std, 1.0)


def make_target(scores: np.ndarray, num_classes: int, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
    """Make labels of scores (N, S): intervals of one score, or the largest of several; or a numeric target."""
    if num_classes == 0:
        target = scores[:, 0]
        if rng.random() < 0.3:
            target = np.exp(rng.uniform(0.3, 1.0) * target)
        return torch.from_numpy(target.astype(np.float32)), 0
    if scores.shape[1] == 1:
        labels = cut_at_quantiles(scores[:, 0], num_classes, rng)
    else:
        labels = (scores + 0.7 * rng.standard_normal(num_classes)).argmax(1)
    present, labels = np.unique(labels, return_inverse=True)
    if len(present) < 2:
        raise Rejected("one_class")
    return torch.from_numpy(labels), len(present)
