"""Attention and the transformer block of all stages.

Tokens of many sequences (columns, rows or tables) follow one another; only attention knows where a sequence ends.
Q queries, K keys of all sequences, E width, H heads, d values of a head.
Parameters have the names of the released files, so that weights load in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tabicl_train.doors import register
from tabicl_train.model.averaging import attend_averaging, attend_plain
from tabicl_train.model.pack import EqualSequences, Spans, TakeRows
from tabicl_train.model.scaling import SSA, Scaling

CUDA_GRID = 65_535  # largest batch of a kernel's launch, which is the number of sequences
FLASH_BACKWARD = 2**31  # flash attention's backward pass indexes the elements of all queries by 32 bits
# On a CPU, products are up to 1.6 times as fast as torch's kernel between these numbers of scores.
MIN_SCORES = 2**8  # of a head in a sequence; more than that
MAX_SCORES = 2**20  # of a run of equal sequences
# Where the kernels of triton_attention.py run; tests add a CPU, on which Triton interprets them.
KERNEL_DEVICES = ["cuda"]
# With fewer keys (5, 6, 7, 9, 10 or 11), the bits of MKL's batched product depend on the position of a query.
MIN_KEYS = 12


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans, dropout: float = 0.0) -> Tensor:
    """Compute softmax attention, softmax(q k^T / sqrt(d)) v, within each sequence of a pack.

    On CUDA this is one launch, or a few, of PyTorch's kernels for sequences of various lengths. Elsewhere each run of
    equal sequences is one call of PyTorch's attention, or two products.

    Parameters
    ----------
    q : Tensor
        Queries, (Q, H, d); or (P, L, H, d) if all sequences share their L queries, with P = B if a scaling rule gave
        each table its own factor, and P = 1 otherwise.
    k, v : Tensor
        Keys and values, (K, H, d).
    spans : Spans
        Where sequences begin and end.
    dropout : float, default 0
        Probability of dropping a weight of attention.

    Returns
    -------
    Tensor
        (Q, H, d).
    """
    heads, head_dim = q.shape[-2:]
    if q.is_cuda and not dropout and head_dim % 8 == 0:
        if fits_one_launch(spans, heads, head_dim):
            return attend_at_once(q, k, v, spans)
        return attend_in_launches(q, k, v, spans, launch)
    # In a graph that is exported, sizes are symbols, on which control flow must not depend.
    exported = isinstance(spans.runs, list)
    core = F.scaled_dot_product_attention if exported else partial(attend_equal, dropout=dropout)
    return attend_by_run(q, k, v, spans, core)


def fits_one_launch(spans: Spans, num_heads: int, head_dim: int) -> bool:
    """Whether CUDA kernels for sequences of various lengths can process all of them, forward and backward."""
    sequences = len(spans.query_ends) - 1
    # The backward pass rounds each sequence up to 128 queries, and a head up to 32 values.
    queries = spans.queries + 128 * sequences
    elements = queries * num_heads * max(head_dim, 32)
    return sequences <= CUDA_GRID and elements < FLASH_BACKWARD


def attend_at_once(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """`attend` on CUDA as one launch of a kernel for sequences of various lengths."""
    q, k, v = repeated(q, k, v, spans)
    return launch(q, k, v, spans.query_ends, spans.key_ends, spans.most_queries, spans.most_keys)


def repeated(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
    """Give each sequence queries, keys and values of its own, one after the other."""
    if q.dim() == 4:
        sequences = len(spans.query_ends) - 1
        # A layout whose sequences share queries has the table of each sequence.
        assert spans.table is not None
        q_of_sequences = q.expand(sequences, -1, -1, -1) if len(q) == 1 else TakeRows.apply(q, spans.table)
        q = q_of_sequences.flatten(0, 1)
    if spans.uses > 1:
        k = k.repeat(spans.uses, 1, 1)
        v = v.repeat(spans.uses, 1, 1)
    return q, k, v


def attend_in_launches(q: Tensor, k: Tensor, v: Tensor, spans: Spans, attention: Callable[..., Tensor]) -> Tensor:
    """Compute `attend` on CUDA in a few launches of `attention`, for more sequences or elements than one can have.

    An example that needs it is a table of stage 3 of TabICLv2: 60,000 rows with 12 features or more.
    """
    refuse_capture()
    heads, head_dim = q.shape[-2:]
    q, k, v = repeated(q, k, v, spans)
    outs = []
    sequence = query = key = 0  # the first ones of a launch
    for sequences, queries, keys in launches(spans, heads, head_dim):
        # A sequence has a start and an end; those of a launch count from its first sequence.
        ends = slice(sequence, sequence + sequences + 1)
        out = attention(
            q[query : query + queries],
            k[key : key + keys],
            v[key : key + keys],
            spans.query_ends[ends] - spans.query_ends[sequence],
            spans.key_ends[ends] - spans.key_ends[sequence],
            spans.most_queries,
            spans.most_keys,
        )
        outs.append(out)
        sequence += sequences
        query += queries
        key += keys
    return torch.cat(outs)


def refuse_capture() -> None:
    """Raise RuntimeError while a CUDA graph is captured, whose replays would attend within the sequences of now."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention takes several launches, whose sequences differ in number from step to step")


def launches(spans: Spans, num_heads: int, head_dim: int) -> list[tuple[int, int, int]]:
    """Divide sequences, in order, into as few launches as their limits allow: sequences, queries and keys of each."""
    assert isinstance(spans.runs, Tensor)  # not exported
    most_queries = (FLASH_BACKWARD - 1) // (num_heads * max(head_dim, 32))  # of a launch
    complete: list[tuple[int, int, int]] = []
    sequences = queries = keys = 0  # of the launch that is being filled
    for left, queries_each, keys_each, *_ in spans.runs.tolist():
        # Each sequence is rounded up by at most 128 queries.
        padded = queries_each + 128
        while left > 0:
            room = min(CUDA_GRID - sequences, (most_queries - queries - 128 * sequences) // padded)
            if room <= 0:
                # The launch is full. A sequence that exceeds the limit even by itself has a launch of its own.
                if sequences > 0:
                    complete.append((sequences, queries, keys))
                sequences = queries = keys = 0
                room = max(1, min(CUDA_GRID, most_queries // padded))
            added = min(left, room)
            sequences += added
            queries += added * queries_each
            keys += added * keys_each
            left -= added
    return [*complete, (sequences, queries, keys)]


def launch(
    q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, most_queries: int, most_keys: int
) -> Tensor:
    """Call PyTorch's kernel for sequences of various lengths: q (Q, H, d), k and v (K, H, d) -> (Q, H, d)."""
    # These operators, not torch.nn.attention.varlen: from torch 2.14 on it chooses cuDNN, whatever `enable_cudnn_sdp`
    # says, and cuDNN's backward pass gave NaN in bf16 (pytorch issues 196678 and 187770).
    ends = query_ends, key_ends, most_queries, most_keys
    # A GPU with bf16 has flash attention, too.
    if q.dtype == torch.bfloat16:
        return torch.ops.aten._flash_attention_forward(q, k, v, *ends, 0.0, False, False)[0]
    # The other kernel takes batches: here a batch of one, which it divides at the ends.
    batches = (x[None] for x in (q, k, v))
    return torch.ops.aten._efficient_attention_forward(*batches, None, *ends, 0.0, 0, torch.is_grad_enabled())[0][0]


def attend_by_run(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, attention: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Compute `attend` with one call of `attention` for each run of equal sequences.

    Parameters
    ----------
    q : Tensor
        (Q, H, d), the queries of all sequences one after the other, or (P, L, H, d) if all sequences share L queries:
        P is the number of tables if a factor of the table belongs to them, else 1.
    k, v : Tensor
        (K, H, d), the keys and values of all sequences one after the other.
    spans : Spans
        The runs.
    attention : callable
        From q (count, H, L, d), k and v (count, H, keys, d) to (count, H, L, d), for `count` equal sequences.

    Returns
    -------
    Tensor
        (Q, H, d), in the order of the sequences.

    Raises
    ------
    RuntimeError
        While a CUDA graph is captured.
    """
    refuse_capture()
    numbers = spans.runs if isinstance(spans.runs, list) else spans.runs.tolist()
    runs = [EqualSequences(*numbers_of_run) for numbers_of_run in numbers]

    # Keys and values of each run. If labeled and query rows use the same ones, the second half of the runs repeats the
    # keys of the first half, which are split once.
    distinct = len(runs) // spans.uses
    num_keys = [run.number * run.keys for run in runs[:distinct]]
    keys_of_runs = []
    values_of_runs = []
    for run, k_of_run, v_of_run in zip(runs, k.split(num_keys), v.split(num_keys), strict=False):
        sizes = (run.number, run.keys)
        keys_of_runs.append(k_of_run.unflatten(0, sizes).transpose(1, 2))  # (count, H, keys, d)
        values_of_runs.append(v_of_run.unflatten(0, sizes).transpose(1, 2))

    shares_queries = q.dim() == 4
    if not shares_queries:
        queries_of_runs = q.split([run.number * run.queries for run in runs])  # (count * L, H, d) each

    outs = []
    for i, run in enumerate(runs):
        if shares_queries:
            table = run.table if len(q) > 1 else 0
            q_of_run = q[table].expand(run.number, -1, -1, -1)
        else:
            q_of_run = queries_of_runs[i].unflatten(0, (run.number, run.queries))  # (count, L, H, d)
        out = attention(q_of_run.transpose(1, 2), keys_of_runs[i % distinct], values_of_runs[i % distinct])
        outs.append(out.transpose(1, 2).flatten(0, 1))  # (count * L, H, d)
    return torch.cat(outs)


def attend_equal(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Softmax attention of equal sequences, (count, H, ., d)."""
    count, H, L, d = q.shape
    K = k.shape[2]
    if q.is_cuda:
        limit = batch_limit(H, L, d)
        batches = zip(q.split(limit), k.split(limit), v.split(limit), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*batch, dropout_p=dropout) for batch in batches])
    # Two products, where they are faster (MIN_SCORES) and do not depend on the position of a query (MIN_KEYS).
    fits_products = MIN_SCORES < L * K <= MAX_SCORES // (count * H) and K >= MIN_KEYS
    if fits_products and not dropout and q.dtype != torch.bfloat16:
        return torch.softmax((q * d**-0.5) @ k.mT, -1) @ v
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


def batch_limit(num_heads: int, num_queries: int, head_dim: int) -> int:
    """Return the largest batch that CUDA attention kernels can process at once, forward and backward."""
    # The backward pass rounds queries up to 128, and a head up to 32 values.
    queries = -(-num_queries // 128) * 128
    return max(1, min(CUDA_GRID, FLASH_BACKWARD // (num_heads * queries * max(head_dim, 32))))


def attend_ssa(q: Tensor, kv: Tensor, spans: Spans, exponents: Tensor) -> Tensor:
    """`attend` with signed averaging, see scaling.SSA; q are the queries times b, exponents (H,) the p of each head."""
    if isinstance(spans.runs, list):
        k, v = kv.unbind(1)
        return attend_by_run(q, k, v, spans, partial(attend_plain, exponents=exponents))
    return attend_averaging(q, kv, exponents, spans.runs, spans.queries)


class RowSpans(NamedTuple):
    """Sequences of the row stage, with cosines and sines of the rotary embedding; see `Rotary`."""

    spans: Spans
    of_queries: tuple[Tensor, Tensor]  # (Q, 1, d) each
    of_keys: tuple[Tensor, Tensor]  # (K, 1, d) each
    interleaved: bool


class KernelRows(NamedTuple):
    """What `RowSpans` says, as the kernels of triton_attention.py need it."""

    cos: Tensor  # float32 (length, d), by the position in a row
    sin: Tensor
    programs: Tensor  # see triton_attention.RowPrograms
    launches: Tensor
    cls: int  # the queries of each row, which are its first tokens; 0 if all tokens are queries
    interleaved: bool


def attend_in_rows(q: Tensor, kv: Tensor | None, rows: RowSpans, dropout: float) -> Tensor:
    """`attend` with rotary embedding; q (Q, 3, H, d) of queries, keys and values, or q (Q, H, d), kv (K, 2, H, d)."""
    if kv is None:
        cos, sin = rows.of_keys
        queries_and_keys, v = q.split([2, 1], 1)
        q, k = turn(queries_and_keys, cos.unsqueeze(1), sin.unsqueeze(1), rows.interleaved).unbind(1)
        return attend(q, k, v.squeeze(1), rows.spans, dropout)
    k, v = kv.unbind(1)
    q = turn(q, *rows.of_queries, rows.interleaved)
    k = turn(k, *rows.of_keys, rows.interleaved)
    return attend(q, k, v, rows.spans, dropout)


def widest_row(head_dim: int) -> int:
    """Return the most tokens of a row that a kernel of triton_attention.py can keep in registers."""
    return 128 if head_dim <= 16 else 64


def attend_in_columns(q: Tensor, kv: Tensor, spans: Spans) -> Tensor:
    """`attend` between tokens of columns and inducing points, by the kernels of triton_attention.py."""
    from tabicl_train.model.triton_attention import points_read_tokens, tokens_read_points  # needs Triton

    if spans.table is not None:
        return points_read_tokens(q, spans.table, kv, spans.key_ends)[0]
    return tokens_read_points(q, kv, spans.query_ends, spans.most_keys, spans.uses)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs of x in float32, and convert back to its dtype."""
    # (a, b) -> (a cos - b sin, b cos + a sin), where `sin` holds -sin for the first of a pair.
    half = x.shape[-1] // 2
    partner = x.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if interleaved else x.roll(half, -1)
    return torch.addcmul(x * cos, partner, sin).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """torch's layer norm, but under autocast in the dtype of its input, with sums in float32.

    It is ``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension (arXiv 1607.06450, section 3).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize tokens.

        Parameters
        ----------
        x : Tensor
            (..., E).

        Returns
        -------
        Tensor
            (..., E), under autocast in the dtype of x.
        """
        # Under autocast, PyTorch's layer norm copies its input to float32 and writes float32, which the next product
        # copies back: 20 bytes per value instead of 4.
        device = x.device.type
        if not torch.is_autocast_enabled(device) or x.dtype == torch.float32:
            return super().forward(x)
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with torch.autocast(device, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Rotary(nn.Module):
    """Rotary position embedding (arXiv 2104.09864, section 3.2).

    At position t, pair i of a head is rotated by the angle ``t * base ** (-2 i / head_dim)``. So scores depend on
    positions only by the distance of query and key.

    Parameters
    ----------
    head_dim : int
        Values of a head, an even number.
    base : float
        Of the frequencies; 100,000 in TabICL.
    interleaved : bool
        Whether pairs are neighbors, 2i and 2i + 1, as in TabICL v1; otherwise they are i and i + head_dim/2.
    """

    def __init__(self, head_dim: int, base: float, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        # On the meta device, which checks the shapes of files, a division imports torch._dynamo: 1.6 s.
        freqs = base ** -(torch.arange(0, head_dim, 2, device="cpu") / head_dim)
        # Constant, but a parameter, since released files contain it.
        self.freqs = nn.Parameter(freqs.to(torch.get_default_device()), requires_grad=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the angles of positions 0..length-1.

        Parameters
        ----------
        length : int
            Number of positions.

        Returns
        -------
        tuple of Tensor
            Cosines, and sines with the sign that `turn` needs, negative for the first of a pair; (length, head_dim)
            each.
        """
        angles = torch.arange(length, device=self.freqs.device)[:, None] * self.freqs  # (length, head_dim/2)
        cos = angles.cos()
        sin = angles.sin()
        if self.interleaved:
            return cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
        return cos.repeat(1, 2), torch.cat([-sin, sin], -1)


class Attention(nn.Module):
    """Multi-head attention (arXiv 1706.03762, section 3.2) with a scaling rule or a rotary embedding.

    For head h, softmax(s(q_h) k_h^T / sqrt(d)) v_h, where s is the scaling rule (see scaling.py); the projections of
    queries, keys and values are one matrix.

    Parameters
    ----------
    dim : int
        Width E of the tokens.
    num_heads : int
        Number of heads H, each with d = E / H values.
    scaling : str
        Name of a scaling rule.
    settings : TabICLConfig
        Settings of the network: dropout, zero_init and those of the scaling rule.
    fp32 : bool, default False
        Compute in float32 under autocast.
    """

    def __init__(self, dim: int, num_heads: int, scaling: str, settings: Any, fp32: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.dropout = settings.dropout
        self.fp32 = fp32
        # The format in which a GPU uses the kernels of triton_attention.py; None: in no one. See `trainer.attention`.
        self.own_kernels: torch.dtype | None = None
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        rule = register.scaling[scaling]
        self.ssmax_layer: Scaling | SSA | None = rule.entry(num_heads, dim // num_heads, settings)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)
        if settings.zero_init:
            nn.init.zeros_(self.out_proj.weight)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None,
        spans: Spans | RowSpans | KernelRows,
        log_n: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        """Let tokens attend to a context, or to themselves.

        Parameters
        ----------
        x : Tensor
            Tokens that attend, (Q, E); (L, E) if all sequences share their queries.
        context : Tensor, optional
            Tokens that are attended to, (K, E), or their keys and values (K, 2, H, d) from `keys`. Without it, x.
        spans : Spans, RowSpans or KernelRows
            Where sequences begin and end.
        log_n : Tensor, optional
            Logarithm of the number of keys of each table, (B,), which scaling rules need.
        table : Tensor, optional
            Table of each query, (Q,), which scaling rules need unless all sequences share their queries.

        Returns
        -------
        Tensor
            (Q, E); (sequences * L, E) if all sequences share their queries.
        """
        if self.fp32 and torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                out = self(x.float(), None if context is None else context.float(), spans, log_n, table)
            # Otherwise all tokens would be float32 from the first column block to the last block of rows: 69 GB instead
            # of 53 for a pack of stage 2 of TabICLv2 (simulated).
            return out.to(torch.get_autocast_dtype(x.device.type))
        q, kv = self.project(x, context)  # (Q, H, d), (K, 2, H, d); or (Q, 3, H, d), None
        dropout = self.dropout if self.training else 0.0
        if isinstance(spans, RowSpans):
            out = attend_in_rows(q, kv, spans, dropout)
        elif isinstance(spans, KernelRows):
            from tabicl_train.model.triton_attention import attend_within_rows  # needs Triton

            out = attend_within_rows(q, kv, *spans)
        else:
            assert kv is not None
            # Scaling rules apply where the number of keys depends on the table: not within rows.
            q = self.scale(q, log_n, table, spans)
            if isinstance(self.ssmax_layer, SSA):
                out = attend_ssa(q, kv, spans, self.ssmax_layer.exponents())
            elif self.takes_kernels(q.device, q.dtype):
                out = attend_in_columns(q, kv, spans)
            else:
                k, v = kv.unbind(1)
                out = attend(q, k, v, spans, dropout)
        return self.out_proj(out.flatten(1))  # out (Q, H, d)

    def takes_kernels(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernels of triton_attention.py compute queries of a row or column, of this device and dtype."""
        return dtype == self.own_kernels and device.type in KERNEL_DEVICES

    def project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return queries (Q, H, d), not scaled, and keys and values (K, 2, H, d); or all as (Q, 3, H, d), and None."""
        heads = (self.num_heads, self.dim // self.num_heads)
        if context is None:
            return F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, *heads)), None
        # The gradient of a split is one concatenation, that of two slices two buffers of zeros, two copies and a sum.
        weight_of_q, weight_of_kv = self.in_proj_weight.split([self.dim, 2 * self.dim])
        bias_of_q, bias_of_kv = self.in_proj_bias.split([self.dim, 2 * self.dim])
        q = F.linear(x, weight_of_q, bias_of_q).unflatten(-1, heads)
        if context.dim() == 4:
            # The context is keys and values already.
            return q, context
        return q, F.linear(context, weight_of_kv, bias_of_kv).unflatten(-1, (2, *heads))

    def keys(self, context: Tensor) -> Tensor:
        """Return keys and values of a context (K, E), (K, 2, H, d), which can be kept for later queries."""
        if self.fp32 and torch.is_autocast_enabled(context.device.type):
            with torch.autocast(context.device.type, enabled=False):
                return self.keys(context.float())
        kv = F.linear(context, self.in_proj_weight[self.dim :], self.in_proj_bias[self.dim :])
        return kv.unflatten(-1, (2, self.num_heads, self.dim // self.num_heads))

    def scale(self, q: Tensor, log_n: Tensor | None, table: Tensor | None, spans: Spans) -> Tensor:
        """Scale queries as `attend` takes them: (Q, H, d), or (B or 1, L, H, d) if the sequences share them."""
        if self.ssmax_layer is not None:
            return self.ssmax_layer(q, log_n, table)
        return q[None] if spans.shares_queries else q


class Block(nn.Module):
    """A pre-norm transformer block (arXiv 2002.04745, figure 1b).

    ``x <- x + attention(norm1(x), norm1(context))``, then ``x <- x + W2 gelu(W1 norm2(x))``, with biases and a hidden
    width of ff_factor times E. With ff_factor = 0 the second half is left out. The parameters are those of `Attention`;
    a subclass may set `attention` to another class.
    """

    attention: ClassVar[type[Attention]] = Attention

    def __init__(self, dim: int, num_heads: int, scaling: str, settings: Any, fp32: bool = False) -> None:
        super().__init__()
        self.dropout = settings.dropout
        self.ff_factor = settings.ff_factor
        self.attn = self.attention(dim, num_heads, scaling, settings, fp32)
        bias = not settings.bias_free_ln
        if self.ff_factor > 0:
            self.linear1 = nn.Linear(dim, self.ff_factor * dim)
            self.linear2 = nn.Linear(self.ff_factor * dim, dim)
        self.norm1 = LayerNorm(dim, bias=bias)
        if self.ff_factor > 0:
            self.norm2 = LayerNorm(dim, bias=bias)
        # With zero_init a block starts as the identity, since attention starts at zero, too.
        if settings.zero_init:
            nn.init.zeros_(self.linear2.weight)
            nn.init.zeros_(self.linear2.bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | int | None,
        spans: Spans | RowSpans | KernelRows,
        log_n: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        """Apply the block.

        Parameters
        ----------
        x : Tensor
            Tokens, (Q, E); (L, E) if all sequences share their queries.
        context : Tensor, int or None
            As in `Attention.forward`, tokens (K, E), or keys and values (K, 2, H, d); or how many first tokens of x
            are attended to.
        spans, log_n, table
            As in `Attention.forward`.

        Returns
        -------
        Tensor
            (Q, E); (sequences * L, E) if all sequences share their queries.
        """
        # Queries and keys have the same norm, as in the released network.
        normed = self.norm1(x)
        if isinstance(context, Tensor):
            if context.dim() != 4:
                # Tokens, not their keys and values.
                context = self.norm1(context)
        elif context is not None:
            context = normed[:context]
        attended = self._drop(self.attn(normed, context, spans, log_n, table))
        if len(attended) > len(x):
            # All sequences share the queries, so each has its own copy from here on.
            attended = attended.unflatten(0, (-1, len(x)))  # (sequences, L, E)
        x = (x + attended).view(-1, x.shape[1])  # (Q, E)
        if self.ff_factor == 0:
            return x
        hidden = self._drop(F.gelu(self.linear1(self.norm2(x))))  # (Q, ff_factor * E)
        return x + self._drop(self.linear2(hidden))

    def keys(self, context: Tensor) -> Tensor:
        """See `Attention.keys`."""
        return self.attn.keys(self.norm1(context))

    def products(self, norms: tuple[str, ...] = ("norm1", "norm2")) -> Iterator[tuple[nn.Module, str]]:
        """Yield the parameters that only products and norms in 16 bits read under autocast, see `Network.products`.

        Parameters
        ----------
        norms : tuple of str
            The norms to include. Callers leave out norms of float32 tokens, and norms that are applied twice.

        Yields
        ------
        (nn.Module, str)
            A module of the block, and the name of a parameter in it.
        """
        # A subclass may read them otherwise.
        if type(self) is not Block or type(self.attn) is not Attention:
            return
        modules: list[nn.Module] = [getattr(self, name) for name in norms if hasattr(self, name)]
        if self.ff_factor > 0:
            modules += [self.linear1, self.linear2]
        # An attention layer may compute in float32, also under autocast.
        if not self.attn.fp32:
            modules.append(self.attn.out_proj)
            yield self.attn, "in_proj_weight"
            yield self.attn, "in_proj_bias"
        yield from weights_and_biases(*modules)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


def weights_and_biases(*modules: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parameters of linear layers and norms; those of other classes may be read otherwise."""
    for module in modules:
        if type(module) in (nn.Linear, LayerNorm):
            yield from ((module, name) for name, _ in module.named_parameters(recurse=False))


def call_block(block: nn.Module, *args, recompute: bool, **kwargs) -> Tensor:
    """Call a block; with `recompute`, its activations are computed again in the backward pass."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(block, *args, use_reentrant=False, **kwargs)
    return block(*args, **kwargs)
