"""Attention of many sequences on a CPU: thirty-two queries at a time.

Torch's kernel took 1.3 to 2.6 times as long in the column stage, and 1.0 to 1.7 times in the in-context stage. Here a
vector holds eight queries of a sequence, so that softmax runs along the lanes and keys and values enter as single
numbers, whatever their count. Softmax is continued from one block of keys to the next (arXiv 2205.14135).

H heads, d values of a head, QUERIES and KEYS of a block; keys are padded to eights.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from torch import Tensor

from tabicl_train.model.kernels.lanes import LANES, POWERS_OF_TWO, move, outer_4_4, outer_8_1, outer_8_2, transpose
from tabicl_train.model.kernels.softmax_lanes import LOWEST, extend_softmax, weigh
from tabicl_train.model.kernels.threads import flat, in_threads

QUERIES, KEYS = 32, 128  # two blocks of scores are then 32 KB, as large as the first cache


@njit(cache=True, nogil=True, error_model="numpy")
def product(rows, columns, a, a_start, a_row, a_k, b, b_start, b_k, c, c_start, c_row, keep, count):
    """c[i, j] = sum over k < count of a[i, k] b[k, j], plus c[i, j] if keep; rows and columns in eights."""
    j = 0
    while columns - j >= 4 * LANES:
        for i in range(0, rows, 4):
            outer_4_4(
                a, a_start + i * a_row, a_row, a_k, b, b_start + j, b_k, c, c_start + i * c_row + j, c_row, keep, count
            )
        j += 4 * LANES
    while columns - j >= 2 * LANES:
        for i in range(0, rows, 8):
            outer_8_2(
                a, a_start + i * a_row, a_row, a_k, b, b_start + j, b_k, c, c_start + i * c_row + j, c_row, keep, count
            )
        j += 2 * LANES
    if columns > j:
        for i in range(0, rows, 8):
            outer_8_1(
                a, a_start + i * a_row, a_row, a_k, b, b_start + j, b_k, c, c_start + i * c_row + j, c_row, keep, count
            )


@njit(cache=True, nogil=True, error_model="numpy")
def read_queries(x, start, step, count, d, factor, y):
    """y (d, QUERIES): the transposed, scaled `count` heads x[start + i step], the rest 0."""
    if count < QUERIES:
        y[:] = 0
    whole = count // LANES * LANES
    for i in range(0, whole, LANES):
        for e in range(0, d, LANES):
            transpose(x, start + i * step + e, step, y, e * QUERIES + i, QUERIES, factor)
    for i in range(whole, count):
        for e in range(d):
            y[e * QUERIES + i] = x[start + i * step + e] * factor


@njit(cache=True, nogil=True, error_model="numpy")
def write_queries(y, count, d, factor, spare, x, start, step, keep):
    """The reverse; added to x if keep. spare (QUERIES, d)"""
    for i in range(0, count, LANES):
        for e in range(0, d, LANES):
            transpose(y, e * QUERIES + i, QUERIES, spare, i * d + e, d, factor)
    for i in range(count):
        for e in range(0, d, LANES):
            move(spare, i * d + e, np.float32(1), x, start + i * step + e, keep)


@njit(cache=True, nogil=True, error_model="numpy")
def read_keys(kv, first, count, width, head, d, k, v):
    """k, v (count up to whole eights, d): the keys and values of a head, and zeros."""
    for j in range(count):
        start = (first + j) * 2 * width + head * d
        for e in range(0, d, LANES):
            move(kv, start + e, np.float32(1), k, j * d + e, 0)
            move(kv, start + width + e, np.float32(1), v, j * d + e, 0)
    for e in range(count * d, (count + 7) // 8 * 8 * d):
        k[e] = v[e] = 0


@njit(
    "void(f4[::1], i8, f4[::1], UniTuple(i8, 2), i8[:, ::1], f4[::1], f4[::1], i8, i8)",
    cache=True,
    nogil=True,
    error_model="numpy",
)
def forward_kernel(q, shared, kv, shape, runs, out, sums, thread, threads):
    """q: flat (queries, H, d), or (P, L, H, d) if shared is P > 0; kv: flat (keys, 2, H, d); shape: (H, d);

    out: flat (queries, H, d); sums: flat (2, H, queries), the largest score in powers of two, and the reciprocal of the
    sum of the others' powers relative to it.
    """
    H, d = shape
    queries = len(out) // (H * d)
    width, padded = H * d, (runs[:, 2].max() + 7) // 8 * 8
    k, v = np.empty((2, padded * d), np.float32)
    turned, o, spare = np.zeros((3, d * QUERIES), np.float32)
    s = np.empty((KEYS + 8) * QUERIES, np.float32)
    largest, total, factor = np.empty((3, QUERIES), np.float32)
    scale = np.float32(d**-0.5) * POWERS_OF_TWO
    for head in range(thread, H, threads):
        begin = 0
        for count, L, K, first, table in runs:
            for sequence in range(count):
                read_keys(kv, first + sequence * K, K, width, head, d, k, v)
                own = begin if shared == 0 else table * L if shared > 1 else 0
                for i in range(0, L, QUERIES):
                    n = min(QUERIES, L - i)
                    lanes = (n + LANES - 1) // LANES * LANES
                    read_queries(q, (own + i) * width + head * d, width, n, d, scale, turned)
                    largest[:], total[:], o[:] = LOWEST, 0, 0
                    for j in range(0, K, KEYS):
                        m = min(KEYS, K - j)
                        product(m, lanes, k, j * d, d, 1, turned, 0, QUERIES, s, 0, QUERIES, 0, d)
                        for lane in range(0, lanes, LANES):
                            extend_softmax(s, lane, QUERIES, m, largest, total, factor, lane)
                        if j > 0:
                            for e in range(d):
                                for lane in range(QUERIES):
                                    o[e * QUERIES + lane] *= factor[lane]
                        product(d, lanes, v, j * d, 1, d, s, 0, QUERIES, o, 0, QUERIES, 1, m)
                    for lane in range(QUERIES):
                        total[lane] = 1 / total[lane]
                    for e in range(d):
                        for lane in range(QUERIES):
                            o[e * QUERIES + lane] *= total[lane]
                    write_queries(o, n, d, np.float32(1), spare, out, (begin + i) * width + head * d, width, 0)
                    at = head * queries + begin + i
                    sums[at : at + n] = largest[:n]
                    sums[H * queries + at : H * queries + at + n] = total[:n]
                begin += L


@njit(
    "void(f4[::1], i8, f4[::1], UniTuple(i8, 2), i8[:, ::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], i8, i8)",
    cache=True,
    nogil=True,
    error_model="numpy",
)
def backward_kernel(q, shared, kv, shape, runs, out, sums, grad, dq, dkv, thread, threads):
    """Adds the gradients of `forward_kernel`'s q and kv for that of its result to dq and dkv."""
    H, d = shape
    queries = len(out) // (H * d)
    width, padded = H * d, (runs[:, 2].max() + 7) // 8 * 8
    k, v, dk, dv = np.empty((4, padded * d), np.float32)
    turned, above, slope, spare = np.zeros((4, d * QUERIES), np.float32)
    s, ds = np.empty((2, (KEYS + 8) * QUERIES), np.float32)
    largest, factor, inner = np.zeros((3, QUERIES), np.float32)
    scale, one = np.float32(d**-0.5), np.float32(1)
    for head in range(thread, H, threads):
        begin = 0
        for count, L, K, first, table in runs:
            for sequence in range(count):
                read_keys(kv, first + sequence * K, K, width, head, d, k, v)
                dk[:], dv[:] = 0, 0
                own = begin if shared == 0 else table * L if shared > 1 else 0
                for i in range(0, L, QUERIES):
                    n = min(QUERIES, L - i)
                    lanes = (n + LANES - 1) // LANES * LANES
                    at, end = (own + i) * width + head * d, (begin + i) * width + head * d
                    read_queries(q, at, width, n, d, scale * POWERS_OF_TWO, turned)
                    read_queries(grad, end, width, n, d, one, above)
                    read_queries(out, end, width, n, d, one, slope)
                    inner[:] = 0
                    for e in range(d):
                        for lane in range(QUERIES):
                            inner[lane] += above[e * QUERIES + lane] * slope[e * QUERIES + lane]
                    slope[:] = 0
                    first_sum = head * queries + begin + i
                    largest[:n] = sums[first_sum : first_sum + n]
                    factor[:n] = sums[H * queries + first_sum : H * queries + first_sum + n]
                    for j in range(0, K, KEYS):
                        m = min(KEYS, K - j)
                        product(m, lanes, k, j * d, d, 1, turned, 0, QUERIES, s, 0, QUERIES, 0, d)
                        product(m, lanes, v, j * d, d, 1, above, 0, QUERIES, ds, 0, QUERIES, 0, d)
                        for lane in range(0, lanes, LANES):
                            weigh(s, ds, lane, QUERIES, m, largest, factor, inner, lane)
                        product(d, lanes, k, j * d, 1, d, ds, 0, QUERIES, slope, 0, QUERIES, 1, m)
                        product(m, d, s, 0, QUERIES, 1, grad, end, width, dv, j * d, d, 1, n)
                        product(m, d, ds, 0, QUERIES, 1, q, at, width, dk, j * d, d, 1, n)
                    write_queries(slope, n, d, scale, spare, dq, at, width, 1)
                for j in range(K):
                    start = (first + sequence * K + j) * 2 * width + head * d
                    for e in range(0, d, LANES):
                        move(dk, j * d + e, scale, dkv, start + e, 1)
                        move(dv, j * d + e, one, dkv, start + width + e, 1)
                begin += L


def forward(q: Tensor, kv: Tensor, runs: Tensor, out: Tensor, sums: Tensor) -> None:
    """`run_attention` for contiguous float32 tensors on the CPU, d a multiple of LANES, into its results."""
    in_threads(forward_kernel, (*layout(q, kv, runs), flat(out), flat(sums)), out.numel() + kv.numel())


def backward(
    grad: Tensor, q: Tensor, kv: Tensor, runs: Tensor, out: Tensor, sums: Tensor, dq: Tensor, dkv: Tensor
) -> None:
    """Adds the gradients of q and kv to dq and dkv."""
    rest = map(flat, (out, sums, grad, dq, dkv))
    in_threads(backward_kernel, (*layout(q, kv, runs), *rest), out.numel() + kv.numel())


def layout(q: Tensor, kv: Tensor, runs: Tensor) -> tuple:
    """The kernels' q, shared, kv, shape and runs."""
    return flat(q), len(q) if q.dim() == 4 else 0, flat(kv), tuple(q.shape[-2:]), runs.contiguous().numpy()
