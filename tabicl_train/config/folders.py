"""Where configuration files lie: the folder of this package, and folders that other packages bring."""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from tabicl_train.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]

# In a wheel the folder lies inside the package, in a checkout beside it.
CONFIG_DIR = next(d for d in (PACKAGE / "configs", PACKAGE.parent / "configs") if d.is_dir())

GROUP = "tabicl_train.configs"


def installed_folders() -> dict[str, Path]:
    """Folders of configuration files that installed packages register as entry points, by the entry points' names.

    An entry point of the group `tabicl_train.configs` names a package whose folder has the layout of `configs/`:

        [project.entry-points."tabicl_train.configs"]
        mine = "my_package.configs"

    Raises ConfigError for an entry point that names no folder.
    """
    return {entry.name: folder_of(entry) for entry in entry_points(group=GROUP)}


def folder_of(entry: EntryPoint) -> Path:
    try:
        spec = importlib.util.find_spec(entry.value)
        reason = "there is no such package"
    except Exception as error:  # find_spec imports the parent package, which may fail in any way
        spec, reason = None, f"{type(error).__name__}: {error}"
    if spec is None or not spec.submodule_search_locations:
        assert entry.dist is not None  # entry_points() sets it
        raise ConfigError([f"package {entry.dist.name}: the entry point {entry.name} = {entry.value!r} of the group "
                           f"{GROUP} names no folder of configuration files ({reason})"])  # fmt: skip
    return Path(next(iter(spec.submodule_search_locations)))
