"""A folder with a plug-in of a user, outside.txt as mine.py, and what it registers."""

import sys
from pathlib import Path

import pytest

from priors import registry as installed
from tabicl_train import plugins, register

SOURCE = Path(__file__).with_name("outside.txt").read_text()
REGISTRIES = [value for value in vars(register).values() if isinstance(value, register.Registry)]


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A folder with the file mine.py, and a process that forgets its plug-ins at the end."""
    plugins.load_installed()  # the laboratory, which stays registered
    # As the modules with our own entries, which are imported once.
    assert "muon" in register.optimizer and "cosine" in register.schedule
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(plugins, "_named", {})
    monkeypatch.setattr(installed, "_broken", [])
    monkeypatch.setattr(installed, "_installed_loaded", False)
    folder = tmp_path / "out side"
    folder.mkdir()
    (folder / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(folder)
    yield folder
    for name in ("mine", "other"):
        sys.modules.pop(name, None)


def forget_plugins() -> None:
    """Remove the plug-ins of this process, and what modules outside this repository have registered."""
    for registry in REGISTRIES:
        for name in registry.of_plugins():
            del registry._entries[name]
    packages = {plugin.module.partition(".")[0] for plugin in plugins.named()}
    for module in list(sys.modules):
        if module.partition(".")[0] in packages and not plugins.is_ours(module):
            del sys.modules[module]
    plugins._named.clear()
