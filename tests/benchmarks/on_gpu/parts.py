"""Where the time of a step goes: by part of the network, and by kernel."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from on_gpu.measure import Row, Setting, random_pack, shapes_of_stage1, turns
from on_gpu.roofline import predicted
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tabicl_train.config.compose import compose
from tabicl_train.curriculum import plan_step
from tabicl_train.model.pack import Shape
from tabicl_train.module import Pretraining
from tabicl_train.stream import StepItem

PARTS = {"column": "col_embedder", "row": "row_interactor", "icl": "icl_predictor"}
KERNELS = 40  # rows of the report; the rest is added up


class Steps(Pretraining):
    """The module without a trainer: the same step again and again."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(compose(setting.overrides))
        self.to(setting.device)
        self.optimizer = self.configure_optimizers()
        self.on_fit_start()
        shapes = shapes_of_stage1(setting.tiny)
        packs = [random_pack(some, setting.device) for some in packed(self, shapes)]
        self.item = StepItem(0, "stage1", len(shapes), packs)

    def step(self) -> None:
        self.training_step(self.item, 0, 0, self.optimizer)


def packed(module: Pretraining, shapes: list[Shape]) -> list[list[Shape]]:
    """The tables by pack, as evenly as the curriculum packs them."""
    budget = plan_step(module.config.curriculum, module.config.model, 0, 0).pack_tokens
    tokens = [module.model.pack_tokens(module.config.model, N, M) for N, _, M in shapes]
    number = -(-sum(tokens) // budget)
    packs: list[list[Shape]] = [[] for _ in range(number)]
    loads = [0] * number
    for count, shape in sorted(zip(tokens, shapes, strict=True), reverse=True):
        least = loads.index(min(loads))
        packs[least].append(shape)
        loads[least] += count
    return packs


class Marks:
    """Moments on the device at which a part begins."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, Any]] = []

    def at(self, name: str) -> Callable[..., None]:
        return lambda *_: self.mark(name)

    def mark(self, name: str) -> None:
        if self.device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        else:
            moment = time.perf_counter()
        self.marks.append((name, moment))

    def around(self, function: Callable, name: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.mark(name)
            result = function(*args, **kwargs)
            self.mark("gradients")
            return result

        return call

    def seconds(self) -> dict[str, float]:
        """By part, from one mark to the next."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        times: dict[str, float] = defaultdict(float)
        for (name, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            times[name] += start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start
        return dict(times)


def watched(steps: Steps, marks: Marks) -> None:
    """Marks where each part begins, forward and backward."""

    def leave(part: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            marks.mark("loss")
            output.register_hook(marks.at(f"{part} backward"))

        return hook

    for part, name in PARTS.items():
        module = getattr(steps.model, name)
        module.register_forward_pre_hook(marks.at(f"{part} forward"))
        module.register_forward_hook(leave(part))


def parts(setting: Setting, deadline: float) -> list[Row]:
    device, steps = setting.device, Steps(setting)
    for _ in range(3):
        steps.step()  # the caching allocator, the kernels that are compiled
    rows = kernels(steps)
    marks = Marks(device)
    watched(steps, marks)
    samples: dict[str, list[float]] = defaultdict(list)
    with (
        mock.patch("torch.autograd.grad", marks.around(torch.autograd.grad, "loss")),
        mock.patch.object(steps.optimizer, "step", marks.around(steps.optimizer.step, "optimizer")),
    ):
        for _ in turns(setting, deadline):
            marks.marks.clear()
            marks.mark("gradients")
            steps.step()
            marks.mark("end")
            for name, value in marks.seconds().items():
                samples[name].append(value)
    median = {name: statistics.median(values) for name, values in samples.items()}
    expected = predicted("stage1", setting.rates, sum(map(steps.tokens_of, steps.item.packs)))
    for part in (*PARTS, "loss", "gradients", "optimizer"):
        passes = {name: value for name, value in median.items() if name.split()[0] == part}
        note = ", ".join(f"{name} {value * 1e3:.1f}" for name, value in passes.items())
        rows.append(Row("parts", part, sum(passes.values()) * 1e3, "ms", expected[part] * 1e3, note))
    note = f"{steps.item.tables} tables in {len(steps.item.packs)} passes"
    rows.append(Row("parts", "step", sum(median.values()) * 1e3, "ms", sum(expected.values()) * 1e3, note))
    return rows


def kernels(steps: Steps) -> list[Row]:
    """The kernels of a step by their names, those that take most time first."""
    on_cuda = steps.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with profile(activities=activities) as profiler:
        steps.step()
        if on_cuda:
            torch.cuda.synchronize()
    events = profiler.key_averages()
    if on_cuda:
        events = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        found = [(e.self_device_time_total, e.count, e.key) for e in events]
    else:
        found = [(e.self_cpu_time_total, e.count, e.key) for e in events]
    found.sort(reverse=True)

    def row(name: str, some: list[tuple[float, int, str]]) -> Row:
        return Row(
            "kernels", name, sum(t for t, _, _ in some) / 1e3, "ms", note=f"{sum(c for _, c, _ in some)} launches"
        )

    return [row(one[2][:110], [one]) for one in found[:KERNELS]] + [row("others", found[KERNELS:]), row("all", found)]
