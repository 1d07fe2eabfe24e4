"""Module paths of version 0.2.0."""

import importlib
import importlib.util
import sys

import pytest

from tabicl_train.doors.moved import MOVED


@pytest.mark.parametrize("name", [*MOVED, "tabicl_train.callbacks.callback", "tabicl_train.distributed.loopback"])
def test_an_old_path_is_the_same_module_with_a_warning(name, monkeypatch):
    for module in [module for module in sys.modules if f"{module}.".startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.warns(DeprecationWarning, match=rf"{name} is now tabicl_train\.(\S+);") as warned:
        module = importlib.import_module(name)
    assert all(warning.filename == importlib.__file__ or warning.filename == __file__ for warning in warned)
    place = module.__name__
    assert module is importlib.import_module(place)
    assert module.__spec__.name == place


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_old_path_runs_with_python_m():
    """Scripts for several machines that were copied from this repository name one."""
    spec = importlib.util.find_spec("tabicl_train.distributed.loopback")
    assert spec.loader.get_code(spec.name).co_filename.endswith("training/distributed/loopback.py")
