"""The scalable softmax's rescaling of queries on CUDA as one operation of torch, in place of some forty kernels.

Q queries, B tables, H heads, d head dimension, W gates of a head (d or 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def scale_queries(
    q: Tensor, base: Tensor, table: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> tuple[Tensor, Tensor]:
    """q * base[table] * (1 + tanh(MLP(q))), computed in float32, in the dtype of q.

    q: (Q, H, d)
    base: (B, H, d or 1) float32, the factor of each table
    table: (Q,) int64
    w1 (64, d), b1 (64,), w2 (W, 64), b2 (W,): Linear, GELU, Linear

    Also returns the sum of the gates 1 + tanh(...) and that of their squares, (2,) float32, without gradients.
    """
    return torch.ops.tabicl_train.scale_queries(q, base, table.int(), w1, b1, w2, b2)


@torch.library.custom_op("tabicl_train::scale_queries", mutates_args=(), device_types="cuda")
def _forward(
    q: Tensor, base: Tensor, table: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> tuple[Tensor, Tensor]:
    from tabicl_train.model.kernels import scaling_triton

    return scaling_triton.forward(q, base, table, w1, b1, w2, b2)


@torch.library.custom_op("tabicl_train::scale_queries_backward", mutates_args=(), device_types="cuda")
def _backward(
    q: Tensor, base: Tensor, table: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from tabicl_train.model.kernels import scaling_triton

    return scaling_triton.backward(q, base, table, w1, b1, w2, b2, grad)


@_forward.register_fake
def _(q: Tensor, base: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), base.new_empty(2)


@_backward.register_fake
def _(q: Tensor, base: Tensor, table: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, grad: Tensor) -> Any:
    q, base, w1, b1, w2, b2 = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, base, w1, b1, w2, b2)
    )
    return q, base, w1, b1, w2, b2


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple:
    dq, dbase, *rest = _backward(*ctx.saved_tensors, grad)
    return dq, dbase, None, *rest


_forward.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.tabicl_train.scale_queries)
def _flops(q: torch.Size, base: Any, table: Any, w1: torch.Size, b1: Any, w2: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * q[0] * q[1] * w1[0] * (w1[1] + w2[0])


@register_flop_formula(torch.ops.tabicl_train.scale_queries_backward)
def _backward_flops(*shapes: Any, **_: Any) -> int:
    return 3 * _flops(*shapes)  # the gradients, and the hidden values once more
