"""Runs on a cluster of several nodes, which are processes of this machine."""

import os
import signal
from pathlib import Path

import forked
import pytest
from clusters import actors_of, cluster, session, until
from recording_prior import Recording, assert_same, stream_of
from runs import assert_same_end, run

from priors import build_prior
from tabicl_train.config.schema import StreamConfig
from tabicl_train.processes.signals import Stop
from tabicl_train.remote.loader import RayLoader

pytest.importorskip("ray")
pytestmark = [pytest.mark.campaign, pytest.mark.multi_process]

RUN = ("trainer.accelerator=cpu", "trainer.log_every=1", "checkpoint.every=4")
PRIORS = ("graph_scm", "mlp_scm", "tree_scm", "mix_scm")


def open_loader(address: str, stream, **options) -> RayLoader:
    loader = RayLoader(stream, StreamConfig("ray", address=address, **{"num_workers": 2, **options}))
    assert loader.problem(Stop()) is None
    return loader


@pytest.fixture(scope="module")
def two_nodes():
    with cluster(2, 2) as started:
        yield started


@pytest.mark.parametrize("prior", PRIORS)
def test_tables_are_the_same_for_all_priors_ranks_and_starts(prior, two_nodes):
    for steps, rank, ranks in ((range(9), 0, 1), (range(5, 9), 0, 2), (range(5, 9), 1, 2)):
        stream = stream_of(build_prior(prior), steps, rank, ranks)
        with open_loader(two_nodes.address, stream) as loader:
            assert_same(list(loader), list(stream))
            assert loader.active


def test_ranks_have_actors_of_their_own_and_the_cluster_of_the_user_stays(two_nodes, tmp_path):
    prior = Recording(str(tmp_path))
    with open_loader(two_nodes.address, stream_of(prior, rank=0, ranks=2), num_workers=1) as first:
        with open_loader(two_nodes.address, stream_of(prior, rank=1, ranks=2), num_workers=1) as second:
            assert_same(list(second), list(stream_of(prior, rank=1, ranks=2)))
        assert_same(list(first), list(stream_of(prior, rank=0, ranks=2)))
    with open_loader(two_nodes.address, stream_of(prior), num_workers=4) as loader:  # all CPUs are free again
        assert next(loader).step == 0


def test_steps_of_a_lost_node_are_drawn_again(tmp_path, capsys):
    """The lost node holds all actors; a node that comes later gets the new ones."""
    with cluster(2) as started:
        prior = Recording(str(tmp_path))
        stream = stream_of(prior)
        with open_loader(started.address, stream, prefetch=1) as loader:
            items = [next(loader) for _ in range(2)]
            started.do("add", 2)
            started.do("remove", 0)
            items += list(loader)
            assert loader.active
        assert_same(items, list(stream))
    assert "a Ray actor on" in capsys.readouterr().err


def rows_of(run_dir) -> int:
    path = run_dir / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


SLOW = ("curriculum.stages.smoke.steps=100",)


def test_a_run_that_loses_the_head_ends_with_the_same_weights(tmp_path):
    run(tmp_path / "local", *RUN, *SLOW)
    with cluster(2) as started:
        arguments = ("experiment=smoke", f"run_dir={tmp_path}/ray", *RUN, *SLOW, "stream=ray", "stream.num_workers=2")
        process = forked.start(forked.train, *arguments, f"stream.address={started.address}", stderr=tmp_path / "said")
        until(lambda: rows_of(tmp_path / "ray") >= 5)
        started.do("remove", 0)
        started.do("kill head")
        assert forked.exit_code(process) == 0
    assert_same_end(tmp_path / "ray", tmp_path / "local")
    said = (tmp_path / "said").read_text()
    assert said.count("of this machine draw from step") == 1 and "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_instance_of_the_run_ends_with_it(number, tmp_path):
    arguments = ("experiment=smoke", f"run_dir={tmp_path}/run", *RUN, *SLOW, "stream=ray", "stream.num_workers=1")
    process = forked.start(forked.train, *arguments, stderr=tmp_path / "said")
    until(lambda: rows_of(tmp_path / "run") >= 2)
    relays = [pid for pid in session_leaders() if actors_of(pid)]
    assert len(relays) == 1
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == (75 if number == signal.SIGTERM else -number)
    until(lambda: not session(relays[0]), seconds=60)
    assert not list(Path("/tmp").glob(f"ray-*/session_*_{relays[0]}"))


def session_leaders() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and session(int(name))]


def test_two_runs_at_once(tmp_path):
    run(tmp_path / "local", *RUN)
    processes = []
    for name in ("one", "two"):
        arguments = ("experiment=smoke", f"run_dir={tmp_path}/{name}", *RUN, "stream=ray", "stream.num_workers=1")
        processes.append(forked.start(forked.train, *arguments, stderr=tmp_path / f"{name}.said"))
    until(lambda: all(rows_of(tmp_path / name) for name in ("one", "two")))
    for process in processes:
        assert forked.exit_code(process) == 0
    for name in ("one", "two"):
        assert_same_end(tmp_path / name, tmp_path / "local")


def test_two_ranks_train_on_the_same_tables(tmp_path):
    for name, stream in (("local", ()), ("ray", ("stream=ray", "stream.num_workers=1"))):
        arguments = ("experiment=smoke", f"run_dir={tmp_path}/{name}", *RUN, *stream)
        with forked.ranks(forked.train, *arguments, folder=tmp_path) as ranks:
            assert [forked.exit_code(process) for process in ranks] == [0, 0], (tmp_path / "stderr.0").read_text()
    assert_same_end(tmp_path / "ray", tmp_path / "local")
