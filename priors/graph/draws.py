"""CPU loops compiled by numba: random weights, mixture points, kernel matrices, rows of norm one.

A table needs some hundred of these, most of them small: a call takes 1 to 5 us, with numpy 25 to 100 us.
`key` is a random uint64; a call makes all its random numbers from the counters that start there (priors.floats).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from priors.floats import (
    FASTMATH,
    SUMS,
    exp2_minus_1,
    exponential,
    fill_normals,
    log2_of,
    normal_pair,
    power,
    scramble,
    uniform,
)


@njit("void(f4[:, ::1], f8[::1], f8[::1], u8)", cache=True, fastmath=FASTMATH)
def fill_weights(out, slope, spread, key):
    """Fill each row of out (batch, n) with softmax(-slope log(i) + spread * normal), shuffled, of L2 norm sqrt(n).

    slope, spread: (batch,)
    """
    batch, n = out.shape
    log_rank = np.log(np.arange(1, n + 1)).astype(np.float32)
    flat = out.reshape(-1)
    fill_normals(flat, key)
    key += np.uint64(out.size)
    for r in range(batch):
        row = out[r]
        a, b = np.float32(slope[r]), np.float32(spread[r])
        highest = np.float32(-np.inf)
        for i in range(n):
            row[i] = b * row[i] - a * log_rank[i]
            highest = max(highest, row[i])
        square = np.float32(0.0)
        for i in range(n):
            row[i] = exponential(row[i] - highest)
            square += row[i] * row[i]
        scale = np.float32(math.sqrt(n / square))
        for i in range(n):
            row[i] *= scale
        for i in range(n - 1, 0, -1):
            j = ((scramble(key) >> np.uint64(32)) * np.uint64(i + 1)) >> np.uint64(32)
            key += np.uint64(1)
            row[i], row[j] = row[j], row[i]


@njit("f4[:, ::1](i8, f8[::1], f8[::1], u8)", cache=True)
def weighted_normals(n, slope, spread, key):
    """Standard normals (batch, n) times weights as of fill_weights; slope, spread (batch,)."""
    out = np.empty((len(slope), n), np.float32)
    fill_weights(out, slope, spread, key)
    normal = np.empty(n, np.float32)
    key += np.uint64(2 * out.size)
    for r in range(len(slope)):
        fill_normals(normal, key)
        key += np.uint64(n)
        for i in range(n):
            out[r, i] *= normal[i]
    return out


@njit("f4[:, ::1](i8, i8, i8, f8[::1], f8[::1], u8)", cache=True, fastmath=SUMS)
def weighted_products(n, k, m, slope, spread, key):
    """Products of normal matrices (n, k) and (k, m), weights of fill_weights between them, float32 (batch * n, m)."""
    batch = len(slope)
    weights = np.empty((batch, k), np.float32)
    fill_weights(weights, slope, spread, key)
    key += np.uint64(2 * weights.size)
    left = np.empty(k, np.float32)
    right = np.empty((k, m), np.float32)
    out = np.zeros((batch * n, m), np.float32)
    for b in range(batch):
        fill_normals(right.reshape(-1), key)
        key += np.uint64(k * m)
        for r in range(b * n, (b + 1) * n):
            fill_normals(left, key)
            key += np.uint64(k)
            row = out[r]
            for i in range(k):
                factor, other = left[i] * weights[b, i], right[i]
                for j in range(m):
                    row[j] += factor * other[j]
    return out


@njit("void(f4[::1], f4, u8)", cache=True, fastmath=FASTMATH, error_model="numpy")
def fill_radii(out, decay, key):
    """Fill out (size,) with draws from the density (decay - 1) (1 + r)^-decay, by inverting its distribution."""
    exponent = np.float32(1.0) / (np.float32(1.0) - decay)
    for i in range(len(out)):
        u = np.float32(1e-6) + np.float32(1 - 2e-6) * uniform(scramble(key + np.uint64(i)))
        out[i], _ = exp2_minus_1(exponent * log2_of(u))


@njit("UniTuple(f4[:, ::1], 2)(i8, i8, f4, f4, f8[::1], f8[::1], u8)", cache=True, fastmath=SUMS)
def mixed_frequencies(size, n, decay, scale, slope, spread, key):
    """Directions, uniform on the sphere, times radii of fill_radii, float32 (size, n), and a normal matrix (n, n).

    Column i of the matrix, that of input i, is multiplied by a weight (see fill_weights) and by scale. The frequencies
    are the product of the two.
    """
    weights = np.empty((1, n), np.float32)
    fill_weights(weights, slope, spread, key)
    key += np.uint64(2 * n)
    mixing = np.empty((n, n), np.float32)
    fill_normals(mixing.reshape(-1), key)
    key += np.uint64(n * n)
    for j in range(n):
        for i in range(n):
            mixing[j, i] *= weights[0, i] * scale
    radii = np.empty(size, np.float32)
    fill_radii(radii, decay, key)
    key += np.uint64(size)
    directions = np.empty((size, n), np.float32)
    fill_normals(directions.reshape(-1), key)
    for k in range(size):
        row = directions[k]
        square = np.float32(1e-30)
        for j in range(n):
            square += row[j] * row[j]
        radius = radii[k] / np.sqrt(square)
        for j in range(n):
            row[j] *= radius
    return directions, mixing


@njit("i8[::1](i8, i8, u8)", cache=True)
def distinct_integers(high, size, key):
    """`size` distinct integers below `high` in random order, int64 (size,), by a partial Fisher-Yates shuffle."""
    numbers = np.arange(high)
    for i in range(size):
        j = i + ((scramble(key + np.uint64(i)) >> np.uint64(32)) * np.uint64(high - i) >> np.uint64(32))
        numbers[i], numbers[j] = numbers[j], numbers[i]
    return numbers[:size].copy()


@njit("f4[:, ::1](i8, i8, i8, f8[::1], f8[::1], u8)", cache=True, fastmath=FASTMATH)
def mixture_points(size, components, dim, slope, spread, key):
    """Points of a Gaussian mixture, float32 (dim, size).

    slope, spread (1 + components,) are of weights (see fill_weights): the components' probabilities, up to a factor,
    and the scales of the columns of each component's Gaussian matrix, which are also multiplied by exp(g + h * normal)
    with g and h shared by the components.
    """
    shares = np.empty((1, components), np.float32)
    fill_weights(shares, slope[:1], spread[:1], key)
    key += np.uint64(2 * components)
    shapes = np.empty((components, dim), np.float32)
    fill_weights(shapes, slope[1:], spread[1:], key)
    key += np.uint64(2 * components * dim)
    parameters = np.empty(2 + components * (1 + dim + dim * dim), np.float32)
    fill_normals(parameters, key)
    key += np.uint64(len(parameters))
    g, h = parameters[0], parameters[1]
    sizes = parameters[2 : 2 + components]
    centers = parameters[2 + components : 2 + components * (1 + dim)].reshape(components, dim)
    spread = parameters[2 + components * (1 + dim) :].reshape(components, dim, dim)
    for c in range(components):
        for i in range(dim):
            for j in range(dim):
                spread[c, i, j] *= shapes[c, j] * np.exp(g + h * sizes[c])
    bounds = np.cumsum(shares[0])
    out = np.empty((dim, size), np.float32)
    normal = np.empty(dim + 1, np.float32)
    for r in range(size):
        u = uniform(scramble(key)) * bounds[-1]
        key += np.uint64(1)
        c = 0
        while c < components - 1 and u >= bounds[c]:
            c += 1
        for i in range(0, dim, 2):
            normal[i], normal[i + 1] = normal_pair(scramble(key))
            key += np.uint64(1)
        for i in range(dim):
            value = centers[c, i]
            for j in range(dim):
                value += spread[c, i, j] * normal[j]
            out[i, r] = value
    return out


@njit("f4[:, ::1](f4[:, ::1], f4[:, ::1], i8, f4, u8)", cache=True, fastmath=FASTMATH)
def kernel_matrices(a, b, batch, decay, key):
    """exp(-decay |a_i - b_j|) with random signs; a (dim, batch * n), b (dim, batch * m) -> (batch * n, m)."""
    n, m = a.shape[1] // batch, b.shape[1] // batch
    out = np.zeros((batch * n, m), np.float32)
    for r in range(batch * n):
        start = r // n * m
        row = out[r]
        for d in range(a.shape[0]):
            value = a[d, r]
            for j in range(m):
                row[j] += (value - b[d, start + j]) * (value - b[d, start + j])
        for j in range(m):
            sign = np.float32(np.int64(scramble(key + np.uint64(j)) >> np.uint64(63)) * 2 - 1)
            row[j] = sign * exponential(-decay * np.sqrt(row[j]))
        key += np.uint64(m)
    return out


@njit("void(f4[:, ::1], f4, u8)", cache=True, fastmath=SUMS)
def normalize_rows(matrix, noise, key):
    """Add noise * normal to matrix (rows, n) and divide its rows by their L2 norms (+1e-6), in place."""
    rows, n = matrix.shape
    normal = np.empty(n, np.float32)
    for r in range(rows):
        row = matrix[r]
        if noise > 0:
            fill_normals(normal, key)
            key += np.uint64(n)
            for i in range(n):
                row[i] += noise * normal[i]
        square = np.float32(0.0)
        for i in range(n):
            square += row[i] * row[i]
        scale = np.float32(1.0) / (np.sqrt(square) + np.float32(1e-6))
        for i in range(n):
            row[i] *= scale


@njit("f4[:, ::1](i8, i8, u8)", cache=True, fastmath=SUMS)
def ball_points(n, size, key):
    """Points, uniform in the unit ball of dimension n, float32 (n, size)."""
    out = np.empty((n, size), np.float32)
    fill_normals(out.reshape(-1), key)
    key += np.uint64(n * size)
    scale = np.full(size, np.float32(1e-30))
    for i in range(n):
        row = out[i]
        for j in range(size):
            scale[j] += row[j] * row[j]
    for j in range(size):
        radius = power(uniform(scramble(key + np.uint64(j))), np.float32(1.0 / n))
        scale[j] = radius / np.sqrt(scale[j])
    for i in range(n):
        row = out[i]
        for j in range(size):
            row[j] *= scale[j]
    return out


@njit("f4[:, ::1](i8, i8, u8)", cache=True)
def cube_points(n, size, key):
    """Points, uniform in [-1, 1]^n, float32 (n, size)."""
    out = np.empty((n, size), np.float32)
    flat = out.reshape(-1)
    for j in range(len(flat)):
        flat[j] = np.float32(2.0) * uniform(scramble(key + np.uint64(j))) - np.float32(1.0)
    return out
