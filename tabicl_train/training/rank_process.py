"""One rank of a run, as its process sees it: its device, its stop signals, and the other ranks.

Ranks are connected after the workers that draw tables have been forked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.signals import Stop, watch_signals
from tabicl_train.training.distributed.processes import Launch, read_launch
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.precision import gpu_settings_kept, set_up_gpu, uses_cuda

__all__ = ["RankProcess"]

# Lets torch.cuda.is_available() ask NVIDIA's library NVML instead of starting CUDA, which workers would inherit.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

T = TypeVar("T")


class RankProcess:
    """One rank of a run.

    Attributes
    ----------
    launch : Launch
        Its place among the ranks.
    device : torch.device
        Where it computes.
    stop : Stop
        Whether it was asked to stop.
    ranks : Ranks
        Decisions of all ranks together, once they are connected.
    """

    def __init__(self, settings: TrainerConfig, launch: Launch, stop: Stop, resources: ExitStack) -> None:
        self.settings = settings
        self.launch = launch
        self.device = device_of(settings, launch)
        self.stop = stop
        self.ranks = Ranks(launch)
        self.resources = resources

    @classmethod
    @contextmanager
    def open(cls, settings: TrainerConfig) -> Iterator[RankProcess]:
        """Watch stop signals and set up torch, without starting threads, process groups or CUDA contexts yet."""
        with watch_signals() as stop, ExitStack() as resources:
            if settings.max_hours is not None:
                stop.limit = 3600 * settings.max_hours
            resources.callback(torch.set_num_threads, torch.get_num_threads())  # a notebook may go on
            resources.enter_context(gpu_settings_kept())
            set_up_process(settings)
            process = cls(settings, read_launch(), stop, resources)
            yield process
            # Not after an error: the other ranks may be gone, and closing would wait for them.
            close_process_group(process.ranks)

    @property
    def has_device(self) -> bool:
        """Whether all ranks of this machine have a GPU, without starting CUDA; NCCL connects them by their GPUs."""
        return self.device.type == "cpu" or self.launch.local_size <= torch.cuda.device_count()

    def enter(self, resource: AbstractContextManager[T]) -> T:
        """Enter a context that ends with the process."""
        return self.resources.enter_context(resource)

    def connect(self) -> Ranks:
        """Open the process groups."""
        open_process_groups(self.settings, self.launch, self.ranks)
        return self.ranks


def device_of(settings: TrainerConfig, launch: Launch) -> torch.device:
    """Return the device of a rank."""
    if uses_cuda(settings):
        return torch.device("cuda", launch.local_rank)
    return torch.device("cpu")


def set_up_process(settings: TrainerConfig) -> None:
    """Set up torch in a process that trains."""
    # A second thread that shared its core with a busy worker made a step take 4 s instead of 0.13 s on two cores. Also,
    # sums are rounded differently with another number of threads.
    torch.set_num_threads(1)
    set_up_gpu(settings)
    # cuDNN's attention makes a plan for each new shape, and crashed for some; flash and memory-efficient ones remain.
    torch.backends.cuda.enable_cudnn_sdp(False)


def open_process_groups(settings: TrainerConfig, launch: Launch, ranks: Ranks) -> None:
    """Open torch's default process group, from the variables of torchrun, and the groups of `ranks`."""
    if launch.size == 1:
        return
    # NCCL connects ranks by their GPUs, so each chooses its own first.
    device = device_of(settings, launch)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        timeout=timedelta(seconds=settings.timeout),
        device_id=device if on_cuda else None,
    )
    ranks.connect(settings.timeout)


def close_process_group(ranks: Ranks) -> None:
    """Wait for all ranks, after their last write, and close the groups."""
    ranks.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
