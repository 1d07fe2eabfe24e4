"""Times, and tables of random values with the shapes of real ones."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tabicl_train.model.pack import Pack, Shape

STAGE1 = Path(__file__).resolve().parents[2] / "fake_cuda" / "stage1.json"
STEP = 2  # of the stored ones the middle one: 47 features on average


@dataclass
class Row:
    """A line of the report. predicted: in the same unit; None if nothing was predicted"""

    section: str
    name: str
    value: float
    unit: str
    predicted: float | None = None
    note: str = ""


@dataclass
class Setting:
    """What the sections share.

    name: of the device, cuda or cpu
    tiny: the smallest network and tables, which show that everything runs
    rates: what the sections before have measured of the device: bytes/s and FLOP/s, see roofline.py
    """

    name: str
    tiny: bool
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return torch.device(self.name, 0) if self.name == "cuda" else torch.device(self.name)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.name == "cuda" else torch.float32

    @property
    def overrides(self) -> list[str]:
        small = ["model=tiny", "prior=dummy"] if self.tiny else []
        return ["curriculum=tabicl_v2", "run_dir=unused", f"trainer.accelerator={self.name}", *small]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, function: Callable[[], object], times: int = 1) -> float:
    """Mean time of a call, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / times


def turns(setting: Setting, deadline: float) -> Iterator[int]:
    """Numbers of measurements to be made: one, and more until the deadline."""
    for turn in range(2 if setting.tiny else 15):
        if turn and time.monotonic() > deadline:
            return
        yield turn


def alternate(setting: Setting, functions: dict[str, Callable[[], object]], deadline: float) -> dict[str, float]:
    """Median time of each function, measured in turns until the deadline, at least once, after one call to warm up."""
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in turns(setting, deadline):
        for name, function in functions.items():
            times[name].append(seconds(setting.device, function))
    return {name: statistics.median(values) for name, values in times.items()}


def shapes_of_stage1(tiny: bool) -> list[Shape]:
    """Rows, labeled rows and features of the tables of a real step; of a few small tables if `tiny`."""
    if tiny:
        return [(24, 10, 3), (24, 10, 5), (30, 20, 1), (40, 30, 3)]
    stored = json.loads(STAGE1.read_text())
    return [tuple(shape) for shape in stored["shapes"][STEP]]


def random_pack(shapes: list[Shape], device: torch.device, seed: int = 0) -> Pack:
    """Tables of random values, in the order of their shapes, as the stream has them."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for N, n, M in sorted(shapes):
        X, y = torch.randn(N, M, generator=generator), torch.randint(0, 4, (N,), generator=generator)
        tables.append((X.to(device), y.to(device), n))
    return Pack.of(tables)
