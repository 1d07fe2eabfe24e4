"""A stand-in for tabicl-train that trains nothing: it writes the files of a run, and holds its lock.

Its loss after each of STEPS validations is known in closed form. Files in the folder of the sweep direct it:
`hold-SEED` has the runs of a seed wait at a step that it names, `crash` has those of a momentum fail.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS = 4  # validations


def loss(momentum: float, seed: int, step: int) -> float:
    return (momentum - 0.9) ** 2 + 0.001 * seed + 1 / (1 + step)


def held_at(hold: Path) -> int | None:
    """The step at which a run waits, or None; a test may remove the file at any moment."""
    try:
        return int(hold.read_text())
    except (FileNotFoundError, ValueError):  # ValueError: it is being written
        return None


def train(folder: Path, momentum: float, seed: int) -> int:
    from tabicl_train.run.status import RunLock

    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "starts", "a") as file:  # before the lock: tests kill whoever holds it
        file.write(f"{os.getpid()}\n")
    lock = RunLock(folder)
    lock.acquire()
    table = folder / "validation.csv"
    rows = table.read_text().splitlines(keepends=True) if table.exists() else []
    done = len(rows := [row for row in rows if row.endswith("\n")] or ["step,data,loss\n"]) - 1

    def write(status: str) -> None:
        (folder / "status.tmp").write_text(json.dumps({"status": status, "step": done, "saved": done}))
        (folder / "status.tmp").replace(folder / "status.json")

    try:
        write("running")
        table.write_text("".join(rows))
        if (crash := folder.parent / "crash").exists() and float(crash.read_text()) == momentum:
            print("error: it crashes", file=sys.stderr)
            write("failed")
            return 1
        while done < STEPS and not stopped:
            if held_at(folder.parent / f"hold-{seed}") == done:
                time.sleep(0.02)
                continue
            done += 1
            with open(table, "a") as file:
                file.write(f"{done},iris,{loss(momentum, seed, done)!r}\n")
        write("finished" if done == STEPS else "preempted")
        return 0 if done == STEPS else 75
    finally:
        lock.release()


def controller(*arguments: str) -> None:
    """tabicl-sweep in a process of its own, which starts this file in place of tabicl-train."""
    from tabicl_train import cli

    use()
    sys.argv = ["tabicl-sweep", *arguments]
    cli.sweep()


def use() -> None:
    from tabicl_train.sweep import jobs, run

    jobs.PROGRAM, run.POLL, run.DRAW = (__file__,), 0.02, 1e9


if __name__ == "__main__":
    settings = dict(text.split("=", 1) for text in sys.argv[1:])
    sys.exit(train(Path(settings["run_dir"]), float(settings["optimizer.momentum"]), int(settings["seed"])))
