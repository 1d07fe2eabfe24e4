"""Builds the callbacks of a run, in the order of their calls."""

from __future__ import annotations

from typing import Any

from tabicl_train.config.build import build_options
from tabicl_train.doors import register
from tabicl_train.training.callbacks.averages import Averages
from tabicl_train.training.callbacks.callback import RunContext
from tabicl_train.training.callbacks.checkpoints import Checkpoints
from tabicl_train.training.callbacks.final_test import FinalTest
from tabicl_train.training.callbacks.guard import FailedRun, Guard
from tabicl_train.training.callbacks.metrics import Diagnostics, Metrics
from tabicl_train.training.callbacks.profile import Profile
from tabicl_train.training.callbacks.status import Status
from tabicl_train.training.callbacks.validation import Validation

# The built-in callbacks are registered like any other. Their options are sections of the configuration, such as
# guard.*, and their states in checkpoints have the names of their classes.
register.callback("guard", Guard)
register.callback("metrics", Metrics)
register.callback("diagnostics", Diagnostics)
register.callback("profile", Profile)
register.callback("averages", Averages)
register.callback("status", Status)
register.callback("checkpoints", Checkpoints)
register.callback("validation", Validation)
register.callback("failed_run", FailedRun)
register.callback("final_test", FinalTest)


def build_callbacks(context: RunContext) -> list[Any]:
    """Build the callbacks of this rank."""
    config = context.config
    # The guard comes first, since it may change the weights.
    names = ["guard", "metrics", "diagnostics"]
    if config.profile.step is not None:
        names.append("profile")
    if config.averages.ema:
        names.append("averages")
    names += config.callbacks
    # These come last: a checkpoint holds what all others have done after the step, and validation scores saved weights.
    names += ["status", "checkpoints", "validation", "failed_run", "final_test"]

    callbacks = []
    for name in names:
        callback = build_options(register.callback[name], config.callbacks.get(name) or {})
        if name in config.callbacks:
            callback.state_name = name
        if context.ranks.rank == 0 or getattr(callback, "on_all_ranks", False):
            callbacks.append(callback)
    return callbacks
