"""Causal attention: each token attends to itself and to those before it in its sequence.

Q tokens of all sequences, H heads, d values of a head, T tokens of a sequence, E width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tabicl_train.model.attention import Attention, Block
from tabicl_train.model.averaging import signed_log
from tabicl_train.model.recording import logits
from tabicl_train.model.scaling import SSA, Scaling

__all__ = ["CausalAttention", "CausalBlock", "CausalSpans"]


class CausalSpans(NamedTuple):
    """Sequences whose tokens attend to themselves and to those before them."""

    runs: list[tuple[int, int]]  # of equal sequences: how many, and their tokens T


class CausalAttention(Attention):
    """Causal attention, with softmax or with signed averaging."""

    def forward(
        self, x: Tensor, context: None, spans: Any, log_n: Tensor | None = None, table: Tensor | None = None
    ) -> Tensor:
        """Let the tokens x (Q, E) of `spans`, CausalSpans, attend to each other -> (Q, E)."""
        assert not isinstance(self.ssmax_layer, Scaling)
        qkv, _ = self.project(x, None)
        dropout = self.dropout if self.training else 0.0
        out = attend_causally(qkv, spans, self.ssmax_layer, dropout)
        return self.out_proj(out.flatten(1))


class CausalBlock(Block):
    """The block of all networks with causal attention."""

    attention = CausalAttention


def attend_causally(qkv: Tensor, spans: CausalSpans, rule: SSA | None, dropout: float) -> Tensor:
    """Attention within the sequences of `spans`, softmax without a `rule`: qkv (Q, 3, H, d) -> (Q, H, d)."""
    q, k, v = qkv.unbind(1)
    if rule is not None:
        q = rule(q)[0]
    parts = torch.stack([q, k, v]).split([count * T for count, T in spans.runs], 1)
    outs = []
    for (count, T), part in zip(spans.runs, parts, strict=True):
        q, k, v = part.unflatten(1, (count, T)).transpose(2, 3).unbind()  # (count, H, T, d)
        if rule is None:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            out = average_causally(q, k, v, rule.exponents())
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


def weights_of_token(attention: Attention, x: Tensor, token: int) -> Tensor:
    """Compute the weights that a token gives to itself and to those before it, float64 (sequences, H, token + 1).

    Parameters
    ----------
    attention : Attention
        The layer, with softmax or with signed averaging.
    x : Tensor
        The tokens of sequences of equal length as the layer gets them, (sequences, T, E).
    token : int
        The place of the token in its sequence, from 0.
    """
    qkv, _ = attention.project(x[:, : token + 1].flatten(0, 1), None)
    q, k, _ = qkv.unflatten(0, (len(x), -1)).unbind(2)  # (sequences, token + 1, H, d)
    q = q[:, -1:]
    if attention.ssmax_layer is not None:
        q = attention.ssmax_layer(q)[0]
    scores = []
    for q_of_sequence, k_of_sequence in zip(q, k, strict=True):
        scores.append(logits(attention, q_of_sequence, k_of_sequence)[:, 0])  # (H, token + 1)
    return torch.stack(scores).softmax(-1)


def average_causally(q: Tensor, k: Tensor, v: Tensor, exponents: Tensor) -> Tensor:
    """Signed averaging of q, k, v (count, H, T, d) -> (count, H, T, d); exponents (H,): the p of each head."""
    scores = exponents[:, None, None] * signed_log(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ v
