"""Causal attention: each token attends to itself and to the tokens before it in its sequence.

Shapes: Q tokens of all sequences, H heads, d elements of a head, T tokens of a sequence, E width.
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
    """The layout of sequences whose tokens attend to themselves and to those before them.

    Parameters
    ----------
    runs : list of (int, int)
        For each run of sequences of equal length, their number and their number of tokens T.
    """

    runs: list[tuple[int, int]]


class CausalAttention(Attention):
    """Causal attention, with softmax or with signed averaging.

    Token i gets sum_j w_ij v_j over j <= i. With z_ij = q_i k_j / sqrt(d), the weight w_ij is proportional to exp(z_ij)
    for softmax (arXiv 1706.03762), and to (1 + b|z_ij|)^(sgn(z_ij) p) for signed averaging (arXiv 2508.14685).
    """

    def forward(
        self, x: Tensor, context: None, spans: Any, log_n: Tensor | None = None, table: Tensor | None = None
    ) -> Tensor:
        """Let the tokens of sequences attend to each other: x (Q, E) -> (Q, E).

        Of the arguments of `Attention.forward`, only x and `spans`, which are CausalSpans here, have an effect.
        """
        assert not isinstance(self.ssmax_layer, Scaling)
        qkv, _ = self.project(x, None)
        dropout = self.dropout if self.training else 0.0
        out = attend_causally(qkv, spans, self.ssmax_layer, dropout)
        return self.out_proj(out.flatten(1))


class CausalBlock(Block):
    """The transformer block of this package with causal attention."""

    attention = CausalAttention


def attend_causally(qkv: Tensor, spans: CausalSpans, rule: SSA | None, dropout: float) -> Tensor:
    """Compute causal attention within sequences.

    Parameters
    ----------
    qkv : Tensor
        Queries, keys and values, (Q, 3, H, d).
    spans : CausalSpans
        The sequences.
    rule : SSA or None
        Signed averaging; None is softmax.
    dropout : float
        Dropout rate of the softmax weights. Signed averaging has no dropout.

    Returns
    -------
    Tensor
        (Q, H, d)
    """
    # The rule's factor b multiplies the queries of all sequences at once.
    q, k, v = qkv.unbind(1)
    if rule is not None:
        q = rule(q)[0]

    # Sequences of equal length are computed together.
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
    """Compute the weights that a token gives to itself and to the tokens before it.

    Parameters
    ----------
    attention : Attention
        The layer, with softmax or with signed averaging.
    x : Tensor
        The tokens of sequences of equal length that enter the layer, (sequences, T, E).
    token : int
        The position of the token in its sequence, from 0.

    Returns
    -------
    Tensor
        float64 (sequences, H, token + 1)
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
    """Compute signed averaging: q, k, v (count, H, T, d) and exponents p (H,) -> (count, H, T, d)."""
    scores = exponents[:, None, None] * signed_log(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ v
