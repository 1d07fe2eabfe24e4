"""Keeping a run from being ruined: steps that are not finite, losses that rise, multipliers that run away.

The module leaves out a step whose loss or gradient norm is not finite, on all ranks; here it is written down. The two
limits are those that worked in a published run of 500,000 steps on one GPU; see GuardConfig.
"""

from __future__ import annotations

import math
import time

import lightning as L
import torch

from tabicl_train.averages import Averages
from tabicl_train.checkpoint import CheckpointFiles, DamagedCheckpoint, read, saved, step_of
from tabicl_train.config import RunConfig
from tabicl_train.curriculum import plan_step, stage_at
from tabicl_train.messages import tell
from tabicl_train.metrics import is_logged
from tabicl_train.module import Pretraining
from tabicl_train.records import Records
from tabicl_train.stream import StepItem

MEMORY = 0.99  # of the moving average of the loss: half of its weight is on the last 69 steps
HORIZON = 100  # steps that the moving average looks back; a good checkpoint is older than a rise that it shows
MULTIPLIER_AT = 512  # labelled rows, at which the limit of the multiplier was published


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
        self.skipped = self.in_a_row = self.longest = self.rewinds = 0
        self.warned: str | None = None

    def state_dict(self) -> dict:
        self.look()
        return {key: getattr(self, key) for key in ("average", "skipped", "in_a_row", "longest", "rewinds")}

    def load_state_dict(self, state: dict) -> None:
        for key, value in state.items():
            setattr(self, key, value)

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
                self.average = loss if self.average is None else MEMORY * self.average + (1 - MEMORY) * loss
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
        line |= {"replay": f"tabicl-replay run={self.config.run_dir} step={step}", "micro_batches": batches}
        self.records.append_line("incidents.jsonl", {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **line})

    def judge(self, trainer: L.Trainer, module: Pretraining) -> None:
        limits = self.limits
        for count, most, what in (
            (self.longest, limits.skipped_in_a_row, "steps in a row"),
            (self.skipped, limits.skipped, "steps"),
        ):
            if count >= most:
                raise Diverged(
                    f"loss or gradient norm was not finite in {count} {what}, the last ones before step "
                    f"{trainer.global_step}; {self.records.folder}/incidents.jsonl names them. Replay one; lower the "
                    "learning rate or use trainer.precision=fp32, and continue from an earlier checkpoint"
                )
        reason = self.passed_limit(module) if trainer.global_step >= limits.after else None
        if reason is None:
            self.warned = None
            return
        action = limits.action
        if action == "rewind" and self.rewinds >= limits.rewinds:
            action, reason = "stop", f"{reason}, after {self.rewinds} rewinds"
        if action == "warn" and self.warned is not None:
            return
        self.warned = reason
        self.report(trainer.global_step - 1, reason, action=action)
        tell(f"guard     step {trainer.global_step}: {reason}; {action}")
        if action == "stop":
            raise Diverged(
                f"step {trainer.global_step}: {reason}. Lower the learning rate, raise the stage's weight_decay, bound "
                "the multiplier (model.scaling_bound), or set guard.action=rewind"
            )
        if action == "rewind":
            self.rewind(trainer, module)

    def passed_limit(self, module: Pretraining) -> str | None:
        limits, average = self.limits, self.average
        if average is None:
            return None
        if average > limits.loss:
            return f"the moving average of the loss is {average:.3f}, above guard.loss={limits.loss}"
        scaling = dict(module.model.named_scalings()).get("icl.0")
        if scaling is None or average <= limits.multiplier_loss:
            return None
        multiplier = scaling.multipliers(MULTIPLIER_AT).abs().max().item()
        if multiplier <= limits.multiplier:
            return None
        return (
            f"the multiplier of icl.0 at {MULTIPLIER_AT} labelled rows is {multiplier:.1f}, above "
            f"guard.multiplier={limits.multiplier}, and the moving average of the loss {average:.3f}"
        )

    def rewind(self, trainer: L.Trainer, module: Pretraining) -> None:
        """Weights and optimiser as they were at the last good checkpoint; the steps since then count as done, so
        their tables are not seen again."""
        self.files.wait()
        trainer.strategy.barrier("rewind")
        step = trainer.global_step
        good = self.last_good(step)
        if good is None:
            raise Diverged(f"step {step}: {self.warned}; there is no checkpoint from before that to go back to")
        weights = {k.removeprefix("model."): v for k, v in good["state_dict"].items()}
        module.model.load_state_dict(weights)
        optimizer = trainer.optimizers[0]
        optimizer.load_state_dict(good["optimizer_states"][0])
        name, stage, _ = stage_at(self.config.curriculum, step - 1)
        if good["run"]["stage"] != name and stage.fresh_optimizer:
            optimizer.state.clear()
        for callback in trainer.callbacks:
            if isinstance(callback, Averages):
                callback.load_state_dict(good["callbacks"][callback.state_key])
        self.average = good["callbacks"][self.state_key]["average"]
        self.rewinds += 1
        tell(f"guard     back to the weights of step {good['global_step']}; steps up to {step} are skipped")

    def last_good(self, step: int) -> dict | None:
        for path in reversed(saved(self.checkpoints)):
            if step_of(path) > step - HORIZON:
                continue
            try:
                content = read(path)
            except DamagedCheckpoint as error:
                tell(f"warning   {error}")
                continue
            average = content["callbacks"][self.state_key]["average"]
            if average is None or average <= self.limits.loss:
                return content
        return None
