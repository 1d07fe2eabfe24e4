"""Programs in processes of their own, forked from one that has imported everything: an import takes 5 CPU seconds.

Arguments and results are those of processes started anew: the environment is that of the test, exit codes are the
interpreter's, and what they write to stderr goes to a file.
"""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from priors import registry
from tabicl_train.training.distributed.loopback import open_store

PLACES = [place for place in map(registry.prior.place, registry.prior) if place.startswith("priors.")]  # only ours
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([
    "tabicl_train.cli", "tabicl_train.config.compose", "tabicl_train.training.loop", "tabicl_train.lab",
    "priors.floats", "priors.predictability",  # load compiled loops, and with them most of numba
    "training_runs", "tabicl_train.prediction.classifier",  # what files of tests import: 2.1 CPU seconds a process
    *(place.partition(":")[0] for place in PLACES),
])  # fmt: skip


def start_process(
    function: Callable, *arguments, stderr: Path | str = os.devnull, env: dict[str, str] | None = None
) -> ForkServerProcess:
    """A process that calls a function of a module, in a session of its own."""
    ready, begun = context.Pipe(duplex=False)
    args = (begun, function, arguments, str(stderr), dict(os.environ) | (env or {}))
    process = context.Process(target=call, args=args)
    process.start()
    begun.close()
    ready.recv()  # its session exists, so that all of it can be killed
    return process


def call(begun: Connection, function: Callable, arguments: tuple, stderr: str, env: dict[str, str]) -> None:
    os.setsid()
    begun.send(None)
    begun.close()
    os.environ.clear()
    os.environ.update(env)
    with open(stderr, "ab") as file:
        os.dup2(file.fileno(), 2)
    function(*arguments)


def train_command(*arguments: str) -> None:
    """The command tabicl-train with these settings."""
    from tabicl_train import cli

    sys.argv = ["tabicl-train", *arguments]
    cli.train()


def export_and_be_killed(checkpoint: str, output: str, point: str) -> None:
    """tabicl-export in a process that kills itself at a point of kills.py."""
    import kills

    from tabicl_train.weights.export import export

    kills.arm(point)
    export(checkpoint, output)


def wait_for_exit_code(process: ForkServerProcess) -> int:
    process.join(300.0)
    if process.exitcode is None:
        process.kill()  # pytest would wait for it at its end
        pytest.fail("the process does not end")
    return process.exitcode


@contextlib.contextmanager
def started_ranks(function: Callable, *arguments, folder: Path, size: int = 2) -> Iterator[list[ForkServerProcess]]:
    """A process for each rank, as torchrun would start them, but not ended when one of them is gone.

    They write to FOLDER/stderr.RANK. What is left of them is killed at the end of the block.
    """
    store = open_store()
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    processes = []
    try:
        for rank in range(size):
            env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(start_process(function, *arguments, stderr=folder / f"stderr.{rank}", env=env))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_ranks(function: Callable, *arguments, folder: Path, size: int = 2) -> list[int]:
    """The exit codes of such processes. Their store serves one training."""
    with started_ranks(function, *arguments, folder=folder, size=size) as processes:
        return [wait_for_exit_code(process) for process in processes]
