"""Where configuration files lie: the own folder, the user's, and those of other packages."""

from __future__ import annotations

import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

from tabicl_train.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]

# In a wheel the folder lies inside the package, in a checkout beside it.
CONFIG_DIR = next(d for d in (PACKAGE / "configs", PACKAGE.parent / "configs") if d.is_dir())

GROUP = "tabicl_train.configs"


def search_folders(config_path: str | None, config_dir: str | None) -> list[Path]:
    """The folders that are searched, in this order, with the options --config-path and --config-dir.

    Raises ConfigError if one of them does not exist.
    """
    options = (("--config-path", config_path), ("--config-dir", config_dir))
    if wrong := [
        f"{o} is {name!r}; there is no such folder" for o, name in options if name and not Path(name).is_dir()
    ]:
        raise ConfigError(wrong)
    own = [Path(config_dir).absolute()] if config_dir else []
    return [Path(config_path or CONFIG_DIR).absolute(), *own, *installed_folders()]


def group_choices(folders: list[Path]) -> dict[str, list[str]]:
    """The groups of configuration files in some folders, and the choices of each."""
    choices: dict[str, set[str]] = {}
    for path in (path for folder in folders for path in folder.glob("*/*.yaml")):
        choices.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(choices[group]) for group in sorted(choices)}


def file_of(folders: list[Path], name: str) -> Path:
    """The file of a name, without its ending: the first one in the folders, or where it could be."""
    paths = [folder / f"{name}.yaml" for folder in folders]
    return next((path for path in paths if path.is_file()), paths[0])


def installed_folders() -> list[Path]:
    """Folders of configuration files that installed packages register as entry points.

    An entry point of the group `tabicl_train.configs` names a package whose folder has the layout of `configs/`:

        [project.entry-points."tabicl_train.configs"]
        mine = "my_package.configs"

    Raises ConfigError for an entry point that names no folder, and for a file that two folders have, since Hydra would
    silently take the first one.
    """
    folders, owners, problems = list[Path](), dict[str, str](), list[str]()
    for entry in entry_points(group=GROUP):
        package = f"package {entry.dist.name if entry.dist else entry.name}"
        try:
            spec, reason = importlib.util.find_spec(entry.value), "there is no such package"
        except Exception as error:  # find_spec imports the parent package, which may fail in any way
            spec, reason = None, f"{type(error).__name__}: {error}"
        if spec is None or not spec.submodule_search_locations:
            place = f"the entry point {entry.name} = {entry.value!r} of the group {GROUP}"
            problems.append(f"{package}: {place} names no folder of configuration files ({reason})")
            continue
        folders.append(Path(next(iter(spec.submodule_search_locations))))
        for file in file_names(folders[-1]):
            other = "tabicl-train itself" if file in file_names(CONFIG_DIR) else owners.setdefault(file, package)
            if other != package:
                problems.append(f"two configuration files are called {file}: of {package} and of {other}")
    if problems:
        raise ConfigError(problems)
    return folders


def file_names(folder: Path) -> list[str]:
    """The names of the configuration files in a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
