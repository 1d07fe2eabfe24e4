"""A TabICL whose QASSMax starts as plain softmax: base multipliers are 1 for every number of rows before training."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.scaling import QASSMax

__all__ = ["IdentityStart", "IdentityStartConfig"]


@dataclass
class IdentityStartConfig(TabICLConfig):
    """Settings of IdentityStart, which are those of a TabICL."""

    family: str = "identity_start"
    """The name of the network; it tells its checkpoints from others."""

    def problems(self) -> list[str]:
        """Return every contradiction among the settings, one sentence each; none if the network can be built."""
        problems = super().problems()
        if not any(rule.startswith("qassmax") for rule in (self.col_scaling, self.icl_scaling)):
            problems.append("neither col_scaling nor icl_scaling is a QASSMax, whose start this network changes")
        return problems


class IdentityStart(TabICL):
    """A TabICL whose base multipliers of QASSMax start at 1 for every number of rows.

    QASSMax (arXiv 2602.11139) multiplies queries by base(log n) * gate(q). The last layer of the MLP base starts with
    zero weights and a bias of one here; random weights give base multipliers of any sign and size.
    """

    config: IdentityStartConfig

    def __init__(self, config: IdentityStartConfig):
        super().__init__(config)
        for _, layer in self.named_scalings():
            if isinstance(layer, QASSMax):
                last = layer.base_mlp[-1]
                nn.init.zeros_(last.weight)
                nn.init.ones_(last.bias)
