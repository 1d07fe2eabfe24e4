"""Random activations: fixed functions and powers between standardizations (TabICLv2, arXiv 2602.11139, appendix)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from priors.graph.noise import Noise
from priors.graph.scalars import LOCAL, Scalars


def one_hot_of_max(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.zeros_like(x).scatter_(dim, x.argmax(dim, keepdim=True), 1.0)


def ranks(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Number of smaller values along dim, int64; of equal values the first counts as smaller."""
    if x.is_cuda or dim != 0:
        return ranks_torch(x, dim)
    from priors.graph.kernels import ranks as compiled

    return torch.from_numpy(compiled(x.float().contiguous().numpy()))


def ranks_torch(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The path of `ranks` for CUDA and for other axes."""
    return x.argsort(dim=dim, stable=True).argsort(dim)


def invert_ranks(ranks: torch.Tensor, dim: int) -> torch.Tensor:
    """Positions along dim, sorted by their ranks (argsort, given the ranks)."""
    shape = [1] * ranks.ndim
    shape[dim] = -1
    positions = torch.arange(ranks.shape[dim], device=ranks.device).view(shape).expand_as(ranks)
    return torch.empty_like(ranks).scatter_(dim, ranks, positions)


# name -> f(x, dim); dim is the axis along which the features of one row lie
FIXED: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "tanh": lambda x, dim: x.tanh(),
    "leaky_relu": lambda x, dim: F.leaky_relu(x),
    "elu": lambda x, dim: F.elu(x),
    "identity": lambda x, dim: x,
    "selu": lambda x, dim: F.selu(x),
    "silu": lambda x, dim: F.silu(x),
    "relu": lambda x, dim: x.relu(),
    "softplus": lambda x, dim: F.softplus(x),
    "relu6": lambda x, dim: x.clamp(0, 6),
    "hardtanh": lambda x, dim: x.clamp(-1, 1),
    "sign": lambda x, dim: (x >= 0).to(x.dtype) * 2 - 1,
    "heaviside": lambda x, dim: (x > 0).to(x.dtype),
    "gauss": lambda x, dim: torch.exp(-x.square()),
    "exp": lambda x, dim: x.exp(),
    "box": lambda x, dim: (x.abs() <= 1).to(x.dtype),
    "sin": lambda x, dim: x.sin(),
    "square": lambda x, dim: x.square(),
    "abs": lambda x, dim: x.abs(),
    "log_abs": lambda x, dim: x.abs().clamp(min=1e-6).log(),
    "rank": lambda x, dim: ranks(x, dim).to(x.dtype),
    "sigmoid": lambda x, dim: x.sigmoid(),
    "round": lambda x, dim: x.round(),
    "fraction": lambda x, dim: x - x.floor(),
    "softmax": lambda x, dim: x.softmax(dim),
    "one_hot_max": one_hot_of_max,
    "argsort": lambda x, dim: invert_ranks(ranks(x, dim), dim).to(x.dtype),
    "logsigmoid": lambda x, dim: F.logsigmoid(x),
}
KINDS = ("fixed",) * 4 + ("relu_power", "signed_power")
PLAIN_KINDS = ("fixed",) * 8 + ("relu_power", "signed_power", "inverse_power", "integer_power")


def standardize(x: torch.Tensor) -> torch.Tensor:
    """Features of (n, N) minus their means, divided by their population standard deviations over the rows (+1e-4)."""
    if x.is_cuda:
        x, factors = normalize(x)
        return x.mul_(factors)
    from priors.graph.featurewise import standardize_features

    out = torch.empty_like(x)
    standardize_features(x.numpy(), out.numpy())
    return out


def normalize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (n, N) with mean 0 and deviation 1, and factors std / (std + 1e-4), (n, 1), to multiply them by.

    One fused pass instead of seven. The 1e-20 keeps constant features at zero.
    """
    x, _, inverse_std = torch.native_layer_norm(x, x.shape[1:], None, None, 1e-20)
    return x, inverse_std.mul_(1e-4).add_(1).reciprocal_()


@dataclass
class PlainActivation:
    """A function applied as it is; matrices use it like this.

    name: of a function in FIXED, or a kind of power
    """

    name: str
    power: float = 1.0

    @classmethod
    def draw(cls, scalars: Scalars, kinds: tuple[str, ...] = PLAIN_KINDS) -> PlainActivation:
        kind = kinds[scalars.integer(LOCAL, 0, len(kinds))]
        if kind == "fixed":
            return cls(scalars.choice("activation", tuple(FIXED)))
        if kind == "integer_power":
            return cls(kind, scalars.integer("activation.integer_power", 2, 6))
        return cls(kind, scalars.real("activation.power", 0.1, 10.0, log=True))

    def __str__(self) -> str:
        return self.name if self.name in FIXED else f"{self.name} {self.power:.2g}"

    def __call__(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        match self.name:
            case "relu_power":
                return x.relu().pow_(self.power)
            case "signed_power":
                return x.abs().pow_(self.power).mul_(x.sign())
            case "inverse_power":
                return x.abs().add_(1e-3).pow_(-self.power)
            case "integer_power":
                return x.pow(int(self.power))
        return FIXED[self.name](x, dim)

    def of_array(self, x: np.ndarray) -> np.ndarray:
        """The function along the last axis of float32 x, which it may overwrite."""
        from priors.graph.elementwise import CODES, apply

        if self.name not in CODES:
            return np.ascontiguousarray(self(torch.from_numpy(x), -1).numpy())
        apply(x.reshape(-1), CODES[self.name], np.float32(self.power))
        return x


@dataclass
class Activation:
    """standardize -> (x - x in a random row, of each feature) * scale -> f -> standardize, for x (n, N)."""

    plain: PlainActivation
    scale: float

    @classmethod
    def draw(cls, scalars: Scalars) -> Activation:
        return cls(PlainActivation.draw(scalars, KINDS), scalars.real("activation.scale", 1.0, 10.0, log=True))

    def __str__(self) -> str:
        return str(self.plain)

    def __call__(self, x: torch.Tensor, noise: Noise) -> torch.Tensor:
        rows = noise.rows(x.shape[1], x.shape[0])
        if x.is_cuda:
            x = standardize(x)
            return standardize(self.plain(x.sub_(x.gather(1, rows[:, None])).mul_(self.scale), 0))
        from priors.graph.elementwise import CODES
        from priors.graph.featurewise import activate, shift

        out = torch.empty_like(x)
        given = (x.numpy(), out.numpy(), rows.numpy(), np.float32(self.scale))
        if self.plain.name in CODES:
            activate(*given, CODES[self.plain.name], np.float32(self.plain.power))
            return out
        shift(*given)
        return standardize(self.plain(out, 0))
