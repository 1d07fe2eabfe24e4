"""Decides which weights of a run are the best by validation, and keeps them in checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable

import numpy as np

from tabicl_train.config.schema import REAL
from tabicl_train.console import info
from tabicl_train.model.family import Network
from tabicl_train.outputs import save_atomically
from tabicl_train.run.checkpoint import FORMAT_VERSION
from tabicl_train.training.callbacks.averages import Averages
from tabicl_train.training.callbacks.callback import RunContext, state_name
from tabicl_train.training.callbacks.checkpoints import to_host
from tabicl_train.training.callbacks.scores import Scored, cluster_means
from tabicl_train.training.callbacks.validation_history import VALIDATION, counted_tables, is_improvement, read_history
from tabicl_train.training.module import TrainedNetwork
from tabicl_train.weights.reader import read_weights


class BestWeights:
    """Keeps the best weights so far, and their averages, in checkpoints/best.ckpt.

    In a run that starts from given weights, these are the first best ones, and checkpoints/start.ckpt keeps them, too.
    With ``validation.best`` own or synthetic, other weights replace them only if their mean gain over the start exceeds
    its standard error, both over clusters of tables or rows.

    Parameters
    ----------
    context : RunContext
        The run.
    score : callable
        ``score(network, module)`` returns the scores of a network in evaluation mode on the validation tables.
    """

    def __init__(self, context: RunContext, score: Callable[[Network, TrainedNetwork], list[Scored]]) -> None:
        self.context = context
        self.score = score
        self.start_losses: dict[Hashable, float] | None = None  # by cluster, of the weights that the run started from

    def keep_if_best(self, step: int, module: TrainedNetwork, rows: list[dict], scored: list[Scored]) -> bool:
        """Save the weights if they are the best so far.

        Parameters
        ----------
        step : int
            Optimizer steps done.
        module : TrainedNetwork
            The weights.
        rows : list of dict
            Their rows of validation.csv, which are not written yet.
        scored : list of Scored
            The scores from which the rows were made.

        Returns
        -------
        bool
            Whether they are the best.
        """
        losses = cluster_means(scored, self.context.config.validation.best)
        if step == 0:
            self.start_losses = losses
        elif not self.is_best(step, module, rows, losses):
            return False
        self.save(step, module)
        return True

    def is_best(self, step: int, module: TrainedNetwork, rows: list[dict], losses: dict[Hashable, float]) -> bool:
        """Whether weights beat the best ones so far and, if those of the start are kept, the start too."""
        # If best.ckpt is gone, or was scored on other tables, any score is better.
        settings = self.context.config.validation
        rows_so_far = self.context.records.rows(VALIDATION)
        best_step = None
        if self.context.best_file.exists():
            best_step = read_history(rows_so_far, settings, step).best_step
        rows_of_best = [row for row in rows_so_far if int(row["step"]) == best_step]
        if not is_improvement(rows, rows_of_best, settings):
            return False
        if not self.gains_over_start(losses, module):
            return False
        if rows_of_best and counted_tables(rows_of_best, settings.best) != counted_tables(rows, settings.best):
            info(f"validation step {step}: the tables have changed, so best.ckpt (step {best_step}) is replaced")
        return True

    def gains_over_start(self, losses: dict[Hashable, float], module: TrainedNetwork) -> bool:
        """Whether the mean gain over the start exceeds its standard error; True if there is nothing to compare with."""
        # Real data has no losses by cluster.
        if self.context.config.validation.best == REAL or not self.context.start_file.exists():
            return True
        # A start whose losses are not finite is always beaten.
        start = self.losses_of_start(module)
        if not all(map(math.isfinite, start.values())):
            return True
        before = np.array(list(start.values()))
        after = np.array([losses[cluster] for cluster in start])
        # This imports scipy.stats, which takes a second.
        from tabicl_train.evaluation.statistics import paired_gain

        return paired_gain(before, after).exceeds_error

    def losses_of_start(self, module: TrainedNetwork) -> dict[Hashable, float]:
        """Return the mean loss by cluster of the weights of the start; a resumed run computes it again."""
        if self.start_losses is None:
            network = copy.deepcopy(module.model).eval()
            network.load_state_dict(read_weights(str(self.context.start_file)).tensors)
            self.start_losses = cluster_means(self.score(network, module), self.context.config.validation.best)
        return self.start_losses

    def save(self, step: int, module: TrainedNetwork) -> None:
        """Write best.ckpt and, before the first step, start.ckpt."""
        # What an export needs of a checkpoint, without the state of the optimizer.
        averages = self.context.find(Averages)
        content = {
            "state_dict": module.state_dict(),
            "global_step": step,
            "format_version": FORMAT_VERSION,
            "config": self.context.values,
            "callbacks": {} if averages is None else {state_name(averages): averages.state_dict()},
            "largest_tables": self.context.largest_tables,
            "inherited_range": module.inherited_range,
        }
        if step == 0:
            save_atomically(to_host(content), self.context.start_file)
        save_atomically(to_host(content), self.context.best_file)
