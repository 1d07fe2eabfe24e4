"""Validation in runs of several processes: the others wait for the first, and notice when it is gone."""

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tabicl_train.callbacks import validation as validation_module
from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.validation import Validation
from tabicl_train.config.compose import compose
from tabicl_train.processes import watch
from tabicl_train.processes.failures import report
from tabicl_train.processes.join import meet
from tabicl_train.processes.launch import Launch
from tabicl_train.processes.processes import Processes
from tabicl_train.processes.signals import Stop
from tabicl_train.processes.watch import ProcessLost
from tabicl_train.run_dir.records import Records

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def ranks(tmp_path: Path, timeout: float):
    """The validations of three processes of one run, all of them in this one."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launches = [Launch("torchrun", rank, 3, rank, 3, "127.0.0.1", host.port) for rank in range(3)]
    members = [Processes(each, dist.PrefixStore("run", host.clone()), timeout, tmp_path / "log") for each in launches]
    config = compose(["experiment=smoke", "validation.every=2", "averages.ema=0.9"])
    try:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda processes: meet(processes, Stop()), members))
            yield threads, [Validation(config, Records(tmp_path), processes, Stop()) for processes in members]
    finally:
        for processes in members:
            processes.close()


def arrive(validation: Validation, step: int) -> None:
    """Come to the end of a step at which a validation is due."""
    trainer = SimpleNamespace(global_step=step, should_stop=False, callbacks=[Averages(validation.config.averages)])
    validation.validate_if_due(trainer, None)


def test_others_wait_longer_than_the_time_limit_while_the_first_lives_and_tell_it_to_stop(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(watch, "BEAT", 0.02)
    monkeypatch.setattr(validation_module, "LONG", 0.1)
    with ranks(tmp_path, timeout=2.0) as (threads, (first, *others)):
        waiting = [threads.submit(arrive, validation, 2) for validation in others]

        def validate(step, module, averages):
            started = time.monotonic()
            others[1].stop.notice(signal.SIGTERM, started)
            while time.monotonic() - started < 3.0 or not first.is_asked_to_stop():
                time.sleep(0.02)
                assert time.monotonic() - started < 60.0
            assert not any(future.done() for future in waiting)

        first.validate = validate
        arrive(first, 2)
        assert [future.result(60.0) for future in waiting] == [None, None]
        assert arrive(others[0], 2) is None  # done, at once
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("waiting for rank 0")]
    assert len(lines) >= 2 and "which has been validating step 2 for" in lines[0]


def test_others_do_not_wait_for_a_first_process_that_is_gone_or_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "BEAT", 0.02)
    with ranks(tmp_path, timeout=1.0) as (threads, (first, *others)):
        waiting = [threads.submit(arrive, validation, 2) for validation in others]
        first.processes.close()  # and its heartbeat with it
        for future in waiting:
            with pytest.raises(ProcessLost, match=r"rank 0 on .* has not answered for \d+ s; rank \d ends with it"):
                future.result(60.0)
    with ranks(tmp_path, timeout=60.0) as (threads, (first, *others)):
        waiting = [threads.submit(arrive, validation, 2) for validation in others]
        report(first.processes, ValueError("a table that cannot be scored"))
        for future in waiting:
            with pytest.raises(ProcessLost, match=r"rank 0 on .* failed"):
                future.result(60.0)
