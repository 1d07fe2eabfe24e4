"""Activations of mlp_scm (TabICL, arXiv 2502.05564): fixed functions of an affine map, and random Fourier series."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from priors.scm.hyperparameters import choice_weights, log_uniform

EPSILON = 1e-6

FIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "identity": lambda x: x,
    "selu": F.selu,
    "silu": F.silu,
    "relu": F.relu,
    "softplus": F.softplus,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "sign": lambda x: torch.where(x >= 0, 1.0, -1.0),
    "gaussian": lambda x: torch.exp(-x * x),
    "exp": torch.exp,
    "sqrt_abs": lambda x: x.abs().sqrt(),
    "indicator": lambda x: (x.abs() <= 1).float(),
    "sin": torch.sin,
    "square": torch.square,
    "abs": torch.abs,
}
KINDS = (*FIXED, *["fourier"] * 10)  # the random function is ten times as likely as any fixed one

NUM_FREQUENCIES = 256
GRID_STEP = 1 / 1024  # linear interpolation is off by (256/1024)^2 / 8 = 0.8 % of the amplitude of frequency 256


@dataclass(frozen=True)
class MLPActivation:
    """standardize -> scale * (x + shift) -> function.

    The Fourier function comes right after standardizing: in tabicl 2.2.0 it standardizes again, which undoes the map.

    kind: one of KINDS
    exponent: of the power law of the Fourier amplitudes
    """

    kind: str
    scale: float = 1.0
    shift: float = 0.0
    exponent: float = 0.0

    def __str__(self) -> str:
        if self.kind == "fourier":
            return f"fourier(exponent {self.exponent:.2g})"
        return f"{self.kind}({self.scale:.2g} (x {self.shift:+.2g}))"


def kind_weights(rng: np.random.Generator) -> np.ndarray:
    """Probabilities of KINDS in a group, float64 (len(KINDS),).

    Half of the choice_weights belong to one kind each, which gives the group favorites; the rest is spread evenly.
    """
    weights = choice_weights(rng, 2 * len(KINDS))
    preferred, uniform = np.split(weights, 2)
    return preferred + uniform.sum() / len(KINDS)


def plan_activation(rng: np.random.Generator, weights: np.ndarray) -> MLPActivation:
    kind = KINDS[rng.choice(len(KINDS), p=weights)]
    if kind == "fourier":
        return MLPActivation(kind, exponent=log_uniform(rng, 0.7, 3.0))
    return MLPActivation(kind, scale=float(np.exp(2 * rng.standard_normal())), shift=float(rng.standard_normal()))


def apply_activation(activation: MLPActivation, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """The activation of x (N, H), which is overwritten; the units share one function."""
    x -= x.mean(0)
    x /= torch.linalg.vector_norm(x, dim=0).div_((len(x) - 1) ** 0.5).add_(EPSILON)
    if activation.kind == "fourier":
        return FourierFunction.draw(rng, activation.exponent)(x)
    return FIXED[activation.kind](x.add_(activation.shift).mul_(activation.scale))


@dataclass(frozen=True)
class FourierFunction:
    """f(x) = sum_k amplitude_k sin(frequency_k x + phase_k), with float64 vectors (256,)."""

    frequencies: np.ndarray
    phases: np.ndarray
    amplitudes: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, exponent: float) -> FourierFunction:
        """Frequencies U(0, 256), amplitudes N(0,1) frequency^-exponent, the powers being scaled to unit L2 norm."""
        frequencies = NUM_FREQUENCIES * (1 - rng.random(NUM_FREQUENCIES))
        powers = frequencies**-exponent
        amplitudes = powers / np.linalg.norm(powers) * rng.standard_normal(NUM_FREQUENCIES)
        return cls(frequencies, rng.uniform(0, 2 * np.pi, NUM_FREQUENCIES), amplitudes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """f of every entry of float32 x: tabulated over the range of x, then interpolated linearly.

        Computing 256 sines for every value takes 50 times as long. With x = a + b on a grid (a coarse, b fine),
        sin(f a + p + f b) is a sum of two products, so the table is one matrix product.
        """
        low, high = (float(bound) for bound in x.aminmax())
        if not np.isfinite(high - low):
            return torch.full_like(x, torch.nan)
        size = math.isqrt(int((high - low) / GRID_STEP) + 2) + 1  # of either grid: size^2 points reach beyond `high`
        coarse = np.outer(low + GRID_STEP * size * np.arange(size), self.frequencies) + self.phases
        fine = np.outer(GRID_STEP * np.arange(size), self.frequencies)
        coarse, fine = coarse.astype(np.float32), fine.astype(np.float32)  # (size, 256)
        left = np.concatenate((np.sin(coarse), np.cos(coarse)), 1) * np.tile(self.amplitudes, 2).astype(np.float32)
        right = np.concatenate((np.cos(fine), np.sin(fine)), 1)
        table = (torch.from_numpy(left) @ torch.from_numpy(right).T).view(-1)  # (size^2,)

        position = (x - low).mul_(1 / GRID_STEP)
        cell = position.to(torch.int32)
        fraction = position.sub_(cell)
        cell = cell.view(-1)
        below, above = table.index_select(0, cell), table[1:].index_select(0, cell)
        return torch.lerp(below, above, fraction.view(-1)).view_as(x)
