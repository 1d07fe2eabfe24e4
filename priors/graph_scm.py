"""graph_scm, the prior of TabICLv2 (arXiv 2602.11139): tables read off a random causal graph of random functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from priors.graph.execute import execute_plan
from priors.graph.plan import GraphPlan, draw_plan
from priors.graph.scalars import LOCAL, Scalars
from priors.prior import Realistic
from priors.random import rng_at
from priors.table import Table, TableSpec

PRESETS = ("corrected", "released")
RELEASED_CARDINALITY = 9  # largest number of categories of a feature in the released preset


@dataclass
class GraphSCM(Realistic):
    """The graph prior of TabICLv2."""

    numeric_targets = True

    preset: str = "corrected"
    """Either "released", which draws what tabicl 2.2.0 draws, or "corrected", which draws what was evidently meant: the
    choices within a table share random probabilities, warps act on columns but not on nodes, and cardinalities reach
    max_cardinality (TabICLv2, arXiv 2602.11139, appendix on the prior)."""

    filter_unpredictable_graphs: bool = True
    """Whether graphs are drawn again until some node is an ancestor of, or holds, both a feature and the target
    (TabICLv2, arXiv 2602.11139, appendix on the prior)."""

    filter_unpredictable_tables: bool = True
    """Whether tables are dropped whose target extremely randomized trees predict no better than its mean
    (TabICLv2, arXiv 2602.11139, appendix on the prior)."""

    filter_trivial_tables: bool = False
    """Whether tables are dropped whose target the same trees predict almost perfectly, with a squared error below 15 %
    of that of the mean (our own)."""

    min_nodes: int = 2
    """Smallest number of nodes of the causal graph, before those that no column depends on are removed, at least 1
    (TabICLv2, arXiv 2602.11139, appendix on the prior)."""

    max_nodes: int = 32
    """Largest number of nodes of the causal graph, before those that no column depends on are removed, at least
    min_nodes (TabICLv2, arXiv 2602.11139, appendix on the prior)."""

    max_cardinality: int = 200
    """Largest number of categories of a feature, at least 2; the released preset has at most 9
    (TabICLv2, arXiv 2602.11139, appendix on the prior)."""

    node_noise: bool = False
    """Whether Gaussian noise with a standard deviation in 1e-5..1 is added to every node
    (TabICLv2, arXiv 2602.11139, appendix on the prior, where it is off by default)."""

    device: str = "cpu"
    """Where the tensors are computed, "cpu" or "cuda"; tables of the two agree in distribution, not in value."""

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.preset not in PRESETS:
            problems.append(f"preset is {self.preset!r}; it must be one of {', '.join(PRESETS)}")
        if not 1 <= self.min_nodes <= self.max_nodes:
            problems.append(f"min_nodes is {self.min_nodes}, max_nodes is {self.max_nodes}; 1 <= min <= max is needed")
        if self.max_cardinality < 2:
            problems.append(f"max_cardinality is {self.max_cardinality}; at least 2 is needed")
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            problems.append(f"device is {self.device!r}; it must be cpu or cuda")
        elif self.device != "cpu" and not torch.cuda.is_available():
            problems.append(f"device is {self.device!r}, but this machine has no CUDA device")
        return problems

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> GraphPlan:
        released = self.preset == "released"
        scalars = Scalars(rng_at(seed, "plan"), skewed_choices=not released)
        num_classes = scalars.integer(LOCAL, 2, spec.max_classes + 1) if spec.max_classes else 0
        if released:
            limit = min(RELEASED_CARDINALITY, self.max_cardinality)
            limit = scalars.integer("cardinality_limit", 2, limit + 1, log=True)
        else:
            limit = scalars.integer(LOCAL, 2, self.max_cardinality + 1, log=True)
        return draw_plan(
            scalars,
            address=seed,
            num_rows=spec.num_rows,
            num_features=spec.num_features,
            num_classes=num_classes,
            cardinality_limit=limit,
            nodes_range=(self.min_nodes, self.max_nodes),
            warp_flow=released,
            connected=self.filter_unpredictable_graphs,
            node_noise=self.node_noise,
        )

    def execute(self, plan: GraphPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        columns, target = execute_plan(plan, self.device)
        return columns, target, plan.num_classes

    def accept(self, table: Table, seed: tuple[int, ...]) -> None:
        if self.filter_unpredictable_tables or self.filter_trivial_tables:
            from priors.filters.predictability import check_predictability

            check_predictability(
                table, rng_at(seed, "filter"), self.filter_unpredictable_tables, self.filter_trivial_tables
            )
