"""Attention and the transformer block of all three stages.

B batch (tables, columns or rows), L queries, K keys, E width, H heads.
Parameter names are those of the released files, so that weights load in both directions.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tabicl_train.model.scaling import Scaling

CUDA_GRID = 65_535  # launch limit of a kernel's batch dimension; row attention reaches 64 tables * 1,024 rows = 65,536
FLASH_BACKWARD = 2**31  # flash attention's backward pass counts the elements of all queries of a batch in 32 bits


def batch_limit(num_heads: int, num_queries: int, head_dim: int) -> int:
    """The largest batch that CUDA attention kernels can process at once, forward and backward."""
    queries = -(-num_queries // 128) * 128
    return max(1, min(CUDA_GRID, FLASH_BACKWARD // (num_heads * queries * max(head_dim, 32))))


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, limit: int | None = None) -> Tensor:
    """Softmax attention, q (B, H, L, head_dim), k and v (B, H, K, head_dim) -> (B, H, L, head_dim).

    limit: the largest batch of a kernel launch; by default `batch_limit` on CUDA, and none elsewhere
    """
    if limit is None:
        limit = batch_limit(q.shape[1], q.shape[2], q.shape[3]) if q.is_cuda else q.shape[0]
    if q.shape[0] <= limit:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    chunks = zip(q.split(limit), k.split(limit), v.split(limit), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*chunk, dropout_p=dropout) for chunk in chunks])


class Rotation(NamedTuple):
    """The rotary embedding of positions 0..L-1."""

    cos: Tensor  # (L, head_dim)
    sin: Tensor  # (L, head_dim), negative for the first element of a pair
    interleaved: bool

    def turn(self, x: Tensor) -> Tensor:
        """x (B, L, ..., head_dim), its pairs rotated by the angles of positions 0..L-1."""
        half = x.shape[-1] // 2
        partner = x.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if self.interleaved else x.roll(half, -1)
        shape = (x.shape[1],) + (1,) * (x.dim() - 3) + (x.shape[-1],)
        cos, sin = (table[: x.shape[1]].view(shape).to(x.dtype) for table in (self.cos, self.sin))
        return torch.addcmul(x * cos, partner, sin)


class Rotary(nn.Module):
    """Rotary position embedding (arXiv 2104.09864), in both layouts of the rotated pairs."""

    def __init__(self, head_dim: int, base: float, interleaved: bool):
        super().__init__()
        self.interleaved = interleaved
        # constant, but a parameter, since released files contain it
        self.freqs = nn.Parameter(base ** -(torch.arange(0, head_dim, 2) / head_dim), requires_grad=False)

    def forward(self, length: int) -> Rotation:
        """The rotation of positions 0..length-1."""
        angles = torch.arange(length, device=self.freqs.device)[:, None] * self.freqs
        cos, sin = angles.cos(), angles.sin()  # (length, head_dim/2)
        if self.interleaved:
            cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
        else:
            cos, sin = cos.repeat(1, 2), torch.cat([-sin, sin], -1)
        return Rotation(cos, sin, self.interleaved)


class Attention(nn.Module):
    """Multi-head attention with a packed projection, optional scalable softmax and optional rotary embedding."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        scaling: str,
        dropout: float,
        zero_init: bool,
        scaling_bound: float | None = None,
        fp32: bool = False,
    ):
        super().__init__()
        self.dim, self.num_heads, self.dropout, self.fp32 = dim, num_heads, dropout, fp32
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        self.ssmax_layer = None if scaling == "none" else Scaling(scaling, num_heads, dim // num_heads, scaling_bound)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)
        if zero_init:
            nn.init.zeros_(self.out_proj.weight)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        log_n: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """x (B, L, E) attends to context (B, K, E), or to itself if there is none -> (B, L, E).

        x may have batch 1: queries that the whole batch shares are projected and rescaled once.
        """
        if self.fp32 and torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self(x.float(), None if context is None else context.float(), log_n, rotation)
        heads = (self.num_heads, self.dim // self.num_heads)
        if context is None:
            qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, *heads))
            qk, v = qkv.split([2, 1], dim=2)  # (B, L, 2, H, head_dim), (B, L, 1, H, head_dim)
            if rotation is not None:
                qk = rotation.turn(qk)
            (q, k), v = qk.unbind(2), v.squeeze(2)
        else:
            (wq, wkv), (bq, bkv) = (p.split([self.dim, 2 * self.dim]) for p in (self.in_proj_weight, self.in_proj_bias))
            q = F.linear(x.contiguous(), wq, bq).unflatten(-1, heads)  # (B or 1, L, H, head_dim)
            # contiguous: on a slice of rows linear() would copy anyway, and add its bias in a separate pass
            k, v = F.linear(context.contiguous(), wkv, bkv).unflatten(-1, (2, *heads)).unbind(2)  # (B, K, H, head_dim)
            if rotation is not None:
                q, k = rotation.turn(q), rotation.turn(k)
        if self.ssmax_layer is not None:
            q = self.ssmax_layer(q, log_n)
        q = q.expand(k.shape[0], -1, -1, -1)
        out = attend(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.dropout if self.training else 0.0
        )  # (B, H, L, head_dim)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual. Queries and keys share the first LayerNorm."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        ff_factor: int,
        scaling: str,
        dropout: float,
        bias_free_ln: bool,
        zero_init: bool,
        scaling_bound: float | None = None,
        fp32_attention: bool = False,
    ):
        super().__init__()
        self.dropout = dropout
        self.attn = Attention(dim, num_heads, scaling, dropout, zero_init, scaling_bound, fp32_attention)
        self.linear1 = nn.Linear(dim, ff_factor * dim)
        self.linear2 = nn.Linear(ff_factor * dim, dim)
        self.norm1 = nn.LayerNorm(dim, bias=not bias_free_ln)
        self.norm2 = nn.LayerNorm(dim, bias=not bias_free_ln)
        if zero_init:
            nn.init.zeros_(self.linear2.weight)
            nn.init.zeros_(self.linear2.bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        num_keys: int | None = None,
        log_n: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """x (B, L, E) attends to context (B, K, E), or to its own first num_keys tokens, or to itself -> (B, L, E).

        log_n: (1,), logarithm of the number of keys; needed by blocks with a scaling rule
        """
        normed = self.norm1(x)
        if num_keys is not None:
            context = normed[:, :num_keys]
        elif context is not None:
            context = self.norm1(context)
        x = x + self._drop(self.attn(normed, context, log_n, rotation))
        hidden = self._drop(F.gelu(self.linear1(self.norm2(x))))
        return x + self._drop(self.linear2(hidden))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


def run(block: nn.Module, *args, recompute: bool, **kwargs) -> Tensor:
    """Call a block; with `recompute` its activations are not kept but recomputed in the backward pass."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(block, *args, use_reentrant=False, **kwargs)
    return block(*args, **kwargs)
