"""A training step of the real module, optimizer and callbacks on fake CUDA tensors, of tables that are not drawn."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lightning as L
import torch
from torch import nn
from watch import Waits, Watch

from priors import Prior, Table, TableSpec
from tabicl_train.callbacks.checkpoints import CheckpointFiles
from tabicl_train.callbacks.metrics import Metrics
from tabicl_train.callbacks.validation import Validation
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.curriculum import stage_at
from tabicl_train.module import Pretraining
from tabicl_train.processes.signals import Stop
from tabicl_train.run_dir.records import Records
from tabicl_train.stream import StepItem, StepStream
from tabicl_train.train import run_callbacks
from tabicl_train.workers import pin_next

DEVICE = torch.device("cuda:0")
STAGE1 = Path(__file__).with_name("stage1.json")  # rows, labelled rows and features left after constant columns


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


class OneStep(Pretraining):
    """On the fake device, without a Lightning trainer."""

    def __init__(self, config: RunConfig, step: int) -> None:
        super().__init__(config)
        self.step = step
        for module in self.modules():  # Module.to cannot move fake tensors
            for name, parameter in module._parameters.items():
                moved = parameter.detach().to(DEVICE)
                module._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        self._device = DEVICE
        self.optimizer = self.configure_optimizers()
        self.on_fit_start()

    def optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer

    @property
    def global_step(self) -> int:
        return self.step


@functools.cache
def composed(*overrides: str) -> RunConfig:
    return compose(list(overrides))


class Run:
    """A run at a step of its own, as far as a step needs one; a context, within which the host may not wait."""

    def __init__(self, overrides: list[str], step: int) -> None:
        self.config = composed(*overrides)
        self.module = OneStep(self.config, step)
        self.item = draw(self.config, step)
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> Run:
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.callbacks = callbacks_of(self.config, Path(folder))
        self.trainer = SimpleNamespace(  # what callbacks ask of a trainer between logged steps
            global_step=self.module.step, is_global_zero=True, world_size=1, callbacks=self.callbacks,
            train_dataloader=SimpleNamespace(waited=0.0), should_stop=False,
        )  # fmt: skip
        for callback in self.callbacks:
            if isinstance(callback, Metrics):
                callback.start_window(self.trainer)
        watch = Watch()
        self.stack.enter_context(mock.patch("torch.Tensor.pin_memory", lambda tensor, *_: watch.pin(tensor)))
        self.stack.enter_context(mock.patch("torch.cuda.synchronize", mock.Mock(side_effect=Waits("synchronize"))))
        self.stack.enter_context(watch)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def fill_optimizer(self) -> None:
        """Take an optimizer step, so that later ones find its state."""
        _, stage, _ = stage_at(self.config.curriculum, self.module.step)
        self.module.gradients_of(stage)
        self.module.optimizer.step()

    def train_step(self) -> None:
        """What a trainer does with an item that the stream has drawn."""
        module, item = self.module, pin_next(iter([self.item]))
        assert item is not None
        item = module.transfer_batch_to_device(item, DEVICE, 0)
        for callback in self.callbacks:
            callback.on_train_batch_start(self.trainer, module, item, 0)
        module.training_step(item, 0)
        module.step = self.trainer.global_step = module.step + 1
        for callback in self.callbacks:
            callback.on_train_batch_end(self.trainer, module, None, item, 0)

    def off_device(self) -> list[str]:
        """What the step has not left on the device."""
        module = self.module
        named = dict(module.named_parameters())
        named |= {name: getattr(module, name) for name in ("loss", "grad_norm", "finite", "skipped")}
        for number, state in enumerate(module.optimizer.state.values()):
            named |= {f"{name} of parameter {number}": value for name, value in state.items()}
        return sorted(name for name, value in named.items() if value.device != DEVICE)


def callbacks_of(config: RunConfig, folder: Path) -> list[L.Callback]:
    """Those of a run, in their order."""
    records, stop = Records(folder), Stop()
    validation = Validation(config, records, SimpleNamespace(rank=0, size=1), stop)
    return run_callbacks(config, records, CheckpointFiles(config.checkpoint), {}, stop, validation)
