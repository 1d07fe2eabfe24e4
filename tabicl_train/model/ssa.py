"""Scaled signed averaging (SSA, arXiv 2508.14685): attention whose weights are powers of scores, not exponentials.

With z = q k / sqrt(d), the weight of a key is proportional to (1 + b|z|)^(sgn(z) p), so that the logits of the softmax
are p sgn(z) log(1 + b|z|): a large score outweighs the others by the power of its ratio to them, where softmax takes
the exponential of its difference. H heads, Q queries.
"""

import math

import torch
from torch import Tensor, nn


class SSA(nn.Module):
    """The factor b > 0 and the exponent p > 1 of each head; b is applied here, to the queries, and p in the kernels.

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
