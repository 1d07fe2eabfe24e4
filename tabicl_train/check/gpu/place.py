"""What a check is given: where it runs, and how it tells what it finds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]  # what JSON has as an object


class CheckFailed(Exception):
    """Something is not as it should be."""


class CheckSkipped(Exception):
    """The check is not possible here, for the reason that is its message."""


@dataclass
class Place:
    """Where a check runs.

    Parameters
    ----------
    device : torch.device
        The device that is checked. On a CPU all sizes are small.
    folder : Path
        For files of the check.
    report : callable
        Called with each row of a table of the page as soon as it is known.
    deadline : float
        The value of time.monotonic() at which the check should be done.
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
        """Add a row to a table of the page; nan and inf, which JSON does not have, become words."""
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[name] = str(value)
        self.report({"table": table, **row})

    def seconds_left(self) -> float:
        """Return the time until the deadline."""
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
    """Choose exact products and the attention kernels of training, which each check begins with."""
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)  # trainer.deterministic of an earlier check
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in training/rank_process.py
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def distance(found: Tensor, exact: Tensor, least: float = 1e-30) -> float:
    """Return the norm of a difference over the norm of the exact values, or over `least` if that is larger."""
    exact = exact.double()
    size = torch.linalg.vector_norm(exact).item()
    return torch.linalg.vector_norm(found.to(exact) - exact).item() / max(size, least)


def expect(is_true: bool, otherwise: str) -> None:
    """Raise CheckFailed unless something is true; a comparison with nan is not."""
    if not is_true:
        raise CheckFailed(otherwise)
