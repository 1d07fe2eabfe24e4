"""Repeats a step of a run, table by table, with the weights that the run had at that step."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from priors.random import STREAM_VERSION
from tabicl_train.config.compose import from_values
from tabicl_train.config.schema import configured_prior
from tabicl_train.console import one_line, text_table
from tabicl_train.doors import plugins
from tabicl_train.errors import ConfigError, wrong_records
from tabicl_train.run import checkpoint
from tabicl_train.run.records import Records
from tabicl_train.stream.curriculum import plan_step, stage_at
from tabicl_train.stream.steps import StepStream, draw_table, pack
from tabicl_train.training.distributed.processes import Launch
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.loop import build_loader
from tabicl_train.training.module import Gradients, TrainedNetwork
from tabicl_train.training.rank_process import device_of, set_up_process
from tabicl_train.training.state import build_module

# Kinds of things in plug-ins that a run may need.
KINDS = ("prior", "network", "scaling", "objective", "optimizer", "schedule", "callback", "suite")
COLUMNS = ("table", "rows", "labeled", "features", "max |x|", "loss", "gradient norm")


def replay(run_dir: str, step: int) -> None:
    """Train in memory from the last checkpoint before a step, and print loss and gradient norm of each of its tables.

    It uses one process. For a run with several processes, the weights are equal up to the order of sums.

    Parameters
    ----------
    run_dir : str
        The run directory.
    step : int
        The step, counted from 0.

    Raises
    ------
    ConfigError
        If the folder has no run, the run has no such step, or its weights cannot be reproduced.
    """
    values, content = find_content(Path(run_dir), step)
    with wrong_records(run_dir):
        config = from_values(replay_values(values, content is not None))
    if not 0 <= step < config.total_steps:
        raise ConfigError([f"step is {step}; the run has steps 0..{config.total_steps - 1}"])
    steps = range(0 if content is None else content["global_step"], step + 1)
    stream = StepStream(configured_prior(config.prior), config.curriculum, config.model, config.seed, steps)
    set_up_process(config.trainer)
    device = device_of(config.trainer, Launch())
    with build_loader(stream, config.stream, device, 1) as loader:
        module, optimizer = build_module(config, content, Ranks(), device)
        for item in loader:
            if item.step == step:
                dissect(module, stream, step)
            module.train_on(item.to(device), item.step, 0, optimizer)
    outcome = "taken" if module.finite else "skipped"
    print(f"all tables: loss {module.loss:.6g}, gradient norm {module.grad_norm:.4g}; the step is {outcome}")


def find_content(run_dir: Path, step: int) -> tuple[dict, dict | None]:
    """Find what a replay needs.

    Parameters
    ----------
    run_dir : Path
        The run directory.
    step : int
        The step to replay.

    Returns
    -------
    values : dict
        The configuration in plain values, from the newest checkpoint if there is one.
    content : dict or None
        The newest checkpoint before the step; None if the replay starts from the beginning.

    Raises
    ------
    ConfigError
        If there is no run, or the step cannot be reproduced.
    """
    # The configuration, and whether tables and plug-ins are still those of the run.
    newest = checkpoint.newest_valid(run_dir / "checkpoints")
    if newest is None:
        values = Records(run_dir).config()
    else:
        path, content = newest
        with wrong_records(path):
            values = content["config"]
            plugins.require(content["run"].get("plugins", []), KINDS, run_dir)
            version = content["run"]["stream_version"]
        if version != STREAM_VERSION:
            why = f"the version of the table stream was {version}, is {STREAM_VERSION}; its tables would differ"
            raise ConfigError([f"{path} cannot be replayed: {why}"])
    if values is None:
        raise ConfigError([f"run_dir is {str(run_dir)!r}; there is no run in it"])

    # The replay begins with the newest checkpoint before the step, which must not be older than a rewind of the guard.
    before = checkpoint.newest_valid(run_dir / "checkpoints", until=step)
    start = None if before is None else before[1]
    first = 0 if start is None else start["global_step"]
    for incident in Records(run_dir).lines("incidents.jsonl"):
        if "back_to" not in incident:
            continue
        rewound_at = incident["step"] + 1  # steps done when the guard went back to an earlier checkpoint
        if first < rewound_at <= step:
            rewind = f"the run went back from step {rewound_at} to {incident['back_to']}"
            raise ConfigError([f"step is {step}; {rewind}, and no checkpoint between then and step {step} is left"])
    return values, start


def replay_values(values: dict, from_checkpoint: bool) -> dict:
    """Return a run's configuration without the devices, files and services that the replay does not need."""
    changes = {
        "trainer": values["trainer"] | {"accelerator": "auto", "devices": None},
        "wandb": values["wandb"] | {"mode": "disabled"},
        "tensorboard": False,
        "stream": {"name": "local"},
    }
    if from_checkpoint:
        changes["init_weights"] = None
    return values | changes


def dissect(module: TrainedNetwork, stream: StepStream, step: int) -> None:
    """Print loss and gradient norm of each table of a step.

    Parameters
    ----------
    module : TrainedNetwork
        The network with its weights before the step.
    stream : StepStream
        The stream of tables.
    step : int
        The step.
    """
    # The settings of the stage, and the state of the weights.
    plan = plan_step(stream.curriculum, stream.model, stream.seed, step, stream.prior)
    _, stage, _ = stage_at(stream.curriculum, step)
    module.set_column_precision(stage)
    non_finite = sum(int((~p.isfinite()).sum()) for p in module.model.parameters())
    print(one_line(f"step {step} (stage {plan.stage}, seed {stream.seed}), {module.precision}"))
    print(f"non-finite weights: {non_finite}")

    # One forward and backward pass for each table alone. Gradients are flat, with the loss as their last value.
    lines = []
    trained = [p for p in module.model.parameters() if p.requires_grad]
    gradients = Gradients(trained, frozen=[])
    for group in plan.groups:
        for index in group.tables:
            table = draw_table(stream.prior, group.spec, stream.seed, plan.step, index)
            gradients.flat.zero_()
            with module.precision.autocast(module.device.type):
                alone = pack([table]).to(module.device)
                loss = module.add_gradients(gradients, alone, 1.0, stage.checkpoint_rows).item()
            norm = (gradients.flat[:-1].norm() / module.loss_scale.scale).item()
            mark = "" if math.isfinite(loss) and math.isfinite(norm) else "<- non-finite"
            largest = table.X[~table.X.isnan()].abs().max().item()
            sizes = [index, table.X.shape[0], table.train_size, table.X.shape[1]]
            lines.append([*sizes, f"{largest:.3g}", f"{loss:.6g}", f"{norm:.4g}", mark])
    print(text_table([*COLUMNS, ""], lines))

    # The weights' .grad are views of the buffer above, so the step must make a new one.
    module.gradients = None
    torch.cuda.empty_cache()
