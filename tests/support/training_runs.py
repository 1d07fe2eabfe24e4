"""Runs of the tests: three ways to get the folder of one, and what reads and compares such folders.

train_by_command     the whole command tabicl-train, in this process
train_short_run      training alone, on few small tables, with callbacks of the test beside those of training
write_untrained_run  no training: a folder with random weights
"""

import contextlib
import csv
import dataclasses
import functools
import math
from pathlib import Path
from unittest import mock

import torch
from command_line import command
from networks import randomize

from priors.random import STREAM_VERSION
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.run.checkpoint import saved
from tabicl_train.run.records import Records
from tabicl_train.training import loop
from tabicl_train.training.state import untrained_module

SHORT_RUN_OF_ANY_FAMILY = [  # one stage of 16 steps, each of two groups of two tables
    "experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=16",
    "checkpoint.every=4", "trainer.accelerator=cpu", "averages.ema=0.9", "curriculum.stages.smoke.tables=4",
    "curriculum.stages.smoke.group_size=2",
]  # fmt: skip
SHORT_RUN = [*SHORT_RUN_OF_ANY_FAMILY, "model.row_num_blocks=1", "model.icl_num_blocks=1"]
THREE_STAGES = [  # of six steps each
    "experiment=smoke", "curriculum=tabicl_v2", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu",
    "checkpoint.every=2", "checkpoint.keep=100", *(
        f"curriculum.stages.stage{number}.{value}" for number in (1, 2, 3)
        for value in ("steps=6", "rows=[30,50]", "features=[2,4]", "tables=4", "group_size=4", "warmup=0")
    ),
]  # fmt: skip
REWIND = ("guard.after=3", "guard.loss=10", "guard.action=rewind", "checkpoint.keep=9")
SMALLEST_MODEL = [f"model.{name}" for name in (
    "embed_dim=16", "col_num_blocks=1", "col_num_heads=2", "col_num_inducing=4", "row_num_blocks=1", "row_num_heads=2",
    "row_num_cls=2", "icl_num_blocks=2", "icl_num_heads=2",
)]  # fmt: skip
UNTRAINED_STEP = 10  # of write_untrained_run
EXACT = ("step", "stage", "loss", "guess_loss", "grad_norm", "lr", "skipped")  # columns of metrics.csv but for timings


# Training


def train_by_command(run_dir: Path, *overrides: str, code: int = 0) -> str:
    """tabicl-train, which must end with this exit code; returns its stderr."""
    result = command("train", "experiment=smoke", f"run_dir={run_dir}", *overrides)
    assert result.returncode == code, result.stderr
    return result.stderr


def train_short_run(run_dir: Path, *overrides: str, callbacks: tuple = (), settings: list[str] = SHORT_RUN) -> str:
    """Train with these callbacks beside those of training; returns how the run has ended."""
    return loop.train(compose([*settings, f"run_dir={run_dir}", *overrides]), callbacks)


def extra_callbacks(*callbacks) -> contextlib.AbstractContextManager:
    """Within the context a command trains with these callbacks beside its own."""
    return mock.patch.object(loop, "train", functools.partial(loop.train, callbacks=callbacks))


class Poison:
    """An infinite cell in the given steps; keeps weights and optimizer state of every step."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps
        self.states = []

    def before_step(self, state, item) -> None:
        if item.step in self.steps:
            item.packs[-1].X[0] = math.inf

    def after_step(self, state, item) -> None:
        weights = [parameter.detach().clone() for parameter in state.network.parameters()]
        moments = [moment.clone() for moments in state.optimizer.state.values() for moment in moments.values()]
        self.states.append(weights + moments)


class Ruin:
    """Weights far too large after a step, once, and a loss scale of 2."""

    def __init__(self, after: int) -> None:
        self.after = after

    def before_step(self, state, item) -> None:
        if item.step == self.after:
            state.module.loss_scale.scale.fill_(2)
            with torch.no_grad():
                for parameter in state.network.icl_predictor.decoder.parameters():
                    parameter.mul_(100)


# A folder without training


def write_untrained_run(folder: Path, *overrides: str) -> dict[str, dict[str, torch.Tensor]]:
    """Write the folder of a run after step 10, whose best weights are from step 5, with random weights.

    Returns the weights of each kind: trained, best and ema.
    """
    config = compose(["experiment=smoke", f"run_dir={folder}", *SMALLEST_MODEL, *overrides])
    trained = random_weights(config, seed=0)
    ema = without_prefix(random_weights(config, seed=1))
    best = random_weights(config, seed=4)
    start = {
        "commit": "c0ffee",
        "diff": "+ x",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "command": ["tabicl-train", "seed=0", "run_dir=/x"],
    }

    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    content = {
        "config": dataclasses.asdict(config),
        "callbacks": {"Averages": {"ema": ema, "since": 0}},
    }
    torch.save(
        content
        | {
            "global_step": UNTRAINED_STEP,
            "state_dict": trained,
            "run": start | {"stream_version": STREAM_VERSION},
        },
        checkpoints / f"step-{UNTRAINED_STEP:08d}.ckpt",
    )
    torch.save(content | {"global_step": 5, "state_dict": best}, checkpoints / "best.ckpt")

    records = Records(folder)
    records.append_line("provenance.jsonl", {"step": 0} | start | {"commit": "first", "diff": ""})
    records.append_line("provenance.jsonl", {"step": 5} | start)
    for step in (5, UNTRAINED_STEP):
        is_best = int(step == 5)
        records.append_rows(
            "validation.csv",
            {"step": step, "data": "synthetic", "rows": 64, "loss": step / 8, "accuracy": 0.5, "roc_auc": None,
             "is_best": is_best},
            {"step": step, "data": "iris", "rows": 60, "loss": 1.5, "accuracy": 0.5, "roc_auc": step / 16,
             "is_best": is_best},
        )  # fmt: skip

    return {"trained": without_prefix(trained), "best": without_prefix(best), "ema": ema}


def random_weights(config: RunConfig, seed: int) -> dict[str, torch.Tensor]:
    module = untrained_module(dataclasses.replace(config, seed=seed))
    randomize(module)
    return module.state_dict()


def without_prefix(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a module under the names that the network has for them."""
    return {name.removeprefix("model."): weight for name, weight in weights.items()}


# What a run has written


def read_rows(path: Path) -> list[dict]:
    """The rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read_metrics(run_dir: Path) -> list[dict]:
    return read_rows(run_dir / "metrics.csv")


def read_exact_metrics(run_dir: Path) -> list[tuple]:
    """What metrics.csv has of each step, but for the timings."""
    return [tuple(row[column] for column in EXACT) for row in read_metrics(run_dir)]


def last_checkpoint(run_dir: Path) -> dict:
    """The content of the newest checkpoint."""
    return torch.load(saved(run_dir / "checkpoints")[-1], weights_only=True)


def assert_same_state(a, b) -> None:
    """Equal bit for bit: tensors, numbers, texts, and dictionaries and lists of these."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_state(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_state(x, y)
    else:
        assert a == b


def assert_same_end(run_dir: Path, other: Path) -> None:
    """Loss and gradient norm of every step, and the weights and optimizer state at the end, bit for bit."""
    assert read_exact_metrics(run_dir) == read_exact_metrics(other)
    checkpoint, expected = last_checkpoint(run_dir), last_checkpoint(other)
    for part in ("state_dict", "optimizer_states"):
        assert_same_state(checkpoint[part], expected[part])
