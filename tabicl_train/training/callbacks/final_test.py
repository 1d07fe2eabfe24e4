"""The final test: the gain of a run from given weights, on tables that took no part in training or validation.

test.json:

step, best_step  optimizer steps done; the step of the best weights, 0 if none beat the weights of the start
sentences        the text that `tabicl-train` prints and `tabicl-report` shows
parts            by part of the prior, "own" and "synthetic": mean loss over clusters with the weights of the start and
                 with the best ones, the gain with its standard error and 95 % confidence interval (null for a single
                 cluster, or if not finite), the number of clusters, and their kind: rows, tables or families
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Hashable
from functools import cached_property
from typing import Any

import numpy as np

from priors.real import real_tables, setting
from tabicl_train.config.schema import ValidationConfig
from tabicl_train.console import info
from tabicl_train.doors import plugins
from tabicl_train.model.family import Network
from tabicl_train.run.records import Records
from tabicl_train.stream.steps import StepItem, StepStream
from tabicl_train.stream.workers import StopRequested
from tabicl_train.training.callbacks.callback import Callback, Reason
from tabicl_train.training.callbacks.scores import cluster_means, score_network
from tabicl_train.training.callbacks.validation import final_test_streams
from tabicl_train.training.callbacks.validation_history import read_history
from tabicl_train.training.precision import Precision, choose_precision
from tabicl_train.training.state import TrainState
from tabicl_train.weights.choice import START_FILE
from tabicl_train.weights.reader import load_network

TEST = "test.json"
NO_GAIN = "no gain found: the weights you started from are still the best"


def is_test_missing(settings: ValidationConfig, records: Records, step: int) -> bool:
    """Whether the run has a final test that has not been written for this step."""
    if settings.every == 0 or not (records.folder / START_FILE).exists():
        return False
    written = records.json(TEST) or {}
    return written.get("step") != step


class FinalTest(Callback):
    """On rank 0, compare the best weights of a run with those of its start, if validation has kept both."""

    on_all_ranks = True

    @cached_property
    def streams(self) -> dict[str, StepStream]:
        """The tables of the test, by part of the prior."""
        config = self.context.config
        return final_test_streams(config.validation, config.curriculum.priors_by_kind(self.context.prior), config.model)

    @cached_property
    def precision(self) -> Precision:
        """The precision of the run."""
        return choose_precision(self.context.config.trainer)

    def end(self, state: TrainState, reason: Reason) -> Reason | None:
        """Score, print and write the test at the end of the run; return STOPPED if a stop signal came first."""
        if not reason.is_end:
            return None
        ranks = self.context.ranks
        if ranks.rank > 0:
            is_done = ranks.wait_for_first(lambda: self.context.stop.signaled_at is not None)
        else:
            is_done = ranks.finish(self.write_if_missing(state.step))
        return None if is_done else Reason.STOPPED

    def write_if_missing(self, step: int) -> bool:
        """Score, print and write the test unless an earlier start did so; return False if a stop signal came first."""
        if not is_test_missing(self.context.config.validation, self.context.records, step):
            return True
        try:
            self.write(step)
        except StopRequested:
            info("test      postponed to the next start, since the run was asked to stop")
            return False
        return True

    def write(self, step: int) -> None:
        """Write test.json and print its sentences; raises StopRequested."""
        # The best weights by validation.
        rows = self.context.records.rows("validation.csv")
        best_step = read_history(rows, self.context.config.validation, step).best_step
        best = load_network(str(self.context.best_file)).to(self.context.device)

        # A sentence about each part of the prior, and its numbers.
        sentences = []
        parts = {}
        if not best_step:
            sentences.append(NO_GAIN)
        else:
            for part, stream in self.streams.items():
                sentence, values = self.compare(part, stream, best)
                sentences.append(sentence)
                if values is not None:
                    parts[part] = values
        content = {"step": step, "best_step": best_step, "sentences": sentences, "parts": parts}
        self.context.records.replace(TEST, json.dumps(content, indent=2) + "\n")
        for sentence in sentences:
            info(f"test      {sentence}")

        # The command that exports the best weights.
        folder = self.context.records.folder
        output = folder / ("best.ckpt" if best.predicts_real_tables else "best")
        words = ["tabicl-export", f"checkpoint={folder}", f"output={output}", *plugins.arguments(hashes=False)]
        command = shlex.join(words)
        info(f"          the best weights are those of step {best_step}: {command}")

    def compare(self, part: str, stream: StepStream, best: Network) -> tuple[str, dict[str, Any] | None]:
        """Compare the best weights with those of the start on a part of the prior.

        Parameters
        ----------
        part : str
            "own" or "synthetic".
        stream : StepStream
            The tables of the test.
        best : Network
            The network with the best weights.

        Returns
        -------
        str
            A sentence about the gain.
        dict or None
            The numbers of the part in test.json; None if there are no tables to test on.

        Raises
        ------
        StopRequested
            If a signal asks the run to stop.
        """
        items = [(part, stream.draw(step, self.check_stop)) for step in stream.steps]
        if not items:
            advice = "set validation.rows"
            if self.context.config.validation.rows:
                advice = f"raise {setting(stream.prior, 'test_fraction')}"
            return f"{part} tables: none to test on; {advice}", None

        # The gain, paired by cluster.
        # This imports scipy.stats, which takes a second.
        from tabicl_train.evaluation.statistics import gain_in_words, paired_gain

        start = load_network(str(self.context.start_file)).to(self.context.device)
        start_losses = self.losses(start, items, part)
        best_losses = self.losses(best, items, part)
        before = np.array(list(start_losses.values()))
        after = np.array([best_losses[cluster] for cluster in start_losses])
        gain = paired_gain(before, after)

        # The sentence and the numbers.
        real = real_tables(stream.prior)
        clusters = "tables" if real is None else real.kind_of_clusters
        numbers = {
            "start": statistics.fmean(start_losses.values()),
            "best": statistics.fmean(best_losses.values()),
            "gain": gain.mean,
            "error": gain.error,
            "low": gain.low,
            "high": gain.high,
        }
        finite = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        what = "rows" if clusters == "rows" else "tables"
        sentence = f"{part} {what}: {gain_in_words(gain, len(before), clusters)}"
        return sentence, {"clusters": len(before), "of": clusters, **finite}

    def losses(self, network: Network, items: list[tuple[str, StepItem]], part: str) -> dict[Hashable, float]:
        """Return the mean loss of each cluster; raises StopRequested."""
        return cluster_means(score_network(network, items, (), self.precision, self.check_stop), part)

    def check_stop(self, _: int = 0) -> None:
        """Raise StopRequested if a signal to any rank asks the run to stop."""
        # Unlike in a validation, only a signal counts, after which only seconds may be left; the end of max_hours
        # does not.
        if self.context.ranks.still_working(self.context.stop.signaled_at is not None):
            raise StopRequested
