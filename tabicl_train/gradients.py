"""The gradients of a step in one flat tensor, and their exchange between the processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Gradients:
    """The gradients of a step in one flat tensor, followed by the loss, so that one exchange is enough.

    trained: parameters whose `grad` becomes a view of the tensor
    frozen: parameters whose `grad` becomes None
    """

    def __init__(self, trained: list[nn.Parameter], frozen: list[nn.Parameter]) -> None:
        self.parameters = trained
        # Each starts at a multiple of 64 values, since kernels over many tensors need alignment.
        sizes = [-(-p.numel() // 64) * 64 for p in trained]
        self.flat = trained[0].new_zeros(sum(sizes) + 1)
        *pieces, self.loss = self.flat.split([*sizes, 1])
        self.views = [piece[: p.numel()].view_as(p) for piece, p in zip(pieces, trained, strict=True)]
        for p, view in zip(trained, self.views, strict=True):
            p.grad = view
        for p in frozen:
            p.grad = None

    def add(self, gradients: tuple[Tensor, ...], loss: Tensor) -> None:
        torch._foreach_add_(self.views, list(gradients))
        self.loss.add_(loss)

    def exchange(self) -> None:
        """Sum over all processes; the sums are bit-identical on all of them."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.flat)
