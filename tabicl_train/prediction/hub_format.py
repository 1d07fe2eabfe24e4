"""The hub format: a folder that `hf upload` publishes on the Hugging Face Hub, and that loads here.

model.safetensors  the weights
config.json        the settings of the network, the origin of the weights, and the checksums of the other files
README.md          the model card

A folder is written beside its place and put there in one step, so that it is never incomplete.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from tabicl_train.console import first_line
from tabicl_train.errors import ConfigError
from tabicl_train.model.families import family_name
from tabicl_train.prediction.model_card import LIBRARY, model_card
from tabicl_train.prediction.origin import Pretrained, network_config
from tabicl_train.prediction.public_format import mismatches
from tabicl_train.run_dir.atomic import sync_folder, write_atomically
from tabicl_train.run_dir.checkpoint import check_version
from tabicl_train.run_dir.outputs import folder_problem
from tabicl_train.run_dir.records import open_or_empty, parsed

FORMAT_VERSION = 1
"""Raised when folders are written that the last release could not read."""
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


def is_hub_folder(path: Path) -> bool:
    """Whether a path is a folder with one of the two files that loading needs."""
    return (path / WEIGHTS).is_file() or (path / CONFIG).is_file()


def load_hub(folder: Path) -> Pretrained:
    """Read a folder; raises ConfigError that names it if it is incomplete, damaged or of another program."""
    if missing := [name for name in (WEIGHTS, CONFIG) if not (folder / name).is_file()]:
        raise ConfigError([f"{folder} has no {missing[0]}; it is incomplete or not a folder of tabicl-export"])
    description = read_description(folder)
    if description is None or not isinstance(description.get("model"), dict):
        raise ConfigError([f"{folder / CONFIG} was not written by tabicl-export"])
    check_version(folder, description, FORMAT_VERSION)
    try:
        content = (folder / WEIGHTS).read_bytes()
        tensors = safetensors.torch.load(content)
    except (OSError, SafetensorError) as error:
        raise ConfigError([f"{folder / WEIGHTS} cannot be read: {first_line(error)}"]) from None
    if description.get("sha256", {}).get(WEIGHTS) != checksum(content):
        raise ConfigError([f"{folder / WEIGHTS} is damaged, or does not belong to the {CONFIG} beside it"])
    config = network_config(folder / CONFIG, description["model"])
    if problems := config.problems() or mismatches(config, tensors):
        raise ConfigError([f"{folder}: {problem}" for problem in problems])
    return Pretrained(config, tensors, description.get("origin", {}))


def save_hub(pretrained: Pretrained, folder: Path, check: Callable[[Path], None]) -> None:
    """Write a folder, or put it in the place of one that was written before.

    check: called with the complete folder before it takes its place; what it raises leaves everything as it was
    Raises OSError, and ConfigError if the file system cannot exchange folders.
    """
    folder = Path(os.path.realpath(folder))
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process with the same number
    try:
        temporary.mkdir()
        for name, content in hub_files(pretrained, folder.name).items():
            write_atomically(temporary / name, lambda file, content=content: file.write(content))  # type: ignore[misc]
        check(temporary)
        if folder.exists():
            exchange(temporary, folder)
        else:
            temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after an exchange it is the old folder


def hub_files(pretrained: Pretrained, name: str) -> dict[str, bytes]:
    """The content of the files of a folder.

    name: of the model, the title of its card
    """
    tensors = {key: tensor.to(torch.float32, copy=True).contiguous() for key, tensor in pretrained.tensors.items()}
    weights = safetensors.torch.save(tensors, {"format": "pt", **pretrained.summary})
    card = model_card(name, pretrained).encode()
    description = {
        "library_name": LIBRARY,
        "model_type": family_name(type(pretrained.config)),
        "format_version": FORMAT_VERSION,
        "model": dataclasses.asdict(pretrained.config),
        "sha256": {WEIGHTS: checksum(weights), CARD: checksum(card)},
        "origin": pretrained.origin,
    }
    return {WEIGHTS: weights, CARD: card, CONFIG: json.dumps(description, indent=2, allow_nan=False).encode()}


def hub_problem(folder: Path) -> str | None:
    """What prevents a folder from being written, or from being replaced without losing anything; None if nothing."""
    if not folder.is_dir():
        return "it is a file, not a folder" if folder.exists() else folder_problem(folder.parent)
    names = {path.name for path in folder.iterdir()}
    if others := sorted(names - {WEIGHTS, CONFIG, CARD}):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return f"the folder also holds {others[0]}{more}, which would be lost; choose another name"
    description = read_description(folder) if names else {}
    if description is None:
        return "tabicl-export did not write this folder; choose another name"
    if CARD in names and checksum((folder / CARD).read_bytes()) != description.get("sha256", {}).get(CARD):
        return f"its {CARD} was edited and would be lost; choose another name"
    return folder_problem(folder.parent)


def read_description(folder: Path) -> dict | None:
    """The content of config.json; None if it is missing, damaged, or of another program."""
    with open_or_empty(folder / CONFIG) as file:
        description = parsed(file.read())
    return description if description and description.get("library_name") == LIBRARY else None


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def exchange(a: Path, b: Path) -> None:
    """Exchange two folders in one step; raises ConfigError where the file system cannot, and OSError."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux has it
    if renameat2 and renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno() if renameat2 else errno.ENOSYS
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # NFS, for example
        raise ConfigError(
            [f"output is {str(b)!r}; this file system cannot replace a folder in one step: remove it first"]
        )
    raise OSError(code, os.strerror(code))
