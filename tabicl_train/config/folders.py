"""Where configuration files lie: the own folder, the user's, and those of other packages."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from tabicl_train.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]

# In a wheel the folder lies inside the package, in a checkout beside it.
CONFIG_DIR = next(d for d in (PACKAGE / "configs", PACKAGE.parent / "configs") if d.is_dir())


def search_folders(config_dir: str | None) -> list[Path]:
    """The folders that are searched, in this order: the own, that of --config-dir, and those of installed packages.

    Raises ConfigError if one of them does not exist.
    """
    if config_dir and not Path(config_dir).is_dir():
        raise ConfigError([f"--config-dir is {config_dir!r}; there is no such folder"])
    folders = [CONFIG_DIR, *([Path(config_dir).absolute()] if config_dir else [])]
    for entry in entry_points(group="tabicl_train.configs"):
        try:
            folders.append(Path(next(iter(entry.load().__path__))))
        except Exception as error:  # the package is imported, which may fail in any way
            reason = f"is no folder of configuration files ({type(error).__name__}: {error})"
            owner = entry.dist.name if entry.dist else entry.name
            raise ConfigError([f"package {owner}: its entry point {entry.name} = {entry.value!r} {reason}"]) from None
    return folders


def group_choices(folders: list[Path]) -> dict[str, list[str]]:
    """The groups of configuration files in some folders, and the choices of each."""
    choices: dict[str, set[str]] = {}
    for path in (path for folder in folders for path in folder.glob("*/*.yaml")):
        choices.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(choices[group]) for group in sorted(choices)}
