"""What decides the scores of a command: settings, weights, data, versions of packages, and source code.

Scores are continued or used again only if all of it is the same.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from priors.real.files import TASKS
from tabicl_train import __version__
from tabicl_train.config.options import EvaluateOptions
from tabicl_train.doors import plugins
from tabicl_train.doors.register import plugins_used
from tabicl_train.evaluation.baselines import BASELINES, NUMBER_BASELINES
from tabicl_train.evaluation.suites import Source, data_version
from tabicl_train.model.config import named_parts
from tabicl_train.weights.pretrained import Pretrained

PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = ("evaluation", "model", "prediction", "weights")  # of this package: code that decides scores
PACKAGES = {"numpy": "numpy", "pandas": "pandas", "scipy": "scipy", "sklearn": "scikit-learn", "torch": "torch"}
DIGEST = "digest "  # begins values that are only compared, never shown


def identity(
    options: EvaluateOptions, pretrained: Pretrained, tasks: Sequence[Source], baselines: Collection[str] | None = None
) -> dict[str, Any]:
    """Return what decides the scores of a command.

    Parameters
    ----------
    options : EvaluateOptions
        The command. Where a file has a name, its content counts instead: checkpoint, weights and tabicl_weights.
    pretrained : Pretrained
        The weights of the checkpoint.
    tasks : sequence of Source
        The tasks of the suite.
    baselines : collection of str, optional
        Names of the baselines that are scored with it, by default all.

    Returns
    -------
    dict
        As JSON returns it: settings, digests of data and weights, packages with their versions, and code with its
        digests.
    """
    # Settings, weights and data.
    left_out = ("checkpoint", "output", "figure", "overwrite")
    settings = {name: value for name, value in vars(options).items() if name not in left_out}
    decided_by = {
        **settings,
        "weights": digest_of_weights(pretrained),
        "network": digest(json.dumps(asdict(pretrained.config), sort_keys=True, default=str).encode()),
        "trained_range": str(pretrained.trained_range),
        "data": data_digest(options, tasks),
    }
    if options.tabicl_weights is not None:
        decided_by["tabicl_weights"] = digest(Path(options.tabicl_weights).read_bytes())

    # Our code, that of plug-ins, and versions of packages.
    used = plugins_used([("suite", options.suite), *named_parts(pretrained.config)])
    used += [plugin.record() for plugin in plugins.named()]  # whatever they are for: they may change anything
    code = {record["module"]: DIGEST + record["sha256"] for record in used}
    code["tabicl-train"] = digest_of_own_code(type(pretrained.config))
    packages = {name: metadata.version(name) for name in PACKAGES.values()} | {"tabicl-train": __version__}

    # Packages and code of baselines that others have registered.
    estimators = NUMBER_BASELINES if pretrained.config.is_regression else BASELINES
    modules = {"tabicl"} if options.tabicl_weights is not None else set()
    for name, make in estimators.items():
        if baselines is None or name in baselines:
            modules |= modules_of(make)
    others = {module.partition(".")[0] for module in modules} - {*PACKAGES, *sys.stdlib_module_names}
    for module in sorted(others):
        plugin = plugins.of_module(module)
        if plugin is None:  # of this package
            continue
        if plugin.version is not None:
            packages[module] = plugin.version
        code[plugin.module] = DIGEST + plugin.sha256  # an editable installation keeps its version
    # As it is read from a file, where there are lists instead of tuples.
    return json.loads(json.dumps({**decided_by, "packages": packages, "code": code}))


def identity_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say in what two identities differ, one line for each."""
    lines = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if name == "data":
            lines.append(f"the data changed ({TASKS}, a file of a task or the package with the data)")
        elif isinstance(old, dict) or isinstance(new, dict):
            what = "{}" if name == "packages" else "the code of {}"
            lines += [f"{what.format(part)} {change}" for part, change in changed_parts(old or {}, new or {})]
        else:
            lines.append(f"{name} {change_of(old, new)}")
    return lines


def changed_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of values that differ, and how."""
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            yield name, change_of(before.get(name), now.get(name))


def change_of(old: Any, new: Any) -> str:
    """Say how a value has changed."""
    is_digest = any(isinstance(value, str) and value.startswith(DIGEST) for value in (old, new))
    if not is_digest:
        return f"was {old}, is {new}"
    if old is None:
        return "is new"
    return "is no longer used" if new is None else "changed"


def digest(content: bytes) -> str:
    return DIGEST + blake2b(content, digest_size=16).hexdigest()


def digest_of_weights(pretrained: Pretrained) -> str:
    """Return a digest of names, types, shapes and values, and of the words for them in the column `weights`."""
    total = blake2b(pretrained.name.encode(), digest_size=16)
    for name, values in sorted(pretrained.tensors.items()):
        total.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        total.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return DIGEST + total.hexdigest()


def data_digest(options: EvaluateOptions, tasks: Sequence[Source]) -> str:
    """Return a digest that changes with tasks.csv, the files of the tasks, and the package with the data of a suite."""
    known: list[Any] = [data_version(options.suite)]
    if options.folder is not None:
        table = Path(options.folder, TASKS)
        if table.is_file():  # openml has none
            known.append(table.read_bytes().hex())
    for task in tasks:
        for path in task.files:
            if path.exists():
                stat = path.stat()  # reading gigabytes would take longer than a call that has all scores already
                known.append([task.name, str(path), stat.st_size, stat.st_mtime_ns])
    return digest(json.dumps(known).encode())


def digest_of_own_code(settings: type) -> str:
    """Return a digest of the files of this package that decide scores: code, and tables of tasks and of stored scores.

    Parameters
    ----------
    settings : type
        The class of the settings of the network, which may lie outside FOLDERS.
    """
    folders = [PACKAGE / name for name in FOLDERS] + [PACKAGE.parent / "priors" / "real"]
    if plugins.is_ours(settings.__module__):
        folders.append(Path(inspect.getfile(settings)).parent)
    files = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".csv")}
    contents = [f"{os.path.relpath(path, PACKAGE)} {path.read_bytes()!r}" for path in sorted(files)]
    return digest("\n".join(contents).encode())


def modules_of(make: Callable[[], Any]) -> set[str]:
    """Return the modules from which an estimator comes: of what makes it, of its classes, and of its parameters."""
    parts = [make]
    try:
        estimator = make()
    except Exception:  # of any type; scoring reports it
        estimator = None
    parts.append(estimator)
    if hasattr(estimator, "get_params"):
        parts += estimator.get_params().values()  # also of what it holds, such as the steps of a pipeline
    modules = set()
    for part in parts:
        modules |= {getattr(part, "__module__", None), *(cls.__module__ for cls in type(part).__mro__)}
    return {module for module in modules if isinstance(module, str)}
