"""The families of networks, by the type of their settings."""

from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.family import Network, NetworkConfig
from tabicl_train.model.tabicl import TabICL

FAMILIES: dict[type, type[Network]] = {TabICLConfig: TabICL}


def family_of(config: NetworkConfig) -> type[Network]:
    """The class of the network with these settings; `family_of(config)(config)` builds it."""
    return FAMILIES[type(config)]
