"""Random activations: fixed functions and powers between standardizations (TabICLv2, arXiv 2602.11139, appendix).

Loops are compiled by numba: a feature, 4 KB at 1,024 rows, is read once. At 1,024 rows and 10 features, a chain of
torch calls takes five to ten times as long, most of it in calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit

from priors.floats import (
    FASTMATH,
    SUMS,
    accurate_exponential,
    accurate_power,
    exp2_minus_1,
    log1p_exp,
    log2_of,
)
from priors.graph.scalars import LOCAL, Scalars

FIXED = (
    *("tanh", "leaky_relu", "elu", "identity", "selu", "silu", "relu", "softplus", "relu6", "hardtanh", "sign"),
    *("heaviside", "gauss", "exp", "box", "sin", "square", "abs", "log_abs", "rank", "sigmoid", "round", "fraction"),
    *("softmax", "one_hot_max", "argsort", "logsigmoid"),
)
KINDS = ("fixed",) * 4 + ("relu_power", "signed_power")
PLAIN_KINDS = ("fixed",) * 8 + ("relu_power", "signed_power", "inverse_power", "integer_power")
# Functions of single values, which `apply` takes by their number here
SMOOTH = (
    *("tanh", "elu", "selu", "silu", "softplus", "gauss", "exp", "sin", "log_abs", "sigmoid", "logsigmoid"),
    *("relu_power", "signed_power"),
)
PIECEWISE = (
    *("identity", "leaky_relu", "relu", "relu6", "hardtanh", "sign", "heaviside", "box", "square", "abs"),
    *("round", "fraction"),
)
CODES = {name: code for code, name in enumerate(SMOOTH + PIECEWISE)}
(TANH, ELU, SELU, SILU, SOFTPLUS, GAUSS, EXP, SIN, LOG_ABS, SIGMOID, LOGSIGMOID, RELU_POWER, SIGNED_POWER) = range(13)
(IDENTITY, LEAKY_RELU, RELU, RELU6, HARDTANH, SIGN, HEAVISIDE, BOX, SQUARE, ABS, ROUND, FRACTION) = range(13, 25)
BLOCK = 512  # rows that are ranked at once
ZERO, ONE = np.float32(0.0), np.float32(1.0)
SELU_SCALE, SELU_ALPHA = np.float32(1.0507009873554805), np.float32(1.6732632423543772)


@dataclass
class PlainActivation:
    """A function applied as it is; matrices use it like this.

    name: one of FIXED, or a kind of power
    """

    name: str
    power: float = 1.0

    @classmethod
    def draw(cls, scalars: Scalars, kinds: tuple[str, ...] = PLAIN_KINDS) -> PlainActivation:
        # A uniform draw, which the corrected preset does not skew: the repetitions in `kinds` are the weights.
        kind = kinds[scalars.integer(LOCAL, 0, len(kinds))]
        if kind == "fixed":
            return cls(scalars.choice("activation", FIXED))
        if kind == "integer_power":
            return cls(kind, scalars.integer("activation.integer_power", 2, 6))
        return cls(kind, scalars.real("activation.power", 0.1, 10.0, log=True))

    def __str__(self) -> str:
        if self.name in FIXED:
            return self.name
        return f"{self.name} {self.power:.2g}"

    def __call__(self, x: np.ndarray, dim: int) -> np.ndarray:
        """The function of contiguous float32 x, which it may overwrite; along dim lie the features of one row."""
        if self.name in CODES:
            apply(x.reshape(-1), CODES[self.name], np.float32(self.power))
            return x
        return self.call_torch(torch.from_numpy(x), dim).numpy()

    def call_torch(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Compute one of the functions that the compiled loop `apply` lacks, those without a number in CODES.

        Parameters
        ----------
        x : torch.Tensor
            Float32 of any shape, which may be overwritten.
        dim : int
            The dimension along which the features of a row lie. Only functions of all features of a row need it.
        """
        match self.name:
            # Functions of single values.
            case "inverse_power":
                # 1e-3 bounds the values near 0.
                return x.abs().add_(1e-3).pow_(-self.power)
            case "integer_power":
                return x.pow(int(self.power))
            # Functions of all features of a row.
            case "softmax":
                return x.softmax(dim)
            case "one_hot_max":
                return torch.zeros_like(x).scatter_(dim, x.argmax(dim, keepdim=True), 1.0)
            case "rank":
                return ranks(x, dim).to(x.dtype)
            case "argsort":
                return invert_ranks(ranks(x, dim), dim).to(x.dtype)
        raise ValueError(f"there is no activation {self.name!r}")


def ranks(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Number of smaller values along dim, int64; of equal values the first counts as smaller.

    NaN has 0 along dim 0, and comes last along others.
    """
    if dim == 0:
        return torch.from_numpy(rank_features(x.numpy()))
    return x.argsort(dim=dim, stable=True).argsort(dim)


def invert_ranks(ranks: torch.Tensor, dim: int) -> torch.Tensor:
    """Positions along dim, sorted by their ranks (argsort, given the ranks); 0 for a rank that none has."""
    shape = [1] * ranks.ndim
    shape[dim] = -1
    positions = torch.arange(ranks.shape[dim]).view(shape).expand_as(ranks)
    # Along dim 0 all NaN have the rank 0, so that some ranks do not occur. With empty_like, their places held what was
    # in memory before, and two runs of `demo_long` with the same seed had different labels in a table.
    return torch.zeros_like(ranks).scatter_(dim, ranks, positions)


@dataclass
class Activation:
    """standardize -> (x - x in a random row, of each feature) * scale -> f -> standardize, for x (n, N)."""

    plain: PlainActivation
    scale: float

    @classmethod
    def draw(cls, scalars: Scalars) -> Activation:
        plain = PlainActivation.draw(scalars, KINDS)
        scale = scalars.real("activation.scale", 1.0, 10.0, log=True)
        return cls(plain, scale)

    def __str__(self) -> str:
        return str(self.plain)

    def __call__(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        rows = rng.integers(x.shape[1], size=x.shape[0])
        scale = np.float32(self.scale)
        out = np.empty_like(x)
        # A function of single values: all of it is one compiled loop.
        if self.plain.name in CODES:
            activate(x, out, rows, scale, CODES[self.plain.name], np.float32(self.plain.power))
            return out
        shift(x, out, rows, scale)
        out = self.plain(out, 0)
        standardize_features(out)
        return out


@njit(inline="always")
def expm1(x):
    """e^x - 1, without the cancellation near 0."""
    value, _ = exp2_minus_1(x * np.float32(1 / np.log(2)))
    return value


@njit(inline="always")
def tanh(x):
    """tanh(x); NaN stays NaN by the last term."""
    # 2 / (e^2x + 1) - 1 would lose small x; beyond 9 the value is 1.
    e = expm1(min(max(x, np.float32(-9.0)), np.float32(9.0)) * np.float32(2.0))
    return e / (e + np.float32(2.0)) + x * ZERO


@njit(inline="always")
def sigmoid(x):
    """1 / (1 + e^-x); NaN stays NaN by the last term."""
    return ONE / (ONE + accurate_exponential(min(-x, np.float32(88.0)))) + x * ZERO


@njit(inline="always")
def cos_of_turns(u):
    """cos(2 pi u), with an error of 1e-6."""
    u -= np.floor(u + np.float32(0.5))
    s = u * u  # up to 1/4; minimax in s
    q = np.float32(-21.07678212) * s + np.float32(58.79403871)
    q = q * s + np.float32(-85.27239701)
    q = q * s + np.float32(64.92872662)
    q = q * s + np.float32(-19.73898252)
    return q * s + np.float32(0.99999922)


@njit("void(f4[::1], i8)", cache=True, fastmath=FASTMATH, error_model="numpy")
def apply_piecewise(x, code):
    """The part of `apply` for the codes of PIECEWISE."""
    # The branches are outside of the loops, which are vectorized.
    if code == LEAKY_RELU:
        for j in range(len(x)):
            x[j] = x[j] if x[j] >= ZERO else x[j] * np.float32(0.01)
    elif code == RELU:
        for j in range(len(x)):
            x[j] = max(x[j], ZERO)
    elif code == RELU6:
        for j in range(len(x)):
            x[j] = min(max(x[j], ZERO), np.float32(6.0))
    elif code == HARDTANH:
        for j in range(len(x)):
            x[j] = min(max(x[j], -ONE), ONE)
    elif code == SIGN:
        for j in range(len(x)):
            # 1 at 0, where np.sign has 0.
            x[j] = ONE if x[j] >= ZERO else -ONE
    elif code == HEAVISIDE:
        for j in range(len(x)):
            x[j] = ONE if x[j] > ZERO else ZERO
    elif code == BOX:
        for j in range(len(x)):
            x[j] = ONE if abs(x[j]) <= ONE else ZERO
    elif code == SQUARE:
        for j in range(len(x)):
            x[j] *= x[j]
    elif code == ABS:
        for j in range(len(x)):
            x[j] = abs(x[j])
    elif code == ROUND:
        for j in range(len(x)):
            x[j] = np.rint(x[j])
    elif code == FRACTION:
        for j in range(len(x)):
            x[j] -= np.floor(x[j])


@njit("void(f4[::1], i8, f4)", cache=True, fastmath=FASTMATH, error_model="numpy")
def apply(x, code, power):
    """Apply the function of this code, an entry of CODES, to x (size,) in place; power is that of the two powers."""
    if code >= IDENTITY:
        apply_piecewise(x, code)
    elif code == TANH:
        for j in range(len(x)):
            x[j] = tanh(x[j])
    elif code == ELU:
        for j in range(len(x)):
            x[j] = x[j] if x[j] > ZERO else expm1(x[j])
    elif code == SELU:
        for j in range(len(x)):
            x[j] = SELU_SCALE * (x[j] if x[j] > ZERO else SELU_ALPHA * expm1(x[j]))
    elif code == SILU:
        for j in range(len(x)):
            x[j] *= sigmoid(x[j])
    elif code == SOFTPLUS:
        for j in range(len(x)):
            x[j] = max(x[j], ZERO) + log1p_exp(-abs(x[j]))
    elif code == GAUSS:
        for j in range(len(x)):
            x[j] = accurate_exponential(-x[j] * x[j])
    elif code == EXP:
        for j in range(len(x)):
            x[j] = accurate_exponential(x[j])
    elif code == SIN:
        for j in range(len(x)):
            x[j] = cos_of_turns(x[j] * np.float32(0.5 / np.pi) - np.float32(0.25))
    elif code == LOG_ABS:
        for j in range(len(x)):
            # The last term keeps NaN, over which log2_of passes.
            x[j] = np.float32(np.log(2)) * log2_of(max(abs(x[j]), np.float32(1e-6))) + x[j] * ZERO
    elif code == SIGMOID:
        for j in range(len(x)):
            x[j] = sigmoid(x[j])
    elif code == LOGSIGMOID:
        for j in range(len(x)):
            x[j] = min(x[j], ZERO) - log1p_exp(-abs(x[j]))
    elif code == RELU_POWER:
        for j in range(len(x)):
            x[j] = accurate_power(abs(x[j]), power) if x[j] > ZERO else x[j] * ZERO
    else:
        for j in range(len(x)):
            x[j] = np.copysign(accurate_power(abs(x[j]), power), x[j])


@njit("UniTuple(f4, 2)(f4[::1])", cache=True, fastmath=SUMS, error_model="numpy")
def mean_and_inverse_std(row):
    """Mean and 1 / standard deviation of a feature; 1e10, and not infinity, for a constant one of any value."""
    # Differences from the first value, so that the mean of a constant is exact and its deviations are 0.
    first = row[0]
    total = np.float32(0.0)
    for j in range(len(row)):
        total += row[j] - first
    mean = first + total / np.float32(len(row))
    square = np.float32(0.0)
    for j in range(len(row)):
        square += (row[j] - mean) * (row[j] - mean)
    return mean, np.float32(1.0) / np.sqrt(square / np.float32(len(row)) + np.float32(1e-20))


@njit("void(f4[::1], f4)", cache=True, fastmath=SUMS, error_model="numpy")
def standardize_feature(row, factor):
    """(row - mean) / (standard deviation + 1e-4) * factor, in place."""
    mean, inverse_std = mean_and_inverse_std(row)
    # With i = 1 / std, i / (1 + 1e-4 i) is 1 / (std + 1e-4).
    scale = factor * inverse_std / (np.float32(1.0) + np.float32(1e-4) * inverse_std)
    for j in range(len(row)):
        row[j] = (row[j] - mean) * scale


@njit("void(f4[:, ::1])", cache=True, error_model="numpy")
def standardize_features(x):
    """standardize_feature for every feature of x (n, N), in place."""
    for i in range(x.shape[0]):
        standardize_feature(x[i], np.float32(1.0))


@njit("void(f4[:, ::1], f4[:, ::1], i8[::1], f4)", cache=True, error_model="numpy")
def shift(x, out, rows, factor):
    """(x - x in row rows[i] of feature i) * factor for standardized features of x (n, N)."""
    for i in range(x.shape[0]):
        row = out[i]
        row[:] = x[i]
        standardize_feature(row, factor)
        origin = row[rows[i]]
        for j in range(len(row)):
            row[j] -= origin


@njit("void(f4[:, ::1], f4[:, ::1], i8[::1], f4, i8, f4)", cache=True, error_model="numpy")
def activate(x, out, rows, factor, code, power):
    """standardize -> shift -> elementwise function -> standardize, feature by feature."""
    for i in range(x.shape[0]):
        shift(x[i : i + 1], out[i : i + 1], rows[i : i + 1], factor)
        apply(out[i], code, power)
        standardize_feature(out[i], np.float32(1.0))


@njit("i8[:, ::1](f4[:, ::1])", cache=True, fastmath=FASTMATH)
def rank_features(x):
    """Rank of each value among the features of its row, int64 (n, N), for x (n, N).

    All pairs of features are compared: n is small and the comparisons are vectorized over rows, while sorting took ten
    times as long at n = 20.
    """
    n, rows = x.shape
    out = np.empty((n, rows), np.int64)
    rank = np.empty(BLOCK, np.float32)
    for start in range(0, rows, BLOCK):
        size = min(start + BLOCK, rows) - start
        for i in range(n):
            ranked = x[i, start : start + size]
            rank[:] = np.float32(0.0)
            for k in range(n):
                other = x[k, start : start + size]
                # Of equal values the first counts as smaller.
                if k < i:
                    for j in range(size):
                        rank[j] += np.float32(1.0) if other[j] <= ranked[j] else np.float32(0.0)
                else:
                    for j in range(size):
                        rank[j] += np.float32(1.0) if other[j] < ranked[j] else np.float32(0.0)
            for j in range(size):
                out[i, start + j] = np.int64(rank[j])
    return out
