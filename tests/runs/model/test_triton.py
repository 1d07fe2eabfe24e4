"""The Triton kernel of a scaling rule in Triton's interpreter, against float64.

The interpreter is chosen when Triton is imported, so this file is also a script.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

tl = pytest.importorskip("triton.language")

from triton.runtime import interpreter  # noqa: E402

from tabicl_train.model import triton_scaling  # noqa: E402

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
GENERATOR = torch.Generator().manual_seed(0)
# tokens, heads, head dimension, width of base and gate, segments of tokens in order, dtype
CASES = [
    (41, 8, 16, 16, True, torch.float32),
    (41, 8, 16, 1, False, torch.float32),
    (30, 3, 8, 8, False, torch.bfloat16),
    (30, 2, 32, 1, True, torch.float16),
    (20, 4, 32, 32, True, torch.float32),
    (20, 4, 64, 64, True, torch.bfloat16),
    (1, 1, 64, 64, True, torch.float32),
]


def wide(x):
    """bf16 as fp32: the interpreter holds bf16 as integers, and multiplies matrices of these."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    values = (x.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(values, tl.float32)


def randn(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def assert_close(values, expected, tolerance):
    for value, exact in zip(values, expected, strict=True):
        assert value.shape == exact.shape
        error = ((value - exact).norm() / exact.norm()).item()
        assert error <= tolerance, error


def check(tokens, heads, d, width, in_order, dtype):
    q, base = randn(tokens, heads, d).to(dtype), randn(3, heads, width)
    segment = torch.randint(3, (tokens,), generator=GENERATOR).int()
    if in_order:
        segment = segment.sort()[0]
    w1, b1, w2, b2 = 0.3 * randn(64, d), randn(64), 0.3 * randn(width, 64), 0.3 * randn(width)
    leaves = [x.double().requires_grad_() for x in (q, base, w1, b1, w2, b2)]
    gate = 1 + torch.tanh(F.linear(F.gelu(F.linear(leaves[0], *leaves[2:4])), *leaves[4:]))
    exact = leaves[0] * leaves[1][segment.long()] * gate
    slope = randn(*exact.shape).to(dtype)
    gradients = torch.autograd.grad(exact, leaves, slope.double())

    given = (q, base, segment, w1, b1, w2, b2)
    scaled, moments = triton_scaling.scale_queries(*given)
    assert_close([moments], [torch.stack([gate.sum(), gate.square().sum()])], 3e-6)
    results = triton_scaling.scaling_backward(*given, slope)
    assert scaled.dtype == results[0].dtype == dtype
    assert_close([scaled, results[0]], [exact, gradients[0]], TOLERANCE[dtype])
    assert_close(results[1:], gradients[1:], 3e-6)  # of parameters in fp32, whatever the dtype of queries
    for again, once in zip(triton_scaling.scaling_backward(*given, slope), results, strict=True):
        assert torch.equal(again, once)


@pytest.mark.slow
def test_interpreted_kernels_equal_the_formula():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]


if __name__ == "__main__":
    dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    triton_scaling.PROGRAMS = 3  # so that a program holds several blocks
    for case in CASES:
        print(case, flush=True)
        check(*case)
