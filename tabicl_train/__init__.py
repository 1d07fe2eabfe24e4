"""Pretrains TabICL-style tabular in-context learners on synthetic tables."""

import importlib

__all__ = ["FineTune", "TabICLClassifier", "TabICLRegressor", "TableStream", "compose", "open_run", "train"]

__version__ = "0.2.0"

MODULES = {
    "FineTune": "prediction.fine_tune",
    "TabICLClassifier": "prediction.classifier",
    "TabICLRegressor": "prediction.regressor",
    "TableStream": "table_stream",
    "compose": "config.compose",
    "open_run": "saved_run",
    "train": "training",
}


def __getattr__(name: str):
    # Imported on first use: scikit-learn and torch take seconds, and commands that only check arguments need neither.
    if name in MODULES:
        return getattr(importlib.import_module(f"tabicl_train.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
