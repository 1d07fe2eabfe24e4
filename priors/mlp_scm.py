"""mlp_scm: tables read off a random multi-layer perceptron as a structural causal model (TabICL, arXiv 2502.05564).

The distributions of the hyperparameters are those of the paper's appendix and of tabicl 2.2.0. Activations are fixed
functions of an affine map, or random Fourier series.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from priors import scm
from priors.prior import Realistic
from priors.random import normal_array, normals, rng_at
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
# Of columns and target from a network, one an attempt, if tables have to pass min_skill: with 1, 2 and 8 an accepted
# table of 60 to 256 rows takes 1.6, 1.1 and 1.0 times as long, and the more, the more alike are its attempts.
CHOICES = 4
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
class Choice:
    """Which variables of a network are the columns of a table."""

    features: tuple[int, ...] | None  # indices in the concatenated outputs of layers 1, 2, ...; None: the causes
    target: int  # index in the same concatenation

    def __str__(self) -> str:
        features = "the causes" if self.features is None else f"variables {', '.join(map(str, self.features))}"
        return f"features: {features}; target: variable {self.target}"


@dataclass(frozen=True, eq=False)  # equal to itself only, so that its variables can be looked up
class MLPNetwork:
    """A network, and the choices from its variables that are tried one after the other."""

    seed: tuple[int, ...]
    num_rows: int
    causes: scm.Causes
    layers: tuple[MLPLayer, ...]
    choices: tuple[Choice, ...]
    discretization: scm.Discretization

    def __str__(self) -> str:
        lines = [f"mlp_scm, {self.num_rows} rows", str(self.causes)]
        lines += [f"layer {i}: {layer}" for i, layer in enumerate(self.layers)]
        return "\n".join(lines)

    def chosen_variables(self) -> np.ndarray:
        """Return the indices of the variables of all choices, in ascending order."""
        indices = {choice.target for choice in self.choices}
        for choice in self.choices:
            indices.update(choice.features or ())
        return np.array(sorted(indices))


@dataclass(frozen=True)
class MLPPlan:
    """A network, and the number of the choice from its variables that becomes a table."""

    seed: tuple[int, ...]
    network: MLPNetwork
    number: int

    @property
    def choice(self) -> Choice:
        return self.network.choices[self.number]

    def __str__(self) -> str:
        return f"{self.network}\n{self.choice}\n{self.network.discretization}"


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
        # Attempts share a network as long as it has choices left.
        *address, attempt = seed
        num_choices = CHOICES if self.min_skill else 1
        number = attempt % num_choices
        return MLPPlan(seed, draw_mlp_network(spec, (*address, attempt - number), self.causal, num_choices), number)

    def execute(self, plan: MLPPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Compute causes and network, then cut the target into classes; see `Prior.execute`."""
        causes, indices, variables = run_mlp_network(plan.network)
        target = variables[indices.searchsorted(plan.choice.target)]
        features = plan.choice.features
        columns = causes if features is None else variables[indices.searchsorted(features)].T
        return scm.discretize(columns, target, plan.network.discretization, plan.seed)


@functools.lru_cache(maxsize=1)
def draw_mlp_network(spec: TableSpec, seed: tuple[int, ...], causal: bool, num_choices: int) -> MLPNetwork:
    """Draw a network, and the choices from its variables.

    The last network is kept, since the attempts at a table ask for the same one, one after the other.

    Parameters
    ----------
    spec : TableSpec
        The sizes of the table.
    seed : tuple of int
        The address of the first attempt that takes a choice of this network.
    causal : bool
        Whether the features are variables of the network, see `MLPSCM`; otherwise they are its causes.
    num_choices : int
        The number of choices, one for each attempt.

    Returns
    -------
    MLPNetwork
    """
    # The order of the draws decides what a seed means: another order needs another STREAM_VERSION.
    group = draw_hyperparameters(scm.group_rng(spec, seed))
    rng = rng_at(seed, "mlp_scm plan")
    if causal:
        num_causes = group.num_causes
        # At least 2 M + 1, as in tabicl 2.2.0: the variables of a single layer are enough for features and target.
        hidden = max(group.hidden, 2 * spec.num_features + 1)
        widths = [hidden] * group.num_layers
    else:
        num_causes = spec.num_features
        widths = [group.hidden] * group.num_layers

    # The layers, each with the units of the one before as inputs.
    layers = []
    num_inputs = num_causes
    for i, num_units in enumerate(widths):
        layers.append(plan_mlp_layer(rng, group, i, num_inputs, num_units))
        num_inputs = num_units
    # Without causal variables, one more layer computes the target. It is planned for a single unit, which allows only
    # one block of weights, and then gets such a unit for each choice.
    if not causal:
        output = plan_mlp_layer(rng, group, len(layers), num_inputs, 1)
        layers.append(replace(output, num_units=num_choices))

    # The choices. Variables are numbered from layer 1 on, see `Choice`, so the units of the last layer come last.
    num_variables = sum(layer.num_units for layer in layers[1:])
    choices = []
    for i in range(num_choices):
        if causal:
            choices.append(pick_variables(rng, spec.num_features, num_variables, group, i))
        else:
            choices.append(Choice(features=None, target=num_variables - 1 - i))
    return MLPNetwork(
        seed=seed,
        num_rows=spec.num_rows,
        causes=scm.plan_causes(rng, num_causes, group.cause_sampling, group.cause_moments),
        layers=tuple(layers),
        choices=tuple(choices),
        discretization=scm.plan_discretization(spec, seed, group.boundaries),
    )


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


def plan_mlp_layer(
    rng: np.random.Generator, group: Hyperparameters, index: int, num_inputs: int, num_units: int
) -> MLPLayer:
    """Draw a layer; the first one, of index 0, has no activation, no dropout and no noise."""
    is_first = index == 0
    activation = None if is_first else plan_activation(rng, group.activation_weights)
    blocks = 0
    if group.block_wise:
        max_blocks = math.ceil(math.sqrt(min(num_inputs, num_units)))
        blocks = int(rng.integers(1, max_blocks + 1))
    return MLPLayer(
        activation=activation,
        num_inputs=num_inputs,
        num_units=num_units,
        weight_std=group.weight_std,
        blocks=blocks,
        dropout=0.0 if is_first or group.block_wise else group.weight_dropout,
        noise=replace(group.noise, std=0.0) if is_first else group.noise,
    )


def pick_variables(
    rng: np.random.Generator, num_features: int, num_variables: int, group: Hyperparameters, number: int
) -> Choice:
    """Draw the indices of the features, all different, and of the target; number: that of the choice."""
    if group.in_clique:
        picked = rng.permutation(num_features + 1) + rng.integers(num_variables - num_features - 1)
    else:
        picked = rng.permutation(num_variables - 1)[: num_features + 1]
    target, *features = picked.tolist()
    if group.target_last:
        # Each choice has another unit of the last layer, all of which are alike, in place of the last one.
        last = num_variables - 1
        target = last - number
        features = [last if feature == target else feature for feature in features]
    return Choice(tuple(features), target)


@functools.lru_cache(maxsize=1)
def run_mlp_network(network: MLPNetwork) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    """Compute the variables of all choices, but no layer after the last of them.

    Returns
    -------
    causes : torch.Tensor
        Float32 (num_rows, number).
    indices : np.ndarray
        Those of the variables, in ascending order.
    variables : torch.Tensor
        Float32 (len(indices), num_rows).
    """
    rng = rng_at(network.seed, "network")
    causes = scm.sample_causes(network.causes, network.num_rows, rng)
    indices = network.chosen_variables()
    variables = []
    x = linear_layer(network.layers[0], causes, rng, None)
    start = 0  # index of the layer's first unit
    for layer in network.layers[1:]:
        # Only the first layer has none.
        assert layer.activation is not None
        x = apply_activation(layer.activation, x, rng)
        units = indices[slice(*indices.searchsorted([start, start + layer.num_units]))] - start
        start += layer.num_units
        is_last = indices[-1] < start
        x = linear_layer(layer, x, rng, units if is_last else None)
        variables.append((x if is_last else x[:, units]).T)
        if is_last:
            break
    return causes, indices, torch.cat(variables)


def linear_layer(layer: MLPLayer, x: torch.Tensor, rng: np.random.Generator, units: np.ndarray | None) -> torch.Tensor:
    """Map x (N, num_inputs) at random to units (all, or only those given), plus noise, float32 (N, number of units)."""
    # There is no bias, since the standardization of the next activation, or of the columns, would remove it.
    weight = draw_weight(layer, rng)
    noise_stds = layer.noise.draw_stds(rng, layer.num_units)
    if units is not None:
        weight = weight[:, units]
        noise_stds = noise_stds[units]
    if layer.noise.std == 0:
        return x @ weight
    noise = normal_array(rng, len(x), weight.shape[1])
    noise *= noise_stds
    return torch.from_numpy(noise).addmm_(x, weight)


def draw_weight(layer: MLPLayer, rng: np.random.Generator) -> torch.Tensor:
    """Draw weights float32 (num_inputs, num_units); non-zero ones have a larger variance, to make up for the zeros."""
    # If the number of blocks does not divide a side of the matrix, the remaining inputs are unused and the remaining
    # units hold noise alone, as in tabicl 2.2.0.
    if layer.blocks > 1:
        height = layer.num_inputs // layer.blocks
        width = layer.num_units // layer.blocks
        filled_share = layer.blocks * height * width / (layer.num_inputs * layer.num_units)
        blocks = normals(rng, layer.blocks, height, width).mul_(layer.weight_std / filled_share**0.5)
        weight = torch.zeros(layer.num_inputs, layer.num_units)
        # From one block to the next, as many rows and columns are passed as it has.
        diagonal = weight.as_strided(blocks.shape, (height * layer.num_units + width, layer.num_units, 1))
        diagonal.copy_(blocks)
        return weight
    weight = normals(rng, layer.num_inputs, layer.num_units).mul_(layer.weight_std)
    if layer.dropout:
        mask = torch.from_numpy(rng.random(weight.shape, dtype=np.float32) >= layer.dropout)
        weight.mul_(mask).div_((1 - layer.dropout) ** 0.5)
    return weight


def kind_weights(rng: np.random.Generator) -> np.ndarray:
    """Draw the probabilities of KINDS in a group, float64 (len(KINDS),)."""
    # Half of the choice_weights belong to one kind each, so that groups prefer some kinds; the rest is spread evenly.
    weights = scm.choice_weights(rng, 2 * len(KINDS))
    preferred, uniform = np.split(weights, 2)
    return preferred + uniform.sum() / len(KINDS)


def plan_activation(rng: np.random.Generator, weights: np.ndarray) -> MLPActivation:
    kind = KINDS[scm.draw_index(rng, weights)]
    if kind == "fourier":
        return MLPActivation(kind, exponent=scm.log_uniform(rng, 0.7, 3.0))
    return MLPActivation(kind, scale=float(np.exp(2 * rng.standard_normal())), shift=float(rng.standard_normal()))


def apply_activation(activation: MLPActivation, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Apply the activation to x (N, H), which is overwritten; the units share one function."""
    from priors.floats import standardize_columns

    standardize_columns(x.numpy(), activation.shift, activation.scale)
    if activation.kind == "fourier":
        return FourierFunction.draw(rng, activation.exponent)(x)
    return FIXED[activation.kind](x)


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
        # of (f a + p) + f b is a sum of two products, so the table is two matrix products.
        from priors.floats import interpolate, rotate

        low, high = map(float, x.aminmax())
        if not math.isfinite(high - low):
            return torch.full_like(x, torch.nan)
        # The points of either grid: size^2 points reach beyond `high`.
        size = math.isqrt(int((high - low) / GRID_STEP) + 2) + 1
        angles = low * self.frequencies + self.phases
        coarse_step = GRID_STEP * size * self.frequencies
        coarse = rotate(self.amplitudes * np.sin(angles), self.amplitudes * np.cos(angles), coarse_step, size)
        fine = rotate(np.zeros(NUM_FREQUENCIES), np.ones(NUM_FREQUENCIES), GRID_STEP * self.frequencies, size)
        coarse_sines, coarse_cosines = torch.from_numpy(coarse)  # (size, 256) each
        fine_sines, fine_cosines = torch.from_numpy(fine)
        table = (coarse_sines @ fine_cosines.T).addmm_(coarse_cosines, fine_sines.T)  # (size, size)
        out = torch.empty_like(x)
        interpolate(x.numpy().reshape(-1), low, GRID_STEP, table.numpy().reshape(-1), out.numpy().reshape(-1))
        return out
