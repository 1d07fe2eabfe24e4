"""Where configuration files lie: the folder of this package, and folders that other packages bring."""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from priors import package_of
from tabicl_train.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]

# In a wheel the folder lies inside the package, in a checkout beside it.
CONFIG_DIR = next(d for d in (PACKAGE / "configs", PACKAGE.parent / "configs") if d.is_dir())

GROUP = "tabicl_train.configs"


def installed_folders() -> dict[str, Path]:
    """Folders of configuration files that installed packages register as entry points, by `package NAME:ENTRY_POINT`.

    An entry point of the group `tabicl_train.configs` names a package whose folder has the layout of `configs/`:

        [project.entry-points."tabicl_train.configs"]
        mine = "my_package.configs"

    Raises ConfigError for an entry point that names no folder, and for a file that two folders have, since Hydra would
    silently take the first one.
    """
    folders: dict[str, Path] = {}
    owners = dict.fromkeys(file_names(CONFIG_DIR), "tabicl-train itself")
    problems = []
    for entry in entry_points(group=GROUP):
        package = package_of(entry)
        folders[f"{package}:{entry.name}"] = folder = folder_of(entry)
        for file in file_names(folder):
            if file in owners:
                problems.append(f"two configuration files are called {file}: of {package} and of {owners[file]}")
            owners.setdefault(file, package)
    if problems:
        raise ConfigError(problems)
    return folders


def file_names(folder: Path) -> list[str]:
    """The names of the configuration files in a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))


def folder_of(entry: EntryPoint) -> Path:
    try:
        spec = importlib.util.find_spec(entry.value)
        reason = "there is no such package"
    except Exception as error:  # find_spec imports the parent package, which may fail in any way
        spec, reason = None, f"{type(error).__name__}: {error}"
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError([f"{package_of(entry)}: the entry point {entry.name} = {entry.value!r} of the group "
                           f"{GROUP} names no folder of configuration files ({reason})"])  # fmt: skip
    return Path(next(iter(spec.submodule_search_locations)))
