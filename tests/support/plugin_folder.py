"""A plug-in in a folder of its own, for the tests of this folder."""

import sys

import pytest
from plugin_source import DOORS, SOURCE

import priors
from tabicl_train import plugins, register


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A folder with the file mine.py, and a process that forgets its plug-ins at the end."""
    plugins.load_installed()  # the laboratory, which stays registered
    for registry in [getattr(register, door) for door in DOORS]:
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
