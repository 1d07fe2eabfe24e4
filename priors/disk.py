"""disk: tables that another prior drew and `tabicl-prior dump` stored, for the same curriculum and seed.

They are stored in files (shards) of consecutive training steps, and read by address. A shard is a safetensors file
(https://github.com/huggingface/safetensors) named after its first step. Table i of step s consists of the tensors
`s.i.X`, `s.i.y` and `s.i.plan` (the plan's text in UTF-8), and of the JSON record `s.i` in the file's metadata: spec,
classes and rejections. The metadata also hold the versions of format and stream, the prior with its options, the seed,
and a checksum, which is verified when a process opens the shard to read tables; older shards lack it.

With `passes` a stage may have more steps than are stored. Those without tables then use the tables that are stored
from the first step of their stage on, with other permutations of columns, rows and classes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from priors.checksum import is_damaged, with_checksum
from priors.finish import use_again
from priors.folders import without_folders
from priors.nesting import read_json
from priors.prior import Prior
from priors.random import STREAM_VERSION, Seed, as_seed, rng_at
from priors.table import Largest, PriorError, Table, TableSpec

__all__ = ["Disk"]

Address = tuple[int, int, int]  # seed of the run, step, table of the step
Request = tuple[Address, TableSpec]

FORMAT = "tabicl-train tables"
FORMAT_VERSION = 1
SUFFIX = ".safetensors"
SHARD_SIZE = 10  # steps of a shard
REAL_TABLES = "real_tables"  # metadata of tabicl-prior dump, for draws from real tables: a hash of these


@dataclass
class Disk(Prior):
    """Tables that `tabicl-prior dump` has stored."""

    numeric_targets = True  # if such tables were dumped

    folder: str = ""
    """The folder that `tabicl-prior dump output=FOLDER` wrote the tables to."""
    passes: int = 1
    """How often the stored tables of a stage may be used. With 2, a stage may have twice as many steps as are stored
    from its first one on; each pass has other permutations of columns, rows (so that other rows are labeled) and
    classes."""

    def problems(self) -> list[str]:
        """List what is wrong with the options."""
        if not self.folder:
            return ["folder is not set; it is the folder that tabicl-prior dump wrote its shards to"]
        if not Path(self.folder).is_dir():
            return [f"folder is {self.folder!r}; there is no such folder"]
        paths = shard_paths(Path(self.folder))
        if not paths:
            return [f"folder is {self.folder!r}; there are no shards in it"]
        if self.passes < 1:
            return [f"passes is {self.passes}; it must be at least 1"]
        if self.passes > 1:
            try:
                why_not = fixed_order(Shard(paths[0]).metadata)
                _ = self.ends
            except PriorError as error:
                return [f"folder is {self.folder!r}; {error}"]
            if why_not is not None:
                return [f"passes is {self.passes}; it must be 1, since {why_not}"]
        return []

    @cached_property
    def ends(self) -> dict[int, int]:
        """The end of the consecutive stored steps in which a stored step lies, by step."""
        return ends_of(stored_steps(Path(self.folder)))

    def stored_step(self, step: int, first: int) -> int:
        """Return the step whose tables a step has; see Prior.stored_step."""
        if self.passes == 1:
            return step
        return passed_step(step, first, self.ends, self.passes)

    def fingerprint(self) -> str | None:
        """Return a hash of the numbers of the stored steps, on which all passes but the first one depend."""
        if self.passes == 1:
            return None
        return hashlib.sha256(str(sorted(self.ends)).encode()).hexdigest()[:16]

    def pass_lines(self, stages: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return in which steps passes of the stored tables begin; see Prior.pass_lines."""
        if self.passes == 1:
            return []
        lines = []
        first = 0
        for name, (steps, _) in stages.items():
            length = self.ends.get(first, first) - first
            begins: list[int] = []
            if length:
                begins = [step for step in range(first + length, first + steps, length) if step not in self.ends]
            if begins:
                lines.append(f"stage {name}: the tables of {length:,} steps are stored; {passes_in_words(begins)}")
            first += steps
        return lines

    def mixed(self, mix: Mapping[str, float]) -> Disk:
        """Return the prior itself; the spec of a stored table holds its shares, which are compared."""
        return self

    def largest(self, rows: int, numeric: bool) -> Largest:
        """Return the largest sizes of the stored tables, if they are of real ones; see Prior.largest."""
        paths = shard_paths(Path(self.folder))
        if not paths or REAL_TABLES not in Shard(paths[0]).metadata:
            return Largest()  # synthetic tables are as large as the curriculum has asked for
        sizes: list[tuple[int, int, int]] = []
        for path in paths:
            sizes += Shard(path).sizes()
        if not sizes:
            return Largest()
        most_rows, most_features, most_classes = np.max(sizes, axis=0).tolist()
        return Largest(most_rows, most_features, most_classes or None)

    def missing_steps(self, seed: int, tables: Sequence[int], firsts: Sequence[int] | None = None) -> list[str]:
        """List why a run cannot get all its tables.

        Parameters
        ----------
        seed : int
            The seed of the run.
        tables : sequence of int
            The number of tables in each step of the run, from step 0 on.
        firsts : sequence of int, optional
            The first step of the stage of each step; without it, as in a mixture, tables cannot be passed again.
        """
        try:
            stored = stored_steps(Path(self.folder), seed)
        except PriorError as error:
            return [f"folder is {self.folder!r}; {error}"]
        ends = ends_of(stored)
        missing = []
        passes = []  # that would be enough for these steps; 0 if none are
        for step, count in enumerate(tables):
            first = step if firsts is None else firsts[step]
            if stored[passed_step(step, first, ends, self.passes)] < count:
                missing.append(step)
                length = ends.get(first, first) - first
                passes.append((step - first) // length + 1 if length else 0)
        if not missing:
            return []
        # dump writes whole shards.
        first = missing[0] // SHARD_SIZE * SHARD_SIZE
        steps = (missing[-1] // SHARD_SIZE + 1) * SHARD_SIZE - first
        advice = f"tabicl-prior dump first_step={first} steps={steps} writes them"
        if min(passes) > self.passes:  # otherwise stored steps have too few tables, or a stage has none
            advice += f", or prior.passes={max(passes)} uses those of each stage again"
        return [
            f"folder is {self.folder!r}; tables of {len(missing)} of the run's {len(tables)} steps are missing, in "
            f"{missing[0]}..{missing[-1]} ({advice})"
        ]

    def sample(self, spec: TableSpec, seed: Seed) -> Table:
        """Return the table that was dumped at the address (seed, step, table), with its plan as text."""
        # In all passes but the first one, the address of the group names the step whose tables are used.
        spec.check()
        address = as_seed(seed)
        if len(address) != 3:
            raise PriorError(f"the address is {address}; tables on disk have addresses (seed, step, table)")
        run_seed, step, index = address
        source = step
        if self.passes > 1 and spec.group_seed is not None:
            _, source, _ = as_seed(spec.group_seed)
        table = read_table(Path(self.folder), (run_seed, source, index), spec)
        if source == step:
            return table
        return use_again(table, rng_at(address, "pass"))


def stored_steps(folder: Path, seed: int | None = None) -> Counter[int]:
    """Count the stored tables of each step; raises PriorError for shards of another seed, if one is given."""
    stored: Counter[int] = Counter()
    for path in shard_paths(folder):
        shard = Shard(path)
        if seed is not None:
            shard.check_seed(seed)
        for name in shard.tables:
            step, _, _ = name.partition(".")
            stored[int(step)] += 1
    return stored


def ends_of(steps: Iterable[int]) -> dict[int, int]:
    """Return the end of the consecutive steps in which each of these steps lies."""
    ends: dict[int, int] = {}
    for step in sorted(steps, reverse=True):
        ends[step] = ends.get(step + 1, step + 1)
    return ends


def passed_step(step: int, first: int, ends: Mapping[int, int], passes: int) -> int:
    """Return the step whose stored tables a step of a stage has, which begins with step `first`.

    Parameters
    ----------
    step, first : int
        The step, and the first one of its stage.
    ends : mapping
        What `ends_of` returns for the stored steps.
    passes : int
        How often the stored tables of the stage may be used. A step after the last pass has its own, which are missing.
    """
    length = ends.get(first, first) - first  # steps of a pass
    if step in ends or step >= first + passes * length:
        return step
    return first + (step - first) % length


def passes_in_words(begins: Sequence[int]) -> str:
    """Say with which steps the passes after the first one begin."""
    words = [f"pass {number} begins with step {step:,}" for number, step in enumerate(begins, 2)]
    if len(words) > 3:
        words[1:-1] = ["..."]
    return ", ".join(words)


def fixed_order(metadata: Mapping[str, str]) -> str | None:
    """Return why columns and rows of stored tables must keep their order; None if they may be permuted."""
    from priors import prior_class  # not at the top: it imports this module to find the priors

    if REAL_TABLES in metadata:
        return "labeled and query rows of real tables may have to stay apart"
    for name in names_of_priors(metadata):
        try:
            if prior_class(name).raw:
                return f"columns and rows of prior {name} have an order"
        except PriorError:  # of a plug-in that was not named
            return f"it is not known whether columns and rows of prior {name} have an order; name its plug-in"
    return None


def is_raw(metadata: Mapping[str, str]) -> bool:
    """Whether the prior that drew stored tables, or a component of it, leaves them as they are computed."""
    from priors import prior_class

    for name in names_of_priors(metadata):
        with contextlib.suppress(PriorError):  # of a plug-in that was not named
            if prior_class(name).raw:
                return True
    return False


def names_of_priors(metadata: Mapping[str, str]) -> list[str]:
    """Return the names of the prior that drew stored tables, and of its components."""
    return [metadata.get("name", metadata["prior"]), *json.loads(metadata["options"]).get("components", ())]


def write_shard(
    path: Path, scratch: Path, head: dict[str, str], tables: dict[Address, tuple[TableSpec, Table]]
) -> None:
    """Write a shard whole or not at all: a file in `scratch`, on the same file system, is renamed at the end."""
    # head: metadata of the prior and the seed
    metadata = {**head, "format": f"{FORMAT} {FORMAT_VERSION}", "stream_version": str(STREAM_VERSION)}
    tensors: dict[str, np.ndarray] = {}
    for address, (spec, table) in sorted(tables.items()):
        name = table_name(address)
        record = {
            "spec": asdict(spec),
            "num_classes": table.num_classes,
            "rejections": dict(table.rejections),
            "missing": table.missing,
        }
        metadata[name] = json.dumps(record)
        y = table.y.cpu().numpy()
        if table.num_classes:
            y = y.astype(np.uint8)
        tensors[f"{name}.X"] = np.ascontiguousarray(table.X.cpu().numpy())
        tensors[f"{name}.y"] = y
        tensors[f"{name}.plan"] = np.frombuffer(str(table.plan).encode(), np.uint8)
    unfinished = scratch / path.name
    try:
        save_file(tensors, unfinished, with_checksum(metadata, tensors))
        unfinished.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (SafetensorError, OSError) as error:
        raise PriorError(f"shard {path} cannot be written ({error}); complete shards stay there") from None


def table_name(address: Address) -> str:
    return f"{address[1]}.{address[2]}"


def shard_path(folder: Path, step: int) -> Path:
    return folder / f"steps-{step // SHARD_SIZE * SHARD_SIZE:08d}{SUFFIX}"


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"steps-*{SUFFIX}"))


class Shard:
    """A shard, open for reading; all methods raise PriorError if it cannot be read."""

    def __init__(self, path: Path):
        self.path = path
        with self.reading():
            self.file = safe_open(path, framework="np")
            self.metadata = self.file.metadata() or {}
        name, _, format_version = self.metadata.get("format", "none").rpartition(" ")
        if (name, format_version) != (FORMAT, str(FORMAT_VERSION)):
            raise PriorError(f"shard {path} has the format {name} {format_version}, not {FORMAT} {FORMAT_VERSION}")
        stream_version = self.metadata.get("stream_version")
        if stream_version != str(STREAM_VERSION):
            raise PriorError(
                f"shard {path} holds tables of stream version {stream_version}, but the priors are at stream version "
                f"{STREAM_VERSION} and draw others: dump the tables again into another folder"
            )
        self.parsed(self.metadata.get("options", "{}"))

    def parsed(self, text: str) -> dict[str, Any]:
        """Return the JSON object in a text of the metadata."""
        try:
            values = read_json(text)
        except ValueError as error:
            raise self.damaged(f"its metadata are not JSON: {error}") from None
        if not isinstance(values, dict):
            raise self.damaged("its metadata are those of another program")
        return values

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise self.damaged(str(error)) from None

    def damaged(self, reason: str) -> PriorError:
        return PriorError(f"shard {self.path} is damaged ({reason}): delete it, and dump into its folder again")

    def verify(self) -> None:
        """Raise PriorError if the tables are not those that were written; a shard without a checksum passes."""
        with self.reading():
            changed = is_damaged(self.metadata, self.file.keys(), self.file.get_tensor)
        if changed:
            raise self.damaged("its tables do not match its checksum")

    def check_seed(self, seed: int) -> None:
        """Raise PriorError for a shard with tables of another seed."""
        stored = self.metadata.get("seed")
        if stored != str(seed):
            raise PriorError(f"shard {self.path} holds tables of seed {stored}, not of seed {seed}")

    @property
    def tables(self) -> dict[str, str]:
        """The records of its tables by name, "step.number"."""
        return {name: text for name, text in self.metadata.items() if name[0].isdigit()}

    def sizes(self) -> list[tuple[int, int, int]]:
        """Return the rows, features and classes of its tables; reads no values."""
        sizes = []
        for name, text in self.tables.items():
            with self.reading():
                rows, features = self.file.get_slice(f"{name}.X").get_shape()
            sizes.append((rows, features, self.parsed(text)["num_classes"]))
        return sizes

    def record(self, address: Address, spec: TableSpec) -> dict[str, Any] | None:
        """Return the record of a table, None if it is not stored; raises PriorError for one that has another spec."""
        text = self.metadata.get(table_name(address))
        if text is None:
            return None
        record = self.parsed(text)
        requested = json.loads(json.dumps(asdict(spec)))  # with lists instead of tuples
        if record.get("spec") != requested:
            raise PriorError(
                f"table {address[2]} of step {address[1]} in shard {self.path} is from another curriculum: it is "
                f"stored as {record.get('spec')}, but {requested} is requested"
            )
        return record


@lru_cache(maxsize=4)
def open_shard(path: Path) -> Shard:
    """Open a shard and verify its checksum, which takes about as long as reading all of its tables."""
    shard = Shard(path)
    shard.verify()
    return shard


def read_table(folder: Path, address: Address, spec: TableSpec) -> Table:
    """Return the table dumped at an address; raises PriorError, with the shard and the reason, if there is none."""
    seed, step, index = address
    path = shard_path(folder, step)
    if not path.is_file():
        paths = shard_paths(folder)
        first_and_last = ", ".join(p.name for p in paths[:: max(1, len(paths) - 1)])
        raise PriorError(
            f"shard {path} is missing, and with it table {index} of step {step}; the folder has {first_and_last}"
        )
    shard = open_shard(path)
    shard.check_seed(seed)
    record = shard.record(address, spec)
    if record is None:
        raise PriorError(f"shard {path} holds no table {index} of step {step}; it was never dumped")
    name = table_name(address)
    with shard.reading():
        X = shard.file.get_tensor(f"{name}.X")
        y = shard.file.get_tensor(f"{name}.y")
        plan = shard.file.get_tensor(f"{name}.plan")
    if record["num_classes"]:
        y = y.astype(np.int64)
    return Table(
        X=torch.from_numpy(X),
        y=torch.from_numpy(y),
        train_size=spec.train_size,
        num_classes=record["num_classes"],
        plan=plan.tobytes().decode(),
        rejections=Counter(record["rejections"]),
        missing=record["missing"],
    )


def dump(
    prior: Prior,
    requests: Iterable[Request],
    folder: str | Path,
    processes: int = 1,
    total: int | None = None,
    prepare: Callable[[], None] | None = None,
    facts: Mapping[str, str] | None = None,
) -> Counter[str]:
    """Write the requested tables, in the order of their steps, to shards of ten steps; count those written and kept.

    A shard that has its tables already is kept. Several dumps may write to one folder at the same time, as long as no
    shard is written by two of them. Each process holds one shard in memory: 100 MB for ten steps of 64 tables of 1024
    rows and 50 features.

    Parameters
    ----------
    prior : Prior
        What draws the tables.
    requests : iterable
        The address and the spec of each table.
    folder : str or Path
        Where the shards are written.
    processes : int
        How many processes draw.
    total : int, optional
        Number of requests, for the progress bar.
    prepare : callable, optional
        What each process calls before it unpickles the prior.
    facts : mapping, optional
        What else shards tell about the tables; shards that are kept must tell the same.
    """
    from joblib import Parallel, delayed
    from tqdm import tqdm

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    head = {
        "prior": type(prior).__module__.rpartition(".")[2],
        "options": portable(json.dumps(asdict(prior))),
        **(facts or {}),
    }
    # This process removes the unfinished files of processes that are killed.
    with (
        TemporaryDirectory(prefix=".unfinished-", dir=folder, ignore_cleanup_errors=True) as scratch,
        tqdm(total=total, unit="table") as bar,
    ):
        shards = groupby(requests, key=lambda request: shard_path(folder, request[0][1]))
        jobs = (delayed(fill_shard)(prior, head, list(shard), path, Path(scratch)) for path, shard in shards)
        pool = Parallel(
            processes,
            return_as="generator_unordered",
            batch_size=1,
            initializer=start_process,
            initargs=(prepare,),
        )
        try:
            for tables, outcome in pool(jobs):
                bar.update(tables)
                counts[outcome] += 1
        except BrokenProcessPool:
            raise PriorError(
                f"a process that was drawing tables was killed, perhaps for lack of memory; complete shards stay in "
                f"{folder}, and the same command draws the others"
            ) from None
    return counts


def portable(options: str) -> str:
    """Return the options of a prior, in JSON, without the folders of this machine."""
    return json.dumps(without_folders(json.loads(options)), sort_keys=True)


def start_process(prepare: Callable[[], None] | None) -> None:
    """Prepare a process that draws tables."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches all processes of the group; the first one ends these
    if prepare is not None:
        prepare()


def fill_shard(
    prior: Prior, head: dict[str, str], requests: list[Request], path: Path, scratch: Path
) -> tuple[int, str]:
    """Write the shard of these tables unless it holds them; returns their number, and "written" or "kept"."""
    # Raises PriorError for a shard of another prior, seed or curriculum.
    seed, _, _ = requests[0][0]  # all requests of a dump have one seed
    head = head | {"seed": str(seed)}
    if path.exists():
        shard = Shard(path)
        for key, value in head.items():
            stored = shard.metadata.get(key)
            if stored != value:
                raise PriorError(f"shard {path} belongs to another dump: its {key} is {stored}, not {value}")
        records = [shard.record(address, spec) for address, spec in requests]  # each raises for another curriculum
        if all(records):
            return len(requests), "kept"
    tables = {}
    for address, spec in requests:
        tables[address] = spec, prior.sample(spec, address)
    write_shard(path, scratch, head, tables)
    return len(requests), "written"
