"""The kernels that run on a device, as torch's profiler sees them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch.profiler import DeviceType, ProfilerActivity, profile

from tabicl_train.check.gpu.place import Place

# Prefixes of entries that the profiler lists among the kernels: a full queue of the device, and spans of Python code.
MARKS = ("Command Buffer", "Optimizer.")
# Kernels that are not attention: copies, sums and products of CUDA's memory functions, torch and cuBLAS.
OTHERS = re.compile("^Mem(cpy|set)|at::native|at_cuda_detail|cublas|gemm|nvjet|cutlass::Kernel2")
NOT_CHOSEN = "cudnn"  # its bf16 backward pass has given NaN elsewhere


class Kernel(NamedTuple):
    """A kernel by its name, how often it was launched, and how long all launches took."""

    name: str
    launches: int
    ms: float  # of all launches


def launched_kernels(place: Place, work: Callable[[], object]) -> list[Kernel]:
    """Do some work and return the kernels that it has launched; empty on a CPU."""
    if not place.is_cuda:
        work()
        return []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        place.wait()
    kernels = []
    for event in found.key_averages():
        if event.device_type == DeviceType.CUDA and not event.key.startswith(MARKS):
            kernels.append(Kernel(event.key, event.count, event.self_device_time_total / 1e3))
    return kernels


def attention_names(names: Iterable[str]) -> list[str]:
    """Return the short names of the attention kernels among kernels."""
    return sorted({name_of_kernel(name) for name in names if not OTHERS.search(name)})


def name_of_kernel(name: str) -> str:
    """Return the name of a kernel without arguments, templates, namespaces and return type."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name, maxsplit=1)[0].rpartition("::")[2]
