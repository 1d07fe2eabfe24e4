"""Linear layers on a CPU in float32, through the faster of torch's two libraries for each product.

On one core oneDNN multiplied activations and weights mostly 1.1 to 1.5 times as fast as MKL (widths of 32 to 1,536);
MKL was faster at 14 of 18 shapes where the sum runs over the tokens, in the gradient of weights. For each new number of
tokens oneDNN compiles code, which takes 0.3 to 0.5 ms, and the packs of a run all have other numbers of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import mm_flop, register_flop_formula

# Multiplications. New sizes took 0.8 to 1.2 times MKL's time at 2^26 and 2^27 of them, and longer below.
ENOUGH = 2**27

_onednn: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: x (..., K), weight (N, K), bias (N,) -> (..., N)."""
    if _onednn is None or torch.compiler.is_compiling() or x.numel() * len(weight) < ENOUGH:
        return F.linear(x, weight, bias)
    on_cpu = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    fits = x.dtype == weight.dtype == torch.float32 and x.shape[-1] == weight.shape[1]
    return _Linear.apply(x, weight, bias) if on_cpu and fits else F.linear(x, weight, bias)


class Linear(nn.Linear):
    """torch's, through `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable  # torch knows no gradient of oneDNN's product, and would take it for a constant
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = _product(grad, weight.t(), None) if ctx.needs_input_grad[0] else None
        rows = grad.reshape(-1, grad.shape[-1])  # (tokens, N)
        dweight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        dbias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b"""
    assert _onednn is not None  # as `linear` has seen
    return _onednn(x, weight, bias, "none", [], "")


if _onednn is not None:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
        return mm_flop((x.numel() // x[-1], x[-1]), (x[-1], weight[0]))
