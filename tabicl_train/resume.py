"""Where a run begins: at step 0, perhaps from given weights, or at its newest checkpoint, if that is of the same run.

Rank 0 reads the files and sends the others what they need. If each rank read them, ranks could find different files (on
a slow shared folder, after a disk error, in another machine's folder) and exchange the gradients of different steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

import priors
from priors.random import STREAM_VERSION
from tabicl_train.config.schema import HARMLESS, default_of, flatten, steps_of_stages
from tabicl_train.console import info
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import family_name
from tabicl_train.model.family import NetworkConfig
from tabicl_train.prediction.export import read_weights
from tabicl_train.prediction.origin import Pretrained
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.records import Records, open_or_empty
from tabicl_train.weights import resolve

OF_A_START = ("trainer.max_steps", "init_weights")  # settings that may always differ
FREE_TO_CHANGE = ("dropout", "checkpoint_rows", "col_attention_fp32", "scaling_bound")  # of a model; its weights fit
NAMED = 5  # differences that a refusal names; others are counted
ROUNDING = ".pack_tokens"  # of a stage: it decides which tables share a pass, which changes the rounding of sums only
STREAM = "the version of the table stream"
REAL_TABLES = "the hash of the real tables"


@dataclass(frozen=True)
class ResumePoint:
    """Where a run begins, as rank 0 has found it."""

    steps: int
    seed: int
    real_tables: str | None = None

    def problems(self, seed: int, real_tables: str | None) -> list[str]:
        """Return why a rank with this seed, which sees these real tables, cannot take part."""
        problems = [f"seed is {seed}, that of rank 0 {self.seed}"] if seed != self.seed else []
        if real_tables != self.real_tables:
            problems.append("the real tables of the prior are others than on rank 0")
        return problems


def find_resume_point(values: dict, real_tables: str | None) -> tuple[ResumePoint, dict | None]:
    """Find where a run begins, and the content of its newest intact checkpoint, if any."""
    # values: the configuration as plain values; real_tables: the hash of the real tables of its prior. Raises
    # ConfigError if the run directory belongs to another run, or if its checkpoints are gone.
    folder = Path(values["run_dir"])
    newest = checkpoint.newest_valid(folder / "checkpoints")
    if newest is None:
        check_beginning(folder, values["seed"])
        return ResumePoint(0, values["seed"], real_tables), None
    _, content = newest
    refuse_changes(content, values, real_tables)
    return ResumePoint(content["global_step"], values["seed"], real_tables), content


def check_beginning(folder: Path, seed: int) -> None:
    """Refuse to start at step 0 if the records of the run directory name a saved checkpoint or another seed."""
    records = Records(folder)
    over = "to start over, name another run_dir or remove this one"
    if saved := (records.json("status.json") or {}).get("saved"):
        raise ConfigError([f"{folder} lacks the checkpoint of step {saved}, which status.json names; {over}"])
    with open_or_empty(folder / "config.yaml") as file:
        recorded = yaml.safe_load(file) or {}
    if recorded.get("seed", seed) != seed:
        raise ConfigError([f"{folder} holds a run with seed={recorded['seed']}, not {seed}; {over}"])


def refuse_changes(content: dict, values: dict, real_tables: str | None = None) -> None:
    """Print which settings differ from those of a checkpoint, and refuse those that make it another run."""
    # A stage that has not started may change, and stages may follow the last one.
    saved, made = content["config"], content["run"]
    before, now = compared(saved), compared(values)
    before |= {STREAM: made["stream_version"], REAL_TABLES: made.get("real_tables")}
    now |= {STREAM: STREAM_VERSION, REAL_TABLES: real_tables}
    differing = [key for key in sorted(before | now) if key not in before or key not in now or before[key] != now[key]]
    lengths = {name: stage["steps"] for name, stage in saved["curriculum"]["stages"].items()}
    started, stages = list(steps_of_stages(lengths, content["global_step"])), list(values["curriculum"]["stages"])
    # The settings of a stage or prior that was added or removed are left out; its name is enough.
    sets = [f"curriculum.stages.{name}." for name in lengths.keys() ^ set(stages)]
    sets += ["prior."] * (before["prior.name"] != now["prior.name"])
    changed = [
        key
        for key in differing
        if key == "prior.name" or (not key.startswith((*HARMLESS, *sets)) and key not in OF_A_START)
    ]
    order = ["model.family", "prior.name", "seed", STREAM, REAL_TABLES, "model.", "optimizer.name", "prior."]
    order += [f"curriculum.stages.{name}." for name in started]
    breaking = [key for key in changed if key.startswith(tuple(order)) and not key.endswith(ROUNDING)]
    breaking.sort(key=lambda key: [key.startswith(start) for start in order].index(True))
    problems = [change(key, before, now) for key in breaking]
    if stages[: len(started)] != started:
        problems.insert(1, f"its stages {', '.join(started)} have started; this command has {', '.join(stages)}")
    if len(problems) > NAMED + 1:
        problems[NAMED:] = [f"{len(problems) - NAMED} more settings differ"]
    other_model = [
        key for key in changed if key.startswith("model.") and key.removeprefix("model.") not in FREE_TO_CHANGE
    ]
    if problems and (other_model or not values["resume"]["allow_changes"]):
        advice = "choose a new run_dir" + ("" if other_model else ", or set resume.allow_changes=true")
        raise ConfigError([f"{values['run_dir']} is another run: {problem}; {advice}" for problem in problems])
    if list(lengths) != stages:
        info(f"changed   the stages were {', '.join(lengths)}, are {', '.join(stages)}")
    for key in changed:
        info(f"changed   {change(key, before, now)}")
    if values["init_weights"] not in (None, saved["init_weights"]):
        info(
            f"warning   init_weights={values['init_weights']} has no effect: the run continues from its own checkpoint"
        )


def compared(values: dict) -> dict[str, Any]:
    """Flatten a configuration to dotted names, with the defaults of its prior's options."""
    return flatten(values | {"prior": completed(values["prior"], prior_defaults(values["prior"]["name"]))})


def prior_defaults(name: str) -> dict[str, Any]:
    """Return the defaults of a prior's options; none of a prior that is not installed."""
    try:
        options = [field for field in dataclasses.fields(priors.prior_class(name)) if field.init]
    except priors.PriorError:
        return {}
    defaults = {field.name: default_of(field) for field in options}
    return {
        name: dataclasses.asdict(default) if dataclasses.is_dataclass(type(default)) else default
        for name, default in defaults.items()
        if default is not dataclasses.MISSING
    }


def completed(values: dict, defaults: dict) -> dict:
    """Fill in the defaults of missing values, at any depth."""
    both = values.keys() & defaults.keys()
    deeper = {key for key in both if isinstance(values[key], dict) and isinstance(defaults[key], dict)}
    return {**defaults, **values, **{key: completed(values[key], defaults[key]) for key in deeper}}


def change(key: str, before: dict, now: dict) -> str:
    """Describe the change of a setting."""
    if key not in now:
        return f"{key} was {before[key]}; there is no such setting now"
    text = f"{key} was {before.get(key, 'not set')}, is {now[key]}"
    if key == "model.max_classes" and 0 in (before.get(key), now[key]):
        was, trains = ("a classifier", "a regressor") if now[key] == 0 else ("a regressor", "a classifier")
        return f"it trains {was}, and this configuration {trains}, whose labels are read by other weights ({text})"
    return text


def initial_weights(path: str, model: NetworkConfig) -> Pretrained:
    """Read the weights of the run, checkpoint, export or name that `init_weights` gives."""
    # A network that sees missing values may start from one that saw their means: its tokens for them begin as zeros.
    try:
        pretrained = read_weights(resolve(path, model.is_regression))
    except ConfigError as error:
        raise ConfigError([f"init_weights: {problem}" for problem in error.problems]) from None
    file_config, weights = pretrained.config, pretrained.tensors
    names = [family_name(type(settings)) for settings in (file_config, model)]
    if names[0] != names[1]:
        raise ConfigError(["init_weights: the file's model is of the family {}; this run trains {}".format(*names)])
    if file_config.is_regression != model.is_regression:
        kinds = ("a classifier", "a regressor") if model.is_regression else ("a regressor", "a classifier")
        why = "whose labels are read by other weights"
        raise ConfigError([f"init_weights: the file's model is {kinds[0]}; this run trains {kinds[1]}, {why}"])
    free: tuple[str, ...] = FREE_TO_CHANGE
    if model.missing_values and not file_config.missing_values:
        free, name = (*free, "missing_values"), "col_embedder.missing_values"
        weights = weights | {name: torch.zeros_like(weights["col_embedder.in_linear.weight"])}
    different = [
        f"model.{key}={value}"
        for key, value in dataclasses.asdict(file_config).items()
        if key not in free and getattr(model, key) != value
    ]
    if different:
        setting = model_name(file_config) or " ".join(different)
        raise ConfigError([f"init_weights: its network is another one than the configuration's; set {setting}"])
    return dataclasses.replace(pretrained, tensors=weights)


def model_name(settings: NetworkConfig) -> str | None:
    """Return model=NAME of the configuration file that describes a network; None if there is none."""
    from tabicl_train.config.compose import Composer  # slow to import, and only this error needs it

    composer = Composer()
    for name in composer.choices["model"]:
        with contextlib.suppress(ConfigError):  # some need a certain prior
            if composer.compose([f"model={name}"]).model == settings:
                return f"model={name}"
    return None
