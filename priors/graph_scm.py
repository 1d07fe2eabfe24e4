"""graph_scm, the prior of TabICLv2 (arXiv 2602.11139): tables read off a random causal graph of random functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from priors.graph.execute import execute_plan
from priors.graph.plan import GraphPlan, draw_plan
from priors.graph.scalars import LOCAL, Scalars
from priors.prior import Prior
from priors.random import rng_at
from priors.table import Table, TableSpec

PRESETS = ("corrected", "released")
RELEASED_CARDINALITY = 9


@dataclass
class GraphSCM(Prior):
    """
    preset: "released" draws what tabicl 2.2.0 draws; "corrected" is what was meant: choices of one table share random
        probabilities, warps act on columns and not on nodes, cardinalities reach max_cardinality
    filter_unpredictable_graphs: the target and some feature have a common cause or one is behind the other
    filter_unpredictable_tables: drop tables whose target extremely randomised trees cannot predict
    filter_trivial_tables: drop tables whose target the same trees predict almost perfectly
    min_nodes, max_nodes: size of the graph before nodes that no column depends on are removed
    max_cardinality: of categorical features, in the corrected preset
    node_noise: Gaussian noise on every node, standard deviation 1e-5..1
    device: where the tensors are computed, "cpu" or "cuda"
    """

    preset: str = "corrected"
    filter_unpredictable_graphs: bool = True
    filter_unpredictable_tables: bool = True
    filter_trivial_tables: bool = False
    min_nodes: int = 2
    max_nodes: int = 32
    max_cardinality: int = 200
    node_noise: bool = False
    device: str = "cpu"

    def problems(self) -> list[str]:
        found = []
        if self.preset not in PRESETS:
            found.append(f"preset is {self.preset!r}; it must be one of {', '.join(PRESETS)}")
        if not 1 <= self.min_nodes <= self.max_nodes:
            found.append(f"min_nodes is {self.min_nodes}, max_nodes is {self.max_nodes}; 1 <= min <= max is needed")
        if self.max_cardinality < 2:
            found.append(f"max_cardinality is {self.max_cardinality}; at least 2 is needed")
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            found.append(f"device is {self.device!r}; it must be cpu or cuda")
        elif self.device != "cpu" and not torch.cuda.is_available():
            found.append(f"device is {self.device!r}, but this machine has no CUDA device")
        return found

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> GraphPlan:
        released = self.preset == "released"
        scalars = Scalars(rng_at(seed, "plan"), skewed_choices=not released)
        num_classes = scalars.integer(LOCAL, 2, spec.max_classes + 1)
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
        columns, labels = execute_plan(plan, self.device)
        return columns, labels, plan.num_classes

    def accept(self, table: Table, seed: tuple[int, ...]) -> None:
        if self.filter_unpredictable_tables or self.filter_trivial_tables:
            from priors.filters.predictability import check_predictability

            check_predictability(
                table, rng_at(seed, "filter"), self.filter_unpredictable_tables, self.filter_trivial_tables
            )
