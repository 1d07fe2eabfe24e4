"""What a run that started from given weights has gained, in words and in answer.json.

The weights of its beginning and the best ones are scored on tables that took no part in training and selection.

answer.json:

step, best_step  optimizer steps done; those after which the best weights were saved, 0 if no later ones were better
sentences        what `tabicl-train` prints and `tabicl-report` shows
parts            by the parts of the prior, "own" and "synthetic": mean loss of the units at the start and of the best
                 weights, the gain with its standard error and 95 % interval (null for a single unit, or if not
                 finite), the number of units, and what they are: rows, tables or families of tables
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from priors import PriorError
from tabicl_train.callbacks.held_out.draws import answer_streams, score_item, unit_losses
from tabicl_train.callbacks.held_out.selection import BEST, paired, start_weights
from tabicl_train.config.schema import RunConfig
from tabicl_train.console import first_line, info
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.distributed.signals import Stop
from tabicl_train.model.families import family_of
from tabicl_train.module import Pretraining
from tabicl_train.prediction.export import tensors_of
from tabicl_train.run_dir.checkpoint import DamagedCheckpoint, read
from tabicl_train.run_dir.records import Records
from tabicl_train.statistics import Estimate, gain_in_words, no_interval_because
from tabicl_train.stream import StepItem

NAME = "answer.json"
NO_GAIN = "no gain found: the weights you started from stay the best ones"


class Interrupted(Exception):
    """A stop signal has come."""


class Answer:
    """Gives the answer of a run, on rank 0, if it is one with `init_weights` and validation."""

    def __init__(self, config: RunConfig, records: Records, device: torch.device, ranks: Ranks, stop: Stop) -> None:
        self.config, self.records, self.device, self.ranks, self.stop = config, records, device, ranks, stop
        self.is_due = config.init_weights is not None and config.validation.every > 0

    def is_missing(self, step: int) -> bool:
        """Whether the run shall have an answer, and the one after this many steps is not there."""
        return self.is_due and (self.records.json(NAME) or {}).get("step") != step

    def give(self, step: int) -> bool:
        """Score, print and write the answer after this many steps; False if a stop signal came before it was there.

        All ranks call this; a time limit does not prevent it, while after a signal there may be only seconds left.
        """
        if not self.is_due:
            return True
        if self.ranks.rank > 0:
            return self.ranks.wait_for_first(lambda: self.stop.first is not None)
        return self.ranks.finish(self.write(step))

    def write(self, step: int) -> bool:
        path = self.records.folder / BEST
        if not path.exists() and not self.records.rows("validation.csv"):
            info("answer    none yet, since the run has ended before its first validation")
            return True
        try:
            best = read(path)
        except (DamagedCheckpoint, OSError) as error:
            info(f"answer    none, since the best weights cannot be read: {first_line(error)}")
            return True
        parts: dict[str, dict[str, Any]] = {}
        try:
            chosen = best["global_step"] > 0
            sentences = self.compare(tensors_of(path, best, "best"), parts) if chosen else [NO_GAIN]
        except Interrupted:
            info("answer    left to the next start, since the run was asked to stop")
            return False
        content = {"step": step, "best_step": best["global_step"], "sentences": sentences, "parts": parts}
        self.records.replace(NAME, json.dumps(content, indent=2) + "\n")
        for sentence in sentences:
            info(f"answer    {sentence}")
        info(f"          the best weights are those of step {best['global_step']}: {export_command(self.config)}")
        return True

    def compare(self, best: dict[str, Tensor], parts: dict[str, dict[str, Any]]) -> list[str]:
        """A sentence for each part of the prior, whose numbers are added to `parts`; raises Interrupted."""
        start = start_weights(self.config)
        if start is None:
            return ["none, since the weights that the run started from are gone"]
        streams = answer_streams(self.config)
        judged = self.config.validation.best if self.config.validation.best in streams else next(iter(streams))
        sentences = []
        for part, stream in streams.items():
            try:
                items = [stream.draw(step, self.check_stop) for step in stream.steps]
            except PriorError as error:
                sentences.append(f"{part} tables: none, since they cannot be drawn: {first_line(error)}")
                continue
            if not items:
                sentences.append(f"{part} tables: none, since none are held out for it")
                continue
            before, after = (self.losses(weights, items) for weights in (start, best))
            found, units = paired(before, after), stream.prior.kind_of_units
            means = {name: statistics.fmean(losses.values()) for name, losses in (("start", before), ("best", after))}
            values = {**means, "gain": found.mean, "error": found.error, "low": found.low, "high": found.high}
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            parts[part] = {"units": len(before), "of": units, **finite}
            words = gain_in_words(found, len(before), units) if part == judged else change(found, len(before), units)
            sentences.append(f"{part} {'rows' if units == 'rows' else 'tables'}: {words}")
        return sentences

    def check_stop(self, _: int = 0) -> None:
        if self.ranks.still_working(self.stop.first is not None):
            raise Interrupted

    def losses(self, weights: dict[str, Tensor], items: list[StepItem]) -> dict[Hashable, float]:
        module = Pretraining(self.config)
        module.model.load_state_dict(weights)
        network = module.to(self.device).model.eval()
        losses = []
        for item in items:
            self.check_stop()
            losses += score_item(network, module, item)[1]
        return unit_losses(losses)


def change(found: Estimate, count: int, units: str) -> str:
    """The answer for units of a kind on which the selection did not depend."""
    if problem := no_interval_because(found, units):
        return problem
    return f"the mean loss changes by {-found:+.4f} on {count} {units} that took no part (95 % confidence interval)"


def export_command(config: RunConfig) -> str:
    """The command that exports the best weights; without weights=best it would take those of the last step."""
    output = Path(config.run_dir, "best.ckpt" if family_of(config.model).predicts_real_tables else "best")
    return shlex.join(["tabicl-export", f"checkpoint={config.run_dir}", f"output={output}", "weights=best"])
