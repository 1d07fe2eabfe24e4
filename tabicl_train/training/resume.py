"""Where a run begins: at step 0, perhaps from given weights, or at its newest checkpoint, if that is of the same run.

Rank 0 reads the files and sends the others what they need. If each rank read them, ranks could find different files (on
a slow shared folder, after a disk error, in another machine's folder) and exchange gradients of different steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

import priors
from priors.options import REQUIRED, default_of
from priors.random import STREAM_VERSION
from tabicl_train.config.build import options_class
from tabicl_train.config.on_resume import Severity, severity_of
from tabicl_train.config.schema import CurriculumConfig, RunConfig, StageConfig
from tabicl_train.console import info
from tabicl_train.doors import register
from tabicl_train.errors import ConfigError, wrong_records
from tabicl_train.model.config import NetworkSettings, family_name, settings_of
from tabicl_train.model.family import NetworkConfig
from tabicl_train.run import checkpoint
from tabicl_train.run.plain_values import flatten, steps_of_stages
from tabicl_train.run.records import Records
from tabicl_train.run.removed import without_removed
from tabicl_train.stream.curriculum import stage_at
from tabicl_train.stream.schedules import learning_rate
from tabicl_train.weights import resolve
from tabicl_train.weights.pretrained import Pretrained
from tabicl_train.weights.reader import read_weights

NAMED = 5  # differences that a refusal names; further ones are counted
WARMUP = 0.1  # smallest warmup of a suggested stage, as a share of its steps
TRAINING_ONLY = ("dropout", "checkpoint_rows")  # settings of every network that do not change what it predicts

# Names of differences that are not options.
STREAM = "the version of the table stream"
REAL_TABLES = "the hash of the tables in files"
PLUGIN = "the hash of the plug-in "  # followed by the name of its module
CALLBACKS = "the hash of the callbacks of "  # likewise, if the run uses only callbacks or suites of the plug-in

STAGES = "curriculum.stages"

# The order of options in a refusal, by their beginnings: the most telling first, the stages that have begun last.
ORDER = (
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
)


class Left(Enum):
    """What a start of a run finds left to do."""

    STEPS = "steps, and what follows them"
    SCORES = "a validation or the final test after the last step"
    NOTHING = "nothing"
    PAST = "nothing: the run is already past the requested number of steps"


@dataclass
class Start:
    """Where a run begins, as rank 0 has found it.

    Parameters
    ----------
    steps : int
        Optimizer steps done.
    last : int
        Optimizer steps after which the run ends.
    content : dict or None
        The content of its newest checkpoint; None if there is none.
    ended : str or None
        Why validation ended the run earlier; None if it did not.
    left : Left
        What is left to do.
    """

    steps: int
    last: int
    content: dict | None
    ended: str | None
    left: Left

    @property
    def has_steps(self) -> bool:
        """Whether steps are left."""
        return self.left is Left.STEPS

    @property
    def is_finished(self) -> bool:
        """Whether all steps, validations and tests are done."""
        return self.left in (Left.NOTHING, Left.PAST)


def find_checkpoint(values: dict, real_tables: str | None, plugins_now: Sequence[dict] = ()) -> dict | None:
    """Find the newest intact checkpoint of a run.

    Parameters
    ----------
    values : dict
        The configuration in plain values.
    real_tables : str or None
        The hash of the real tables of its prior.
    plugins_now : sequence of dict
        The plug-ins that it uses, see `RunConfig.plugins_used`.

    Returns
    -------
    dict or None
        The content of the checkpoint; None if the run begins at step 0.

    Raises
    ------
    ConfigError
        If the run directory belongs to another run, if its checkpoints are gone, or if the newest weights are not
        finite.
    """
    folder = Path(values["run_dir"])
    newest = checkpoint.newest_valid(folder / "checkpoints")
    if newest is None:
        check_beginning(folder, values["seed"])
        return None
    path, content = newest
    with wrong_records(path):
        content = content | {"config": without_removed(path, content["config"])}
        refuse_changes(content, values, real_tables, plugins_now)
    checkpoint.refuse_non_finite(path, content)
    return content


def check_beginning(folder: Path, seed: int) -> None:
    """Raise ConfigError instead of starting at step 0 if the run directory records a checkpoint or another seed."""
    records = Records(folder)
    over = "to start over, choose another run_dir or remove this one"
    saved = (records.json("status.json") or {}).get("saved")
    if saved:
        raise ConfigError([f"{folder} lacks the checkpoint of step {saved} that status.json records; {over}"])
    try:
        recorded = records.config() or {}
    except ConfigError as error:
        raise ConfigError([f"{error}; {over}"]) from None
    if recorded.get("seed", seed) != seed:
        raise ConfigError([f"{folder} holds a run with seed={recorded['seed']}, not {seed}; {over}"])


@dataclass(frozen=True)
class Change:
    """A difference between a run and the command that continues it.

    Parameters
    ----------
    option : str
        The dotted name of an option, or one of the names that are not options.
    old, new : Any
        Its values in the checkpoint and in the command; None if there is no such option.
    severity : Severity
        What the difference means for the run.
    sentence : str
        The difference in words, to be printed.
    reason : str
        The difference in words, in an error that refuses the command.
    """

    option: str
    old: Any
    new: Any
    severity: Severity
    sentence: str
    reason: str


def refuse_changes(
    content: dict, values: dict, real_tables: str | None = None, plugins_now: Sequence[dict] = ()
) -> None:
    """Print which settings differ from those of a checkpoint, and refuse those that make it another run.

    Parameters
    ----------
    content : dict
        The content of the checkpoint from which the run continues.
    values : dict
        The configuration of the command, in plain values.
    real_tables : str or None
        The hash of the real tables of its prior.
    plugins_now : sequence of dict
        The plug-ins that it uses, see `RunConfig.plugins_used`.

    Raises
    ------
    ConfigError
        With a line for each setting that makes it another run.
    """
    saved = content["config"]
    steps = content["global_step"]
    changes = changes_since(content, values, real_tables, plugins_now)
    refused = [change for change in changes if change.severity in (Severity.REFUSED, Severity.NEVER)]
    is_other_network = any(change.severity is Severity.NEVER for change in refused)
    has_other_length = any(change.option.startswith(STAGES) and change.option.endswith(".steps") for change in refused)
    advice_to_train_longer = longer_without_a_jump(saved, values, steps) if has_other_length else None

    # Refuse. resume.allow_changes permits everything but another network.
    if refused and (is_other_network or not values["resume"]["allow_changes"]):
        advice = "choose a new run_dir"
        if not is_other_network:
            advice += ", or set resume.allow_changes=true"
        reasons = reasons_in_order(refused, started_stages(content))
        lines = [f"{values['run_dir']} is another run: {reason}; {advice}" for reason in reasons]
        if advice_to_train_longer is not None:
            lines.append(f"to train longer, {advice_to_train_longer}")
        raise ConfigError(lines)

    # Print what is permitted, and what follows from it.
    for change in changes:
        if change.severity is Severity.WARNING:
            info(f"warning   {change.sentence}")
        elif change.severity not in (Severity.FREE, Severity.START):
            info(f"changed   {change.sentence}")
    jump = jump_of_the_learning_rate(saved, values, steps)
    if jump is not None:
        info(f"warning   {jump}")
        if advice_to_train_longer is not None:
            info(f"          instead, {advice_to_train_longer}")
    weights = values["init_weights"]
    if weights not in (None, saved["init_weights"]):
        info(f"warning   init_weights={weights} has no effect: the run continues from its own checkpoint")


def changes_since(
    content: dict, values: dict, real_tables: str | None = None, plugins_now: Sequence[dict] = ()
) -> list[Change]:
    """List how a command differs from the run that it continues.

    Parameters
    ----------
    content : dict
        The content of the checkpoint from which the run continues.
    values : dict
        The configuration of the command, in plain values.
    real_tables : str or None
        The hash of the real tables of its prior.
    plugins_now : sequence of dict
        The plug-ins that it uses, see `RunConfig.plugins_used`.

    Returns
    -------
    list of Change
        The names of the stages first, then all options by name.
    """
    # All options and facts, before and now.
    saved = content["config"]
    origin = content["run"]  # how the checkpoint was made
    before = flat_with_defaults(saved) | plugin_hashes(origin.get("plugins", []))
    before |= {STREAM: origin["stream_version"], REAL_TABLES: origin.get("real_tables")}
    now = flat_with_defaults(values) | plugin_hashes(plugins_now)
    now |= {STREAM: STREAM_VERSION, REAL_TABLES: real_tables}

    # The names of the stages.
    stages_before = list(saved["curriculum"]["stages"])
    stages_now = list(values["curriculum"]["stages"])
    started = started_stages(content)
    changes = []
    if stages_before != stages_now:
        changes.append(change_of_stages(stages_before, stages_now, started))

    # The options. If a stage was added or removed, or the prior is another one, its name is enough.
    in_one_only = tuple(f"{STAGES}.{name}." for name in set(stages_before) ^ set(stages_now))
    is_other_prior = before["prior.name"] != now["prior.name"]
    for key in sorted(before | now):
        if key in before and key in now and before[key] == now[key]:
            continue
        if key.startswith(in_one_only):
            continue
        if is_other_prior and key.startswith("prior.") and key != "prior.name":
            continue
        sentence = change_in_words(key, before, now)
        severity = severity_of_change(key, values, started)
        changes.append(Change(key, before.get(key), now.get(key), severity, sentence, reason=sentence))
    return changes


def started_stages(content: dict) -> list[str]:
    """Return the names of the stages that the run of a checkpoint has begun, in order."""
    lengths = {name: stage["steps"] for name, stage in content["config"]["curriculum"]["stages"].items()}
    return list(steps_of_stages(lengths, content["global_step"]))


def change_of_stages(before: list[str], now: list[str], started: list[str]) -> Change:
    """Describe a change of the names of the stages; stages that have not begun may be replaced or added."""
    sentence = f"the stages were {', '.join(before)}, are {', '.join(now)}"
    reason = f"its stages {', '.join(started)} have started; this command has {', '.join(now)}"
    severity = Severity.TOLD if now[: len(started)] == started else Severity.REFUSED
    return Change(STAGES, before, now, severity, sentence, reason)


def severity_of_change(key: str, values: dict, started: list[str]) -> Severity:
    """Return what a change means for the run.

    Parameters
    ----------
    key : str
        The dotted name of an option, or one of the names that are not options.
    values : dict
        The configuration of the command, in plain values.
    started : list of str
        The stages that have begun; those to come may change.
    """
    # Tables and plug-ins.
    if key in (STREAM, REAL_TABLES):
        return Severity.REFUSED
    if key.startswith(PLUGIN):
        return Severity.REFUSED
    if key.startswith(CALLBACKS):
        return Severity.WARNING

    # Options, as their dataclass declares. Those of a prior and an objective decide what is learned.
    section, _, option = key.partition(".")
    if section == "model":
        return severity_of_model(option, settings_of(values["model"]))
    if section == "prior":
        return severity_of(option, priors.prior_class(values["prior"]["name"]), Severity.REFUSED)
    if section == "optimizer" and option != "name":
        name = values["optimizer"]["name"]
        return severity_of(option, register.optimizer[name].settings(name))
    if section == "objective" and option != "name" and values["objective"] is not None:
        entry = register.objective[values["objective"]["name"]]
        return severity_of(option, options_class(entry), Severity.REFUSED)
    if key.startswith(f"{STAGES}."):
        _, _, stage, option = key.split(".", 3)
        return severity_of(option, StageConfig, Severity.REFUSED) if stage in started else Severity.TOLD
    return severity_of(key, RunConfig)


def severity_of_model(option: str, settings: type) -> Severity:
    """Return what the change of a setting of a network means for a run."""
    # Settings that every network has, such as dropout, mean the same in all. By default a change of another setting is
    # NEVER, since weights rarely fit after it.
    common_severity = severity_of(option, NetworkSettings, Severity.NEVER)
    return severity_of(option, settings, common_severity)


def reasons_in_order(refused: list[Change], started: list[str]) -> list[str]:
    """Return why a command is refused, the most telling reasons first; further ones than `NAMED` are counted."""
    starts = [*ORDER, *(f"{STAGES}.{name}." for name in started)]

    def rank(change: Change) -> int:
        for number, start in enumerate(starts):
            if change.option.startswith(start):
                return number
        return len(starts)

    other_changes = [change for change in refused if change.option != STAGES]
    reasons = [change.reason for change in sorted(other_changes, key=rank)]
    reasons[1:1] = [change.reason for change in refused if change.option == STAGES]  # the second one
    if len(reasons) > NAMED + 1:
        reasons[NAMED:] = [f"{len(reasons) - NAMED} more settings differ"]
    return reasons


def jump_of_the_learning_rate(saved: dict, values: dict, steps: int) -> str | None:
    """Describe how the learning rate changes after the steps done, if the schedule of these steps was changed."""
    if steps == 0 or steps >= steps_of_all_stages(values):
        return None
    # The schedule may be that of a plug-in that is not loaded.
    try:
        trained = rate_of(saved, steps - 1)
    except ConfigError:
        return None
    # If the last step had the same rate, the schedule is unchanged; a stage that begins now may have any rate.
    if math.isclose(trained, rate_of(values, steps - 1)):
        return None
    coming = rate_of(values, steps)
    why = "since the schedule of a stage that has begun was changed"
    return f"the learning rate goes from {trained:.3g} at step {steps} to {coming:.3g} at step {steps + 1}, {why}"


def longer_without_a_jump(saved: dict, values: dict, steps: int) -> str | None:
    """Advise how to train longer than a run that has finished, or None unless its stages were given more steps.

    More steps in a finished stage would stretch its schedule, and the learning rate would jump back up. The advice is
    an override that adds a stage with the settings of the last one and its own warmup.
    """
    more = steps_of_all_stages(values) - steps
    stages = saved["curriculum"]["stages"]
    if steps < steps_of_all_stages(saved) or more <= 0 or list(stages) != list(values["curriculum"]["stages"]):
        return None

    # The settings of the new stage.
    defaults = dataclasses.asdict(StageConfig())
    last = list(stages.values())[-1]
    settings = {key: value for key, value in last.items() if key in defaults and value != defaults[key]}
    settings |= {"steps": more, "warmup": max(WARMUP, last["warmup"]), "fresh_optimizer": False}
    text = yaml.safe_dump(settings, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    text = text.replace(": .inf", ": inf")  # in Hydra's grammar

    # Its name: more, more2, ...
    name = "more"
    number = 1
    while name in stages:
        number += 1
        name = f"more{number}"
    override = f"+curriculum.stages.{name}={text}"
    return f"leave the stages as they were and add one with its own schedule: {shlex.quote(override)}"


def rate_of(values: dict, step: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    _, stage, stage_step = stage_at(curriculum_of(values), step)
    return learning_rate(stage, stage_step)


def steps_of_all_stages(values: dict) -> int:
    """Return the number of steps of all stages, regardless of trainer.max_steps."""
    return sum(stage["steps"] for stage in values["curriculum"]["stages"].values())


def curriculum_of(values: dict) -> CurriculumConfig:
    """Return the curriculum of a checkpoint, without the settings of other versions."""
    options = {option.name for option in dataclasses.fields(StageConfig)}
    stages = {}
    for name, stage in values["curriculum"]["stages"].items():
        stages[name] = StageConfig(**{key: value for key, value in stage.items() if key in options})
    return CurriculumConfig(stages)


def plugin_hashes(records: Iterable[dict]) -> dict[str, str]:
    """Return the hashes of plug-ins, as facts to compare; those used for callbacks or suites only have another name."""
    hashes = {}
    for record in records:
        has_callbacks_only = all(kind in ("callback", "suite") for kind, _ in record["uses"])
        what = CALLBACKS if has_callbacks_only else PLUGIN
        hashes[what + record["module"]] = record["sha256"][:16]
    return hashes


def flat_with_defaults(values: dict) -> dict[str, Any]:
    """Flatten a configuration to dotted names, and add the defaults of options that did not exist when it was saved.

    So a run that began before an option was added continues without a word about it. Only the options of a plug-in that
    is not loaded stay as they are.

    Parameters
    ----------
    values : dict
        A configuration in plain values, nested, as a checkpoint has it.
    """
    # The prior and the stages.
    curriculum = dataclasses.asdict(CurriculumConfig()) | values["curriculum"]
    defaults = dataclasses.asdict(StageConfig())
    stages = {name: defaults | stage for name, stage in curriculum["stages"].items()}
    sections = {"prior": completed(values["prior"]), "curriculum": curriculum | {"stages": stages}}

    # The sections with the same options in all runs. The type of a section whose options depend on a name is Any.
    for section in dataclasses.fields(RunConfig):
        has_fixed_options = section.type != "Any" and dataclasses.is_dataclass(section.default_factory)
        if has_fixed_options and section.name not in sections:
            options: Any = section.default_factory
            sections[section.name] = dataclasses.asdict(options()) | values.get(section.name, {})

    # The network and the optimizer. An unknown name, perhaps of a plug-in, leaves their options as they are.
    with contextlib.suppress(ConfigError):
        settings_of_model = settings_of(values["model"])
        sections["model"] = dataclasses.asdict(settings_of_model()) | values["model"]
    with contextlib.suppress(ConfigError):
        name = values["optimizer"]["name"]
        settings_of_optimizer = register.optimizer[name].settings(name)
        sections["optimizer"] = dataclasses.asdict(settings_of_optimizer()) | values["optimizer"]
    return flatten(values | sections)


def completed(settings: dict[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of options that a prior's settings lack, unless its plug-in is not installed.

    An option that is a dictionary, such as the components of a mixture, is one value: components that it does not name
    are not drawn from. Missing options of a section such as `realism` are filled in.
    """
    try:
        options = [field for field in dataclasses.fields(priors.prior_class(settings["name"])) if field.init]
    except priors.PriorError:
        return settings
    complete = dict(settings)
    for option in options:
        default = default_of(option)
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            complete[option.name] = dataclasses.asdict(default) | settings.get(option.name, {})
        elif default != REQUIRED:
            complete.setdefault(option.name, default)
    return complete


def change_in_words(key: str, before: dict, now: dict) -> str:
    """Describe the change of a setting."""
    if key not in now:
        return f"{key} was {before[key]}; there is no such setting now"
    text = f"{key} was {before.get(key, 'not set')}, is {now[key]}"
    is_other_task = key == "model.max_classes" and 0 in (before.get(key), now[key])
    if not is_other_task:
        return text
    why = f"whose labels are embedded by other weights ({text})"
    if now[key] == 0:
        return f"it trains a classifier, and this configuration a regressor, {why}"
    return f"it trains a regressor, and this configuration a classifier, {why}"


def initial_weights(path: str, model: NetworkConfig) -> Pretrained:
    """Read the weights that `init_weights` names, and check that they fit the network.

    Parameters
    ----------
    path : str
        A run directory, a checkpoint, an export, or the name of weights of this package.
    model : NetworkConfig
        The network of the run.

    Returns
    -------
    Pretrained
        The weights.

    Raises
    ------
    ConfigError
        If there are no such weights, or their network is another one.
    """
    try:
        pretrained = read_weights(resolve(path, model.is_regression))
    except ConfigError as error:
        raise ConfigError([f"init_weights: {problem}" for problem in error.problems]) from None

    # The family of the network, and the task.
    file_family = family_name(type(pretrained.config))
    family = family_name(type(model))
    if file_family != family:
        raise ConfigError([f"init_weights: the file's model is of family {file_family}; this run trains {family}"])
    if pretrained.config.is_regression != model.is_regression:
        if model.is_regression:
            kind, trained = "a classifier", "a regressor"
        else:
            kind, trained = "a regressor", "a classifier"
        why = "whose labels are embedded by other weights"
        raise ConfigError([f"init_weights: the file's model is {kind}; this run trains {trained}, {why}"])

    # Settings on which the shapes of weights depend must be equal; others are warned of.
    different = []
    for option, value in dataclasses.asdict(pretrained.config).items():
        weights_fit = severity_of_model(option, type(model)) is not Severity.NEVER
        if not weights_fit and getattr(model, option) != value:
            different.append(f"model.{option}={value}")
    if different:
        settings = " ".join(different)
        raise ConfigError([f"init_weights: its network differs from that of the configuration; set {settings}"])
    for difference in other_function(pretrained.config, model):
        info(f"warning   init_weights: {difference}; the same weights now predict something else")
    return pretrained


def other_function(saved: Any, model: NetworkConfig) -> list[str]:
    """List the settings that differ between two networks with the same weights and change what they predict."""
    differences = []
    for option, value in dataclasses.asdict(saved).items():
        # NEVER is refused elsewhere, and the other severities, which a plug-in may declare, do not change scores.
        is_told = severity_of_model(option, type(model)) in (Severity.TOLD, Severity.WARNING, Severity.REFUSED)
        now = getattr(model, option)
        if value != now and is_told and option not in TRAINING_ONLY:
            differences.append(f"model.{option} was {value}, is {now}")
    return differences
