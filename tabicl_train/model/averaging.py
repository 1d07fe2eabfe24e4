"""Attention of many sequences with scaled signed averaging (SSA) in place of softmax's exponentials.

It is one operator with its own backward pass, computed in chunks of queries with all of their keys, so its memory does
not grow with the square of the rows. It uses torch's operations on every device.
H heads, d values of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCORES_OF_CHUNK = {"cpu": 2**18, "cuda": 2**24}  # on a CPU, 1 MB of float32 stays in the second cache
MIN_QUERIES_OF_CHUNK = 16  # with fewer, reading the keys from memory dominates


def signed_log(z: Tensor) -> Tensor:
    """Compute sgn(z) log(1 + |z|), with the derivative 1 at 0, and NaN where z is NaN."""
    # By the rules of autograd, the derivatives of abs and sign at 0 are 0.
    negative = z < 0
    log = torch.log1p(torch.where(negative, -z, z))
    return torch.where(negative, -log, log)


def attend_plain(q: Tensor, k: Tensor, v: Tensor, exponents: Tensor) -> Tensor:
    """Let q (count, H, L, d) attend to k, v (count, H, K, d), with all scores in memory -> (count, H, L, d)."""
    scores = exponents[:, None, None] * signed_log(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    return torch.softmax(scores, -1) @ v


class Run(NamedTuple):
    """The equal sequences of a run, views of the tensors that they are part of."""

    number: int  # of the sequences
    out: slice  # its queries in the result
    of_q: Any  # the index of its queries in q: a slice, or the table where the sequences share them
    of_kv: slice  # its keys in kv
    q: Tensor  # (count, H, L, d)
    k: Tensor  # (count, H, K, d)
    v: Tensor


def split_runs(q: Tensor, kv: Tensor, runs: Tensor) -> Iterator[Run]:
    """Yield the runs of q, (queries, H, d) or shared (P, L, H, d), and kv (keys, 2, H, d)."""
    start = 0
    for count, length, keys, first_key, table in runs.tolist():
        out = slice(start, start + count * length)
        start = out.stop
        # The queries of the run, or those of its table if the sequences share them.
        of_q: Any
        if q.dim() == 3:
            of_q = out
            q_of_run = q[of_q].unflatten(0, (count, length))  # (count, L, H, d)
        else:
            of_q = table if len(q) > 1 else 0
            q_of_run = q[of_q].expand(count, -1, -1, -1)
        of_kv = slice(first_key, first_key + count * keys)
        k, v = kv[of_kv].unflatten(0, (count, keys)).permute(2, 0, 3, 1, 4)
        yield Run(count, out, of_q, of_kv, q_of_run.transpose(1, 2), k, v)


def wide(q: Tensor) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 if q is."""
    return torch.promote_types(q.dtype, torch.float32)


def chunks(count: int, H: int, L: int, K: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield the sequences and the queries of each chunk of a run.

    A chunk is a few queries of one sequence, or all queries of one or more sequences.
    """
    scores = SCORES_OF_CHUNK.get(device.type, SCORES_OF_CHUNK["cpu"])
    queries = min(L, max(scores // (H * K), MIN_QUERIES_OF_CHUNK))
    sequences = 1
    if queries == L:
        sequences = max(scores // (H * L * K), 1)
    for sequence in range(0, count, sequences):
        for query in range(0, L, queries):
            yield slice(sequence, sequence + sequences), slice(query, query + queries)


@torch.library.custom_op("tabicl_train::attend_averaging", mutates_args=())
def attend_averaging(q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, queries: int) -> Tensor:
    """Compute scaled signed averaging: softmax(p sgn(z) log(1 + |z|)) v with z = q k / sqrt(d) (arXiv 2508.14685).

    Sums are in float32, or in float64 if q is.

    Parameters
    ----------
    q : Tensor
        Queries times b, (queries, H, d); or (P, L, H, d) if all sequences share their L queries, up to a factor of
        their table.
    kv : Tensor
        Keys and values, (keys, 2, H, d).
    exponents : Tensor
        Exponent p of each head, (H,).
    runs : Tensor
        Runs of equal sequences, see `pack.Spans`.
    queries : int
        Number of queries of all sequences.

    Returns
    -------
    Tensor
        (queries, H, d).
    """
    H, d = q.shape[-2:]
    out = q.new_empty(queries, H, d)
    power = exponents.to(wide(q))[:, None, None]
    # Autocast would round the operands of products.
    with torch.autocast(q.device.type, enabled=False):
        for run in split_runs(q, kv, runs):
            L = run.q.shape[2]
            K = run.k.shape[2]
            result = out[run.out].unflatten(0, (run.number, L)).transpose(1, 2)  # (count, H, L, d)
            for s, i in chunks(run.number, H, L, K, q.device):
                z = (run.q[s, :, i].to(wide(q)) * d**-0.5) @ run.k[s].to(wide(q)).mT  # (sequences, H, queries, K)
                logits = z.abs().log1p_().copysign_(z).mul_(power)  # p sgn(z) log(1 + |z|)
                result[s, :, i] = torch.softmax(logits, -1) @ run.v[s].to(wide(q))
    return out


@torch.library.custom_op("tabicl_train::attend_averaging_backward", mutates_args=())
def averaging_backward(
    grad: Tensor, q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, kv and exponents, in their shapes, from grad (queries, H, d), that of `out`."""
    H, d = q.shape[-2:]
    dq = torch.zeros_like(q, dtype=wide(q), memory_format=torch.contiguous_format)
    dkv = torch.zeros_like(kv, dtype=wide(q), memory_format=torch.contiguous_format)
    dp = torch.zeros_like(exponents, dtype=wide(q), memory_format=torch.contiguous_format)
    power = exponents.to(wide(q))[:, None, None]
    # Autocast would round the operands of products.
    with torch.autocast(q.device.type, enabled=False):
        for run in split_runs(q, kv, runs):
            L = run.q.shape[2]
            K = run.k.shape[2]
            grad_of_run = grad[run.out].unflatten(0, (run.number, L)).transpose(1, 2)  # (count, H, L, d)
            result = out[run.out].unflatten(0, (run.number, L)).transpose(1, 2)
            # (count, or 1 if the sequences share their queries, H, L, d)
            dq_of_run = dq[run.of_q].unflatten(0, (-1, L)).transpose(1, 2)
            dk, dv = dkv[run.of_kv].unflatten(0, (run.number, K)).permute(2, 0, 3, 1, 4)  # (count, H, K, d)
            for s, i in chunks(run.number, H, L, K, q.device):
                # Forward again: z, and scores sgn(z) log(1 + |z|), whose softmax times p are the weights.
                scaled = run.q[s, :, i].to(wide(q)) * d**-0.5
                keys = run.k[s].to(wide(q))
                z = scaled @ keys.mT  # (sequences, H, queries, K)
                base = z.abs()
                scores = base.log1p().copysign_(z)
                weights = torch.softmax(torch.mul(scores, power, out=z), -1)

                # Backward through values and softmax: ds is the gradient of the logits.
                g = grad_of_run[s, :, i].to(wide(q))
                inner = (g * result[s, :, i]).sum(-1, keepdim=True)  # sum of weights times their gradients
                dv[s] += weights.mT @ g
                ds = (g @ run.v[s].to(wide(q)).mT).sub_(inner).mul_(weights)

                # Through p * scores, whose derivative by z is p / (1 + |z|).
                dp += scores.mul_(ds).sum((0, 2, 3))
                ds.div_(base.add_(1))
                dk[s] += ds.mT @ (scaled * power)
                dq_of_chunk = (ds @ keys).mul_(power * d**-0.5)
                if q.dim() == 3:
                    dq_of_run[s, :, i] = dq_of_chunk
                else:
                    dq_of_run[:, :, i] += dq_of_chunk.sum(0)
    return dq.to(q.dtype), dkv.to(kv.dtype), dp.to(exponents.dtype)


@attend_averaging.register_fake
def _(q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, queries: int) -> Tensor:
    return q.new_empty(queries, *q.shape[-2:])


@averaging_backward.register_fake
def _(grad: Tensor, q: Tensor, kv: Tensor, exponents: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dkv = torch.empty_like(kv, memory_format=torch.contiguous_format)
    dp = torch.empty_like(exponents, memory_format=torch.contiguous_format)
    return dq, dkv, dp


def keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    q, kv, exponents, runs, _ = inputs
    ctx.save_for_backward(q, kv, exponents, runs, output)


attend_averaging.register_autograd(
    lambda ctx, grad: (*averaging_backward(grad, *ctx.saved_tensors), None, None), setup_context=keep
)
