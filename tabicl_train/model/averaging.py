"""Attention of many sequences with scaled signed averaging (SSA) in place of softmax's exponentials.

It is one operator with its own backward pass, computed in chunks of queries with all of their keys, so its memory does
not grow with the square of the rows. It uses torch's operations on every device.
H heads, d values of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SCORES = {"cpu": 2**18, "cuda": 2**24}  # of a chunk; on a CPU, 1 MB of float32 stays in the second cache
QUERIES = 16  # of a chunk at least: with fewer, reading the keys from memory dominates


def signed_log(z: Tensor) -> Tensor:
    """Compute sgn(z) log(1 + |z|), with the derivative 1 at 0, and NaN where z is NaN."""
    negative = z < 0
    log = torch.log1p(torch.where(negative, -z, z))
    return torch.where(negative, -log, log)


def attend_plain(q: Tensor, k: Tensor, v: Tensor, exponents: Tensor) -> Tensor:
    """Let q (count, H, L, d) attend to k, v (count, H, K, d), with all scores in memory -> (count, H, L, d)."""
    scores = exponents[:, None, None] * signed_log(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    return torch.softmax(scores, -1) @ v


def pieces(q: Tensor, kv: Tensor, runs: Tensor) -> Iterator[tuple[slice, Any, slice, int, Tensor, Tensor, Tensor]]:
    """Yield slices of each run's queries in the result and in q, and of its keys; count; q, k, v (count, H, ., d)."""
    start = 0
    for count, length, keys, first, table in runs.tolist():
        at = slice(start, start + count * length)
        start = at.stop
        own: Any = at
        if q.dim() == 3:
            some = q[at].unflatten(0, (count, length))  # (count, L, H, d)
        else:
            own = table if len(q) > 1 else 0
            some = q[own].expand(count, -1, -1, -1)
        used = slice(first, first + count * keys)
        k, v = kv[used].unflatten(0, (count, keys)).permute(2, 0, 3, 1, 4)  # (count, H, K, d)
        yield at, own, used, count, some.transpose(1, 2), k, v


def wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def chunks(count: int, H: int, L: int, K: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield the sequences and the queries of each chunk of a run."""
    scores = SCORES.get(device.type, SCORES["cpu"])
    some = min(L, max(scores // (H * K), QUERIES))
    together = max(scores // (H * L * K), 1) if some == L else 1
    for sequence in range(0, count, together):
        for start in range(0, L, some):
            yield slice(sequence, sequence + together), slice(start, start + some)


@torch.library.custom_op("tabicl_train::attend_averaging", mutates_args=())
def attend_averaging(q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, queries: int) -> Tensor:
    """softmax(p sgn(z) log(1 + |z|)) with z = q k / sqrt(d), and values: kv (keys, 2, H, d) -> (queries, H, d)."""
    # It is computed in float32, or float64 if q is. q: (queries, H, d), or (P, L, H, d) if all sequences have the same
    # L queries, up to a factor of the table; exponents: (H,), the p of each head; runs, queries: see pack.Spans
    H, d = q.shape[-2:]
    out = q.new_empty(queries, H, d)
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


@torch.library.custom_op("tabicl_train::attend_averaging_backward", mutates_args=())
def backward(
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


@attend_averaging.register_fake
def _(q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, queries: int) -> Tensor:
    return q.new_empty(queries, *q.shape[-2:])


@backward.register_fake
def _(grad: Tensor, q: Tensor, kv: Tensor, exponents: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dkv, dp = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, kv, exponents))
    return dq, dkv, dp


def keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    q, kv, exponents, runs, _ = inputs
    ctx.save_for_backward(q, kv, exponents, runs, output)


attend_averaging.register_autograd(
    lambda ctx, grad: (*backward(grad, *ctx.saved_tensors), None, None), setup_context=keep
)
