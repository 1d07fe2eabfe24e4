"""Tables on disk: files (shards) of consecutive training steps, which are read by address, and how they are filled.

A shard is one safetensors file (https://github.com/huggingface/safetensors) named after its first step. Table i of step
s is the tensors `s.i.X`, `s.i.y` and `s.i.plan` (the plan's text in UTF-8), and the JSON record `s.i` in the file's
metadata: spec, classes, rejections and checksum. The metadata also hold the version of the format and that of the
stream, the prior with its options, the seed, and the versions of the packages.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from functools import lru_cache
from hashlib import blake2b
from importlib import metadata as packages
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from priors.prior import Prior
from priors.random import STREAM_VERSION, as_seed
from priors.table import PriorError, Table, TableSpec

Address = tuple[int, int, int]  # seed of the run, step, table of the step
Request = tuple[Address, TableSpec]

FORMAT, FORMAT_VERSION = "tabicl-train tables", 1
SUFFIX = ".safetensors"
SHARD_SIZE = 10  # steps of a shard by default


class DamagedShard(PriorError):
    """A shard that cannot be read; the message names it."""


def write_shard(
    path: Path, scratch: Path, head: dict[str, str], tables: dict[Address, tuple[TableSpec, Table]]
) -> None:
    """Write a shard whole or not at all: a file in `scratch` takes its place once it is on the disk.

    scratch: a folder on the same file system
    head: metadata of the prior and the seed
    Raises PriorError if the disk is full or fails.
    """
    versions = {name: version(name) for name in ("torch", "numpy", "tabicl-train")}
    metadata = {
        **head,
        "format": f"{FORMAT} {FORMAT_VERSION}",
        "stream_version": str(STREAM_VERSION),
        "versions": json.dumps(versions),
    }
    tensors: dict[str, np.ndarray] = {}
    for address, (spec, table) in sorted(tables.items()):
        X, y = table.X.cpu().numpy(), table.y.cpu().numpy()
        y = y.astype(np.uint8) if table.num_classes else y
        plan = np.frombuffer(str(table.plan).encode(), np.uint8)
        record = {
            **asdict(spec),
            "num_classes": table.num_classes,
            "rejections": dict(table.rejections),
            "missing": table.missing,
        }
        record["checksum"] = checksum(record, X, y, plan)
        name = table_name(address)
        metadata[name] = json.dumps(record)
        tensors |= {f"{name}.X": np.ascontiguousarray(X), f"{name}.y": y, f"{name}.plan": plan}
    unfinished = scratch / path.name
    try:
        save_file(tensors, unfinished, metadata)
        unfinished.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (SafetensorError, OSError) as error:
        raise PriorError(f"shard {path} cannot be written ({error}); complete shards stay there") from None


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:  # tabicl-train itself, run from a checkout
        return "not installed"


def checksum(record: dict[str, Any], X: np.ndarray, y: np.ndarray, plan: np.ndarray) -> str:
    """16 hexadecimal digits."""
    digest = blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=8)
    for array in (X, y, plan):
        digest.update(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def table_name(address: Address) -> str:
    return f"{address[1]}.{address[2]}"


def shard_path(folder: Path, step: int, shard_size: int) -> Path:
    return folder / f"steps-{step // shard_size * shard_size:08d}{SUFFIX}"


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"steps-*{SUFFIX}"))


class Shard:
    """A shard, open for reading. All methods raise DamagedShard for what cannot be read."""

    def __init__(self, path: Path):
        """Raises PriorError for another version of the format or of the stream."""
        self.path = path
        try:
            self.file = safe_open(path, framework="np")
            self.metadata = self.file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise DamagedShard(f"shard {path} is damaged ({error})") from None
        name, _, format_version = self.metadata.get("format", "none").rpartition(" ")
        if name != FORMAT:
            raise DamagedShard(f"shard {path} is damaged (its format is {self.metadata.get('format')}, not {FORMAT})")
        if format_version != str(FORMAT_VERSION):
            raise PriorError(f"shard {path} has format version {format_version}; only {FORMAT_VERSION} can be read")
        stream_version = self.metadata.get("stream_version")
        if stream_version != str(STREAM_VERSION):
            raise PriorError(
                f"shard {path} holds tables of stream version {stream_version}, but the priors are at stream version "
                f"{STREAM_VERSION} and draw others: dump the tables again into another folder"
            )

    def addresses(self) -> list[Address]:
        names = [name.removesuffix(".X").split(".") for name in self.file.keys() if name.endswith(".X")]  # noqa: SIM118
        return [(int(self.metadata["seed"]), int(step), int(index)) for step, index in names]

    def record(self, address: Address) -> dict[str, Any]:
        """The JSON record of a table; KeyError if the shard does not hold the table."""
        text = self.metadata[table_name(address)]
        try:
            return json.loads(text)
        except ValueError as error:
            raise DamagedShard(f"shard {self.path} is damaged (record {table_name(address)}: {error})") from None

    def spec(self, address: Address) -> TableSpec:
        """What was asked for when the table was drawn."""
        record = self.record(address)
        try:
            return with_tuples(TableSpec(**{name: record[name] for name in TableSpec.__dataclass_fields__}))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedShard(f"shard {self.path} is damaged (record {table_name(address)}: {error!r})") from None

    def table(self, address: Address) -> Table:
        """The table, with the text of its plan as the plan."""
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
            y=torch.from_numpy(y.astype(np.int64) if record["num_classes"] else y),
            train_size=record["train_size"],
            num_classes=record["num_classes"],
            plan=plan.tobytes().decode(),
            rejections=Counter(record["rejections"]),
            missing=record["missing"],
        )


@lru_cache(maxsize=4)
def open_shard(path: Path) -> Shard:
    return Shard(path)


def read_table(folder: Path, shard_size: int, address: Address, spec: TableSpec) -> Table:
    """The table dumped at an address; PriorError names the shard and says why there is none."""
    seed, step, index = address
    path = shard_path(folder, step, shard_size)
    if not path.is_file():
        paths = shard_paths(folder)
        first_and_last = ", ".join(p.name for p in paths[:: max(1, len(paths) - 1)])
        raise PriorError(
            f"shard {path} is missing, and with it table {index} of step {step}; the folder has {first_and_last}"
        )
    shard = open_shard(path)
    check_seed(shard, seed)
    try:
        table = shard.table(address)
    except KeyError:
        raise PriorError(f"shard {path} holds no table {index} of step {step}; it was never dumped") from None
    check_spec(path, address, shard.spec(address), spec)
    return table


def check_seed(shard: Shard, seed: int) -> None:
    """Raise PriorError for a shard with tables of another seed."""
    stored = shard.metadata.get("seed")
    if stored != str(seed):
        raise PriorError(f"shard {shard.path} holds tables of seed {stored}, not of seed {seed}")


def tables_of_steps(folder: Path, seed: int) -> Counter[int]:
    """Number of tables of every step according to the shards' metadata; PriorError for a shard that cannot be used."""
    counts: Counter[int] = Counter()
    for path in shard_paths(folder):
        shard = Shard(path)
        check_seed(shard, seed)
        counts.update(int(name.partition(".")[0]) for name in shard.metadata if name[0].isdigit())
    return counts


def with_tuples(spec: TableSpec) -> TableSpec:
    """The spec with tuples, since JSON has lists; 7 and (7,) are the same address of a group."""
    group_seed = None if spec.group_seed is None else as_seed(spec.group_seed)
    return replace(spec, group_seed=group_seed, mix=tuple((name, share) for name, share in spec.mix))


def check_spec(path: Path, address: Address, stored: TableSpec, requested: TableSpec) -> None:
    """Raise PriorError for a table that is stored with another spec."""
    if stored != with_tuples(requested):
        raise PriorError(
            f"table {address[2]} of step {address[1]} in shard {path} is from another curriculum: it is stored as "
            f"{stored}, but {requested} is requested"
        )


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
    from joblib import Parallel, delayed
    from tqdm import tqdm

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
        shards = cut_into_shards(requests, shard_size)
        jobs = (delayed(fill_shard)(prior, shard, folder, Path(scratch), shard_size) for shard in shards)
        pool = Parallel(processes, return_as="generator_unordered", batch_size=1, initializer=ignore_interrupt)
        try:
            for tables, outcome, damage in pool(jobs):
                bar.update(tables)
                counts[outcome] += 1
                if damage:
                    counts["damaged"] += 1
                    bar.write(f"{damage}; it was written again", file=sys.stderr)
        except BrokenProcessPool:
            raise PriorError(
                f"a process that was drawing tables was killed, perhaps for lack of memory; complete shards stay in "
                f"{folder}, and the same command draws the others"
            ) from None
    return counts


def ignore_interrupt() -> None:
    """Ctrl-C reaches all processes of the group, and the first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def cut_into_shards(requests: Iterable[Request], shard_size: int) -> Iterator[list[Request]]:
    """The requests of each shard; PriorError if they are not in the order of their steps."""
    last = -1
    for number, shard in groupby(requests, key=lambda request: request[0][1] // shard_size):
        if number <= last:
            raise PriorError("tables to dump must come in the order of their steps")
        last = number
        yield list(shard)


def fill_shard(
    prior: Prior, requests: list[Request], folder: Path, scratch: Path, shard_size: int
) -> tuple[int, str, str | None]:
    """Draw the tables that a shard lacks, and write it if there are any.

    Returns the number of tables, "written" or "kept", and why the shard had to be replaced.
    """
    (seed, step, _), _ = requests[0]
    path = shard_path(folder, step, shard_size)
    head = {
        "prior": type(prior).__module__.rpartition(".")[2],
        "options": json.dumps(asdict(prior), sort_keys=True),
        "seed": str(seed),
        "shard_size": str(shard_size),
    }
    tables, damage = stored_tables(path, head)
    missing = []
    for address, spec in requests:
        if address[0] != seed:
            raise PriorError(f"tables to dump have several seeds: {seed} and {address[0]}")
        if address not in tables:
            missing.append((address, spec))
        else:
            check_spec(path, address, tables[address][0], spec)
    for address, spec in missing:
        tables[address] = spec, prior.sample(spec, address)
    if missing:
        write_shard(path, scratch, head, tables)
    return len(requests), "written" if missing else "kept", damage


def stored_tables(path: Path, head: dict[str, str]) -> tuple[dict[Address, tuple[TableSpec, Table]], str | None]:
    """The tables that the shard holds already; none if it is damaged, and then the damage.

    Raises PriorError for a shard with another head.
    """
    if not path.exists():
        return {}, None
    try:
        shard = Shard(path)
        for key, value in head.items():
            if (stored := shard.metadata.get(key)) != value:
                raise PriorError(f"shard {path} belongs to another dump: its {key} is {stored}, not {value}")
        return {address: (shard.spec(address), shard.table(address)) for address in shard.addresses()}, None
    except DamagedShard as error:
        return {}, str(error)
