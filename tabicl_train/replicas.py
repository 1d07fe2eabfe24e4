"""Data parallelism: a whole model in every process, and one exchange of gradients a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn


class Replicas(DDPStrategy):
    """Lightning's processes and process group, without its wrapper.

    DistributedDataParallel exchanges gradients from inside the backward pass, and waits forever for the ones that an
    out-of-memory error there leaves out; the module exchanges what it has accumulated, after its last micro-batch.
    """

    def configure_ddp(self) -> None:
        for value in self.model.state_dict().values():
            dist.broadcast(value, 0)


class Gradients:
    """The gradients of a step in one flat tensor with the loss behind them, so that one exchange serves all.

    Each parameter's `grad` is a view of it; parameters that are not trained have none.
    """

    def __init__(self, trained: list[nn.Parameter], frozen: list[nn.Parameter]) -> None:
        self.parameters = trained
        # Each begins at a multiple of 64 values: kernels that walk over many tensors want them aligned.
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
        """Sum over all processes; equal on all of them afterwards, to the bit."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.flat)
