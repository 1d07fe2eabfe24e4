"""A folder with a plug-in of a user, outside.txt as mine.py, and what it registers."""

import sys
from pathlib import Path

import pytest

import priors
from tabicl_train import plugins, register

SOURCE = Path(__file__).with_name("outside.txt").read_text()
DOORS = ("network", "scaling", "objective", "optimizer", "callback", "suite", "export_format", "experiment")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A folder with the file mine.py, and a process that forgets its plug-ins at the end."""
    plugins.load_installed()  # the laboratory, which stays registered
    for registry in [getattr(register, door) for door in DOORS]:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
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


def forget_plugins() -> None:
    """Forget the plug-ins that were loaded and what is registered by other packages, as another process does."""
    for registry in [getattr(register, door) for door in DOORS]:
        for name in list(registry._entries):
            if not plugins.is_ours(registry._modules[name]):
                del registry._entries[name]
    for name, prior in list(priors.PRIORS.items()):
        if not plugins.is_ours(register.place_of(prior)):
            del priors.PRIORS[name]
    for plugin in plugins.named():
        if not plugins.is_ours(plugin.module):
            sys.modules.pop(plugin.module, None)
    plugins._named.clear()
