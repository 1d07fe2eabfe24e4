"""Scalable softmax: queries are rescaled by the number of keys, so that attention does not fade in long contexts.

The six rules of TabICLv2 (arXiv 2602.11139). For head h and element i of a query q, with n keys:

    none                              q
    ssmax                             q * s_h * log n                                        (arXiv 2501.19399)
    ssmax_mlp, _elementwise           q * MLP(log n), one value per head, or one per element
    qassmax, _elementwise             q * MLP_base(log n) * (1 + tanh(MLP_gate(q)))

base(n) is the factor of q that depends only on n. With a bound b it becomes b * tanh(base(n) / b): equal to base(n)
where that is small, never above b, and with a gradient everywhere. In published low-precision runs it grew without
limit.

SSA, which replaces the exponentials of the softmax, is here as well, since it too rescales the queries.

B tables, H heads, Q queries.
"""

import math

import torch
from torch import Tensor, nn

from tabicl_train.model.config import SCALING_HIDDEN
from tabicl_train.model.kernels import HAS_TRITON
from tabicl_train.model.kernels.linear import Linear
from tabicl_train.model.kernels.query_scaling import scale_queries


def _mlp(in_dim: int, out_dim: int) -> nn.Sequential:
    return nn.Sequential(Linear(in_dim, SCALING_HIDDEN), nn.GELU(), Linear(SCALING_HIDDEN, out_dim))


class Scaling(nn.Module):
    """One of the rules above except `none`; the multiplier of a query is base(n) * gate(query).

    gate_sums: None, or a float tensor (3,) to which each forward pass adds the gate's mean over its queries, the mean
        of its square, and 1. A tensor rather than a hook, since hooks do not fire in compiled blocks
    """

    def __init__(self, rule: str, num_heads: int, head_dim: int, bound: float | None = None):
        super().__init__()
        self.num_heads, self.bound = num_heads, bound
        self.gate_sums: Tensor | None = None
        width = head_dim if rule.endswith("_elementwise") else 1
        self.query_mlp = None
        if rule == "ssmax":
            self.scales = nn.Parameter(torch.ones(num_heads))
        elif rule.startswith("ssmax_mlp"):
            self.mlp = _mlp(1, num_heads * width)
        else:
            self.base_mlp = _mlp(1, num_heads * width)
            self.query_mlp = _mlp(head_dim, width)
            for parameter in self.query_mlp[-1].parameters():
                nn.init.zeros_(parameter)  # the gate starts at 1

    def forward(self, q: Tensor, log_n: Tensor, table: Tensor | None = None) -> Tensor:
        """q (Q, H, head_dim), log_n (B,) float32 -> rescaled q, in the dtype of q.

        table: (Q,) int64, the table of each query; without it, all tables share the queries -> (B, Q, H, head_dim)

        It is computed in float32 even under autocast: in fp16 the rule gave NaN, in bf16 training collapsed.
        """
        with torch.autocast(q.device.type, enabled=False):
            base = self.base(log_n)  # (B, H, 1 or head_dim)
            if self.query_mlp is not None and table is not None and q.is_cuda and HAS_TRITON:
                weights = list(self.query_mlp.parameters())  # weight and bias of the first linear layer, of the second
                scaled, moments = scale_queries(q, base, table, *weights)
                self.note(moments, q.numel() // q.shape[-1] * len(weights[-1]))
                return scaled
            wide = q.float()
            scaled = wide * (base[:, None] if table is None else base.index_select(0, table))
            if self.query_mlp is not None:
                gate = 1 + torch.tanh(self.query_mlp(wide))
                scaled = scaled * gate
                if self.gate_sums is not None:
                    gate = gate.detach()
                    self.note(torch.stack([gate.sum(), gate.square().sum()]), gate.numel())
            return scaled.to(q.dtype)

    def note(self, moments: Tensor, gates: int) -> None:
        """Add the means of a forward pass to gate_sums; moments (2,) are the sum of its gates and of their squares."""
        if self.gate_sums is not None:
            self.gate_sums = self.gate_sums + torch.cat([moments / gates, moments.new_ones(1)])

    def base(self, log_n: Tensor) -> Tensor:
        """The part of the multiplier that depends only on the numbers of keys: log_n (B,) -> (B, H, 1 or head_dim)."""
        if hasattr(self, "scales"):
            base = (self.scales * log_n[:, None])[..., None]
        else:
            mlp = self.mlp if self.query_mlp is None else self.base_mlp
            base = mlp(log_n[:, None]).unflatten(-1, (self.num_heads, -1))
        return base if self.bound is None else self.bound * torch.tanh(base / self.bound)

    @torch.no_grad()
    def multipliers(self, n: int) -> Tensor:
        """Base multipliers for n keys, float32, (H, 1) or (H, head_dim).

        Their growth is an early warning: in the released model the maximum of the first in-context block is about 12 at
        n = 512.
        """
        weight = next(self.parameters())
        with torch.autocast(weight.device.type, enabled=False):
            return self.base(weight.new_full((1,), math.log(max(n, 1))))[0]


class SSA(nn.Module):
    """Scaled signed averaging (arXiv 2508.14685): weights of keys are powers of scores, not exponentials.

    With z = q k / sqrt(d), the weight of a key is proportional to (1 + b|z|)^(sgn(z) p), so that the logits of the
    softmax are p sgn(z) log(1 + b|z|): a large score outweighs the others by the power of its ratio to them, where
    softmax takes the exponential of its difference.

    The factor b > 0 and the exponent p > 1 of each head; b is applied here, to the queries, and p in the kernels.

    b starts at 1, as plotted in the paper: near z = 0 the logits are then p z, about those of softmax.
    gate_sums: as in Scaling, but this rule has no gate
    """

    def __init__(self, num_heads: int, exponent: float, trainable: bool):
        super().__init__()
        self.num_heads, self.exponent = num_heads, exponent
        self.gate_sums: Tensor | None = None
        self.log_b = nn.Parameter(torch.zeros(num_heads))
        self.log_excess = nn.Parameter(torch.full((num_heads,), math.log(exponent - 1))) if trainable else None

    def forward(self, q: Tensor, log_n: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        """q (Q, H, head_dim) times b, in float32 and back to the dtype of q; (1, Q, H, head_dim) without a table,
        since all sequences then share the queries. The other arguments are those of Scaling; log_n has no effect."""
        scaled = (q.float() * self.log_b.exp()[:, None]).to(q.dtype)
        return scaled[None] if table is None else scaled

    def exponents(self) -> Tensor:
        """p of each head, float32 (H,)."""
        if self.log_excess is None:
            return torch.full_like(self.log_b, self.exponent, requires_grad=False)
        return 1 + self.log_excess.exp()

    @torch.no_grad()
    def multipliers(self, n: int) -> Tensor:
        """b, the factor of the queries whatever the number of keys n, float32 (H, 1)."""
        return self.log_b.exp()[:, None]
