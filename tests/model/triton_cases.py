"""Triton kernels in interpreter mode against float64. Run as a script with TRITON_INTERPRET=1, which Triton reads when
it is imported."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from triton.runtime import interpreter

from tabicl_train.model.attention import Rotary
from tabicl_train.model.kernels import row_triton, scaling_triton

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
GENERATOR = torch.Generator().manual_seed(0)

# runs, queries of each row (0: all tokens), heads, head dimension, interleaved, dtype
ROWS = [
    ([(1, 1), (2, 5), (1, 16), (1, 17)], 0, 8, 16, False, torch.float32),
    ([(2, 4), (1, 33), (1, 64)], 0, 1, 16, True, torch.float32),
    ([(1, 65), (1, 97), (1, 104)], 0, 2, 16, False, torch.float32),
    ([(1, 128), (1, 96), (1, 1)], 0, 1, 8, True, torch.float32),  # not sorted
    ([(2, 3), (1, 40)], 0, 3, 8, False, torch.float32),
    ([(1, 2), (1, 20)], 0, 2, 32, False, torch.float32),
    ([(1, 7), (1, 70)], 0, 2, 64, True, torch.float32),
    ([(2, 1), (1, 5)], 1, 4, 16, False, torch.float32),
    ([(2, 4), (1, 16), (1, 70)], 4, 8, 16, False, torch.float32),
    ([(1, 40), (1, 104)], 35, 1, 8, True, torch.float32),
    ([(3, 9), (1, 60)], 0, 4, 16, False, torch.bfloat16),
    ([(3, 9), (1, 60)], 4, 4, 16, True, torch.bfloat16),
    ([(2, 30)], 0, 2, 16, False, torch.float16),
]
# tokens, heads, head dimension, width of base and gate, segments of tokens in order, dtype
SCALINGS = [
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


def by_formula(q, kv, lengths, cos, sin, interleaved):
    """Attention within rows, one at a time."""

    def turn(x):
        half = x.shape[-1] // 2
        partner = x.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if interleaved else x.roll(half, -1)
        return x * cos[: len(x), None] + partner * sin[: len(x), None]

    out, first = [], 0
    for row, tokens in enumerate(lengths):
        keys = (q if kv is None else kv)[first : first + tokens]
        queries = q[first : first + tokens, 0] if kv is None else q.unflatten(0, (len(lengths), -1))[row, :, 0]
        first += tokens
        turned, k = turn(queries), turn(keys[:, -2])
        weights = (torch.einsum("qhd,khd->hqk", turned, k) * q.shape[-1] ** -0.5).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, keys[:, -1]))
    return torch.cat(out)


def assert_close(values, expected, tolerance):
    for value, exact in zip(values, expected, strict=True):
        assert value.shape == exact.shape
        error = ((value - exact).norm() / exact.norm()).item()
        assert error <= tolerance, error


def check_rows(runs, queries, heads, d, interleaved, dtype):
    lengths = [tokens for rows, tokens in runs for _ in range(rows)]
    parts = 2 if queries else 3
    packed = randn(sum(lengths), parts, heads, d).to(dtype)
    q, kv = (randn(len(lengths) * queries, 1, heads, d).to(dtype), packed) if queries else (packed, None)
    cos, sin = Rotary(d, 100.0, interleaved)(max(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int64 if queries else torch.int32)
    given = (q, kv, torch.tensor(runs), starts, cos, sin, interleaved)

    leaves = [x.double().requires_grad_() for x in (q, kv) if x is not None]
    exact = by_formula(leaves[0], leaves[1] if queries else None, lengths, cos.double(), sin.double(), interleaved)
    slope = randn(*exact.shape).to(dtype)
    gradients = torch.autograd.grad(exact, leaves, slope.double())

    out, lse = row_triton.forward(*given)
    results = row_triton.backward(*given, out, lse, slope)
    assert (results[1] is None) == (kv is None)
    results = [out, *(x for x in results if x is not None)]
    assert all(x.dtype == dtype for x in results)
    assert_close(results, [exact, *gradients], TOLERANCE[dtype])


def check_scaling(tokens, heads, d, width, in_order, dtype):
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
    scaled, moments = scaling_triton.forward(*given)
    assert_close([moments], [torch.stack([gate.sum(), gate.square().sum()])], 3e-6)
    results = scaling_triton.backward(*given, slope)
    assert scaled.dtype == results[0].dtype == dtype
    assert_close([scaled, results[0]], [exact, gradients[0]], TOLERANCE[dtype])
    assert_close(results[1:], gradients[1:], 3e-6)  # of parameters in fp32, whatever the dtype of queries
    for again, once in zip(scaling_triton.backward(*given, slope), results, strict=True):
        assert torch.equal(again, once)


if __name__ == "__main__":
    dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    scaling_triton.PROGRAMS = 3  # so that a program holds several blocks
    check, cases = {"row": (check_rows, ROWS), "scaling": (check_scaling, SCALINGS)}[sys.argv[1]]
    for case in cases:
        print(case, flush=True)
        check(*case)
