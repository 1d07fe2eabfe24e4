"""Loops over floats, compiled by numba: priors.finish.clamp_and_standardize, and float32 powers, exponentials and
random numbers, which are inlined into loops since calls of libm do not vectorize."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

FASTMATH = {"contract", "nsz"}  # allows fused multiply-add; NaN and infinity keep their meaning
SUMS = {*FASTMATH, "reassoc"}  # also sums in any order, which vectorizes them


@intrinsic
def bits_of(typingctx, x):
    """The bits of a float32, as an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx, x):
    """The float32 with the bits of an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit(inline="always")
def mantissa(bits):
    """The float32 in [1, 2) with the mantissa of these bits."""
    return float_of((bits & np.int32(0x7FFFFF)) | np.int32(0x3F800000))


@njit(inline="always")
def float_of_log2(z):
    """2^(z / 2^23 - 127) for z in [0, 2^31), with a relative error of 2e-4."""
    # The bits of a float, as an integer, are its logarithm, interpolated linearly between powers of two. The factor
    # that corrects this, 2^(m-1) / m, is a minimax polynomial in the mantissa m that equals 1 at 1 and 2.
    bits = np.int32(z)
    m = mantissa(bits)
    q = np.float32(0.08317763) * m + np.float32(-0.60383493)
    q = q * m + np.float32(1.80215163)
    q = q * m + np.float32(-2.42727483)
    q = q * m + np.float32(2.1457805)
    return q * float_of(bits)


@njit(inline="always")
def power(x, p):
    """x^p for float32 x >= 0 and p > 0, with a relative error below 2e-4 + 1e-4 p."""
    # The result is monotone and continuous, and at most 2^126. For x = 0 it is 0, or 2^(-127 p) if p < 1. An error of
    # 1e-6 would take twice the time and change no distribution.

    # With x = 2^e m, the bits of x as an integer are 2^23 (127 + e + m - 1). The polynomial q in m approximates
    # 2^23 (log2(m) - (m - 1) - 127), and equals it at m = 1 and 2. The sum of bits and q is about 2^23 log2(x).
    bits = bits_of(x)
    m = mantissa(bits)
    q = np.float32(-0.08213068 * 2**23) * m + np.float32(0.64971165 * 2**23)
    q = q * m + np.float32(-2.13413482 * 2**23)
    q = q * m + np.float32(3.08638316 * 2**23)
    q = q * m + np.float32((-1.51982931 - 127) * 2**23)
    # p log2(x), in the form that float_of_log2 takes.
    z = p * (np.float32(bits) + q) + np.float32(127 * 2**23)
    return float_of_log2(min(max(z, np.float32(0.0)), np.float32(253 * 2**23)))


@njit(inline="always")
def rough_power(x, p):
    """x^p for float32 x >= 0 and p > 0, between 0.942^p and 1.062 times that; it rises with x, without jumps."""
    # Logarithm and power are interpolated linearly between powers of two, without the polynomials of `power`: 0.13 ns
    # instead of 0.42.
    z = p * (np.float32(bits_of(x)) + np.float32(-127 * 2**23)) + np.float32(127 * 2**23)
    return float_of(np.int32(min(max(z, np.float32(0.0)), np.float32(253 * 2**23))))


@njit(inline="always")
def exponential(x):
    """e^x for x <= 88, with a relative error of 2e-4; 0 below -88."""
    z = x * np.float32(2**23 / np.log(2)) + np.float32(127 * 2**23)
    return float_of_log2(max(z, np.float32(0.0)))


@njit(inline="always")
def log2_of(x):
    """log2(x) for float32 x > 0, with an absolute error of 1e-7 in addition to rounding; -127 for x = 0."""
    bits = bits_of(x)
    # The exponent that leaves a mantissa in [sqrt(1/2), sqrt(2)).
    exponent = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
    t = float_of(bits - (exponent << np.int32(23))) - np.float32(1.0)
    # log2(1 + t) / t, least squares on Chebyshev nodes.
    q = np.float32(-0.146203534) * t + np.float32(0.234209851)
    q = q * t + np.float32(-0.248821806)
    q = q * t + np.float32(0.287075611)
    q = q * t + np.float32(-0.360241986)
    q = q * t + np.float32(0.480924039)
    q = q * t + np.float32(-0.721352759)
    q = q * t + np.float32(1.44269496)
    return np.float32(exponent) + t * q


@njit(inline="always")
def exp2_minus_1(z):
    """2^z - 1 and 2^z for float32 z, with a relative error of 3e-7; z is clamped to -126..127."""
    z = min(max(z, np.float32(-126.0)), np.float32(127.0))
    whole = np.floor(z + np.float32(0.5))
    f = z - whole  # in [-1/2, 1/2]; Taylor series
    q = np.float32(np.log(2) ** 6 / 720) * f + np.float32(np.log(2) ** 5 / 120)
    q = q * f + np.float32(np.log(2) ** 4 / 24)
    q = q * f + np.float32(np.log(2) ** 3 / 6)
    q = q * f + np.float32(np.log(2) ** 2 / 2)
    q = q * f + np.float32(np.log(2))
    scale = float_of((np.int32(whole) + np.int32(127)) << np.int32(23))
    return scale * (q * f) + (scale - np.float32(1.0)), scale * (q * f) + scale


@njit(inline="always")
def accurate_exponential(x):
    """e^x with a relative error of 1e-6 or |x| 1e-7; infinity above 88, at least 2^-126."""
    _, value = exp2_minus_1(x * np.float32(1 / np.log(2)))
    return value if x <= np.float32(88.0) else x * np.float32(np.inf)


@njit(inline="always")
def accurate_power(x, p):
    """x^p for float32 x >= 0 and any p, with a relative error of 1e-6 (1 + |p|); 0 for x = 0, at most 2^127."""
    _, value = exp2_minus_1(p * log2_of(x))
    return value if x > np.float32(0.0) else x


@njit(inline="always")
def log1p_exp(x):
    """log(1 + e^x) for x <= 0, with an absolute error of 2e-7."""
    return np.float32(np.log(2)) * log2_of(np.float32(1.0) + accurate_exponential(x))


@njit(inline="always")
def scramble(counter):
    """A random uint64 from a counter: splitmix64 (Steele, Lea and Flood 2014)."""
    h = counter * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@njit(inline="always")
def uniform(h):
    """A uniform float32 in [0, 1) from the upper 24 of 64 random bits."""
    return np.float32(h >> np.uint64(40)) * np.float32(2.0**-24)


@njit(inline="always")
def integer_below(h, high):
    """A uniform uint64 in 0, ..., high - 1 from the upper 32 of 64 random bits, for 0 < high < 2^32."""
    return ((h >> np.uint64(32)) * np.uint64(high)) >> np.uint64(32)


@njit(inline="always")
def normal_pair(h):
    """Two independent standard normals from 64 random bits, by the Box-Muller transform; at most 6.8 in magnitude."""
    u = (np.float32(np.uint32(h)) + np.float32(0.5)) * np.float32(2.0**-32)
    radius = np.sqrt(np.float32(-2 * np.log(2)) * min(log2_of(u), np.float32(0.0)))
    a = np.float32(np.int32(h >> np.uint64(32))) * np.float32(np.pi * 2.0**-32)  # half the angle, in [-pi/2, pi/2]
    s = a * a
    sine = np.float32(2.7557314e-6) * s + np.float32(-1.9841270e-4)  # Taylor series
    sine = sine * s + np.float32(8.3333333e-3)
    sine = sine * s + np.float32(-1.6666667e-1)
    sine = a + a * s * sine
    cosine = np.float32(-2.7557319e-7) * s + np.float32(2.4801587e-5)
    cosine = cosine * s + np.float32(-1.3888889e-3)
    cosine = cosine * s + np.float32(4.1666667e-2)
    cosine = cosine * s + np.float32(-0.5)
    cosine = np.float32(1.0) + s * cosine
    return radius * (np.float32(1.0) - np.float32(2.0) * sine * sine), radius * np.float32(2.0) * sine * cosine


@njit("void(f4[::1], u8)", cache=True, fastmath=FASTMATH)
def fill_normals(out, key):
    """Fill out (size,) with standard normals: two from each of the counters key, key + 1, ..."""
    half = len(out) // 2
    for i in range(half):
        out[i], out[half + i] = normal_pair(scramble(key + np.uint64(i)))
    if len(out) % 2:
        out[-1], _ = normal_pair(scramble(key + np.uint64(half)))


@njit("UniTuple(f8, 3)(f8[::1], f8, f8)", cache=True, fastmath={"contract", "nsz", "reassoc"})
def moments_within(x, center, bound):
    """Number, mean and sum of squared deviations of the values of x (N,) at most `bound` away from `center`."""
    count = total = 0.0
    for j in range(len(x)):
        inside = abs(x[j] - center) <= bound
        count += 1.0 if inside else 0.0
        total += x[j] if inside else 0.0
    mean = total / count
    square = 0.0
    for j in range(len(x)):
        deviation = x[j] - mean
        square += deviation * deviation if abs(x[j] - center) <= bound else 0.0
    return count, mean, square


@njit("UniTuple(f8, 2)(f8[::1])", cache=True, fastmath={"contract", "nsz", "reassoc"})
def mean_and_std(x):
    """Mean and standard deviation (ddof 1) of x (N,)."""
    total = square = 0.0
    for j in range(len(x)):
        total += x[j]
    mean = total / len(x)
    for j in range(len(x)):
        deviation = x[j] - mean
        square += deviation * deviation
    return mean, math.sqrt(square / (len(x) - 1))


@njit("f4[:, ::1](f4[:, ::1], f8, f8, f8)", cache=True)
def clamp_and_standardize_columns(columns, outlier_stds, min_std, clip):
    """Clamp outliers of columns, and standardize the columns.

    Parameters
    ----------
    columns : ndarray
        float32 (M, N).
    outlier_stds : float
        How many standard deviations a value may be away from the mean; both are those of the values inside this range
        around the mean of all values.
    min_std : float
        A smaller standard deviation counts as this one.
    clip : float
        Bound of the standardized values.

    Returns
    -------
    ndarray
        float32 (M, N); a column with a value that is not finite is NaN.
    """
    M, N = columns.shape
    out = np.empty((M, N), np.float32)
    x = np.empty(N)
    for f in range(M):
        # Assignments of slices, here and elsewhere, took a third of all compiling.
        for j in range(N):
            x[j] = columns[f, j]
        mean, std = mean_and_std(x)
        if math.isfinite(std):
            # Clamp.
            count, mean, square = moments_within(x, mean, outlier_stds * std)
            # In a column of two values the rarer one is an outlier if at most 1 row in 17 holds it. min_std keeps such
            # a column from becoming constant: the rare value ends at +-4, with a standard deviation below one.
            bound = outlier_stds * max(math.sqrt(square / (count - 1)), min_std)
            low, high = mean - bound, mean + bound
            for j in range(N):
                x[j] = min(max(x[j], low), high)

            # Standardize.
            mean, std = mean_and_std(x)
            scale = 1 / max(std, min_std)
            for j in range(N):
                out[f, j] = min(max((x[j] - mean) * scale, -clip), clip)
        else:
            out[f] = np.nan
    return out


@njit("void(f4[:, ::1], f8, f8)", cache=True, fastmath=SUMS)
def standardize_columns(x, shift, scale):
    """Replace x (N, H) by scale * (standardized x + shift), where columns have mean 0 and standard deviation 1."""
    # Rows are read one after the other, and all columns at once, which is vectorized: a tenth of the time of torch.
    N, H = x.shape
    means = np.zeros(H)
    squares = np.zeros(H)
    for i in range(N):
        for j in range(H):
            means[j] += x[i, j]
    for j in range(H):
        means[j] /= N
    for i in range(N):
        for j in range(H):
            deviation = x[i, j] - means[j]
            squares[j] += deviation * deviation
    for j in range(H):
        squares[j] = scale / (math.sqrt(squares[j] / (N - 1)) + 1e-6)  # the factor of the column
    for i in range(N):
        for j in range(H):
            x[i, j] = (x[i, j] - means[j]) * squares[j] + scale * shift


@njit("f4[:, :, ::1](f8[::1], f8[::1], f8[::1], i8)", cache=True, fastmath=FASTMATH)
def rotate(sines, cosines, angles, times):
    """Rotate vectors of these coordinates (F,) 0, 1, ..., times - 1 times by their angles: (2, times, F)."""
    F = len(angles)
    out = np.empty((2, times, F), np.float32)
    step_sines, step_cosines = np.sin(angles), np.cos(angles)
    y, x = sines.copy(), cosines.copy()
    for i in range(times):
        for j in range(F):
            out[0, i, j] = y[j]
            out[1, i, j] = x[j]
            turned = y[j] * step_cosines[j] + x[j] * step_sines[j]
            x[j] = x[j] * step_cosines[j] - y[j] * step_sines[j]
            y[j] = turned
    return out


@njit("void(f4[::1], f4, f4, f4[::1], f4[::1])", cache=True, fastmath=FASTMATH)
def interpolate(x, low, step, table, out):
    """Fill out (size,) with a function of x (size,) whose values at low, low + step, ... are in the table."""
    for i in range(len(x)):
        position = (x[i] - low) / step
        cell = np.int32(position)
        fraction = position - np.float32(cell)
        out[i] = table[cell] + fraction * (table[cell + 1] - table[cell])
