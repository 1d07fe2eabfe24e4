"""The settings in a checkpoint: brought up to date, and compared with those of the run that continues from it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import priors
from priors.random import STREAM_VERSION
from priors.real import real_tables
from tabicl_train.config.documentation import default_of
from tabicl_train.config.schema import RunConfig, StageConfig, build_prior, flatten
from tabicl_train.console import info
from tabicl_train.errors import ConfigError
from tabicl_train.model.families import settings_of

HARMLESS = (
    "run_dir", "resume.allow_changes", "preflight", "preflight_steps", "init_weights", "tensorboard",
    *(f"trainer.{name}" for name in ("max_steps", "devices", "nodes", "timeout", "max_hours", "requeue")),
)  # fmt: skip
FREE_TO_CHANGE = ("dropout", "checkpoint_rows", "col_attention_fp32", "scaling_bound")  # of a model; its weights fit
ROUNDING = ".pack_tokens"  # of a stage: which tables share a pass matters to the rounding of sums only
STREAM = "the version of the table stream"
REAL_TABLES = "the hash of the real tables"

Migrations = dict[str, str | Callable[[Any], dict[str, Any]]]
MIGRATIONS: Migrations = {
    "optimizer.newton_schulz_dtype": lambda dtype: {
        "optimizer.newton_schulz_dtype": "fp32" if dtype == "auto" else dtype  # auto was fp32 on a CPU, bf16 on a GPU
    }
}
"""Settings, or values, of past versions that are gone, by dotted name: the name that a setting has now, or a function
from its value to the settings that replace it ({} if it needs none)."""
STAGE_MIGRATIONS: Migrations = {"micro_batch_rows": lambda _: {}}
"""The same for the settings of a stage, by their names within the stage."""


def up_to_date(values: dict) -> dict:
    """The configuration in a checkpoint of any past version, with the settings of this version.

    Settings that it lacks take their defaults, except options of the prior, which the prior itself completes. Settings
    that this version neither has nor can replace are left as they are.
    """
    values = copy.deepcopy(values)
    stages = values["curriculum"]["stages"]
    migrate(values, MIGRATIONS)
    for name, stage in stages.items():
        migrate(stage, STAGE_MIGRATIONS)
        stages[name] = completed(stage, dataclasses.asdict(StageConfig()))
    return completed(values, dataclasses.asdict(RunConfig(model=settings_of(values.get("model", {}))())))


def notes(values: dict) -> list[str]:
    """What the run that continues from a checkpoint with these settings, not yet brought up to date, should know."""
    if any("micro_batch_rows" in stage for stage in values["curriculum"]["stages"].values()):
        return [
            "tables go through the network in packs of pack_tokens, no longer in groups of micro_batch_rows; "
            "this changes the rounding of sums only"
        ]
    return []


def migrate(values: dict, migrations: Migrations) -> None:
    """Replace, in place, the settings that are gone."""
    for name, migration in migrations.items():
        *parts, key = name.split(".")
        section = values
        for part in parts:
            section = section.get(part, {})
        if key in section:
            value = section.pop(key)
            settings = {migration: value} if isinstance(migration, str) else migration(value)
            for new_name, new_value in settings.items():
                put(values, new_name, new_value)


def put(values: dict, name: str, value: Any) -> None:
    """Set a value by its dotted name; sections that are missing are made."""
    *parts, key = name.split(".")
    for part in parts:
        values = values.setdefault(part, {})
    values[key] = value


def completed(values: dict, defaults: dict) -> dict:
    """The values, and the defaults of those that are missing, at any depth."""
    both = values.keys() & defaults.keys()
    deeper = {key for key in both if isinstance(values[key], dict) and isinstance(defaults[key], dict)}
    return {**defaults, **values, **{key: completed(values[key], defaults[key]) for key in deeper}}


def refuse_changes(config: RunConfig, content: dict, steps: int) -> None:
    """Report which settings differ from the checkpoint's; raise ConfigError for those that would make it another run.

    content: of the checkpoint, as `checkpoint.read` returns it
    steps: optimizer steps done; a stage that has not started may change, and stages may follow the last one
    """
    saved = content["config"]
    before, now = compared(saved), compared(dataclasses.asdict(config))
    before[STREAM], now[STREAM] = content["run"].get("stream_version", 1), STREAM_VERSION
    real = real_tables(build_prior(config.prior))
    before[REAL_TABLES] = content["run"].get("real_tables")
    now[REAL_TABLES] = None if real is None else real.fingerprint()
    changed = [key for key in sorted(before | now) if differs(key, before, now) and key not in HARMLESS]
    started = started_stages(saved["curriculum"]["stages"], steps)
    stages = list(config.curriculum.stages)
    stage_keys = [f"curriculum.stages.{name}." for name in started]
    breaking = ("model.", "prior.", "seed", STREAM, REAL_TABLES, "optimizer.name", *stage_keys)
    problems = [change(key, before, now) for key in changed if key.startswith(breaking) and not key.endswith(ROUNDING)]
    if stages[: len(started)] != started:
        problems.append(f"the stages that have started are {', '.join(started)}; the run now has {', '.join(stages)}")
    unfit = [key for key in changed if key.startswith("model.") and key.removeprefix("model.") not in FREE_TO_CHANGE]
    if problems and (unfit or not config.resume.allow_changes):
        advice = "choose a new run_dir" + ("" if unfit else ", or set resume.allow_changes=true")
        raise ConfigError([f"{config.run_dir} is another run: {problem}; {advice}" for problem in problems])
    for note in content.get("notes", ()):
        info(f"changed   {note}")
    for key in changed:
        info(f"changed   {change(key, before, now)}")
    if config.init_weights not in (None, before["init_weights"]):
        info(f"warning   init_weights={config.init_weights} has no effect: the run continues from its own checkpoint")


def compared(values: dict) -> dict[str, Any]:
    """A configuration by dotted names, the options of its prior completed."""
    return flatten(values | {"prior": completed(values["prior"], prior_defaults(values["prior"]["name"]))})


def prior_defaults(name: str) -> dict[str, Any]:
    """The defaults of a prior's options; none of a prior that is not installed."""
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


def differs(key: str, before: dict, now: dict) -> bool:
    return key not in before or key not in now or before[key] != now[key]


def change(key: str, before: dict, now: dict) -> str:
    """What became of a setting, in words."""
    if key not in now:
        return f"{key} was {before[key]}; there is no such setting now"
    text = f"{key} was {before.get(key, 'not set')}, is {now[key]}"
    if key == "model.max_classes" and 0 in (before.get(key), now[key]):
        was, trains = ("a classifier", "a regressor") if now[key] == 0 else ("a regressor", "a classifier")
        return f"it trains {was}, and this configuration {trains}, whose labels are read by other weights ({text})"
    return text


def started_stages(stages: dict[str, dict], steps: int) -> list[str]:
    """The names of the stages to which the first `steps` steps belong."""
    started = []
    for name, stage in stages.items():
        if steps <= 0:
            break
        started.append(name)
        steps -= stage["steps"]
    return started
