"""Runs of Weights and Biases: how one is started, and what its files on this machine hold."""

from __future__ import annotations

import json
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tabicl_train.console import first_line, tell

BLOCK, HEADER, WHOLE, BEGIN, END = 32768, 7, 1, 2, 4  # of LevelDB's log format: bytes, and kinds of pieces


def wandb_files(folder: Path, run_id: str) -> list[Path]:
    """The files with what a run of wandb has logged, one for each time that it was continued, oldest first."""
    files = folder.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb")  # a second start within a second ends with -1
    return sorted(files, key=lambda path: path.parent.name.partition("run-")[2])


def read_back(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of the history in a .wandb file, up to the first incomplete one.

    The file is a log of protobufs in LevelDB's format: blocks of 32 KB with pieces of crc, length, kind and content.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record = (b"" if kind in (WHOLE, BEGIN) else record) + data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if at > len(data):
            return
        if kind in (WHOLE, END):
            content = Record.FromString(record)
            if content.HasField("history"):
                items = content.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def start(config: dict[str, Any], folder: Path, state: dict, finish_timeout: float) -> Any:
    """Start or continue a run of wandb, offline where it cannot be online.

    config: the configuration of the run; one that an earlier version of the program wrote may have no group and tags
    folder: of the run
    finish_timeout: seconds that an upload may take at the end; 0 sets no limit
    """
    import wandb

    replaces, settings = state.get("replaces"), config["wandb"]
    timeout, mode = settings["timeout"], settings["mode"]
    if mode == "online" and (obstacle := why_offline(timeout)):
        tell(f"wandb     the run is logged offline: {obstacle}")
        mode = "offline"
    return wandb.init(
        project=settings["project"],
        group=settings.get("group"),
        tags=settings.get("tags") or None,
        id=state["id"],
        name=config["name"],
        notes=f"takes the place of run {replaces}" if replaces else None,
        dir=folder,
        mode=mode,
        resume="allow",
        config=config | ({"replaces": replaces} if replaces else {}),
        settings=wandb.Settings(silent=True, console="off", init_timeout=timeout, finish_timeout=finish_timeout),
    )


def why_offline(timeout: float) -> str | None:
    """Why a run cannot be logged online, if so. wandb itself would ask for an account, or try for minutes."""
    import wandb

    if not wandb.login(prompt=False, verify=False):
        return "no account is logged in (wandb login)"
    server = wandb.setup().settings.base_url
    try:
        urllib.request.urlopen(server, timeout=timeout)
    except urllib.error.HTTPError:
        return None  # it answers
    except OSError as error:
        return f"{server} cannot be reached ({first_line(error)})"
    return None
