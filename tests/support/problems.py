"""The problems that are reported for a command line."""

import pytest

from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(list(overrides))
    return caught.value.problems
