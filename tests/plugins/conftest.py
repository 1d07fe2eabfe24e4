"""A plug-in in a folder of its own, for the tests of this folder."""

import sys
from pathlib import Path

import pytest

import priors
from tabicl_train import plugins, register

SOURCE = (Path(__file__).parents[1] / "support/outside.txt").read_text()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A folder with the file mine.py, and a process that forgets its plug-ins at the end."""
    plugins.load_installed()  # the laboratory, which stays registered
    doors = ["network", "scaling", "callback", "experiment", "optimizer", "suite", "export_format"]
    for registry in [getattr(register, door) for door in doors]:
        # Tests of pages, in the same process, may have registered examples of their own.
        ours = {name: entry for name, entry in registry._entries.items() if registry.place(name).startswith("tabicl_")}
        monkeypatch.setattr(registry, "_entries", ours)
    monkeypatch.setattr(priors, "PRIORS", dict(priors.PRIORS))
    for name, value in (("_named", {}), ("_broken", {}), ("_installed_loaded", False)):
        monkeypatch.setattr(plugins, name, value)
    folder = tmp_path / "out side"
    folder.mkdir()
    (folder / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(folder)
    yield folder
    for name in ("mine", "other"):
        sys.modules.pop(name, None)


def forget() -> None:
    """Forget the plug-ins of a test that uses `fresh`, as another process has none."""
    plugins._named.clear()
    for registry in (register.network, register.scaling, register.callback):
        for name in [name for name in registry._entries if registry.place(name).startswith("mine:")]:
            del registry._entries[name]
    for name in [name for name, prior in priors.PRIORS.items() if getattr(prior, "__module__", None) == "mine"]:
        del priors.PRIORS[name]
    sys.modules.pop("mine", None)
