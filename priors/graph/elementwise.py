"""The activations that act on single values, compiled by numba; the names are those of priors.graph.activations."""

from __future__ import annotations

import numpy as np
from numba import njit

from priors.floats import FASTMATH, accurate_exponential, accurate_power, exp2_minus_1, log1p_exp, log2_of

SMOOTH = (
    *("tanh", "elu", "selu", "silu", "softplus", "gauss", "exp", "sin", "log_abs", "sigmoid", "logsigmoid"),
    *("relu_power", "signed_power"),
)
PIECEWISE = (
    *("identity", "leaky_relu", "relu", "relu6", "hardtanh", "sign", "heaviside", "box", "square", "abs"),
    *("round", "fraction"),
)
CODES = {name: code for code, name in enumerate(SMOOTH + PIECEWISE)}
(TANH, ELU, SELU, SILU, SOFTPLUS, GAUSS, EXP, SIN, LOG_ABS, SIGMOID, LOGSIGMOID, RELU_POWER, SIGNED_POWER) = range(13)
(IDENTITY, LEAKY_RELU, RELU, RELU6, HARDTANH, SIGN, HEAVISIDE, BOX, SQUARE, ABS, ROUND, FRACTION) = range(13, 25)
ZERO, ONE = np.float32(0.0), np.float32(1.0)
SELU_SCALE, SELU_ALPHA = np.float32(1.0507009873554805), np.float32(1.6732632423543772)


@njit(inline="always")
def expm1(x):
    value, _ = exp2_minus_1(x * np.float32(1 / np.log(2)))
    return value


@njit(inline="always")
def tanh(x):
    # 2 / (e^2x + 1) - 1 would lose small x; beyond 9 the value is 1.
    e = expm1(min(max(x, np.float32(-9.0)), np.float32(9.0)) * np.float32(2.0))
    return e / (e + np.float32(2.0)) + x * ZERO


@njit(inline="always")
def sigmoid(x):
    return ONE / (ONE + accurate_exponential(min(-x, np.float32(88.0)))) + x * ZERO


@njit(inline="always")
def sine(x):
    """sin(x) with an error of 2e-6 beside that of x / (2 pi) in float32; see kernels.cos_turns."""
    u = x * np.float32(0.5 / np.pi) - np.float32(0.25)
    u -= np.floor(u + np.float32(0.5))
    s = u * u
    q = np.float32(-21.07678212) * s + np.float32(58.79403871)
    q = q * s + np.float32(-85.27239701)
    q = q * s + np.float32(64.92872662)
    q = q * s + np.float32(-19.73898252)
    return q * s + np.float32(0.99999922)


@njit("void(f4[::1], i8)", cache=True, fastmath=FASTMATH, error_model="numpy")
def apply_piecewise(x, code):
    """The part of `apply` for the codes of PIECEWISE."""
    if code == LEAKY_RELU:
        for j in range(len(x)):
            x[j] = x[j] if x[j] >= ZERO else x[j] * np.float32(0.01)
    elif code == RELU:
        for j in range(len(x)):
            x[j] = max(x[j], ZERO)
    elif code == RELU6:
        for j in range(len(x)):
            x[j] = min(max(x[j], ZERO), np.float32(6.0))
    elif code == HARDTANH:
        for j in range(len(x)):
            x[j] = min(max(x[j], -ONE), ONE)
    elif code == SIGN:
        for j in range(len(x)):
            x[j] = ONE if x[j] >= ZERO else -ONE
    elif code == HEAVISIDE:
        for j in range(len(x)):
            x[j] = ONE if x[j] > ZERO else ZERO
    elif code == BOX:
        for j in range(len(x)):
            x[j] = ONE if abs(x[j]) <= ONE else ZERO
    elif code == SQUARE:
        for j in range(len(x)):
            x[j] *= x[j]
    elif code == ABS:
        for j in range(len(x)):
            x[j] = abs(x[j])
    elif code == ROUND:
        for j in range(len(x)):
            x[j] = np.rint(x[j])
    elif code == FRACTION:
        for j in range(len(x)):
            x[j] -= np.floor(x[j])


@njit("void(f4[::1], i8, f4)", cache=True, fastmath=FASTMATH, error_model="numpy")
def apply(x, code, power):
    """Apply the function of this code, an entry of CODES, to x (size,) in place; power is that of the two powers."""
    if code >= IDENTITY:
        apply_piecewise(x, code)
    elif code == TANH:
        for j in range(len(x)):
            x[j] = tanh(x[j])
    elif code == ELU:
        for j in range(len(x)):
            x[j] = x[j] if x[j] > ZERO else expm1(x[j])
    elif code == SELU:
        for j in range(len(x)):
            x[j] = SELU_SCALE * (x[j] if x[j] > ZERO else SELU_ALPHA * expm1(x[j]))
    elif code == SILU:
        for j in range(len(x)):
            x[j] *= sigmoid(x[j])
    elif code == SOFTPLUS:
        for j in range(len(x)):
            x[j] = max(x[j], ZERO) + log1p_exp(-abs(x[j]))
    elif code == GAUSS:
        for j in range(len(x)):
            x[j] = accurate_exponential(-x[j] * x[j])
    elif code == EXP:
        for j in range(len(x)):
            x[j] = accurate_exponential(x[j])
    elif code == SIN:
        for j in range(len(x)):
            x[j] = sine(x[j])
    elif code == LOG_ABS:
        for j in range(len(x)):
            # The last term keeps NaN, over which log2_of passes.
            x[j] = np.float32(np.log(2)) * log2_of(max(abs(x[j]), np.float32(1e-6))) + x[j] * ZERO
    elif code == SIGMOID:
        for j in range(len(x)):
            x[j] = sigmoid(x[j])
    elif code == LOGSIGMOID:
        for j in range(len(x)):
            x[j] = min(x[j], ZERO) - log1p_exp(-abs(x[j]))
    elif code == RELU_POWER:
        for j in range(len(x)):
            x[j] = accurate_power(abs(x[j]), power) if x[j] > ZERO else x[j] * ZERO
    else:
        for j in range(len(x)):
            x[j] = np.copysign(accurate_power(abs(x[j]), power), x[j])
