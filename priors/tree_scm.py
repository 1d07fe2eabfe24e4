"""tree_scm: tables whose target is a chain of boosted trees fitted to noise (TabICL, arXiv 2502.05564, appendix)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from priors import scm
from priors.prior import Realistic
from priors.random import normals, rng_at
from priors.table import TableSpec

__all__ = ["TreeSCM"]

MAX_TREES = 4
MAX_DEPTH = 4


@dataclass(frozen=True)
class TreeLayer:
    """Boosted trees, fitted to standard normal targets and predicted at the same rows -> noise (first layer: none)."""

    num_outputs: int  # targets that each tree predicts at once
    num_trees: int
    depth: int
    noise: scm.LayerNoise

    def __str__(self) -> str:
        return f"{self.num_trees} trees of depth {self.depth} -> {self.num_outputs}, {self.noise}"


@dataclass(frozen=True)
class TreePlan:
    """Causes, which are the features, and layers, the last of which has one output, the target."""

    seed: tuple[int, ...]
    num_rows: int
    causes: scm.Causes
    layers: tuple[TreeLayer, ...]
    discretization: scm.Discretization

    def __str__(self) -> str:
        lines = [f"tree_scm {self.seed}: {self.num_rows} rows", str(self.causes)]
        lines += [f"layer {i}: {layer}" for i, layer in enumerate(self.layers)]
        lines.append(str(self.discretization))
        return "\n".join(lines)


@dataclass
class TreeSCM(Realistic):
    """A target that is a chain of boosted trees fitted to noise: a prior of TabICL v1.

    Tables of a group (`TableSpec.group_seed`) share their hyperparameters.

    References
    ----------
    Qu et al., TabICL, arXiv 2502.05564, appendix on the prior; the package tabicl 2.2.0.
    """

    numeric_targets = True

    def import_loops(self) -> None:
        """Import the loops of boosted trees; see `Prior.import_loops`."""
        super().import_loops()
        import priors.boosting  # noqa: F401

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> TreePlan:
        """Draw the causes and the sizes of the trees; see `Prior.plan`."""
        # The order of the draws decides what a seed means: another order needs another STREAM_VERSION.
        group = scm.group_rng(spec, seed)
        noise = scm.LayerNoise(std=scm.scaled_normal(group, 0.3, 1e-4), varies=scm.choose(group, (True, False)))
        cause_sampling = scm.choose(group, scm.CAUSE_SAMPLINGS)
        cause_moments = scm.choose(group, (True, False))
        boundaries = scm.choose(group, ("value", "rank"))

        rng = rng_at(seed, "tree_scm plan")
        hidden = int(rng.integers(3, 10))
        num_hidden_layers = int(rng.integers(1, 3))
        layers = []
        for i, width in enumerate([hidden] * num_hidden_layers + [1]):
            layer = TreeLayer(
                num_outputs=width,
                num_trees=min(MAX_TREES, int(1 + rng.exponential(2))),
                depth=min(MAX_DEPTH, int(2 + rng.exponential(2))),
                noise=noise if i > 0 else replace(noise, std=0.0),
            )
            layers.append(layer)
        return TreePlan(
            seed=seed,
            num_rows=spec.num_rows,
            causes=scm.plan_causes(rng, spec.num_features, cause_sampling, cause_moments),
            layers=tuple(layers),
            discretization=scm.plan_discretization(spec, seed, boundaries),
        )

    def execute(self, plan: TreePlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Fit the trees layer by layer, then cut the target into classes; see `Prior.execute`."""
        from priors.boosting import fit_predict

        causes = scm.sample_causes(plan.causes, plan.num_rows, rng_at(plan.seed, "causes"))
        values = causes
        for i, layer in enumerate(plan.layers):
            rng = rng_at(plan.seed, "layer", i)
            targets = normals(rng, plan.num_rows, layer.num_outputs)
            values = torch.from_numpy(fit_predict(values.numpy(), targets.numpy(), layer.num_trees, layer.depth))
            if layer.noise.std:
                stds = layer.noise.draw_stds(rng, layer.num_outputs)
                values += normals(rng, *values.shape) * stds
        return scm.discretize(causes, values[:, 0], plan.discretization, plan.seed)
