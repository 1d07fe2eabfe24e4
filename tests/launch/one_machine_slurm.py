"""A SLURM cluster of this machine alone: the real scheduler, in a temporary folder, without systemd and accounting."""

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import waiting

until = functools.partial(waiting.until, seconds=600.0)

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")
IS_INSTALLED = hasattr(os, "geteuid") and os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdTimeout=10
ReturnToService=2
MinJobAge=3600
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=500
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE OverSubscribe=FORCE:8
"""


class Cluster:
    """folder: where all files of the cluster lie"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        with contextlib.ExitStack() as stack:  # both are free at once, so they differ
            sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
            for free in sockets:
                free.bind(("127.0.0.1", 0))
            ports = [free.getsockname()[1] for free in sockets]
        values = {"host": socket.gethostname().partition(".")[0], "folder": folder, "ports": ports}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**values, cpus=os.cpu_count()))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        folder.chmod(0o755)
        self.daemons: dict[str, subprocess.Popen] = {}

    def start(self, name: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.out", "a") as file:
            command = [shutil.which(name), *arguments]
            self.daemons[name] = subprocess.Popen(command, env=self.environment, stdout=file, stderr=file)

    def start_all(self) -> None:
        names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log",
                 "seed-file": "munge.seed"}  # fmt: skip
        self.start("munged", "--foreground", "--force", *(f"--{o}={self.folder / f}" for o, f in names.items()))
        until((self.folder / "munge.socket").exists, "munged starts")
        self.start("slurmctld", "-D")
        self.start("slurmd", "-D")
        until(lambda: "idle" in self.run("sinfo", "--noheader"), "the machine is ready")

    def run(self, *command: str, cwd: Path | None = None) -> str:
        result = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True)
        return result.stdout + result.stderr

    def state(self, job: str) -> str:
        """The state of a job: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, ..."""
        return self.value(job, "JobState")

    def value(self, job: str, name: str) -> str:
        shown = self.run("scontrol", "show", "job", "--oneliner", job)
        return next((word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}=")), "")

    def lose_machine(self, job: str) -> None:
        """Kill slurmd, and everything of a job."""
        words = [line.split() for line in self.run("scontrol", "listpids", job).splitlines()[1:]]
        processes = [int(numbers[0]) for numbers in words if numbers[0] != "-1"]
        parents = {parent_of(process) for process in processes}
        steps = [p for p in parents if Path(f"/proc/{p}/comm").read_text().startswith("slurmstepd")]
        self.stop("slurmd")
        for process in [*steps, *processes]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def stop(self, name: str) -> None:
        process = self.daemons.pop(name)
        process.kill()
        process.wait()

    def stop_all(self) -> None:
        """First the jobs, whose processes are no children of this one."""
        self.run("scancel", "--user=root", "--full", "--signal=KILL")
        self.run("scancel", "--user=root")
        with contextlib.suppress(AssertionError):
            until(lambda: not self.run("squeue", "--noheader").strip(), "the jobs end", seconds=60)
        for name in reversed(list(self.daemons)):
            self.stop(name)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    if not IS_INSTALLED:
        pytest.skip("needs root and SLURM with munge (Debian: apt-get install slurm-wlm munge)")
    made = Cluster(folder)
    try:
        made.start_all()
        yield made
    finally:
        made.stop_all()
