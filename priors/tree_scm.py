"""tree_scm: tables whose target is a chain of boosted trees fitted to noise (TabICL, arXiv 2502.05564, appendix)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from priors.prior import Realistic
from priors.random import normals, rng_at
from priors.scm.causes import CAUSE_SAMPLINGS, Causes, plan_causes, sample_causes
from priors.scm.discretization import Discretization, discretize, plan_discretization
from priors.scm.hyperparameters import choose, group_rng, scaled_normal
from priors.scm.noise import LayerNoise
from priors.table import TableSpec

MAX_TREES = 4
MAX_DEPTH = 4


@dataclass(frozen=True)
class Layer:
    """Boosted trees, fitted to standard normal targets and predicted at the same rows -> noise (first layer: none).

    num_outputs: targets that every tree predicts at once
    """

    num_outputs: int
    num_trees: int
    depth: int
    noise: LayerNoise

    def __str__(self) -> str:
        return f"{self.num_trees} trees of depth {self.depth} -> {self.num_outputs}, {self.noise}"


@dataclass(frozen=True)
class TreePlan:
    """Causes, which are the features, and layers, the last of which has one output, the target."""

    seed: tuple[int, ...]
    num_rows: int
    causes: Causes
    layers: tuple[Layer, ...]
    discretization: Discretization

    def __str__(self) -> str:
        lines = [f"tree_scm {self.seed}: {self.num_rows} rows", str(self.causes)]
        lines += [f"layer {i}: {layer}" for i, layer in enumerate(self.layers)]
        return "\n".join([*lines, str(self.discretization)])


@dataclass
class TreeSCM(Realistic):
    """The tree prior of TabICL v1."""

    numeric_targets = True

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> TreePlan:
        group = group_rng(spec, seed)
        noise = LayerNoise(std=scaled_normal(group, 0.3, 1e-4), varies=choose(group, (True, False)))
        cause_sampling = choose(group, CAUSE_SAMPLINGS)
        cause_moments = choose(group, (True, False))
        boundaries = choose(group, ("value", "rank"))

        rng = rng_at(seed, "tree_scm plan")
        widths = [int(rng.integers(3, 10))] * int(rng.integers(1, 3)) + [1]
        layers = tuple(
            Layer(
                num_outputs=width,
                num_trees=min(MAX_TREES, int(1 + rng.exponential(2))),
                depth=min(MAX_DEPTH, int(2 + rng.exponential(2))),
                noise=noise if i > 0 else replace(noise, std=0.0),
            )
            for i, width in enumerate(widths)
        )
        return TreePlan(
            seed=seed,
            num_rows=spec.num_rows,
            causes=plan_causes(rng, spec.num_features, cause_sampling, cause_moments),
            layers=layers,
            discretization=plan_discretization(spec, seed, boundaries),
        )

    def execute(self, plan: TreePlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        from priors.scm.boosting import fit_predict

        causes = sample_causes(plan.causes, plan.num_rows, rng_at(plan.seed, "causes"))
        values = causes
        for i, layer in enumerate(plan.layers):
            rng = rng_at(plan.seed, "layer", i)
            targets = normals(rng, plan.num_rows, layer.num_outputs)
            values = torch.from_numpy(fit_predict(values.numpy(), targets.numpy(), layer.num_trees, layer.depth))
            if layer.noise.std:
                stds = layer.noise.draw_stds(rng, layer.num_outputs)
                values += normals(rng, *values.shape) * stds
        return discretize(causes, values[:, 0], plan.discretization, plan.seed)
