"""Attention and the transformer block of all three stages.

Tokens of many sequences (columns, rows or tables) lie one after another; only attention knows where a sequence ends.
Q queries, K keys of all sequences, E width, H heads.
Parameter names are those of the released files, so that weights load in both directions.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tabicl_train.model.kernels.launches import CUDA_GRID, FLASH_BACKWARD, attend_in_chunks
from tabicl_train.model.kernels.linear import Linear, linear
from tabicl_train.model.kernels.row_attention import attend_rows, attend_rows_by_run
from tabicl_train.model.kernels.run_attention import attend_runs
from tabicl_train.model.kernels.ssa_attention import attend_flex, attend_plain, attend_ssa_runs, fits_flex
from tabicl_train.model.layout import Spans
from tabicl_train.model.scaling import SSA, Scaling


def attend(q: Tensor, kv: Tensor, spans: Spans, dropout: float = 0.0) -> Tensor:
    """Softmax attention within the sequences of `spans`: kv (keys, 2, H, head_dim) -> (queries, H, head_dim).

    q: (queries, H, head_dim), or (P, L, H, head_dim) if all sequences have the same L queries, up to a factor that
        depends on the table; P is the number of tables, or 1 without such a factor
    """
    if q.is_cuda and fits_one_launch(spans, *q.shape[-2:]):
        return attend_at_once(q, kv, spans, dropout)
    if q.is_cuda or dropout or isinstance(spans.runs, list):
        return attend_by_run(q, kv, listed(spans.runs), partial(attend_in_chunks, dropout=dropout))
    return attend_runs(q, kv, spans.runs, spans.queries)


def attend_ssa(q: Tensor, kv: Tensor, spans: Spans, exponents: Tensor) -> Tensor:
    """`attend` with signed averaging, see scaling.SSA; q are the queries times b, exponents (H,) the p of each head."""
    if isinstance(spans.runs, list):
        return attend_by_run(q, kv, spans.runs, partial(attend_plain, exponents=exponents))
    if fits_flex(q, exponents):
        return attend_by_run(q, kv, spans.runs.tolist(), partial(attend_flex, exponents=exponents))
    return attend_ssa_runs(q, kv, exponents, spans.runs, spans.queries)


def listed(runs: Tensor | list[list[int]]) -> list[list[int]]:
    return runs if isinstance(runs, list) else runs.tolist()


def fits_one_launch(spans: Spans, num_heads: int, head_dim: int) -> bool:
    """Whether CUDA kernels for sequences of various lengths can process all of them, forward and backward."""
    sequences = len(spans.query_ends) - 1
    queries = spans.queries + 128 * sequences  # the backward pass rounds each sequence up to 128
    elements = queries * num_heads * max(head_dim, 32)
    return sequences <= CUDA_GRID and elements < FLASH_BACKWARD and head_dim % 8 == 0


def attend_at_once(q: Tensor, kv: Tensor, spans: Spans, dropout: float) -> Tensor:
    """`attend` on CUDA as one launch of a kernel for sequences of various lengths."""
    if q.dim() == 4:
        sequences = len(spans.query_ends) - 1
        assert spans.table is not None  # as the sequences share their queries
        q = q.expand(sequences, -1, -1, -1) if len(q) == 1 else q.index_select(0, spans.table)
        q = q.flatten(0, 1)
    if spans.uses > 1:
        kv = kv.repeat(spans.uses, 1, 1, 1)
    k, v = kv.unbind(1)
    ends = spans.query_ends, spans.key_ends, spans.most_queries, spans.most_keys
    if q.dtype == torch.bfloat16:  # where there is bf16, there is flash attention
        return torch.ops.aten._flash_attention_forward(q, k, v, *ends, dropout, False, False)[0]
    batches = (x[None] for x in (q, k, v))  # a batch of one, which the kernel divides at the ends
    keeps = torch.is_grad_enabled()
    return torch.ops.aten._efficient_attention_forward(*batches, None, *ends, dropout, 0, keeps)[0][0]


def attend_by_run(
    q: Tensor, kv: Tensor, runs: list[list[int]], attention: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """`attend` as one call of `attention` for each run of equal sequences.

    attention: of queries (count, H, L, head_dim), keys and values (count, H, K, head_dim)
    """
    outs, queries = [], ()
    if q.dim() == 3:
        queries = q.split([count * length for count, length, *_ in runs])
    for number, (count, length, keys, first, table) in enumerate(runs):
        if queries:
            some = queries[number].unflatten(0, (count, length))
        else:
            some = q[table if len(q) > 1 else 0].expand(count, -1, -1, -1)
        k, v = kv[first : first + count * keys].unflatten(0, (count, keys)).permute(2, 0, 3, 1, 4)  # (count, H, K, d)
        outs.append(attention(some.transpose(1, 2), k, v).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


class LayerNorm(nn.LayerNorm):
    """torch's, but under autocast in the dtype of its input, with sums in float32.

    Autocast would have it copy its input to float32 and write float32, which the next product copies back: 20 bytes a
    value instead of 4.
    """

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if not torch.is_autocast_enabled(device) or x.dtype == torch.float32:
            return super().forward(x)
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        with torch.autocast(device, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RowSpans(NamedTuple):
    """The sequences of the row stage, and the rotary embedding of their positions 0..T-1.

    runs, starts: see layout.Rows; runs are a list in a graph that is exported
    cos, sin: (most T, head_dim) float32; sin is negative for the first element of a pair
    interleaved: which elements are pairs, see Rotary
    """

    runs: Tensor | list[list[int]]
    starts: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool


def attend_in_rows(q: Tensor, kv: Tensor | None, spans: RowSpans, dropout: float) -> Tensor:
    """`attend_rows`, with dropout, and in a graph that is exported."""
    runs, starts, cos, sin, interleaved = spans
    if dropout or isinstance(runs, list):
        return attend_rows_by_run(q, kv, listed(runs), cos, sin, interleaved, dropout)
    return attend_rows(q, kv, runs, starts, cos, sin, interleaved)


class CausalSpans(NamedTuple):
    """Sequences whose tokens attend to themselves and to those before them; runs of equal ones: how many, tokens T."""

    runs: list[tuple[int, int]]


def attend_causally(qkv: Tensor, spans: CausalSpans, rule: SSA | None, dropout: float) -> Tensor:
    """Attention within the sequences of `spans`, softmax without a `rule`: qkv (tokens, 3, H, head_dim) ->
    (tokens, H, head_dim)."""
    outs = []
    q, k, v = qkv.unbind(1)
    parts = torch.stack([q if rule is None else rule(q)[0], k, v]).split([count * T for count, T in spans.runs], 1)
    for (count, T), part in zip(spans.runs, parts, strict=True):
        q, k, v = part.unflatten(1, (count, T)).transpose(2, 3).unbind()  # (count, H, T, head_dim)
        if rule is None:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            out = attend_plain(q, k, v, rule.exponents(), causal=True)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


class Rotary(nn.Module):
    """Rotary position embedding (arXiv 2104.09864), in both layouts of the rotated pairs."""

    def __init__(self, head_dim: int, base: float, interleaved: bool):
        super().__init__()
        self.interleaved = interleaved
        # constant, but a parameter, since released files contain it
        self.freqs = nn.Parameter(base ** -(torch.arange(0, head_dim, 2) / head_dim), requires_grad=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles of positions 0..length-1, (length, head_dim) each; see RowSpans."""
        angles = torch.arange(length, device=self.freqs.device)[:, None] * self.freqs
        cos, sin = angles.cos(), angles.sin()  # (length, head_dim/2)
        if self.interleaved:
            return cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
        return cos.repeat(1, 2), torch.cat([-sin, sin], -1)


class Attention(nn.Module):
    """Multi-head attention with a packed projection, optional scalable softmax and optional rotary embedding.

    With signed averaging, ssmax_layer is an SSA, and dropout of the weights is not possible.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        scaling: str,
        dropout: float,
        zero_init: bool,
        scaling_bound: float | None = None,
        fp32: bool = False,
        ssa_exponent: float = 1.5,
    ):
        super().__init__()
        self.dim, self.num_heads, self.dropout, self.fp32 = dim, num_heads, dropout, fp32
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = Linear(dim, dim)
        self.ssmax_layer: Scaling | SSA | None = None
        if scaling.startswith("ssa"):
            self.ssmax_layer = SSA(num_heads, ssa_exponent, scaling == "ssa_trainable")
        elif scaling != "none":
            self.ssmax_layer = Scaling(scaling, num_heads, dim // num_heads, scaling_bound)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)
        if zero_init:
            nn.init.zeros_(self.out_proj.weight)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None,
        spans: Spans | RowSpans | CausalSpans,
        log_n: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        """x (Q, E) attends to context (K, E), or to itself if there is none -> (Q, E).

        x may be (L, E), the queries that all sequences share -> (sequences * L, E).
        log_n: (B,), logarithm of the number of keys of each table; needed by a scaling rule
        table: (Q,), the table of each query, unless all sequences share their queries
        """
        if self.fp32 and torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self(x.float(), None if context is None else context.float(), spans, log_n, table)
        q, kv = self.project(x, context)
        dropout = self.dropout if self.training else 0.0
        if isinstance(spans, CausalSpans):
            assert not isinstance(self.ssmax_layer, Scaling)
            out = attend_causally(q, spans, self.ssmax_layer, dropout)
        elif isinstance(spans, RowSpans):
            out = attend_in_rows(q if kv is None else q.unsqueeze(1), kv, spans, dropout)
        else:
            assert kv is not None
            q = self.scale(q, log_n, table, spans)
            if isinstance(self.ssmax_layer, SSA):
                out = attend_ssa(q, kv, spans, self.ssmax_layer.exponents())
            else:
                out = attend(q, kv, spans, dropout)
        return self.out_proj(out.flatten(1))  # out (Q, H, head_dim)

    def project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Queries (Q, H, head_dim), not yet scaled, and keys and values (K, 2, H, head_dim) of `forward`'s x, context.

        Without a context, x's own are one tensor: (Q, 3, H, head_dim) and None.
        """
        heads = (self.num_heads, self.dim // self.num_heads)
        if context is None:
            return linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, *heads)), None
        (wq, wkv), (bq, bkv) = (p.split([self.dim, 2 * self.dim]) for p in (self.in_proj_weight, self.in_proj_bias))
        return linear(x, wq, bq).unflatten(-1, heads), linear(context, wkv, bkv).unflatten(-1, (2, *heads))

    def scale(self, q: Tensor, log_n: Tensor | None, table: Tensor | None, spans: Spans) -> Tensor:
        """The queries (Q, H, head_dim) of `project` as `attend` takes them: scaled, (B or 1, L, H, head_dim) if shared.

        log_n, table: as in `forward`
        """
        if self.ssmax_layer is not None:
            return self.ssmax_layer(q, log_n, table)
        return q[None] if spans.shares_queries else q


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual. Queries and keys share the first LayerNorm.

    With ff_factor=0 there is no feed-forward network.
    """

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
        ssa_exponent: float = 1.5,
    ):
        super().__init__()
        self.dropout = dropout
        rest = (scaling_bound, fp32_attention, ssa_exponent)
        self.attn = Attention(dim, num_heads, scaling, dropout, zero_init, *rest)
        self.ff_factor = ff_factor
        if ff_factor > 0:
            self.linear1 = Linear(dim, ff_factor * dim)
            self.linear2 = Linear(ff_factor * dim, dim)
        self.norm1 = LayerNorm(dim, bias=not bias_free_ln)
        if ff_factor > 0:
            self.norm2 = LayerNorm(dim, bias=not bias_free_ln)
        if zero_init:
            nn.init.zeros_(self.linear2.weight)
            nn.init.zeros_(self.linear2.bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | int | None,
        spans: Spans | RowSpans | CausalSpans,
        log_n: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        """x attends to context (K, E), or to its own first tokens if context is their number, or to itself.

        Shapes and other arguments as in Attention.
        """
        normed = self.norm1(x)
        if isinstance(context, Tensor):
            context = self.norm1(context)
        elif context is not None:
            context = normed[:context]
        attended = self._drop(self.attn(normed, context, spans, log_n, table))
        if len(attended) > len(x):  # all sequences share the queries
            attended = attended.unflatten(0, (-1, len(x)))  # (sequences, L, E)
        x = (x + attended).view(-1, x.shape[1])
        if self.ff_factor == 0:
            return x
        hidden = self._drop(F.gelu(self.linear1(self.norm2(x))))
        return x + self._drop(self.linear2(hidden))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


def run(block: nn.Module, *args, recompute: bool, **kwargs) -> Tensor:
    """Call a block; with `recompute` its activations are not kept but recomputed in the backward pass."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(block, *args, use_reentrant=False, **kwargs)
    return block(*args, **kwargs)
