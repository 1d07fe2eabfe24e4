"""Pretrains TabICL-style tabular in-context learners on synthetic tables."""

import importlib

__all__ = [
    "Pretraining",
    "TabICLClassifier",
    "TabICLRegressor",
    "TableStream",
    "Tables",
    "compose",
    "open_run",
    "train",
]

__version__ = "0.3.0"

MODULES = {
    "Pretraining": "lightning_module",
    "TabICLClassifier": "prediction.classifier",
    "TabICLRegressor": "prediction.regressor",
    "TableStream": "table_stream",
    "Tables": "lightning_module",
    "compose": "config.compose",
    "open_run": "saved_run",
    "train": "training",
}

# An argument of the estimators in version 0.2.0; FineTune held its options.
NO_FINE_TUNE = (
    "fine_tune and FineTune were removed in version 0.3.0; tabicl-train experiment=fine_tune prior.file=FILE "
    "init_weights=mini run_dir=RUN trains on one table, and the estimators take model='RUN'"
)


def __getattr__(name: str):
    # Imported on first use: scikit-learn and torch take seconds, and commands that only check arguments need neither.
    if name in MODULES:
        return getattr(importlib.import_module(f"tabicl_train.{MODULES[name]}"), name)
    if name == "FineTune":
        raise ImportError(NO_FINE_TUNE)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
