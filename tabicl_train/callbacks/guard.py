"""Keeping a run from being ruined: steps that are not finite, losses that rise, multipliers that run away.

The module leaves out a step whose loss or gradient norm is not finite, on all ranks; here it is written down. The two
limits are those that worked in a published run of 500,000 steps on one GPU; see GuardConfig.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import lightning as L
import torch

from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.checkpoints import CheckpointFiles
from tabicl_train.callbacks.metrics import is_logged
from tabicl_train.config.schema import RunConfig
from tabicl_train.curriculum import plan_step
from tabicl_train.model import TabICL
from tabicl_train.module import Pretraining
from tabicl_train.run_dir.checkpoint import DamagedCheckpoint, read, saved, step_of
from tabicl_train.run_dir.console import tell
from tabicl_train.run_dir.records import Records
from tabicl_train.stream import StepItem

MEMORY = 0.99  # of the moving average of the loss: half of its weight is on the last 69 steps
LOW_MEMORY = 0.999  # of its low: it halves its distance to a level that stays higher within 693 steps
HORIZON = 100  # steps that the moving average looks back; a good checkpoint is older than a rise that it shows
MULTIPLIER_AT = 512  # labelled rows, at which the limit of the multiplier was published
STATE = ("average", "low", "skipped", "in_a_row", "abandoned")


class Diverged(Exception):
    """A run that was stopped because it learns nothing any more; the message says why and what to try."""


class Guard(L.Callback):
    """Reads loss and gradient norm of the steps since it last looked, at logged steps and before a save.

    incidents.jsonl: a line an incident, with the address of the step and what its tables are.
    """

    def __init__(self, config: RunConfig, records: Records, files: CheckpointFiles) -> None:
        self.config, self.limits, self.files = config, config.guard, files
        self.records, self.checkpoints = records, records.folder / "checkpoints"
        self.unread: list[tuple[int, torch.Tensor]] = []
        self.average: float | None = None  # of the loss
        self.low: float | None = None  # follows the average down at once, and up slowly
        self.skipped = self.in_a_row = 0  # steps that were not finite: all of them, and the last ones without a break
        self.longest = 0  # most of them in a row since the last judgement; over after it, so not kept in checkpoints
        self.abandoned: list[list[int]] = []  # of each rewind the steps of its checkpoint, and the steps then done
        self.warned: str | None = None

    def state_dict(self) -> dict:
        self.look()
        return {key: getattr(self, key) for key in STATE}

    def load_state_dict(self, state: dict) -> None:
        for key in STATE:
            setattr(self, key, state.get(key, getattr(self, key)))

    def on_train_start(self, trainer: L.Trainer, module: Pretraining) -> None:
        self.writes = trainer.is_global_zero
        if self.writes:
            self.records.rewind("incidents.jsonl", trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, module: Pretraining, _, item: StepItem, __: int) -> None:
        scale = module.loss_scale.scale if module.loss_scale.wanted else module.loss.new_zeros(())
        self.unread.append((item.step, torch.stack([module.loss, module.grad_norm, scale])))
        if is_logged(self.config, trainer.global_step):
            self.look()
            self.judge(trainer, module)

    def look(self) -> None:
        """Take note of the steps since the last look."""
        if not self.unread:
            return
        values = torch.stack([v for _, v in self.unread]).tolist()
        for (step, _), (loss, norm, scale) in zip(self.unread, values, strict=True):
            if math.isfinite(loss) and math.isfinite(norm):
                self.average = follow(self.average, loss, MEMORY)
                self.low = min(self.average, follow(self.low, self.average, LOW_MEMORY))
                self.in_a_row = 0
                continue
            self.in_a_row += 1
            self.longest = max(self.longest, self.in_a_row)
            if math.isfinite(loss) and scale >= 1:
                continue  # fp16 is looking for the scale of its loss
            self.skipped += 1
            what = "gradient norm" if math.isfinite(loss) else "loss"
            self.report(step, f"the {what} is not finite", loss=repr(loss), grad_norm=repr(norm))
        self.unread.clear()

    def report(self, step: int, reason: str, **facts) -> None:
        """A line of incidents.jsonl: the step's address, and what its tables are."""
        if not self.writes:
            return
        plan = plan_step(self.config.curriculum, self.config.model, self.config.seed, step)
        batches = [
            {
                "tables": list(b.tables),
                "rows": b.spec.num_rows,
                "train_size": b.spec.train_size,
                "features": b.spec.num_features,
            }
            for b in plan.micro_batches
        ]
        line = {"step": step, "stage": plan.stage, "seed": self.config.seed, "reason": reason, **facts}
        line |= {"replay": f"tabicl-replay run_dir={self.config.run_dir} step={step}", "micro_batches": batches}
        self.records.append_line("incidents.jsonl", {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **line})

    def judge(self, trainer: L.Trainer, module: Pretraining) -> None:
        limits = self.limits
        for count, most, what in (
            (self.longest, limits.skipped_in_a_row, "steps in a row"),
            (self.skipped, limits.skipped, "steps"),
        ):
            if self.longest and count >= most:  # a fault that is over stops nothing
                raise Diverged(
                    f"loss or gradient norm was not finite in {count} {what}, the last ones before step "
                    f"{trainer.global_step}; {self.records.folder}/incidents.jsonl names them. Replay one; lower the "
                    "learning rate or use trainer.precision=fp32, and begin a new run from an earlier checkpoint "
                    "(init_weights=CHECKPOINT run_dir=...)"
                )
        self.longest = 0
        reason = self.passed_limit(module.model, self.average) if trainer.global_step >= limits.after else None
        if reason is None:
            self.warned = None
            return
        action, good, facts = limits.action, None, {}
        if action == "rewind" and len(self.abandoned) >= limits.rewinds:
            action, reason = "stop", f"{reason}, after {len(self.abandoned)} rewinds"
        elif action == "rewind" and (good := self.last_good(trainer, module.model)) is None:
            action, reason = "stop", f"{reason}, and there is no checkpoint from before that to go back to"
        elif action == "rewind":
            facts["back_to"] = good["global_step"]
        if action == "warn" and self.warned is not None:
            return
        self.warned = reason
        self.report(trainer.global_step - 1, reason, action=action, **facts)
        tell(f"guard     step {trainer.global_step}: {reason}; {action}")
        if action == "stop":
            raise Diverged(
                f"step {trainer.global_step}: {reason}. Lower the learning rate, raise the stage's weight_decay, bound "
                "the multiplier (model.scaling_bound), or set guard.action=rewind"
            )
        if good is not None:
            self.rewind(trainer, module, good)

    def passed_limit(self, model: TabICL, average: float | None) -> str | None:
        limits = self.limits
        if average is None:
            return None
        if average > limits.loss:
            return f"the moving average of the loss is {average:.3f}, above guard.loss={limits.loss}"
        scaling = dict(model.named_scalings()).get("icl.0")
        if scaling is None or average <= limits.multiplier_loss:
            return None
        multiplier = scaling.multipliers(MULTIPLIER_AT).abs().max().item()
        if multiplier <= limits.multiplier:
            return None
        return (
            f"the multiplier of icl.0 at {MULTIPLIER_AT} labelled rows is {multiplier:.1f}, above "
            f"guard.multiplier={limits.multiplier}, and the moving average of the loss {average:.3f}"
        )

    def rewind(self, trainer: L.Trainer, module: Pretraining, good: dict) -> None:
        """Weights and optimiser as they were at a checkpoint; the steps since then count as done, so their tables are
        not seen again."""
        step = trainer.global_step
        module.go_back(good, step)
        for callback in trainer.callbacks:
            if isinstance(callback, Averages):
                callback.load_state_dict(good["callbacks"][callback.state_key])
        state = good["callbacks"][self.state_key]
        self.average, self.low = state["average"], state.get("low")
        self.abandoned.append([good["global_step"], step])
        tell(f"guard     back to the weights of step {good['global_step']}; steps up to {step} are skipped")

    def last_good(self, trainer: L.Trainer, model: TabICL) -> dict | None:
        """The checkpoint to go back to, which the first rank chooses for all; the model is left with any weights."""
        self.files.wait()
        trainer.strategy.barrier("rewind")
        path = self.choose(trainer.global_step, model) if trainer.is_global_zero else None
        path = trainer.strategy.broadcast(path)
        return None if path is None else read(path)

    def choose(self, step: int, model: TabICL) -> Path | None:
        """The newest good checkpoint: no limit is passed in it, the average of the loss has not come half of the way
        up to its limit, and it was not saved in a rise that a rewind has abandoned."""
        for path in reversed(saved(self.checkpoints)):
            done = step_of(path)
            # The one saved right after a rewind has the weights that the rewind has brought back.
            if done > step - HORIZON or any(good < done < rewound for good, rewound in self.abandoned):
                continue
            try:
                content = read(path)
            except (DamagedCheckpoint, OSError) as error:
                tell(f"warning   {error}; an older checkpoint is looked for")
                continue
            state = content["callbacks"][self.state_key]
            average, low = state["average"], state.get("low", state["average"])
            if average is not None and average > (low + self.limits.loss) / 2:
                continue
            model.load_state_dict({k.removeprefix("model."): v for k, v in content["state_dict"].items()})
            if self.passed_limit(model, average) is None:
                return path
        return None


def follow(average: float | None, value: float, memory: float) -> float:
    return value if average is None else memory * average + (1 - memory) * value
