"""The plug-in of the tests, outside.txt, and what it registers."""

import sys
from pathlib import Path

import priors
from tabicl_train import plugins, register

SOURCE = Path(__file__).with_name("outside.txt").read_text()
DOORS = ("network", "scaling", "objective", "optimizer", "callback", "suite", "export_format", "experiment")


def forget() -> None:
    """Forget the plug-ins of a test that uses `fresh`, as another process has none."""
    plugins._named.clear()
    for registry in [getattr(register, door) for door in DOORS]:
        for name in [name for name in registry._entries if registry.place(name).startswith("mine:")]:
            del registry._entries[name]
    for name in [name for name, prior in priors.PRIORS.items() if getattr(prior, "__module__", None) == "mine"]:
        del priors.PRIORS[name]
    sys.modules.pop("mine", None)
