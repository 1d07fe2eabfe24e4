"""The only module that uses private parts of Hydra 1.3. tests/config/test_hydra_internals.py fails when they change.

get_args_parser     `hydra.main` parses sys.argv by itself. All errors have to be reported together, and values quoted
                    and stages added, before it runs.
_run_hydra          What `hydra.main` calls with the arguments it has parsed; it takes ours instead.
create_config_search_path, Hydra.create_main_hydra2
                    What `hydra.main` composes with. The public `initialize_config_dir` takes one folder, so that
                    `compose` would not see the one of --config-dir.
ConfigLoaderImpl.repository
                    The public loader cannot say whether a file exists without composing it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

__all__ = ["file_exists", "get_args_parser", "hydra_main", "searching"]

VERSION_BASE = "1.3"


def hydra_main(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    task: Callable[[DictConfig], None],
    config_dir: Path,
    config_name: str,
) -> None:
    """Does what `hydra.main` does once it has parsed its arguments: runs the task, all jobs of a sweep, or prints."""
    version.setbase(VERSION_BASE)
    _run_hydra(args, parser, task, str(config_dir), config_name)


@contextlib.contextmanager
def searching(folder: Path | str, extra_folder: str | None) -> Iterator[None]:
    """Inside the context, hydra.compose reads from a folder, and from an extra one as --config-dir adds it."""
    GlobalHydra.instance().clear()
    version.setbase(VERSION_BASE)
    search_path = create_config_search_path(os.path.abspath(folder))
    if extra_folder is not None:
        url = f"file://{os.path.abspath(extra_folder)}"
        search_path.prepend("command-line", url, SearchPathQuery(provider="schema"))
    try:
        Hydra.create_main_hydra2("tabicl-train", search_path)
        yield
    finally:
        GlobalHydra.instance().clear()


def file_exists(config_name: str) -> bool:
    """Whether the folders that are searched hold a file of this name."""
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    return loader.repository.config_exists(config_name)
