"""A restart by torchrun: what ended the processes before, how long ago, and how many steps are done again."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tabicl_train.console import counted
from tabicl_train.run_dir.liveness import elastic_run
from tabicl_train.run_dir.records import Records

# Seconds. torchrun waits for an hour for a lost machine (launch/multinode.sh), and the processes take a while to start:
# what comes later is a person who gave the same command again.
LONGEST = 4000.0


@dataclass(frozen=True)
class Restart:
    """How a run of torchrun goes on after its processes have ended.

    cause: which process failed or is gone, or that the run was stopped
    since: when that was noticed, in seconds since 1970; of a killed rank 0 the last heartbeat, up to 10 s earlier
    repeated: steps that are done again
    """

    cause: str
    since: float
    repeated: int

    def facts(self, ranks: int) -> dict:
        """For provenance.jsonl, with the seconds until now."""
        seconds = round(time.time() - self.since, 1)
        return {"cause": self.cause, "seconds": seconds, "repeated": self.repeated, "ranks": ranks}

    def line(self, ranks: int) -> str:
        count, limit = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        used = f" (restart {count} of {limit})" if int(count) else ""
        return (
            f"restart   {self.cause}; {time.time() - self.since:.0f} s later the run continues on "
            f"{counted(ranks, 'rank')} and repeats {counted(self.repeated, 'step')}{used}"
        )


def find_restart(folder: Path, steps: int) -> Restart | None:
    """The restart that this start of a run is, if it is one; `steps` are done in the checkpoint that it begins from.

    To be called before the new start writes anything.
    """
    records = Records(folder)
    status = records.json("status.json") or {}
    if elastic_run() is None or status.get("elastic") != elastic_run() or status["status"] == "finished":
        return None
    since = datetime.strptime(status["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
    if time.time() - since > LONGEST:
        return None
    causes = {"running": f"rank 0 on {status['host']} is gone", "preempted": "the run was stopped"}
    rows = records.rows("metrics.csv")
    done = max(status["step"], int(rows[-1]["step"]) if rows else 0)
    return Restart(status["cause"] or causes.get(status["status"], "the run failed"), since, max(0, done - steps))
