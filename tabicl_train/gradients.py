"""Data parallelism: a whole model in every process, and one exchange of gradients a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from tabicl_train.processes.processes import Processes


class Joined(ClusterEnvironment):
    """Tells Lightning of processes that have joined already, so that it starts none and asks no launcher."""

    creates_processes_externally = True

    def __init__(self, processes: Processes) -> None:
        super().__init__()
        self.processes = processes

    @property
    def main_address(self) -> str:
        return self.processes.launch.address

    @property
    def main_port(self) -> int:
        return self.processes.launch.port

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return self.processes.size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self.processes.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self.processes.local_rank

    def node_rank(self) -> int:
        return self.processes.rank // self.processes.local_size


class Replicas(DDPStrategy):
    """Lightning's strategy of a process a device, over the processes' own store and without its wrapper.

    DistributedDataParallel exchanges gradients from inside the backward pass, and waits forever for the ones that an
    out-of-memory error there leaves out; the module exchanges what it has accumulated, after its last micro-batch.
    """

    def setup_distributed(self) -> None:
        processes = self.cluster_environment.processes
        dist.init_process_group(
            self._get_process_group_backend(),
            store=dist.PrefixStore("group", processes.store),
            rank=processes.rank,
            world_size=processes.size,
            timeout=self._timeout,
            device_id=self.root_device if self.root_device.type == "cuda" else None,
        )
        super().setup_distributed()  # which leaves a group that is there as it is

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
