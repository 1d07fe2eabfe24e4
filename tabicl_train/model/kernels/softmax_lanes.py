"""Softmax and its gradient on eight sequences at a time, as LLVM vectors; conventions as in `lanes`."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from tabicl_train.model.kernels.lanes import LANES, Emit

LOWEST = float("-inf")


@intrinsic
def softmax(_, x, start, count):
    """Softmax per lane of `count` vectors, in place; the input counts in powers of two."""
    signature = types.void(x, types.intp, types.intp)

    def generate(*call: Any) -> Any:
        emit = Emit(*call)
        builder, (x, start, count) = emit.builder, emit.args

        def place(k: Any) -> Any:
            return emit.offset(start, (LANES, k))

        [largest] = emit.loop(count, [emit.constant(LOWEST)], lambda k, m: [emit.larger(emit.load(x, place(k)), m[0])])

        def exponential(k: Any, total: list[Any]) -> list[Any]:
            value = emit.exp2(builder.fsub(emit.load(x, place(k)), largest))
            emit.store(value, x, place(k))
            return [builder.fadd(total[0], value)]

        [total] = emit.loop(count, [emit.constant(0.0)], exponential)
        factor = builder.fdiv(emit.constant(1.0), total)

        def scale(k: Any, _: list[Any]) -> list[Any]:
            emit.store(builder.fmul(emit.load(x, place(k)), factor), x, place(k))
            return []

        emit.loop(count, [], scale)
        return emit.void

    return signature, generate


@intrinsic
def softmax_backward(_, p, dp, start, count):
    """dp = p * (dp - sum of p dp) per lane, over `count` vectors: the gradient of the softmax's input."""
    signature = types.void(p, dp, types.intp, types.intp)

    def generate(*call: Any) -> Any:
        emit = Emit(*call)
        builder, (p, dp, start, count) = emit.builder, emit.args

        def both(k: Any) -> tuple[Any, Any]:
            place = emit.offset(start, (LANES, k))
            return emit.load(p, place), emit.load(dp, place)

        [total] = emit.loop(count, [emit.constant(0.0)], lambda k, s: [emit.call("fma", *both(k), s[0])])

        def subtract(k: Any, _: list[Any]) -> list[Any]:
            weight, gradient = both(k)
            value = builder.fmul(weight, builder.fsub(gradient, total))
            emit.store(value, dp, emit.offset(start, (LANES, k)))
            return []

        emit.loop(count, [], subtract)
        return emit.void

    return signature, generate


@intrinsic
def extend_softmax(_, x, start, stride, count, largest, total, factor, at):
    """Softmax over more values than are at hand: `count` vectors x[start + k stride], which count in powers of two.

    They become 2^(x - m), m the largest so far; largest[at] = m, total[at] is the sum so far, and factor[at] what
    earlier results are to be multiplied by.
    """
    n = types.intp
    signature = types.void(x, n, n, n, largest, total, factor, n)

    def generate(*call: Any) -> Any:
        emit = Emit(*call)
        builder, (x, start, stride, count, largest, total, factor, at) = emit.builder, emit.args
        before = emit.load(largest, at)

        def place(k: Any) -> Any:
            return emit.offset(start, (stride, k))

        [now] = emit.loop(count, [before], lambda k, m: [emit.larger(emit.load(x, place(k)), m[0])])
        shrunk = emit.exp2(builder.fsub(before, now))

        def exponential(k: Any, sums: list[Any]) -> list[Any]:
            value = emit.exp2(builder.fsub(emit.load(x, place(k)), now))
            emit.store(value, x, place(k))
            return [builder.fadd(sums[0], value)]

        [sums] = emit.loop(count, [builder.fmul(emit.load(total, at), shrunk)], exponential)
        for value, array in ((now, largest), (sums, total), (shrunk, factor)):
            emit.store(value, array, at)
        return emit.void

    return signature, generate


@intrinsic
def weigh(_, x, dx, start, stride, count, largest, factor, inner, at):
    """x = factor[at] 2^(x - largest[at]), the weights; dx = x * (dx - inner[at]), over `count` vectors."""
    n = types.intp
    signature = types.void(x, dx, n, n, n, largest, factor, inner, n)

    def generate(*call: Any) -> Any:
        emit = Emit(*call)
        builder, (x, dx, start, stride, count, largest, factor, inner, at) = emit.builder, emit.args
        top, share, product = (emit.load(array, at) for array in (largest, factor, inner))

        def step(k: Any, _: list[Any]) -> list[Any]:
            place = emit.offset(start, (stride, k))
            weight = builder.fmul(emit.exp2(builder.fsub(emit.load(x, place), top)), share)
            emit.store(weight, x, place)
            emit.store(builder.fmul(weight, builder.fsub(emit.load(dx, place), product)), dx, place)
            return []

        emit.loop(count, [], step)
        return emit.void

    return signature, generate
