"""Command lines that are composed, and the experiments that they can name."""

from pathlib import Path

import pytest

import tabicl_train
from tabicl_train.config.compose import CONFIG_DIR, compose
from tabicl_train.errors import ConfigError


def problems(*overrides: str) -> list[str]:
    """The problems that are reported for a command line, which must have some."""
    with pytest.raises(ConfigError) as caught:
        compose(list(overrides))
    return caught.value.problems


def list_experiments(*users: str) -> str:
    """The experiments of the repository and of a user's folder, as messages and pages list them."""
    names = list(users)
    for folder in (CONFIG_DIR, Path(tabicl_train.__file__).parent / "lab/configs"):
        names += [file.stem for file in folder.glob("experiment/*.yaml")]
    return ", ".join(sorted(names))
