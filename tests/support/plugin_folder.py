"""A folder with a plug-in of a user, outside.txt as mine.py, and what it registers."""

import sys
from pathlib import Path
from typing import Any

import pytest

import priors
from tabicl_train import plugins, register

SOURCE = Path(__file__).with_name("outside.txt").read_text()
DOORS = ("network", "scaling", "objective", "optimizer", "callback", "suite", "export_format", "experiment")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A folder with the file mine.py, and a process that forgets its plug-ins at the end."""
    plugins.load_installed()  # the laboratory, which stays registered
    # Tests of pages, in the same process, may have registered examples of their own.
    for registry in [getattr(register, door) for door in DOORS]:
        monkeypatch.setattr(registry, "_entries", without_plugins(registry._entries))
    monkeypatch.setattr(priors, "PRIORS", without_plugins(priors.PRIORS))
    for name, value in (("_named", {}), ("_broken", {}), ("_installed_loaded", False)):
        monkeypatch.setattr(plugins, name, value)
    folder = tmp_path / "out side"
    folder.mkdir()
    (folder / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(folder)
    yield folder
    for name in ("mine", "other"):
        sys.modules.pop(name, None)


def without_plugins(entries: dict[str, Any]) -> dict[str, Any]:
    """What this repository has registered."""
    ours = ("priors.", "tabicl_train.")
    return {name: entry for name, entry in entries.items() if register.place_of(entry).startswith(ours)}


def forget_plugins() -> None:
    """Forget the plug-ins of a test that uses `fresh`, as another process has none."""
    plugins._named.clear()
    for registry in [getattr(register, door) for door in DOORS]:
        for name in [name for name in registry._entries if registry.place(name).startswith("mine:")]:
            del registry._entries[name]
    for name in [name for name, prior in priors.PRIORS.items() if getattr(prior, "__module__", None) == "mine"]:
        del priors.PRIORS[name]
    sys.modules.pop("mine", None)
