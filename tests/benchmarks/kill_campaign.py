"""Kills runs of two ranks with SIGKILL, again and again, and compares their results with those of an undisturbed run.

    python tests/benchmarks/kill_campaign.py FOLDER [kills=100] [points=32] [seed=0]

One run is undisturbed. In others, the first rank kills itself at each of POINTS: before and after every rename, link
and removal of a file, and in the middle of a line. Further runs are killed at random moments of their whole life: all
of their processes, one of them, or the one that started the ranks. After each kill the same command continues the run.

When a run has finished, its losses, gradient norms, weights, optimizer state, averages, validation and stage files must
equal those of the undisturbed run to the bit, and its folder must hold nothing else. A process that does not end by
itself is a failure, and so is a start that is refused.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

from kills import arm  # noqa: E402, F401 - the sitecustomize of `main` calls it

TABLES = ("rows=[30,50]", "features=[2,4]", "tables=4", "group_size=2", "warmup=0")
SETTINGS = [
    "experiment=smoke", "curriculum=tabicl_v2", "prior=dummy", "trainer.devices=2", "trainer.accelerator=cpu",
    "checkpoint.every=4", "checkpoint.keep=2", "trainer.log_every=1", "averages.ema=0.9", "validation.every=6",
    "validation.best=synthetic", "validation.rows=[40]", "validation.tables=4", "validation.features=[2,4]",
    "validation.suites=[]",
]  # fmt: skip
STEPS = {"stage1": 24, "stage2": 16, "stage3": 8}
for stage, steps in STEPS.items():
    SETTINGS += [f"curriculum.stages.{stage}.{value}" for value in (f"steps={steps}", *TABLES)]

# Function of os, pattern of the file that it makes or removes, and how many calls are passed before the kill.
PLACES = [
    ("replace", "config.yaml", 0),
    ("replace", "status.json", 0),
    ("replace", "status.json", 1),
    ("replace", "step-*.ckpt", 0),
    ("replace", "step-*.ckpt", 3),
    ("replace", "stage-*.ckpt", 0),
    ("unlink", "step-*.ckpt", 0),
    ("unlink", "step-*.ckpt", 2),
    ("replace", "best.ckpt", 0),
    ("replace", "best.ckpt", 1),
]
POINTS = [f"{function},{pattern},{count},{side}" for function, pattern, count in PLACES for side in ("before", "after")]
FILES = ("metrics.csv", "scaling.csv", "validation.csv")
POINTS += [f"append,{name},{count},middle" for name in FILES for count in (0, 3)]
END = 120.0  # seconds within which all processes must end by themselves after one of them was killed


def start(folder: Path, name: str, point: str = "") -> subprocess.Popen:
    """Start the training command in a session of its own. Its ranks import folder/sitecustomize.py at their start."""
    command = [sys.executable, "-m", "tabicl_train", *SETTINGS, f"run_dir={folder / name}"]
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"KILL_AT": point, "PYTHONPATH": os.pathsep.join(paths)}
    with open(folder / f"{name}.log", "a") as log:
        log.write(f"--- start, {point or 'no point'}\n")
        log.flush()
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=env)


def members(process: subprocess.Popen) -> list[int]:
    """Return the living processes of a process with all of its descendants, whatever session they are in."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents[int(path.parent.name)] = int(fields[1])
    family = [process.pid] if process.pid in parents else []
    for pid in family:
        family += [child for child, parent in parents.items() if parent == pid]
    return family


def alive(pids: list[int]) -> list[int]:
    states = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                states.append(pid)
        except OSError:
            pass
    return states


def wait_for_end(process: subprocess.Popen, pids: list[int], what: str) -> None:
    """Wait until all processes have ended by themselves; raises AssertionError if they do not."""
    deadline = time.monotonic() + END
    while left := alive(pids):
        process.poll()
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{what}: processes {left} did not end by themselves")
        time.sleep(0.05)
    process.wait()


def finish(folder: Path, name: str, kills: int) -> None:
    """Run the same command without a kill, and compare the run with the undisturbed one."""
    process = start(folder, name)
    assert process.wait(600) == 0, f"{name}: exit code {process.returncode}, see {folder / name}.log"
    compare(folder / name, folder / "whole")
    print(f"{name}: {kills} kills, then finished; equal to the undisturbed run to the bit", flush=True)


def compare(run_dir: Path, whole: Path) -> None:
    from training_runs import assert_same_end, assert_same_state, last_checkpoint

    from tabicl_train.run.checkpoint import read_checkpoint
    from tabicl_train.run.status import read_status

    assert_same_end(run_dir, whole)
    assert_same_state(
        last_checkpoint(run_dir)["callbacks"]["Averages"], last_checkpoint(whole)["callbacks"]["Averages"]
    )
    for name in ("scaling.csv", "validation.csv"):
        assert (run_dir / name).read_bytes() == (whole / name).read_bytes(), name
    for name in ("best", *(f"stage-{stage}" for stage in STEPS)):
        one, other = (read_checkpoint(folder / f"checkpoints/{name}.ckpt") for folder in (run_dir, whole))
        assert one["global_step"] == other["global_step"], name
        assert_same_state(one["state_dict"], other["state_dict"])
    names = [sorted(f.name for f in (folder / "checkpoints").iterdir()) for folder in (run_dir, whole)]
    assert names[0] == names[1], names
    left = {f.name for f in run_dir.iterdir()} - {f.name for f in whole.iterdir()}
    assert all(fnmatch.fnmatch(name, "rank-*.log") for name in left), left
    assert read_status(run_dir)["status"] == "finished"


def random_kills(folder: Path, kills: int, life: float, rng: random.Random) -> None:
    # `since` counts the kills of the current run. A run finishes after 8 of them, or if it ended before a kill.
    run, since, kill = 0, 0, 0
    while kill < kills:
        name = f"random-{run}"
        process = start(folder, name)
        deadline = time.monotonic() + rng.uniform(0, life)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if process.poll() is not None:  # it had little left to do
            assert process.returncode == 0, f"{name}: exit code {process.returncode}, see {folder / name}.log"

        # Which processes are killed. Afterwards all of them must end.
        pids = members(process)
        victim = rng.choice(["all", "parent", "child", "any"])
        if not pids:
            victim = "none"
        elif victim == "all":
            chosen = pids
        elif victim == "parent":
            chosen = pids[:1]
        else:
            chosen = [rng.choice(pids[1:] or pids)]
        if victim != "none":
            for pid in chosen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            since, kill = since + 1, kill + 1
            wait_for_end(process, pids, f"{name}, kill {kill} ({victim})")
        process.wait()
        if victim == "none" or since == 8:
            finish(folder, name, since)
            run, since = run + 1, 0
    finish(folder, f"random-{run}", since)


def kills_at_points(folder: Path, chosen: list[str]) -> None:
    """Kill runs at points. If a run has finished before it passed a point, the point is tried on a new run."""
    run, since, missed, points = 0, 0, [], list(chosen)
    while points:
        name, point = f"points-{run}", points.pop(0)
        process = start(folder, name, point)
        pids: list[int] = []
        while process.poll() is None:
            pids = sorted({*pids, *members(process)})
            time.sleep(0.05)
        if process.returncode == 0 and since:
            points.insert(0, point)
        elif process.returncode == 0:
            missed.append(point)
        else:
            since += 1
            wait_for_end(process, pids, f"{name}, {point}")
        if process.returncode == 0 or since == 6:
            finish(folder, name, since)
            run, since = run + 1, 0
    finish(folder, f"points-{run}", since)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} points; not passed: {', '.join(missed) or 'none'}", flush=True)


def main(folder: Path, kills: int = 100, points: int = len(POINTS), seed: int = 0) -> None:
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(
        f"import os, sys\nif os.environ.get('RANK') == '0' and os.environ.get('KILL_AT'):\n"
        f"    sys.path.append({str(Path(__file__).parent)!r})\n    import kill_campaign\n"
        "    kill_campaign.arm(os.environ['KILL_AT'])\n"
    )
    started = time.monotonic()
    assert start(folder, "whole").wait(600) == 0, f"see {folder}/whole.log"
    life = time.monotonic() - started
    print(f"an undisturbed run takes {life:.1f} s", flush=True)
    kills_at_points(folder, POINTS[:points])
    random_kills(folder, kills, life, random.Random(seed))
    print(f"{kills} kills at random moments; all in {(time.monotonic() - started) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    options = dict(text.split("=") for text in sys.argv[2:])
    main(Path(sys.argv[1]).resolve(), **{key: int(value) for key, value in options.items()})
