"""Which callbacks a run has, in the order of their calls."""

from __future__ import annotations

from typing import Any

from priors.real import real_tables
from tabicl_train import register
from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.callback import RunContext
from tabicl_train.callbacks.checkpoints import Checkpoints
from tabicl_train.callbacks.final_test import FinalTest
from tabicl_train.callbacks.guard import FailedRun, Guard
from tabicl_train.callbacks.metrics import Diagnostics, Metrics
from tabicl_train.callbacks.profile import Profile
from tabicl_train.callbacks.status import Status
from tabicl_train.callbacks.tables_seen import TablesSeen
from tabicl_train.callbacks.validation import Validation
from tabicl_train.config.schema import build_options


def build_callbacks(context: RunContext) -> list[Any]:
    """Build the callbacks of this rank."""
    config = context.config
    # The guard is first, since it may change the weights.
    callbacks: list[Any] = [Guard(config.guard), Metrics()]
    if real_tables(context.prior) is not None:
        callbacks.append(TablesSeen(context))
    callbacks.append(Diagnostics())
    if config.profile.step is not None:
        callbacks.append(Profile(config.profile))
    if config.averages.ema or config.averages.last:
        callbacks.append(Averages(config.averages))
    for name, options in config.callbacks.items():
        callbacks.append(build_options(register.callback[name], options or {}))
    callbacks.append(Status())
    # A checkpoint holds what all others have done after the step, and the weights that are validated are on disk.
    callbacks += [Checkpoints(), Validation(), FailedRun(), FinalTest()]
    is_first = context.ranks.rank == 0
    return [callback for callback in callbacks if is_first or callback.on_all_ranks]
