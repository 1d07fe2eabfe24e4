"""The rescaling of queries with a gate (rules qassmax of scaling.py) as Triton kernels, an option: `trainer.triton`.

They replace the copy of the queries in fp32, two linears, GELU, tanh, the gathered base, three products, the copy back,
the moments of the gate, and the gradients of all these. Queries are read once and written once, where torch's
operations write 64 hidden values in fp32 for each query and head several times. The backward pass recomputes them.

Everything is computed in fp32; tensor cores compute matrix products as three products in TF32 ("tf32x3"), with the
error of fp32. Each program sums over its tokens, and torch adds these sums, so the same inputs give the same bits.

N tokens, H heads, d head dimension, S segments (queries with the same number of keys).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HIDDEN = 64  # of the gate's MLP, as in scaling.py
PROGRAMS = 264  # two on each of the 132 multiprocessors of an H100 or H200
LOG2E = tl.constexpr(1.4426950408889634)  # exp2 is one instruction, exp takes four
SQRT_HALF = tl.constexpr(0.7071067811865476)
DENSITY = tl.constexpr(0.3989422804014327)  # of the normal distribution at 0


@triton.jit
def _normal(x):
    """Return the normal distribution function at x, and exp(-x^2 / 2), which the backward pass needs as well.

    Abramowitz and Stegun 7.1.26, with an error of 8e-8, that of fp32; fewer instructions than CUDA's erff.
    """
    bell = tl.exp2(x * x * (-0.5 * LOG2E))
    t = 1 / (1 + 0.3275911 * SQRT_HALF * tl.abs(x))
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail *= 0.5 * bell
    return tl.where(x < 0, tail, 1 - tail), bell


@triton.jit
def _gate(q, w1, b1, w2, b2, P: tl.constexpr, GATES: tl.constexpr):
    """q (vectors, P) -> active and slopes of GELU (vectors, 64) each, gates (vectors, P or 1)."""
    hidden = tl.dot(q, tl.trans(w1), input_precision="tf32x3") + b1[None, :]
    below, bell = _normal(hidden)
    active = hidden * below  # exact GELU
    if GATES == 1:
        z = tl.sum(active * w2, 1)[:, None] + b2[None, :]
    else:
        z = tl.dot(active, tl.trans(w2), input_precision="tf32x3") + b2[None, :]
    return active, below + hidden * DENSITY * bell, 2 / (1 + tl.exp2(z * (-2 * LOG2E)))  # 1 + tanh(z)


@triton.jit
def _gate_weights(w1, b1, w2, b2, D: tl.constexpr, P: tl.constexpr, GATES: tl.constexpr, HIDDEN: tl.constexpr):
    """The gate's MLP: w1 (64, P), b1 (64,), w2 (P or 1, 64), b2 (P or 1,), zero from element D on."""
    i, j = tl.arange(0, P), tl.arange(0, HIDDEN)
    first = tl.load(w1 + j[:, None] * D + i[None, :], mask=(i < D)[None, :], other=0.0)
    o = tl.arange(0, 1 if GATES == 1 else P)
    second = tl.load(w2 + o[:, None] * HIDDEN + j[None, :], mask=(o < GATES)[:, None], other=0.0)
    return first, tl.load(b1 + j), second, tl.load(b2 + o, mask=o < GATES, other=0.0)


@triton.jit
def _query_offsets(
    start, tokens, TOKENS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, P: tl.constexpr
):
    """Tokens (TOKENS,), offsets of their queries (TOKENS, HP, P) and which of these exist."""
    token = start + tl.arange(0, TOKENS)
    head, i = tl.arange(0, HP), tl.arange(0, P)
    exists = (token < tokens)[:, None, None] & (head < H)[None, :, None] & (i < D)[None, None, :]
    return token, token.to(tl.int64)[:, None, None] * (H * D) + head[None, :, None] * D + i[None, None, :], exists


@triton.jit
def _base(base, segment, exists, H: tl.constexpr, HP: tl.constexpr, P: tl.constexpr, BASES: tl.constexpr):
    """The factors of tokens of these segments, (TOKENS, HP, P)."""
    head, i = tl.arange(0, HP), tl.arange(0, P)
    at = segment[:, None, None] * (H * BASES) + head[None, :, None] * BASES + (i * (BASES > 1))[None, None, :]
    return tl.load(base + at, mask=exists, other=0.0)


@triton.jit
def forward_kernel(
    q, base, segment, w1, b1, w2, b2, scaled, moments, tokens, chunk,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BASES: tl.constexpr, GATES: tl.constexpr,
    HIDDEN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Scale the queries of `chunk` tokens: q (N, H, d) -> scaled (N, H, d); moments (programs, 2) of their gates."""
    # The weights, and the sums of gates and of their squares for each place of a block.
    w1, b1, w2, b2 = _gate_weights(w1, b1, w2, b2, D, P, GATES, HIDDEN)
    VECTORS: tl.constexpr = TOKENS * HP
    total = tl.zeros((VECTORS, 1 if GATES == 1 else P), tl.float32)
    square = tl.zeros((VECTORS, 1 if GATES == 1 else P), tl.float32)
    first = tl.program_id(0) * chunk
    last = tl.minimum(first + chunk, tokens)
    for start in range(first, last, TOKENS):
        # The gates of a block of tokens.
        token, at, exists = _query_offsets(start, last, TOKENS, H, HP, D, P)
        x = tl.load(q + at, mask=exists, other=0.0).to(tl.float32)
        _, _, gate = _gate(tl.reshape(x, (VECTORS, P)), w1, b1, w2, b2, P, GATES)
        # Those of padding do not count.
        if GATES == 1:
            real = (token < last)[:, None] & (tl.arange(0, HP) < H)[None, :]
            counted = tl.where(tl.reshape(real, (VECTORS, 1)), gate, 0.0)
        else:
            counted = tl.where(tl.reshape(exists, (VECTORS, P)), gate, 0.0)
        total += counted
        square += counted * counted
        # q * base * gate
        factor = _base(base, tl.load(segment + token, mask=token < last, other=0), exists, H, HP, P, BASES)
        x = x * factor * tl.reshape(gate, (TOKENS, HP, 1 if GATES == 1 else P))
        tl.store(scaled + at, x.to(scaled.dtype.element_ty), mask=exists)
    # The moments of this program, which torch adds to those of others.
    tl.store(moments + tl.program_id(0) * 2, tl.sum(tl.sum(total, 1), 0))
    tl.store(moments + tl.program_id(0) * 2 + 1, tl.sum(tl.sum(square, 1), 0))


@triton.jit
def backward_kernel(
    q, base, segment, w1, b1, w2, b2, grad, dq, dbase, dw1, db1, dw2, db2, tokens, chunk, segments,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BASES: tl.constexpr, GATES: tl.constexpr,
    HIDDEN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The gradients of `forward_kernel`: dq (N, H, d), and for each program those of base and of the weights.

    dbase is (programs, S, H, d or 1), filled with zeros.
    """
    # The weights, and the sums of their gradients.
    w1, b1, w2, b2 = _gate_weights(w1, b1, w2, b2, D, P, GATES, HIDDEN)
    VECTORS: tl.constexpr = TOKENS * HP
    G: tl.constexpr = 1 if GATES == 1 else P
    B: tl.constexpr = 1 if BASES == 1 else P
    dw1_sum = tl.zeros((HIDDEN, P), tl.float32)
    db1_sum = tl.zeros((HIDDEN,), tl.float32)
    dw2_sum = tl.zeros((G, HIDDEN), tl.float32)
    db2_sum = tl.zeros((G,), tl.float32)
    program = tl.program_id(0)
    first = program * chunk
    last = tl.minimum(first + chunk, tokens)
    head, b = tl.arange(0, HP), tl.arange(0, B)
    dbase += program.to(tl.int64) * segments * (H * BASES) + head[:, None] * BASES + b[None, :]
    for start in range(first, last, TOKENS):
        # The gates of a block of tokens, computed again.
        token, at, exists = _query_offsets(start, last, TOKENS, H, HP, D, P)
        x = tl.load(q + at, mask=exists, other=0.0).to(tl.float32)
        slope = tl.load(grad + at, mask=exists, other=0.0).to(tl.float32)
        flat = tl.reshape(x, (VECTORS, P))
        active, rise, gate = _gate(flat, w1, b1, w2, b2, P, GATES)
        gates = tl.reshape(gate, (TOKENS, HP, G))
        own = tl.load(segment + token, mask=token < last, other=-1)
        factor = _base(base, own, exists, H, HP, P, BASES)

        # base: the sums over the tokens of each segment. A segment's tokens lie together, so it is nearly always one.
        part = slope * x * gates
        lowest = tl.min(tl.where(own < 0, segments, own), 0)
        for s in range(lowest, tl.max(own, 0) + 1):
            some = tl.sum(tl.where((own == s)[:, None, None], part, 0.0), 0)  # (HP, P)
            if BASES == 1:
                some = tl.sum(some, 1)[:, None]
            mask = (head < H)[:, None] & (b < BASES)[None, :]
            sum_at = dbase + s * (H * BASES)
            tl.store(sum_at, tl.load(sum_at, mask=mask, other=0.0) + some, mask=mask)

        # The second linear layer: the derivative of the gate 1 + tanh(z) is 1 - tanh(z)^2 = gate (2 - gate).
        dgate = tl.reshape(slope * x * factor, (VECTORS, P))
        if GATES == 1:
            dz = tl.sum(dgate, 1)[:, None] * gate * (2 - gate)
            dactive = dz * w2
            dw2_sum += tl.sum(dz * active, 0)[None, :]
        else:
            dz = dgate * gate * (2 - gate)
            dactive = tl.dot(dz, w2, input_precision="tf32x3")
            dw2_sum = tl.dot(tl.trans(dz), active, dw2_sum, input_precision="tf32x3")
        db2_sum += tl.sum(dz, 0)
        # GELU and the first linear layer.
        dhidden = dactive * rise
        dw1_sum = tl.dot(tl.trans(dhidden), flat, dw1_sum, input_precision="tf32x3")
        db1_sum += tl.sum(dhidden, 0)
        # Queries have a gradient as what is scaled, and another one through the gate.
        through = tl.reshape(tl.dot(dhidden, w1, input_precision="tf32x3"), (TOKENS, HP, P))
        tl.store(dq + at, (slope * factor * gates + through).to(dq.dtype.element_ty), mask=exists)

    # The sums of this program.
    i, j, o = tl.arange(0, P), tl.arange(0, HIDDEN), tl.arange(0, G)
    tl.store(dw1 + program * HIDDEN * D + j[:, None] * D + i[None, :], dw1_sum, mask=(i < D)[None, :])
    tl.store(db1 + program * HIDDEN + j, db1_sum)
    tl.store(dw2 + program * GATES * HIDDEN + o[:, None] * HIDDEN + j[None, :], dw2_sum, mask=(o < GATES)[:, None])
    tl.store(db2 + program * GATES + o, db2_sum, mask=o < GATES)


def kernel_options(num_heads: int, head_dim: int, bases: int, gates: int, backward: bool) -> dict[str, int]:
    """Return constants of a kernel and its number of warps, with as many queries at once as fit into registers."""
    heads = triton.next_power_of_2(num_heads)
    padded = max(16, triton.next_power_of_2(head_dim))  # the smallest size of tensor cores
    sizes = {"H": num_heads, "HP": heads, "D": head_dim, "P": padded, "BASES": bases, "GATES": gates}
    # Blocks of 64 vectors, or of 32 wide ones, unless a token alone has more heads.
    wide = padded >= 64
    tokens = max(1, (32 if wide else 64) // heads)
    return sizes | {"HIDDEN": HIDDEN, "TOKENS": tokens, "num_warps": 8 if wide and backward else 4}


@torch.library.custom_op("tabicl_train::scale_queries", mutates_args=())
def scale_queries(
    q: Tensor, base: Tensor, segment: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute q * base[segment] * (1 + tanh(MLP(q))), the query-aware scalable softmax (arXiv 2602.11139).

    Parameters
    ----------
    q : Tensor
        Queries, (N, H, d), in bf16, fp16 or fp32.
    base : Tensor
        Factors of each segment, (S, H, d or 1), float32.
    segment : Tensor
        Segment of each query, (N,) int32. It is fast if the queries of a segment are adjacent.
    w1, b1, w2, b2 : Tensor
        Weights and biases of the MLP (linear, exact GELU, linear), float32: (64, d), (64,), (d or 1, 64), (d or 1,).

    Returns
    -------
    scaled : Tensor
        (N, H, d), in the dtype of q.
    moments : Tensor
        Sum of all gates and of their squares, (2,) float32, without gradients.
    """
    q, base = q.contiguous(), base.contiguous()
    constants, programs, chunk = _split(q, base, w2, backward=False)
    scaled, moments = torch.empty_like(q), base.new_empty(programs, 2)
    forward_kernel[(programs,)](q, base, segment, w1, b1, w2, b2, scaled, moments, q.shape[0], chunk, **constants)
    return scaled, moments.sum(0)


@torch.library.custom_op("tabicl_train::scale_queries_backward", mutates_args=())
def scaling_backward(
    q: Tensor, base: Tensor, segment: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, base, w1, b1, w2 and b2 from grad (N, H, d), that of `scaled`."""
    q, base = q.contiguous(), base.contiguous()
    constants, programs, chunk = _split(q, base, w2, backward=True)
    dq, dbase = torch.empty_like(q), base.new_zeros(programs, *base.shape)
    sums = [dbase, *(w.new_empty(programs, *w.shape) for w in (w1, b1, w2, b2))]
    backward_kernel[(programs,)](
        q, base, segment, w1, b1, w2, b2, grad.contiguous(), dq, *sums, q.shape[0], chunk, base.shape[0], **constants
    )  # fmt: skip
    dbase, dw1, db1, dw2, db2 = (each.sum(0) for each in sums)
    return dq, dbase, dw1, db1, dw2, db2


def _split(q: Tensor, base: Tensor, w2: Tensor, backward: bool) -> tuple[dict[str, int], int, int]:
    """Return constants, the number of programs, and the tokens of each, whole blocks."""
    tokens, heads, dim = q.shape
    constants = kernel_options(heads, dim, base.shape[-1], w2.shape[0], backward)
    block = constants["TOKENS"]
    chunk = block * max(1, -(-tokens // (block * PROGRAMS)))
    return constants, -(-tokens // chunk), chunk


@scale_queries.register_fake
def _(q: Tensor, base: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), base.new_empty(2)


@scaling_backward.register_fake
def _(q: Tensor, base: Tensor, segment: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    given = (q, base, *others[:-1])
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple:
    dq, dbase, *rest = scaling_backward(*ctx.saved_tensors, grad)
    return dq, dbase, None, *rest


scale_queries.register_autograd(_differentiate, setup_context=_keep)
