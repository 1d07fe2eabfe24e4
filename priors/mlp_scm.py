"""mlp_scm: tables read off a random multi-layer perceptron as a structural causal model (TabICL, arXiv 2502.05564).

The distributions of the hyperparameters are those of the paper's appendix and of tabicl 2.2.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from priors.prior import Realistic
from priors.random import normals, rng_at
from priors.scm.activations import MLPActivation, apply_activation, kind_weights, plan_activation
from priors.scm.causes import CAUSE_SAMPLINGS, Causes, LayerNoise, plan_causes, sample_causes
from priors.scm.discretization import Discretization, discretize, plan_discretization
from priors.scm.hyperparameters import choose, group_rng, scaled_count, scaled_normal
from priors.table import TableSpec

__all__ = ["MLPSCM"]


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters shared by the tables of a group.

    num_causes: of a causal table; the others have as many causes as features
    hidden: units of a hidden layer, unless the variables of a causal table need more
    weight_dropout: share of the weights that are zero, unless they are block-wise
    block_wise: weights are zero outside diagonal blocks
    cause_sampling, cause_moments: see plan_causes
    target_last: the target of a causal table is the last unit, so an effect of the features
    in_clique: features and target of a causal table are neighboring units
    boundaries: see Discretization
    activation_weights: probabilities of the kinds of activation
    """

    num_causes: int
    num_layers: int
    hidden: int
    weight_std: float
    weight_dropout: float
    block_wise: bool
    noise: LayerNoise
    cause_sampling: str
    cause_moments: bool
    target_last: bool
    in_clique: bool
    boundaries: str
    activation_weights: np.ndarray


@dataclass(frozen=True)
class MLPLayer:
    """activation (none in the first layer) -> linear, with blocks or dropout of weights -> noise (not in the first)."""

    activation: MLPActivation | None
    num_inputs: int
    num_units: int
    weight_std: float
    blocks: int
    dropout: float
    noise: LayerNoise

    def __str__(self) -> str:
        weights = f"{self.blocks} blocks" if self.blocks else f"dropout {self.dropout:.2f}"
        function = f"{self.activation} -> " if self.activation else ""
        linear = f"linear {self.num_inputs} -> {self.num_units} (std {self.weight_std:.2g}, {weights})"
        return f"{function}{linear}, {self.noise}"


@dataclass(frozen=True)
class MLPPlan:
    """A network, and which of its variables are the columns of the table.

    features: indices of the features in the concatenated outputs of layers 1, 2, ...; None if they are the causes
    target: index of the target in the same concatenation
    """

    seed: tuple[int, ...]
    num_rows: int
    causes: Causes
    layers: tuple[MLPLayer, ...]
    features: tuple[int, ...] | None
    target: int
    discretization: Discretization

    def __str__(self) -> str:
        lines = [f"mlp_scm, {self.num_rows} rows", str(self.causes)]
        lines += [f"layer {i}: {layer}" for i, layer in enumerate(self.layers)]
        if self.features is None:
            lines.append("features: the causes; target: the last layer")
        else:
            lines.append(f"features: variables {', '.join(map(str, self.features))}; target: variable {self.target}")
        return "\n".join([*lines, str(self.discretization)])


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
        group = draw_hyperparameters(group_rng(spec, seed))
        rng = rng_at(seed, "mlp_scm plan")
        num_causes = group.num_causes if self.causal else spec.num_features
        hidden = max(group.hidden, 2 * spec.num_features + 1) if self.causal else group.hidden
        widths = [hidden] * group.num_layers + ([] if self.causal else [1])
        layers = tuple(
            plan_layer(rng, group, i, num_inputs, num_units)
            for i, (num_inputs, num_units) in enumerate(zip([num_causes, *widths], widths, strict=False))
        )
        features, target = None, sum(widths[1:]) - 1
        if self.causal:
            features, target = pick_variables(rng, spec.num_features, target + 1, group)
        return MLPPlan(
            seed=seed,
            num_rows=spec.num_rows,
            causes=plan_causes(rng, num_causes, group.cause_sampling, group.cause_moments),
            layers=layers,
            features=features,
            target=target,
            discretization=plan_discretization(spec, seed, group.boundaries),
        )

    def execute(self, plan: MLPPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Compute causes and network, then cut the target into classes; see `Prior.execute`."""
        causes = sample_causes(plan.causes, plan.num_rows, rng_at(plan.seed, "causes"))
        variables = [plan.target] if plan.features is None else [*plan.features, plan.target]
        values = run_network(plan, causes, variables)
        columns = causes if plan.features is None else values[:, :-1]
        return discretize(columns, values[:, -1], plan.discretization, plan.seed)


def draw_hyperparameters(rng: np.random.Generator) -> Hyperparameters:
    return Hyperparameters(
        num_causes=scaled_count(rng, 12, 1, lower=1),
        num_layers=scaled_count(rng, 6, 1, lower=2),
        hidden=scaled_count(rng, 130, 5, lower=4),
        weight_std=scaled_normal(rng, 10, 0.01),
        weight_dropout=0.9 * float(rng.beta(*rng.uniform(0.1, 5, 2))),
        block_wise=choose(rng, (True, False)),
        noise=LayerNoise(std=scaled_normal(rng, 0.3, 1e-4), varies=choose(rng, (True, False))),
        cause_sampling=choose(rng, CAUSE_SAMPLINGS),
        cause_moments=choose(rng, (True, False)),
        target_last=choose(rng, (True, False)),
        in_clique=choose(rng, (True, False)),
        boundaries=choose(rng, ("value", "rank")),
        activation_weights=kind_weights(rng),
    )


def plan_layer(
    rng: np.random.Generator, group: Hyperparameters, index: int, num_inputs: int, num_units: int
) -> MLPLayer:
    first = index == 0
    max_blocks = int(np.ceil(np.sqrt(min(num_inputs, num_units))))
    return MLPLayer(
        activation=None if first else plan_activation(rng, group.activation_weights),
        num_inputs=num_inputs,
        num_units=num_units,
        weight_std=group.weight_std,
        blocks=int(rng.integers(1, max_blocks + 1)) if group.block_wise else 0,
        dropout=0.0 if first or group.block_wise else group.weight_dropout,
        noise=replace(group.noise, std=0.0) if first else group.noise,
    )


def pick_variables(
    rng: np.random.Generator, num_features: int, num_variables: int, group: Hyperparameters
) -> tuple[tuple[int, ...], int]:
    """Draw the indices of the features, all different, and of the target."""
    if group.in_clique:
        picked = rng.permutation(num_features + 1) + rng.integers(num_variables - num_features - 1)
    else:
        picked = rng.permutation(num_variables - 1)[: num_features + 1]
    first, *rest = picked.tolist()
    return tuple(rest), num_variables - 1 if group.target_last else first


def run_network(plan: MLPPlan, causes: torch.Tensor, variables: list[int]) -> torch.Tensor:
    """Values of the variables with these indices, float32 (num_rows, len(variables)).

    Layers after the last of them are not computed.
    """
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
    """Random linear map of x (N, num_inputs) plus noise, float32 (N, number of units): all units, or only those given.

    There is no bias, since the standardization of the next activation, or of the columns, would remove it.
    """
    weight, noise_stds = draw_weight(layer, rng), layer.noise.draw_stds(rng, layer.num_units)
    if units is not None:
        weight, noise_stds = weight[:, units], noise_stds[units]
    if layer.noise.std == 0:
        return x @ weight
    noise = normals(rng, len(x), weight.shape[1])
    return noise.mul_(noise_stds).addmm_(x, weight)


def draw_weight(layer: MLPLayer, rng: np.random.Generator) -> torch.Tensor:
    """Weights float32 (num_inputs, num_units); the non-zero ones have a larger variance, to make up for the zeros.

    If the number of blocks does not divide a side of the matrix, the remaining inputs are unused and the remaining
    units hold noise alone, as in tabicl 2.2.0.
    """
    if layer.blocks:
        height, width = layer.num_inputs // layer.blocks, layer.num_units // layer.blocks
        kept = layer.blocks * height * width / (layer.num_inputs * layer.num_units)
        filled = normals(rng, layer.blocks, height, width) * (layer.weight_std / kept**0.5)
        weight = torch.zeros(layer.num_inputs, layer.num_units)
        for k, block in enumerate(filled):
            weight[k * height : (k + 1) * height, k * width : (k + 1) * width] = block
        return weight
    weight = normals(rng, layer.num_inputs, layer.num_units) * layer.weight_std
    if layer.dropout:
        mask = torch.from_numpy(rng.random(weight.shape, dtype=np.float32) >= layer.dropout)
        weight *= mask / (1 - layer.dropout) ** 0.5
    return weight
