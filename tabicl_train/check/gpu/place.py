"""What a check is given: where it runs, and how it reports what it finds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]  # an object in JSON


class CheckFailed(Exception):
    """The check has found an error, which the message describes."""


class CheckSkipped(Exception):
    """The check is not possible here; the message says why."""


@dataclass
class Place:
    """Where a check runs.

    Parameters
    ----------
    device : torch.device
        The device that is checked. On a CPU all sizes are small.
    folder : Path
        Folder for files of the check.
    report : callable, optional
        Called with each row of a table of the page as soon as it is known.
    deadline : float, optional
        The value of time.monotonic() at which the check should be done. Default: no limit.
    """

    device: torch.device
    folder: Path
    report: Callable[[Row], None] = lambda row: None
    deadline: float = math.inf

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def add(self, table: str, **row: Any) -> None:
        """Add a row to a table of the page; nan and inf, which JSON lacks, become text."""
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[name] = str(value)
        self.report({"table": table, **row})

    def seconds_left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def wait(self) -> None:
        """Wait until the device has done its work."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def needs_cuda(self) -> None:
        """Skip the check without a GPU."""
        if not self.is_cuda:
            raise CheckSkipped("needs a GPU")


def set_up() -> None:
    """Start a check: choose exact products and the attention kernels of training, and reset the memory statistics."""
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)  # an earlier check may have set trainer.deterministic
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in training/rank_process.py
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def distance(found: Tensor, exact: Tensor, least: float = 1e-30) -> float:
    """Return the norm of the difference of two tensors over the norm of the exact one, or over `least` if larger."""
    exact = exact.double()
    size = torch.linalg.vector_norm(exact).item()
    return torch.linalg.vector_norm(found.to(exact) - exact).item() / max(size, least)


def expect(is_true: bool, otherwise: str) -> None:
    """Raise CheckFailed unless a condition is true; comparisons with nan are false."""
    if not is_true:
        raise CheckFailed(otherwise)
