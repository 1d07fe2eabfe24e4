"""Write tables that a prior draws to HDF5 files, which prior=hdf5 reads: a folder of them, or one file for others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np

from priors.errors import message_line
from priors.folders import without_folders
from priors.hdf5 import (
    FIRST_TABLE,
    FORMAT,
    KINDS,
    SPLITS,
    check_dump,
    needed,
    read_contents,
    reading,
    table_checksum,
)
from priors.prior import Prior
from priors.random import STREAM_VERSION
from priors.table import PriorError, TableSpec

__all__ = ["dump_file", "dump_folder"]

Address = tuple[int, int, int]  # seed of the run, step, table of the step
Request = tuple[Address, TableSpec]
Drawn: TypeAlias = tuple[np.ndarray, np.ndarray, int, float]  # X, y, labeled rows and share of missing cells

FILE_STEPS = 100  # of a file in a folder
OF_TABLES = {
    "num_datapoints": "i4",
    "num_features": "i4",
    **dict.fromkeys(SPLITS, "i4"),
    "missing": "f4",
    "crc32": "u4",
    "specs": "u4",
}
CHUNK_BYTES = 2**18  # of a piece that is allocated, compressed and read as a whole


def dump_folder(
    prior: Prior,
    requests_of: Callable[[int], list[Request]],
    steps: range,
    first_table: int,
    folder: str | Path,
    max_classes: int,
    processes: int = 1,
    prepare: Callable[[], None] | None = None,
    facts: Mapping[str, str] | None = None,
) -> Counter[str]:
    """Write the tables of some steps of a run to files of 100 steps; count the files that are written and kept.

    A file that has its tables already is kept, and another one is there whole or not at all. Several dumps may write to
    one folder at the same time, as long as no file is written by two of them.

    Parameters
    ----------
    prior : Prior
        What draws the tables.
    requests_of : callable
        Returns the address and the spec of each table of a step, in their order.
    steps : range
        The steps.
    first_table : int
        How many tables the run has before them.
    folder : str or Path
        Where the files are written.
    max_classes : int
        Largest number of classes of a table; 0 for numeric targets.
    processes : int
        How many processes draw, a step at a time.
    prepare : callable, optional
        What each process calls before it unpickles the prior.
    facts : mapping, optional
        What else the files hold about their tables, as attributes; files that are kept must hold the same.

    Raises
    ------
    PriorError
        If a table cannot be drawn or a file cannot be written, or is there already and of another dump.
    """
    # Which files are there already.
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    missing = []  # files, with their steps and attributes
    counts: Counter[str] = Counter()
    total = 0
    for first_step in range(steps.start, steps.stop, FILE_STEPS):
        of_file = range(first_step, min(first_step + FILE_STEPS, steps.stop))
        requests = [request for step in of_file for request in requests_of(step)]
        attributes = file_attributes(prior, requests, max_classes, facts)
        path = folder / f"steps-{first_step:08d}.h5"
        if path.exists() and holds(path, attributes, first_table, requests):
            counts["kept"] += 1
        else:
            missing.append((path, of_file, attributes | {FIRST_TABLE: str(first_table)}))
            total += len(requests)
        first_table += len(requests)

    # Draw the tables of the others, a step at a time, ahead of the file that is written.
    batches = (requests_of(step) for _, of_file, _ in missing for step in of_file)
    with draw_in_processes(prior, batches, total, processes, prepare) as drawn:
        for path, of_file, attributes in missing:
            with writing(path) as unfinished, create(unfinished, attributes, max_classes) as file:
                for step, tables in zip(of_file, drawn, strict=False):
                    append(file, requests_of(step), tables)
            counts["written"] += 1
    return counts


def dump_file(
    prior: Prior,
    requests: Sequence[Request],
    path: str | Path,
    batch_size: int,
    max_classes: int,
    processes: int = 1,
    prepare: Callable[[], None] | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the requested tables to a padded file, which nanoTabPFN and TFM-Playground read.

    Their loaders take the labeled rows of the first table of a batch for all of it, and rows of padding for rows of the
    table, so that the tables of a batch must have equal rows and labeled rows.

    Parameters
    ----------
    prior : Prior
        It draws them.
    requests : sequence of (address, TableSpec)
        In their order in the file.
    path : str or Path
        The file, which is replaced, and is there whole or not at all.
    batch_size : int
        So many consecutive tables have the same rows and labeled rows.
    max_classes : int
        Largest number of classes of a table; 0 for numeric targets.
    processes, prepare, facts
        See `dump_folder`; a batch is drawn at a time.

    Raises
    ------
    PriorError
        If a table cannot be drawn, a batch has tables of different rows or labeled rows, or the file cannot be written.
    """
    batches = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
    padded = (
        max(spec.num_rows for _, spec in requests),
        # A table whose constant columns were dropped has fewer.
        max(spec.num_features for _, spec in requests),
    )
    attributes = file_attributes(prior, requests, max_classes, facts)
    with (
        draw_in_processes(prior, batches, len(requests), processes, prepare) as drawn,
        writing(Path(path)) as unfinished,
        create(unfinished, attributes, max_classes, padded) as file,
    ):
        file["original_batch_size"] = np.array([batch_size], dtype="i4")
        for batch, tables in zip(batches, drawn, strict=True):
            problem = mixed_rows([(len(y), labeled) for _, y, labeled, _ in tables], len(file["X"]))
            if problem is not None:
                raise PriorError(problem)
            if any(np.isnan(X).any() for X, _, _, _ in tables):
                raise PriorError("a table has missing values, which nanoTabPFN and TFM-Playground cannot read")
            append(file, batch, tables)


def file_attributes(
    prior: Prior, requests: Sequence[Request], max_classes: int, facts: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the attributes of a file: what its tables depend on, besides the curriculum."""
    # All requests of a dump have one seed.
    (seed, _, _), spec = requests[0]
    # Without the folders of this machine.
    options = without_folders(json.loads(json.dumps(asdict(prior))))
    return {
        "format": FORMAT,
        "stream_version": str(STREAM_VERSION),
        "seed": str(seed),
        "prior": type(prior).__module__.rpartition(".")[2],
        "options": json.dumps(options, sort_keys=True),
        "max_classes": str(max_classes),
        "keeps_missing": str(spec.keeps_missing),
        **(facts or {}),
    }


def holds(path: Path, attributes: Mapping[str, str], first_table: int, requests: Sequence[Request]) -> bool:
    """Whether a file holds the requested tables; raises PriorError if it belongs to another dump or curriculum."""
    contents = read_contents(str(path))
    check_dump(contents, attributes)
    with reading(str(path)):
        import h5py

        with h5py.File(path, "r", locking=False) as file:
            stored = needed(file, "specs", str(path))[()]
    asked = spec_checksums(requests)
    common = min(len(stored), len(asked))
    if contents.first_table != first_table or (stored[:common] != asked[:common]).any():
        raise PriorError(f"{path} belongs to another curriculum: other tables were asked for")
    return len(stored) >= len(asked)


def spec_checksums(requests: Sequence[Request]) -> np.ndarray:
    """Return the CRC-32 of each spec."""
    return np.array([zlib.crc32(json.dumps(asdict(spec)).encode()) for _, spec in requests], np.uint32)


@contextlib.contextmanager
def draw_in_processes(
    prior: Prior,
    batches: Iterable[Sequence[Request]],
    total: int,
    processes: int,
    prepare: Callable[[], None] | None,
) -> Iterator[Iterator[list[Drawn]]]:
    """Draw the tables of batches, in their order, with a bar over all of them."""
    from joblib import Parallel, delayed
    from tqdm import tqdm

    pool = Parallel(processes, return_as="generator", initializer=start_process, initargs=(prepare,))
    try:
        with tqdm(total=total, unit="table") as bar:

            def counted(drawn: Iterable[list[Drawn]]) -> Iterator[list[Drawn]]:
                for tables in drawn:
                    bar.update(len(tables))
                    yield tables

            yield counted(pool(delayed(draw_arrays)(prior, batch) for batch in batches))
    except BrokenProcessPool:
        raise PriorError(
            "a process that was drawing tables was killed, perhaps for lack of memory; whole files stay, and the same "
            "command draws the others"
        ) from None


def start_process(prepare: Callable[[], None] | None) -> None:
    """Prepare a process that draws tables."""
    # Ctrl-C reaches all processes of the group; the first one ends these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if prepare is not None:
        prepare()


def draw_arrays(prior: Prior, requests: Sequence[Request]) -> list[Drawn]:
    """Draw tables."""
    tables = [prior.sample(spec, address) for address, spec in requests]
    return [(table.X.cpu().numpy(), table.y.cpu().numpy(), table.train_size, table.missing) for table in tables]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Give the path of a new file, which replaces that of `path` at the end; raises PriorError in place of OSError."""
    try:
        with TemporaryDirectory(prefix=".unfinished-", dir=path.parent, ignore_cleanup_errors=True) as scratch:
            unfinished = Path(scratch, path.name)
            yield unfinished
            with open(unfinished, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(unfinished, path)
    except OSError as error:
        raise PriorError(f"{path} cannot be written ({message_line(error)}); whole files stay") from None


def create(path: Path, attributes: Mapping[str, str], max_classes: int, padded: tuple[int, int] | None = None) -> Any:
    """Create a file without tables, and return it open; `padded` is the most rows and features of a padded one."""
    with reading(str(path)):
        import h5py

    file = h5py.File(path, "w")
    file.attrs.update(attributes)
    if padded is None:
        cells = CHUNK_BYTES // 4
        file.create_dataset("X", (0,), "f4", chunks=(cells,), maxshape=(None,))
        file.create_dataset("y", (0,), "f4", chunks=(cells // 16,), maxshape=(None,))
    else:
        N, M = padded
        tables = max(CHUNK_BYTES // (4 * N * M), 1)
        file.create_dataset("X", (0, N, M), "f4", chunks=(tables, N, M), maxshape=(None, N, M), compression="lzf")
        file.create_dataset("y", (0, N), "f4", chunks=(tables, N), maxshape=(None, N), compression="lzf")
    for name, kind in OF_TABLES.items():
        file.create_dataset(name, (0,), kind, chunks=(1024,), maxshape=(None,))
    file["max_num_classes"] = np.array([max_classes], dtype="i4")
    file.create_dataset("problem_type", data=KINDS[0 if max_classes else 1], dtype=h5py.string_dtype())
    return file


def append(file: Any, requests: Sequence[Request], tables: Sequence[Drawn]) -> None:
    """Append the requested tables to a file, padded with zeros if it is a padded one."""
    # What the file says of each table; see the list in hdf5.py.
    labeled = [n for _, _, n, _ in tables]
    new: dict[str, Any] = {
        "num_datapoints": [len(y) for _, y, _, _ in tables],
        "num_features": [X.shape[1] for X, _, _, _ in tables],
        **{name: labeled for name in SPLITS},
        "missing": np.array([missing for _, _, _, missing in tables], np.float32),
        "specs": spec_checksums(requests),
    }
    new["crc32"] = [
        table_checksum(X, y, n, missing) for (X, y, n, _), missing in zip(tables, new["missing"], strict=True)
    ]

    # Their values, one after the other or padded.
    if file["X"].ndim == 1:
        new["X"] = np.concatenate([X.ravel() for X, _, _, _ in tables])
        new["y"] = np.concatenate([y for _, y, _, _ in tables])
    else:
        new["X"] = np.zeros((len(tables), *file["X"].shape[1:]), np.float32)
        new["y"] = np.zeros((len(tables), *file["y"].shape[1:]), np.float32)
        for place, labels, (X, y, _, _) in zip(new["X"], new["y"], tables, strict=True):
            place[: X.shape[0], : X.shape[1]] = X
            labels[: len(y)] = y

    for name, values in new.items():
        dataset = file[name]
        dataset.resize(len(dataset) + len(values), axis=0)
        dataset[-len(values) :] = values


def mixed_rows(shapes: Sequence[tuple[int, int]], first: int) -> str | None:
    """Return the problem with a batch of tables of these rows and labeled rows, if they differ."""
    others = [shape for shape in shapes if shape != shapes[0]]
    if not others:
        return None
    (N, n), (other_N, other_n) = shapes[0], others[0]
    return (
        f"tables {first}..{first + len(shapes) - 1} are one batch, for which the rows and the split of the first table "
        f"are taken ({N} rows, {n} labeled), but another one has {other_N} rows, {other_n} labeled"
    )
