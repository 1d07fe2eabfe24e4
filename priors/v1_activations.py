"""Activations of mlp_scm (TabICL, arXiv 2502.05564): fixed functions and random Fourier functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

MIN_STD = 1e-6
FREQUENCIES = 256
STEP = 2 * math.pi / (32 * FREQUENCIES)  # 32 grid points a period of the highest frequency

FIXED = {
    "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "identity": lambda x: x,
    "selu": torch.selu,
    "silu": F.silu,
    "relu": torch.relu,
    "softplus": F.softplus,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "sign": lambda x: torch.where(x >= 0, 1.0, -1.0),
    "gauss": lambda x: x.square().neg_().exp_(),
    "exp": torch.exp,
    "sqrt_abs": lambda x: x.abs().sqrt_(),
    "unit_interval": lambda x: (x.abs() <= 1).float(),
    "sine": torch.sin,
    "square": torch.square,
    "abs": torch.abs,
}
KINDS = (*FIXED, *["fourier"] * 10)


@dataclass(frozen=True)
class Activation:
    """x -> f(scale (x + shift)) for x standardised over the rows; f is fixed, or a random Fourier function."""

    kind: str
    scale: float
    shift: float

    def __str__(self) -> str:
        return f"{self.kind}({self.scale:.3g} (x {self.shift:+.3g}))"

    def __call__(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """x float32 (units, num_rows) and so is the outcome; rng draws the Fourier function, one for all units."""
        x = standardise(x).add_(self.shift).mul_(self.scale)
        return Fourier.draw(rng)(standardise(x)) if self.kind == "fourier" else FIXED[self.kind](x)


def draw_activation(kind: str, rng: np.random.Generator) -> Activation:
    """An activation of that kind with a scale exp(2 N(0, 1)) and a shift N(0, 1)."""
    return Activation(kind, scale=float(np.exp(2 * rng.standard_normal())), shift=float(rng.standard_normal()))


def standardise(x: torch.Tensor) -> torch.Tensor:
    """x (units, num_rows) with zero mean and unit deviation (ddof 1) over the rows."""
    deviation = x - x.mean(1, keepdim=True)
    std = deviation.square().sum(1, keepdim=True).div_(x.shape[1] - 1).sqrt_()
    return deviation.div_(std.add_(MIN_STD))


@dataclass
class Fourier:
    """f(x) = sum_k weights_k sin(frequencies_k x + phases_k), each float32 (256,)."""

    frequencies: np.ndarray
    phases: np.ndarray
    weights: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Fourier:
        """Frequencies U(0, 256), phases U(0, 2 pi), weights N(0, s_k) with s_k ~ frequency^-a and unit sum of s_k^2.

        a is log-uniform in 0.7..3. A low frequency can outweigh all others: f is then smooth.
        """
        frequencies = FREQUENCIES * rng.random(FREQUENCIES)
        phases = 2 * math.pi * rng.random(FREQUENCIES)
        stds = frequencies ** -np.exp(rng.uniform(math.log(0.7), math.log(3)))
        weights = rng.standard_normal(FREQUENCIES) * stds / np.sqrt((stds**2).sum())
        return cls(*(values.astype(np.float32) for values in (frequencies, phases, weights)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """f of every value of x, float32: tabulated over the range of x, and interpolated linearly.

        256 sines a value would be most of the time of the prior. The table costs a matrix product, since
        exp(i w (a + b)) = exp(i w a) exp(i w b) for a coarse grid of a and a fine one of b.
        """
        low, high = x.aminmax()
        if not math.isfinite(high - low):
            return torch.full_like(x, math.nan)
        points = int((high - low) / STEP) + 2
        fine = math.isqrt(points - 1) + 1
        coarse = -(-points // fine)
        angles = self.frequencies * (float(low) + STEP * fine * np.arange(coarse, dtype=np.float32)[:, None])
        angles += self.phases  # (coarse, 256)
        left = np.concatenate([np.sin(angles), np.cos(angles)], axis=1) * np.tile(self.weights, 2)
        angles = self.frequencies[:, None] * (STEP * np.arange(fine, dtype=np.float32))  # (256, fine)
        right = np.concatenate([np.cos(angles), np.sin(angles)])
        table = (torch.from_numpy(left) @ torch.from_numpy(right)).flatten()
        position = (x - low).div_(STEP)
        index = position.int().clamp_(max=points - 2)
        return torch.lerp(table[index], table[index + 1], position.sub_(index))
