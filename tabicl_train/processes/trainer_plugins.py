"""How the processes of a run look to Lightning, and the places where Lightning's own behavior is switched off."""

from __future__ import annotations

import io
import pickle
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from tabicl_train.processes.processes import Processes


class JoinedProcesses(ClusterEnvironment):
    """Tells Lightning about processes that have joined already, so that it starts none and asks no launcher."""

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
    """Lightning's strategy of one process per device, over the processes' own store and without torch's wrapper.

    DistributedDataParallel exchanges gradients inside the backward pass, and waits forever for those that an
    out-of-memory error there leaves out; the module exchanges what it has accumulated, after its last pack.
    """

    def __init__(self, processes: Processes, backend: str, timeout: float) -> None:
        """timeout: seconds that an exchange may take."""
        super().__init__(process_group_backend=backend)
        self.processes, self.exchange_timeout = processes, timedelta(seconds=timeout)

    def setup_distributed(self) -> None:
        if not dist.is_initialized():  # a preflight trains several times
            dist.init_process_group(
                self.process_group_backend,
                store=dist.PrefixStore("group", self.processes.store),
                rank=self.processes.rank,
                world_size=self.processes.size,
                timeout=self.exchange_timeout,
                device_id=self.root_device if self.root_device.type == "cuda" else None,
            )
        super().setup_distributed()  # which keeps an existing group

    def configure_ddp(self) -> None:
        """Give all ranks the weights of rank 0, the only one that reads a file to start from."""
        for value in self.model.state_dict().values():
            dist.broadcast(value, 0)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read by rank 0 and sent to all ranks: the folder of a run need not be shared between machines."""
        content = super().load_checkpoint(checkpoint_path, weights_only) if self.is_global_zero else None
        return self.broadcast(content)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send a picklable object from one rank to all; its tensors arrive in host memory.

        The tensors are sent one by one: pickled with the rest, they took four times their size in memory.
        """
        if self.global_rank == src:
            file = io.BytesIO()
            pickler = TensorPickler(file)
            pickler.dump(obj)
            super().broadcast(file.getvalue(), src)
            tensors = pickler.tensors
        else:
            unpickler = TensorUnpickler(io.BytesIO(super().broadcast(None, src)))
            obj = unpickler.load()
            tensors = unpickler.tensors
        for tensor in tensors:
            sent = tensor.to(self.root_device).contiguous()
            dist.broadcast(sent, src)
            if self.global_rank != src and sent is not tensor:
                tensor.copy_(sent)
        return obj


class TensorPickler(pickle.Pickler):
    """Pickles shape and dtype of tensors in place of their values, and lists them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> tuple[torch.Size, torch.dtype] | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value.detach())
        return value.shape, value.dtype


class TensorUnpickler(pickle.Unpickler):
    """Creates a tensor without values for each one that the pickler has listed, and lists them in the same order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_load(self, value: tuple[torch.Size, torch.dtype]) -> Tensor:
        shape, dtype = value
        self.tensors.append(torch.empty(shape, dtype=dtype))
        return self.tensors[-1]


def disable_sigterm_handling(trainer: L.Trainer) -> None:
    """Leave SIGTERM to `processes.signals` and `callbacks.preemption`.

    Lightning 2.6 has no public switch for either of these; test_trainer_plugins fails when they change:
    - Its handler of SIGTERM broadcasts to the other ranks, in the middle of whatever they do.
    - Before each step of several ranks it broadcasts whether there was one, and waits for the device to answer.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
