"""Commands as a user gives them, in a process of their own."""

import subprocess
import sys


def command(name: str, *arguments: str) -> subprocess.CompletedProcess:
    code = f"from tabicl_train.commands import {name}; {name}()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
