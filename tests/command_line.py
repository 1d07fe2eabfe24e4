"""Commands as a user gives them, run in this process: one of its own needs seconds to import everything."""

import contextlib
import io
import subprocess
import sys

import pytest

from tabicl_train import commands


def exit_code(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> int:
    """What the command prints is left to capsys."""
    monkeypatch.setattr(sys, "argv", ["tabicl-" + name, *arguments])
    try:
        getattr(commands, name)()
    except SystemExit as error:
        if isinstance(error.code, str):  # as the interpreter does
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0
    return 0


def command(name: str, *arguments: str) -> subprocess.CompletedProcess:
    """Exit code and output, as of a process of its own."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        code = exit_code(monkeypatch, name, *arguments)
    return subprocess.CompletedProcess([name, *arguments], code, stdout.getvalue(), stderr.getvalue())
