"""The families of networks, by the type of their settings."""

from typing import Any

from tabicl_train.errors import ConfigError
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.family import Network, NetworkConfig
from tabicl_train.model.sequence import SequenceConfig, SequenceModel
from tabicl_train.model.tabicl import TabICL

FAMILIES: dict[type, type[Network]] = {TabICLConfig: TabICL, SequenceConfig: SequenceModel}
FIRST = "tabicl"  # the family whose settings do not name it


def family_of(config: NetworkConfig) -> type[Network]:
    """The class of the network with these settings; `family_of(config)(config)` builds it."""
    return FAMILIES[type(config)]


def family_name(settings: type) -> str:
    return getattr(settings, "family", FIRST)


def settings_of(values: dict[str, Any]) -> type:
    """The class of the settings with these values, which a file holds; raises ConfigError for an unknown family."""
    name = values.get("family", FIRST)
    names = {family_name(settings): settings for settings in FAMILIES}
    if name not in names:
        raise ConfigError([f"there is no family of networks {name!r}; there are {', '.join(names)}"])
    return names[name]
