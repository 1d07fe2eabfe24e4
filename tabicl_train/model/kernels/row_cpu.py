"""Row attention on a CPU: eight rows of a table at a time.

The row stage attends within each row: hundreds of thousands of sequences of 5 to 104 tokens, with heads of 8 or 16
values. Kernels made for long sequences spend their time on overhead there: torch's took 3.6 to 7.6 times as long. Here
a vector holds the same value of eight rows, so every product runs at full width, and the rotary embedding is applied
on the way.

R rows of T tokens, of which L are queries, H heads, d head dimension.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from tabicl_train.model.kernels.lanes import LANES, POWERS_OF_TWO, TILE, combine, multiply_tile, transpose
from tabicl_train.model.kernels.softmax_lanes import softmax, softmax_backward
from tabicl_train.model.kernels.threads import flat, in_threads


@njit(cache=True, nogil=True)
def multiply(rows, columns, count, a, a_row, a_k, b, b_column, b_k, c):
    """c (rows, columns) = a (rows, count) times b (columns, count), per lane; rows and columns multiples of TILE."""
    a_row, a_k, b_column, b_k, c_row = a_row * LANES, a_k * LANES, b_column * LANES, b_k * LANES, columns * LANES
    for i in range(0, rows, TILE):
        for j in range(0, columns, TILE):
            c_start = i * c_row + j * LANES
            multiply_tile(a, i * a_row, a_row, a_k, b, j * b_column, b_column, b_k, c, c_start, c_row, LANES, count)


@njit(cache=True, nogil=True)
def read(x, start, row_step, step, tokens, d, rows, factor, y):
    """y (tokens, d) vectors: values x[start + row row_step + token step + e] of `rows` rows, times the factor."""
    for token in range(tokens):
        if rows == LANES:
            for e in range(0, d, LANES):
                transpose(x, start + token * step + e, row_step, y, (token * d + e) * LANES, LANES, factor)
        else:
            for row in range(rows):
                for e in range(d):
                    y[(token * d + e) * LANES + row] = x[start + row * row_step + token * step + e] * factor


@njit(cache=True, nogil=True)
def write(y, factor, x, start, row_step, step, tokens, d, rows):
    """The reverse of `read`."""
    for token in range(tokens):
        if rows == LANES:
            for e in range(0, d, LANES):
                transpose(y, (token * d + e) * LANES, LANES, x, start + token * step + e, row_step, factor)
        else:
            for row in range(rows):
                for e in range(d):
                    x[start + row * row_step + token * step + e] = y[(token * d + e) * LANES + row] * factor


@njit(cache=True, nogil=True)
def turn(x, tokens, d, cos, sin, partner, y):
    """y[t, e] = x[t, e] cos[t, e] + x[t, partner[e]] sin[t, e]"""
    for t in range(tokens):
        for e in range(d):
            combine(x, (t * d + e) * LANES, cos[t, e], (t * d + partner[e]) * LANES, sin[t, e], y, (t * d + e) * LANES)


@njit(
    "void(f4[::1], i8, f4[::1], i8, UniTuple(i8, 3), i8[:, ::1], f4[:, ::1], f4[:, ::1], i8[::1], f4[::1], i8, i8)",
    cache=True,
    nogil=True,
)
def forward_kernel(q_in, q_parts, kv_in, kv_parts, shape, runs, cos, sin, partner, out, thread, threads):
    """q_in: flat (q tokens, q_parts, H, d), whose part 0 is q; kv_in: flat (tokens, kv_parts, H, d), whose last two
    parts are k and v; shape: (queries of each row, or 0 for all tokens; H; d); out: flat (q tokens, H, d).
    """
    queries, H, d = shape
    width = H * d
    longest = (runs[:, 1].max() + TILE - 1) // TILE * TILE
    x, q, k, v, o = np.zeros((5, longest * d * LANES), np.float32)
    p = np.zeros(longest * longest * LANES, np.float32)
    scale, one = np.float32(d**-0.5) * POWERS_OF_TWO, np.float32(1.0)
    q_first = kv_first = 0
    for R, T in runs:
        L = queries if queries > 0 else T
        Lp, Tp = (L + TILE - 1) // TILE * TILE, (T + TILE - 1) // TILE * TILE
        for first in range(thread * LANES, R, threads * LANES):
            rows = min(LANES, R - first)
            q_token, kv_token = q_first + first * L, kv_first + first * T
            for head in range(H):
                q_at = q_token * q_parts * width + head * d
                k_at = (kv_token * kv_parts + kv_parts - 2) * width + head * d
                read(q_in, q_at, L * q_parts * width, q_parts * width, L, d, rows, scale, x)
                turn(x, L, d, cos, sin, partner, q)
                read(kv_in, k_at, T * kv_parts * width, kv_parts * width, T, d, rows, one, x)
                turn(x, T, d, cos, sin, partner, k)
                read(kv_in, k_at + width, T * kv_parts * width, kv_parts * width, T, d, rows, one, v)
                multiply(Lp, Tp, d, q, d, 1, k, d, 1, p)
                for i in range(L):
                    softmax(p, i * Tp * LANES, T)
                multiply(Lp, d, T, p, Tp, 1, v, 1, d, o)
                write(o, one, out, q_token * width + head * d, L * width, width, L, d, rows)
        q_first += R * L
        kv_first += R * T


@njit(
    "void(f4[::1], i8, f4[::1], i8, UniTuple(i8, 3), i8[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], i8[::1], f4[::1], "
    "f4[::1], f4[::1], i8, i8)",
    cache=True,
    nogil=True,
)
def backward_kernel(
    q_in, q_parts, kv_in, kv_parts, shape, runs, cos, sin, sin_back, partner, grad, dq_out, dkv_out, thread, threads
):
    """Gradients of `forward_kernel`'s q_in and kv_in for those of its result; both may be one array, and so may the
    results. sin_back: -sin, for the reverse rotation
    """
    queries, H, d = shape
    width = H * d
    longest = (runs[:, 1].max() + TILE - 1) // TILE * TILE
    x, q, k, v, g, dq, dk, dv = np.zeros((8, longest * d * LANES), np.float32)
    p, ds = np.zeros((2, longest * longest * LANES), np.float32)
    scale, one = np.float32(d**-0.5), np.float32(1.0)
    q_first = kv_first = 0
    for R, T in runs:
        L = queries if queries > 0 else T
        Lp, Tp = (L + TILE - 1) // TILE * TILE, (T + TILE - 1) // TILE * TILE
        for first in range(thread * LANES, R, threads * LANES):
            rows = min(LANES, R - first)
            q_token, kv_token = q_first + first * L, kv_first + first * T
            q_row, q_step, k_row, k_step = L * q_parts * width, q_parts * width, T * kv_parts * width, kv_parts * width
            for head in range(H):
                q_at = q_token * q_parts * width + head * d
                k_at = (kv_token * kv_parts + kv_parts - 2) * width + head * d
                read(q_in, q_at, q_row, q_step, L, d, rows, scale * POWERS_OF_TWO, x)
                turn(x, L, d, cos, sin, partner, q)
                read(kv_in, k_at, k_row, k_step, T, d, rows, one, x)
                turn(x, T, d, cos, sin, partner, k)
                read(kv_in, k_at + width, k_row, k_step, T, d, rows, one, v)
                read(grad, q_token * width + head * d, L * width, width, L, d, rows, one, g)
                multiply(Lp, Tp, d, q, d, 1, k, d, 1, p)
                multiply(Lp, Tp, d, g, d, 1, v, d, 1, ds)
                for i in range(L):
                    softmax(p, i * Tp * LANES, T)
                    softmax_backward(p, ds, i * Tp * LANES, T)
                multiply(Lp, d, T, ds, Tp, 1, k, 1, d, dq)
                multiply(Tp, d, L, ds, 1, Tp, q, 1, d, dk)
                multiply(Tp, d, L, p, 1, Tp, g, 1, d, dv)
                turn(dq, L, d, cos, sin_back, partner, x)
                write(x, scale, dq_out, q_at, q_row, q_step, L, d, rows)
                turn(dk, T, d, cos, sin_back, partner, x)
                write(x, one / POWERS_OF_TWO, dkv_out, k_at, k_row, k_step, T, d, rows)
                write(dv, one, dkv_out, k_at + width, k_row, k_step, T, d, rows)
        q_first += R * L
        kv_first += R * T


def forward(q: Tensor, kv: Tensor | None, runs: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`attend_rows` for contiguous float32 tensors on the CPU, of at least one row."""
    H, d = q.shape[2:]
    out = q.new_empty(q.shape[0], H, d)
    tables = cos.contiguous().numpy(), sin.contiguous().numpy(), partners(d, interleaved)
    arguments = (*layout(q, kv, runs), *tables, flat(out))
    in_threads(forward_kernel, arguments, q.numel())
    return out


def backward(
    q: Tensor, kv: Tensor | None, runs: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, grad: Tensor
) -> list[Tensor]:
    """The gradients of q and, if there is one, of kv, for that of the result, (q tokens, H, d)."""
    partner = partners(q.shape[3], interleaved)
    sin = sin.contiguous()
    tables = cos.contiguous().numpy(), sin.numpy(), (-sin).numpy(), partner
    gradients = [torch.empty_like(x) for x in (q, kv) if x is not None]
    ends = flat(gradients[0]), flat(gradients[-1])
    in_threads(backward_kernel, (*layout(q, kv, runs), *tables, flat(grad), *ends), q.numel())
    return gradients


def layout(q: Tensor, kv: Tensor | None, runs: Tensor) -> tuple:
    """The kernels' q_in, q_parts, kv_in, kv_parts, shape and runs."""
    keys = q if kv is None else kv
    queries = 0 if kv is None else q.shape[0] // int(runs[:, 0].sum())
    return flat(q), q.shape[1], flat(keys), keys.shape[1], (queries, *q.shape[2:]), runs.contiguous().numpy()


def partners(d: int, interleaved: bool) -> np.ndarray:
    """The other value of the pair that each of the d values of a head is rotated with."""
    values = np.arange(d)
    return values ^ 1 if interleaved else (values + d // 2) % d
