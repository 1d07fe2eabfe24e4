"""launch/slurm.sbatch with stand-ins for srun and scontrol, which set the variables that SLURM 22.05 sets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked import exit_code, ranks, train
from runs import assert_same_end, last, run
from scripts import ENVIRONMENT, ROOT, copy_scripts

from tabicl_train.run_dir.records import Records

SETTINGS = ["prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=16", "checkpoint.every=4",
            "trainer.accelerator=cpu"]  # fmt: skip
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_STEP_NUM_TASKS=$SLURM_NTASKS SLURM_STEP_NUM_NODES=1
export SLURM_STEP_NODELIST=localhost SLURM_NODEID=0
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & done
code=0
for process in $(jobs -p); do wait "$process" || code=$?; done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
show) echo "JobId=$3 JobName=tabicl JobState=$STATE Reason=None" ;;
requeue) touch "$STUB/requeued" ;;
esac
"""
SIGNALLED = f'"{sys.executable}" "{Path(__file__).parent}/signalled.py"'
PYTHON = f'#!/usr/bin/env bash\nexec {SIGNALLED} "$STUB" "$SIGNALS" "${{@:3}}"\n'


class Stub:
    """A cluster that runs one life of a job at a time, in the folder of the user."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "programs"
        self.programs.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)
        self.script = copy_scripts(folder) / "slurm.sbatch"

    def life(
        self, *settings: str, restarts: int = 0, tasks: int = 1, index: int | None = None, signals: str = "",
        state: str = "RUNNING",
    ) -> int:  # fmt: skip
        """One life of a job. Returns the exit code of its script.

        state: of the job when it is asked for
        """
        job = str(os.getpid() + (index or 0))  # decides the port
        variables = {"SLURM_JOB_ID": job, "SLURM_NTASKS": str(tasks), "SLURM_NNODES": "1", "STATE": state,
                     "SLURM_SUBMIT_DIR": str(self.folder), "STUB": str(self.folder), "SIGNALS": signals}  # fmt: skip
        variables |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        variables |= {"SLURM_ARRAY_TASK_ID": str(index)} if index is not None else {}
        path = f"{self.programs}:{ENVIRONMENT['PATH']}"
        with open(self.folder / "log", "a") as log:
            command = ["bash", str(self.script), "experiment=smoke", *SETTINGS, *settings]
            return subprocess.run(command, env=ENVIRONMENT | variables | {"PATH": path}, stderr=log).returncode

    @property
    def is_requeued(self) -> bool:
        """Whether the job has asked to be started again, since the last time."""
        mark = self.folder / "requeued"
        asked = mark.exists()
        mark.unlink(missing_ok=True)
        return asked


@pytest.fixture
def stub(tmp_path) -> Stub:
    return Stub(tmp_path)


def test_the_script_asks_for_a_signal_a_restart_and_one_log():
    options = [line for line in (ROOT / "launch/slurm.sbatch").read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --signal=USR1@300"} <= set(options)


@pytest.mark.multi_process
def test_a_job_at_its_time_limit_is_requeued_and_goes_on_to_the_same_end(stub, tmp_path):
    """SLURM signals all tasks."""
    torn, whole = tmp_path / "torn", tmp_path / "whole"
    settings = {"tasks": 2, "signals": "0:6:SIGUSR1,1:6:SIGUSR1"}
    assert stub.life(f"run_dir={torn}", **settings) == os.EX_TEMPFAIL and stub.is_requeued
    assert last(torn)["global_step"] in (6, 7)
    assert stub.life(f"run_dir={torn}", **settings, restarts=1) == 0 and not stub.is_requeued
    with ranks(train, "experiment=smoke", *SETTINGS, f"run_dir={whole}", folder=tmp_path) as processes:
        assert [exit_code(process) for process in processes] == [0, 0]
    assert_same_end(torn, whole)


@pytest.mark.multi_process
def test_the_index_in_an_array_chooses_the_seed_or_a_line_of_settings(stub, tmp_path):
    (tmp_path / "settings").write_text("seed=9\noptimizer=adamw optimizer.eps=1e-7\n")
    assert stub.life("seed=%a", "run_dir=seed-%a", "trainer.max_steps=1", index=3) == 0
    assert stub.life("@settings", "run_dir=line-%a", "trainer.max_steps=1", index=1) == 0
    seed, line = ((tmp_path / name / "config.yaml").read_text() for name in ("seed-3", "line-1"))
    assert "\nseed: 3\n" in seed and "name: muon" in seed
    assert "\nseed: 0\n" in line and "name: adamw" in line and "eps: 1.0e-07" in line


@pytest.mark.multi_process
def test_a_job_without_settings_does_not_train_the_default(stub, tmp_path):
    (stub.programs / "srun").write_text("#!/bin/sh\nexit 99\n")
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "STUB": str(tmp_path), "SIGNALS": "",
                 "PATH": f"{stub.programs}:{ENVIRONMENT['PATH']}"}  # fmt: skip
    result = subprocess.run(["bash", stub.script], env=ENVIRONMENT | variables, capture_output=True, text=True)
    assert result.returncode == 2 and "there are no settings" in result.stderr


@pytest.mark.multi_process
@pytest.mark.parametrize(("file", "index"), [("settings", 1), ("settings", None), ("missing", 0)])
def test_a_job_without_a_line_of_settings_trains_nothing(file, index, stub, tmp_path):
    (tmp_path / "settings").write_text("seed=9\n")
    assert stub.life(f"@{file}", f"run_dir={tmp_path / 'run'}", index=index) != 0
    assert file in (tmp_path / "log").read_text() and not (tmp_path / "run").exists()


@pytest.mark.multi_process
def test_a_cancelled_job_saves_a_checkpoint_and_is_not_requeued(stub, tmp_path):
    code = stub.life(f"run_dir={tmp_path / 'run'}", signals="0:6:SIGTERM", state="COMPLETING")
    assert code == os.EX_TEMPFAIL and not stub.is_requeued
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["status"] == "preempted" and status["step"] == last(tmp_path / "run")["global_step"] == 7
    assert "is not requeued: it is COMPLETING" in (tmp_path / "log").read_text()


@pytest.mark.multi_process
def test_a_job_whose_machine_was_lost_goes_on_elsewhere_at_once(stub, tmp_path):
    """SLURM itself starts it again, and the lock of the first life names another machine."""
    assert stub.life(f"run_dir={tmp_path / 'run'}", signals="0:6:SIGKILL") == 128 + 9
    lock = tmp_path / "run/lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"machine": "lost"}))
    assert stub.life(f"run_dir={tmp_path / 'run'}", signals="0:6:SIGKILL", restarts=1) == 0
    assert [start["step"] for start in Records(tmp_path / "run").lines("provenance.jsonl")] == [0, 4]
    run(tmp_path / "whole", *SETTINGS)
    assert_same_end(tmp_path / "run", tmp_path / "whole")
