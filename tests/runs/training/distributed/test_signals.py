import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from tabicl_train import signals
from tabicl_train.signals import Stop, watch_signals


def test_a_second_signal_ends_process_and_workers_unless_it_is_one_passed_on(monkeypatch, capfd):
    stop = Stop()
    times = iter((100.0, 100.9, 101.1))
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=SystemExit))
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as worker:
        # loky's processes have a kill() that raises AttributeError
        children = [SimpleNamespace(kill=mock.Mock(side_effect=AttributeError)), worker]
        monkeypatch.setattr(signals.multiprocessing, "active_children", lambda: children)
        try:
            stop.handle(signal.SIGTERM)
            stop.handle(signal.SIGTERM)  # torchrun passes on what the process group got
            assert stop.signaled_at == 100.0
            assert stop.cause == "SIGTERM"
            assert not os._exit.called
            with pytest.raises(SystemExit):
                stop.handle(signal.SIGINT)
            assert worker.wait(60) == -signal.SIGKILL
        finally:
            worker.kill()
    os._exit.assert_called_once_with(128 + signal.SIGINT)
    assert capfd.readouterr().err == "stop      SIGTERM: stopping after this step; signal again to kill\n"


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_signals_of_terminals_and_batch_systems_stop_a_run_unless_ignored_before_it(number):
    before = signal.signal(number, signal.SIG_IGN)  # as nohup does with SIGHUP
    try:
        with watch_signals() as stop:
            signal.raise_signal(number)
            assert not stop.asked
        signal.signal(number, signal.SIG_DFL)
        with watch_signals() as stop:
            signal.raise_signal(number)
            assert stop.asked and stop.cause == number.name
    finally:
        signal.signal(number, before)


def test_handlers_are_put_back_and_nested_uses_are_one():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with watch_signals() as outer, watch_signals() as inner:
        assert inner is outer
        signal.raise_signal(signal.SIGUSR1)
        assert outer.asked
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
    with watch_signals() as again:
        assert again is not outer and not again.asked
