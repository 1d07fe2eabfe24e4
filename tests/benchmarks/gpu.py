"""What a GPU makes of training: everything worth measuring on the day there is one, in under eight minutes.

    python tests/benchmarks/gpu.py --csv gpu.csv
    python tests/benchmarks/gpu.py --device cpu --tiny     the same control flow on a CPU

First come fast paths beside plain ones, then the device's ceilings, the time of each part and kernel of a step of
stage 1, the released network in turns with ours on the same tables (if `tabicl` is installed), and steps of stage 1,
stage 2 and single tables of 60,000 rows with the live stream. Predictions from counted operations stand beside what
was measured. Each section has a limit, and is left out if the minutes are used up; one that fails does not keep the
others from running, but the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from on_gpu.agreement import agreement
from on_gpu.ceilings import ceilings
from on_gpu.measure import Row, Setting
from on_gpu.parts import parts
from on_gpu.released import released
from on_gpu.steps import live

import priors

Section = Callable[[Setting, float], list[Row]]
# Name, section, and the seconds after which it measures no further, of 450 in all.
SECTIONS: tuple[tuple[str, Section, float], ...] = (
    ("agreement", agreement, 60),
    ("ceilings", ceilings, 20),
    ("parts", parts, 50),
    ("released", released, 60),
    ("stage1", live("stage1"), 90),
    ("stage2", live("stage2"), 90),
    ("long", live("long"), 60),
)
GRACE = 30.0  # seconds beyond its limit after which a section is ended
CONTEXT = multiprocessing.get_context("fork")
COLUMNS = [field.name for field in dataclasses.fields(Row)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest network and tables")
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--csv", type=Path, default=Path("gpu.csv"), help="all rows; complete after each section")
    parser.add_argument("--only", nargs="+", choices=[name for name, _, _ in SECTIONS], help="sections to run")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    compiling = CONTEXT.Process(target=priors.prior_names)  # the loops of the priors, half a minute on a new machine
    compiling.start()
    setting = Setting(args.device, args.tiny)
    rows: list[Row] = []
    failures = []
    for name, section, limit in SECTIONS:
        if args.only and name not in args.only:
            continue
        left = end - time.monotonic()
        if left < limit / 3:
            print(f"{name}: left out, {max(left, 0):.0f} s remain of {args.minutes:g} minutes", flush=True)
            continue
        started = time.monotonic()
        outcome = run(section, setting, min(limit, left))
        if outcome.problem is not None:
            print(f"{name}: {outcome.problem}", flush=True)
            failures += [name] * outcome.failed
        else:
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        rows += outcome.rows
        setting.rates.update(outcome.rates)
        write(args.csv, rows)
    compiling.join()
    for row in rows:
        print(line(row))
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")


@dataclass
class Outcome:
    """problem: why there are no rows; failed: whether that is an error"""

    rows: list[Row] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    problem: str | None = None
    failed: bool = False


def run(section: Section, setting: Setting, limit: float) -> Outcome:
    """Run a section in a process of its own: a kernel that crashes or hangs leaves the device useless to its process,
    and workers that are forked after CUDA has started are slow."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=work, args=(section, setting, limit, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(limit + GRACE):
            return receiver.recv()
        return Outcome(problem=f"FAILED, no result after {limit + GRACE:.0f} s", failed=True)
    except EOFError:
        process.join()
        return Outcome(problem=f"FAILED, its process ended with {process.exitcode}", failed=True)
    finally:
        process.kill()
        process.join()


def work(section: Section, setting: Setting, limit: float, sender: Connection) -> None:
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in training
        deadline = time.monotonic() + 0.8 * limit
        outcome = Outcome(section(setting, deadline), setting.rates)
        print(describe(setting.device), flush=True)  # afterward, since workers are forked before CUDA starts
    except ImportError as error:
        outcome = Outcome(problem=f"left out, {error}")
    except Exception:
        outcome = Outcome(problem=f"FAILED\n{traceback.format_exc()}", failed=True)
    sender.send(outcome)


def describe(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def write(path: Path, rows: list[Row]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def line(row: Row) -> str:
    guess = "" if row.predicted is None else f"predicted {row.predicted:.4g}"
    return f"{row.section:10} {row.name[:60]:60} {row.value:10.4g} {row.unit:18} {guess:20} {row.note}".rstrip()


if __name__ == "__main__":
    main()
