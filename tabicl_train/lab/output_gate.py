"""A TabICL with a gate on the output of in-context attention, to compare with QASSMax's gate on the query.

The gate of QASSMax (arXiv 2602.11139) multiplies the query, so it changes the weights of attention. This one has the
same form, 1 + tanh(MLP(q)), and multiplies the output of attention, after the weights are chosen.

Shapes: Q queries, H heads, d elements of a head, D width of a row representation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.attention import Attention, Block, attend
from tabicl_train.model.pack import Spans
from tabicl_train.model.scaling import gate_flops, gate_kept, mlp
from tabicl_train.model.stages import InContextLearner

__all__ = ["OutputGate", "OutputGateConfig"]


@dataclass
class OutputGateConfig(TabICLConfig):
    """Settings of OutputGate, in addition to those of a TabICL."""

    family: str = "output_gate"
    """The name of the network; it tells its checkpoints from others."""
    icl_scaling: str = "ssmax_mlp_elementwise"
    """Scalable softmax of in-context learning; the default is QASSMax without its gate on the query."""

    def problems(self) -> list[str]:
        """Return every contradiction among the settings, one sentence each; none if the network can be built."""
        problems = super().problems()
        if self.icl_scaling.startswith("ssa"):
            problems.append(f"icl_scaling is {self.icl_scaling}; a gate on the output needs a rule of softmax")
        return problems


class OutputGatedAttention(Attention):
    """Attention whose output is multiplied by a gate that depends on the query and starts at 1.

    A head returns softmax(scale(q) K^T / sqrt(d)) V * (1 + tanh(MLP(q))), where q is the query before the scaling. The
    gate is that of QASSMax (arXiv 2602.11139), on the output instead of the query.
    """

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, **settings)
        width = self.dim // self.num_heads
        self.output_gate = mlp(width, width)
        for parameter in self.output_gate[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(
        self, x: Tensor, context: Tensor | None, spans: Spans, log_n: Tensor | None = None, table: Tensor | None = None
    ) -> Tensor:
        """Let rows attend to a context with softmax: x (Q, D), context (K, D) -> (Q, D); see `Attention.forward`."""
        q, kv = self.project(x, context)
        assert kv is not None  # labeled rows are the context of in-context learning
        k, v = kv.unbind(1)
        dropout = self.dropout if self.training else 0.0
        out = attend(self.scale(q, log_n, table, spans), k, v, spans, dropout)  # (Q, H, d)
        # The gate is in float32 even under autocast, like that of QASSMax.
        with torch.autocast(q.device.type, enabled=False):
            gate = 1 + torch.tanh(self.output_gate(q.float()))  # (Q, H, d)
        return self.out_proj((out * gate.to(out.dtype)).flatten(1))


class OutputGatedBlock(Block):
    """The block of in-context learning with a gate on the output of its attention."""

    attention = OutputGatedAttention


class OutputGatedLearner(InContextLearner):
    """In-context learning whose attention has a gate on its output."""

    def __init__(self, config: OutputGateConfig) -> None:
        super().__init__(config)
        c = config
        blocks = (OutputGatedBlock(c.row_dim, c.icl_num_heads, c.icl_scaling, c) for _ in range(c.icl_num_blocks))
        self.tf_icl["blocks"] = nn.ModuleList(blocks)


class OutputGate(TabICL):
    """A TabICL with a gate on the output of in-context attention."""

    in_context_learner = OutputGatedLearner
    config: OutputGateConfig

    def is_hidden_matrix(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether Muon optimizes a parameter: the same ones as in a TabICL, without the gates."""
        return super().is_hidden_matrix(name, parameter) and "output_gate" not in name

    @staticmethod
    def forward_flops(config: OutputGateConfig, num_rows: int, train_size: int, num_features: int) -> float:
        """Count the FLOPs of one table's forward pass; see `TabICL`."""
        flops = TabICL.forward_flops(config, num_rows, train_size, num_features)
        gate = gate_flops(config.row_dim, config.icl_num_heads, elementwise=True)
        return flops + gates(config, num_rows, train_size) * gate

    @staticmethod
    def kept_values(
        config: OutputGateConfig, num_rows: int, train_size: int, num_features: int, recomputed: bool = False
    ) -> float:
        """Count the values of one table that are kept for the backward pass; see `TabICL`."""
        kept = TabICL.kept_values(config, num_rows, train_size, num_features, recomputed)
        gate = gate_kept(config.row_dim, config.icl_num_heads, elementwise=True) * config.row_dim
        return kept + gates(config, num_rows, train_size) * gate


def gates(config: OutputGateConfig, num_rows: int, train_size: int) -> int:
    """Return the number of query vectors of a table over all blocks; the last block has query rows only."""
    return (config.icl_num_blocks - 1) * num_rows + num_rows - train_size
