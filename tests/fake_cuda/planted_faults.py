"""Faults that a CPU does not notice, each planted into the training step to see that it is caught."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from tabicl_train import module as training
from tabicl_train.gradients import Gradients
from tabicl_train.model import attention
from tabicl_train.model.pack import Pack
from tabicl_train.model.scaling import Scaling
from tabicl_train.optimizer import MuonAdamW

Planted = Callable[[], contextlib.AbstractContextManager]
STAGE = "curriculum.stages.stage1"
ONE_TABLE = ("model=tiny", f"{STAGE}.tables=1")
# 38,400 columns, each with a sequence of labeled and one of query rows, are too many for one launch. As runs of equal
# sequences they are not; but of sequences of 128 padded rows with 16 heads, 32-bit indices do not reach all.
COLUMNS = (
    "model=tiny", "model.embed_dim=128", "model.row_num_heads=8", f"{STAGE}.rows=[100,100]",
    f"{STAGE}.features=[600,600]", f"{STAGE}.group_size=64", f"{STAGE}.pack_tokens=10000000",
)  # fmt: skip
MANY_COLUMNS, MANY_HEADS = (*COLUMNS, "model.col_num_heads=8"), (*COLUMNS, "model.col_num_heads=16")


def losses(change: Callable[[Tensor], Tensor | None]) -> Planted:
    """The losses of the tables go through a function."""
    plain = training.query_losses

    def changed(*args) -> Tensor:
        values = plain(*args)
        result = change(values)
        return values if result is None else result

    return lambda: mock.patch.object(training, "query_losses", changed)


@contextlib.contextmanager
def log_n_on_cpu() -> Iterator[None]:
    plain = Scaling.forward

    def forward(self: Scaling, q: Tensor, log_n: Tensor, *args) -> Tensor:
        return plain(self, q, torch.zeros(log_n.shape), *args)

    with mock.patch.object(Scaling, "forward", forward):
        yield


@contextlib.contextmanager
def gradients_on_cpu() -> Iterator[None]:
    def add(self: Gradients, gradients: tuple[Tensor, ...], loss: Tensor) -> None:
        torch._foreach_add_(self.views, [torch.zeros(g.shape) for g in gradients])

    with mock.patch.object(Gradients, "add", add):
        yield


@contextlib.contextmanager
def optimizer_asks() -> Iterator[None]:
    plain = MuonAdamW.step

    def step(self: MuonAdamW, taken: Tensor) -> None:
        if taken:
            plain(self, taken=taken)

    with mock.patch.object(MuonAdamW, "step", step):
        yield


@contextlib.contextmanager
def blocking_upload() -> Iterator[None]:
    def to(pack: Pack, device: torch.device) -> Pack:
        return Pack(pack.X.to(device), pack.y.to(device), pack.sizes.to(device), pack.shapes)

    with mock.patch.object(Pack, "to", to):
        yield


def attended(change: Callable[[Tensor], Tensor]) -> Planted:
    """The queries of attention go through a function."""
    plain = attention.attend
    return lambda: mock.patch.object(attention, "attend", lambda q, *args: plain(change(q), *args))


def limits(**values: int) -> Planted:
    """What the network takes for the limits of a launch."""
    return lambda: mock.patch.multiple(attention, **values)


def indexed(values: Tensor) -> Tensor:
    return values[values > 0]


def doubled_if_large(values: Tensor) -> Tensor | None:
    return 2 * values if values.mean() > 1 else None


# Name -> (the fault, overrides of the step's configuration, how the error that tells of it begins)
FAULTS: dict[str, tuple[Planted, tuple[str, ...], str]] = {
    "log n on the CPU": (log_n_on_cpu, ONE_TABLE, "TwoDevices"),
    "gradients on the CPU": (gradients_on_cpu, ONE_TABLE, "TwoDevices"),
    "loss.item()": (losses(lambda x: x.detach().mean().item()), ONE_TABLE, "Waits"),
    "if loss": (losses(doubled_if_large), ONE_TABLE, "Waits"),
    "boolean index": (losses(indexed), ONE_TABLE, "Waits"),
    "nonzero": (losses(lambda x: x.nonzero().float()), ONE_TABLE, "Waits"),
    ".cpu()": (losses(lambda x: x.cpu()), ONE_TABLE, "Waits"),
    "a number is uploaded": (losses(lambda x: x + torch.tensor(1.0, device=x.device)), ONE_TABLE, "Waits"),
    "a list is an index": (losses(lambda x: x[[0]]), ONE_TABLE, "Waits"),
    "synchronize": (losses(lambda x: torch.cuda.synchronize()), ONE_TABLE, "Waits"),
    "repeats of unknown number": (losses(lambda x: x.repeat_interleave(x.int())), ONE_TABLE, "Waits"),
    "the optimizer asks": (optimizer_asks, ONE_TABLE, "Waits"),
    "a metric each step": (contextlib.nullcontext, (*ONE_TABLE, "trainer.log_every=1"), "Waits"),
    "blocking upload": (blocking_upload, ONE_TABLE, "Waits"),
    "memory is not pinned": (lambda: mock.patch("fake_step.pin_next", next), ONE_TABLE, "Waits"),
    "no limit of a launch": (
        limits(CUDA_GRID=10**9, FLASH_BACKWARD=2**40), MANY_COLUMNS, "KernelLimit: more than 65535 blocks",
    ),
    "no limit of indices": (
        limits(FLASH_BACKWARD=2**40), MANY_HEADS, "KernelLimit: the backward pass counts beyond 2^31",
    ),
    "strided queries": (
        attended(lambda q: q.mT.contiguous().mT), ONE_TABLE, "KernelLimit: the last dimension has stride",
    ),
    "queries that start at an odd place": (
        attended(lambda q: torch.cat([q, q], -1)[..., 1 : q.shape[-1] + 1]), ONE_TABLE, "KernelLimit: strides",
    ),
    "head dimension 4": (contextlib.nullcontext, (*ONE_TABLE, "model.icl_num_heads=8"), "KernelLimit: head dimension"),
}  # fmt: skip
