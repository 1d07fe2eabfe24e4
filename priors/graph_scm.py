"""graph_scm, the prior of TabICLv2 (arXiv 2602.11139): tables read off a random causal graph of random functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from priors.options import option
from priors.prior import Realistic
from priors.random import rng_at
from priors.table import Table, TableSpec

if TYPE_CHECKING:  # importing numba takes a second, and the command line does not need it
    from priors.graph.nodes import GraphPlan

__all__ = ["GraphSCM"]

PRESETS = ("corrected", "released")


@dataclass
class GraphSCM(Realistic):
    """Tables read off a random causal graph of random functions, the prior of TabICLv2.

    References
    ----------
    Qu et al., TabICLv2, arXiv 2602.11139, appendix on the prior; the package tabicl 2.2.0.
    """

    numeric_targets = True

    preset: str = option("corrected", choices=PRESETS)
    """Either "released", which draws what tabicl 2.2.0 draws, or "corrected", which draws what was evidently meant: the
    choices within a table share random probabilities, warps act on columns but not on nodes, and cardinalities reach
    200 (TabICLv2, arXiv 2602.11139, appendix on the prior)."""

    filter_unpredictable_graphs: bool = True
    """Whether graphs are drawn again until some node is an ancestor of, or holds, both a feature and the target
    (TabICLv2, arXiv 2602.11139, appendix on the prior)."""

    filter_unpredictable_tables: bool = True
    """Whether tables are dropped whose target extremely randomized trees predict no better than its mean
    (TabICLv2, arXiv 2602.11139, appendix on the prior)."""

    node_noise: bool = False
    """Whether Gaussian noise with a standard deviation in 1e-5..1 is added to every node
    (TabICLv2, arXiv 2602.11139, appendix on the prior, where it is off by default)."""

    def import_loops(self) -> None:
        """Import the loops of random functions and of the filter; see `Prior.import_loops`."""
        import priors.graph.nodes
        import priors.predictability  # noqa: F401

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> GraphPlan:
        """Draw the columns and the graph; functions are drawn when their node is reached. See `Prior.plan`."""
        from priors.graph.nodes import draw_plan

        return draw_plan(self, spec, seed)

    def execute(self, plan: GraphPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Compute the nodes and read the columns off them; see `Prior.execute`."""
        from priors.graph.nodes import execute_plan

        columns, target = execute_plan(plan)
        return torch.from_numpy(columns), torch.from_numpy(target), plan.num_classes

    def accept(self, table: Table, seed: tuple[int, ...]) -> None:
        """Raise Rejected for a table with less than min_skill, or "unpredictable" for one that the filter drops."""
        if not self.filter_unpredictable_tables:
            super().accept(table, seed)
            return
        from priors.predictability import check_predictability, check_skill, trees_of

        # Both filters look at the same trees, the one first that is decided after fewer of them.
        trees = trees_of(table, rng_at(seed, "filter"))
        if self.min_skill:
            check_skill(trees, self.min_skill)
        check_predictability(trees)
