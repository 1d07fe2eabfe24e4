import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from tabicl_train.processes import signals
from tabicl_train.processes.signals import Stop, watch_signals


def test_a_second_signal_ends_the_process_unless_it_is_the_same_one_passed_on(capsys):
    stop = Stop()
    children = mock.patch.object(signals.multiprocessing, "active_children", return_value=[])
    with mock.patch.object(os, "_exit", side_effect=SystemExit) as end, children:
        stop.notice(signal.SIGTERM, 100.0)
        stop.notice(signal.SIGTERM, 100.9)  # torchrun passes on what the process group got
        assert stop.asked and not end.called
        with pytest.raises(SystemExit):
            stop.notice(signal.SIGINT, 101.1)
    end.assert_called_once_with(128 + signal.SIGINT)
    assert capsys.readouterr().err.count("SIGTERM: stopping after this step; signal again to kill") == 1


@pytest.mark.multi_process
def test_the_end_of_a_process_ends_workers_that_cannot_be_asked_to(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as worker:
        # loky's processes have a kill() that raises AttributeError; these have none
        children = [SimpleNamespace(pid=None), SimpleNamespace(pid=worker.pid)]
        monkeypatch.setattr(signals.multiprocessing, "active_children", lambda: children)
        monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            signals.end_now(1)
        try:
            assert worker.wait(60) == -signal.SIGKILL
        finally:
            worker.kill()


def test_handlers_are_put_back_and_nested_uses_are_one():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with watch_signals() as outer, watch_signals() as inner:
        assert inner is outer
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
    with watch_signals() as again:
        assert again is not outer


STUCK = """
import ctypes, sys
from tabicl_train.processes import signals

signals.SAME = 0.0
with signals.watch_signals():
    print("ready", flush=True)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # for ever, and no signal wakes it: as in a collective whose other side is gone
"""


@pytest.mark.multi_process
def test_signals_are_noticed_while_the_main_thread_is_stuck():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STUCK], **pipes) as p:
        assert p.stdout.readline() == "ready\n"
        p.send_signal(signal.SIGTERM)
        assert "SIGTERM: stopping after this step" in p.stderr.readline()
        assert p.poll() is None
        p.send_signal(signal.SIGTERM)
        assert p.wait(60) == 128 + signal.SIGTERM


def test_a_stopped_process_waits_for_the_signal_of_torchrun_on_several_machines(monkeypatch):
    monkeypatch.setattr(signals, "NOTICED", 600.0)
    stop = Stop()
    signals.wait_for_torchrun(stop)  # on one machine
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    waiting = threading.Thread(target=signals.wait_for_torchrun, args=(stop,))
    waiting.start()
    assert waiting.is_alive()
    stop.notice(signal.SIGTERM, 1.0)
    waiting.join(60.0)
    assert not waiting.is_alive()
    monkeypatch.setattr(signals, "NOTICED", 0.0)
    signals.wait_for_torchrun(Stop())  # it was no new machine
