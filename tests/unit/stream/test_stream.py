import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from priors import PriorError, build_prior
from priors.prior import Prior
from tabicl_train.config.schema import CurriculumConfig, StageConfig, StreamConfig
from tabicl_train.model import TabICLConfig
from tabicl_train.model.pack import Pack
from tabicl_train.signals import Stop
from tabicl_train.stream.steps import StepItem, StepStream
from tabicl_train.stream.workers import CONTEXT, Loader, Steps, packed, unpacked
from tabicl_train.training import loop

STAGE = StageConfig(steps=7, rows=[30, 60], features=[1, 5], tables=6, group_size=2, pack_tokens=1500)
CURRICULUM = CurriculumConfig({"only": STAGE})


@pytest.fixture(autouse=True)
def several_cores(monkeypatch):
    """Workers are not reduced to the cores of the machine."""
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)


def stream(start: int = 0, rank: int = 0, ranks: int = 1, prior: Prior | None = None) -> StepStream:
    return StepStream(prior or build_prior("mlp_scm"), CURRICULUM, TabICLConfig(), 5, range(start, 7), rank, ranks)


def assert_same(a, b) -> None:
    assert (a.step, a.stage, a.tables) == (b.step, b.stage, b.tables)
    for p, q in zip(a.packs, b.packs, strict=True):
        assert torch.equal(p.X, q.X)
        assert torch.equal(p.y, q.y)
        assert torch.equal(p.sizes, q.sizes)
        assert p.shapes == q.shapes
        assert p.sizes.tolist() == [list(shape) for shape in p.shapes]


@pytest.fixture(scope="module")
def undisturbed():
    return list(stream())


@pytest.mark.parametrize("workers", [0, 2])
def test_items_are_the_same_for_any_number_of_workers(workers, undisturbed):
    """What comes from a worker is aligned and writable."""
    with Loader(stream(), StreamConfig(num_workers=workers, prefetch=2)) as loader:
        items = list(loader)
    assert [item.step for item in items] == list(range(7))
    for a, b in zip(items, undisturbed, strict=True):
        assert_same(a, b)
    for tensor in (t for item in items for pack in item.packs for t in (pack.X, pack.y, pack.sizes)):
        assert workers == 0 or tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
        tensor.zero_()
    with Loader(stream(start=4), StreamConfig(num_workers=workers)) as loader:
        for a, b in zip(loader, undisturbed[4:], strict=True):
            assert_same(a, b)


@pytest.mark.parametrize(("processes", "workers"), [(1, 7), (2, 3), (3, 1), (16, 1)])
def test_workers_take_all_cores_but_one_of_each_process(processes, workers):
    assert StreamConfig(prefetch=2).local(processes) == StreamConfig(num_workers=workers, prefetch=2)
    assert StreamConfig(num_workers=0).local(processes).workers == 0


def test_more_workers_than_cores_are_reduced_with_a_line_and_absurd_numbers_refused(monkeypatch, capsys):
    monkeypatch.setattr("joblib.cpu_count", lambda: 2)
    made = mock.patch.object(loop, "Loader", lambda stream, config, device: config.workers)
    with made:
        assert loop.build_loader(stream(), StreamConfig(num_workers=3), torch.device("cpu"), 2) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line == "warning   stream.num_workers is 3; limited to 1 by the number of cores"
        assert loop.build_loader(stream(), StreamConfig(), torch.device("cpu"), 2) == 1
    assert capsys.readouterr().err == ""


def test_a_stop_signal_is_obeyed_after_the_table_that_is_being_drawn():
    stop = Stop()

    def act(step: int) -> None:
        if step == 3:
            assert not stop.asked  # no second table is drawn
            stop.signaled_at = 0.0

    with Loader(stream_of(act), StreamConfig(num_workers=0)) as loader:
        loader.start(0, stop)
        assert [loader.next().step for _ in range(3)] == [0, 1, 2]
        assert loader.next() is None


def test_a_stop_signal_is_obeyed_while_a_worker_draws():
    stop, begun = Stop(), multiprocessing.Event()

    def act(step: int) -> None:
        if step == 1:
            begun.set()
            threading.Event().wait(60)  # longer than a stop takes

    with Loader(stream_of(act), StreamConfig(num_workers=1)) as loader:
        loader.start(0, stop)
        assert loader.next().step == 0
        threading.Thread(target=lambda: begun.wait(60) and setattr(stop, "signaled_at", 0.0)).start()
        assert loader.next() is None


def test_ranks_divide_the_tables_of_one_process(undisturbed):
    def values(items):
        tables = []
        for item in items:
            for pack in item.packs:
                tables += [tuple(X.flatten().tolist()) for X, _, _ in pack.tables()]
        return sorted(tables)

    of_ranks = [*stream(rank=0, ranks=2), *stream(rank=1, ranks=2)]
    assert values(of_ranks) == values(undisturbed)
    for item in of_ranks:
        assert item.packs
        assert item.tables == STAGE.tables
    assert max(len(item.packs) for item in undisturbed) > 1


def test_items_for_a_gpu_are_pinned_one_ahead_and_errors_come_through(undisturbed, monkeypatch):
    pinned, devices = [], []

    def pin(tensor):
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    device = torch.device("cuda", 1)
    with Loader(stream(), StreamConfig(num_workers=2), device) as loader:
        assert not devices  # nothing of CUDA before the first item is asked for
        items = list(loader)
    assert devices == [device]
    assert len(pinned) == 3 * sum(len(item.packs) for item in items)
    for a, b in zip(items, undisturbed, strict=True):
        assert_same(a, b)
    with Loader(stream_of(fail), StreamConfig(num_workers=1), device) as loader, pytest.raises(ZeroDivisionError):
        list(loader)
    with Loader(stream(), StreamConfig(num_workers=2), device) as loader:  # left while the thread waits for an item
        loader.start()
        assert loader.next().step == 0


def test_workers_that_are_ended_are_no_error_while_something_holds_their_iterator():
    begun = multiprocessing.Event()
    loader = Loader(stream_of(lambda step: begun.set()), StreamConfig(num_workers=1))
    holder = loader.from_workers
    loader.start()
    assert begun.wait(60)
    loader.close()
    (worker,) = loader.workers
    with contextlib.suppress(ChildProcessError):  # if it was waited for already
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # torch finds it dead, and raises if it may not be
    assert not worker.is_alive()
    del holder


def test_a_worker_draws_no_further_table_once_its_loader_is_closed():
    first_step, drawn = CONTEXT.Value("q", 2), []

    def act(step: int) -> None:
        drawn.append(step)
        first_step.get_obj().value = 7  # as `Loader.close` does

    worker = SimpleNamespace(id=0, num_workers=1)
    with mock.patch("tabicl_train.stream.workers.get_worker_info", lambda: worker):
        assert list(Steps(stream_of(act), first_step)) == []
    assert drawn == [2]


def test_drawing_leaves_thread_count_and_global_random_state_alone():
    np.random.seed(0)
    torch.manual_seed(0)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads()
    stream().draw(0)
    assert before == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads())


@dataclasses.dataclass
class Table60(Prior):
    """Tables of 60 rows; `act` is called with the step before one is drawn."""

    act: Callable[[int], None]

    def plan(self, spec, seed):
        self.act(seed[1])

    def execute(self, plan):
        return torch.arange(120.0).reshape(60, 2), torch.arange(60) % 2, 2


def stream_of(act: Callable[[int], None]) -> StepStream:
    stage = dataclasses.replace(STAGE, rows=[60, 60], features=[5, 5])
    return StepStream(Table60(act), CurriculumConfig({"only": stage}), TabICLConfig(), 5, range(7))


def fail(step: int) -> None:
    if step == 3:
        raise ZeroDivisionError("no such luck")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_prior_names_step_and_table(workers):
    loader = Loader(stream_of(fail), StreamConfig(num_workers=workers))
    with loader, pytest.raises(ZeroDivisionError, match="no such luck") as caught:
        list(loader)
    assert re.search(r"table \d of step 3, seed 5.*TableSpec\(num_rows=60", caught.value.__notes__[0])


class MoreClasses(Table60):
    """Tables with labels 9 and 10, as files of another program may have them."""

    def sample(self, spec, seed):
        table = super().sample(spec, seed)
        return dataclasses.replace(table, y=table.y + 9)


def test_a_label_that_the_network_does_not_have_is_found_where_its_table_is_drawn():
    wrong = dataclasses.replace(stream_of(fail), prior=MoreClasses(fail))
    with pytest.raises(ValueError, match=re.escape("labels are in 9..10; they must be in 0..9")) as caught:
        wrong.draw(0)
    assert "while drawing table" in caught.value.__notes__[0]


@dataclasses.dataclass
class Resized(Prior):
    """Returns other sizes than it is asked for, from `execute` or from `sample`."""

    change: Callable = None
    raw: bool = True
    by_execute: bool = True

    def plan(self, spec, seed):
        return spec

    def execute(self, spec):
        X, y = torch.randn(spec.num_rows, spec.num_features), torch.arange(spec.num_rows) % 2
        return (*(self.change(X, y) if self.by_execute else (X, y)), 2)

    def sample(self, spec, seed):
        table = super().sample(spec, seed)
        if not self.by_execute:
            table.X, table.y = self.change(table.X, table.y)
        return table


@pytest.mark.parametrize(("raw", "by_execute"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda X, y: (X[1:], y[1:]),
            "prior Resized has drawn features (29, 2), a target (29,) and 10 labeled rows",
        ),
        (lambda X, y: (X[1:], y), "features (29, 2), a target (30,)"),
        (lambda X, y: (X, torch.cat([y, y[:1]])), "features (30, 2), a target (31,)"),
        (lambda X, y: (X, y[:, None]), "features (30, 2), a target (30, 1)"),
        (lambda X, y: (X[:, :0], y), "features (30, 0), a target (30,)"),
        (lambda X, y: (torch.cat([X, X], 1), y), "features (30, 4), a target (30,)"),
        (lambda X, y: (X[:, :1], y), None),
    ],
)
def test_a_table_of_other_sizes_than_asked_for_is_refused_where_it_is_drawn(raw, by_execute, change, words):
    stage = StageConfig(steps=1, rows=[30, 30], features=[2, 2], tables=1, train_share=[0.34, 0.34])
    curriculum = CurriculumConfig({"only": stage})
    prior = Resized(change=change, raw=raw, by_execute=by_execute)
    stream = StepStream(prior, curriculum, TabICLConfig(max_classes=2), 5, range(1))
    if words is None:
        assert stream.draw(0).packs[0].shapes == ((30, 10, 1),)
        return
    with pytest.raises(PriorError, match=re.escape(words)) as caught:
        stream.draw(0)
    assert "while drawing table 0 of step 0" in caught.value.__notes__[0]


class Unsendable(Exception):
    def __init__(self, a, b):
        super().__init__(a + b)


def test_an_error_that_cannot_be_sent_still_ends_the_run():
    def act(step: int) -> None:
        raise Unsendable("worse ", "luck")

    loader = Loader(stream_of(act), StreamConfig(num_workers=1))
    with loader, pytest.raises(RuntimeError, match="Unsendable: worse luck"):
        list(loader)


def test_the_death_of_a_worker_ends_the_run():
    def act(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    loader = Loader(stream_of(act), StreamConfig(num_workers=2))
    with loader, pytest.raises(RuntimeError, match="DataLoader worker"):
        list(loader)


def test_workers_stay_within_the_bounds():
    """Two workers that draw two steps ahead each draw three steps beyond the one that is due, and no more."""
    due, reached = multiprocessing.RawValue("q", 0), multiprocessing.Event()

    def act(step: int) -> None:
        if step > due.value + 3:
            raise RuntimeError(f"step {step} was drawn when {due.value} was due")
        if step == 3:
            reached.set()

    with Loader(stream_of(act), StreamConfig(num_workers=2, prefetch=2)) as loader:
        loader.start()
        assert reached.wait(60)
        for step in range(7):
            due.value = step + 1  # so it is, as soon as the loader has this step
            assert loader.next().step == step


def test_labels_of_any_type_pass_from_a_worker():
    def tables(y):
        return Pack.of([(torch.rand(5, 2), y, 3), (torch.rand(5, 1), y + 1, 2)])

    item = StepItem(3, "only", 4, [tables(torch.rand(5)), tables(torch.arange(5))])
    received = unpacked(*pickle.loads(pickle.dumps(packed(item))))
    assert [pack.y.dtype for pack in received.packs] == [torch.float32, torch.int64]
    assert_same(received, item)
