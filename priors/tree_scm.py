"""tree_scm: tables whose target is a chain of boosted trees fitted to noise (TabICL, arXiv 2502.05564, appendix)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch

from priors import scm
from priors.prior import Realistic
from priors.random import normal_array, rng_at
from priors.table import TableSpec

__all__ = ["TreeSCM"]

CHOICES = 2  # of a target from the hidden layers, one an attempt, if tables have to pass min_skill; 4 are not faster
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


@dataclass(frozen=True, eq=False)  # equal to itself only, so that the values of its layers can be looked up
class TreeNetwork:
    """Causes, which are the features, and hidden layers of trees."""

    seed: tuple[int, ...]
    num_rows: int
    causes: scm.Causes
    layers: tuple[TreeLayer, ...]
    outputs: tuple[TreeLayer, ...]  # of one output each; they are tried as the target one after the other
    discretization: scm.Discretization

    def __str__(self) -> str:
        lines = [f"tree_scm {self.seed}: {self.num_rows} rows", str(self.causes)]
        lines += [f"layer {i}: {layer}" for i, layer in enumerate(self.layers)]
        return "\n".join(lines)


@dataclass(frozen=True)
class TreePlan:
    """A network, and the number of the output that is the target."""

    seed: tuple[int, ...]
    network: TreeNetwork
    number: int

    @property
    def output(self) -> TreeLayer:
        return self.network.outputs[self.number]

    def __str__(self) -> str:
        return f"{self.network}\nlayer {len(self.network.layers)}: {self.output}\n{self.network.discretization}"


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
        """Draw the causes and the sizes of the trees; see `Prior.plan`.

        Attempts share the hidden layers as long as there are other outputs.
        """
        *address, attempt = seed
        num_choices = CHOICES if self.min_skill else 1
        number = attempt % num_choices
        return TreePlan(seed, draw_tree_network(spec, (*address, attempt - number), num_choices), number)

    def execute(self, plan: TreePlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Fit the trees layer by layer, then cut the target into classes; see `Prior.execute`."""
        causes, hidden = run_tree_network(plan.network)
        target = torch.from_numpy(run_layer(plan.output, hidden, rng_at(plan.seed, "output"))[:, 0])
        return scm.discretize(causes, target, plan.network.discretization, plan.seed)


@functools.lru_cache(maxsize=1)
def draw_tree_network(spec: TableSpec, seed: tuple[int, ...], num_choices: int) -> TreeNetwork:
    """Draw the causes and the layers of a network.

    Parameters
    ----------
    spec : TableSpec
        The request.
    seed : tuple of int
        The address of the first attempt with the network.
    num_choices : int
        Outputs that are tried as the target.
    """
    # The order of the draws decides what a seed means: another order needs another STREAM_VERSION.
    group = scm.group_rng(spec, seed)
    noise = scm.LayerNoise(std=scm.scaled_normal(group, 0.3, 1e-4), varies=scm.choose(group, (True, False)))
    cause_sampling = scm.choose(group, scm.CAUSE_SAMPLINGS)
    cause_moments = scm.choose(group, (True, False))
    boundaries = scm.choose(group, ("value", "rank"))

    rng = rng_at(seed, "tree_scm plan")
    hidden = int(rng.integers(3, 10))
    num_hidden_layers = int(rng.integers(1, 3))
    layers = [plan_tree_layer(rng, hidden, noise) for _ in range(num_hidden_layers)]
    layers[0] = replace(layers[0], noise=replace(noise, std=0.0))
    return TreeNetwork(
        seed=seed,
        num_rows=spec.num_rows,
        causes=scm.plan_causes(rng, spec.num_features, cause_sampling, cause_moments),
        layers=tuple(layers),
        outputs=tuple(plan_tree_layer(rng, 1, noise) for _ in range(num_choices)),
        discretization=scm.plan_discretization(spec, seed, boundaries),
    )


def plan_tree_layer(rng: np.random.Generator, num_outputs: int, noise: scm.LayerNoise) -> TreeLayer:
    """Draw number and depth of the trees of a layer."""
    return TreeLayer(
        num_outputs=num_outputs,
        num_trees=min(MAX_TREES, int(1 + rng.exponential(2))),
        depth=min(MAX_DEPTH, int(2 + rng.exponential(2))),
        noise=noise,
    )


@functools.lru_cache(maxsize=1)
def run_tree_network(network: TreeNetwork) -> tuple[torch.Tensor, np.ndarray]:
    """Compute the causes, float32 (num_rows, number), and the outputs of the last hidden layer, (num_rows, outputs)."""
    rng = rng_at(network.seed, "network")
    causes = scm.sample_causes(network.causes, network.num_rows, rng)
    values = causes.numpy()
    for layer in network.layers:
        values = run_layer(layer, values, rng)
    return causes, values


def run_layer(layer: TreeLayer, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Fit the trees of a layer to noise at the rows of values (N, inputs), and predict them, float32 (N, outputs)."""
    from priors.boosting import fit_predict

    targets = normal_array(rng, len(values), layer.num_outputs)
    predictions = fit_predict(values, targets, layer.num_trees, layer.depth)
    if layer.noise.std:
        stds = layer.noise.draw_stds(rng, layer.num_outputs)
        predictions += normal_array(rng, *predictions.shape) * stds
    return predictions
