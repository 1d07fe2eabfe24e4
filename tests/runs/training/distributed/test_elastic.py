"""torchrun restarts a run whose ranks were killed; here its two machines are two torchruns on this one."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import run_ranks, train_command
from training_runs import assert_same_end, read_rows

from tabicl_train.run.records import Records

pytestmark = pytest.mark.slow

# A store that outlives a restart still has the addresses of the ranks before it.
ENVIRONMENT = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SETTINGS = ["experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=12",
            "checkpoint.every=3", "trainer.accelerator=cpu"]  # fmt: skip


@contextlib.contextmanager
def torchruns(folder: Path, *arguments: str) -> Iterator[list[subprocess.Popen]]:
    """Two of them with a process each, meeting at a free port; they write to FOLDER/torchrun.N."""
    place = folder / "place"  # a store in a file needs no port
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={place}", "--rdzv-conf=store_type=file", "--rdzv-id=test",
        "--local-addr=127.0.0.1", *arguments,
    ]  # fmt: skip
    processes = []
    try:
        for number in (0, 1):
            with open(folder / f"torchrun.{number}", "w") as log:
                processes.append(subprocess.Popen(command, stderr=log, env=ENVIRONMENT))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_run_whose_ranks_were_killed_ends_as_an_undisturbed_one(tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    assert run_ranks(train_command, *SETTINGS, f"run_dir={whole}", folder=tmp_path) == [0, 0]
    script = [str(Path(__file__).parent / "signaled.py"), str(tmp_path), "1:4:SIGKILL,0:8:SIGKILL"]
    with torchruns(tmp_path, *script, *SETTINGS, f"run_dir={torn}") as processes:
        codes = [process.wait(300) for process in processes]
    assert codes == [0, 0], "".join((tmp_path / f"torchrun.{number}").read_text() for number in (0, 1))
    assert_same_end(torn, whole)
    assert read_rows(torn / "scaling.csv") == read_rows(whole / "scaling.csv")
    # Killed in step 4, after checkpoint 3, and in step 8, after checkpoint 6.
    assert [start["step"] for start in Records(torn).lines("provenance.jsonl")] == [0, 3, 6]
    assert json.loads((torn / "status.json").read_text())["status"] == "finished"


def test_ranks_that_were_killed_on_one_machine_start_again(tmp_path):
    """Restarts need a store without the addresses of the ranks before."""
    script = [str(Path(__file__).parent / "signaled.py"), str(tmp_path), "1:4:SIGKILL,0:8:SIGKILL"]
    command = [
        sys.executable, "-m", "tabicl_train.training.distributed.loopback", "--rdzv-backend=loopback",
        "--rdzv-endpoint=any", "--nproc-per-node=2", "--max-restarts=3", *script, *SETTINGS, f"run_dir={tmp_path}/run",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [start["step"] for start in Records(tmp_path / "run").lines("provenance.jsonl")] == [0, 3, 6]
    assert "restarts by torchrun may fail" not in result.stderr
