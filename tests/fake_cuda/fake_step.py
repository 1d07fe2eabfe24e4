"""A training step of the real module, optimizer and callbacks on fake CUDA tensors, of tables that are not drawn."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from watch import Waits, Watch

from priors import Prior, Table, TableSpec
from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.checkpoints import CheckpointFiles
from tabicl_train.callbacks.guard import Guard
from tabicl_train.callbacks.loggers import Loggers
from tabicl_train.callbacks.metrics import Metrics
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.curriculum import stage_at
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.module import Pretraining
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.status import RunStatus
from tabicl_train.stream import StepItem, StepStream
from tabicl_train.train import build_callbacks
from tabicl_train.workers import pin_next

DEVICE = torch.device("cuda:0")
STAGE1 = Path(__file__).with_name("stage1.json")  # rows, labeled rows and features left after constant columns


@dataclass
class Shapes(Prior):
    """Tables without values. widths: by (step, table); other tables keep all their columns."""

    widths: dict[tuple[int, int], int] = field(default_factory=dict)

    def sample(self, spec: TableSpec, seed) -> Table:
        width = self.widths.get(seed[1:], spec.num_features)
        labels = torch.zeros(spec.num_rows, dtype=torch.int64)
        return Table(torch.empty(spec.num_rows, width), labels, spec.train_size, spec.max_classes)


def real_widths() -> dict[tuple[int, int], int]:
    """Of the first steps of stage 1 with seed 0 and the default prior."""
    steps = json.loads(STAGE1.read_text())["shapes"]
    return {(step, i): features for step, tables in enumerate(steps) for i, (_, _, features) in enumerate(tables)}


def draw(config: RunConfig, step: int) -> StepItem:
    """The item of a step, in host memory."""
    return StepStream(Shapes(real_widths()), config.curriculum, config.model, config.seed, range(0)).draw(step)


class OnFakeDevice(Pretraining):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        for module in self.modules():  # Module.to cannot move fake tensors
            for name, parameter in module._parameters.items():
                moved = parameter.detach().to(DEVICE)
                module._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        self._device = DEVICE
        self.on_fit_start()


@functools.cache
def composed(*overrides: str) -> RunConfig:
    return compose(list(overrides))


class Run:
    """A run at a step of its own, as far as a step needs one; a context, within which the host may not wait."""

    def __init__(self, overrides: list[str], step: int) -> None:
        self.config = composed(*overrides)
        self.step, self.module = step, OnFakeDevice(self.config)
        self.optimizer = self.module.configure_optimizers()
        self.item = draw(self.config, step)
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> Run:
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.callbacks = callbacks_of(self.config, Path(folder))
        for callback in self.callbacks:
            if isinstance(callback, Metrics):
                callback.start_window()
        watch = Watch()
        self.stack.enter_context(mock.patch("torch.Tensor.pin_memory", lambda tensor, *_: watch.pin(tensor)))
        self.stack.enter_context(mock.patch("torch.cuda.synchronize", mock.Mock(side_effect=Waits("synchronize"))))
        self.stack.enter_context(watch)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def fill_optimizer(self) -> None:
        """Take an optimizer step, so that later ones find its state."""
        _, stage, _ = stage_at(self.config.curriculum, self.step)
        self.module.gradients_of(stage)
        self.optimizer.step()

    def train_step(self) -> None:
        """What the training loop does with an item that the stream has drawn."""
        module, item = self.module, pin_next(iter([self.item]))
        assert item is not None
        item = item.to(DEVICE)
        self.call("on_train_batch_start", item)
        module.training_step(item, self.step, 0, self.optimizer)
        self.step += 1
        self.call("on_train_batch_end", item)

    def call(self, hook: str, item: StepItem) -> None:
        for callback in self.callbacks:
            if method := getattr(callback, hook, None):
                method(step=self.step, item=item, module=self.module, optimizer=self.optimizer)

    def off_device(self) -> list[str]:
        """What the step has not left on the device."""
        module = self.module
        named = dict(module.named_parameters())
        named |= {name: getattr(module, name) for name in ("loss", "grad_norm", "finite", "skipped")}
        for number, state in enumerate(self.optimizer.state.values()):
            named |= {f"{name} of parameter {number}": value for name, value in state.items()}
        return sorted(name for name, value in named.items() if value.device != DEVICE)


def callbacks_of(config: RunConfig, folder: Path) -> list[Any]:
    """Those of a run, in their order."""
    records, ranks, loggers, averages = Records(folder), Ranks(), Loggers(), Averages(config.averages)
    metrics = Metrics(config, records, SimpleNamespace(waited=0.0), ranks, loggers.log_metrics)
    guard = Guard(config, records, CheckpointFiles(config.checkpoint), ranks, averages, metrics)
    return build_callbacks(config, guard, metrics, averages, RunStatus(records), loggers)
