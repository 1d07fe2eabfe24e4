"""Draws tables in several processes and writes them to shards."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from joblib import Parallel, delayed
from tqdm import tqdm

from priors import build_prior
from priors.prior import Prior
from priors.storage.shards import SHARD_SIZE, Address, DamagedShard, Shard, check_spec, shard_path, write_shard
from priors.table import PriorError, Table, TableSpec

Request = tuple[Address, TableSpec]


def dump(
    prior: Prior,
    requests: Iterable[Request],
    folder: str | Path,
    shard_size: int = SHARD_SIZE,
    processes: int = 1,
    total: int | None = None,
) -> Counter[str]:
    """Write the requested tables, which come in the order of their steps, to shards of `shard_size` steps in `folder`.

    Tables of the same dump that are there already are kept, and only missing ones are drawn; damaged shards are
    reported and written again. Several dumps may write to one folder at the same time, as long as no shard is written
    by two of them with different tables. Each process holds one shard in memory (100 MB for ten steps of 64 tables of
    1024 rows and 50 features).

    total: number of requests, for the progress bar
    Returns how many shards were "written" and "kept", and how many of those written were "damaged" before.
    Raises PriorError if the folder holds tables of another prior, seed or curriculum, and if a process is killed.
    """
    if shard_size < 1 or processes < 1:
        raise PriorError(f"shard_size is {shard_size}, processes is {processes}; both must be at least 1")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    # A process that is killed cannot remove its unfinished file, but this one can.
    with (
        TemporaryDirectory(prefix=".unfinished-", dir=folder, ignore_cleanup_errors=True) as scratch,
        tqdm(total=total, unit="table") as bar,
    ):
        jobs = (
            delayed(fill_shard)(Job(prior, shard, folder, Path(scratch), shard_size))
            for shard in cut_into_shards(requests, shard_size)
        )
        pool = Parallel(processes, return_as="generator_unordered", batch_size=1, initializer=end_with_parent)
        try:
            for outcome in pool(jobs):
                bar.update(outcome.tables)
                counts["written" if outcome.is_written else "kept"] += 1
                if outcome.damage:
                    counts["damaged"] += 1
                    bar.write(f"{outcome.damage}; it was written again", file=sys.stderr)
        except BrokenProcessPool:
            raise PriorError(
                f"a process that was drawing tables was killed, perhaps for lack of memory; complete shards stay in "
                f"{folder}, and the same command draws the others"
            ) from None
    return counts


def end_with_parent() -> None:
    """Make this process end when the one that started it does, and only then.

    Ctrl-C reaches the whole process group, and the first process ends the others. But if the first process is killed,
    the others would go on, and write into a folder that may be used for another dump by then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def cut_into_shards(requests: Iterable[Request], shard_size: int) -> Iterator[list[Request]]:
    """The requests of each shard; PriorError if they are not in the order of their steps."""
    last = -1
    for number, shard in groupby(requests, key=lambda request: request[0][1] // shard_size):
        if number <= last:
            raise PriorError("tables to dump must come in the order of their steps")
        last = number
        yield list(shard)


@dataclass(frozen=True)
class Job:
    """A shard that is to hold the requested tables."""

    prior: Prior
    requests: list[Request]
    folder: Path
    scratch: Path
    shard_size: int


@dataclass(frozen=True)
class Outcome:
    """A shard that holds its tables.

    tables: number of the requested tables
    is_written: or it held all of them already
    damage: why it had to be replaced
    """

    tables: int
    is_written: bool
    damage: str | None = None


def fill_shard(job: Job) -> Outcome:
    """Draw the tables that the shard lacks, and write it if there are any."""
    (seed, step, _), _ = job.requests[0]
    path = shard_path(job.folder, step, job.shard_size)
    head = {
        "prior": type(job.prior).__module__.rpartition(".")[2],
        "options": json.dumps(asdict(job.prior), sort_keys=True),
        "seed": str(seed),
        "shard_size": str(job.shard_size),
    }
    tables, damage = stored_tables(path, head)
    missing = []
    for address, spec in job.requests:
        if address[0] != seed:
            raise PriorError(f"tables to dump have several seeds: {seed} and {address[0]}")
        if address not in tables:
            missing.append((address, spec))
        else:
            check_spec(path, address, tables[address][0], spec)
    for address, spec in missing:
        tables[address] = spec, job.prior.sample(spec, address)
    if missing:
        write_shard(path, job.scratch, head, tables)
    return Outcome(len(job.requests), bool(missing), damage)


def completed(prior: str, stored: str) -> str:
    """Options in the head of a shard, with the defaults of those that the prior has got since."""
    try:
        return json.dumps(asdict(build_prior(prior, **json.loads(stored))), sort_keys=True)
    except (PriorError, TypeError, ValueError):
        return stored


def stored_tables(path: Path, head: dict[str, str]) -> tuple[dict[Address, tuple[TableSpec, Table]], str | None]:
    """The tables that the shard holds already; none if it is damaged, and then the damage.

    Raises PriorError for a shard with another head.
    """
    if not path.exists():
        return {}, None
    try:
        shard = Shard(path)
        for key, value in head.items():
            stored = shard.metadata.get(key)
            if stored != value and (key != "options" or completed(head["prior"], stored) != value):
                raise PriorError(f"shard {path} belongs to another dump: its {key} is {stored}, not {value}")
        return {address: (shard.spec(address), shard.table(address)) for address in shard.addresses()}, None
    except DamagedShard as error:
        return {}, str(error)
