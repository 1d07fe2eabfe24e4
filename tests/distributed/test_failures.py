"""The stack trace of an error that ends one process of several."""

from tabicl_train.processes.failures import save_trace


def fail() -> Exception:
    try:
        raise ZeroDivisionError("no such luck")
    except ZeroDivisionError as error:
        return error


def test_traces_are_appended_to_a_file(tmp_path):
    log = tmp_path / "run/rank-1.log"
    assert [save_trace(log, fail()) for _ in range(2)] == [log, log]
    assert log.read_text().count("ZeroDivisionError: no such luck") == 2


def test_a_trace_that_cannot_be_written_is_printed(tmp_path, capsys):
    (tmp_path / "run").touch()  # a file in place of the run's folder
    assert save_trace(tmp_path / "run/rank-1.log", fail()) == "the lines above"
    stderr = capsys.readouterr().err
    assert "in fail" in stderr and "ZeroDivisionError: no such luck" in stderr
