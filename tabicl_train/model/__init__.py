"""The networks: TabICL, what others share with it, and predictions in bounded memory.

A network needs torch alone, and takes tables one after the other in a pack.
"""

from tabicl_train.model.config import TabICLConfig

__all__ = ["TabICL", "TabICLConfig"]


def __getattr__(name: str):
    # imported on first use: torch takes 2 s, and errors of the configuration are reported before that
    if name == "TabICL":
        from tabicl_train.model.tabicl import TabICL

        return TabICL
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
