"""tree_scm: tables whose target is a chain of boosted trees fitted to noise (TabICL, arXiv 2502.05564)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from priors.prior import Prior
from priors.random import normals, rng_at
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
    scaled_normal,
)
from priors.table import TableSpec

MAX_TREES = 4
MAX_DEPTH = 4


@dataclass(frozen=True)
class Layer:
    """Boosted trees fitted to standard normal targets and predicted at the same rows -> noise.

    noise_varies: noise_std is the scale of an output's own standard deviation instead of being it
    """

    num_outputs: int
    num_trees: int
    depth: int
    noise_std: float
    noise_varies: bool

    def __str__(self) -> str:
        noise = f"noise {'up to about ' if self.noise_varies else ''}{self.noise_std:.2g}"
        return f"{self.num_trees} trees of depth {self.depth} -> {self.num_outputs}, {noise}"


@dataclass(frozen=True)
class TreePlan:
    """The features are the causes, the target is the only output of the last layer."""

    seed: tuple[int, ...]
    num_rows: int
    causes: Causes
    layers: tuple[Layer, ...]
    discretisation: Discretisation

    def __str__(self) -> str:
        lines = [f"tree_scm {self.seed}: {self.num_rows} rows", str(self.causes)]
        lines += [f"layer {i}: {layer}" for i, layer in enumerate(self.layers)]
        return "\n".join([*lines, str(self.discretisation)])


@dataclass
class TreeSCM(Prior):
    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> TreePlan:
        group = group_rng(spec, seed)
        noise_std = scaled_normal(group, 0.3, 1e-4)
        noise_varies = choose(group, (True, False))
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
                noise_std=noise_std if i > 0 else 0.0,
                noise_varies=noise_varies,
            )
            for i, width in enumerate(widths)
        )
        return TreePlan(
            seed=seed,
            num_rows=spec.num_rows,
            causes=plan_causes(rng, spec.num_features, cause_sampling, cause_moments),
            layers=layers,
            discretisation=plan_discretisation(spec, seed, boundaries),
        )

    def execute(self, plan: TreePlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        from priors.scm.boosting import fit_predict

        causes = sample_causes(plan.causes, plan.num_rows, rng_at(plan.seed, "causes"))
        values = causes
        for i, layer in enumerate(plan.layers):
            rng = rng_at(plan.seed, "layer", i)
            targets = normals(rng, plan.num_rows, layer.num_outputs)
            values = torch.from_numpy(fit_predict(values.numpy(), targets.numpy(), layer.num_trees, layer.depth))
            if layer.noise_std:
                noise_std = torch.full((layer.num_outputs,), layer.noise_std)
                if layer.noise_varies:
                    noise_std *= normals(rng, layer.num_outputs).abs()
                values += normals(rng, *values.shape) * noise_std
        return discretise(causes, values[:, 0], plan.discretisation, plan.seed)
