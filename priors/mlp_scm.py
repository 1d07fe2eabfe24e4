"""mlp_scm: tables read off a random multi-layer perceptron as a structural causal model (TabICL, arXiv 2502.05564).

The distributions of the hyperparameters are those of the paper's appendix and of tabicl 2.2.0. Activations are fixed
functions of an affine map, or random Fourier series.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from priors import scm
from priors.prior import Realistic
from priors.random import normals, rng_at
from priors.table import TableSpec

__all__ = ["MLPSCM"]

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
class Hyperparameters:
    """Hyperparameters shared by the tables of a group."""

    num_causes: int  # of a causal table; others have as many causes as features
    num_layers: int
    hidden: int  # units of a hidden layer, unless the variables of a causal table need more
    weight_std: float
    weight_dropout: float  # share of the weights that are zero, unless they are block-wise
    block_wise: bool  # whether weights are zero outside diagonal blocks
    noise: scm.LayerNoise
    cause_sampling: str  # see scm.plan_causes, as for cause_moments
    cause_moments: bool
    target_last: bool  # whether the target of a causal table is the last unit, which is an effect of the features
    in_clique: bool  # whether features and target of a causal table are neighboring units
    boundaries: str  # see scm.Discretization
    activation_weights: np.ndarray  # probabilities of KINDS


@dataclass(frozen=True)
class MLPActivation:
    """standardize -> scale * (x + shift) -> function; without the map for the Fourier function."""

    kind: str  # one of KINDS
    # The Fourier function of tabicl 2.2.0 standardizes again, which undoes the map.
    scale: float = 1.0
    shift: float = 0.0
    exponent: float = 0.0  # of the power law of the Fourier amplitudes

    def __str__(self) -> str:
        if self.kind == "fourier":
            return f"fourier(exponent {self.exponent:.2g})"
        return f"{self.kind}({self.scale:.2g} (x {self.shift:+.2g}))"


@dataclass(frozen=True)
class MLPLayer:
    """activation (none in the first layer) -> linear, with blocks or dropout of weights -> noise (not in the first)."""

    activation: MLPActivation | None
    num_inputs: int
    num_units: int
    weight_std: float
    blocks: int
    dropout: float
    noise: scm.LayerNoise

    def __str__(self) -> str:
        weights = f"{self.blocks} blocks" if self.blocks else f"dropout {self.dropout:.2f}"
        function = f"{self.activation} -> " if self.activation else ""
        linear = f"linear {self.num_inputs} -> {self.num_units} (std {self.weight_std:.2g}, {weights})"
        return f"{function}{linear}, {self.noise}"


@dataclass(frozen=True)
class MLPPlan:
    """A network, and which of its variables are the columns of the table."""

    seed: tuple[int, ...]
    num_rows: int
    causes: scm.Causes
    layers: tuple[MLPLayer, ...]
    features: tuple[int, ...] | None  # indices in the concatenated outputs of layers 1, 2, ...; None: the causes
    target: int  # index in the same concatenation
    discretization: scm.Discretization

    def __str__(self) -> str:
        lines = [f"mlp_scm, {self.num_rows} rows", str(self.causes)]
        lines += [f"layer {i}: {layer}" for i, layer in enumerate(self.layers)]
        if self.features is None:
            lines.append("features: the causes; target: the last layer")
        else:
            lines.append(f"features: variables {', '.join(map(str, self.features))}; target: variable {self.target}")
        lines.append(str(self.discretization))
        return "\n".join(lines)


@dataclass
class MLPSCM(Realistic):
    """Inputs and output, or hidden units, of a random multi-layer perceptron: a prior of TabICL v1.

    Tables of a group (`TableSpec.group_seed`) share their hyperparameters.

    References
    ----------
    Qu et al., TabICL, arXiv 2502.05564, appendix on the prior; the package tabicl 2.2.0.
    """

    numeric_targets = True

    causal: bool = False
    """Whether features and target are hidden units, so that features depend on each other, instead of the independent
    causes and the network's output as in tabicl 2.2.0 (TabICL, arXiv 2502.05564, appendix)."""

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> MLPPlan:
        """Draw the network, and which of its variables are columns; see `Prior.plan`."""
        # The order of the draws decides what a seed means: another order needs another STREAM_VERSION.
        group = draw_hyperparameters(scm.group_rng(spec, seed))
        rng = rng_at(seed, "mlp_scm plan")
        if self.causal:
            num_causes = group.num_causes
            hidden = max(group.hidden, 2 * spec.num_features + 1)  # so that one layer has variables enough
            widths = [hidden] * group.num_layers
        else:
            num_causes = spec.num_features
            widths = [group.hidden] * group.num_layers + [1]

        layers = []
        num_inputs = num_causes
        for i, num_units in enumerate(widths):
            layers.append(plan_layer(rng, group, i, num_inputs, num_units))
            num_inputs = num_units

        num_variables = sum(widths[1:])
        features = None
        target = num_variables - 1
        if self.causal:
            features, target = pick_variables(rng, spec.num_features, num_variables, group)
        return MLPPlan(
            seed=seed,
            num_rows=spec.num_rows,
            causes=scm.plan_causes(rng, num_causes, group.cause_sampling, group.cause_moments),
            layers=tuple(layers),
            features=features,
            target=target,
            discretization=scm.plan_discretization(spec, seed, group.boundaries),
        )

    def execute(self, plan: MLPPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Compute causes and network, then cut the target into classes; see `Prior.execute`."""
        causes = scm.sample_causes(plan.causes, plan.num_rows, rng_at(plan.seed, "causes"))
        if plan.features is None:
            columns = causes
            target = run_network(plan, causes, [plan.target])[:, 0]
        else:
            variables = run_network(plan, causes, [*plan.features, plan.target])
            columns = variables[:, :-1]
            target = variables[:, -1]
        return scm.discretize(columns, target, plan.discretization, plan.seed)


def draw_hyperparameters(rng: np.random.Generator) -> Hyperparameters:
    """Draw the hyperparameters of a group, in the order of the fields."""
    return Hyperparameters(
        num_causes=scm.scaled_count(rng, 12, 1, lower=1),
        num_layers=scm.scaled_count(rng, 6, 1, lower=2),
        hidden=scm.scaled_count(rng, 130, 5, lower=4),
        weight_std=scm.scaled_normal(rng, 10, 0.01),
        weight_dropout=0.9 * float(rng.beta(*rng.uniform(0.1, 5, 2))),
        block_wise=scm.choose(rng, (True, False)),
        noise=scm.LayerNoise(std=scm.scaled_normal(rng, 0.3, 1e-4), varies=scm.choose(rng, (True, False))),
        cause_sampling=scm.choose(rng, scm.CAUSE_SAMPLINGS),
        cause_moments=scm.choose(rng, (True, False)),
        target_last=scm.choose(rng, (True, False)),
        in_clique=scm.choose(rng, (True, False)),
        boundaries=scm.choose(rng, ("value", "rank")),
        activation_weights=kind_weights(rng),
    )


def plan_layer(
    rng: np.random.Generator, group: Hyperparameters, index: int, num_inputs: int, num_units: int
) -> MLPLayer:
    """Draw a layer; the first one, of index 0, has no activation, no dropout and no noise."""
    layer = MLPLayer(
        activation=None,
        num_inputs=num_inputs,
        num_units=num_units,
        weight_std=group.weight_std,
        blocks=0,
        dropout=0.0,
        noise=replace(group.noise, std=0.0),
    )
    if index > 0:
        layer = replace(
            layer,
            activation=plan_activation(rng, group.activation_weights),
            dropout=0.0 if group.block_wise else group.weight_dropout,
            noise=group.noise,
        )
    if group.block_wise:
        max_blocks = int(np.ceil(np.sqrt(min(num_inputs, num_units))))
        layer = replace(layer, blocks=int(rng.integers(1, max_blocks + 1)))
    return layer


def pick_variables(
    rng: np.random.Generator, num_features: int, num_variables: int, group: Hyperparameters
) -> tuple[tuple[int, ...], int]:
    """Draw the indices of the features, all different, and of the target."""
    if group.in_clique:
        picked = rng.permutation(num_features + 1) + rng.integers(num_variables - num_features - 1)
    else:
        picked = rng.permutation(num_variables - 1)[: num_features + 1]
    target, *features = picked.tolist()
    if group.target_last:
        target = num_variables - 1
    return tuple(features), target


def run_network(plan: MLPPlan, causes: torch.Tensor, variables: list[int]) -> torch.Tensor:
    """Compute the variables with these indices, float32 (num_rows, len(variables)), and no layer after the last."""
    values = causes.new_empty(plan.num_rows, len(variables))
    indices = np.array(variables)
    x = linear(plan.layers[0], causes, rng_at(plan.seed, "layer", 0), None)
    start = 0  # index of the layer's first unit
    for i, layer in enumerate(plan.layers[1:], start=1):
        rng = rng_at(plan.seed, "layer", i)
        assert layer.activation is not None  # only the first layer has none
        x = apply_activation(layer.activation, x, rng)
        columns = np.flatnonzero((indices >= start) & (indices < start + layer.num_units))
        units = indices[columns] - start
        start += layer.num_units
        last = indices.max() < start
        x = linear(layer, x, rng, units if last else None)
        values[:, columns] = x if last else x[:, units]
        if last:
            return values
    raise AssertionError("a variable lies beyond the last layer")


def linear(layer: MLPLayer, x: torch.Tensor, rng: np.random.Generator, units: np.ndarray | None) -> torch.Tensor:
    """Map x (N, num_inputs) at random to units (all, or only those given), plus noise, float32 (N, number of units)."""
    # There is no bias, since the standardization of the next activation, or of the columns, would remove it.
    weight = draw_weight(layer, rng)
    noise_stds = layer.noise.draw_stds(rng, layer.num_units)
    if units is not None:
        weight = weight[:, units]
        noise_stds = noise_stds[units]
    if layer.noise.std == 0:
        return x @ weight
    noise = normals(rng, len(x), weight.shape[1])
    return noise.mul_(noise_stds).addmm_(x, weight)


def draw_weight(layer: MLPLayer, rng: np.random.Generator) -> torch.Tensor:
    """Draw weights float32 (num_inputs, num_units); non-zero ones have a larger variance, to make up for the zeros."""
    # If the number of blocks does not divide a side of the matrix, the remaining inputs are unused and the remaining
    # units hold noise alone, as in tabicl 2.2.0.
    if layer.blocks:
        height = layer.num_inputs // layer.blocks
        width = layer.num_units // layer.blocks
        filled_share = layer.blocks * height * width / (layer.num_inputs * layer.num_units)
        blocks = normals(rng, layer.blocks, height, width) * (layer.weight_std / filled_share**0.5)
        weight = torch.zeros(layer.num_inputs, layer.num_units)
        for k, block in enumerate(blocks):
            weight[k * height : (k + 1) * height, k * width : (k + 1) * width] = block
        return weight
    weight = normals(rng, layer.num_inputs, layer.num_units) * layer.weight_std
    if layer.dropout:
        mask = torch.from_numpy(rng.random(weight.shape, dtype=np.float32) >= layer.dropout)
        weight *= mask / (1 - layer.dropout) ** 0.5
    return weight


def kind_weights(rng: np.random.Generator) -> np.ndarray:
    """Draw the probabilities of KINDS in a group, float64 (len(KINDS),)."""
    # Half of the choice_weights belong to one kind each, so that groups prefer some kinds; the rest is spread evenly.
    weights = scm.choice_weights(rng, 2 * len(KINDS))
    preferred, uniform = np.split(weights, 2)
    return preferred + uniform.sum() / len(KINDS)


def plan_activation(rng: np.random.Generator, weights: np.ndarray) -> MLPActivation:
    kind = KINDS[rng.choice(len(KINDS), p=weights)]
    if kind == "fourier":
        return MLPActivation(kind, exponent=scm.log_uniform(rng, 0.7, 3.0))
    return MLPActivation(kind, scale=float(np.exp(2 * rng.standard_normal())), shift=float(rng.standard_normal()))


def apply_activation(activation: MLPActivation, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Apply the activation to x (N, H), which is overwritten; the units share one function."""
    x -= x.mean(0)
    x /= torch.linalg.vector_norm(x, dim=0).div_((len(x) - 1) ** 0.5).add_(1e-6)
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
        """Draw frequencies U(0, 256) and amplitudes N(0,1) frequency^-exponent, with powers of unit L2 norm."""
        frequencies = NUM_FREQUENCIES * (1 - rng.random(NUM_FREQUENCIES))
        powers = frequencies**-exponent
        amplitudes = powers / np.linalg.norm(powers) * rng.standard_normal(NUM_FREQUENCIES)
        return cls(frequencies, rng.uniform(0, 2 * np.pi, NUM_FREQUENCIES), amplitudes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute f of every entry of float32 x: tabulated over the range of x, then interpolated linearly."""
        # Computing 256 sines for every value takes 50 times as long. On a grid x = a + b (a coarse, b fine), the sine
        # of (f a + p) + f b is a sum of two products, so the table is one matrix product.
        low, high = map(float, x.aminmax())
        if not np.isfinite(high - low):
            return torch.full_like(x, torch.nan)
        size = math.isqrt(int((high - low) / GRID_STEP) + 2) + 1  # of either grid: size^2 points reach beyond `high`
        coarse_angles = np.outer(low + GRID_STEP * size * np.arange(size), self.frequencies) + self.phases
        coarse_angles = coarse_angles.astype(np.float32)  # (size, 256)
        fine_angles = np.outer(GRID_STEP * np.arange(size), self.frequencies).astype(np.float32)  # (size, 256)
        amplitudes = np.tile(self.amplitudes, 2).astype(np.float32)
        left = np.concatenate((np.sin(coarse_angles), np.cos(coarse_angles)), 1) * amplitudes
        right = np.concatenate((np.cos(fine_angles), np.sin(fine_angles)), 1)
        table = (torch.from_numpy(left) @ torch.from_numpy(right).T).view(-1)  # (size^2,)

        # Interpolate between the grid points below and above each value.
        position = (x - low).mul_(1 / GRID_STEP)
        cell = position.to(torch.int32)
        fraction = position.sub_(cell).view(-1)
        cell = cell.view(-1)
        below = table.index_select(0, cell)
        above = table[1:].index_select(0, cell)
        return torch.lerp(below, above, fraction).view_as(x)
