"""Counts what a training step launches on a GPU, without one: operators on fake tensors, along the branches of CUDA.

A count is that of operators, with the number of kernels of those that have several (as in a profile on an H100); views
launch nothing. Kernels of cuBLAS that divide a product, and fills of memory inside of a kernel's call, are not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tabicl_train.check.gpu.stages import shapes_of
from tabicl_train.config.compose import compose
from tabicl_train.model import attention, tabicl
from tabicl_train.model.config import family_of
from tabicl_train.model.kernels import kernels_of
from tabicl_train.model.pack import Pack, Shape
from tabicl_train.stream.curriculum import plan_step
from tabicl_train.stream.steps import StepItem
from tabicl_train.training.cuda_graph import Replay
from tabicl_train.training.module import TrainedNetwork
from tabicl_train.training.precision import Precision

VIEWS = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze"),
    *("detach", "alias", "split", "split_with_sizes", "unbind", "as_strided", "unfold", "view_as", "lift_fresh"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device"),
}
# Kernels of an operator that has more than one
KERNELS = {
    "slice_backward": 2,  # zeros, and a copy
    "select_backward": 2,
    "baddbmm": 2,
    "cumsum": 2,
    "repeat_interleave": 3,
    "sort": 5,
    "_flash_attention_backward": 3,
    "_varlen_attn_backward": 3,
    "_efficient_attention_backward": 5,
    "native_layer_norm_backward": 2,
    "linalg_vector_norm": 2,
    # of this package; rows: one for each size of a program, of which there are three
    "rows": 3,
    "rows_backward": 3,
    "points_read_tokens_backward": 2,
    "scale_queries": 2,
    "scale_queries_backward": 7,  # with sums over programs
}
TENSORS_OF_A_LAUNCH = 64  # of an operator over lists of tensors


class Launches(TorchDispatchMode):
    """Counts the launches of fake tensors by operator and phase.

    Attributes
    ----------
    counted : Counter
        Launches by (phase, operator).
    replayed : list of tuple
        Operators of a CUDA graph, which is one launch, with the shapes of their tensors and their numbers: a graph can
        replay what has the same in each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[tuple[str, str]] = Counter()
        self.replayed: list[tuple[str, list[Any]]] = []
        self.phase = "loss"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        leaves = tree_leaves((args, kwargs))
        if name in VIEWS or not any(isinstance(x, FakeTensor) for x in [*leaves, *tree_leaves(result)]):
            return result
        if self.phase == "graph":
            self.replayed.append((name, [tuple(x.shape) if isinstance(x, Tensor) else repr(x) for x in leaves]))
        else:
            self.counted[self.phase, name] += kernels(name, args)
        return result

    def total(self) -> int:
        return sum(self.counted.values())


class CountedReplay(Replay):
    """A replay on the CPU: it calls the function, whose operators are one launch, and each of its results another."""

    def __init__(self, counter: Launches) -> None:
        super().__init__("counted")
        self.enabled = True
        self.counter = counter

    def __call__(self, function: Callable[[], tuple[Tensor, ...]], made_for: Any, size: Any = None) -> Any:
        self.counter.phase = "graph"
        results = function()
        self.counter.phase = "optimizer"
        self.counter.counted["optimizer", "graph"] += 1
        return tuple(x.clone() for x in results)


def kernels(name: str, args: tuple) -> int:
    """Return the launches of an operator."""
    if not name.startswith("_foreach"):
        return KERNELS.get(name, 1)
    lists = [x for x in args if isinstance(x, list | tuple) and isinstance(x[0], Tensor)]
    # The fast path needs equal dtypes (a copy does not) and strides; otherwise each tensor is a launch of its own.
    for tensors in zip(*lists, strict=True):
        dtypes = {x.dtype for x in tensors}
        if len({x.stride() for x in tensors}) > 1 or (len(dtypes) > 1 and name != "_foreach_copy_"):
            return len(lists[0])
    return math.ceil(len(lists[0]) / TENSORS_OF_A_LAUNCH)


def planned_shapes(overrides: list[str], step: int) -> tuple[Any, list[tuple[Shape, ...]]]:
    """Return a configuration and the shapes of the packs that its curriculum plans for a step."""
    config = compose([*overrides, "run_dir=unused", "trainer.accelerator=cpu"])
    plan = plan_step(config.curriculum, config.model, config.seed, step, None)
    return config, [tuple(sorted(shapes_of(groups))) for groups in plan.packs(0, 1)]


@contextmanager
def branches_of_cuda() -> Iterator[None]:
    """Take the branches of CUDA on the CPU, where operators on fake tensors run."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "is_cuda", property(lambda self: True))
        patch.setattr(attention, "KERNEL_DEVICES", ["cpu"])
        patch.setattr(tabicl.TabICL, "_check", lambda self, pack: None)
        patch.setattr(nn.init, "trunc_normal_", lambda tensor, std: tensor)  # reads a value
        yield


def launches_of_step(config: Any, packs: list[tuple[Shape, ...]], own_kernels: bool = True) -> Launches:
    """Count the launches of a step in bf16 with packs of these shapes; own_kernels: those of triton_attention.py."""
    family = family_of(config.model)
    made = [pack_of_zeros(shapes) for shapes in packs]
    for pack in made:
        pack.layout = family.prepared(config.model, pack)
    with branches_of_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        module = fake_module(config, own_kernels)
        item = StepItem(0, next(iter(config.curriculum.stages)), sum(map(len, packs)), list(map(as_fake, made)))
        optimizer = module.configure_optimizers()
        module.train_on(item, 0, 0, optimizer)
        counters = []
        for step in (1, 2):
            counter = Launches()
            module.replay = CountedReplay(counter)
            with counter, phases(counter, module):
                module.train_on(replace(item, step=step), step, 0, optimizer)
            counters.append(counter)
        assert counters[0].replayed == counters[1].replayed  # as a graph needs it
    return counters[0]


def replays_of_steps(config: Any, packs: list[Pack], own_kernels: bool) -> list[Launches]:
    """Take steps of these padded packs, each as a replay, and one before."""
    stage = next(iter(config.curriculum.stages))
    counters = []
    with branches_of_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        module = fake_module(config, own_kernels)
        optimizer = module.configure_optimizers()
        for step, pack in enumerate([packs[0], *packs]):
            counter = Launches()
            module.step_replay = CountedReplay(counter)
            item = StepItem(step, stage, len(pack), [as_fake(pack)])
            with counter:
                module.train_on(item, step, 0, optimizer)
            counters.append(counter)
    return counters[1:]


def pack_of_zeros(shapes: tuple[Shape, ...]) -> Pack:
    cells = sum(N * M for N, _, M in shapes)
    rows = sum(N for N, _, _ in shapes)
    return Pack(torch.zeros(cells), torch.zeros(rows, dtype=torch.int64), torch.tensor(shapes), shapes)


def as_fake(pack: Pack) -> Pack:
    """Return the pack with fake tensors, as it is on a GPU."""
    X, y, sizes = (torch.zeros(x.shape, dtype=x.dtype) for x in (pack.X, pack.y, pack.sizes))
    layout = pack.layout
    if layout is not None:
        layout = layout._replace(values=torch.zeros(len(layout.values), dtype=torch.int32))
    return Pack(X, y, sizes, pack.shapes, layout)


def fake_module(config: Any, own_kernels: bool) -> TrainedNetwork:
    module = TrainedNetwork(config.model, config.curriculum, config.optimizer, Precision("bf16", "counted"), 0)
    module.move_state()
    kernels_of(module.model, torch.bfloat16).use(own_kernels)
    module.uses_kernels = own_kernels
    return module


@contextmanager
def phases(counter: Launches, module: TrainedNetwork) -> Iterator[None]:
    """Tell a counter the phase: forward, loss, backward, gradients; see `CountedReplay` for the optimizer."""

    def in_phase(function: Any, phase: str, after: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            counter.phase = phase
            result = function(*args, **kwargs)
            counter.phase = after
            return result

        return called

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.model, "forward", in_phase(module.model.forward, "forward", "loss"))
        patch.setattr(torch.autograd, "grad", in_phase(torch.autograd.grad, "backward", "gradients"))
        yield
