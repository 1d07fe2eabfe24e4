"""The registry of families of networks, by the type of their settings.

Networks are imported on first use, since torch takes 2 s and settings are described without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tabicl_train.errors import ConfigError
from tabicl_train.model.config import SequenceConfig, TabICLConfig

if TYPE_CHECKING:
    from tabicl_train.model.family import Network, NetworkConfig

FAMILIES: dict[type, tuple[str, str]] = {  # settings -> module and class of the network
    TabICLConfig: ("tabicl_train.model.tabicl", "TabICL"),
    SequenceConfig: ("tabicl_train.model.sequence", "SequenceModel"),
}
FIRST = "tabicl"  # the family whose settings do not name it


def family_of(config: NetworkConfig) -> type[Network]:
    """The class of the network with these settings; `family_of(config)(config)` builds it."""
    if type(config) not in FAMILIES:
        raise ConfigError([f"{type(config).__name__} is no family of networks; there are {', '.join(names())}"])
    module, name = FAMILIES[type(config)]
    return getattr(importlib.import_module(module), name)


def family_name(settings: type) -> str:
    """The name of the family with settings of this class."""
    return getattr(settings, "family", FIRST)


def names() -> dict[str, type]:
    """The classes of settings by the names of families."""
    return {family_name(settings): settings for settings in FAMILIES}


def settings_of(values: dict[str, Any]) -> type:
    """The class of the settings with these values, as a file holds them."""
    name = values.get("family", FIRST)
    if name not in names():
        raise ConfigError([f"there is no family of networks {name!r}; there are {', '.join(names())}"])
    return names()[name]
