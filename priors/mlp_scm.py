"""mlp_scm: tables from a random multi-layer perceptron read as a structural causal model (TabICL, arXiv 2502.05564)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from priors.prior import Prior
from priors.random import normals, rng_at
from priors.scm.activations import Activation, apply_activation, kind_weights, plan_activation
from priors.scm.shared import (
    CAUSE_SAMPLINGS,
    Causes,
    Discretisation,
    choose,
    discretise,
    group_rng,
    plan_causes,
    plan_discretisation,
    sample_causes,
    scaled_count,
    scaled_normal,
)
from priors.table import TableSpec


@dataclass(frozen=True)
class Group:
    """Hyper-parameters shared by the tables of a group."""

    num_causes: int
    num_layers: int
    hidden: int
    weight_std: float
    weight_dropout: float
    block_wise: bool
    noise_std: float
    noise_varies: bool
    cause_sampling: str
    cause_moments: bool
    target_last: bool
    in_clique: bool
    boundaries: str
    activation_weights: np.ndarray


@dataclass(frozen=True)
class Layer:
    """activation (none in the first) -> linear -> noise.

    blocks: number of diagonal blocks outside which the weights are zero; 0 for a full matrix
    dropout: share of the weights of a full matrix that are zero
    noise_varies: noise_std is the scale of a unit's own standard deviation instead of being it
    """

    activation: Activation | None
    num_inputs: int
    num_units: int
    weight_std: float
    blocks: int
    dropout: float
    noise_std: float
    noise_varies: bool

    def __str__(self) -> str:
        weights = f"{self.blocks} blocks" if self.blocks else f"dropout {self.dropout:.2f}"
        noise = f"noise {'up to about ' if self.noise_varies else ''}{self.noise_std:.2g}"
        function = f"{self.activation} -> " if self.activation else ""
        return f"{function}linear {self.num_inputs} -> {self.num_units} (std {self.weight_std:.2g}, {weights}), {noise}"


@dataclass(frozen=True)
class Plan:
    """A network, and which of its variables are the table.

    features: places of the features in the concatenation of the outputs of layers 1, 2, ...; None: the causes
    target: place of the target there
    """

    seed: tuple[int, ...]
    num_rows: int
    causes: Causes
    layers: tuple[Layer, ...]
    features: tuple[int, ...] | None
    target: int
    discretisation: Discretisation

    def __str__(self) -> str:
        lines = [f"mlp_scm, {self.num_rows} rows", str(self.causes)]
        lines += [f"layer {i}: {layer}" for i, layer in enumerate(self.layers)]
        if self.features is None:
            lines.append("features: the causes; target: the last layer")
        else:
            lines.append(f"features: variables {', '.join(map(str, self.features))}; target: variable {self.target}")
        return "\n".join([*lines, str(self.discretisation)])


@dataclass
class MLPSCM(Prior):
    """causal: features and target are hidden units, so that features depend on each other; otherwise, as in
    tabicl 2.2.0, the features are the independent causes and the target is the network's output
    """

    causal: bool = False

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> Plan:
        group = draw_group(group_rng(spec, seed))
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
        return Plan(
            seed=seed,
            num_rows=spec.num_rows,
            causes=plan_causes(rng, num_causes, group.cause_sampling, group.cause_moments),
            layers=layers,
            features=features,
            target=target,
            discretisation=plan_discretisation(spec, seed, group.boundaries),
        )

    def execute(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor, int]:
        causes = sample_causes(plan.causes, plan.num_rows, rng_at(plan.seed, "causes"))
        wanted = [plan.target] if plan.features is None else [*plan.features, plan.target]
        values = run_network(plan, causes, wanted)
        columns = causes if plan.features is None else values[:, :-1]
        return discretise(columns, values[:, -1], plan.discretisation, plan.seed)


def draw_group(rng: np.random.Generator) -> Group:
    return Group(
        num_causes=scaled_count(rng, 12, 1, lower=1),
        num_layers=scaled_count(rng, 6, 1, lower=2),
        hidden=scaled_count(rng, 130, 5, lower=4),
        weight_std=scaled_normal(rng, 10, 0.01),
        weight_dropout=0.9 * float(rng.beta(*rng.uniform(0.1, 5, 2))),
        block_wise=choose(rng, (True, False)),
        noise_std=scaled_normal(rng, 0.3, 1e-4),
        noise_varies=choose(rng, (True, False)),
        cause_sampling=choose(rng, CAUSE_SAMPLINGS),
        cause_moments=choose(rng, (True, False)),
        target_last=choose(rng, (True, False)),
        in_clique=choose(rng, (True, False)),
        boundaries=choose(rng, ("value", "rank")),
        activation_weights=kind_weights(rng),
    )


def plan_layer(rng: np.random.Generator, group: Group, index: int, num_inputs: int, num_units: int) -> Layer:
    first = index == 0
    max_blocks = int(np.ceil(np.sqrt(min(num_inputs, num_units))))
    return Layer(
        activation=None if first else plan_activation(rng, group.activation_weights),
        num_inputs=num_inputs,
        num_units=num_units,
        weight_std=group.weight_std,
        blocks=int(rng.integers(1, max_blocks + 1)) if group.block_wise else 0,
        dropout=0.0 if first or group.block_wise else group.weight_dropout,
        noise_std=0.0 if first else group.noise_std,
        noise_varies=group.noise_varies,
    )


def pick_variables(
    rng: np.random.Generator, num_features: int, num_variables: int, group: Group
) -> tuple[tuple[int, ...], int]:
    """Places of the features, all different, and of the target: the last variable if it is to be an effect."""
    if group.in_clique:
        places = rng.permutation(num_features + 1) + rng.integers(num_variables - num_features - 1)
    else:
        places = rng.permutation(num_variables - 1)[: num_features + 1]
    places = tuple(places.tolist())
    return places[1:], num_variables - 1 if group.target_last else places[0]


def run_network(plan: Plan, causes: torch.Tensor, wanted: list[int]) -> torch.Tensor:
    """The wanted variables, float32 (num_rows, len(wanted)); computes no layer behind the last of them."""
    values = causes.new_empty(plan.num_rows, len(wanted))
    places = np.array(wanted)
    x = linear(plan.layers[0], causes, rng_at(plan.seed, "layer", 0), None)
    start = 0  # place of the layer's first unit
    for i, layer in enumerate(plan.layers[1:], start=1):
        rng = rng_at(plan.seed, "layer", i)
        x = apply_activation(layer.activation, x, rng)
        here = np.flatnonzero((places >= start) & (places < start + layer.num_units))
        units = places[here] - start
        start += layer.num_units
        last = places.max() < start
        x = linear(layer, x, rng, units if last else None)
        values[:, here] = x if last else x[:, units]
        if last:
            return values
    raise AssertionError("wanted variables lie beyond the last layer")


def linear(layer: Layer, x: torch.Tensor, rng: np.random.Generator, units: np.ndarray | None) -> torch.Tensor:
    """Random linear map of x (N, num_inputs) plus noise: all units, or only those given.

    It has no bias, which the standardisation that follows, of the next activation or of the columns, would remove.
    """
    weight = draw_weight(layer, rng)
    unit_noise = torch.full((layer.num_units,), layer.noise_std)
    if layer.noise_varies:
        unit_noise *= normals(rng, layer.num_units).abs()
    if units is not None:
        weight, unit_noise = weight[:, units], unit_noise[units]
    if layer.noise_std == 0:
        return x @ weight
    noise = normals(rng, len(x), weight.shape[1])
    return noise.mul_(unit_noise).addmm_(x, weight)


def draw_weight(layer: Layer, rng: np.random.Generator) -> torch.Tensor:
    """Weight (num_inputs, num_units). The variance of its non-zero part makes up for the zeros.

    Sides that the number of blocks does not divide leave inputs unused and units with noise alone.
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
        kept = torch.from_numpy(rng.random(weight.shape, dtype=np.float32) >= layer.dropout)
        weight *= kept / (1 - layer.dropout) ** 0.5
    return weight
