"""Keeps a run from being ruined by non-finite steps, a rising loss, or a multiplier that runs away.

If loss or gradient norm is non-finite on any rank, all ranks skip the step: the module does, and the guard records it.
The two limits are those that worked in a published run of 500,000 steps on one GPU; see GuardConfig.
"""

from __future__ import annotations

import math
import shlex
import time

import torch

from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.checkpoints import CheckpointFiles
from tabicl_train.callbacks.metrics import Metrics, is_logged
from tabicl_train.config.schema import RunConfig
from tabicl_train.console import counted, info
from tabicl_train.curriculum import plan_step
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.model.family import Network
from tabicl_train.model.scaling import Scaling
from tabicl_train.module import Pretraining
from tabicl_train.optimizer import MuonAdamW
from tabicl_train.run_dir.checkpoint import DamagedCheckpoint, read, saved, step_of
from tabicl_train.run_dir.records import Records
from tabicl_train.stream import StepItem

MEMORY = 0.99  # decay of the moving average of the loss: half of its weight is on the last 69 steps
LOW_MEMORY = 0.999  # decay of its low: the distance to an average that stays higher halves within 693 steps
HORIZON = 100  # steps; a rise shows in the moving average that late, so a good checkpoint must be older
MULTIPLIER_AT = 512  # labeled rows for which the limit of the multiplier was published
STATE = ("average", "low", "skipped", "in_a_row", "abandoned")


class Diverged(Exception):
    """A run that was stopped because it no longer learns; the message says why and what to try."""


class Guard:
    """At logged steps and before a save, reads loss and gradient norm of the steps since the last time.

    incidents.jsonl: a line per incident, with the address of the step and the shapes of its tables.
    """

    def __init__(
        self,
        config: RunConfig,
        records: Records,
        files: CheckpointFiles,
        ranks: Ranks,
        averages: Averages,
        metrics: Metrics,
    ) -> None:
        self.config, self.limits, self.files, self.ranks = config, config.guard, files, ranks
        self.averages, self.metrics = averages, metrics  # which a rewind takes back too
        self.records, self.checkpoints = records, records.folder / "checkpoints"
        self.writes = ranks.rank == 0
        self.unread: list[tuple[int, torch.Tensor]] = []
        self.average: float | None = None  # of the loss
        self.low: float | None = None  # follows the average down immediately, and up slowly
        self.skipped = self.in_a_row = 0  # non-finite steps: all of them, and the last consecutive ones
        self.longest = 0  # most consecutive ones since the last call of `judge`, which resets it; not in checkpoints
        self.abandoned: list[list[int]] = []  # per rewind: the step of its checkpoint, and the steps done before it
        self.warned: str | None = None

    def state_dict(self) -> dict:
        self.look()
        return {key: getattr(self, key) for key in STATE}

    def load_state_dict(self, state: dict) -> None:
        for key in STATE:
            setattr(self, key, state.get(key, getattr(self, key)))

    def on_train_batch_end(self, step: int, item: StepItem, module: Pretraining, optimizer: MuonAdamW, **_) -> None:
        scale = module.loss_scale.scale if module.loss_scale.enabled else module.loss.new_zeros(())
        self.unread.append((item.step, torch.stack([module.loss, module.grad_norm, scale])))
        if is_logged(self.config, step):
            self.look()
            self.judge(step, module, optimizer)

    def look(self) -> None:
        """Evaluate the steps since the last call."""
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
                continue  # fp16 is searching for its loss scale
            self.skipped += 1
            what = "gradient norm" if math.isfinite(loss) else "loss"
            self.report(step, f"the {what} is not finite", loss=repr(loss), grad_norm=repr(norm))
        self.unread.clear()

    def report(self, step: int, reason: str, **facts) -> None:
        """Write a line of incidents.jsonl: the step's address, the shapes of its tables, and facts."""
        if not self.writes:
            return
        plan = plan_step(self.config.curriculum, self.config.model, self.config.seed, step)
        groups = [
            {
                "tables": list(group.tables),
                "rows": group.spec.num_rows,
                "train_size": group.spec.train_size,
                "features": group.spec.num_features,
            }
            for group in plan.groups
        ]
        line = {"step": step, "stage": plan.stage, "seed": self.config.seed, "reason": reason, **facts}
        command = shlex.join(["tabicl-replay", f"run_dir={self.config.run_dir}", f"step={step}"])
        line |= {"replay": command, "groups": groups}
        self.records.append_line("incidents.jsonl", {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **line})

    def judge(self, step: int, module: Pretraining, optimizer: MuonAdamW) -> None:
        limits = self.limits
        for count, most, what in (
            (self.longest, limits.skipped_in_a_row, "steps in a row"),
            (self.skipped, limits.skipped, "steps"),
        ):
            if self.longest and count >= most:  # steps that were judged before do not stop the run again
                raise Diverged(
                    f"loss or gradient norm was not finite in {count} {what}, the last ones before step "
                    f"{step}; {self.records.folder}/incidents.jsonl names them. Lower the learning "
                    "rate or use trainer.precision=fp32, and begin a new run from an earlier checkpoint "
                    "(init_weights=CHECKPOINT run_dir=...); tabicl-replay shows the tables of a step"
                )
        self.longest = 0
        reason = self.passed_limit(module.model, self.average) if step >= limits.after else None
        if reason is None:
            self.warned = None
            return
        action, good, facts = limits.action, None, {}
        if action == "rewind" and len(self.abandoned) >= limits.rewinds:
            action, reason = "stop", f"{reason}, after {counted(len(self.abandoned), 'rewind')}"
        elif action == "rewind" and (good := self.last_good(step, module.model)) is None:
            action, reason = "stop", f"{reason}, and there is no checkpoint from before that to go back to"
        elif action == "rewind":
            facts["back_to"] = good["global_step"]
        if action == "warn" and self.warned is not None:
            return
        self.warned = reason
        self.report(step - 1, reason, action=action, **facts)
        info(f"guard     step {step}: {reason}; {action}")
        if action == "stop":
            raise Diverged(
                f"step {step}: {reason}. Lower the learning rate, raise the stage's weight_decay, bound "
                "the multiplier (model.scaling_bound), or set guard.action=rewind"
            )
        if good is not None:
            self.rewind(step, module, optimizer, good)

    def passed_limit(self, model: Network, average: float | None) -> str | None:
        limits = self.limits
        if average is None:
            return None
        if average > limits.loss:
            return f"the moving average of the loss is {average:.3f}, above guard.loss={limits.loss}"
        scaling = dict(model.named_scalings()).get("icl.0")
        if not isinstance(scaling, Scaling) or average <= limits.multiplier_loss:  # b of SSA counts by its logarithm
            return None
        multiplier = scaling.multipliers(MULTIPLIER_AT).abs().max().item()
        if multiplier <= limits.multiplier:
            return None
        return (
            f"the multiplier of icl.0 at {MULTIPLIER_AT} labeled rows is {multiplier:.1f}, above "
            f"guard.multiplier={limits.multiplier}, and the moving average of the loss {average:.3f}"
        )

    def rewind(self, step: int, module: Pretraining, optimizer: MuonAdamW, good: dict) -> None:
        """Restore weights and optimizer from a checkpoint. The steps since then count as done: their tables are not
        used again."""
        module.go_back(good, step, optimizer)
        for callback in (self.averages, self.metrics):
            callback.load_state_dict(good["callbacks"].get(type(callback).__name__, {}))
        state = good["callbacks"]["Guard"]
        self.average, self.low = state["average"], state.get("low")
        self.abandoned.append([good["global_step"], step])
        info(f"guard     back to the weights of step {good['global_step']}; steps up to {step} are skipped")

    def last_good(self, step: int, model: Network) -> dict | None:
        """The content of the checkpoint to go back to, which rank 0 chooses, reads, and sends to the others.

        Leaves the model of rank 0 with arbitrary weights.
        """
        self.files.wait()
        return self.ranks.from_first(lambda: self.choose(step, model))

    def choose(self, step: int, model: Network) -> dict | None:
        """The content of the newest good checkpoint.

        In a good one no limit is passed, the average of the loss has risen less than halfway from its low to its limit,
        and it was not saved during a rise that a rewind has abandoned.
        """
        for path in reversed(saved(self.checkpoints)):
            done = step_of(path)
            # A checkpoint saved right after a rewind has the weights that the rewind has restored.
            if done > step - HORIZON or any(good < done < rewound for good, rewound in self.abandoned):
                continue
            try:
                content = read(path)
            except (DamagedCheckpoint, OSError) as error:
                info(f"warning   {error}; trying an older checkpoint")
                continue
            state = content["callbacks"]["Guard"]
            average, low = state["average"], state.get("low", state["average"])
            if average is not None and average > (low + self.limits.loss) / 2:
                continue
            model.load_state_dict({k.removeprefix("model."): v for k, v in content["state_dict"].items()})
            if self.passed_limit(model, average) is None:
                return content
        return None


def follow(average: float | None, value: float, memory: float) -> float:
    return value if average is None else memory * average + (1 - memory) * value
