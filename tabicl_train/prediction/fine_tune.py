"""The name of a module of version 0.2.0, for pickles of estimators with `fine_tune`: they are refused in one line."""

from typing import Any

from tabicl_train import NO_FINE_TUNE


def __getattr__(name: str) -> Any:
    if name in ("FineTune", "FineTuning", "Check"):
        advice = "the network of such an estimator in a pickle is written by its method export in version 0.2.0"
        raise ImportError(f"{NO_FINE_TUNE}; {advice}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
