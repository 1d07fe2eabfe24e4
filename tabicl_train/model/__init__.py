"""The TabICL network."""

from tabicl_train.model.config import TabICLConfig

__all__ = ["TabICL", "TabICLConfig"]


def __getattr__(name: str):
    # on first use: torch takes 2 s to import, and configuration errors are reported before that
    if name == "TabICL":
        from tabicl_train.model.tabicl import TabICL

        return TabICL
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
