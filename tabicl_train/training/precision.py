"""The number formats of a run: which are in force and why, memory and speed of a GPU, and the loss scale of fp16.

Weights, gradients and optimizer state are always fp32; bf16 and fp16 are formats of the matrix products in the forward
and backward pass. The scalable softmax and its gradients stay fp32 (`model/scaling.py`), and so does column attention
with `model.col_attention_fp32`. On a GPU, fp32 matrix products are computed in TF32 unless `trainer.tf32` is false.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tabicl_train.config.schema import TrainerConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# torch reads one of these when it first allocates memory on a GPU.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Shapes change in every step, which would fragment a cache of blocks of fixed sizes.
EXPANDABLE = "expandable_segments:True"
# cuBLAS reads it when CUDA starts; without it, torch refuses matrix products if algorithms must be deterministic.
WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Dense matrix products in 16-bit formats (summed in fp32), in TF32, and in fp32 without TF32, in 10^12 FLOPs per second
# from the data sheets. Some sheets give the speed for sparse matrices, which is twice as high. The first name that is
# part of the device's name counts, so the slower PCIe cards come before the others.
PEAK_TFLOPS = {
    "H200 NVL": (835.5, 417.5, 60),
    "H200": (989, 494.5, 67),
    "H100 NVL": (835.5, 417.5, 60),
    "H100 PCIe": (756, 378, 51),
    "H100": (989, 494.5, 67),
    "A100": (312, 156, 19.5),
    "L40S": (362, 183, 91.6),
    "4090": (165, 82.6, 82.6),
}


@dataclass(frozen=True)
class Precision:
    """The number format of matrix products.

    Parameters
    ----------
    name : str
        fp32, bf16 or fp16.
    reason : str
        Why the run has it.
    """

    name: str
    reason: str

    def autocast(self, device: str) -> torch.autocast:
        """Return the context in which matrix products have this format."""
        return torch.autocast(device, DTYPES[self.name], enabled=self.name != "fp32")

    def __str__(self) -> str:
        """Name the format and the reason."""
        master = "" if self.name == "fp32" else " mixed, fp32 weights"
        return f"{self.name}{master} ({self.reason})"


def uses_cuda(settings: TrainerConfig) -> bool:
    """Return whether a run with these settings trains on a GPU."""
    return settings.accelerator == "cuda" or (settings.accelerator == "auto" and torch.cuda.is_available())


def has_bf16() -> bool:
    """Return whether the first GPU supports bf16, without starting CUDA as torch's function would."""
    # CUDA must start after `set_up_gpu`, whose variables it reads, and after the workers are forked.
    major = compute_capability()
    if major is None:
        # A GPU of another vendor.
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return major >= 8


def compute_capability() -> int | None:
    """Ask the driver for the major compute capability of the first GPU; None without NVIDIA's driver."""
    driver, device = driver_of(0)
    major = ctypes.c_int()
    attribute = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    failed = driver is None or driver.cuDeviceGetAttribute(ctypes.byref(major), attribute, device)
    return None if failed else major.value


def memory_of_gpu(number: int) -> float:
    """Ask the driver for the bytes of memory of a GPU; for another vendor's, inf until CUDA has been started."""
    driver, device = driver_of(number)
    size = ctypes.c_size_t()
    if driver is None or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        return torch.cuda.get_device_properties(number).total_memory if torch.cuda.is_initialized() else math.inf
    return size.value


def driver_of(number: int) -> tuple[ctypes.CDLL | None, ctypes.c_int]:
    """Return NVIDIA's driver, which needs no CUDA context, and its handle of a GPU; None without driver or GPU."""
    device = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, device
    # Each function returns 0 if it has succeeded.
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number)
    return None if failed else driver, device


def choose_precision(settings: TrainerConfig) -> Precision:
    """Choose the precision of a run: `trainer.precision`, or the default of its device if that is `auto`."""
    if settings.precision != "auto":
        return Precision(settings.precision, "as configured")
    # On a CPU, bf16 was 1.2 to 1.6 times slower.
    if not uses_cuda(settings):
        return Precision("fp32", "the default on a CPU")
    # Without a GPU this is the plan of a run elsewhere (--cfg job), see trainer.plan_memory_gb.
    if torch.cuda.is_available() and not has_bf16():
        return Precision("fp32", "the default on a GPU without bf16")
    return Precision("bf16", "the default on a GPU")


def set_up_gpu(settings: TrainerConfig) -> None:
    """Configure fp32 matrix products and the memory allocator of a GPU; must be called before CUDA starts."""
    if not uses_cuda(settings):
        return
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]  # a CPU draws tables
    if not any(os.environ.get(name) for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = EXPANDABLE
    if settings.deterministic:
        # Otherwise torch's attention adds the gradients of queries with atomic operations, in any order.
        os.environ.setdefault(*WORKSPACE)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it


@contextmanager
def gpu_settings_kept() -> Iterator[None]:
    """Restore at the end what `set_up_gpu` changes in torch, since a notebook may go on to predict after training."""
    matmul, deterministic = torch.backends.cuda.matmul, torch.utils.deterministic
    in_tf32 = matmul.fp32_precision == "tf32"
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if (matmul.fp32_precision == "tf32") != in_tf32:
            torch.set_float32_matmul_precision("high" if in_tf32 else "highest")
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        if (torch.are_deterministic_algorithms_enabled(), warns) != (is_deterministic, only_warns):
            # Only if they differ, since the call imports torch's compiler: 4 CPU seconds.
            torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def policy(trainer: TrainerConfig) -> list[str]:
    """Return lines that describe the number formats and memory settings in force."""
    lines = [f"precision {choose_precision(trainer)}"]
    if uses_cuda(trainer):
        products = "TF32" if trainer.tf32 else "full precision"
        repeats = "bit for bit" if trainer.deterministic else "up to rounding"
        lines.append(f"          products of fp32 in {products}")
        lines.append(f"          repeatable {repeats}")
        lines += [f"memory    {name}={os.environ[name]}" for name in ALLOCATOR if os.environ.get(name)]
    elif trainer.deterministic:
        lines.append("warning   trainer.deterministic has no effect on a CPU, where runs are bit-identical anyway")
    return lines


def peak_flops(device: torch.device, precision: str, tf32: bool) -> float | None:
    """Return the peak speed of a device.

    Parameters
    ----------
    device : torch.device
        The device.
    precision : str
        fp32, bf16 or fp16.
    tf32 : bool
        Whether fp32 matrix products are computed in TF32.

    Returns
    -------
    float or None
        FLOPs per second, from `PEAK_TFLOPS`; None if unknown.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for card, (in_16_bits, in_tf32, in_fp32) in PEAK_TFLOPS.items():
        if card in name:
            if precision != "fp32":
                return in_16_bits * 1e12
            return (in_tf32 if tf32 else in_fp32) * 1e12
    return None


class LossScale:
    """A dynamic scale of the loss, so that small fp16 gradients do not underflow; its tensors stay on the device.

    It starts at 2^16, is halved after each step whose gradient overflows, and is doubled after 2,000 steps in a row
    without overflow. These are the defaults of torch.amp.GradScaler, which would wait for the device in each step.

    Parameters
    ----------
    enabled : bool
        Whether the run is in fp16; otherwise the scale stays 1.

    References
    ----------
    Micikevicius et al., Mixed precision training, arXiv 1710.03740, section 3.2.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = torch.full((), 2.0**16 if enabled else 1.0)
        self.good_steps = torch.zeros(())

    def to(self, device: torch.device) -> None:
        """Move the scale to a device."""
        self.scale = self.scale.to(device)
        self.good_steps = self.good_steps.to(device)

    def update(self, finite: Tensor) -> None:
        """Adapt the scale after a step; `finite`, (), says whether its gradient was finite."""
        if not self.enabled:
            return
        # In place, since a CUDA graph replays it.
        self.good_steps.add_(1).copy_(torch.where(finite, self.good_steps, 0.0))
        grows = self.good_steps >= 2000
        after_good_step = torch.where(grows, self.scale * 2, self.scale)
        self.scale.copy_(torch.where(finite, after_good_step, self.scale / 2))
        self.good_steps.masked_fill_(grows, 0.0)

    def state_dict(self) -> dict:
        """Return the scale and the number of steps since it changed, for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict) -> None:
        """Continue with the scale of a checkpoint."""
        self.scale.copy_(state["scale"].to(self.scale.device))
        self.good_steps.copy_(state["good_steps"].to(self.scale.device))
