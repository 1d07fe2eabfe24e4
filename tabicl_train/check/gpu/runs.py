"""Whole runs: stopped by SIGTERM and continued, with all workers, and with two ranks."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tabicl_train.check.gpu.place import CheckFailed, CheckSkipped, Place, distance, expect
from tabicl_train.check.gpu.stages import EXPERIMENT, SMALL
from tabicl_train.config.compose import compose
from tabicl_train.run.checkpoint import saved
from tabicl_train.training.distributed.processes import PREEMPTED
from tabicl_train.training.loop import train

STEPS = 12  # of a small run, which is stopped after STOPPED of them
STOPPED = 7
# Largest relative difference between losses of an undisturbed and a continued run in bf16 where bits may differ. Other
# tables or another state of the optimizer change them by more.
LOSS = 5e-3
# Columns of metrics.csv that are not timings.
EXACT = ("step", "loss", "grad_norm", "lr", "skipped")
REAL_STEPS = 30  # of the run of TabICLv2 in stage 1, half a minute on an H100


class StopSelf:
    """A callback that sends this process SIGTERM after a step."""

    def __init__(self, after: int) -> None:
        self.after = after

    def after_step(self, state: Any, item: Any) -> None:
        """Send the signal."""
        if state.step == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


def resumed_run(place: Place, settings: Sequence[str] = (), is_exact: bool = False) -> None:
    """Stop a small run by SIGTERM and continue it, and compare losses and weights with those of an undisturbed run.

    Parameters
    ----------
    place : Place
        Where the check runs.
    settings : sequence of str, optional
        Further settings of the run.
    is_exact : bool, optional
        Whether they must be equal to the bit also on a GPU. On a CPU they always must.
    """
    whole, parts = place.folder / "whole", place.folder / "parts"
    for run_dir in (whole, parts):  # an earlier check may have left them
        shutil.rmtree(run_dir, ignore_errors=True)
    run_small(place, whole, settings)
    status = run_small(place, parts, settings, (StopSelf(STOPPED),))
    expect(status == "preempted", f"after SIGTERM a run is {status}, not preempted")
    rows = metrics(parts)
    expect(int(rows[-1]["step"]) == STOPPED, f"SIGTERM after step {STOPPED} ended the run at step {rows[-1]['step']}")
    status = run_small(place, parts, settings)
    expect(status == "finished", f"the continued run is {status}, not finished")
    compare_runs(place, whole, parts, is_exact or not place.is_cuda)


def deterministic_run(place: Place) -> None:
    """Stop and continue a run with trainer.deterministic, with which a GPU repeats itself to the bit."""
    place.needs_cuda()  # a CPU does so without this setting
    resumed_run(place, ["trainer.deterministic=true"], is_exact=True)


def run_small(place: Place, run_dir: Path, more: Sequence[str], callbacks: Sequence[Any] = ()) -> str:
    """Train a small network for a few seconds in this process; returns the status of the run."""
    settings = ["experiment=smoke", "prior=dummy", "stream.num_workers=0", f"run_dir='{run_dir}'"]
    settings += [f"curriculum.stages.smoke.steps={STEPS}", "checkpoint.every=4", "trainer.log_every=1"]
    return train(compose([*settings, f"trainer.accelerator={place.device.type}", *more]), callbacks)


def compare_runs(place: Place, whole: Path, parts: Path, is_exact: bool) -> None:
    """Compare metrics and weights of an undisturbed and a continued run, to the bit or within a tolerance."""
    expected = metrics(whole)
    continued = metrics(parts)
    same_rows = exact_columns(continued) == exact_columns(expected)
    errors = []
    for row, expected_row in zip(continued, expected, strict=True):
        errors.append(abs(float(row["loss"]) / float(expected_row["loss"]) - 1))

    expected_weights = last_weights(whole)
    continued_weights = last_weights(parts)
    same_weights = all(torch.equal(expected_weights[name], continued_weights[name]) for name in expected_weights)
    error = max(distance(continued_weights[name], expected_weights[name]) for name in expected_weights)

    same = same_rows and same_weights
    loss_error = max(errors)
    place.add("figures", figure="a continued run equals an undisturbed one to the bit", value="yes" if same else "no")
    place.add("figures", figure="largest difference of its losses", value=loss_error)
    place.add("figures", figure="largest difference of its weights", value=error)
    expect(loss_error <= LOSS, f"losses of a continued run differ by {loss_error:.1e}; {LOSS:.0e} is allowed")
    expect(same or not is_exact, "a continued run must equal an undisturbed one to the bit here, and does not")


def exact_columns(rows: list[dict[str, str]]) -> list[list[str]]:
    """Return, for each row of metrics.csv, the values that a continued run repeats exactly."""
    return [[row[name] for name in EXACT] for row in rows]


def metrics(run_dir: Path) -> list[dict[str, str]]:
    """Read metrics.csv; empty if there is none yet."""
    path = run_dir / "metrics.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def last_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Read the weights of the last checkpoint."""
    return torch.load(saved(run_dir / "checkpoints")[-1], weights_only=True, map_location="cpu")["state_dict"]


def real_run(place: Place) -> None:
    """Train TabICLv2 with all workers, stop it by SIGTERM and continue it, and report its speed and data wait."""
    run_dir = place.folder / "run"
    steps = REAL_STEPS if place.is_cuda else 12
    settings = [f"experiment={EXPERIMENT}", f"run_dir='{run_dir}'", f"trainer.accelerator={place.device.type}"]
    settings += [] if place.is_cuda else [*SMALL, "stream.num_workers=1"]
    settings += [f"trainer.max_steps={steps}", "trainer.log_every=1", "validation.every=0", "checkpoint.every=1000"]
    command = [sys.executable, "-m", "tabicl_train", *settings]

    # Stop it after half of the steps, or earlier if the time is short.
    began = time.monotonic()
    with started(command) as process:
        while process.poll() is None and len(metrics(run_dir)) < steps // 2:
            if place.seconds_left() < 30 and metrics(run_dir):
                break
            if place.seconds_left() < 10:
                raise CheckSkipped(f"the run had no step after {time.monotonic() - began:.0f} s")
            time.sleep(0.2)
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=max(place.seconds_left(), 20))
    stopping = time.monotonic() - asked
    expect(code == PREEMPTED, f"after SIGTERM tabicl-train exits with {code}, not {PREEMPTED}; see log.txt")

    # Continue it by the same command, with a limit on the steps that the time allows.
    done = len(metrics(run_dir))
    more = max(done + 5, steps) if place.seconds_left() > 60 else done + 5
    command = [word if not word.startswith("trainer.max_steps") else f"trainer.max_steps={more}" for word in command]
    with started(command) as process:
        code = process.wait(timeout=max(place.seconds_left(), 20))
    expect(code == 0, f"the continued run exits with {code}; see log.txt")

    rows = metrics(run_dir)
    expect([int(row["step"]) for row in rows] == list(range(1, more + 1)), "steps are missing from metrics.csv")
    add_run(place, rows, done, stopping)


def add_run(place: Place, rows: list[dict[str, str]], done: int, stopping: float) -> None:
    """Add what the metrics of a run say.

    Parameters
    ----------
    place : Place
        Where the check runs.
    rows : list of dict
        metrics.csv.
    done : int
        Steps until the run was stopped. Five steps after each start do not count.
    stopping : float
        Seconds from SIGTERM to the end of the process.
    """
    from joblib import cpu_count

    warm = [row for number, row in enumerate(rows) if 5 <= number < done or number >= done + 5] or rows[-1:]
    tables = statistics.median(float(row["tables_per_s"]) for row in warm)
    place.add("run", figure="steps, in total and before SIGTERM", value=f"{len(rows)}, {done}")
    place.add("run", figure="workers that draw tables", value=max(1, cpu_count() - 1) if place.is_cuda else 1)
    place.add("run", figure="tables/s, median", value=tables)
    waited = statistics.mean(float(row["data_wait"]) for row in warm)
    place.add("run", figure="share of the time waiting for tables", value=waited)
    place.add("run", figure="memory, GB", value=float(rows[-1]["memory_gb"]))
    place.add("run", figure="loss of the first and the last step", value=f"{rows[0]['loss']}, {rows[-1]['loss']}")
    place.add("run", figure="seconds from SIGTERM to the end of the process", value=stopping)


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen]:
    """Start a process, and kill it at the end if it is still running."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def exchange(place: Place) -> None:
    """Exchange gradients between two ranks on one device by gloo, and on a GPU also through NCCL with a single rank."""
    run_exchange(place, 2, "gloo", "cuda:0" if place.is_cuda else "cpu")
    if place.is_cuda:
        run_exchange(place, 1, "nccl", "cuda:0")


def run_exchange(place: Place, ranks: int, backend: str, device: str) -> None:
    """Start the ranks of exchange.py; raises CheckFailed with their error."""
    launcher = ["-m", "tabicl_train.training.distributed.loopback", "--rdzv-backend", "loopback"]
    program = [f"--nproc-per-node={ranks}", "-m", "tabicl_train.check.gpu.exchange", backend, device]
    command = [sys.executable, *launcher, *program]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=max(place.seconds_left(), 10))
    except subprocess.TimeoutExpired as error:
        why = f"{ranks} ranks with {backend} did not end after {error.timeout:.0f} s"
        # On a CPU, the machine may just be slow: these ranks took 55 to 125 s on two busy cores.
        raise (CheckFailed(why) if place.is_cuda else CheckSkipped(why)) from None
    print(result.stdout + result.stderr, flush=True)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
    expect(result.returncode == 0, f"{ranks} ranks with {backend}: {(lines or ['see log.txt'])[0]}")
    place.add("figures", figure=f"exchange of {ranks} rank{'s' if ranks > 1 else ''}, {backend}, {device}", value="ok")


def two_gpus(place: Place) -> None:
    """Train on two GPUs with NCCL, and compare the losses with those of the same run on one GPU."""
    place.needs_cuda()
    if torch.cuda.device_count() < 2:
        raise CheckSkipped("needs two GPUs")

    # The exchange alone, and then whole runs in exact fp32.
    run_exchange(place, 2, "nccl", "cuda")
    losses = []
    for devices in (1, 2):
        run_dir = place.folder / f"devices{devices}"
        settings = [
            "experiment=smoke",
            f"run_dir='{run_dir}'",
            "trainer.accelerator=cuda",
            f"trainer.devices={devices}",
        ]
        settings += ["trainer.log_every=1", "trainer.precision=fp32", "trainer.tf32=false"]
        with started([sys.executable, "-m", "tabicl_train", *settings]) as process:
            code = process.wait(timeout=max(place.seconds_left(), 10))
        expect(code == 0, f"a run on {devices} GPUs exits with {code}; see log.txt")
        losses.append([float(row["loss"]) for row in metrics(run_dir)])
    error = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
    place.add("figures", figure="losses of two GPUs against one: largest difference", value=error)
    expect(error <= LOSS, f"losses of two GPUs differ from those of one by {error:.1e}; {LOSS:.0e} is allowed")
