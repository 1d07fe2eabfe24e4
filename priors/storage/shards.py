"""Files of tables: shards of consecutive training steps, which are read by address.

A shard is one safetensors file (https://github.com/huggingface/safetensors) named after its first step. Table i of step
s is the tensors `s.i.X`, `s.i.y` and `s.i.plan` (the plan's text in UTF-8), and the JSON record `s.i` in the file's
metadata: spec, classes, rejections and checksum. The metadata also hold the version of the format and that of the
stream, the prior with its options, the seed, and the versions of the packages.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, fields, replace
from functools import lru_cache
from hashlib import blake2b
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from priors.random import STREAM_VERSION, as_seed
from priors.table import PriorError, Table, TableSpec

Address = tuple[int, int, int]  # seed of the run, step, table of the step

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
    tensors = {}
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
        digest.update(np.ascontiguousarray(array))
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
        stream_version = self.metadata.get("stream_version", "1")  # the first shards did not carry it
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
            return with_group_tuple(
                TableSpec(**{field.name: record[field.name] for field in fields(TableSpec) if field.name in record})
            )
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
            missing=record.get("missing", 0.0),
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


def with_group_tuple(spec: TableSpec) -> TableSpec:
    """The spec with its group's address as a tuple, since 7 and (7,) are the same address, and JSON has lists."""
    return spec if spec.group_seed is None else replace(spec, group_seed=as_seed(spec.group_seed))


def check_spec(path: Path, address: Address, stored: TableSpec, requested: TableSpec) -> None:
    """Raise PriorError for a table that is stored with another spec."""
    if stored != with_group_tuple(requested):
        raise PriorError(
            f"table {address[2]} of step {address[1]} in shard {path} is from another curriculum: it is stored as "
            f"{stored}, but {requested} is requested"
        )
