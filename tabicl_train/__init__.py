"""Pretrains TabICL-style tabular in-context learners on synthetic tables."""

import importlib
import sys

from tabicl_train.doors.moved import MovedModules

TYPE_CHECKING = False  # instead of that of typing, which takes milliseconds to import
if TYPE_CHECKING:
    from tabicl_train.doors import plugins as plugins
    from tabicl_train.doors import register as register

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
    "Pretraining": "tabicl_train.training.lightning_module",
    "TabICLClassifier": "tabicl_train.prediction.classifier",
    "TabICLRegressor": "tabicl_train.prediction.regressor",
    "TableStream": "tabicl_train.stream.table_stream",
    "Tables": "tabicl_train.training.lightning_module",
    "compose": "tabicl_train.config.compose",
    "open_run": "tabicl_train.report.saved_run",
    "train": "tabicl_train.training.loop",
}
DOORS = ("plugins", "register")  # modules that plug-ins import from here

sys.meta_path.insert(0, MovedModules())  # before the finder that would import a second copy

# An argument of the estimators in version 0.2.0; FineTune held its options.
NO_FINE_TUNE = (
    "fine_tune and FineTune were removed in version 0.3.0; tabicl-train experiment=fine_tune prior.file=FILE "
    "init_weights=mini run_dir=RUN trains on one table, and the estimators take model='RUN'"
)


def __getattr__(name: str):
    # Imported on first use: scikit-learn and torch take seconds, and commands that only check arguments need neither.
    if name in MODULES:
        return getattr(importlib.import_module(MODULES[name]), name)
    if name in DOORS:
        return importlib.import_module(f"tabicl_train.doors.{name}")
    if name == "FineTune":
        raise ImportError(NO_FINE_TUNE)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
