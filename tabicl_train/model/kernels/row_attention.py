"""Attention among the tokens of each row, with rotary embedding, as one operation of torch.

R rows of different lengths T, C queries of each row in cross-attention, H heads, d head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tabicl_train.model.kernels import HAS_TRITON
from tabicl_train.model.kernels.launches import attend_in_chunks
from tabicl_train.model.kernels.run_attention import fits_lanes

TRITON_TOKENS, TRITON_WIDTH = 128, 64  # of a row and of a head
LANES_TOKENS = 128  # of the compiled kernel: its weights of eight rows and a head are 0.5 MB, as much as caches hold
PLAIN_SCORES = 2**24  # that the plain backward pass holds at once


def attend_rows(
    q: Tensor, kv: Tensor | None, runs: Tensor, starts: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """Softmax attention within rows -> (q tokens, H, d), scores scaled by d ** -0.5.

    Self-attention: q (tokens, 3, H, d) packs queries, keys and values, kv is None. Cross-attention: q (R C, 1, H, d)
    are queries of the first C positions of every row, kv (tokens, 2, H, d) packs keys and values.
    runs: (S, 2) int64 on the CPU, numbers of rows and their tokens T, in order
    starts: (R + 1,) int32 on the device of q, first token of each row
    cos, sin, interleaved: see attention.RowSpans; of at least as many positions as the longest row has tokens

    On CUDA a Triton kernel, on a CPU a compiled kernel (float32, d a multiple of 8, cos for at most 128 positions), or
    else plain torch.
    """
    return torch.ops.tabicl_train.attend_rows(q, kv, runs, starts, cos, sin, interleaved)[0]


@torch.library.custom_op("tabicl_train::attend_rows", mutates_args=())
def _forward(
    q: Tensor, kv: Tensor | None, runs: Tensor, starts: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """The result, and for CUDA's backward pass the logarithm of the softmax's denominators, (q tokens, H)."""
    q, kv = q.contiguous(), None if kv is None else kv.contiguous()
    if _fits_triton(q, cos):
        from tabicl_train.model.kernels import row_triton

        return row_triton.forward(q, kv, runs, starts, cos, sin, interleaved)
    if _fits_lanes(q, cos):
        from tabicl_train.model.kernels import row_cpu

        out = row_cpu.forward(q, kv, runs, cos, sin, interleaved)
    else:
        out = attend_rows_by_run(q, kv, runs.tolist(), cos, sin, interleaved)
    return out, q.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("tabicl_train::attend_rows_backward", mutates_args=())
def _backward(
    q: Tensor, kv: Tensor | None, runs: Tensor, starts: Tensor, cos: Tensor, sin: Tensor, interleaved: bool,
    out: Tensor, lse: Tensor, grad: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q and, if there is one, of kv."""
    q, kv, grad = q.contiguous(), None if kv is None else kv.contiguous(), grad.contiguous()
    if _fits_triton(q, cos):
        from tabicl_train.model.kernels import row_triton

        gradients = row_triton.backward(q, kv, runs, starts, cos, sin, interleaved, out, lse, grad)
        return [x for x in gradients if x is not None]
    if _fits_lanes(q, cos):
        from tabicl_train.model.kernels import row_cpu

        return row_cpu.backward(q, kv, runs, cos, sin, interleaved, grad)
    return _plain_backward(q, kv, runs.tolist(), cos, sin, interleaved, grad)


@_forward.register_fake
def _(q: Tensor, kv: Any, runs: Any, starts: Any, cos: Tensor, sin: Any, interleaved: bool) -> tuple[Tensor, Tensor]:
    tokens, _, H, d = q.shape
    lse = q.new_empty((tokens, H) if _fits_triton(q, cos) else 0, dtype=torch.float32)
    return q.new_empty(tokens, H, d), lse


@_backward.register_fake
def _(q: Tensor, kv: Tensor | None, *_: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, kv) if x is not None]


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.interleaved = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple:
    q, kv, runs, starts, cos, sin, out, lse = ctx.saved_tensors
    gradients = _backward(q, kv, runs, starts, cos, sin, ctx.interleaved, out, lse, grad)
    return gradients[0], gradients[1] if kv is not None else None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.tabicl_train.attend_rows, get_raw=True)
def _flops(q: Tensor, kv: Tensor | None, runs: Tensor, *_: Any, **__: Any) -> int:
    R, T = runs.unbind(1)
    queries = T if kv is None else q.shape[0] // R.sum()
    return 4 * q.shape[2] * q.shape[3] * int((R * T * queries).sum())


@register_flop_formula(torch.ops.tabicl_train.attend_rows_backward, get_raw=True)
def _backward_flops(q: Tensor, kv: Tensor | None, runs: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _flops(q, kv, runs)  # as torch counts: the weights computed again are not included


def _fits_triton(q: Tensor, cos: Tensor) -> bool:
    return q.is_cuda and HAS_TRITON and cos.shape[0] <= TRITON_TOKENS and q.shape[-1] <= TRITON_WIDTH


def _fits_lanes(q: Tensor, cos: Tensor) -> bool:
    return q.device.type == "cpu" and fits_lanes(q) and cos.shape[0] <= LANES_TOKENS and q.numel() > 0


def _split(q: Tensor, kv: Tensor | None, runs: list[list[int]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Views of q, k, v of each run, (rows, H, tokens, d)."""
    keys = q if kv is None else kv
    queries = 0 if kv is None else q.shape[0] // sum(R for R, _ in runs)
    pieces, q_first, first = [], 0, 0
    for R, T in runs:
        L = queries or T
        part = keys[first : first + R * T].unflatten(0, (R, T)).transpose(1, 3)  # (R, H, parts, T, d)
        turned = q[q_first : q_first + R * L, 0].unflatten(0, (R, L)).transpose(1, 2)  # (R, H, L, d)
        pieces.append((turned, part[:, :, -2], part[:, :, -1]))
        q_first, first = q_first + R * L, first + R * T
    return pieces


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (..., T, d), its pairs rotated by the angles of positions 0..T-1."""
    half = x.shape[-1] // 2
    partner = x.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if interleaved else x.roll(half, -1)
    cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (cos, sin))
    return torch.addcmul(x * cos, partner, sin)


def _turn_back(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _turn(x, cos, -sin, interleaved)


def attend_rows_by_run(
    q: Tensor,
    kv: Tensor | None,
    runs: list[list[int]],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    dropout: float = 0.0,
) -> Tensor:
    """`attend_rows` in plain torch."""
    results = []
    for queries, k, v in _split(q, kv, runs):
        queries, k = (_turn(x, cos, sin, interleaved) for x in (queries, k))
        out = attend_in_chunks(queries, k, v, dropout)  # (R, H, L, d)
        results.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(results)


def _plain_backward(
    q: Tensor, kv: Tensor | None, runs: list[list[int]], cos: Tensor, sin: Tensor, interleaved: bool, grad: Tensor
) -> list[Tensor]:
    dq, dkv = torch.empty_like(q), None if kv is None else torch.empty_like(kv)
    pieces, ends = _split(q, kv, runs), _split(dq, dkv, runs)
    scale, first = q.shape[-1] ** -0.5, 0
    for (queries, k, v), end in zip(pieces, ends, strict=True):
        R, H, L, _ = queries.shape
        slope = grad[first : first + R * L].unflatten(0, (R, L)).transpose(1, 2)  # (R, H, L, d)
        first += R * L
        size = max(1, PLAIN_SCORES // (H * L * k.shape[2]))
        for rows in torch.arange(R).split(size):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            turned, keys = (_turn(x[part], cos, sin, interleaved) for x in (queries, k))
            p = (turned @ keys.mT * scale).softmax(-1)
            dp = slope[part] @ v[part].mT
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
            end[0][part] = _turn_back(ds @ keys, cos, sin, interleaved)
            end[1][part] = _turn_back(ds.mT @ turned, cos, sin, interleaved)
            end[2][part] = p.mT @ slope[part]
    return [x for x in (dq, dkv) if x is not None]
