"""Repeats a step of a run, table by table, with the weights that the run had at that step."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
import yaml

from priors.random import STREAM_VERSION
from tabicl_train.callbacks.checkpoints import to_host
from tabicl_train.config.compose import from_values
from tabicl_train.config.schema import CurriculumConfig, RunConfig, StageConfig, build_prior, flatten
from tabicl_train.console import text_table
from tabicl_train.curriculum import plan_step, stage_at
from tabicl_train.distributed.launch import Launch
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.errors import ConfigError
from tabicl_train.gradients import Gradients
from tabicl_train.model.families import settings_of
from tabicl_train.module import Pretraining
from tabicl_train.optimizer import MuonAdamW
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.changes import STREAM, change, up_to_date
from tabicl_train.run_dir.records import Records
from tabicl_train.stream import StepItem, draw_table, pack
from tabicl_train.train import build_loader, build_stream, device_of, open_fabric, run_steps

COLUMNS = ("table", "rows", "labeled", "features", "max |x|", "loss", "gradient norm")


def replay(run_dir: str, step: int) -> None:
    """Train in memory from the newest checkpoint before the step, and print loss and gradient norm of all its tables.

    It uses one process; for a run of several processes, the weights are equal up to the order of sums. Raises
    ConfigError if the folder holds no run, if the run has no such step, or if this version cannot repeat it.
    """
    folder = Path(run_dir) / "checkpoints"
    newest = checkpoint.newest_valid(folder) or without_checkpoint(Path(run_dir))
    rewinds = [(good, at) for good, at in rewinds_of(Path(run_dir), newest[1]) if at <= step]
    start, first = newest_before(folder, step, rewinds)
    path, content = start or newest
    if problems := version_problems(content):
        raise ConfigError([f"{path} cannot be replayed: {problem}" for problem in problems])
    config = from_values(replay_values(content["config"], start is not None))
    if not 0 <= step < config.total_steps:
        raise ConfigError([f"step is {step}; the run has steps 0..{config.total_steps - 1}"])
    ahead = [(good, at) for good, at in rewinds if at > first]
    launch, ranks, steps = Launch(), Ranks(), range(first, step + 1)
    stream = build_stream(config, build_prior(config.prior), steps, launch)
    with build_loader(stream, config.stream, device_of(config.trainer, launch), launch) as loader:
        fabric = open_fabric(config.trainer, launch, ranks, [])
        run_steps(config, content if start else None, steps, Dissection(config, step, ahead), ranks, fabric, loader)


def without_checkpoint(run_dir: Path) -> tuple[Path, dict]:
    """What a checkpoint would say of a run that ended before its first one."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError([f"run_dir is {str(run_dir)!r}; there is no run in it"])
    values = up_to_date(yaml.safe_load(path.read_text()))
    return path, {"config": values, "run": {"stream_version": STREAM_VERSION}, "callbacks": {"Guard": {}}}


def version_problems(content: dict) -> list[str]:
    """Why this version of the program cannot repeat the steps of a checkpoint's run."""
    values = content["config"]
    before = flatten(values)
    stages = {name: StageConfig(mix=stage.get("mix", {})) for name, stage in values["curriculum"]["stages"].items()}
    model = settings_of(values["model"])()
    known = flatten(dataclasses.asdict(RunConfig(model=model, curriculum=CurriculumConfig(stages))))
    problems = [
        change(key, before, known)
        for key in before
        if key not in known and not key.startswith("prior.")  # which checks its options by itself
    ]
    if (version := content["run"].get("stream_version", 1)) != STREAM_VERSION:
        problems.append(f"{STREAM} was {version}, is {STREAM_VERSION}; its tables would be others")
    return problems


def replay_values(values: dict, from_checkpoint: bool) -> dict:
    """A run's configuration without the devices, files and services that the replay does not need."""
    values = values | {"init_weights": None} if from_checkpoint else values
    trainer = values["trainer"] | {"accelerator": "auto", "devices": None}
    return values | {
        "trainer": trainer,
        "wandb": values["wandb"] | {"mode": "disabled"},
        "tensorboard": False,
        "stream": {"name": "local"},
    }


def newest_before(folder: Path, step: int, rewinds: list[tuple[int, int]]) -> tuple[tuple[Path, dict] | None, int]:
    """The newest checkpoint before a step, if any, and its number of steps; not one that a rewind discarded."""
    while (start := checkpoint.newest_valid(folder, until=step)) is not None:
        first = checkpoint.step_of(start[0])
        rewound_to = [good for good, at in rewinds if good < first < at]
        if not rewound_to:
            return start, first
        step = min(rewound_to)
    return None, 0


def rewinds_of(run_dir: Path, newest: dict) -> list[tuple[int, int]]:
    """(good, at) for each rewind, in order: after `at` steps the run went back to its checkpoint of `good` steps.

    The newest checkpoint lists the rewinds before it, incidents.jsonl also those since.
    """
    rewinds = {(good, at) for good, at in newest["callbacks"]["Guard"].get("abandoned", [])}
    for incident in Records(run_dir).lines("incidents.jsonl"):
        if "back_to" in incident:
            rewinds.add((incident["back_to"], incident["step"] + 1))
    return sorted(rewinds, key=lambda rewind: rewind[1])


class Dissection:
    """Prints loss and gradient norm of each table of a step, and rewinds wherever the run was rewound before it."""

    def __init__(self, config: RunConfig, step: int, rewinds: list[tuple[int, int]]) -> None:
        self.config, self.step, self.rewinds = config, step, rewinds
        self.checkpoints: dict[int, dict] = {}  # those that the run went back to, by number of steps

    def rewind(self, item: StepItem, module: Pretraining, optimizer: MuonAdamW) -> None:
        for good, at in self.rewinds:
            if item.step == at:
                module.go_back(to_host(self.checkpoints[good]), at, optimizer)
                print(f"the run went back from step {at} to the weights of step {good}")
        if item.step in {good for good, _ in self.rewinds}:
            content = {
                "global_step": item.step,
                "config": dataclasses.asdict(self.config),
                "state_dict": module.state_dict(),
                "optimizer_states": [optimizer.state_dict()],
            }
            module.on_save_checkpoint(content)
            self.checkpoints[item.step] = to_host(content)
        if any(good <= item.step < at for good, at in self.rewinds):
            item.packs.clear()  # the rewind discards what the step would do

    def on_train_batch_start(self, item: StepItem, module: Pretraining, optimizer: MuonAdamW, **_) -> None:
        self.rewind(item, module, optimizer)
        if item.step != self.step:
            return
        config, plan = self.config, plan_step(self.config.curriculum, self.config.model, self.config.seed, self.step)
        non_finite = sum(int((~p.isfinite()).sum()) for p in module.model.parameters())
        print(f"step {self.step} (stage {plan.stage}, seed {config.seed}), {module.precision}")
        print(f"non-finite weights: {non_finite}")
        lines = []
        gradients = Gradients([p for p in module.model.parameters() if p.requires_grad], [])
        prior = build_prior(config.prior)
        _, stage, _ = stage_at(config.curriculum, self.step)
        for group in plan.groups:
            for index in group.tables:
                table = draw_table(prior, group.spec, config.seed, self.step, index)
                alone = pack([table]).to(module.device)
                gradients.flat.zero_()
                with module.precision.autocast(module.device.type):
                    loss = module.add_gradients(gradients, alone, 1.0, stage.checkpoint_rows).item()
                norm = (gradients.flat[:-1].norm() / module.loss_scale.scale).item()
                mark = "" if math.isfinite(loss) and math.isfinite(norm) else "<- non-finite"
                largest = table.X[~table.X.isnan()].abs().max().item()
                sizes = [index, table.X.shape[0], table.train_size, table.X.shape[1]]
                lines.append([*sizes, f"{largest:.3g}", f"{loss:.6g}", f"{norm:.4g}", mark])
        print(text_table([*COLUMNS, ""], lines))
        module.gradients = None  # the step makes its own buffer: the one above has taken over the .grad of the weights
        torch.cuda.empty_cache()

    def on_train_batch_end(self, item: StepItem, module: Pretraining, **_) -> None:
        if item.step == self.step:
            outcome = "taken" if module.finite else "skipped"
            print(f"all tables: loss {module.loss:.6g}, gradient norm {module.grad_norm:.4g}; the step is {outcome}")
