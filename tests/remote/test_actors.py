"""What the relay does with its actors, in one process: they are drawers behind a stand-in for Ray's interface."""

import contextlib
import dataclasses
import pickle
import random
import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
from recording_prior import STEP_GIB, Recording, assert_same, stream_of

from tabicl_train.config.schema import StreamConfig
from tabicl_train.remote import actors as module
from tabicl_train.remote.actors import DEATHS, Actors, ClusterLost
from tabicl_train.remote.loader import pass_on
from tabicl_train.remote.machine import this_machine
from tabicl_train.run_dir.provenance import cpu_kind
from tabicl_train.workers import WorkerDied, accept, receive


class Lost(Exception):
    """Ray's error for an actor that is gone."""


class Reply:
    """done: after how many looks it is there"""

    def __init__(self, looks: int, act) -> None:
        self.looks, self.act = looks, act


class Method:
    def __init__(self, ray, call) -> None:
        self.ray, self.call = ray, call

    def remote(self, *args) -> Reply:
        return Reply(self.ray.random.randrange(6), lambda: self.call(*args))


class Actor:
    def __init__(self, ray, drawer) -> None:
        self.introduce = Method(ray, lambda: ray.introduced(*drawer.introduce()))
        self.draw = Method(ray, lambda step: ray.drawn(step, drawer.draw))


class StandIn:
    """The part of Ray that is used. Replies arrive in a random order.

    introduced, drawn: what an actor answers, from what a drawer would
    """

    exceptions = SimpleNamespace(RayError=Lost)
    cloudpickle = pickle

    def __init__(self, introduced=lambda *answer: answer, drawn=lambda step, draw: draw(step)) -> None:
        self.introduced, self.drawn, self.random = introduced, drawn, random.Random(0)
        self.started, self.killed = 0, 0

    def remote(self, **options):
        assert options["num_cpus"] == 1
        return lambda cls: SimpleNamespace(remote=lambda *args: self.add(cls(*args)))

    def add(self, drawer) -> Actor:
        self.started += 1
        return Actor(self, drawer)

    def wait(self, replies, num_returns=1, timeout=None):
        for reply in replies:
            reply.looks -= 1
        return [reply for reply in replies if reply.looks < 0][:num_returns], []

    def get(self, reply):
        return reply.act()

    def kill(self, actor):
        self.killed += 1

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address="127.0.0.1:1")  # where nothing listens

    def cluster_resources(self):
        return {"CPU": 3.0}


@contextlib.contextmanager
def passing_on(ray, stream, config):
    """The training process's end of a connection to a relay, which is a thread."""
    connection, relay_end = Pipe()
    relayed = Actors(ray, stream, config.num_workers)
    problems, _ = relayed.start()
    assert not problems
    thread = threading.Thread(target=pass_on, args=(relayed, stream, config, relay_end))
    thread.start()
    try:
        yield connection
    finally:
        connection.send(None)
        thread.join()


def take_all(connection, steps):
    return [accept(receive(connection), step, [connection]) for step in steps]


def test_items_come_in_order_whatever_the_order_of_the_actors(tmp_path):
    stream = stream_of(Recording(str(tmp_path)))
    with passing_on(StandIn(), stream, StreamConfig("ray", num_workers=3)) as connection:
        assert_same(take_all(connection, stream.steps), stream)


def test_steps_of_lost_actors_are_drawn_again_by_others(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RESTART", 0.0)
    monkeypatch.setattr(Actors, "head_answers", lambda self: True)
    lost = [1, 1, 4, 5, 8]

    def drawn(step, draw):
        if step in lost:
            lost.remove(step)
            raise Lost
        return draw(step)

    ray, stream = StandIn(drawn=drawn), stream_of(Recording(str(tmp_path)))
    with passing_on(ray, stream, StreamConfig("ray", num_workers=2)) as connection:
        answers = []
        for step in stream.steps:
            answers.append(receive(connection))
            accept(answers[-1], step, [connection])
    assert_same([item for item, _, _ in answers], stream)
    assert ray.killed == 5 and ray.started >= 2 + 4  # the last one may be lost when all is drawn
    news = " ".join(text for _, _, text in answers)
    assert all(f"draws step {step} again" in news for step in (1, 4, 5))


def test_a_step_that_no_actor_survives_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RESTART", 0.0)
    monkeypatch.setattr(Actors, "head_answers", lambda self: True)

    def drawn(step, draw):
        if step == 2:
            raise Lost("killed")
        return draw(step)

    ray, stream = StandIn(drawn=drawn), stream_of(Recording(str(tmp_path)))
    with passing_on(ray, stream, StreamConfig("ray", num_workers=2)) as connection:
        take_all(connection, range(2))
        with pytest.raises(WorkerDied, match=f"{DEATHS} actors .* while drawing step 2, seed 5"):
            take_all(connection, range(2, 3))


@pytest.mark.parametrize(("prefetch", "gib", "ahead"), [(4, 1e-9, 0), (4, 2.5 * STEP_GIB, 1), (2, 1.0, 3)])
def test_actors_stay_within_the_bounds_of_workers(prefetch, gib, ahead, tmp_path):
    """They draw `ahead` steps beyond the one that is due, and no more, also when nothing is taken."""
    due, reached, beyond = 0, threading.Event(), []

    def drawn(step, draw):
        if step > due + ahead:
            beyond.append((step, due))
        if step == ahead:
            reached.set()
        return draw(step)

    stream = stream_of(Recording(str(tmp_path)))
    config = StreamConfig("ray", num_workers=2, prefetch=prefetch, prefetch_gib=gib)
    with passing_on(StandIn(drawn=drawn), stream, config) as connection:
        assert reached.wait(60)
        for step in stream.steps:
            due = step + 1  # so it is, as soon as the relay has heard of it
            take_all(connection, [step])
    assert not beyond


def test_an_error_of_the_prior_comes_in_its_turn_with_address_and_trace(tmp_path):
    stream = stream_of(Recording(str(tmp_path), fail=3))
    with passing_on(StandIn(), stream, StreamConfig("ray", num_workers=2)) as connection:
        take_all(connection, range(3))
        with pytest.raises(ZeroDivisionError, match="no such luck") as caught:
            take_all(connection, [3])
    assert "of step 3, seed 5: TableSpec(num_rows=60" in caught.value.__notes__[0]
    assert "in a Ray actor on " in str(caught.value.__cause__) and "recording_prior.py" in str(caught.value.__cause__)


def test_other_versions_are_an_error_and_another_cpu_is_a_warning(tmp_path):
    stream = stream_of(Recording(str(tmp_path)))
    here = this_machine(stream.prior)
    older = dataclasses.replace(here, name="old", versions=here.versions | {"numpy": "1.0", "torch": "0.4"})
    other = dataclasses.replace(here, name="else", cpu="i486, NO AVX")
    assert here.cpu == cpu_kind()  # which also differs where an extension is switched off
    for machines, problems, warnings in (
        ([here, older], ["numpy is 1.0 on old", "torch is 0.4 on old"], []),
        ([here, other], [], [f"i486, NO AVX on else) than this machine ({here.cpu})"]),
        ([here, here], [], []),
    ):
        left = list(machines)
        started = Actors(StandIn(introduced=lambda *_, left=left: (left.pop(), None)), stream, 2)
        found, lines = started.start()
        assert [line.partition(", and ")[0] for line in found] == problems
        assert len(lines) == 1 + len(warnings) and all(text in lines[1] for text in warnings)
        assert len(started.idle) == 2 - bool(problems)


def test_code_that_differs_is_found(tmp_path, monkeypatch):
    prior = Recording(str(tmp_path))
    copy = tmp_path / "stream.py"
    copy.write_text("# edited")
    before = this_machine(prior).versions
    monkeypatch.setattr("tabicl_train.stream.__file__", str(copy))
    after = this_machine(prior).versions
    assert {name for name in before if before[name] != after[name]} == {"code of the tables"}
    assert this_machine(None).versions != after  # the file of another package's prior counts


def test_machines_that_cannot_load_the_prior_are_named(tmp_path):
    stream = stream_of(Recording(str(tmp_path)))
    here = this_machine(stream.prior)
    ray = StandIn(introduced=lambda *_: (here, "ModuleNotFoundError: No module named 'mine'"))
    problems, _ = Actors(ray, stream, 3).start()
    assert problems == [
        f"{here.name} cannot load the prior (ModuleNotFoundError: No module named 'mine'); "
        "its package must be installed there"
    ]


def test_a_cluster_without_a_free_cpu_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIRST", 0.0)
    problems, _ = Actors(StandIn(), stream_of(Recording(str(tmp_path))), 2).start()
    assert len(problems) == 1 and "each needs a free CPU of the cluster's 3" in problems[0]


def test_the_cluster_is_lost_with_its_head_or_with_all_actors_for_long(tmp_path, monkeypatch):
    stream = stream_of(Recording(str(tmp_path)))
    monkeypatch.setattr(module, "RESTART", 0.0)

    def without_actors() -> Actors:
        left = Actors(StandIn(), stream, 2)
        left.start()
        left.keep_up()  # as long as there are actors the head is not asked
        left.idle.clear()
        return left

    with pytest.raises(ClusterLost, match="the head of the Ray cluster is gone"):
        without_actors().keep_up()
    monkeypatch.setattr(Actors, "head_answers", lambda self: True)
    left = without_actors()
    left.keep_up()
    assert len(left.starting) == 2
    monkeypatch.setattr(module, "LOST", 0.0)
    with pytest.raises(ClusterLost, match="no Ray actor"):
        left.keep_up()
