"""The study of a sweep in Optuna's journal, which is the only state of a sweep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial

from tabicl_train.console import first_line, info
from tabicl_train.errors import ConfigError
from tabicl_train.outputs import STUDY
from tabicl_train.run.records import whole_lines_end
from tabicl_train.run.removed import words_as_of_now
from tabicl_train.sweep.comparable import INCOMPARABLE
from tabicl_train.sweep.metric import DATA_SETS, is_better_lower
from tabicl_train.sweep.plan import Plan
from tabicl_train.training.resume import PLUGIN, plugin_hashes

NAME = "sweep"
PLUGINS = "plugins"  # attribute of the study: hashes, by what a resume calls them
RUNS = "runs"  # attribute of a trial: name, seed and arguments of each of its runs


def open_study(plan: Plan) -> optuna.Study:
    """Open or create the study of a sweep whose lock is held; raises ConfigError if it is of another sweep."""
    # Read the journal, or begin one.
    assert plan.sweep.metric is not None
    path = plan.folder / STUDY
    repair(path)
    pruner = optuna.pruners.MedianPruner() if plan.sweep.pruner == "median" else optuna.pruners.NopPruner()
    with journal_damage(path):
        study = optuna.create_study(
            storage=storage(path),
            study_name=NAME,
            direction="minimize" if is_better_lower(plan.sweep.metric) else "maximize",
            sampler=optuna.samplers.RandomSampler(),  # `start_trial` sets that of each trial
            pruner=pruner,
            load_if_exists=True,
        )

    # A study continues only with the settings that it was begun with, as this version names them.
    identity = plan.identity()
    before = study.user_attrs.get("identity", identity)
    before = before | {"settings": sorted(words_as_of_now(before["settings"]))}
    changes = [f"{key} was {before[key]}" for key, value in identity.items() if before[key] != value]
    if changes:
        other = f"which holds another sweep ({', '.join(changes)})"
        raise ConfigError([f"run_dir is {str(plan.folder)!r}, {other}; choose another name"])
    check_plugins(plan, study)

    # Keep what readers of the study need. The data sets stay those of the first call, so that all values are means
    # over the same ones.
    if plan.data_sets is not None and DATA_SETS not in study.user_attrs:
        study.set_user_attr(DATA_SETS, plan.data_sets)
    study.set_user_attr("identity", identity)
    study.set_user_attr("name", plan.sweep.name)
    study.set_user_attr(INCOMPARABLE, plan.incomparable)
    return study


def check_plugins(plan: Plan, study: optuna.Study) -> None:
    """Compare the plug-ins with those that the sweep was begun with, by the same rules as for resuming a run."""
    now: dict[str, str] = {}
    for config in plan.configs:
        now |= plugin_hashes(config.plugins_used())
    before = study.user_attrs.get(PLUGINS, now)
    changed = [key for key in now if before.get(key, now[key]) != now[key]]
    changes = [f"{key} was {before[key]}, is {now[key]}" for key in changed]
    is_allowed = all(config.resume.allow_changes for config in plan.configs)
    if any(key.startswith(PLUGIN) for key in changed) and not is_allowed:
        what = f"run_dir is {str(plan.folder)!r}, which holds another sweep"
        advice = "choose a new run_dir, or set resume.allow_changes=true, which keeps the results of finished runs"
        raise ConfigError([f"{what} ({change}); {advice}" for change in changes])
    for change in changes:
        info(f"changed   {change}: finished runs keep their results, all others continue with the file as it is now")
    study.set_user_attr(PLUGINS, before | now)


def load_study(folder: Path) -> optuna.Study:
    """Open the study in the folder of a sweep for reading; raises ConfigError if there is none."""
    if not (folder / STUDY).exists():
        raise ConfigError([f"{folder}: there is no sweep in it"])
    with journal_damage(folder / STUDY):
        return optuna.load_study(study_name=NAME, storage=storage(folder / STUDY))


@contextlib.contextmanager
def journal_damage(path: Path) -> Iterator[None]:
    """Turn the errors that Optuna raises for a damaged or foreign journal into ConfigError."""
    try:
        yield
    except OSError:  # of the file system
        raise
    except Exception as error:  # of any type, since Optuna checks nothing that it reads
        reason = f"{type(error).__name__}: {first_line(error)}"
        advice = "remove it and repeat the command: runs that have finished are not trained again"
        raise ConfigError([f"{path} is not the journal of a sweep ({reason}); {advice}"]) from None


def storage(path: Path) -> JournalStorage:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return JournalStorage(JournalFileBackend(str(path.absolute())))


def repair(path: Path) -> None:
    """Remove an incomplete last line, which Optuna cannot read, and the lock of the file, after a kill."""
    # Optuna would wait half a minute for the lock. No other process writes, since the lock of the sweep is held.
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        file.truncate(whole_lines_end(path))


def sampler(plan: Plan, number: int) -> optuna.samplers.BaseSampler:
    """Make the sampler of one trial, with its number as seed, since a new sampler with the same seed repeats points."""
    if plan.sweep.sampler == "grid":
        return optuna.samplers.GridSampler({axis.key: axis.choices for axis in plan.axes}, seed=0)
    if plan.sweep.sampler == "random":
        return optuna.samplers.RandomSampler(seed=number)
    return optuna.samplers.TPESampler(seed=number, constant_liar=True)


def start_trial(plan: Plan, study: optuna.Study, running: FrozenTrial | None = None) -> Trial:
    """Start a trial with its runs, or continue one that an earlier call of the sweep has started."""
    default = study.sampler
    if running is None:
        study.sampler = sampler(plan, len(study.get_trials(deepcopy=False)))
        trial = study.ask()
    else:
        study.sampler = sampler(plan, running.number)
        trial = Trial(study, running._trial_id)
    point = {axis.key: axis.suggest(trial) for axis in plan.axes}
    # With its own sampler, Study.tell of the last trial raises RuntimeError: GridSampler calls Study.stop, which works
    # in Study.optimize only.
    study.sampler = default
    runs = []
    for seed in plan.sweep.seeds:
        name = plan.run_dir(trial.number, point, seed).name
        runs.append([name, seed, plan.arguments(point, seed)])
    trial.set_user_attr(RUNS, runs)
    return trial


def has_more(plan: Plan, study: optuna.Study) -> bool:
    """Whether there is another trial to ask for."""
    return len(study.get_trials(deepcopy=False)) < plan.total
