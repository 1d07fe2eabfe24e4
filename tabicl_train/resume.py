"""Where a run begins: at step 0, perhaps from given weights, or at its newest checkpoint, if that is of the same run.

Rank 0 reads the files and sends the others what they need. If each rank read them, ranks could find different files (on
a slow shared folder, after a disk error, in another machine's folder) and exchange the gradients of different steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

import priors
from priors.random import STREAM_VERSION
from tabicl_train.config.schema import (
    HARMLESS,
    CurriculumConfig,
    StageConfig,
    default_of,
    flatten,
    steps_of_stages,
)
from tabicl_train.console import info
from tabicl_train.curriculum import learning_rate, stage_at
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import family_name
from tabicl_train.model.family import NetworkConfig
from tabicl_train.prediction.export import read_weights
from tabicl_train.prediction.origin import Pretrained
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.records import Records
from tabicl_train.weights import resolve

OF_A_START = ("trainer.max_steps", "init_weights")  # settings that may always differ
FREE_TO_CHANGE = ("dropout", "checkpoint_rows", "col_attention_fp32", "scaling_bound")  # of a model; its weights fit
NAMED = 5  # differences that a refusal names; others are counted
ROUNDING = ".pack_tokens"  # of a stage: it decides which tables share a pass, which changes the rounding of sums only
WARMUP = 0.1  # least share of the steps of a suggested stage over which its learning rate rises
STREAM = "the version of the table stream"
REAL_TABLES = "the hash of the real tables"
PLUGIN, CALLBACKS = "the hash of the plug-in ", "the hash of the callbacks of "  # followed by the name of its module


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


def find_resume_point(
    values: dict, real_tables: str | None, plugins_now: Sequence[dict] = ()
) -> tuple[ResumePoint, dict | None]:
    """Find where a run begins, and the content of its newest intact checkpoint, if any."""
    # values: the configuration as plain values; real_tables: the hash of the real tables of its prior. Raises
    # ConfigError if the run directory belongs to another run, if its checkpoints are gone, or if the
    # newest weights are not finite.
    folder = Path(values["run_dir"])
    newest = checkpoint.newest_valid(folder / "checkpoints")
    if newest is None:
        check_beginning(folder, values["seed"])
        return ResumePoint(0, values["seed"], real_tables), None
    path, content = newest
    refuse_changes(content, values, real_tables, plugins_now)
    checkpoint.refuse_non_finite(path, content)
    return ResumePoint(content["global_step"], values["seed"], real_tables), content


def check_beginning(folder: Path, seed: int) -> None:
    """Refuse to start at step 0 if the records of the run directory name a saved checkpoint or another seed."""
    records = Records(folder)
    over = "to start over, name another run_dir or remove this one"
    if saved := (records.json("status.json") or {}).get("saved"):
        raise ConfigError([f"{folder} lacks the checkpoint of step {saved}, which status.json names; {over}"])
    try:
        recorded = records.config() or {}
    except ConfigError as error:
        raise ConfigError([f"{error}; {over}"]) from None
    if recorded.get("seed", seed) != seed:
        raise ConfigError([f"{folder} holds a run with seed={recorded['seed']}, not {seed}; {over}"])


def refuse_changes(
    content: dict, values: dict, real_tables: str | None = None, plugins_now: Sequence[dict] = ()
) -> None:
    """Print which settings differ from those of a checkpoint, and refuse those that make it another run."""
    # A stage that has not started may change, and stages may follow the last one.
    saved, made = content["config"], content["run"]
    before, now = compared(saved), compared(values)
    before |= {STREAM: made["stream_version"], REAL_TABLES: made.get("real_tables")}
    now |= {STREAM: STREAM_VERSION, REAL_TABLES: real_tables}
    before |= plugin_hashes(made.get("plugins", []))
    now |= plugin_hashes(plugins_now)
    differing = [key for key in sorted(before | now) if key not in before or key not in now or before[key] != now[key]]
    if now.get("objective", "") is None and not any(key.startswith("objective") for key in before):
        differing.remove("objective")  # a checkpoint from before there were objectives
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
    order = [
        "model.family",
        "prior.name",
        "seed",
        STREAM,
        REAL_TABLES,
        PLUGIN,
        "model.",
        "optimizer.name",
        "objective",
        "auxiliary_losses",
        "prior.",
    ]
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
    changes_length = any(key.startswith("curriculum.stages.") and key.endswith(".steps") for key in breaking)
    longer = longer_without_a_jump(saved, values, content["global_step"]) if changes_length else None
    if problems and (other_model or not values["resume"]["allow_changes"]):
        advice = "choose a new run_dir" + ("" if other_model else ", or set resume.allow_changes=true")
        lines = [f"{values['run_dir']} is another run: {problem}; {advice}" for problem in problems]
        raise ConfigError(lines + [f"to train longer, {longer}"] * (longer is not None))
    if list(lengths) != stages:
        info(f"changed   the stages were {', '.join(lengths)}, are {', '.join(stages)}")
    for key in changed:
        info(f"changed   {change(key, before, now)}")
    if (jump := jump_of_the_learning_rate(saved, values, content["global_step"])) is not None:
        info(f"warning   {jump}")
        if longer is not None:
            info(f"          instead, {longer}")
    if values["init_weights"] not in (None, saved["init_weights"]):
        info(
            f"warning   init_weights={values['init_weights']} has no effect: the run continues from its own checkpoint"
        )


def jump_of_the_learning_rate(saved: dict, values: dict, steps: int) -> str | None:
    """Describe how the learning rate changes after the steps done, if the schedule of these steps was changed."""
    if steps == 0 or steps >= total_steps(values):
        return None
    trained = rate_of(saved, steps - 1)
    if math.isclose(trained, rate_of(values, steps - 1)):
        return None  # a stage that begins now may have any rate
    coming = rate_of(values, steps)
    why = "since the schedule of a stage that has begun was changed"
    return f"the learning rate goes from {trained:.3g} at step {steps} to {coming:.3g} at step {steps + 1}, {why}"


def longer_without_a_jump(saved: dict, values: dict, steps: int) -> str | None:
    """Describe how to train longer than a run that has finished; None unless its stages were given more steps."""
    more = total_steps(values) - steps
    stages = saved["curriculum"]["stages"]
    if steps < total_steps(saved) or more <= 0 or list(stages) != list(values["curriculum"]["stages"]):
        return None
    defaults = dataclasses.asdict(StageConfig())
    last = list(stages.values())[-1]
    settings = {key: value for key, value in last.items() if key in defaults and value != defaults[key]}
    settings |= {"steps": more, "warmup": max(WARMUP, last["warmup"]), "fresh_optimizer": False}
    text = yaml.safe_dump(settings, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    text = text.replace(": .inf", ": inf")  # in Hydra's grammar
    names = ["more", *(f"more{number}" for number in range(2, len(stages) + 2))]
    name = next(name for name in names if name not in stages)
    override = f"+curriculum.stages.{name}={text}"
    return f"leave the stages as they were and add one, with a schedule of its own: {shlex.quote(override)}"


def rate_of(values: dict, step: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    _, stage, stage_step = stage_at(curriculum_of(values), step)
    return learning_rate(stage, stage_step)


def total_steps(values: dict) -> int:
    """Return the steps of all stages, whatever trainer.max_steps is."""
    return sum(stage["steps"] for stage in values["curriculum"]["stages"].values())


def curriculum_of(values: dict) -> CurriculumConfig:
    """Return the curriculum of a checkpoint, perhaps of another version, which has other settings."""
    known = {option.name for option in dataclasses.fields(StageConfig)}
    stages = {}
    for name, stage in values["curriculum"]["stages"].items():
        stages[name] = StageConfig(**{key: value for key, value in stage.items() if key in known})
    return CurriculumConfig(stages)


def plugin_hashes(records: Iterable[dict]) -> dict[str, str]:
    """Return the hashes of plug-ins by the names of the differences; those of callbacks alone may change."""
    hashes = {}
    for record in records:
        is_callback = all(kind == "callback" for kind, _ in record["uses"])
        hashes[(CALLBACKS if is_callback else PLUGIN) + record["module"]] = record["sha256"][:16]
    return hashes


def compared(values: dict) -> dict[str, Any]:
    """Flatten a configuration to dotted names, with the defaults of its prior's options."""
    return flatten(values | {"prior": completed(values["prior"])})


def completed(settings: dict[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of options that a prior's settings lack; those of a prior that is not installed stay."""
    # An option that is a dictionary, such as the components of a mixture, is one value: a component that is not named
    # is not drawn from. Only in a section such as `realism` are the missing options filled in.
    try:
        options = [field for field in dataclasses.fields(priors.prior_class(settings["name"])) if field.init]
    except priors.PriorError:
        return settings
    complete = dict(settings)
    for option in options:
        default = default_of(option)
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            complete[option.name] = dataclasses.asdict(default) | settings.get(option.name, {})
        elif default is not dataclasses.MISSING:
            complete.setdefault(option.name, default)
    return complete


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
