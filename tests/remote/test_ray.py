"""Streams and runs on a Ray instance of this machine. Starting one takes ten CPU seconds, so few tests do."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from recording_prior import Recording, stream_of

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import StreamConfig
from tabicl_train.errors import ConfigError
from tabicl_train.remote.loader import RayLoader

pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.multi_process
def test_streams_and_runs_on_ray():
    """In a new process: Ray crashes in a fork of one that has used gRPC, as other tests of this process have."""
    cases = Path(__file__).with_name("on_ray.py")
    result = subprocess.run([sys.executable, "-m", "pytest", cases], capture_output=True, text=True)
    assert result.returncode == 0 and "2 passed" in result.stdout, result.stdout


def problems(*settings: str) -> list[str]:
    try:
        return compose(["experiment=smoke", *settings]).start_problems()
    except ConfigError as error:
        return error.problems


def test_settings_that_cannot_work_are_refused(tmp_path, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        (line,) = problems("stream=ray", f"stream.address={address}", f"run_dir={tmp_path}/run")
    assert line.startswith(f"stream.address is '{address}'; no Ray cluster answers there (")
    assert problems("stream=ray", "stream.num_workers=0") == ["stream.num_workers is 0; it must be at least 1"]
    (line,) = problems("stream=ray", "stream.address=ray://head:10001")
    assert line.startswith("stream.address is 'ray://head:10001'; it must be HOST:PORT")
    (line,) = problems("stream.address=head:6379")
    assert line == "stream.address is 'head:6379', which only stream=ray uses"
    monkeypatch.setattr("tabicl_train.config.schema.is_installed", lambda package: package != "ray")
    (line,) = problems("stream=ray", f"run_dir={tmp_path}/run")
    assert line.startswith("stream=ray needs Ray: pip install ray")


def test_the_local_workers_of_a_stream_on_ray_share_the_cores(monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)
    many = StreamConfig("ray", num_workers=64, address="head:6379", prefetch=3)
    assert [many.local(processes).num_workers for processes in (1, 2, 16)] == [8, 4, 1]
    assert many.local() == StreamConfig("local", num_workers=8, prefetch=3)
    local = StreamConfig(num_workers=64)
    assert local.local(2) is local


def test_stream_on_ray_needs_a_number_of_actors():
    (line,) = problems("stream=ray", "stream.num_workers=null")
    assert line == "stream.num_workers is null; stream=ray needs a number"


@pytest.mark.multi_process
def test_training_processes_of_other_machines_leave_the_cores_to_the_local_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 4)
    monkeypatch.setattr("tabicl_train.remote.loader.relay", lambda *args: None)
    stream = stream_of(Recording(str(tmp_path)), rank=0, ranks=3)
    with RayLoader(stream, StreamConfig("ray", num_workers=64), None, 2) as loader:
        assert len(loader.workers) == 2
