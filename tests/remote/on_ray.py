"""Streams and runs on a Ray instance of this machine. Starting one takes ten CPU seconds, so few tests do."""

import os
from pathlib import Path

import pytest
from clusters import kill, session, until
from recording_prior import STEP_GIB, Recording, assert_same, stream_of
from runs import assert_same_end
from short_runs import run

from tabicl_train.callbacks.metrics import Metrics
from tabicl_train.config.schema import StreamConfig
from tabicl_train.processes.signals import Stop
from tabicl_train.remote.loader import RayLoader

pytest.importorskip("ray")


@pytest.mark.multi_process
def test_items_are_those_of_this_process_though_an_actor_is_killed(tmp_path, capsys):
    """One actor dies while it draws step 2; step 7 has an error; with a bound of two steps all come in their turn."""
    prior = Recording(str(tmp_path), kill=2, fail=7)
    config = StreamConfig("ray", num_workers=2, prefetch_gib=2.5 * STEP_GIB)
    with RayLoader(stream_of(prior), config) as loader:
        leader, folder = loader.relay.pid, Path(loader.folder)
        assert loader.problem(Stop()) is None
        items = [next(loader) for _ in range(7)]
        with pytest.raises(ZeroDivisionError) as caught:
            next(loader)
        assert folder.exists() and len(session(leader)) > 3
    assert_same(items, list(stream_of(Recording(str(tmp_path)), range(7))))
    for tensor in (values for pack in items[0].packs for values in (pack.X, pack.y, pack.sizes)):
        assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
        tensor.zero_()  # they are this process's own, as those of workers
    assert "table" in caught.value.__notes__[0] and "in a Ray actor on" in str(caught.value.__cause__)
    said = capsys.readouterr().err
    assert "2 Ray actors: 2 on " in said and "another one draws step 2 again" in said and "warning" not in said
    assert loader.waited > 0 and not folder.exists()
    until(lambda: not session(leader), seconds=10)  # a signal takes effect a moment after it is sent
    drawn = {int(name.split("-")[0]) for name in os.listdir(tmp_path)} - {os.getpid()}
    assert len(drawn) >= 2 and not drawn & {worker.process.pid for worker in loader.workers}


@pytest.mark.slow
@pytest.mark.multi_process
def test_a_run_that_loses_ray_goes_on_with_the_same_tables(tmp_path, monkeypatch, capsys):
    """As if Ray had ended its process, which is what it does a minute after the head is gone."""
    started, loaders = RayLoader.__init__, []
    monkeypatch.setattr(RayLoader, "__init__", lambda self, *args: (loaders.append(self), started(self, *args))[0])
    ends = Metrics.on_train_batch_end

    def kill_relay(self, trainer, *args):
        if loaders and trainer.global_step == 3:
            kill(loaders[0].relay.pid)
        ends(self, trainer, *args)

    monkeypatch.setattr(Metrics, "on_train_batch_end", kill_relay)
    settings = ["experiment=smoke", "trainer.accelerator=cpu", "trainer.log_every=1", "curriculum.stages.smoke.steps=8"]
    assert run(tmp_path / "local", settings=settings) == "finished" and not loaders
    few = ["stream=ray", "stream.num_workers=1", "stream.prefetch=1"]
    assert run(tmp_path / "ray", *few, settings=settings) == "finished"
    assert_same_end(tmp_path / "ray", tmp_path / "local")
    said = capsys.readouterr().err
    assert said.count("Ray was killed by SIGKILL") == 1 and "1 worker of this machine draw" in said
    until(lambda: not session(loaders[0].relay.pid), seconds=10)
    assert not Path(loaders[0].folder).exists()
