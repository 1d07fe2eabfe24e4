"""Attention of many sequences on a CPU: a compiled kernel, or one call of torch's for each run of equal sequences.

As one operator with a backward pass of its own, so that queries, keys, values and their gradients stay in one piece:
autograd would copy each of them once more. H heads, d values of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_runs(q: Tensor, kv: Tensor, runs: Tensor, queries: int) -> Tensor:
    """Softmax attention, kv (keys, 2, H, d) -> (queries, H, d).

    q: (queries, H, d), or (P, L, H, d) if all sequences have the same L queries, up to a factor that depends on the
        table; P is the number of tables, or 1
    runs, queries: see layout.Spans
    """
    return run_attention(q, kv, runs, queries)[0]


def fits_lanes(q: Tensor) -> bool:
    """Whether the compiled kernels, which load eight float32 values at once, take heads like those of q."""
    return q.dtype == torch.float32 and q.shape[-1] % 8 == 0


def pieces(q: Tensor, kv: Tensor, runs: Tensor) -> Iterator[tuple[slice, Any, slice, int, Tensor, Tensor, Tensor]]:
    """Of each run: where its queries lie in the result and in q, and its keys; its count; q, k, v (count, H, ., d)."""
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


@torch.library.custom_op("tabicl_train::run_attention", mutates_args=())
def run_attention(q: Tensor, kv: Tensor, runs: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """The result (queries, H, d), and what the kernel keeps of the sums of exponentials, (2 queries H,)."""
    H, d = q.shape[-2:]
    out = q.new_empty(queries, H, d)
    sums = q.new_zeros(2 * queries * H, dtype=torch.promote_types(q.dtype, torch.float32))
    if fits_lanes(q):
        from tabicl_train.model.kernels import run_cpu

        run_cpu.forward(q.contiguous(), kv.contiguous(), runs, out, sums)
        return out, sums
    for at, _, _, count, some, k, v in pieces(q, kv, runs):
        result, exponentials = FORWARD(some, k, v)  # (count, H, L, d), (count, H, L)
        out[at].unflatten(0, (count, -1)).copy_(result.transpose(1, 2))
        sums[at.start * H : at.stop * H].view(exponentials.shape).copy_(exponentials)
    return out, sums


@torch.library.custom_op("tabicl_train::run_attention_backward", mutates_args=())
def run_attention_backward(
    grad: Tensor, q: Tensor, kv: Tensor, runs: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    H = q.shape[-2]
    grad, q, kv = grad.contiguous(), q.contiguous(), kv.contiguous()
    if fits_lanes(q):
        from tabicl_train.model.kernels import run_cpu

        dq, dkv = torch.zeros_like(q), torch.zeros_like(kv)
        run_cpu.backward(grad, q, kv, runs, out, sums, dq, dkv)
        return dq, dkv
    dq = torch.empty_like(q) if q.dim() == 3 else torch.zeros_like(q)
    dkv = torch.zeros_like(kv)
    for at, own, used, count, some, k, v in pieces(q, kv, runs):
        above, result = (x[at].unflatten(0, (count, -1)).transpose(1, 2) for x in (grad, out))  # (count, H, L, d)
        exponentials = sums[at.start * H : at.stop * H].view(above.shape[:3])
        slopes = BACKWARD(above, some, k, v, result, exponentials, 0.0, False)
        ds, dk, dv = (x.transpose(1, 2) for x in slopes)  # (count, L or K, H, d)
        if q.dim() == 3:
            dq[own].unflatten(0, (count, -1)).copy_(ds)
        else:
            dq[own] += ds.sum(0)
        dkv[used, 0] += dk.flatten(0, 1)
        dkv[used, 1] += dv.flatten(0, 1)
    return dq, dkv


@run_attention.register_fake
def _(q: Tensor, kv: Tensor, runs: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    H, d = q.shape[-2:]
    sums = q.new_zeros(2 * queries * H, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(queries, H, d), sums


@run_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, kv: Tensor, runs: Tensor, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    dq, dkv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, kv))
    return dq, dkv


@register_flop_formula(torch.ops.tabicl_train.run_attention, get_raw=True)
def flops(q: Tensor, kv: Tensor, runs: Tensor, queries: int, **_: Any) -> int:
    H, d = q.shape[-2:]
    count, length, keys = runs[:, :3].unbind(1)
    return 4 * H * d * int((count * length * keys).sum())


@register_flop_formula(torch.ops.tabicl_train.run_attention_backward, get_raw=True)
def backward_flops(grad: Tensor, q: Tensor, kv: Tensor, runs: Tensor, *_: Any, **__: Any) -> int:
    return 5 * flops(q, kv, runs, len(grad)) // 2  # as torch counts its own attention


def keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, kv, runs, _ = inputs
    ctx.save_for_backward(q, kv, runs, *output)
    ctx.mark_non_differentiable(output[1])


def differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    return (*run_attention_backward(grad, *ctx.saved_tensors), None, None)


run_attention.register_autograd(differentiate, setup_context=keep)
