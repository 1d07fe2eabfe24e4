"""Attention of many sequences on a CPU: sixteen or thirty-two queries at a time.

Torch's kernel reaches 30 to 45 GFLOP/s with heads of 16 values and 55 with 64, on a core that does 105. Here a vector
holds eight queries of a sequence, so that softmax runs along the lanes and keys and values enter as single numbers,
whatever their count. Softmax is continued from one block of keys to the next (arXiv 2205.14135).

H heads, d values of a head, QUERIES and KEYS of a block.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from torch import Tensor

from tabicl_train.model.kernels.lanes import LANES, LOG2_E, TILE, outer_tile_1, outer_tile_2, transpose
from tabicl_train.model.kernels.softmax_lanes import LOWEST, extend_softmax, weigh
from tabicl_train.model.kernels.threads import in_threads

QUERIES, KEYS = 32, 128  # two blocks of scores are then 32 KB, as large as the first cache
POWERS_OF_TWO = np.float32(LOG2_E)  # exp(x) = 2^(LOG2_E x)


@njit(cache=True, nogil=True)
def product(rows, columns, a, a_start, a_row, a_k, b, b_start, b_k, c, c_start, c_row, keep, count):
    """c[i, j] = sum over k < count of a[i, k] b[k, j], plus c[i, j] if keep; rows in TILEs, columns in LANES."""
    for i in range(0, rows, TILE):
        a_at, c_at, j = a_start + i * a_row, c_start + i * c_row, 0
        while j + 2 * LANES <= columns:
            outer_tile_2(a, a_at, a_row, a_k, b, b_start + j, b_k, c, c_at + j, c_row, keep, count)
            j += 2 * LANES
        if j < columns:
            outer_tile_1(a, a_at, a_row, a_k, b, b_start + j, b_k, c, c_at + j, c_row, keep, count)


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def add_queries(y, count, d, factor, spare, x, start, step):
    """The reverse, added to x; spare (QUERIES, d)."""
    for i in range(0, count, LANES):
        for e in range(0, d, LANES):
            transpose(y, e * QUERIES + i, QUERIES, spare, i * d + e, d, factor)
    for i in range(count):
        for e in range(d):
            x[start + i * step + e] += spare[i * d + e]


@njit(cache=True, nogil=True)
def read_keys(kv, first, count, width, head, d, k, v):
    """k, v (count up to whole TILEs, d): the keys and values of a head, and zeros."""
    for j in range(count):
        start = (first + j) * 2 * width + head * d
        for e in range(d):
            k[j * d + e] = kv[start + e]
            v[j * d + e] = kv[start + width + e]
    for e in range(count * d, (count + TILE - 1) // TILE * TILE * d):
        k[e] = v[e] = 0


@njit(cache=True, nogil=True)
def forward_kernel(q, shared, kv, shape, runs, out, log_sums, thread, threads):
    """q: flat (queries, H, d), or (P, L, H, d) if shared is P > 0; kv: flat (keys, 2, H, d); shape: (H, d);

    out: flat (queries, H, d); log_sums: flat (queries, H), logarithms to base 2.
    """
    H, d = shape
    width, padded = H * d, (runs[:, 2].max() + TILE - 1) // TILE * TILE
    k, v = np.empty((2, padded * d), np.float32)
    turned, o, spare = np.zeros((3, d * QUERIES), np.float32)
    s = np.empty((KEYS + TILE) * QUERIES, np.float32)
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
                    read_queries(q, (own + i) * width + head * d, width, n, d, scale, turned)
                    largest[:], total[:], o[:] = LOWEST, 0, 0
                    for j in range(0, K, KEYS):
                        m = min(KEYS, K - j)
                        product(m, QUERIES, k, j * d, d, 1, turned, 0, QUERIES, s, 0, QUERIES, 0, d)
                        for lane in range(0, QUERIES, LANES):
                            extend_softmax(s, lane, QUERIES, m, largest, total, factor, lane)
                        if j > 0:
                            for e in range(d):
                                for lane in range(QUERIES):
                                    o[e * QUERIES + lane] *= factor[lane]
                        product(d, QUERIES, v, j * d, 1, d, s, 0, QUERIES, o, 0, QUERIES, 1, m)
                    for lane in range(QUERIES):
                        factor[lane] = 1 / total[lane]
                    for e in range(d):
                        for lane in range(QUERIES):
                            o[e * QUERIES + lane] *= factor[lane]
                    start = (begin + i) * width + head * d
                    out_block = out[start : start + (n - 1) * width + d]
                    for lane in range(n):
                        out_block[lane * width : lane * width + d] = 0
                        log_sums[(begin + i + lane) * H + head] = largest[lane] + np.log2(total[lane])
                    add_queries(o, n, d, np.float32(1), spare, out, start, width)
                begin += L


@njit(cache=True, nogil=True)
def backward_kernel(q, shared, kv, shape, runs, out, log_sums, grad, dq, dkv, thread, threads):
    """Adds the gradients of `forward_kernel`'s q and kv for that of its result to dq and dkv."""
    H, d = shape
    width, padded = H * d, (runs[:, 2].max() + TILE - 1) // TILE * TILE
    k, v, dk, dv = np.empty((4, padded * d), np.float32)
    turned, above, slope, spare = np.zeros((4, d * QUERIES), np.float32)
    s, ds = np.empty((2, (KEYS + TILE) * QUERIES), np.float32)
    log_sum, inner = np.zeros((2, QUERIES), np.float32)
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
                    at, end = (own + i) * width + head * d, (begin + i) * width + head * d
                    read_queries(q, at, width, n, d, scale * POWERS_OF_TWO, turned)
                    read_queries(grad, end, width, n, d, one, above)
                    slope[:] = 0
                    for lane in range(n):
                        log_sum[lane] = log_sums[(begin + i + lane) * H + head]
                        dot = np.float32(0)
                        for e in range(d):
                            dot += grad[end + lane * width + e] * out[end + lane * width + e]
                        inner[lane] = dot
                    for j in range(0, K, KEYS):
                        m = min(KEYS, K - j)
                        product(m, QUERIES, k, j * d, d, 1, turned, 0, QUERIES, s, 0, QUERIES, 0, d)
                        product(m, QUERIES, v, j * d, d, 1, above, 0, QUERIES, ds, 0, QUERIES, 0, d)
                        for lane in range(0, QUERIES, LANES):
                            weigh(s, ds, lane, QUERIES, m, log_sum, inner, lane)
                        product(d, QUERIES, k, j * d, 1, d, ds, 0, QUERIES, slope, 0, QUERIES, 1, m)
                        product(m, d, s, 0, QUERIES, 1, grad, end, width, dv, j * d, d, 1, n)
                        product(m, d, ds, 0, QUERIES, 1, q, at, width, dk, j * d, d, 1, n)
                    add_queries(slope, n, d, scale, spare, dq, at, width)
                for j in range(K):
                    start = (first + sequence * K + j) * 2 * width + head * d
                    for e in range(d):
                        dkv[start + e] += dk[j * d + e] * scale
                        dkv[start + width + e] += dv[j * d + e]
                begin += L


def forward(q: Tensor, kv: Tensor, runs: Tensor, out: Tensor, log_sums: Tensor) -> None:
    """`run_attention` for contiguous float32 tensors on the CPU, d a multiple of LANES, into its results."""
    in_threads(forward_kernel, (*layout(q, kv, runs), flat(out), flat(log_sums)), kv.numel())


def backward(
    grad: Tensor, q: Tensor, kv: Tensor, runs: Tensor, out: Tensor, log_sums: Tensor, dq: Tensor, dkv: Tensor
) -> None:
    """Adds the gradients of q and kv to dq and dkv."""
    rest = map(flat, (out, log_sums, grad, dq, dkv))
    in_threads(backward_kernel, (*layout(q, kv, runs), *rest), kv.numel())


def layout(q: Tensor, kv: Tensor, runs: Tensor) -> tuple:
    """The kernels' q, shared, kv, shape and runs."""
    return flat(q), len(q) if q.dim() == 4 else 0, flat(kv), tuple(q.shape[-2:]), runs.numpy()


def flat(x: Tensor) -> np.ndarray:
    return x.detach().view(-1).numpy()
