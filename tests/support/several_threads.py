"""Kernels on several threads, whatever the machine has."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small inputs are computed on three threads too."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("tabicl_train.model.kernels.threads.ENOUGH", 0)
    torch.set_num_threads(3)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
