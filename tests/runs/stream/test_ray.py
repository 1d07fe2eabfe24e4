"""Streams and runs on real Ray clusters of this machine. A start takes ten CPU seconds, so most tests share one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from recording_prior import Recording, assert_same, stream_of
from training_runs import assert_same_end, train_by_command

from priors import PriorError, build_prior
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import StreamConfig
from tabicl_train.errors import ConfigError, is_installed
from tabicl_train.signals import Stop
from tabicl_train.stream.ray_actors import RayLoader
from tabicl_train.stream.workers import WorkerDied
from tabicl_train.training.checks import check_machine
from tabicl_train.training.distributed.processes import Launch

# No importorskip: ray takes a second to import, and most tests that need it are slow.
pytestmark = pytest.mark.skipif(not is_installed("ray"), reason="needs ray")
on_ray = pytest.mark.slow
HERE = Path(__file__).parent


class StopAt(Stop):
    """Asked from the given look on."""

    def __init__(self, look: int) -> None:
        super().__init__()
        self.looks = look

    @property
    def asked(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.fixture(scope="module")
def address():
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, HERE / "ray_cluster.py"],
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        lines = (line.split() for line in process.stdout)
        yield next(words[1] for words in lines if words[:1] == ["address"])
        process.stdin.close()


@pytest.fixture
def loader_of(address):
    """A loader on the cluster; closed after the test."""
    loaders = []

    def open_loader(stream, actors=2, **options) -> RayLoader:
        loaders.append(RayLoader(stream, StreamConfig("ray", num_workers=actors, address=address, **options)))
        return loaders[-1]

    yield open_loader
    for loader in loaders:
        loader.close()


class TestOnACluster:
    pytestmark = on_ray

    @pytest.mark.parametrize("actors", [1, 3])  # of which the third finds no CPU
    def test_tables_are_those_of_this_process(self, actors, loader_of):
        stream = stream_of(build_prior("mlp_scm"), rank=1, ranks=2)
        loader = loader_of(stream, actors)
        loader.start(2)
        items = [loader.next() for _ in range(2, 9)]
        assert_same(items, list(stream)[2:])
        assert loader.waited > 0
        assert loader.drawers == actors
        assert not loader.unavailable
        tensors = [values for pack in items[0].packs for values in (pack.X, pack.y, pack.sizes)]
        assert all(values.data_ptr() % 64 == 0 for values in tensors)  # the rounding of products may depend on it
        for values in tensors:
            values.zero_()  # memory of this process, not of Ray

    def test_tables_are_the_same_though_an_actor_is_killed(self, loader_of, tmp_path):
        """Two steps may be drawn ahead; no more are handed out."""
        stream = stream_of(Recording(str(tmp_path), kill=4))
        loader = loader_of(stream, prefetch=1)
        loader.start()
        items = []
        for step in range(9):
            items.append(loader.next())
            assert loader.undrawn <= step + 3
        drawn = [tuple(map(int, name.split("-"))) for name in os.listdir(tmp_path)]
        assert len([pid for pid, step in drawn if step == 4]) == 2
        assert_same(items, stream_of(Recording(str(tmp_path))))

    def test_a_step_that_no_actor_survives_is_named(self, loader_of, tmp_path):
        loader = loader_of(stream_of(Recording(str(tmp_path), kill=1, deaths=99)), 1)
        loader.start()
        assert loader.next().step == 0
        with pytest.raises(WorkerDied, match=r"4 Ray actors ended, .* while drawing step 1, seed 5"):
            loader.next()

    def test_an_error_of_the_prior_comes_in_its_turn(self, loader_of, tmp_path):
        loader = loader_of(stream_of(Recording(str(tmp_path), fail=2)))
        loader.start()
        assert [loader.next().step for _ in range(2)] == [0, 1]
        with pytest.raises(PriorError) as caught:
            loader.next()
        assert type(caught.value) is PriorError
        assert str(caught.value) == "no such luck"
        assert "of step 2, seed 5: TableSpec(num_rows=60" in caught.value.__notes__[0]
        assert "recording_prior.py" in str(caught.value.__cause__)  # the stack trace of the actor

    def test_a_stop_is_obeyed_while_a_step_is_drawn(self, loader_of, tmp_path):
        loader = loader_of(stream_of(Recording(str(tmp_path), wait=1)), 1)
        stop = StopAt(10**6)
        loader.start(0, stop)
        assert loader.next().step == 0
        stop.looks = 1  # `next` looks first
        assert loader.next() is None and not loader.unavailable


class TestOnThisMachine:
    pytestmark = on_ray

    def test_no_more_tables_come_when_the_head_is_gone(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        with RayLoader(stream_of(Recording(str(tmp_path), wait=1)), StreamConfig("ray", num_workers=1)) as loader:
            loader.start()
            assert loader.next().step == 0
            (head,) = (child for child in psutil.Process().children() if child.name() == "gcs_server")
            head.kill()
            assert loader.next() is None and loader.unavailable
            assert capsys.readouterr().err.count("the head of the Ray cluster, ") == 1
        assert "raylet" not in {child.name() for child in psutil.Process().children()}

    def test_a_run_ends_with_the_same_weights(self, tmp_path):
        settings = ["trainer.accelerator=cpu", "curriculum.stages.smoke.steps=8"]
        train_by_command(tmp_path / "local", *settings, "stream.num_workers=0")
        train_by_command(tmp_path / "ray", *settings, "stream=ray", "stream.num_workers=1")
        assert_same_end(tmp_path / "ray", tmp_path / "local")


@pytest.mark.parametrize(
    ("address", "token", "warns"), [(None, False, True), (None, True, False), ("h:1", False, False)]
)
def test_ray_on_this_machine_asks_for_a_token_or_a_line_warns(address, token, warns, monkeypatch, capsys):
    import ray

    def stop_here():
        raise RuntimeError("far enough")

    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "get_runtime_context", stop_here)
    monkeypatch.setattr("ray._private.authentication.authentication_utils.is_token_auth_enabled", lambda: token)
    loader = RayLoader(stream_of(build_prior("mlp_scm")), StreamConfig("ray", num_workers=1, address=address))
    with pytest.raises(RuntimeError, match="far enough"):
        loader.start()
    lines = capsys.readouterr().err.splitlines()
    assert [line[:60] for line in lines] == ["warning   Ray listens on all network interfaces of this mach"] * warns


def problems_at_start(*settings: str) -> list[str]:
    try:
        return check_machine(compose(["experiment=smoke", *settings]), Launch())
    except ConfigError as error:
        return error.problems


def test_settings_that_cannot_work_are_refused(tmp_path, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        (line,) = problems_at_start("stream=ray", f"stream.address={address}", f"run_dir={tmp_path}/run")
    assert line.startswith(f"stream.address is '{address}'; no Ray cluster answers there (")
    for override, words in (
        ("stream.num_workers=null", "num_workers is null, but Ray needs a number"),
        ("stream.address=ray://head:10001", "address is 'ray://head:10001'; it must be HOST:PORT"),
    ):
        (line,) = problems_at_start("stream=ray", override)
        assert line.startswith(f"stream.{words}")
    (line,) = problems_at_start("stream.address=head:6379")
    assert line == "stream.address is 'head:6379', which only stream=ray uses"
    monkeypatch.setattr("tabicl_train.stream.ray_actors.is_installed", lambda package: package != "ray")
    (line,) = problems_at_start("stream=ray", f"run_dir={tmp_path}/run")
    assert line.startswith("stream=ray needs Ray: pip install ray")
