"""Column converters: from a slice of a node to a column, and to the values that flow on to the node's children.

Source: TabICLv2, arXiv 2602.11139, appendix on the prior.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from priors.graph.activations import standardize
from priors.graph.functions import Function, draw_cheap_function
from priors.graph.nearest import nearest_centers, take_columns
from priors.graph.noise import Noise
from priors.graph.points import Points
from priors.graph.scalars import LOCAL, Scalars, Weights
from priors.random import random_key

NUMERIC_MODES = ("identity", "warp")
CATEGORICAL_MODES = (
    "neighbor_id",
    "neighbor_disc",
    "neighbor_func",
    "neighbor_int",
    "softmax_id",
    "softmax_disc",
    "softmax_int",
)


@dataclass
class Numeric:
    """A numeric column of width 1: the values themselves, or their Kumaraswamy warp.

    mode: one of NUMERIC_MODES
    a, b: exponents of the warp
    warp_flow: whether the warped values flow on, as in the released generator, or the raw ones (corrected preset)
    """

    mode: str
    a: float = 1.0
    b: float = 1.0
    warp_flow: bool = False
    width: int = 1

    @classmethod
    def draw(cls, scalars: Scalars, warp_flow: bool) -> Numeric:
        mode = scalars.choice("numeric", NUMERIC_MODES)
        if mode == "identity":
            return cls(mode)
        a = scalars.real("numeric.a", 0.2, 5.0, log=True)
        return cls(mode, a, scalars.real("numeric.b", 0.2, 5.0, log=True), warp_flow)

    def __str__(self) -> str:
        return "numeric" if self.mode == "identity" else f"numeric warp({self.a:.2g}, {self.b:.2g})"


def kumaraswamy(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """1 - (1 - u^a)^b of each feature of x (n, N), where u are its values scaled to [0, 1]; a, b (n, 1)."""
    low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
    u = (x - low).div_((high - low).clamp_(min=1e-30))
    return u.pow_(a).neg_().add_(1).pow_(b).neg_().add_(1)


def convert_numeric(x: torch.Tensor, converters: list[Numeric], noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
    """All numeric columns of a node at once; x (k, N) -> columns (k, N), values that flow on (k, N)."""
    warped = [i for i, converter in enumerate(converters) if converter.mode == "warp"]
    if not warped:
        return x, x
    a, b = (np.array([getattr(converters[i], name) for i in warped], np.float32) for name in "ab")
    if x.is_cuda:
        y = x.clone()
        y[warped] = kumaraswamy(x[warped], noise.tensor(a[:, None]), noise.tensor(b[:, None]))
    else:
        from priors.graph.featurewise import warp_features

        y = x.clone()
        warp_features(y.numpy(), np.array(warped), a, b)
    return (y, y) if converters[warped[0]].warp_flow else (y, x)


@dataclass
class Categorical:
    """A column of `cardinality` categories, read from `width` values per row.

    mode: one of CATEGORICAL_MODES. Before the underscore stands how a category is found: "neighbor", as the nearest of
        some rows, or "softmax", as a draw from a softmax. Behind it stands what flows on: "id", the values themselves;
        "disc", the center or the embedding of the category; "func", a function of the center; "int", the category
    p: exponent of the distance sum |x - c|^p to a center
    function: what flows on in mode "neighbor_func"
    factor: of the standardized logits
    shares: of the categories, whose logarithms are added to the logits
    embedding: of the categories in mode "softmax_disc"
    """

    mode: str
    cardinality: int
    width: int
    p: float = 2.0
    function: Function | None = None
    factor: float = 1.0
    shares: Weights | None = field(default=None, repr=False)
    embedding: Points | None = None

    @classmethod
    def draw(cls, scalars: Scalars, cardinality: int, num_rows: int) -> Categorical:
        converter = cls(scalars.choice("categorical", CATEGORICAL_MODES), cardinality, cardinality)
        if converter.mode.startswith("neighbor"):
            if scalars.flag("categorical.narrow"):
                converter.width = scalars.integer(LOCAL, 1, cardinality, log=True)
            converter.p = scalars.real("categorical.p", 0.5, 4.0, log=True)
            if converter.mode == "neighbor_func":
                converter.function = draw_cheap_function(scalars, converter.width, converter.width, num_rows)
        else:
            converter.factor = scalars.real("categorical.factor", 0.1, 10.0, log=True)
            converter.shares = Weights.draw(scalars, cardinality)
            if converter.mode == "softmax_disc":
                converter.embedding = Points.draw(scalars, cardinality, cardinality)
        return converter

    def __str__(self) -> str:
        return f"{self.cardinality} categories {self.mode}" + (f"({self.function})" if self.function else "")

    def __call__(self, x: torch.Tensor, noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
        """x (width, N) -> categories int64 (N,), values that flow on float32 (width, N)."""
        if self.mode.startswith("neighbor"):
            centers = x[:, noise.distinct_rows(x.shape[1], min(self.cardinality, x.shape[1]))]
            index = nearest_centers(x, centers, self.p)
            table = centers
        else:
            index = self.sample_softmax(x, noise)
            table = self.embedding.compute(self.cardinality, noise) if self.embedding else None
        match self.mode.split("_")[1]:
            case "id":
                return index, x
            case "disc":
                return index, take_columns(table, index)
            case "func":
                return index, self.function(take_columns(table, index), noise)
        return index, index.to(x.dtype).expand_as(x)

    def sample_softmax(self, x: torch.Tensor, noise: Noise) -> torch.Tensor:
        """Categories int64 (N,) drawn from the softmax over the standardized values of each row of x (width, N)."""
        log_shares = np.log(self.shares.compute(noise.rng)[0] + np.float32(1e-4))
        if not x.is_cuda:
            from priors.graph.featurewise import sample_softmax

            key = random_key(noise.rng)
            return torch.from_numpy(sample_softmax(x.numpy(), np.float32(self.factor), log_shares, key))
        logits = standardize(x).mul_(self.factor).add_(noise.tensor(log_shares[:, None]))
        cumulative = logits.nan_to_num_(0.0, 0.0, 0.0).softmax(0).cumsum_(0)
        u = noise.uniform(1, x.shape[1]).mul_(cumulative[-1:])
        return (cumulative[:-1] <= u).sum(0)


Converter = Numeric | Categorical
