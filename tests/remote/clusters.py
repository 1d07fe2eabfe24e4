"""Ray clusters on this machine, for tests: the test process itself never imports Ray."""

import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import waiting

from tabicl_train.processes.signals import die_with_parent

until = functools.partial(waiting.until, seconds=120.0)

CONTEXT = multiprocessing.get_context("fork")


class Cluster:
    """A head without CPUs, and nodes that are added. It lives in a process of its own, which gets the commands."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.address = self.connection.recv()

    def do(self, *command) -> None:
        self.connection.send(command)
        assert self.connection.recv() == "done"


@contextlib.contextmanager
def cluster(*nodes: int) -> Iterator[Cluster]:
    """A cluster with nodes of these numbers of CPUs."""
    connection, other = CONTEXT.Pipe()
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    process = CONTEXT.Process(target=host, args=(other, folder, os.getpid()))
    process.start()
    try:
        started = Cluster(connection)
        for cpus in nodes:
            started.do("add", cpus)
        yield started
    finally:
        connection.send(("end",))
        process.join(60)
        process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def host(connection: Connection, folder: str, parent: int) -> None:
    die_with_parent(parent)  # a test that is killed sends no end
    os.setsid()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 2**27, "temp_dir": folder}
    running = Cluster(initialize_head=True, head_node_args=head)
    connection.send(running.address)
    nodes = []
    while (command := connection.recv())[0] != "end":
        if command[0] == "add":
            nodes.append(running.add_node(num_cpus=command[1], object_store_memory=2**27))
        elif command[0] == "remove":
            running.remove_node(nodes.pop(command[1]), allow_graceful=False)
        elif command[0] == "kill head":
            running.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        connection.send("done")
    running.shutdown()


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def actors_of(leader: int) -> list[int]:
    """The processes of a session that are actors."""
    return [pid for pid in session(leader) if "ray::Drawer" in command_of(pid)]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
