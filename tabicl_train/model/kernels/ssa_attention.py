"""Attention of many sequences with scaled signed averaging (SSA) in place of softmax's exponentials.

As one operator with a backward pass of its own, in chunks of queries with all of their keys: its memory does not grow
with the square of the rows. Torch's matrix products and element-wise operations serve every device. On CUDA there is
torch's flex attention besides, which no GPU has run in this project.
H heads, d values of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tabicl_train.model.kernels import HAS_TRITON
from tabicl_train.model.kernels.launches import batch_limit
from tabicl_train.model.kernels.run_attention import flops as softmax_flops
from tabicl_train.model.kernels.run_attention import pieces

SCORES = {"cpu": 2**18, "cuda": 2**24}  # of a chunk; on a CPU, 1 MB of float32 stays in the second cache
QUERIES = 16  # of a chunk at least: with fewer, products would read the keys from memory for little work
FLEX_HEAD = 16  # values of a head that flex attention needs
FLEX_GRAPHS = 64  # 1 is no symbolic size: two each for sequences, queries, keys, dtypes, and with gradients or without
# Only the kernel for many queries, and there NaN, not 0, where all scores are -inf, which only infinite inputs give.
FLEX_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True, "ROWS_GUARANTEED_SAFE": True}


def signed_log(z: Tensor) -> Tensor:
    """sgn(z) log(1 + |z|), with the derivative 1 at 0, and NaN where z is NaN."""
    negative = z < 0
    log = torch.log1p(torch.where(negative, -z, z))
    return torch.where(negative, -log, log)


def attend_plain(q: Tensor, k: Tensor, v: Tensor, exponents: Tensor, causal: bool = False) -> Tensor:
    """The attention of q (count, H, L, d) to k, v (count, H, K, d), all scores at once -> (count, H, L, d).

    causal: query i attends to the keys up to i
    """
    scores = exponents[:, None, None] * signed_log(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return torch.softmax(scores, -1) @ v


def attend_ssa_runs(q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, queries: int) -> Tensor:
    """softmax(p sgn(z) log(1 + |z|)) with z = q k / sqrt(d), and values: kv (keys, 2, H, d) -> (queries, H, d).

    It is computed in float32, or float64 if q is. A sequence without keys yields zeros.
    exponents: (H,), the p of each head; q, runs, queries: see run_attention.attend_runs
    """
    return ssa_attention(q, kv, exponents, runs, queries)


def wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def chunks(count: int, H: int, L: int, K: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """The sequences and the queries of each chunk of a run; none if there are no keys."""
    if K == 0:
        return
    scores = SCORES.get(device.type, SCORES["cpu"])
    some = min(L, max(scores // (H * K), QUERIES))
    together = max(scores // (H * L * K), 1) if some == L else 1
    for sequence in range(0, count, together):
        for start in range(0, L, some):
            yield slice(sequence, sequence + together), slice(start, start + some)


@torch.library.custom_op("tabicl_train::ssa_attention", mutates_args=())
def ssa_attention(q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, queries: int) -> Tensor:
    H, d = q.shape[-2:]
    out = q.new_zeros(queries, H, d)
    power = exponents.to(wide(q))[:, None, None]
    with torch.autocast(q.device.type, enabled=False):  # which would round the operands of products
        for at, _, _, count, some, k, v in pieces(q, kv, runs):
            L, K = some.shape[2], k.shape[2]
            result = out[at].unflatten(0, (count, L)).transpose(1, 2)  # (count, H, L, d)
            for s, i in chunks(count, H, L, K, q.device):
                z = (some[s, :, i].to(wide(q)) * d**-0.5) @ k[s].to(wide(q)).mT  # (sequences, H, queries, K)
                logits = z.abs().log1p_().copysign_(z).mul_(power)
                result[s, :, i] = torch.softmax(logits, -1) @ v[s].to(wide(q))
    return out


@torch.library.custom_op("tabicl_train::ssa_attention_backward", mutates_args=())
def ssa_attention_backward(
    grad: Tensor, q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    H, d = q.shape[-2:]
    dq, dkv, dp = (
        torch.zeros_like(x, dtype=wide(q), memory_format=torch.contiguous_format) for x in (q, kv, exponents)
    )
    power = exponents.to(wide(q))[:, None, None]
    with torch.autocast(q.device.type, enabled=False):  # which would round the operands of products
        for at, own, used, count, some, k, v in pieces(q, kv, runs):
            L, K = some.shape[2], k.shape[2]
            above, result = (x[at].unflatten(0, (count, L)).transpose(1, 2) for x in (grad, out))  # (count, H, L, d)
            slope = dq[own].unflatten(0, (-1, L)).transpose(1, 2)  # (count, or 1 if the sequences share it, H, L, d)
            dk, dv = dkv[used].unflatten(0, (count, K)).permute(2, 0, 3, 1, 4)  # (count, H, K, d)
            for s, i in chunks(count, H, L, K, q.device):
                scaled, keys = some[s, :, i].to(wide(q)) * d**-0.5, k[s].to(wide(q))
                g = above[s, :, i].to(wide(q))
                inner = (g * result[s, :, i]).sum(-1, keepdim=True)
                z = scaled @ keys.mT  # (sequences, H, queries, K)
                base = z.abs()
                scores = base.log1p().copysign_(z)
                weights = torch.softmax(torch.mul(scores, power, out=z), -1)
                dv[s] += weights.mT @ g
                ds = (g @ v[s].to(wide(q)).mT).sub_(inner).mul_(weights)
                dp += scores.mul_(ds).sum((0, 2, 3))
                ds.div_(base.add_(1))
                dk[s] += ds.mT @ (scaled * power)
                step = (ds @ keys).mul_(power * d**-0.5)
                if q.dim() == 3:
                    slope[s, :, i] = step
                else:
                    slope[:, :, i] += step.sum(0)
    return dq.to(q.dtype), dkv.to(kv.dtype), dp.to(exponents.dtype)


@ssa_attention.register_fake
def _(q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, queries: int) -> Tensor:
    return q.new_empty(queries, *q.shape[-2:])


@ssa_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, kv: Tensor, exponents: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dkv, dp = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, kv, exponents))
    return dq, dkv, dp


@register_flop_formula(torch.ops.tabicl_train.ssa_attention, get_raw=True)
def flops(q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, queries: int, **_: Any) -> int:
    return softmax_flops(q, kv, runs, queries)


@register_flop_formula(torch.ops.tabicl_train.ssa_attention_backward, get_raw=True)
def backward_flops(grad: Tensor, q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, *_: Any, **__: Any) -> int:
    return 5 * softmax_flops(q, kv, runs, len(grad)) // 2  # scores, gradients of weights, queries, keys and values


def keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    q, kv, exponents, runs, _ = inputs
    ctx.save_for_backward(q, kv, exponents, runs, output)


def differentiate(ctx: Any, grad: Tensor) -> tuple:
    return (*ssa_attention_backward(grad, *ctx.saved_tensors), None, None)


ssa_attention.register_autograd(differentiate, setup_context=keep)


def fits_flex(q: Tensor, exponents: Tensor) -> bool:
    """Whether `attend_flex` takes heads like those of q.

    Not where the exponents are trained: it adds the gradient of every score to their H addresses atomically, which is
    slow and gives other sums each time. Within a compiled block, the operator is traced instead.
    """
    trained = exponents.requires_grad and torch.is_grad_enabled()
    return q.is_cuda and HAS_TRITON and q.shape[-1] >= FLEX_HEAD and not trained and not torch.compiler.is_compiling()


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    config.recompile_limit = max(config.recompile_limit, FLEX_GRAPHS)
    # At the limit an error: without compiling, all scores would be in memory.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, exponents: Tensor, flex: Callable[..., Tensor] | None = None
) -> Tensor:
    """`attend_plain` without all scores in memory; flex: by default flex attention, compiled for all sizes."""

    def score(z: Tensor, _sequence: Tensor, head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return exponents[head] * signed_log(z)

    limit = batch_limit(q.shape[1], max(q.shape[2], k.shape[2]), q.shape[3])
    parts = zip(q.contiguous().split(limit), k.split(limit), v.split(limit), strict=True)
    return torch.cat([(flex or compiled_flex())(*part, score_mod=score, kernel_options=FLEX_OPTIONS) for part in parts])
