"""Commands as a user types them, run in this process: a process of their own would import for 5 CPU seconds."""

import contextlib
import io
import subprocess
import sys

import pytest

from tabicl_train import commands


def exit_code(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> int:
    """Exit code of the command; capsys has what it prints."""
    monkeypatch.setattr(sys, "argv", ["tabicl-" + name, *arguments])
    try:
        getattr(commands, name)()
    except SystemExit as error:
        if isinstance(error.code, str):  # like the interpreter
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0
    return 0


def command(name: str, *arguments: str) -> subprocess.CompletedProcess:
    """Exit code and output, as subprocess.run would return them."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        code = exit_code(monkeypatch, name, *arguments)
    return subprocess.CompletedProcess([name, *arguments], code, stdout.getvalue(), stderr.getvalue())
