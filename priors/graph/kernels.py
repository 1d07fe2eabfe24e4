"""The loops of random functions and points, compiled by numba.

Arrays are feature-major, (n, N), so that the inner loop runs over rows and is vectorized. Rows are taken in blocks
whose accumulators stay in the first-level cache. Inner loops index one-dimensional views: with two indices they took
twice the time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from priors.floats import (
    FASTMATH,
    SUMS,
    bits_of,
    exp2_minus_1,
    exponential,
    fill_normals,
    integer_below,
    log2_of,
    power,
    rough_power,
    scramble,
    uniform,
)
from priors.graph.activations import cos_of_turns, mean_and_inverse_std
from priors.graph.scalars import fill_weights

BLOCK = 512  # rows
LANES = 8  # float32 values of a 256-bit vector
GROUP = 4  # trees whose leaves are added at once, with a quarter of the loads and stores of the sum


@njit("f4[:, ::1](f4[:, ::1], f4[:, ::1], f4, f4)", cache=True, fastmath=FASTMATH)
def p_distances(x, centers, p, outer):
    """(sum over features of |x - c|^p)^outer, (k, N), for x (n, N) and centers (k, n)."""
    rows = x.shape[1]
    out = np.empty((centers.shape[0], rows), np.float32)
    total = np.empty(BLOCK, np.float32)
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        # The sums of a block of rows stay in the cache while the features pass by.
        for k in range(centers.shape[0]):
            total[:] = np.float32(0.0)
            for i in range(x.shape[0]):
                center, column = centers[k, i], x[i, start:stop]
                for j in range(stop - start):
                    total[j] += power(abs(column[j] - center), p)
            row = out[k, start:stop]
            for j in range(stop - start):
                row[j] = power(total[j], outer)
    return out


@njit("i8[::1](f4[:, ::1], f4[:, ::1], f4)", cache=True, fastmath=FASTMATH)
def nearest_centers(x, centers, p):
    """Index of the first center with the smallest sum |x - c|^p, int64 (N,), for x (n, N) and centers (k, n).

    The powers are rough (see rough_power): a row about as near to two centers may get either.
    """
    rows = x.shape[1]
    out = np.zeros(rows, np.int64)
    total = np.empty(BLOCK, np.float32)
    best = np.empty(BLOCK, np.float32)
    index = np.empty(BLOCK, np.int32)
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        best[:] = np.float32(np.inf)
        index[:] = np.int32(0)
        # The sums of powers of a block of rows to one center at a time, which stay in the cache.
        for k in range(centers.shape[0]):
            total[:] = np.float32(0.0)
            for i in range(x.shape[0]):
                center, column = centers[k, i], x[i, start:stop]
                for j in range(stop - start):
                    total[j] += rough_power(abs(column[j] - center), p)
            # Strictly smaller: of equally near centers the first one stays.
            for j in range(stop - start):
                closer = total[j] < best[j]
                best[j] = total[j] if closer else best[j]
                index[j] = np.int32(k) if closer else index[j]
        for j in range(stop - start):
            out[start + j] = index[j]
    return out


@njit("u8[::1](f4[:, ::1])", cache=True)
def hash_rows(x):
    """A hash of each row of x (n, N), uint64 (N,), by which equal rows are found: 1 pair of others in 2^64 agrees."""
    out = np.zeros(x.shape[1], np.uint64)
    for i in range(x.shape[0]):
        row = x[i]
        for j in range(len(row)):
            out[j] = scramble(out[j] + np.uint64(np.uint32(bits_of(row[j]))) + np.uint64(1))
    return out


@njit("f4[:, ::1](f4[:, ::1], i8[:, ::1], f4[:, ::1], f4[:, :, ::1])", cache=True)
def oblivious_trees(x, dims, thresholds, leaves):
    """Mean of the trees' leaves, (m, N); x (n, N), dims and thresholds (trees, depth), leaves (trees, 2^depth, m).

    Bit d of the number of a row's leaf in tree t is x[dims[t, d]] > thresholds[t, d].
    """
    rows, (trees, depth), m = x.shape[1], dims.shape, leaves.shape[2]
    # Leaves of whole vectors, padded with zeros, so that sums over them have no remainder.
    width = -(-m // LANES) * LANES
    padded = np.zeros((trees, leaves.shape[1], width), np.float32)
    for t in range(trees):
        for leaf_index in range(leaves.shape[1]):
            for i in range(m):
                padded[t, leaf_index, i] = leaves[t, leaf_index, i]
    out = np.empty((m, rows), np.float32)
    # The sums of a block, 32 KB unless leaves are very wide, stay in the first-level cache.
    block = min(BLOCK, max(32, 2**13 // width))
    code = np.empty((GROUP, block), np.int32)
    total = np.empty((block, width), np.float32)
    scale = np.float32(1.0 / trees)

    for start in range(0, rows, block):
        stop = min(start + block, rows)
        total[:] = np.float32(0.0)
        for t in range(trees):
            # The leaf of each row: the test of level d is bit d of its number.
            leaf_of_row = code[t % GROUP]
            leaf_of_row[:] = np.int32(0)
            for d in range(depth):
                column, threshold = x[dims[t, d], start:stop], thresholds[t, d]
                bit = np.int32(1 << d)
                for j in range(stop - start):
                    leaf_of_row[j] += bit if column[j] > threshold else np.int32(0)
            # The leaves of the last four trees: the sums are loaded and stored once for all of them.
            if t % GROUP == GROUP - 1:
                for j in range(stop - start):
                    a, b = padded[t - 3, code[0, j]], padded[t - 2, code[1, j]]
                    c, d = padded[t - 1, code[2, j]], padded[t, code[3, j]]
                    for i in range(width):
                        total[j, i] += (a[i] + b[i]) + (c[i] + d[i])
        # Up to three trees that are left.
        for t in range(trees - trees % GROUP, trees):
            for j in range(stop - start):
                leaf = padded[t, code[t % GROUP, j]]
                for i in range(width):
                    total[j, i] += leaf[i]
        # The mean over the trees, (block, width) -> (m, block).
        for i in range(m):
            for j in range(stop - start):
                out[i, start + j] = total[j, i] * scale
    return out


@njit("f4[:, ::1](f4[:, ::1], i8, i8, i8, u8)", cache=True, error_model="numpy")
def random_trees(x, trees, depth, m, key):
    """Apply random oblivious trees to rows (TabICLv2, arXiv 2602.11139, appendix), and return the mean of their leaves.

    Each level of a tree compares one feature with its value in a random row. Features are drawn with probabilities
    proportional to their standard deviations; leaves are standard normal.

    Parameters
    ----------
    x : ndarray
        float32 (n, N).
    trees, depth : int
        Number of trees, and of the levels of each.
    m : int
        Values of a leaf.
    key : int
        uint64, the first counter of the random numbers: two for each level, then those of the leaves.

    Returns
    -------
    ndarray
        float32 (m, N); NaN if a standard deviation is not finite.
    """
    # Running sums of the standard deviations. At least 1e-8 each: a constant feature may be drawn, too.
    n, rows = x.shape
    cumulative = np.empty(n)
    total = 0.0
    for i in range(n):
        _, inverse_std = mean_and_inverse_std(x[i])
        total += max(1.0 / inverse_std, 1e-8)
        cumulative[i] = total
    if not np.isfinite(total):
        return np.full((m, rows), np.float32(np.nan))

    # The feature and the threshold of each level
    features = np.empty((trees, depth), np.int64)
    thresholds = np.empty((trees, depth), np.float32)
    for t in range(trees):
        for d in range(depth):
            u = uniform(scramble(key)) * total
            feature = 0
            while feature < n - 1 and u >= cumulative[feature]:
                feature += 1
            row = integer_below(scramble(key + np.uint64(1)), rows)
            key += np.uint64(2)
            features[t, d] = feature
            thresholds[t, d] = x[feature, row]

    leaves = np.empty((trees, 1 << depth, m), np.float32)
    fill_normals(leaves.reshape(-1), key)
    return oblivious_trees(x, features, thresholds, leaves)


@njit("Tuple((f4[:, ::1], f4[::1]))(f4[:, ::1], i8, f4, u8)", cache=True)
def components(x, size, spread, key):
    """Centers (size, n), random rows of x (n, N) plus standard normals, and widths (size,), exp(spread * normal)."""
    n, rows = x.shape
    centers = np.empty((size, n), np.float32)
    fill_normals(centers.reshape(-1), key)
    key += np.uint64(centers.size)
    sigma = np.empty(size, np.float32)
    fill_normals(sigma, key)
    key += np.uint64(size)
    for k in range(size):
        row = integer_below(scramble(key + np.uint64(k)), rows)
        for i in range(n):
            centers[k, i] += x[i, row]
        sigma[k] = np.exp(spread * sigma[k])
    return centers, sigma


@njit("f4[:, ::1](f4[:, ::1], f4[:, ::1], f4[::1], f4, f4)", cache=True, fastmath=FASTMATH, error_model="numpy")
def soft_assignment(x, centers, sigma, p, q):
    """Softmax over the centers of -(||x - c||_p / sigma)^q - log(2 pi sigma^2) / 2, float32 (k, N).

    x (n, N), centers (k, n), sigma (k,)
    """
    # (sum |x - c|^p)^(q / p) is ||x - c||_p^q.
    out = p_distances(x, centers, p, q / p)
    k, rows = out.shape
    highest = np.empty(BLOCK, np.float32)
    total = np.empty(BLOCK, np.float32)
    for start in range(0, rows, BLOCK):
        size = min(BLOCK, rows - start)
        highest[:] = np.float32(-np.inf)
        total[:] = np.float32(0.0)
        # Logits, and the largest of each row: exponentials of differences from it do not overflow.
        for i in range(k):
            row = out[i, start : start + size]
            factor = sigma[i] ** -q
            constant = np.float32(-0.5 * np.log(2 * np.pi)) - np.log(sigma[i])
            for j in range(size):
                row[j] = constant - factor * row[j]
                highest[j] = max(highest[j], row[j])
        # These exponentials, at most 1, and their sums.
        for i in range(k):
            row = out[i, start : start + size]
            for j in range(size):
                row[j] = exponential(row[j] - highest[j])
                total[j] += row[j]
        # One division for each row, then products.
        for j in range(size):
            total[j] = np.float32(1.0) / total[j]
        for i in range(k):
            row = out[i, start : start + size]
            for j in range(size):
                row[j] *= total[j]
    return out


@njit("void(f4[:, ::1], u8, f4)", cache=True, fastmath=FASTMATH)
def cos_turns(x, key, amplitude):
    """amplitude * cos(2 pi (x + phase)) in place, for x (k, N), with a random phase for each of the k.

    A value takes 0.13 ns, with torch's cos 0.5 ns.
    """
    for k in range(x.shape[0]):
        phase, row = uniform(scramble(key + np.uint64(k))), x[k]
        for j in range(len(row)):
            row[j] = amplitude * cos_of_turns(row[j] + phase)


@njit("f4[:, ::1](f4[:, :, ::1])", cache=True)
def pair_weights(matrices):
    """M_ij + M_ji for i < j, M_ii for i = j, row by row of the upper triangle; (m, s, s) -> (m, s (s + 1) / 2).

    With pair_products, a quadratic form is a product of two vectors of half its size.
    """
    m, s, _ = matrices.shape
    out = np.empty((m, s * (s + 1) // 2), np.float32)
    for o in range(m):
        matrix, weights = matrices[o], out[o]
        k = 0
        for i in range(s):
            weights[k] = matrix[i, i]
            for j in range(i + 1, s):
                weights[k + j - i] = matrix[i, j] + matrix[j, i]
            k += s - i
    return out


@njit("f4[:, ::1](f4[:, ::1])", cache=True, fastmath=FASTMATH)
def pair_products(x):
    """z_i z_j for i <= j, where z is x (n, N) and a constant 1, in the order of pair_weights."""
    n, rows = x.shape
    out = np.empty(((n + 1) * (n + 2) // 2, rows), np.float32)
    k = 0
    for i in range(n):
        for j in range(i, n):
            a, b, product = x[i], x[j], out[k]
            for r in range(rows):
                product[r] = a[r] * b[r]
            k += 1
        out[k] = x[i]  # z_i times the constant
        k += 1
    out[k] = np.float32(1.0)
    return out


@njit("void(f4[::1], f4, f4, u8)", cache=True, fastmath=FASTMATH, error_model="numpy")
def fill_radii(out, decay, scale, key):
    """Fill out (size,) with scale times draws from the density (decay - 1) (1 + r)^-decay, by its inverse CDF."""
    exponent = np.float32(1.0) / (np.float32(1.0) - decay)
    for i in range(len(out)):
        # Uniform in [1e-6, 1 - 1e-6): a radius is at most (10^6)^(1 / (decay - 1)) - 1 times scale.
        u = np.float32(1e-6) + np.float32(1 - 2e-6) * uniform(scramble(key + np.uint64(i)))
        radius, _ = exp2_minus_1(exponent * log2_of(u))
        out[i] = scale * radius


@njit("UniTuple(f4[:, ::1], 2)(i8, i8, f4, f4, f8[::1], f8[::1], u8)", cache=True, fastmath=SUMS)
def mixed_frequencies(size, n, decay, scale, slope, spread, key):
    """Directions, uniform on the sphere, times radii of fill_radii, float32 (size, n), and a normal matrix (n, n).

    Column i of the matrix, that of input i, is multiplied by a weight (see fill_weights) and by scale. The frequencies
    are the product of the two.
    """
    # The matrix: each input has a weight and a direction of its own.
    weights = np.empty((1, n), np.float32)
    fill_weights(weights, slope, spread, key)
    key += np.uint64(2 * n)
    mixing = np.empty((n, n), np.float32)
    fill_normals(mixing.reshape(-1), key)
    key += np.uint64(n * n)
    for j in range(n):
        for i in range(n):
            mixing[j, i] *= weights[0, i] * scale

    # Radii times directions: a normal vector over its norm is uniform on the sphere. 1e-30 avoids a division by zero.
    radii = np.empty(size, np.float32)
    fill_radii(radii, decay, np.float32(1.0), key)
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
        j = i + integer_below(scramble(key + np.uint64(i)), high - i)
        numbers[i], numbers[j] = numbers[j], numbers[i]
    return numbers[:size].copy()


@njit("f4[:, ::1](i8, i8, u8)", cache=True, fastmath=SUMS)
def ball_points(n, size, key):
    """Points, uniform in the unit ball of dimension n, float32 (n, size)."""
    out = np.empty((n, size), np.float32)
    # A normal vector over its norm is uniform on the sphere.
    fill_normals(out.reshape(-1), key)
    key += np.uint64(n * size)
    scale = np.full(size, np.float32(1e-30))
    for i in range(n):
        row = out[i]
        for j in range(size):
            scale[j] += row[j] * row[j]
    for j in range(size):
        # The ball of radius r has a share r^n of the volume of the unit ball.
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
