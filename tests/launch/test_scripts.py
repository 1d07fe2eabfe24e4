"""The scripts that start torchrun, with a stand-in for Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from one_machine_slurm import until
from scripts import copy_scripts

pytestmark = pytest.mark.multi_process

# Prints a configuration, or stands for torchrun, which ends with an error after a signal.
PYTHON = f"""#!/usr/bin/env bash
[ "$1" != -c ] || exec "{sys.executable}" "$@"
"""
PYTHON += """
status() {  # dated later than the start, which may lie in the same tick of the clock
    echo "{\\"status\\": \\"$1\\"}" > "a run/status.json"; touch -d "1 hour" "a run/status.json"
}
echo "$*" >> calls
case "$*" in
*--cfg*) echo "seed: 0"; echo "run_dir: ${NAME:-a run}" ;;
*fail*) exit 1 ;;
*signal*)
    trap '
        case "$*" in
        *late-signal) status finished ;;
        *early-signal) ;;
        *) status preempted ;;
        esac
        exit 1' TERM
    touch ready
    while true; do sleep 0.1; done ;;
*) for last; do true; done; status "$last" ;;
esac
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    launch = copy_scripts(tmp_path)
    with open(launch / "setup.sh", "a") as file:
        file.write("PATH=$PWD:$PATH\n")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run/status.json").write_text('{"status": "preempted"}')  # of the time before
    os.utime(tmp_path / "a run/status.json", (0, 0))
    return tmp_path


SCRIPTS = {
    "local": (["local.sh", "2"], "--standalone --nproc-per-node 2"),
    "multinode": (["multinode.sh", "a:1", "1:4", "2"], "--nnodes 1:4 --nproc-per-node 2 --max-restarts 10 "
                  "--rdzv-backend c10d --rdzv-endpoint a:1 --rdzv-id tabicl-"),
    "one process": (["local.sh"], None),
}  # fmt: skip


ENDS = [("finished", 0), ("preempted", 75), ("fail", 1), ("signal", 75), ("early-signal", 75),
        ("late-signal", 0)]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "argument", "code"),
    [("one process", "finished", 0), *((script, *end) for script in ("local", "multinode") for end in ENDS)],
)
def test_a_script_ends_as_the_run_did(script, argument, code, folder):
    (name, *arguments), torchrun = SCRIPTS[script]
    with subprocess.Popen(["bash", folder / "launch" / name, *arguments, argument]) as process:
        if "signal" in argument:
            until((folder / "ready").exists, "torchrun starts")
            process.terminate()
    assert process.returncode == code
    started = (folder / "calls").read_text().splitlines()[-1]
    assert started.startswith(f"-m torch.distributed.run {torchrun}" if torchrun else "-m tabicl_train")
    assert started.endswith(f"-m tabicl_train {argument}")


@pytest.mark.parametrize("name", ["'007'", "a long\n  run", '"a #run"'])
def test_the_status_is_found_in_a_folder_whose_name_yaml_quotes_or_breaks(name, folder):
    run_dir = folder / yaml.safe_load(name)
    (folder / "a run").rename(run_dir)
    (folder / "a run").symlink_to(run_dir)
    command = ["bash", folder / "launch/local.sh", "2", "preempted"]
    assert subprocess.run(command, env=os.environ | {"NAME": name}).returncode == 75


def name_of_run(folder: Path, endpoint: str, *settings: str, machine: str = "a") -> str:
    """The name that multinode.sh gives a run, started on that machine."""
    (folder / "uname").write_text(f"#!/bin/sh\necho {machine}\n")
    (folder / "uname").chmod(0o755)
    subprocess.run(["bash", folder / "launch/multinode.sh", endpoint, "2", "2", *settings, "finished"], check=True)
    words = (folder / "calls").read_text().splitlines()[-1].split()
    return words[words.index("--rdzv-id") + 1]


def test_machines_meet_with_the_same_settings_at_the_same_place(folder):
    first = name_of_run(folder, "a:1", "seed=1")
    assert name_of_run(folder, "a:1", "seed=2") != first == name_of_run(folder, "a:1", "seed=1", machine="b")
    alone = name_of_run(folder, "localhost:1", "seed=1")
    assert name_of_run(folder, "localhost:1", "seed=1", machine="b") != alone
    assert name_of_run(folder, "localhost:1", "seed=1") == alone


@pytest.mark.parametrize("arguments", [["a:1", "2"], ["a:1", "2", "2", "trainer.nodes=2"],
    ["a:1", "2", "seed=1"], ["a:1", "seed=1", "seed=2"]])  # fmt: skip
def test_wrong_arguments_are_refused(arguments, folder):
    result = subprocess.run(["bash", folder / "launch/multinode.sh", *arguments], capture_output=True, text=True)
    assert result.returncode == 2 and ("usage: " in result.stderr or "leave out" in result.stderr)
    assert not (folder / "calls").exists()


@pytest.mark.parametrize("script", ["local", "multinode"])
def test_torchrun_is_not_started_without_settings_nor_for_a_sweep(script, folder):
    (name, *arguments), _ = SCRIPTS[script]
    command = ["bash", folder / "launch" / name, *arguments]
    sweep = subprocess.run([*command, "-m", "seed=0,1"], capture_output=True, text=True)
    assert sweep.returncode == 2 and "use tabicl-train -m" in sweep.stderr
    assert not (folder / "calls").exists()
    subprocess.run(command)
    assert (folder / "calls").read_text().splitlines() == ["-m tabicl_train"]
