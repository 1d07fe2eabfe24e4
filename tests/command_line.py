"""Commands as a user gives them."""

import subprocess
import sys

import pytest

from tabicl_train import commands


def command(name: str, *arguments: str) -> subprocess.CompletedProcess:
    """In a process of its own."""
    code = f"from tabicl_train.commands import {name}; {name}()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def exit_code(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> int:
    """In this process, which is faster; what it prints is left to capsys."""
    monkeypatch.setattr(sys, "argv", ["tabicl-" + name, *arguments])
    try:
        getattr(commands, name)()
    except SystemExit as error:
        return error.code or 0
    return 0
