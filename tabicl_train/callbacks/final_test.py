"""The final test: the gain of a run from given weights, on tables that took no part in training or validation.

test.json:

step, best_step  optimizer steps done; the step of the best weights, 0 if none were better than those of the start
sentences        the text that `tabicl-train` prints and `tabicl-report` shows
parts            by part of the prior, "own" and "synthetic": mean loss of the clusters with the weights of the start
                 and with the best ones, the gain with its standard error and 95 % confidence interval (null for a
                 single cluster, or if not finite), the number of clusters, and their kind: rows, tables or families
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from priors.real import real_tables, setting
from tabicl_train import plugins
from tabicl_train.callbacks.callback import Callback, Reason
from tabicl_train.callbacks.scores import cluster_means, score_network
from tabicl_train.callbacks.validation import BEST, START, final_test_streams
from tabicl_train.callbacks.validation_history import read_history
from tabicl_train.config.schema import ValidationConfig
from tabicl_train.console import info
from tabicl_train.model.family import Network
from tabicl_train.precision import Precision, choose
from tabicl_train.prediction.export import load_network
from tabicl_train.run_dir.records import Records
from tabicl_train.state import TrainState
from tabicl_train.statistics import gain_in_words, paired_gain
from tabicl_train.stream import StepStream
from tabicl_train.workers import StopRequested

TEST = "test.json"
NO_GAIN = "no gain found: the weights you started from stay the best ones"


def is_test_missing(settings: ValidationConfig, records: Records, step: int) -> bool:
    """Whether the run has a final test, and that of this step has not been written."""
    started = settings.every > 0 and (records.folder / START).exists()
    return started and (records.json(TEST) or {}).get("step") != step


class FinalTest(Callback):
    """Compare the best weights of a run with those of its start, on rank 0, if validation has kept both."""

    on_all_ranks = True

    @property
    def settings(self) -> ValidationConfig:
        """The settings of validation."""
        return self.context.config.validation

    @property
    def start_file(self) -> Path:
        """The weights that the run started from."""
        return self.context.records.folder / START

    @property
    def best_file(self) -> Path:
        """The best weights."""
        return self.context.records.folder / BEST

    @cached_property
    def streams(self) -> dict[str, StepStream]:
        """The tables of the test, by the parts of the prior."""
        config = self.context.config
        return final_test_streams(config.validation, config.curriculum.parts(self.context.prior), config.model)

    @cached_property
    def precision(self) -> Precision:
        """That of the run."""
        return choose(self.context.config.trainer)

    def end(self, state: TrainState, reason: Reason) -> Reason | None:
        """At the end of the run, score, print and write the test; STOPPED if a stop signal came first."""
        if not reason.is_end or self.run(state.step):
            return None
        return Reason.STOPPED

    def run(self, step: int) -> bool:
        """Score, print and write the test after so many steps; False if a stop signal came first."""
        # All ranks call this. After a signal only seconds may be left.
        ranks, stop = self.context.ranks, self.context.stop
        if ranks.rank > 0:
            return ranks.wait_for_first(lambda: stop.first is not None)
        try:
            if is_test_missing(self.settings, self.context.records, step):
                self.write(step)
        except StopRequested:
            info("test      left to the next start, since the run was asked to stop")
            return ranks.finish(False)
        return ranks.finish(True)

    def write(self, step: int) -> None:
        """Write test.json and print its sentences; raises StopRequested."""
        best_step = read_history(self.context.records.rows("validation.csv"), self.settings, step).best_step
        parts: dict[str, dict[str, Any]] = {}
        best = load_network(str(self.best_file)).to(self.context.device)
        sentences = [self.compare(part, best, parts) for part in self.streams] if best_step else [NO_GAIN]
        content = {"step": step, "best_step": best_step, "sentences": sentences, "parts": parts}
        self.context.records.replace(TEST, json.dumps(content, indent=2) + "\n")
        for sentence in sentences:
            info(f"test      {sentence}")
        folder = self.context.records.folder
        output = folder / ("best.ckpt" if best.predicts_real_tables else "best")
        words = ["tabicl-export", f"checkpoint={folder}", f"output={output}", *plugins.arguments(hashes=False)]
        command = shlex.join(words)
        info(f"          the best weights are those of step {best_step}: {command}")

    def compare(self, part: str, best: Network, parts: dict[str, dict[str, Any]]) -> str:
        """Return a sentence about a part of the prior, and add its numbers to `parts`; raises StopRequested."""
        stream = self.streams[part]
        items = [(part, stream.draw(k, self.check_stop)) for k in stream.steps]
        if not items:
            advice = f"raise {setting(stream.prior, 'test_fraction')}" if self.settings.rows else "set validation.rows"
            return f"{part} tables: none to test on; {advice}"
        start = load_network(str(self.start_file)).to(self.context.device)
        losses = {
            name: cluster_means(score_network(network, items, 0, self.precision, self.check_stop), part)
            for name, network in (("start", start), ("best", best))
        }
        before, after = (np.array([of[key] for key in losses["start"]]) for of in losses.values())
        real = real_tables(stream.prior)
        found, clusters = paired_gain(before, after), real.kind_of_clusters if real else "tables"
        values = {name: statistics.fmean(of.values()) for name, of in losses.items()}
        values |= {"gain": found.mean, "error": found.error, "low": found.low, "high": found.high}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        parts[part] = {"clusters": len(before), "of": clusters, **finite}
        return f"{part} {'rows' if clusters == 'rows' else 'tables'}: {gain_in_words(found, len(before), clusters)}"

    def check_stop(self, _: int = 0) -> None:
        """Raise StopRequested if a signal to any rank asks the run to stop."""
        if self.context.ranks.still_working(self.context.stop.first is not None):
            raise StopRequested
