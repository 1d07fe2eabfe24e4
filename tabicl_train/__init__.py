"""Pretrains TabICL-style tabular in-context learners on synthetic tables."""

import importlib

__all__ = ["FineTune", "TabICLClassifier", "TabICLRegressor"]

__version__ = "0.1.0"

MODULES = {"FineTune": "fine_tune", "TabICLClassifier": "classifier", "TabICLRegressor": "regressor"}


def __getattr__(name: str):
    # imported on first use: scikit-learn and torch take seconds, and commands that only check arguments need neither
    if name in MODULES:
        return getattr(importlib.import_module(f"tabicl_train.prediction.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
