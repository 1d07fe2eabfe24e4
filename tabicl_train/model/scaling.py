"""Scaling rules: scores of attention depend on the number of keys, so that attention does not fade in long contexts.

For head h and element i of a query q, with n keys:

    none                              q
    ssmax                             q * s_h * log n                                        (arXiv 2501.19399)
    ssmax_mlp, _elementwise           q * MLP(log n), one value per head, or one per element
    qassmax, _elementwise             q * MLP_base(log n) * (1 + tanh(MLP_gate(q)))          (arXiv 2602.11139)
    ssa, ssa_trainable                q * b_h, and signed averaging in place of softmax      (arXiv 2508.14685)

Rules are registered at the end; tabicl_train/EXTEND.md describes how to add one.

B tables, H heads, Q queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tabicl_train.doors import register
from tabicl_train.model.pack import TakeRows

__all__ = ["OPTIONS", "SSA", "QASSMax", "Rule", "SSMax", "SSMaxMLP", "Scaling"]

HIDDEN = 64  # hidden width of the MLPs, that of the released weights


class Scaling(nn.Module):
    """A rule that multiplies queries by base(n), and in some rules also by a gate of the query.

    ``q <- q * base(n) * gate(q)`` for n keys, before the product with the keys; base(n) is a number for each head, or
    one for each element of a head.

    Parameters
    ----------
    num_heads, head_dim : int
        The heads H of the layer and the values of each.
    settings : TabICLConfig
        Those of the network. With `scaling_bound` b, base(n) becomes b * tanh(base(n) / b), which is close to base(n)
        where that is small, never above b, and has a gradient everywhere. In published low-precision runs base(n) grew
        without limit.
    """

    def __init__(self, num_heads: int, head_dim: int, settings: Any) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.bound: float | None = settings.scaling_bound
        # None, or a float tensor (3,) to which each forward pass adds the gate's mean over its queries, the mean of its
        # square, and 1. It is not a hook, since hooks do not run in compiled blocks.
        self.gate_sums: Tensor | None = None

    def forward(self, q: Tensor, log_n: Tensor, table: Tensor | None = None) -> Tensor:
        """Rescale queries, in float32 even under autocast: in fp16 QASSMax gave NaN, in bf16 training collapsed.

        Parameters
        ----------
        q : Tensor
            Queries, (Q, H, head_dim).
        log_n : Tensor
            Logarithm of the number of keys of each table, (B,) float32.
        table : Tensor, optional
            The table of each query, (Q,) int64. Without it, all tables share the queries.

        Returns
        -------
        Tensor
            In the dtype of q, (Q, H, head_dim), or (B, Q, H, head_dim) if the tables share the queries.
        """
        with torch.autocast(q.device.type, enabled=False):
            return self.scale(q, self.base(log_n), table)

    def scale(self, q: Tensor, base: Tensor, table: Tensor | None) -> Tensor:
        """Multiply queries by their factors.

        Parameters
        ----------
        q, table : Tensor
            As in `forward`.
        base : Tensor
            Factors of each table, (B, H, 1 or head_dim) float32.

        Returns
        -------
        Tensor
            As from `forward`.
        """
        return (q.float() * per_query(base, table)).to(q.dtype)

    def base(self, log_n: Tensor) -> Tensor:
        """Compute the part of the multiplier that depends only on the numbers of keys, (B, H, 1 or head_dim)."""
        base = self.growth(log_n)
        return base if self.bound is None else self.bound * torch.tanh(base / self.bound)

    def growth(self, log_n: Tensor) -> Tensor:
        """Compute `base` without its bound; a rule of one's own overrides this.

        Parameters
        ----------
        log_n : Tensor
            Logarithm of the number of keys of each table, (B,) float32.

        Returns
        -------
        Tensor
            (B, H, 1 or head_dim) float32.
        """
        raise NotImplementedError

    @torch.no_grad()
    def multipliers(self, n: int) -> Tensor:
        """Return base multipliers for n keys, float32 (H, 1) or (H, head_dim).

        Their growth is an early warning: in the released model the maximum of the first in-context block is about 12 at
        n = 512.
        """
        weight = next(self.parameters())
        with torch.autocast(weight.device.type, enabled=False):
            return self.base(weight.new_full((1,), math.log(max(n, 1))))[0]


def per_query(base: Tensor, table: Tensor | None) -> Tensor:
    """Return the factors (B, H, .) of the queries of these tables, (Q, H, .), or of shared queries, (B, 1, H, .)."""
    return base[:, None] if table is None else TakeRows.apply(base, table)


def mlp(in_dim: int, out_dim: int) -> nn.Sequential:
    """Build an MLP with one hidden layer of width `HIDDEN`."""
    return nn.Sequential(nn.Linear(in_dim, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, out_dim))


class SSMax(Scaling):
    """Scalable softmax (arXiv 2501.19399): ``q <- s_h log(n) q`` for n keys.

    While scores are bounded, the largest weight of softmax falls toward 0 as n grows. Here a key with score z has a
    weight proportional to n^(s_h z) instead. The factor s_h of each head is learned, and starts at 1. The parameters
    are those of `Scaling`.
    """

    def __init__(self, num_heads: int, head_dim: int, settings: Any) -> None:
        super().__init__(num_heads, head_dim, settings)
        self.scales = nn.Parameter(torch.ones(num_heads))

    def growth(self, log_n: Tensor) -> Tensor:
        """See `Scaling`."""
        return (self.scales * log_n[:, None])[..., None]


class SSMaxMLP(Scaling):
    """Scalable softmax whose growth is learned: ``q <- MLP(log n) q`` for n keys, a rule of the `tabicl` package.

    Parameters
    ----------
    num_heads, head_dim, settings
        As for `Scaling`.
    elementwise : bool, default False
        Whether the MLP has an output for each element of a head, otherwise one for each head.
    """

    def __init__(self, num_heads: int, head_dim: int, settings: Any, elementwise: bool = False) -> None:
        super().__init__(num_heads, head_dim, settings)
        self.mlp = mlp(1, num_heads * (head_dim if elementwise else 1))

    def growth(self, log_n: Tensor) -> Tensor:
        """See `Scaling`."""
        return self.mlp(log_n[:, None]).unflatten(-1, (self.num_heads, -1))


class QASSMax(Scaling):
    """Query-aware scalable softmax (TabICLv2, arXiv 2602.11139, section 3): a learned growth times a gate of the query.

    ``q <- q * MLP_base(log n) * (1 + tanh(MLP_gate(q)))`` for n keys. The gate lies in (0, 2), and starts at 1. All
    heads share MLP_gate, while MLP_base has outputs for each head. Both have a hidden layer of 64 and GELU.

    Parameters
    ----------
    num_heads, head_dim, settings
        As for `Scaling`.
    elementwise : bool, default False
        Whether both have a value for each element of a head, otherwise one for each head.
    """

    def __init__(self, num_heads: int, head_dim: int, settings: Any, elementwise: bool = False) -> None:
        super().__init__(num_heads, head_dim, settings)
        self.triton = False  # whether CUDA uses a Triton kernel, see `trainer.attention`
        width = head_dim if elementwise else 1
        self.base_mlp = mlp(1, num_heads * width)
        self.query_mlp = mlp(head_dim, width)
        for parameter in self.query_mlp[-1].parameters():
            nn.init.zeros_(parameter)  # the gate starts at 1

    def growth(self, log_n: Tensor) -> Tensor:
        """See `Scaling`."""
        return self.base_mlp(log_n[:, None]).unflatten(-1, (self.num_heads, -1))

    def scale(self, q: Tensor, base: Tensor, table: Tensor | None) -> Tensor:
        """See `Scaling`."""
        # The kernel takes queries of rows; inducing points are shared by all columns, and few.
        if self.triton and q.is_cuda and table is not None:
            from tabicl_train.model.triton_scaling import scale_queries  # needs Triton

            weights = list(self.query_mlp.parameters())  # weight and bias of both linear layers
            scaled, moments = scale_queries(q, base, table.int(), *weights)
            self.note(moments, q.numel() // q.shape[-1] * len(weights[-1]))
            return scaled
        wide = q.float()
        gate = 1 + torch.tanh(self.query_mlp(wide))  # (Q, H, 1 or head_dim)
        if self.gate_sums is not None:
            kept = gate.detach()
            self.note(torch.stack([kept.sum(), kept.square().sum()]), kept.numel())
        return (wide * per_query(base, table) * gate).to(q.dtype)

    def note(self, moments: Tensor, gates: int) -> None:
        """Add the means of a forward pass to gate_sums; moments (2,) are the sum of its gates and of their squares."""
        if self.gate_sums is not None:
            self.gate_sums.add_(torch.cat([moments / gates, moments.new_ones(1)]))


class SSA(nn.Module):
    """Scaled signed averaging (arXiv 2508.14685): weights of keys are powers of scores, not exponentials.

    With z = q k / sqrt(d), the weight of a key is proportional to (1 + b|z|)^(sgn(z) p), so the logits of the softmax
    are p sgn(z) log(1 + b|z|): the weights of large scores differ by a power of their ratio, where softmax takes the
    exponential of their difference.

    Each head has a factor b > 0, which is applied here, to the queries, and an exponent p > 1, which averaging.py
    applies. b starts at 1, as plotted in the paper: near z = 0 the logits are then p z, about those of softmax.

    Parameters
    ----------
    num_heads, head_dim, settings
        As for `Scaling`; the settings' `ssa_exponent` is p, or its first value.
    trainable : bool, default False
        Whether p is learned.
    """

    def __init__(self, num_heads: int, head_dim: int, settings: Any, trainable: bool = False) -> None:
        super().__init__()
        self.num_heads, self.exponent = num_heads, settings.ssa_exponent
        self.gate_sums: Tensor | None = None  # as in Scaling, but this rule has no gate
        # Logarithms are learned, so that b stays above 0 and p above 1.
        self.log_b = nn.Parameter(torch.zeros(num_heads))
        excess = math.log(self.exponent - 1)
        self.log_excess = nn.Parameter(torch.full((num_heads,), excess)) if trainable else None

    def forward(self, q: Tensor, log_n: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        """Multiply queries by b, in float32 even under autocast.

        Parameters
        ----------
        q : Tensor
            Queries, (Q, H, head_dim).
        log_n : Tensor, optional
            (B,), which this rule does not need.
        table : Tensor, optional
            The table of each query, (Q,). Without it, all tables share the queries.

        Returns
        -------
        Tensor
            In the dtype of q, (Q, H, head_dim), or (1, Q, H, head_dim) if the tables share the queries.
        """
        scaled = (q.float() * self.log_b.exp()[:, None]).to(q.dtype)
        return scaled[None] if table is None else scaled

    def exponents(self) -> Tensor:
        """Return p of each head, float32 (H,)."""
        if self.log_excess is None:
            return torch.full_like(self.log_b, self.exponent, requires_grad=False)
        return 1 + self.log_excess.exp()

    @torch.no_grad()
    def multipliers(self, n: int) -> Tensor:
        """Return b, the factor of the queries whatever the number of keys n, float32 (H, 1)."""
        return self.log_b.exp()[:, None]


@dataclass(frozen=True)
class Rule:
    """A scaling rule, with everything that depends on its name.

    Parameters
    ----------
    entry : callable
        Builds the module of a layer from its number of heads, the values of a head and the settings of the network: a
        `Scaling`, or an `SSA`, which replaces softmax. It may return None, which leaves queries as they are.
    public : str, optional
        The rule's name in the format of the `tabicl` package; None if it has no such rule.
    flops : callable
        FLOPs of matrix products for each query, from the width of the layer and its number of heads; those that depend
        on n alone are negligible.
    kept : callable
        Vectors of the layer's width that are kept for the backward pass of each query, from the same two numbers.
    options : tuple of str
        Settings that have an effect under this rule, of those in `OPTIONS`.
    dropout : bool
        Whether it supports dropout of attention weights.
    causal : bool
        Whether it supports a number of keys that differs from query to query, as where a token attends to those
        before it.
    """

    entry: Callable[[int, int, Any], Scaling | SSA | None]
    public: str | None = None
    flops: Callable[[int, int], float] = lambda width, heads: 0.0
    kept: Callable[[int, int], float] = lambda width, heads: 1 + heads / width
    options: tuple[str, ...] = ()
    dropout: bool = True
    causal: bool = False

    @property
    def averages(self) -> bool:
        """Whether signed averaging replaces softmax."""
        function = self.entry.func if isinstance(self.entry, partial) else self.entry
        return isinstance(function, type) and issubclass(function, SSA)


def gate_flops(width: int, heads: int, elementwise: bool = False) -> float:
    """Count the FLOPs of a gate's MLP for all heads of a query, 2 per multiply-add."""
    return 2 * heads * HIDDEN * (width + (width if elementwise else heads)) / heads


def gate_kept(width: int, heads: int, elementwise: bool = False) -> float:
    """Count the scaled query, its factor, and for the gate its input, its value, tanh and hidden layer."""
    return 2 + 3 * (1.0 if elementwise else heads / width) + 2 * HIDDEN * heads / width


_BOUND, _EXPONENT = ("scaling_bound",), ("ssa_exponent",)
# The options that only some rules have: whether a value is valid, and what it must be.
OPTIONS: dict[str, tuple[Callable[[float], bool], str]] = {
    "scaling_bound": (lambda bound: bound > 0, "above 0"),
    "ssa_exponent": (lambda exponent: 1 < exponent < math.inf, "above 1"),
}


def unscaled(num_heads: int, head_dim: int, settings: Any) -> None:
    """Leave queries as they are."""


register.scaling("none", unscaled, public="none", kept=lambda width, heads: 0.0, causal=True)
register.scaling("ssmax", SSMax, public="ssmax", options=_BOUND)
register.scaling("ssmax_mlp", SSMaxMLP, public="ssmax-mlp", options=_BOUND)
register.scaling(
    "ssmax_mlp_elementwise",
    partial(SSMaxMLP, elementwise=True),
    public="ssmax-mlp-elementwise",
    kept=lambda width, heads: 2.0,
    options=_BOUND,
)
register.scaling("qassmax", QASSMax, public="qassmax-mlp", flops=gate_flops, kept=gate_kept, options=_BOUND)
register.scaling(
    "qassmax_elementwise",
    partial(QASSMax, elementwise=True),
    public="qassmax-mlp-elementwise",
    flops=partial(gate_flops, elementwise=True),
    kept=partial(gate_kept, elementwise=True),
    options=_BOUND,
)
# Signed averaging keeps the scaled queries.
register.scaling("ssa", SSA, kept=lambda width, heads: 1.0, options=_EXPONENT, dropout=False, causal=True)
register.scaling(
    "ssa_trainable",
    partial(SSA, trainable=True),
    kept=lambda width, heads: 1.0,
    options=_EXPONENT,
    dropout=False,
    causal=True,
)
