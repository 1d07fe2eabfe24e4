"""Arithmetic on eight numbers at a time, as LLVM vectors: what the CPU kernels of attention are made of.

Numba's own loops over eight values stay scalar as soon as their body is long, so these functions write LLVM's
instructions themselves. All arrays are flat, contiguous and float32; starts, strides and steps count values. Numba
keeps compiled code by the file that calls these functions: after a change here, delete the *.nbi files in __pycache__.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
TILE = 4  # rows of a tile of sums kept in registers; 4 x 4 or 4 x 2 vectors, of 16 (AVX2) or 32 (AVX-512)

VECTOR = ir.VectorType(ir.FloatType(), LANES)
INTEGERS = ir.VectorType(ir.IntType(32), LANES)
INDEX = ir.IntType(64)

# 2^f for f in [-0.5, 0.5], highest power first: relative error 2e-7.
EXP2 = (1.5353362e-4, 1.3398874e-3, 9.6184373e-3, 5.5503324e-2, 2.4022649e-1, 6.9314720e-1, 1.0)
ROUNDER = 1.5 * 2**23  # a number between 2^23 and 2^24 has no fraction
POWERS_OF_TWO = np.float32(1.4426950408889634)  # log2(e): exp(x) = 2^(log2(e) x)


class Emit:
    """Writes vector instructions into the function that Numba is compiling."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder, self.void = builder, context.get_dummy_value()
        self.args = [
            cgutils.create_struct_proxy(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, args, strict=True)
        ]

    def constant(self, value: float) -> Any:
        return ir.Constant(VECTOR, [value] * LANES)

    def offset(self, start: Any, *steps: tuple[Any, Any]) -> Any:
        """start plus the sum of the products."""
        for a, b in steps:
            a = ir.Constant(INDEX, a) if isinstance(a, int) else a
            start = self.builder.add(start, self.builder.mul(a, b))
        return start

    def load(self, data: Any, offset: Any) -> Any:
        value = self.builder.load(self._vector(data, offset))
        value.align = 4
        return value

    def store(self, value: Any, data: Any, offset: Any) -> None:
        self.builder.store(value, self._vector(data, offset)).align = 4

    def _vector(self, data: Any, offset: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(data, [offset]), VECTOR.as_pointer())

    def call(self, name: str, *values: Any) -> Any:
        kind = ir.FunctionType(VECTOR, [VECTOR] * len(values))
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}.v{LANES}f32")
        return self.builder.call(function, values)

    def larger(self, a: Any, b: Any) -> Any:
        """max(a, b), and b where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def broadcast(self, value: Any) -> Any:
        zero = ir.Constant(ir.IntType(32), 0)
        first = self.builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, zero)
        return self.shuffle(first, first, [0] * LANES)

    def load_broadcast(self, data: Any, offset: Any) -> Any:
        return self.broadcast(self.builder.load(self.builder.gep(data, [offset])))

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(INTEGERS, lanes))

    def exp2(self, power: Any) -> Any:
        """2^power; about 1e-38 for powers below -126, NaN for NaN."""
        builder = self.builder
        power = self.larger(self.constant(-126.0), power)  # the second where one is NaN
        shifted = builder.fadd(power, self.constant(ROUNDER))  # its lowest bits are the nearest whole number
        rest = builder.fsub(power, builder.fsub(shifted, self.constant(ROUNDER)))
        value = self.constant(EXP2[0])
        for coefficient in EXP2[1:]:
            value = self.call("fma", value, rest, self.constant(coefficient))
        exponent = builder.shl(builder.bitcast(shifted, INTEGERS), ir.Constant(INTEGERS, [23] * LANES))
        return builder.bitcast(builder.add(builder.bitcast(value, INTEGERS), exponent), VECTOR)

    def loop(self, count: Any, states: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Run the body for 0..count-1, at least once: it maps states to new ones, and the last ones are returned."""
        builder, before = self.builder, self.builder.block
        block, after = builder.append_basic_block("body"), builder.append_basic_block("after")
        builder.branch(block)
        builder.position_at_end(block)
        k, phis = builder.phi(INDEX), [builder.phi(VECTOR) for _ in states]
        new = body(k, phis)
        for phi, first, value in zip(phis, states, new, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, block)
        following = builder.add(k, ir.Constant(INDEX, 1))
        k.add_incoming(ir.Constant(INDEX, 0), before)
        k.add_incoming(following, block)
        builder.cbranch(builder.icmp_signed("<", following, count), block, after)
        builder.position_at_end(after)
        return new


@intrinsic
def multiply_tile(_, a, a_start, a_row, a_k, b, b_start, b_column, b_k, c, c_start, c_row, c_column, count):
    """TILE x TILE of a matrix product per lane: c[i, j] = sum over k < count of a[i, k] b[j, k], all vectors."""
    n = types.intp
    signature = types.void(a, n, n, n, b, n, n, n, c, n, n, n, n)

    def generate(*call: Any) -> Any:
        emit = Emit(*call)
        a, a_start, a_row, a_k, b, b_start, b_column, b_k, c, c_start, c_row, c_column, count = emit.args

        def add(k: Any, sums: list[Any]) -> list[Any]:
            left = [emit.load(a, emit.offset(a_start, (i, a_row), (k, a_k))) for i in range(TILE)]
            right = [emit.load(b, emit.offset(b_start, (j, b_column), (k, b_k))) for j in range(TILE)]
            pairs = ((x, y) for x in left for y in right)
            return [emit.call("fma", x, y, total) for (x, y), total in zip(pairs, sums, strict=True)]

        sums = emit.loop(count, [emit.constant(0.0)] * TILE**2, add)
        for number, total in enumerate(sums):
            i, j = divmod(number, TILE)
            emit.store(total, c, emit.offset(c_start, (i, c_row), (j, c_column)))
        return emit.void

    return signature, generate


def outer_tile(rows: int, vectors: int) -> Any:
    """The product of single values and vectors, `rows` by `vectors` vectors.

    c[i, j] = sum over k < count of a[i, k] b[k, j], on top of c's values if `keep` is not 0
    """

    @intrinsic
    def tile(_, a, a_start, a_row, a_k, b, b_start, b_k, c, c_start, c_row, keep, count):
        n = types.intp
        signature = types.void(a, n, n, n, b, n, n, c, n, n, n, n)

        def generate(*call: Any) -> Any:
            emit = Emit(*call)
            a, a_start, a_row, a_k, b, b_start, b_k, c, c_start, c_row, keep, count = emit.args
            lanes = ir.Constant(INDEX, LANES)
            places = [emit.offset(c_start, (i, c_row), (j, lanes)) for i in range(rows) for j in range(vectors)]
            kept = emit.builder.icmp_signed("!=", keep, ir.Constant(INDEX, 0))
            first = [emit.builder.select(kept, emit.load(c, place), emit.constant(0.0)) for place in places]

            def add(k: Any, sums: list[Any]) -> list[Any]:
                left = [emit.load_broadcast(a, emit.offset(a_start, (i, a_row), (k, a_k))) for i in range(rows)]
                right = [emit.load(b, emit.offset(b_start, (k, b_k), (j, lanes))) for j in range(vectors)]
                pairs = ((x, y) for x in left for y in right)
                return [emit.call("fma", x, y, total) for (x, y), total in zip(pairs, sums, strict=True)]

            for place, total in zip(places, emit.loop(count, first, add), strict=True):
                emit.store(total, c, place)
            return emit.void

        return signature, generate

    return tile


# FMA instructions take four cycles, and cores start two in each: a tile needs eight sums or more
outer_8_1, outer_8_2, outer_4_4 = outer_tile(8, 1), outer_tile(8, 2), outer_tile(4, 4)


@intrinsic
def combine(_, x, a, factor_a, b, factor_b, y, c):
    """y[c] = factor_a x[a] + factor_b x[b], vectors times numbers."""
    n, number = types.intp, types.float32
    signature = types.void(x, n, number, n, number, y, n)

    def generate(*call: Any) -> Any:
        emit = Emit(*call)
        x, a, factor_a, b, factor_b, y, c = emit.args
        product = emit.builder.fmul(emit.load(x, b), emit.broadcast(factor_b))
        emit.store(emit.call("fma", emit.load(x, a), emit.broadcast(factor_a), product), y, c)
        return emit.void

    return signature, generate


@intrinsic
def move(_, x, a, factor, y, b, keep):
    """y[b] = factor x[a], vectors, on top of y[b] if `keep` is not 0."""
    n = types.intp
    signature = types.void(x, n, types.float32, y, n, n)

    def generate(*call: Any) -> Any:
        emit = Emit(*call)
        x, a, factor, y, b, keep = emit.args
        kept = emit.builder.icmp_signed("!=", keep, ir.Constant(INDEX, 0))
        before = emit.builder.select(kept, emit.load(y, b), emit.constant(0.0))
        emit.store(emit.call("fma", emit.load(x, a), emit.broadcast(factor), before), y, b)
        return emit.void

    return signature, generate


@intrinsic
def transpose(_, x, start, stride, y, y_start, y_stride, factor):
    """y vectors, times the factor, of the LANES x LANES values whose rows start at x[start + l stride]."""
    n = types.intp
    signature = types.void(x, n, n, y, n, n, types.float32)

    def generate(*call: Any) -> Any:
        emit = Emit(*call)
        x, start, stride, y, y_start, y_stride, factor = emit.args
        rows = [emit.load(x, emit.offset(start, (i, stride))) for i in range(LANES)]
        pairs = []
        for a, b in zip(rows[::2], rows[1::2], strict=True):
            pairs.append(emit.shuffle(a, b, [0, 8, 1, 9, 4, 12, 5, 13]))
            pairs.append(emit.shuffle(a, b, [2, 10, 3, 11, 6, 14, 7, 15]))
        fours = []
        for first in (0, 4):
            for a, b in ((0, 2), (1, 3)):
                a, b = pairs[first + a], pairs[first + b]
                fours.append(emit.shuffle(a, b, [0, 1, 8, 9, 4, 5, 12, 13]))
                fours.append(emit.shuffle(a, b, [2, 3, 10, 11, 6, 7, 14, 15]))
        low = [emit.shuffle(a, b, [0, 1, 2, 3, 8, 9, 10, 11]) for a, b in zip(fours[:4], fours[4:], strict=True)]
        high = [emit.shuffle(a, b, [4, 5, 6, 7, 12, 13, 14, 15]) for a, b in zip(fours[:4], fours[4:], strict=True)]
        wide = emit.broadcast(factor)
        for i, column in enumerate([*low, *high]):
            emit.store(emit.builder.fmul(column, wide), y, emit.offset(y_start, (i, y_stride)))
        return emit.void

    return signature, generate
