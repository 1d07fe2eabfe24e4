"""Attention within rows and columns as Triton kernels, for a GPU; see `trainer.attention`.

torch's kernels are made for few long sequences with wide heads. Those of a table are tens of thousands of rows of 5 to
104 tokens, and thousands of columns that meet the same 128 inducing points, with heads of 16 values. Flash attention
pads each of them to 128 queries, 128 keys and 32 values, and takes delta, the sum of the weights times their gradients,
from an output that was rounded to bf16: where keys and values have a common part of three standard deviations, the
gradient of queries is then wrong by 67 %. Here delta is a sum in fp32 over the very weights that are used.

There are three attentions, each with a forward and a backward kernel:

    rows                 tokens of a row to those of the same row, rotated inside the kernel; also its CLS tokens alone
    tokens read points   the labeled and query tokens of a column to its inducing points
    points read tokens   the inducing points of a column, whose queries all columns of a table share, to its labeled
                         tokens

All of them keep one side, at most 128 tokens, in registers, and go over the other one in tiles. What happens to a tile
is written once: `_exponentials` in both passes, `_gradients` in the backward pass. A gradient is summed by the program
that owns it, so there are no atomic operations, and the same inputs give the same bits. A sequence with a NaN may
spread it to others of its program.

Q queries, K keys, H heads, d values of a head, which kernels call D, and P once padded to 16 or 32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tabicl_train.model.pack import KEYS, RowPrograms, one_hot_sums

LOG2E = tl.constexpr(1.4426950408889634)  # exp2 is one instruction, exp takes four
# The score of a key that a query does not see. It is finite, so that a query that sees none, in a tile's padding, gets
# weights without NaN; these are multiplied by zeros.
UNSEEN = tl.constexpr(-1e30)


# What happens to a tile


@triton.jit
def _dot(a, b):
    """Product with sums in fp32, without TF32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _exponentials(q, k, seen, scale):
    """q (M, P), k (N, P), seen (M, N) or (1, N) -> numerators of softmax (M, N), their sums (M,), highest scores."""
    scores = tl.where(seen, _dot(q, tl.trans(k)), UNSEEN)
    highest = tl.max(scores, 1)
    numerators = tl.exp2((scores - highest[:, None]) * (scale * LOG2E))
    return numerators, tl.sum(numerators, 1), highest


@triton.jit
def _softmax_weights(q, k, seen, log_sum, scale):
    """The weights of softmax (M, N) in a tile of the keys, by the logarithms of the sums over all keys, (M,)."""
    scores = tl.where(seen, _dot(q, tl.trans(k)), UNSEEN)
    return tl.exp2(scores * (scale * LOG2E) - log_sum[:, None])


@triton.jit
def _gradients(weights, dweights, delta, q, k, g, scale):
    """Compute the gradients of q, k and v of a tile, (M, P), (N, P), (N, P), in fp32.

    `weights` (M, N) are the softmax of the scores, `dweights` their gradients g v^T, and `delta` (M,) the sum of the
    product of both. The gradient of a score is weight * (dweight - delta), since weights sum to 1.
    """
    dscores = (weights * (dweights - delta[:, None]) * scale).to(q.dtype)
    dq = _dot(dscores, k)
    dk = _dot(tl.trans(dscores), q)
    dv = _dot(tl.trans(weights.to(q.dtype)), g)
    return dq, dk, dv


# Tokens of a head in memory, and rotation


@triton.jit
def _value_offsets(count, STRIDE: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Return offsets (TOKENS, P) of the values of a head, and which exist: D values of the first `count` tokens.

    Offsets count from the first token, whose address is one number of 64 bits. An array may have more than 2^31
    values, but offsets of 64 bits would take two registers for each value.
    """
    token = tl.arange(0, TOKENS)
    value = tl.arange(0, P)
    at = token[:, None] * STRIDE + value[None, :]
    if D == P:
        return at, (token < count)[:, None]
    else:
        return at, (token < count)[:, None] & (value < D)[None, :]


@triton.jit
def _load(first, count, STRIDE: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Load the values of a head of adjacent tokens, (TOKENS, P), zeros where there are none; first: a pointer."""
    at, exists = _value_offsets(count, STRIDE, TOKENS, D, P)
    return tl.load(first + at, mask=exists, other=0.0)


@triton.jit
def _store(first, x, count, STRIDE: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Store what `_load` loads, in the dtype of the array."""
    at, exists = _value_offsets(count, STRIDE, TOKENS, D, P)
    tl.store(first + at, x.to(first.dtype.element_ty), mask=exists)


@triton.jit
def _rotation(cos, sin, position, D: tl.constexpr, P: tl.constexpr):
    """Load cosines and sines (tokens, P) of positions (tokens,)."""
    value = tl.arange(0, P)
    at = position[:, None] * D + value[None, :]
    exists = (value < D)[None, :]
    return tl.load(cos + at, mask=exists, other=0.0), tl.load(sin + at, mask=exists, other=0.0)


@triton.jit
def _partners(D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The matrix (P, P) by which x is multiplied to give each value its partner in a rotated pair."""
    value = tl.arange(0, P)
    # A pair are neighbors, or half a head apart.
    partner = value ^ 1 if INTERLEAVED else (value + D // 2) % D
    return (value[:, None] == partner[None, :]).to(tl.float32)


@triton.jit
def _turn(x, cos, sin, partners):
    """Rotate the pairs of x (tokens, P), in fp32; with -sin, rotate them back, as gradients are."""
    # Each sum has one term, so it is exact: in bf16, and in fp32 as three products in TF32.
    partner = tl.dot(x, partners.to(x.dtype), input_precision="tf32x3")
    return x.to(tl.float32) * cos + partner * sin


# Rows: a program computes adjacent rows of equal width, at most KEYS tokens together, for all heads.


@triton.jit
def _row_program(programs, CLS: tl.constexpr):
    """Read what a program computes: its first key, its first query, keys and queries of a row, number of rows.

    With CLS > 0 only the first CLS tokens of a row are queries; with CLS = 0 all are.
    """
    program = programs + 4 * tl.program_id(0)
    first_key = tl.load(program).to(tl.int64)
    width = tl.load(program + 1)
    rows = tl.load(program + 2)
    if CLS == 0:
        return first_key, first_key, width, width, rows
    else:
        return first_key, tl.load(program + 3).to(tl.int64) * CLS, width, CLS, rows


@triton.jit
def rows_forward(
    q, kv, out, cos, sin, programs, scale,
    Q_STRIDE: tl.constexpr, KV_STRIDE: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    CLS: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """q (Q, H, d) and kv (K, 2, H, d), not rotated, with these strides of a token -> out (Q, H, d)."""
    # The rows of this program. Keys of all of them are rotated by their positions within their rows.
    first_key, first_query, keys_each, queries_each, rows = _row_program(programs, CLS)
    q += first_query * Q_STRIDE
    out += first_query * (H * D)
    kv += first_key * KV_STRIDE
    dtype = out.dtype.element_ty
    partners = _partners(D, P, INTERLEAVED)
    key = tl.arange(0, KEYS)
    key_cos, key_sin = _rotation(cos, sin, key % keys_each, D, P)

    for h in range(H):
        k = _load(kv + h * D, rows * keys_each, KV_STRIDE, KEYS, D, P)
        v = _load(kv + (H + h) * D, rows * keys_each, KV_STRIDE, KEYS, D, P)
        k = _turn(k, key_cos, key_sin, partners).to(dtype)
        for start in range(0, QUERIES, TILE):
            query = start + tl.arange(0, TILE)
            count = rows * queries_each - start
            cos_here, sin_here = _rotation(cos, sin, query % queries_each, D, P)
            x = _load(q + start * Q_STRIDE + h * D, count, Q_STRIDE, TILE, D, P)
            x = _turn(x, cos_here, sin_here, partners).to(dtype)
            # Tokens beyond the last row count as those of rows that do not exist, so no query sees them.
            seen = (query // queries_each)[:, None] == (key // keys_each)[None, :]
            numerators, total, _ = _exponentials(x, k, seen, scale)
            read = _dot(numerators.to(dtype), v) / total[:, None]
            _store(out + start * (H * D) + h * D, read, count, H * D, TILE, D, P)


@triton.jit
def rows_backward(
    q, kv, grad, dq, dkv, cos, sin, programs, scale,
    Q_STRIDE: tl.constexpr, KV_STRIDE: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    CLS: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradients of `rows_forward`: dq as q and dkv as kv, from grad (Q, H, d)."""
    # The rows of this program.
    first_key, first_query, keys_each, queries_each, rows = _row_program(programs, CLS)
    q += first_query * Q_STRIDE
    dq += first_query * Q_STRIDE
    grad += first_query * (H * D)
    kv += first_key * KV_STRIDE
    dkv += first_key * KV_STRIDE
    dtype = grad.dtype.element_ty
    partners = _partners(D, P, INTERLEAVED)
    key = tl.arange(0, KEYS)

    for h in range(H):
        # Keys and values of a head. Their angles are loaded for each head, instead of being kept in registers.
        key_cos, key_sin = _rotation(cos, sin, key % keys_each, D, P)
        k = _load(kv + h * D, rows * keys_each, KV_STRIDE, KEYS, D, P)
        v = _load(kv + (H + h) * D, rows * keys_each, KV_STRIDE, KEYS, D, P)
        k = _turn(k, key_cos, key_sin, partners).to(dtype)
        dk = tl.zeros((KEYS, P), tl.float32)
        dv = tl.zeros((KEYS, P), tl.float32)
        for start in range(0, QUERIES, TILE):
            # A tile of queries and the gradient of its output, (TILE, P) each.
            query = start + tl.arange(0, TILE)
            count = rows * queries_each - start
            cos_here, sin_here = _rotation(cos, sin, query % queries_each, D, P)
            x = _load(q + start * Q_STRIDE + h * D, count, Q_STRIDE, TILE, D, P)
            x = _turn(x, cos_here, sin_here, partners).to(dtype)
            g = _load(grad + start * (H * D) + h * D, count, H * D, TILE, D, P)
            # The weights again, which were not stored, and delta from them, not from the rounded output.
            seen = (query // queries_each)[:, None] == (key // keys_each)[None, :]
            numerators, total, _ = _exponentials(x, k, seen, scale)
            weights = numerators / total[:, None]
            dweights = _dot(g, tl.trans(v))
            delta = tl.sum(weights * dweights, 1)
            dx, dk_here, dv_here = _gradients(weights, dweights, delta, x, k, g, scale)
            dk += dk_here
            dv += dv_here
            # The gradient of a rotated vector is rotated back.
            dx = _turn(dx, cos_here, -sin_here, partners)
            _store(dq + start * Q_STRIDE + h * D, dx, count, Q_STRIDE, TILE, D, P)
        # All queries that see the keys have added to their gradients.
        dk = _turn(dk, key_cos, -key_sin, partners)
        _store(dkv + h * D, dk, rows * keys_each, KV_STRIDE, KEYS, D, P)
        _store(dkv + (H + h) * D, dv, rows * keys_each, KV_STRIDE, KEYS, D, P)


# Columns: a program computes a head of a column.


@triton.jit(do_not_specialize=["columns"])  # whose multiples of 16 would be a kernel of their own
def tokens_read_points_forward(
    q, kv, out, ends, columns, scale,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, USES: tl.constexpr,
    POINTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Let tokens attend to inducing points: q (Q, H, d), kv (columns * POINTS, 2, H, d) -> out (Q, H, d).

    `ends` are 0 and the ends of the labeled tokens of each column; with USES = 2, then those of its query tokens.
    """
    # The keys and values of the points stay in registers, (PADDED, P) each.
    column = tl.program_id(0)
    h = tl.program_id(1)
    kv += column.to(tl.int64) * (POINTS * 2 * H * D)
    dtype = out.dtype.element_ty
    k = _load(kv + h * D, POINTS, 2 * H * D, PADDED, D, P)
    v = _load(kv + (H + h) * D, POINTS, 2 * H * D, PADDED, D, P)
    seen = (tl.arange(0, PADDED) < POINTS)[None, :]

    # The labeled tokens of the column, then its query tokens, tile by tile.
    for use in tl.static_range(USES):
        first = tl.load(ends + use * columns + column)
        tokens = tl.load(ends + use * columns + column + 1) - first
        column_at = first.to(tl.int64) * (H * D) + h * D
        for start in range(0, tokens, TILE):
            at = column_at + start * (H * D)
            x = _load(q + at, tokens - start, H * D, TILE, D, P)
            numerators, total, _ = _exponentials(x, k, seen, scale)
            read = _dot(numerators.to(dtype), v) / total[:, None]
            _store(out + at, read, tokens - start, H * D, TILE, D, P)


@triton.jit(do_not_specialize=["columns"])  # whose multiples of 16 would be a kernel of their own
def tokens_read_points_backward(
    q, kv, grad, dq, dkv, ends, columns, scale,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, USES: tl.constexpr,
    POINTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradients of `tokens_read_points_forward`: dq as q and dkv as kv."""
    # The keys and values of the points, and the sums of their gradients, stay in registers, (PADDED, P) each.
    column = tl.program_id(0)
    h = tl.program_id(1)
    kv += column.to(tl.int64) * (POINTS * 2 * H * D)
    dkv += column.to(tl.int64) * (POINTS * 2 * H * D)
    k = _load(kv + h * D, POINTS, 2 * H * D, PADDED, D, P)
    v = _load(kv + (H + h) * D, POINTS, 2 * H * D, PADDED, D, P)
    seen = (tl.arange(0, PADDED) < POINTS)[None, :]
    dk = tl.zeros((PADDED, P), tl.float32)
    dv = tl.zeros((PADDED, P), tl.float32)

    # The tokens tile by tile. The weights are computed again, and delta from them, not from the rounded output.
    for use in tl.static_range(USES):
        first = tl.load(ends + use * columns + column)
        tokens = tl.load(ends + use * columns + column + 1) - first
        column_at = first.to(tl.int64) * (H * D) + h * D
        for start in range(0, tokens, TILE):
            at = column_at + start * (H * D)
            x = _load(q + at, tokens - start, H * D, TILE, D, P)
            g = _load(grad + at, tokens - start, H * D, TILE, D, P)
            numerators, total, _ = _exponentials(x, k, seen, scale)
            weights = numerators / total[:, None]
            dweights = _dot(g, tl.trans(v))
            delta = tl.sum(weights * dweights, 1)
            dx, dk_here, dv_here = _gradients(weights, dweights, delta, x, k, g, scale)
            dk += dk_here
            dv += dv_here
            _store(dq + at, dx, tokens - start, H * D, TILE, D, P)
    _store(dkv + h * D, dk, POINTS, 2 * H * D, PADDED, D, P)
    _store(dkv + (H + h) * D, dv, POINTS, 2 * H * D, PADDED, D, P)


@triton.jit
def points_read_tokens_forward(
    q, table, kv, out, log_sums, ends, scale, SHARED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    POINTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Let inducing points attend to labeled tokens: q (tables, POINTS, H, d), kv (K, 2, H, d) -> out.

    `out` is (columns * POINTS, H, d). `table` (columns,) is the table whose queries a column uses, unless SHARED, where
    all columns use the same. `ends` are 0 and the ends of the labeled tokens of each column. `log_sums` (columns, H,
    POINTS), fp32, are the logarithms to base 2 of the sums of softmax, for the backward pass.
    """
    column = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    if not SHARED:
        q += tl.load(table + column) * (POINTS * H * D)
    dtype = out.dtype.element_ty
    x = _load(q + h * D, POINTS, H * D, PADDED, D, P)
    highest = tl.full((PADDED,), UNSEEN, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    read = tl.zeros((PADDED, P), tl.float32)

    first = tl.load(ends + column)
    tokens = tl.load(ends + column + 1) - first
    kv += first.to(tl.int64) * (2 * H * D)
    for start in range(0, tokens, TILE):
        at = start * (2 * H * D) + h * D
        k = _load(kv + at, tokens - start, 2 * H * D, TILE, D, P)
        v = _load(kv + at + H * D, tokens - start, 2 * H * D, TILE, D, P)
        seen = (start + tl.arange(0, TILE) < tokens)[None, :]
        numerators, total_here, highest_here = _exponentials(x, k, seen, scale)
        # The sums of this tile and of those before it are related to the same highest score.
        higher = tl.maximum(highest, highest_here)
        before = tl.exp2((highest - higher) * (scale * LOG2E))
        here = tl.exp2((highest_here - higher) * (scale * LOG2E))
        total = total * before + total_here * here
        read = read * before[:, None] + _dot(numerators.to(dtype), v) * here[:, None]
        highest = higher
    _store(out + column * (POINTS * H * D) + h * D, read / total[:, None], POINTS, H * D, PADDED, D, P)
    point = tl.arange(0, PADDED)
    # With it, the backward pass gets the weights of a tile without the other tiles.
    log_sum = highest * (scale * LOG2E) + tl.log2(total)
    tl.store(log_sums + (column * H + h) * POINTS + point, log_sum, mask=point < POINTS)


@triton.jit
def points_read_tokens_backward(
    q, table, kv, grad, log_sums, dq, dkv, ends, scale, SHARED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    POINTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradients of `points_read_tokens_forward`: dkv as kv, and of each column dq (columns, POINTS, H, d) fp32."""
    column = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    if not SHARED:
        q += tl.load(table + column) * (POINTS * H * D)
    point = tl.arange(0, PADDED)
    x = _load(q + h * D, POINTS, H * D, PADDED, D, P)
    g = _load(grad + column * (POINTS * H * D) + h * D, POINTS, H * D, PADDED, D, P)
    log_sum = tl.load(log_sums + (column * H + h) * POINTS + point, mask=point < POINTS, other=0.0)
    delta = tl.zeros((PADDED,), tl.float32)
    dx = tl.zeros((PADDED, P), tl.float32)

    # Gradients of scores need the whole of delta, so a first pass sums it. The keys and values that the second pass
    # loads again come from the L2 cache.
    first = tl.load(ends + column)
    tokens = tl.load(ends + column + 1) - first
    kv += first.to(tl.int64) * (2 * H * D)
    dkv += first.to(tl.int64) * (2 * H * D)
    for start in range(0, tokens, TILE):
        at = start * (2 * H * D) + h * D
        k = _load(kv + at, tokens - start, 2 * H * D, TILE, D, P)
        v = _load(kv + at + H * D, tokens - start, 2 * H * D, TILE, D, P)
        seen = (start + tl.arange(0, TILE) < tokens)[None, :]
        weights = _softmax_weights(x, k, seen, log_sum, scale)
        delta += tl.sum(weights * _dot(g, tl.trans(v)), 1)
    for start in range(0, tokens, TILE):
        at = start * (2 * H * D) + h * D
        k = _load(kv + at, tokens - start, 2 * H * D, TILE, D, P)
        v = _load(kv + at + H * D, tokens - start, 2 * H * D, TILE, D, P)
        seen = (start + tl.arange(0, TILE) < tokens)[None, :]
        weights = _softmax_weights(x, k, seen, log_sum, scale)
        dx_here, dk, dv = _gradients(weights, _dot(g, tl.trans(v)), delta, x, k, g, scale)
        dx += dx_here
        _store(dkv + at, dk, tokens - start, 2 * H * D, TILE, D, P)
        _store(dkv + at + H * D, dv, tokens - start, 2 * H * D, TILE, D, P)
    _store(dq + column * (POINTS * H * D) + h * D, dx, POINTS, H * D, PADDED, D, P)


# Operators, which torch.compile leaves in its graphs as they are


def row_options(keys: int, queries: int, padded: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the sizes of a row kernel and its warps, with which it spills at most 128 bytes of registers on sm_90."""
    tile = queries
    warps = keys // 16
    if dtype == torch.float32:
        tile = min(queries, 32 if padded == 16 else 16)
        warps = keys // 16 if padded == 16 else keys // 8
    return {"KEYS": keys, "QUERIES": queries, "TILE": tile, "num_warps": warps, "num_stages": 1}


def column_options(points: int, dtype: torch.dtype, backward: bool) -> dict[str, int]:
    """Return the sizes of a column kernel and its warps, likewise."""
    in_fp32 = dtype == torch.float32
    sizes = {"POINTS": points, "PADDED": max(16, triton.next_power_of_2(points)), "TILE": 32 if in_fp32 else 64}
    return sizes | {"num_warps": 8 if backward or in_fp32 else 4, "num_stages": 1}


def _constants(heads: int, dim: int) -> dict[str, int]:
    return {"H": heads, "D": dim, "P": max(16, triton.next_power_of_2(dim))}


def _launch_rows(
    kernel: Any, q: Tensor, kv: Tensor | None, arrays: list[Tensor], rotation: list[Tensor], rows: RowPrograms,
    cls: int, interleaved: bool,
) -> None:  # fmt: skip
    """Launch a kernel of rows once for each size of its programs; arrays: what follows q and kv."""
    heads, dim = q.shape[-2:]
    # A view of q, with its stride, where q has keys and values too.
    kv_of_tokens = q[:, 1:] if kv is None else kv
    constants = _constants(heads, dim) | {"INTERLEAVED": interleaved, "CLS": cls}
    constants |= {"Q_STRIDE": q.stride(0), "KV_STRIDE": kv_of_tokens.stride(0)}
    for keys, (first, number, most_rows) in zip(KEYS, rows.launches.tolist(), strict=True):
        if number == 0:
            continue
        # At least 16 queries, the smallest size of tensor cores.
        queries = max(16, triton.next_power_of_2(most_rows * cls)) if cls else keys
        kernel[(number,)](
            q, kv_of_tokens, *arrays, *rotation, rows.programs[first:], dim**-0.5,
            **constants, **row_options(keys, queries, constants["P"], q.dtype),
        )  # fmt: skip


@torch.library.custom_op("tabicl_train::rows", mutates_args=())
def attend_within_rows(
    q: Tensor, kv: Tensor | None, cos: Tensor, sin: Tensor, programs: Tensor, launches: Tensor, cls: int,
    interleaved: bool,
) -> Tensor:  # fmt: skip
    """Compute attention within rows with rotary embedding, (Q, H, d).

    Parameters
    ----------
    q : Tensor
        (Q, 3, H, d), queries, keys and values of all tokens; or (rows * cls, H, d), queries of the first tokens.
    kv : Tensor or None
        None; or (K, 2, H, d), keys and values of all tokens.
    cos, sin : Tensor
        float32 (length, d), by the position in a row, as from `attention.Rotary`.
    programs, launches : Tensor
        See `RowPrograms`.
    cls : int
        The queries of a row, or 0 if these are all tokens.
    interleaved : bool
        Whether neighbors are rotated as a pair; otherwise values i and i + d/2.
    """
    q = q.contiguous()
    kv = None if kv is None else kv.contiguous()
    out = q.new_empty(len(q), *q.shape[-2:])
    _launch_rows(
        rows_forward, q, kv, [out], [cos, sin], RowPrograms(programs, launches), cls, interleaved
    )  # fmt: skip
    return out


@torch.library.custom_op("tabicl_train::rows_backward", mutates_args=())
def rows_gradients(
    q: Tensor, kv: Tensor | None, cos: Tensor, sin: Tensor, programs: Tensor, launches: Tensor, cls: int,
    interleaved: bool, grad: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of q and kv, the latter empty if kv is None."""
    q = q.contiguous()
    kv = None if kv is None else kv.contiguous()
    dq = torch.empty_like(q)
    dkv = q.new_empty(0) if kv is None else torch.empty_like(kv)
    arrays = [grad.contiguous(), dq, dq[:, 1:] if kv is None else dkv]
    _launch_rows(
        rows_backward, q, kv, arrays, [cos, sin], RowPrograms(programs, launches), cls, interleaved
    )  # fmt: skip
    return dq, dkv


@attend_within_rows.register_fake
def _(q: Tensor, kv: Tensor | None, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], *q.shape[-2:])


@rows_gradients.register_fake
def _(q: Tensor, kv: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    dkv = q.new_empty(0) if kv is None else torch.empty_like(kv, memory_format=torch.contiguous_format)
    return torch.empty_like(q, memory_format=torch.contiguous_format), dkv


def _keep_rows(ctx: Any, inputs: tuple, output: Tensor) -> None:
    q, kv, cos, sin, programs, launches, ctx.cls, ctx.interleaved = inputs
    ctx.save_for_backward(q, kv, cos, sin, programs, launches)


def _differentiate_rows(ctx: Any, grad: Tensor) -> tuple:
    # They are read once, since a recomputed block allows it once.
    q, kv, *others = ctx.saved_tensors
    dq, dkv = rows_gradients(q, kv, *others, ctx.cls, ctx.interleaved, grad)
    return dq, None if kv is None else dkv, None, None, None, None, None, None


attend_within_rows.register_autograd(_differentiate_rows, setup_context=_keep_rows)


@torch.library.custom_op("tabicl_train::tokens_read_points", mutates_args=())
def tokens_read_points(q: Tensor, kv: Tensor, ends: Tensor, points: int, uses: int) -> Tensor:
    """Compute attention from the tokens of columns to their inducing points, (Q, H, d).

    Parameters
    ----------
    q : Tensor
        (Q, H, d), labeled tokens of all columns, then query tokens of all columns.
    kv : Tensor
        (columns * points, 2, H, d).
    ends : Tensor
        int32 (uses * columns + 1,), 0 and the ends of these sequences of tokens.
    points : int
        Inducing points of a column, at most 128.
    uses : int
        2, or 1 without query tokens.
    """
    q, kv = q.contiguous(), kv.contiguous()
    out = torch.empty_like(q)
    columns = kv.shape[0] // points
    options = column_options(points, q.dtype, backward=False)
    tokens_read_points_forward[(columns, q.shape[1])](
        q, kv, out, ends, columns, q.shape[2] ** -0.5, USES=uses, **_constants(*q.shape[1:]), **options
    )
    return out


@torch.library.custom_op("tabicl_train::tokens_read_points_backward", mutates_args=())
def tokens_read_points_gradients(
    q: Tensor, kv: Tensor, ends: Tensor, points: int, uses: int, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of q and kv."""
    q, kv = q.contiguous(), kv.contiguous()
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    columns = kv.shape[0] // points
    options = column_options(points, q.dtype, backward=True)
    tokens_read_points_backward[(columns, q.shape[1])](
        q, kv, grad.contiguous(), dq, dkv, ends, columns, q.shape[2] ** -0.5,
        USES=uses, **_constants(*q.shape[1:]), **options,
    )  # fmt: skip
    return dq, dkv


@tokens_read_points.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@tokens_read_points_gradients.register_fake
def _(q: Tensor, kv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _keep_tokens(ctx: Any, inputs: tuple, output: Tensor) -> None:
    q, kv, ends, ctx.points, ctx.uses = inputs
    ctx.save_for_backward(q, kv, ends)


def _differentiate_tokens(ctx: Any, grad: Tensor) -> tuple:
    dq, dkv = tokens_read_points_gradients(*ctx.saved_tensors, ctx.points, ctx.uses, grad)
    return dq, dkv, None, None, None


tokens_read_points.register_autograd(_differentiate_tokens, setup_context=_keep_tokens)


@torch.library.custom_op("tabicl_train::points_read_tokens", mutates_args=())
def points_read_tokens(q: Tensor, table: Tensor, kv: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention from the inducing points of columns to their labeled tokens, (columns * points, H, d).

    Parameters
    ----------
    q : Tensor
        (B, points, H, d), queries that the columns of a table share, or (1, points, H, d), those of all columns.
    table : Tensor
        int32 or int64 (columns,), the table of each column.
    kv : Tensor
        (K, 2, H, d) of the labeled tokens.
    ends : Tensor
        int32 (columns + 1,), 0 and the ends of the labeled tokens of each column.

    Returns
    -------
    Tensor
        The result, and without gradients the logarithms to base 2 of the sums of softmax, float32 (columns, H, points).
    """
    q, kv = q.contiguous(), kv.contiguous()
    tables, points, heads, dim = q.shape
    columns = table.shape[0]
    out = q.new_empty(columns * points, heads, dim)
    log_sums = q.new_empty(columns, heads, points, dtype=torch.float32)
    options = column_options(points, q.dtype, backward=False)
    points_read_tokens_forward[(columns, heads)](
        q, table, kv, out, log_sums, ends, dim**-0.5, SHARED=tables == 1, **_constants(heads, dim), **options
    )
    return out, log_sums


@torch.library.custom_op("tabicl_train::points_read_tokens_backward", mutates_args=())
def points_read_tokens_gradients(
    q: Tensor, table: Tensor, kv: Tensor, ends: Tensor, log_sums: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of q and kv."""
    q, kv = q.contiguous(), kv.contiguous()
    tables, points, heads, dim = q.shape
    columns = table.shape[0]
    dq_of_columns = q.new_empty(columns, points, heads, dim, dtype=torch.float32)
    dkv = torch.empty_like(kv)
    options = column_options(points, q.dtype, backward=True)
    points_read_tokens_backward[(columns, heads)](
        q, table, kv, grad.contiguous(), log_sums, dq_of_columns, dkv, ends, dim**-0.5,
        SHARED=tables == 1, **_constants(heads, dim), **options,
    )  # fmt: skip
    # Columns share queries: their gradients are added in fp32 and in a fixed order.
    dq = dq_of_columns.sum(0, keepdim=True) if tables == 1 else one_hot_sums(dq_of_columns, table, tables)
    return dq.to(q.dtype), dkv


@points_read_tokens.register_fake
def _(q: Tensor, table: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _, points, heads, dim = q.shape
    columns = table.shape[0]
    return q.new_empty(columns * points, heads, dim), q.new_empty(columns, heads, points, dtype=torch.float32)


@points_read_tokens_gradients.register_fake
def _(q: Tensor, table: Tensor, kv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _keep_points(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate_points(ctx: Any, grad: Tensor, _: Any) -> tuple:
    dq, dkv = points_read_tokens_gradients(*ctx.saved_tensors, grad)
    return dq, None, dkv, None


points_read_tokens.register_autograd(_differentiate_points, setup_context=_keep_points)
