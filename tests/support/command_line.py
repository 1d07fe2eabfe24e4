"""Runs commands as a user types them, in this process: a process of its own takes seconds to import everything."""

import contextlib
import io
import subprocess
import sys

import pytest

from tabicl_train import cli


def exit_code(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> int:
    """Run a command; what it prints goes where capsys sees it."""
    monkeypatch.setattr(sys, "argv", ["tabicl-" + name, *arguments])
    try:
        getattr(cli, name.replace("-", "_"))()
    except SystemExit as error:
        if isinstance(error.code, str):  # the interpreter prints it, too
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0
    return 0


def command(name: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run a command; exit code and output are those that its own process would have."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        code = exit_code(monkeypatch, name, *arguments)
    return subprocess.CompletedProcess([name, *arguments], code, stdout.getvalue(), stderr.getvalue())
