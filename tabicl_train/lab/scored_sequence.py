"""The transformer over sequences with more scoring functions, without attention, or with another head.

The SSA paper (arXiv 2508.14685) compares its rule with two others, which are added to softmax and SSA here:

- CosFormer (Qin et al., "cosFormer: rethinking softmax in attention", ICLR 2022): the weight of token j for token i is
  relu(q_i) . relu(k_j) cos(pi (i - j) / (2 M)), divided by the sum of these. All scores are computed here, so results
  are those of CosFormer, but time is not linear.
- SA-Softmax (Zheng et al., arXiv 2502.18277): the weight is z softmax(z) for a score z. Weights do not sum to 1.

Shapes: H heads, T tokens of a sequence, d elements of a head, E width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from priors.options import option
from tabicl_train.lab.causal import CausalAttention, CausalBlock
from tabicl_train.lab.sequence_config import SequenceConfig
from tabicl_train.lab.sequence_model import SequenceModel
from tabicl_train.model.pack import Pack

__all__ = ["ScoredSequence", "ScoredSequenceConfig"]

SMALLEST = 1e-6  # added to the sum of CosFormer's weights, which may all be 0
BY_SCALING = "scaling"
ABSENT = "absent"


@dataclass
class ScoredSequenceConfig(SequenceConfig):
    """Settings of ScoredSequence, in addition to those of a transformer over sequences."""

    family: str = "scored_sequence"
    """The name of the network; it tells its checkpoints from others."""
    score: str = option(BY_SCALING, choices=(BY_SCALING, ABSENT, "cosformer", "sa_softmax"))
    """Weights of attention: scaling (softmax or SSA, by the setting `scaling`), cosformer, sa_softmax, or absent for
    blocks without attention."""
    cosformer_length: int = 80
    """M of CosFormer, the longest sequence in tokens. 40 points with their values are 80 tokens."""
    output_scale: float = option(1.0, above=0)
    """Factor of the outputs. It raises the bound that the last LayerNorm sets at the start of training."""
    head_norm: bool = True
    """Whether there is a LayerNorm before the last linear layer. Without it, outputs have no such bound."""

    def problems(self) -> list[str]:
        """Return every contradiction among the settings, one sentence each; none if the network can be built."""
        problems = super().problems()
        if self.score != BY_SCALING and self.scaling != "none":
            problems.append(f"scaling is {self.scaling}, which has no effect with score={self.score}")
        if self.score in SCORES and self.dropout > 0:
            problems.append(f"dropout is {self.dropout}; it must be 0 with score={self.score}")
        if self.score == ABSENT and self.ff_factor == 0:
            problems.append("score=absent and ff_factor=0 leave nothing in a block")
        if self.score == "cosformer" and self.cosformer_length < self.max_tokens:
            # At distances above M the cosine is negative.
            problems.append(
                f"cosformer_length is {self.cosformer_length}; it must be at least max_tokens ({self.max_tokens})"
            )
        return problems


def cosformer(q: Tensor, k: Tensor, length: int) -> Tensor:
    """Return the causal weights of CosFormer: q, k (count, H, T, d) -> (count, H, T, T); `length` is M."""
    T = q.shape[2]
    position = torch.arange(T, device=q.device)
    distance = position[:, None] - position  # (T, T), negative for later tokens
    near = torch.cos(distance * (math.pi / (2 * length)))
    odds = (F.relu(q) @ F.relu(k).mT * near).masked_fill(distance < 0, 0.0)
    return odds / (odds.sum(-1, keepdim=True) + SMALLEST)


def sa_softmax(q: Tensor, k: Tensor, length: int) -> Tensor:
    """Return the causal weights z softmax(z) of SA-Softmax: q, k (count, H, T, d) -> (count, H, T, T)."""
    z = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(z.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return z * torch.softmax(z.masked_fill(later, -torch.inf), -1)


SCORES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"cosformer": cosformer, "sa_softmax": sa_softmax}


class ScoredAttention(CausalAttention):
    """Causal attention with the weights of CosFormer or SA-Softmax, whose formulas are at the top of this file.

    Token i gets sum_j w_ij v_j over j <= i.
    """

    def __init__(self, dim: int, num_heads: int, scaling: str, settings: Any, fp32: bool = False) -> None:
        super().__init__(dim, num_heads, scaling, settings, fp32)
        self.weights = SCORES[settings.score]
        self.length = settings.cosformer_length

    def forward(
        self, x: Tensor, context: None, spans: Any, log_n: Tensor | None = None, table: Tensor | None = None
    ) -> Tensor:
        """Let the tokens of sequences attend to each other: x (tokens, E) -> (tokens, E); spans are CausalSpans."""
        qkv, _ = self.project(x, None)  # (tokens, 3, H, d)
        outs = []
        for (count, T), part in zip(spans.runs, qkv.split([count * T for count, T in spans.runs]), strict=True):
            q, k, v = part.unflatten(0, (count, T)).permute(2, 0, 3, 1, 4)  # (count, H, T, d)
            out = self.weights(q, k, self.length) @ v
            outs.append(out.transpose(1, 2).flatten(0, 1))  # (count * T, H, d)
        return self.out_proj(torch.cat(outs).flatten(1))


class NoAttention(nn.Module):
    """A replacement of attention that returns zeros, so that no token sees another one."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """Return zeros: x (tokens, E) -> (tokens, E)."""
        return torch.zeros_like(x)


class ScoredBlock(CausalBlock):
    """A block with the weights of `SCORES`."""

    attention = ScoredAttention


class BlindBlock(CausalBlock):
    """A block without attention."""

    attention = NoAttention


class ScoredSequence(SequenceModel):
    """A transformer over sequences with other scoring functions and heads; by default it equals a SequenceModel."""

    config: ScoredSequenceConfig

    def __init__(self, config: ScoredSequenceConfig):
        super().__init__(config)
        c = config
        if c.score != BY_SCALING:
            block = BlindBlock if c.score == ABSENT else ScoredBlock
            blocks = (block(c.width, c.num_heads, c.scaling, c) for _ in range(c.num_blocks))
            self.transformer = nn.ModuleList(blocks)
        if not c.head_norm:
            self.head[0] = nn.Identity()

    def forward(self, pack: Pack, checkpoint_rows: int | None = None) -> Tensor:
        """Predict the rows of all tables, (rows, C) or (rows, 1); see `SequenceModel`."""
        return super().forward(pack, checkpoint_rows) * self.config.output_scale

    @staticmethod
    def forward_flops(config: ScoredSequenceConfig, num_rows: int, train_size: int, num_features: int) -> float:
        """Count the FLOPs of one table's forward pass; see `SequenceModel`."""
        flops = SequenceModel.forward_flops(config, num_rows, train_size, num_features)
        if config.score == ABSENT:
            T = num_rows * (num_features + 1)
            flops -= config.num_blocks * (8 * T * config.width**2 + 4 * T * T * config.width)
        return flops

    @staticmethod
    def kept_values(
        config: ScoredSequenceConfig, num_rows: int, train_size: int, num_features: int, recomputed: bool = False
    ) -> float:
        """Count the values of one table that are kept for the backward pass; see `SequenceModel`."""
        kept = SequenceModel.kept_values(config, num_rows, train_size, num_features, recomputed)
        if config.score in SCORES:
            # Four values for each score: the product, its mask, its divisor or factor, and the weight.
            T = num_rows * (num_features + 1)
            kept += 4 * config.num_heads * T * T * (1 if recomputed else config.num_blocks)
        return kept
