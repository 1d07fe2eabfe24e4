"""CPU loops compiled by numba: sums of |x - c|^p, nearest centres, oblivious trees.

All take feature-major arrays, (n, N), so that the inner loop runs over rows and vectorises. Rows go in blocks whose
accumulators stay in the first-level cache. Signatures are explicit: other layouts are an error, not a recompilation.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

BLOCK = 512
HEAD = 8  # features on which all centres are compared before most are given up
CHUNK = 16
FASTMATH = {"contract", "nsz"}  # fused multiply-add; NaN and infinity keep their meaning


@intrinsic
def bits_of(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit(inline="always")
def power(x, p):
    """x^p for float32 x >= 0 and p > 0: 2^(p log2 x) by two polynomials, since libm's pow does not vectorise.

    Relative error below 1e-6 * (1 + |p log2 x|); results are kept in [2^-126, 2^127], so that 0^p is 1e-38.
    """
    bits = bits_of(x)
    exponent = (bits - np.int32(0x3F3504F3)) >> np.int32(23)  # leaves a mantissa in [sqrt(1/2), sqrt(2))
    t = float_of(bits - (exponent << np.int32(23))) - np.float32(1.0)
    q = np.float32(-0.146203534) * t + np.float32(0.234209851)  # log2(1 + t) / t, least squares on Chebyshev nodes
    q = q * t + np.float32(-0.248821806)
    q = q * t + np.float32(0.287075611)
    q = q * t + np.float32(-0.360241986)
    q = q * t + np.float32(0.480924039)
    q = q * t + np.float32(-0.721352759)
    q = q * t + np.float32(1.44269496)
    z = p * (np.float32(exponent) + t * q)
    z = min(max(z, np.float32(-126.0)), np.float32(126.9))
    whole = np.floor(z + np.float32(0.5))
    f = z - whole
    e = np.float32(0.00134004322) * f + np.float32(0.0096760371)  # 2^f on [-1/2, 1/2]
    e = e * f + np.float32(0.0555032721)
    e = e * f + np.float32(0.240221074)
    e = e * f + np.float32(0.693147207)
    e = e * f + np.float32(1.0)
    return e * float_of((np.int32(whole) + np.int32(127)) << np.int32(23))


@njit(inline="always")
def add_distances(x, centre, p, start, stop, total):
    """total[j] = sum over features of |x[:, start + j] - centre|^p."""
    total[: stop - start] = np.float32(0.0)
    for i in range(x.shape[0]):
        c = centre[i]
        for j in range(stop - start):
            total[j] += power(abs(x[i, start + j] - c), p)


@njit("f4[:, ::1](f4[:, ::1], f4[:, ::1], f4, f4)", cache=True, fastmath=FASTMATH)
def p_distances(x, centres, p, outer):
    """x (n, N), centres (k, n) -> (k, N): (sum |x - c|^p)^outer."""
    rows = x.shape[1]
    out = np.empty((centres.shape[0], rows), np.float32)
    total = np.empty(BLOCK, np.float32)
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        for k in range(centres.shape[0]):
            add_distances(x, centres[k], p, start, stop, total)
            for j in range(stop - start):
                out[k, start + j] = power(total[j], outer)
    return out


@njit("i8[::1](f4[:, ::1], f4[:, ::1], f4)", cache=True, fastmath=FASTMATH)
def nearest_centres(x, centres, p):
    """x (n, N), centres (k, n) -> int64 (N,): the centre of least sum |x - c|^p, the first among equals."""
    rows = x.shape[1]
    out = np.zeros(rows, np.int64)
    total = np.empty(BLOCK, np.float32)
    best = np.empty(BLOCK, np.float32)
    index = np.empty(BLOCK, np.int32)
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        best[:] = np.float32(np.inf)
        index[:] = np.int32(0)
        for k in range(centres.shape[0]):
            add_distances(x, centres[k], p, start, stop, total)
            for j in range(stop - start):
                closer = total[j] < best[j]
                best[j] = total[j] if closer else best[j]
                index[j] = np.int32(k) if closer else index[j]
        for j in range(stop - start):
            out[start + j] = index[j]
    return out


@njit("i8[::1](f4[:, ::1], f4[:, ::1], f4)", cache=True, fastmath={"contract", "nsz", "reassoc"})
def nearest_centres_wide(x, centres, p):
    """The same for many features, row by row: most centres are given up after a few features.

    Features go by falling spread among the centres. All centres are compared on the first HEAD features; the closest on
    those is summed in full, and gives the bound at which the others are given up, chunk by chunk.
    """
    n, rows = x.shape
    K = centres.shape[0]
    spread = np.empty(n, np.float32)
    for i in range(n):
        spread[i] = -np.std(centres[:, i])
    order = np.argsort(spread)
    head = np.empty((HEAD, K), np.float32)
    tail = np.empty((K, n - HEAD), np.float32)
    for k in range(K):
        for i in range(n):
            if i < HEAD:
                head[i, k] = centres[k, order[i]]
            else:
                tail[k, i - HEAD] = centres[k, order[i]]
    out = np.empty(rows, np.int64)
    row = np.empty(n - HEAD, np.float32)
    partial = np.empty(K, np.float32)
    for r in range(rows):
        partial[:] = np.float32(0.0)
        for i in range(HEAD):
            value = x[order[i], r]
            for k in range(K):
                partial[k] += power(abs(head[i, k] - value), p)
        for i in range(HEAD, n):
            row[i - HEAD] = x[order[i], r]
        first = np.argmin(partial)
        best = np.float32(np.inf)
        index = first
        for step in range(-1, K):
            k = first if step < 0 else step
            if partial[k] > best or step == first:
                continue
            total = partial[k]
            for start in range(0, n - HEAD, CHUNK):
                chunk = np.float32(0.0)
                for i in range(start, min(start + CHUNK, n - HEAD)):
                    chunk += power(abs(tail[k, i] - row[i]), p)
                total += chunk
                if total > best:
                    break
            if total < best or (total == best and k < index):
                best = total
                index = k
        out[r] = index
    return out


@njit("f4[:, ::1](f4[:, ::1], i8[:, ::1], f4[:, ::1], f4[:, :, ::1])", cache=True)
def oblivious_trees(x, dims, thresholds, leaves):
    """Mean over trees; x (n, N), dims and thresholds (trees, depth), leaves (trees, 2^depth, m) -> (m, N).

    Bit d of a row's leaf is x[dims[t, d]] > thresholds[t, d].
    """
    rows, (trees, depth), m = x.shape[1], dims.shape, leaves.shape[2]
    out = np.empty((m, rows), np.float32)
    code = np.empty(BLOCK, np.int32)
    total = np.empty((BLOCK, m), np.float32)
    scale = np.float32(1.0 / trees)
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        total[:] = np.float32(0.0)
        for t in range(trees):
            code[:] = np.int32(0)
            for d in range(depth):
                dim, threshold = dims[t, d], thresholds[t, d]
                for j in range(stop - start):
                    code[j] |= np.int32(x[dim, start + j] > threshold) << np.int32(d)
            for j in range(stop - start):
                leaf = leaves[t, code[j]]
                for i in range(m):
                    total[j, i] += leaf[i]
        for j in range(stop - start):
            for i in range(m):
                out[i, start + j] = total[j, i] * scale
    return out
