"""Reads checkpoints of a run, and verifies them.

A file is a zip archive of torch.save, whose records have a CRC-32 each. It holds `state_dict`, `optimizer_states`,
`callbacks`, `global_step`, `format_version`, `config` (the whole run configuration), `largest_tables` and
`inherited_range` (for the trained range, see weights/pretrained.py), and `run` (step, stage, address of the next step's
tables, the version of the table stream, and the origin of the checkpoint).
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import re
import shlex
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tabicl_train.console import first_line, info
from tabicl_train.errors import ConfigError
from tabicl_train.outputs import locked, remove

FORMAT_VERSION = 1
"""Increased with a release that changes the content of checkpoints or its meaning."""
KINDS = {
    "callbacks": dict,
    "optimizer_states": list,
    "run": dict,
    "largest_tables": dict,
    "loss_scale": dict,
    "inherited_range": dict,
}
"""Types of records; each may be missing or None."""
DEEPEST = 100
"""The deepest level at which records may be nested."""


class DamagedCheckpoint(Exception):
    """A file that is truncated, altered, or not a checkpoint."""


def read_checkpoint(path: Path) -> dict:
    """Read a run's checkpoint or an export, with tensors on the CPU.

    Parameters
    ----------
    path : Path
        A file of torch.save.

    Returns
    -------
    dict
        Its content, see the top of this file for that of a run.

    Raises
    ------
    DamagedCheckpoint
        If the file is truncated, altered or not a checkpoint.
    ConfigError
        If it has another format version.
    OSError, MemoryError
        If it cannot be read for another reason.
    """
    verify(path)
    with checkpoint_damage(path):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if is_too_nested(content, path.stat().st_size):
        raise DamagedCheckpoint(
            f"{path} is not a checkpoint: its records contain each other, or unfold to more than the file holds"
        )
    if is_run_checkpoint(content):
        check_version(path, content, FORMAT_VERSION)
        problem = content_problem(content)
        if problem:
            raise DamagedCheckpoint(f"{path} is not a checkpoint of a run: {problem}")
    return content


def is_run_checkpoint(content: Any) -> bool:
    """Return whether a file's content is a run's, rather than an export's."""
    return isinstance(content, dict) and "global_step" in content


def is_too_nested(value: Any, size: int) -> bool:
    """Whether records contain themselves, or unfold to far more values than a file of `size` bytes can hold."""
    values = 0
    unseen = [(value, 0)]
    while unseen:
        value, depth = unseen.pop()
        values += 1
        if depth > DEEPEST or values > size + 100_000:
            return True
        if isinstance(value, dict):
            unseen += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | tuple | set):
            unseen += [(inner, depth + 1) for inner in value]
    return False


def content_problem(content: dict) -> str | None:
    """Return why the content of a file is not that of a run's checkpoint, or None."""
    if type(content["global_step"]) is not int or content["global_step"] < 0:
        return "its global_step is not a number of steps"
    if not isinstance(content.get("config"), dict):
        return "it has no config"
    for name, kind in KINDS.items():
        if not isinstance(content.get(name), kind | None):
            return f"its {name} is of type {type(content[name]).__name__}"
    if not isinstance((content.get("callbacks") or {}).get("Averages", {}), dict):
        return "the state of its callback Averages is not a dictionary"
    return state_dict_problem(content.get("state_dict")) or state_dict_problem(averaged_weights(content))


def state_dict_problem(weights: Any) -> str | None:
    """Return why a value is not a dictionary of tensors by name, or None."""
    if not isinstance(weights, dict):
        return "it has no state_dict"
    for name, tensor in weights.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            return f"{name!r} in its state_dict is not a tensor with a name"
        if not holds_its_values(tensor):
            return f"{name!r} in its state_dict is not a dense tensor with all of its values"
    return None


def holds_its_values(tensor: Tensor) -> bool:
    """Whether a tensor is dense and has memory for each of its values; a small file can describe others of any size."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def check_version(path: Path | str, content: dict, known: int) -> None:
    """Raise ConfigError for a file of another format version than `known`; files without a version pass."""
    version = content.get("format_version", known)
    if version != known:
        formats = f"its format is version {version}, and this installation reads version {known}"
        raise ConfigError([f"{path} was written by another version of tabicl-train: {formats}"])


def verify(path: Path) -> None:
    """Compare a file with its checksums, which torch.load ignores.

    Raises
    ------
    DamagedCheckpoint
        If the file is truncated, altered or not a checkpoint.
    OSError, MemoryError
        If it cannot be read for another reason.
    """
    with checkpoint_damage(path), open(path, "rb") as file:
        if file.read(2) != b"PK":  # the start of a zip archive, truncated or not
            raise DamagedCheckpoint(f"{path} is not a checkpoint")
    with checkpoint_damage(path), zipfile.ZipFile(path) as archive:
        if not any(name.endswith("/data.pkl") for name in archive.namelist()):
            raise DamagedCheckpoint(f"{path} is not a checkpoint")
        # torch.save neither compresses nor stores a record twice. Without either, reading needs no more memory than the
        # file has bytes.
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise DamagedCheckpoint(
                f"{path} is not a checkpoint: its records are compressed, and torch.save never compresses"
            )
        if sum(record.file_size for record in archive.infolist()) > path.stat().st_size:
            raise DamagedCheckpoint(f"{path} is not a checkpoint: its records are larger than the file")
        damaged_record = archive.testzip()
        if damaged_record is not None:
            raise DamagedCheckpoint(f"{path}: the checksum of {damaged_record} is wrong")


@contextlib.contextmanager
def checkpoint_damage(path: Path) -> Iterator[None]:
    """Turn the various errors that zipfile and torch raise for a damaged file into DamagedCheckpoint."""
    try:
        yield
    except (DamagedCheckpoint, MemoryError):
        raise
    except Exception as error:
        # A damaged offset gives EINVAL; torch's message about a failed allocation contains "allocate memory".
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):
            raise MemoryError(first_line(error)) from None
        if isinstance(error, pickle.UnpicklingError):  # the checksums are right, so it was written like this
            raise DamagedCheckpoint(f"{path} is not a checkpoint") from None
        why = "its end is missing" if isinstance(error, zipfile.BadZipFile) else first_line(error)
        raise DamagedCheckpoint(f"{path} is damaged: {why}") from None


def non_finite(weights: dict[str, Tensor]) -> str | None:
    """Describe the weights that are inf or nan; None if all are finite."""
    total = 0
    wrong = 0
    first = None  # the name of the first tensor with such weights
    for name, tensor in weights.items():
        count = int((~tensor.isfinite()).sum())
        total += tensor.numel()
        wrong += count
        if count > 0 and first is None:
            first = name
    if first is None:
        return None
    return f"{wrong:,} of {total:,} weights are not finite, the first in {first}"


def checksums(weights: dict[str, Tensor]) -> dict[str, int]:
    """Return a checksum of the bits of each tensor, by name; for 27 million float32 weights it takes 0.1 s."""
    sums = {}
    for name, tensor in weights.items():
        values = tensor.detach().cpu().reshape(-1).view(torch.uint8)
        sums[name] = zlib.crc32(values.numpy().data)
    return sums


def averaged_weights(content: dict) -> dict[str, Tensor]:
    """Return the average of the weights in a run's checkpoint; empty if it keeps none."""
    return (content.get("callbacks") or {}).get("Averages", {}).get("ema", {})


def saved(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first, without files of other names."""
    paths = [path for path in folder.glob("step-*.ckpt") if re.fullmatch(r"step-\d{8,}", path.stem)]
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """Return the number of steps done, from the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def newest_valid(folder: Path, until: int | None = None) -> tuple[Path, dict] | None:
    """Find the newest intact checkpoint; a warning names each damaged one.

    Parameters
    ----------
    folder : Path
        The folder of the checkpoints.
    until : int, optional
        The largest number of steps done. Default: no limit.

    Returns
    -------
    (Path, dict) or None
        The file and its content; None without checkpoints.

    Raises
    ------
    ConfigError
        If all are damaged, or if one cannot be read: an older one would repeat steps silently.
    """
    # The folder is listed again after each attempt, since a run in progress adds and removes checkpoints.
    damaged: set[Path] = set()
    gone: set[Path] = set()
    while True:
        untried = []
        for path in saved(folder):
            if (until is None or step_of(path) <= until) and path not in damaged | gone:
                untried.append(path)
        if not untried:
            break
        path = untried[-1]
        try:
            content = read_checkpoint(path)
            if not is_run_checkpoint(content):
                raise DamagedCheckpoint(f"{path} is not a checkpoint of a run")
            return path, content
        except FileNotFoundError:
            gone.add(path)
        except DamagedCheckpoint as error:
            info(f"warning   {error}; using the checkpoint before it")
            damaged.add(path)
        except (OSError, MemoryError) as error:
            raise ConfigError([f"{path} cannot be read: {first_line(error)}"]) from None
    if damaged:
        raise ConfigError([f"all checkpoints in {folder} are damaged; move the folder away to start over"])
    return None


def refuse_non_finite(path: Path, content: dict) -> None:
    """Raise ConfigError if the weights of a run's newest checkpoint are not finite, since training cannot go on."""
    problem = non_finite(content["state_dict"])
    if problem is not None:
        advice = how_to_begin_again(path.parent.parent)
        raise ConfigError([f"{path}: {problem}, so the run cannot be continued. {advice}"])


def how_to_begin_again(run_dir: Path) -> str:
    """Return advice on what to do after a run has diverged, with the weights that another run may start from."""
    start = "(run_dir=...)"
    good = newest_good(run_dir / "checkpoints")
    if good is not None:
        start = f"from {good} ({shlex.quote(f'init_weights={good}')} run_dir=...)"
    return (
        f"Lower the learning rate or use trainer.precision=fp32, and begin a new run {start}; tabicl-replay shows the "
        "tables of a step"
    )


def newest_good(folder: Path) -> Path | None:
    """Find the newest checkpoint that has finite weights and was not saved while steps were being skipped."""
    for path in reversed(saved(folder)):
        try:
            content = read_checkpoint(path)
        except (DamagedCheckpoint, ConfigError, OSError, MemoryError):
            continue
        was_skipping = content["callbacks"].get("Guard", {}).get("in_a_row", 0) > 0
        if not was_skipping and non_finite(content["state_dict"]) is None:
            return path
    return None


def remove_temporary_files(folder: Path) -> None:
    """Remove temporary files, and folders of exports, that killed processes have left."""
    for leftover in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError), locked(leftover) as is_abandoned:
            if is_abandoned:  # an export may be writing into the folder
                remove(leftover)
