"""Protects a run from non-finite steps, a rising loss, or a growing multiplier.

If loss or gradient norm is not finite on any rank, the module skips the step on all ranks, and the guard records it.
From step guard.after on, the guard acts when a limit is exceeded:

- The moving average of the loss, ``average <- 0.99 average + 0.01 loss``, exceeds guard.loss.
- The average exceeds guard.multiplier_loss, and the largest multiplier of a layer at 512 labeled rows exceeds
  guard.multiplier (first in-context block) or guard.other_multiplier (other layers).

The limits of the loss and of the first in-context block are those of a published run of 500,000 steps on one GPU, see
GuardConfig. incidents.jsonl has a line for each incident, with the address of the step and the shapes of its tables.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import shlex
import time
from pathlib import Path

import torch

from tabicl_train.config.schema import GuardConfig
from tabicl_train.console import counted, info
from tabicl_train.doors import plugins
from tabicl_train.errors import Diverged
from tabicl_train.model.family import Network
from tabicl_train.model.scaling import Scaling
from tabicl_train.run.checkpoint import DamagedCheckpoint, how_to_begin_again, read_checkpoint, saved, step_of
from tabicl_train.run.curves import number_in_column, rows_by_step
from tabicl_train.run.records import Records
from tabicl_train.stream.curriculum import plan_step
from tabicl_train.stream.steps import StepItem
from tabicl_train.training.callbacks.callback import Callback, Reason, saved_states
from tabicl_train.training.callbacks.checkpoints import Checkpoints
from tabicl_train.training.state import TrainState

MEMORY = 0.99  # decay of the moving average of the loss: half of its weight is on the last 69 steps
LOW_MEMORY = 0.999  # decay of the low of the average: its distance to a higher average halves within 693 steps
HORIZON = 100  # steps until the moving average shows a rise, so a good checkpoint must be older
MULTIPLIER_AT = 512  # labeled rows for which the limit of the multiplier was published
PUBLISHED = "icl.0"  # the layer for which that limit was published
REWINDS = 3  # rewinds after which the run stops instead
STATE = ("average", "low", "in_a_row", "abandoned")


class Guard(Callback):
    """Watch loss, gradient norm and multiplier on all ranks: at logged steps and before a save."""

    files = ("incidents.jsonl",)
    on_all_ranks = True

    def __init__(self) -> None:
        self.unread: list[tuple[int, torch.Tensor]] = []  # values on the device of the steps since `read_steps`
        self.average: float | None = None  # of the loss
        self.low: float | None = None  # follows the average, downward immediately and upward slowly
        self.in_a_row = 0  # consecutive non-finite steps up to the last one
        self.longest = 0  # the most of them since the last comparison with the limits; not in checkpoints
        self.abandoned: list[list[int]] = []  # for each rewind: the step of its checkpoint, and the steps done before
        self.warned = False  # whether a warning about the limit that is exceeded now was printed

    @property
    def limits(self) -> GuardConfig:
        """The limits, and what to do when one is exceeded."""
        return self.context.config.guard

    def state_dict(self) -> dict:
        """Return the state after the last step."""
        self.read_steps()
        return {key: getattr(self, key) for key in STATE}

    def load_state_dict(self, state: dict) -> None:
        for key in STATE:
            setattr(self, key, state[key])

    def after_step(self, state: TrainState, item: StepItem) -> None:
        """Keep the values of a step on the device; at a logged step, compare them with the limits."""
        module = state.module
        # No step waits for the device: values are read at logged steps. A scale of 0 says that the run is not in fp16.
        scale = module.loss_scale.scale if module.loss_scale.enabled else module.loss.new_zeros(())
        self.unread.append((item.step, torch.stack([module.loss, module.grad_norm, scale])))
        if state.step not in self.context.logged:
            return
        self.read_steps()
        self.stop_if_skipped(state.step)
        reason = None
        if state.step >= self.limits.after:
            reason = self.passed_limit(module.model, self.average)
        if reason is None:
            self.warned = False
        else:
            self.act(state, reason)

    def read_steps(self) -> None:
        """Read the values of the steps since the last call from the device, and report those that are not finite."""
        if not self.unread:
            return
        steps = [step for step, _ in self.unread]
        values = torch.stack([values_of_step for _, values_of_step in self.unread]).tolist()
        for step, (loss, norm, scale) in zip(steps, values, strict=True):
            # A finite step.
            if math.isfinite(loss) and math.isfinite(norm):
                self.average = follow(self.average, loss, MEMORY)
                self.low = min(self.average, follow(self.low, self.average, LOW_MEMORY))
                self.in_a_row = 0
                continue
            # A skipped step.
            self.in_a_row += 1
            self.longest = max(self.longest, self.in_a_row)
            # fp16 searches for its loss scale by steps that overflow.
            if math.isfinite(loss) and scale >= 1:
                continue
            what = "gradient norm" if math.isfinite(loss) else "loss"
            self.report(step, f"the {what} is not finite", loss=repr(loss), grad_norm=repr(norm))
        self.unread.clear()

    def report(self, step: int, reason: str, **facts) -> None:
        """Write a line of incidents.jsonl: the step's address, the shapes of its tables, and further facts."""
        if self.context.ranks.rank > 0:
            return
        stream = self.context.stream
        records = self.context.records
        # The plan of the step, on all ranks, and the command that repeats it.
        plan = plan_step(stream.curriculum, stream.model, stream.seed, step, stream.prior)
        replay = ["tabicl-replay", f"run_dir={records.folder}", f"step={step}", *plugins.arguments(hashes=False)]
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "step": step,
            "stage": plan.stage,
            "seed": stream.seed,
            "reason": reason,
            **facts,
            "replay": shlex.join(replay),
            "groups": [{"tables": list(group.tables), **dataclasses.asdict(group.spec)} for group in plan.groups],
        }
        records.append_line("incidents.jsonl", line)

    def stop_if_skipped(self, step: int) -> None:
        """Raise Diverged if too many steps in a row have been skipped since the last call."""
        longest = self.longest
        self.longest = 0
        if longest >= self.limits.skipped_in_a_row:
            folder = self.context.records.folder
            checkpoints = self.context.find(Checkpoints)
            if checkpoints is not None:
                checkpoints.writer.wait()
            raise Diverged(
                f"loss or gradient norm was not finite in {longest} steps in a row, the last ones before step {step}; "
                f"{folder}/incidents.jsonl names them. {how_to_begin_again(folder)}"
            )

    def act(self, state: TrainState, reason: str) -> None:
        """Warn, stop or rewind, as configured, when a limit is exceeded.

        Raises
        ------
        Diverged
            To stop: if guard.action is stop, after too many rewinds, or if there is no checkpoint to go back to.
        """
        # Choose what to do.
        step = state.step
        action = self.limits.action
        good = None  # the content of the checkpoint to go back to
        if action == "rewind" and len(self.abandoned) >= REWINDS:
            action = "stop"
            reason = f"{reason}, after {counted(len(self.abandoned), 'rewind')}"
        elif action == "rewind":
            good = self.context.ranks.from_first(lambda: self.choose(step, state.network))
            if good is None:
                action = "stop"
                reason = f"{reason}, and there is no earlier checkpoint to go back to"

        # Report it; a warning is printed once until the run is within its limits again.
        if action == "warn" and self.warned:
            return
        self.warned = True
        facts = {} if good is None else {"back_to": good["global_step"]}
        self.report(step - 1, reason, action=action, **facts)
        info(f"guard     step {step}: {reason}; {action}")

        # Do it.
        if action == "stop":
            advice = ["raise the stage's weight_decay", "bound the multiplier (model.scaling_bound)"]
            advice += ["set guard.action=rewind"] * (self.limits.action == "stop")
            raise Diverged(f"step {step}: {reason}. Lower the learning rate, {', '.join(advice[:-1])}, or {advice[-1]}")
        if good is not None:
            self.rewind(state, good)

    def passed_limit(self, model: Network, average: float | None) -> str | None:
        """Describe the limit that is exceeded, or return None; see the formulas of this file."""
        # The limit of the loss; those of multipliers apply only above multiplier_loss.
        limits = self.limits
        if average is None:
            return None
        if average > limits.loss:
            return f"the moving average of the loss is {average:.3f}, above guard.loss={limits.loss}"
        if average <= limits.multiplier_loss:
            return None
        # The multipliers.
        for name, scaling in model.named_scalings():
            # The b of SSA has another meaning.
            if not isinstance(scaling, Scaling):
                continue
            option = "multiplier" if name == PUBLISHED else "other_multiplier"
            limit = getattr(limits, option)
            multiplier = scaling.multipliers(MULTIPLIER_AT).abs().max().item()
            if not multiplier <= limit:  # also if it is NaN
                return (
                    f"the multiplier of {name} at {MULTIPLIER_AT} labeled rows is {multiplier:.1f}, above "
                    f"guard.{option}={limit}, and the moving average of the loss is {average:.3f}"
                )
        return None

    def rewind(self, state: TrainState, good: dict) -> None:
        """Restore weights, optimizer and callbacks from a checkpoint; the run goes on with the tables of new steps."""
        state.module.go_back(good, state.step, state.optimizer)
        for callback, earlier in saved_states(good, self.context.callbacks):
            if callback is not self:
                callback.load_state_dict(earlier or {})
        # The guard's own averages go back too, but it remembers the rewinds.
        guard_then = good["callbacks"]["Guard"]
        self.average = guard_then["average"]
        self.low = guard_then["low"]
        self.abandoned.append([good["global_step"], state.step])
        info(f"guard     back to the weights of step {good['global_step']}; steps up to {state.step} are skipped")

    def choose(self, step: int, network: Network) -> dict | None:
        """Find the newest good checkpoint.

        A checkpoint is good if

        - it is from before the moving average could show the rise,
        - it was not saved in steps that a rewind has abandoned,
        - the average of its loss is less than halfway from its low to the limit,
        - its weights exceed no limit.

        Parameters
        ----------
        step : int
            Steps done, at which a limit is exceeded.
        network : Network
            The network, which stays as it is.

        Returns
        -------
        dict or None
            The content of the checkpoint; None if there is none.
        """
        # Checkpoints that were saved on schedule come first, so that preemptions do not change rewinds.
        checkpoints = self.context.find(Checkpoints)
        assert checkpoints is not None
        files = checkpoints.writer
        files.wait()
        paths = {step_of(path): path for path in saved(self.context.records.folder / "checkpoints")}
        early = [done for done in paths if done <= step - HORIZON]
        early.sort(key=lambda done: (files.is_due(done), done), reverse=True)

        # Try them one after the other.
        candidate = copy.deepcopy(network)
        for done in early:
            # One from the very end of abandoned steps is good: it was saved after the rewind, with restored weights.
            if any(good < done < rewound for good, rewound in self.abandoned):
                continue
            try:
                content = read_checkpoint(paths[done])
            except (DamagedCheckpoint, OSError) as error:
                info(f"warning   {error}; trying an older checkpoint")
                continue
            guard_then = content["callbacks"]["Guard"]
            average = guard_then["average"]
            if average is not None and average > (guard_then["low"] + self.limits.loss) / 2:
                continue
            weights = {name.removeprefix("model."): value for name, value in content["state_dict"].items()}
            candidate.load_state_dict(weights)
            if self.passed_limit(candidate, average) is None:
                return content
        return None


class FailedRun(Callback):
    """Let a run fail at its end if it has skipped most of its steps, or if its last loss is not finite."""

    on_all_ranks = True

    def end(self, state: TrainState, reason: Reason) -> None:
        """Raise Diverged, on all ranks, at the end of such a run."""
        if not reason.is_end:
            return
        failure = self.context.ranks.from_first(lambda: failure_of(self.context.records.folder))
        if failure is not None:
            raise Diverged(failure)


def failure_of(run_dir: Path) -> str | None:
    """Describe why a run has failed although all its steps are done, or return None."""
    steps = rows_by_step(run_dir, "metrics.csv")
    if not steps:
        return None
    last = max(steps)
    # Steps that fp16 skips in search of its loss scale have no line in incidents.jsonl, and do not count.
    skipped = sum("grad_norm" in line for line in Records(run_dir).lines("incidents.jsonl"))
    if skipped > last / 2:
        what = f"{skipped:,} of {last:,} steps were skipped because their loss or gradient norm was not finite"
    elif not math.isfinite(number_in_column(steps[last][-1], "loss")):
        what = f"the loss of the last step, {last:,}, is not finite"
    else:
        return None
    return f"{what}; {run_dir}/incidents.jsonl has the details. {how_to_begin_again(run_dir)}"


def follow(average: float | None, value: float, memory: float) -> float:
    """Update a moving average with one more value: ``memory * average + (1 - memory) * value``, or the first value."""
    if average is None:
        return value
    return memory * average + (1 - memory) * value
