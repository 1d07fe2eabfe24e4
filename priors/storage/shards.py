"""Tables on disk: shards of consecutive training steps, written by several processes, read by address.

A shard is one safetensors file (https://github.com/huggingface/safetensors) named after its first step. Table i of step
s is the tensors `s.i.X`, `s.i.y` and `s.i.plan` (its text, UTF-8), and the JSON record `s.i` in the file's metadata:
spec, classes, rejections and checksum. The metadata also tell the prior with its options, the seed and the versions.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from hashlib import blake2b
from importlib import metadata as packages
from itertools import groupby, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from priors.prior import Prior
from priors.random import as_seed
from priors.table import PriorError, Table, TableSpec

Address = tuple[int, int, int]  # seed of the run, step, table of the step
Request = tuple[Address, TableSpec]

FORMAT = "tabicl-train tables 1"
SUFFIX = ".safetensors"
SHARD_SIZE = 10  # steps of a shard, unless asked otherwise


class DamagedShard(PriorError):
    """A shard that cannot be read; the message names it."""


def dump(
    prior: Prior,
    requests: Iterable[Request],
    folder: str | Path,
    shard_size: int = SHARD_SIZE,
    processes: int = 1,
    total: int | None = None,
) -> Counter[str]:
    """Write the requested tables, which come in the order of their steps, to shards of `shard_size` steps in `folder`.

    What is there already stays: tables of the same dump are kept, missing ones drawn, damaged shards named and drawn
    again. A process holds a shard in memory (100 MB for ten steps of 64 tables of 1024 rows and 50 features).
    `total`: number of requests, for the progress bar.
    Returns how many shards were "written", "kept" and "damaged" (and written again).
    Raises PriorError where the folder holds tables of another prior, seed or curriculum.
    """
    if shard_size < 1 or processes < 1:
        raise PriorError(f"shard_size is {shard_size}, processes is {processes}; both must be at least 1")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = (Job(prior, shard, folder, shard_size) for shard in cut_into_shards(requests, shard_size))
    found: Counter[str] = Counter()
    with tqdm(total=total, unit="table") as bar:
        for outcome, damage in fill_here(jobs, bar) if processes == 1 else fill_in_pool(jobs, bar, processes):
            found[outcome] += 1
            if damage:
                found["damaged"] += 1
                bar.write(f"{damage}; it is written again", file=sys.stderr)
    return found


def cut_into_shards(requests: Iterable[Request], shard_size: int) -> Iterator[list[Request]]:
    last = -1
    for number, shard in groupby(requests, key=lambda request: request[0][1] // shard_size):
        if number <= last:
            raise PriorError("tables to dump must come in the order of their steps")
        last = number
        yield list(shard)


@dataclass(frozen=True)
class Job:
    """A shard that is to hold these tables."""

    prior: Prior
    requests: list[Request]
    folder: Path
    shard_size: int


Outcome = tuple[str, str | None]  # "written" or "kept", what was damaged before


def fill_here(jobs: Iterator[Job], bar: tqdm) -> Iterator[Outcome]:
    for job in jobs:
        yield fill_shard(job, bar.update)


def fill_in_pool(jobs: Iterator[Job], bar: tqdm, processes: int) -> Iterator[Outcome]:
    context = get_context("spawn")  # a fork of a process that has used torch's threads may hang
    count = context.Value("q", 0)
    with ProcessPoolExecutor(processes, context, start_worker, (count,)) as pool:
        pending = {pool.submit(fill_in_worker, job) for job in islice(jobs, 2 * processes)}
        try:
            while pending:
                done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                bar.update(count.value - bar.n)
                yield from (job.result() for job in done)
                pending |= {pool.submit(fill_in_worker, job) for job in islice(jobs, len(done))}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def start_worker(count: Any) -> None:
    """Stop signals reach the whole process group; the first process decides when its workers end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    global tables_done
    tables_done = count


def fill_in_worker(job: Job) -> Outcome:
    def advance(tables: int) -> None:
        with tables_done.get_lock():
            tables_done.value += tables

    return fill_shard(job, advance)


def fill_shard(job: Job, advance: Callable[[int], object]) -> Outcome:
    """Draw the tables that the shard does not hold yet, and write it anew if there are any.

    advance: told how many tables are done
    """
    (seed, step, _), _ = job.requests[0]
    path = shard_path(job.folder, step, job.shard_size)
    head = {
        "format": FORMAT,
        "prior": type(job.prior).__module__.rpartition(".")[2],
        "options": json.dumps(asdict(job.prior), sort_keys=True),
        "seed": str(seed),
        "shard_size": str(job.shard_size),
    }
    tables: dict[Address, tuple[TableSpec, Table]] = {}
    damage = None
    if path.exists():
        try:
            shard = Shard(path)
            for key, value in head.items():
                if shard.metadata.get(key) != value:
                    there = shard.metadata.get(key)
                    raise PriorError(f"shard {path} is of another dump: its {key} is {there}, not {value}")
            tables = {address: (shard.spec(address), shard.table(address)) for address in shard.addresses()}
        except DamagedShard as error:
            damage = str(error)
    missing = []
    for address, spec in job.requests:
        if address[0] != seed:
            raise PriorError(f"tables to dump are of several seeds: {seed} and {address[0]}")
        if address not in tables:
            missing.append((address, spec))
        else:
            check_spec(path, address, tables[address][0], spec)
    advance(len(job.requests) - len(missing))
    if not missing:
        return "kept", None
    for address, spec in missing:
        tables[address] = spec, job.prior.sample(spec, address)
        advance(1)
    write_shard(path, head, tables)
    return "written", damage


def write_shard(path: Path, head: dict[str, str], tables: dict[Address, tuple[TableSpec, Table]]) -> None:
    """Whole or not at all: a file beside it takes its place once it is on the disk."""
    versions = {name: version(name) for name in ("torch", "numpy", "tabicl-train")}
    metadata = {**head, "versions": json.dumps(versions)}
    tensors = {}
    for address, (spec, table) in sorted(tables.items()):
        X, y = table.X.cpu().numpy(), table.y.cpu().numpy().astype(np.uint8)
        plan = np.frombuffer(str(table.plan).encode(), np.uint8)
        record = {**asdict(spec), "num_classes": table.num_classes, "rejections": dict(table.rejections)}
        record["checksum"] = checksum(record, X, y, plan)
        name = table_name(address)
        metadata[name] = json.dumps(record)
        tensors |= {f"{name}.X": np.ascontiguousarray(X), f"{name}.y": y, f"{name}.plan": plan}
    beside = path.with_suffix(".tmp")
    try:
        save_file(tensors, beside, metadata)
        beside.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets none but the owner read
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def version(package: str) -> str:
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:  # this one, run from a checkout
        return "not installed"


def checksum(record: dict[str, Any], X: np.ndarray, y: np.ndarray, plan: np.ndarray) -> str:
    digest = blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=8)
    for array in (X, y, plan):
        digest.update(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def table_name(address: Address) -> str:
    return f"{address[1]}.{address[2]}"


def shard_path(folder: Path, step: int, shard_size: int) -> Path:
    return folder / f"steps-{step // shard_size * shard_size:08d}{SUFFIX}"


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"steps-*{SUFFIX}"))


class Shard:
    """A shard, open for reading. DamagedShard tells what cannot be read."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.file = safe_open(path, framework="np")
            self.metadata = self.file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise DamagedShard(f"shard {path} is damaged ({error})") from None
        if self.metadata.get("format") != FORMAT:
            raise DamagedShard(f"shard {path} is damaged (its format is {self.metadata.get('format')}, not {FORMAT})")

    def addresses(self) -> list[Address]:
        names = [name.removesuffix(".X").split(".") for name in self.file.keys() if name.endswith(".X")]  # noqa: SIM118
        return [(int(self.metadata["seed"]), int(step), int(index)) for step, index in names]

    def record(self, address: Address) -> dict[str, Any]:
        """Raises KeyError for a table that is not there."""
        text = self.metadata[table_name(address)]
        try:
            return json.loads(text)
        except ValueError as error:
            raise DamagedShard(f"shard {self.path} is damaged (record {table_name(address)}: {error})") from None

    def spec(self, address: Address) -> TableSpec:
        record = self.record(address)
        try:
            return normalise(TableSpec(**{field.name: record[field.name] for field in fields(TableSpec)}))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedShard(f"shard {self.path} is damaged (record {table_name(address)}: {error!r})") from None

    def table(self, address: Address) -> Table:
        """The table, with the text of its plan."""
        name, record = table_name(address), self.record(address)
        try:
            X, y, plan = (self.file.get_tensor(f"{name}.{part}") for part in ("X", "y", "plan"))
        except (SafetensorError, OSError) as error:
            raise DamagedShard(f"shard {self.path} is damaged ({error})") from None
        expected = record.pop("checksum", None)
        if checksum(record, X, y, plan) != expected:
            raise DamagedShard(f"shard {self.path} is damaged (table {name} does not have its checksum)")
        return Table(
            X=torch.from_numpy(X),
            y=torch.from_numpy(y.astype(np.int64)),
            train_size=record["train_size"],
            num_classes=record["num_classes"],
            plan=plan.tobytes().decode(),
            rejections=Counter(record["rejections"]),
        )


@lru_cache(maxsize=4)
def open_shard(path: Path) -> Shard:
    return Shard(path)


def read_table(folder: Path, shard_size: int, address: Address, spec: TableSpec) -> Table:
    """The table dumped at an address; PriorError tells why there is none, and names the shard."""
    seed, step, index = address
    path = shard_path(folder, step, shard_size)
    if not path.is_file():
        there = ", ".join(p.name for p in shard_paths(folder)[:: max(1, len(shard_paths(folder)) - 1)])
        raise PriorError(f"shard {path} is missing, and table {index} of step {step} with it; the folder has {there}")
    shard = open_shard(path)
    check_seed(shard, seed)
    try:
        table = shard.table(address)
    except KeyError:
        raise PriorError(f"shard {path} holds no table {index} of step {step}; it was never dumped") from None
    check_spec(path, address, shard.spec(address), spec)
    return table


def check_seed(shard: Shard, seed: int) -> None:
    there = shard.metadata.get("seed")
    if there != str(seed):
        raise PriorError(f"shard {shard.path} holds tables of seed {there}, not of seed {seed}")


def tables_of_steps(folder: Path, seed: int) -> Counter[int]:
    """How many tables of every step there are, by the heads of the shards; PriorError for one that cannot serve."""
    counts: Counter[int] = Counter()
    for path in shard_paths(folder):
        shard = Shard(path)
        check_seed(shard, seed)
        counts.update(int(name.partition(".")[0]) for name in shard.metadata if name[0].isdigit())
    return counts


def normalise(spec: TableSpec) -> TableSpec:
    """The spec with its group's address as a tuple: 7 and (7,) are the same, and JSON has lists."""
    return spec if spec.group_seed is None else replace(spec, group_seed=as_seed(spec.group_seed))


def check_spec(path: Path, address: Address, dumped: TableSpec, asked: TableSpec) -> None:
    if dumped != normalise(asked):
        raise PriorError(
            f"table {address[2]} of step {address[1]} in shard {path} is of another curriculum: it is {dumped}, "
            f"asked is {asked}"
        )
