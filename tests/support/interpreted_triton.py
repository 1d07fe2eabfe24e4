"""Triton's interpreter with the bf16 of a GPU; its own multiplies the bits of bf16 as integers, and truncates.

It must be imported in a process with TRITON_INTERPRET=1, since the interpreter is chosen when Triton is imported.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

BUILDER_DOT = InterpreterBuilder.create_dot
BUILDER_CAST = InterpreterBuilder.cast_impl


def widened(x: TensorHandle) -> TensorHandle:
    """bf16, which the interpreter holds as uint16, as fp32."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def dot(self, a, b, *others):
    return BUILDER_DOT(self, widened(a), widened(b), *others)


def cast(self, src, dst_type):
    """Round fp32 to the nearest bf16, to even ones in the middle."""
    if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
        return BUILDER_CAST(self, src, dst_type)
    bits = src.data.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return TensorHandle(np.where(np.isnan(src.data), np.uint16(0x7FC0), rounded), tl.bfloat16)


def install() -> None:
    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = lambda self, src, dst_type, rounding_mode: cast(self, src, dst_type)
