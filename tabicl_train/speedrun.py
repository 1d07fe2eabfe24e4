"""The speedrun: as good as `demo_long` on two CPU cores, in less time. configs/experiment/SPEEDRUN.md has the rules.

In the folder, besides the run directories ARM-SEED:

plan.json        what must not change from one call to the next
scores/          of the tasks, by tabicl-evaluate's code
speedrun.md      the result as an entry of the page
speedrun.json    the same with all figures

and in each run directory:

seconds.json     wall time and CPU time of tabicl-train; absent if it was interrupted
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import torch
from scipy import stats

from tabicl_train import plugins
from tabicl_train.config.compose import compose, hydra_text, parse_options
from tabicl_train.config.options import EvaluateOptions, SpeedrunOptions
from tabicl_train.config.schema import RunConfig
from tabicl_train.console import counted, info, markdown_table
from tabicl_train.distributed.processes import PREEMPTED, start_problems, watch_signals
from tabicl_train.distributed.submit import PROGRAM
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.arms import results_of
from tabicl_train.evaluation.suites import sources
from tabicl_train.model.config import family_of
from tabicl_train.outputs import make_folder
from tabicl_train.run_dir.curves import THIS_MODEL
from tabicl_train.run_dir.provenance import git
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.status import RunLock, read_status
from tabicl_train.statistics import mean_interval

# What the page says, too; tests/unit/test_speedrun.py compares them.
CORES = 2
LEVEL = 0.01  # of the one-sided test that the mean score of an entry exceeds the target
SEEDS = 5  # of an entry, at least
LEAST_SAVING = 0.03  # share of the time of the last record that a new one must save
RECORD = 1.0  # time of the last record as a share of that of `demo_long`
# Mean ROC AUC of `demo_long` over the 97 tasks of Rdatasets and KEEL, with one member and three splits, by seed.
REFERENCE_SCORES = [0.786128, 0.786985, 0.785296, 0.782964, 0.786111]

# The two recipes that are trained in pairs, the arms.
ENTRY = "entry"
REFERENCE = "reference"
ARMS = (ENTRY, REFERENCE)
FORCED = ["validation.every=0", "validation.patience=0"]  # of both: it takes time, and the last weights are scored
WARM_UP = "warm-up"  # in the place of a seed: two steps of each arm before the first run, so that caches are warm
POLL = 0.2  # seconds between checks of a run
BREAK = 600.0  # seconds between the runs of a pair, about a run, above which the machine may be another one in speed
ROUNDING = 1.02  # by which CPU time may exceed that of two cores; the runs of the first entries kept 1.5 to 1.7 busy


@dataclass
class Plan:
    """A speedrun, ready to run."""

    options: SpeedrunOptions
    words: list[str]  # of the command line: options, and settings of the entry
    settings: list[str]  # of the entry
    config_dir: str | None
    entry: RunConfig

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        return Path(self.options.run_dir)

    @property
    def of_config_dir(self) -> list[str]:
        """The arguments that name the folder with settings of one's own."""
        return [] if self.config_dir is None else ["--config-dir", self.config_dir]

    def run_dir(self, arm: str, seed: int | str) -> Path:
        """Return the run directory of an arm and a seed."""
        return self.folder / f"{arm}-{seed}"

    def arguments(self, arm: str, seed: int | str) -> list[str]:
        """Return the arguments of tabicl-train."""
        chosen = self.settings if arm == ENTRY else [f"experiment={self.options.reference}"]
        of_seed = ["trainer.max_steps=2"] if seed == WARM_UP else [f"seed={seed}"]
        # One thread trains, and one process draws, unless the entry says otherwise.
        workers = ["stream.num_workers=1"] if arm == REFERENCE else self.entry.with_workers(1)[1]
        run_dir = f"run_dir={hydra_text(str(self.run_dir(arm, seed).absolute()))}"
        return [*self.of_config_dir, *chosen, *FORCED, *workers, *of_seed, run_dir]

    def plugins(self, arm: str, hashes: bool = True) -> list[str]:
        """Return the arguments that load the plug-ins: those of the entry, which must not change the reference's time.

        The reference of a trial may come from one.
        """
        is_ours = self.options.reference == SpeedrunOptions().reference
        return [] if arm == REFERENCE and is_ours else plugins.arguments(hashes)

    @property
    def order(self) -> list[tuple[int, tuple[str, ...]]]:
        """The seeds, each with its arms in the order in which they are trained.

        The order alternates, so that a drift of the machine's speed favors neither.
        """
        return [(seed, ARMS if number % 2 == 0 else ARMS[::-1]) for number, seed in enumerate(self.options.seeds)]

    @property
    def other_scores(self) -> list[str]:
        """Why the fixed target does not apply: other tasks, or another reference; empty where it does."""
        default = SpeedrunOptions()
        reasons = []
        for name in ("reference", "suites", "splits", "rows"):
            value = getattr(self.options, name)
            if value != getattr(default, name):
                reasons.append(f"{name} is {value}")
        return reasons

    @property
    def trial(self) -> list[str]:
        """Why this is a trial rather than an entry by the rules; empty for an entry."""
        reasons = self.other_scores
        seeds = self.options.seeds
        if len(seeds) < SEEDS or seeds != list(range(len(seeds))):  # otherwise an entry could choose lucky ones
            reasons.append(f"the seeds are {', '.join(map(str, seeds))}")
        return reasons

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change from one call to the next."""
        values = dataclasses.asdict(self.options)
        del values["run_dir"]
        code = {plugin.module: plugin.sha256 for plugin in plugins.named()}
        code |= {plugin["module"]: plugin["sha256"] for plugin in self.entry.plugins_used()}  # also installed ones
        return {"settings": self.settings, **values, "plugins": code}

    @property
    def command(self) -> str:
        """The command of a person who repeats it."""
        return shlex.join(["tabicl-speedrun", *self.of_config_dir, *self.words, *plugins.arguments(hashes=False)])

    def text(self) -> str:
        """Format the commands of the runs."""
        lines = []
        for seed, arms in self.order:
            for arm in arms:
                words = ["tabicl-train", *self.arguments(arm, seed), *self.plugins(arm, hashes=False)]
                lines.append(shlex.join(words))
        return "\n".join(lines)


def make_plan(words: list[str], config_dir: str | None = None) -> Plan:
    """Make the plan of a command line; raises ConfigError with every problem, broken rules among them."""
    names = {field.name for field in dataclasses.fields(SpeedrunOptions)}
    of_options = []
    settings = []
    problems = []
    for word in words:
        key = word.partition("=")[0]
        if key in names:
            of_options.append(word)
        elif key == "seed":
            problems.append(f"{word}: a speedrun has several seeds; write seeds=[0,1,2,3,4]")
        elif key == "n_estimators":
            problems.append(f"{word}: a speedrun is scored with one member; leave it out")
        else:
            settings.append(word)
    if not settings:
        problems.append("there are no settings of an entry; experiment=demo_long is the reference itself")
    options = SpeedrunOptions()
    try:
        options = parse_options(SpeedrunOptions, of_options)
    except ConfigError as error:
        problems += error.problems
    entry = None
    run_dir = f"run_dir={hydra_text(options.run_dir)}"  # so that it is checked that this folder can be written to
    for arm, chosen in ((ENTRY, settings), (REFERENCE, [f"experiment={options.reference}"])):
        try:
            config = compose([*chosen, *FORCED, run_dir], config_dir, names)
            problems += broken_rules(config) + start_problems(config)
            if arm == ENTRY:
                entry = config
        except ConfigError as error:
            problems += error.problems
    if entry is not None and options.weights != "newest" and not getattr(entry.averages, options.weights):
        setting = f"averages.{options.weights}"
        problems.append(f"weights is {options.weights!r}, but {setting} is 0; set it, too")
    if joblib.cpu_count() < CORES:
        problems.append(f"this process may use {counted(joblib.cpu_count(), 'core')}; a speedrun takes {CORES}")
    if problems or entry is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    for suite in options.suites:
        sources(suite, None)  # a package may be missing, which should be said before an hour of training
    return Plan(options, words, settings, config_dir, entry)


def broken_rules(config: RunConfig) -> list[str]:
    """List the rules that a configuration breaks, as far as it shows."""
    trainer = config.trainer
    workers = config.stream.num_workers or 0
    broken = []
    if config.init_weights is not None:
        broken.append(f"init_weights is {str(config.init_weights)!r}; a speedrun starts from nothing")
    if trainer.max_hours is not None:
        broken.append(f"trainer.max_hours is {trainer.max_hours}; the length of a speedrun does not depend on time")
    if trainer.accelerator not in ("auto", "cpu"):
        broken.append(f"trainer.accelerator is {trainer.accelerator!r}; a speedrun takes {CORES} CPU cores")
    if (trainer.devices or 1) > CORES:
        broken.append(f"trainer.devices is {trainer.devices}; a speedrun takes {CORES} CPU cores")
    if workers > CORES:
        broken.append(f"stream.num_workers is {workers}; a speedrun takes {CORES} CPU cores")
    if config.stream.name != "local":
        broken.append(f"stream is {config.stream.name}; tables are drawn on the same {CORES} cores")
    if trainer.requeue:
        broken.append("trainer.requeue must be false: a speedrun trains from start to end")
    priors = {name for kind, name in config.named_parts() if kind == "prior"}
    if config.table_inputs or "disk" in priors:
        broken.append("the prior reads files; tables are drawn while the clock runs, and no real ones are trained on")
    if config.model.is_regression or not family_of(config.model).predicts_real_tables:
        broken.append("the network does not predict classes of tables, of which the target is a score")
    return broken


@contextlib.contextmanager
def two_cores() -> Iterator[None]:
    """Keep this process and its children on two cores, where the system can, and its scoring to as many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(CORES)
    can_choose = hasattr(os, "sched_setaffinity")
    allowed = os.sched_getaffinity(0) if can_choose else set()
    try:
        if can_choose:
            os.sched_setaffinity(0, sorted(allowed)[:CORES])
        yield
    finally:
        if can_choose:
            os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)


def run(plan: Plan) -> bool:
    """Train, score, and write the result; returns whether all of it is done. The same call continues."""
    make_folder("run_dir", plan.folder)
    lock = RunLock(plan.folder)
    lock.acquire()
    try:
        keep_identity(plan)
        if git("diff", "HEAD"):
            info("warning   the code has changes that are not committed, so this is a trial")
        for arm in ARMS:
            shutil.rmtree(plan.run_dir(arm, WARM_UP), ignore_errors=True)  # since an earlier call, caches may be cold
        scores: dict[tuple[str, int], pd.Series] = {}
        with two_cores():
            if runs_left(plan):
                for arm in ARMS:
                    if not train(plan, arm, WARM_UP):
                        info("speedrun  stopped; the same command continues it")
                        return False
            for seed, arms in plan.order:
                for arm in arms:
                    if not train(plan, arm, seed):
                        info("speedrun  stopped; the same command continues it, but the time of that run is lost")
                        return False
                for arm in ARMS:  # after each pair, so that a network that cannot be scored is noticed early
                    scores[arm, seed] = task_scores(plan, arm, seed)
        result = collect(plan, scores)
        records = Records(plan.folder)
        records.replace("speedrun.json", json.dumps(result, indent=1) + "\n")
        text = as_markdown(result)
        records.replace("speedrun.md", text + "\n")
    finally:
        lock.release()
    print(text)
    info(f"written   {plan.folder / 'speedrun.md'} and speedrun.json")
    if not result["trial"]:
        info('next      the form "Entry of the speedrun" of the issues says what to send')
    return True


def keep_identity(plan: Plan) -> None:
    """Write plan.json; raises ConfigError if another speedrun or a run is in the folder."""
    records = Records(plan.folder)
    if records.config() is not None:
        raise ConfigError([f"run_dir is {str(plan.folder)!r}, a run directory; a speedrun needs a folder of its own"])
    before = records.json("plan.json")
    now = json.loads(json.dumps(plan.identity))
    if before is None:
        for arm in ARMS:
            if any(plan.folder.glob(f"{arm}-*")):
                held = "which holds runs of a speedrun without its plan.json; use another folder"
                raise ConfigError([f"run_dir is {str(plan.folder)!r}, {held}"])
        records.replace("plan.json", json.dumps(now) + "\n")
        return
    for key, value in now.items():
        if before.get(key) != value:
            held = f"{key} was {before.get(key)}, and is {value}"
            raise ConfigError([f"run_dir is {str(plan.folder)!r}, which holds another speedrun: {held}"])


def is_finished(run_dir: Path) -> bool:
    """Whether a run has finished."""
    return (read_status(run_dir) or {}).get("status") == "finished"


def seconds_of(plan: Plan, arm: str, seed: int | str, kind: str = "seconds") -> float | None:
    """Return the wall time of a run, or its CPU time with kind="cpu"; None if it was interrupted, or has not ended."""
    return (Records(plan.run_dir(arm, seed)).json("seconds.json") or {}).get(kind)


def cpu_of_children() -> float:
    """Return the CPU seconds of the child processes that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(plan: Plan, arm: str, seed: int | str) -> bool:
    """Train a run unless it has finished; returns False if it was stopped, and raises ConfigError if it has failed."""
    run_dir = plan.run_dir(arm, seed)
    if is_finished(run_dir):
        return True
    if seed != WARM_UP:
        info(f"train     {arm}, seed {seed}: {left_in_words(plan)}")
    is_whole = not run_dir.exists()
    plugins.refuse_changed()
    command = [sys.executable, *PROGRAM, *plan.arguments(arm, seed), *plan.plugins(arm)]
    with watch_signals() as stop:
        cpu_before = cpu_of_children()
        started = time.perf_counter()
        # Its output goes to the terminal, as it says how much time is left; stdout is for the result.
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=2)
        was_told = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(POLL)
                break
            if stop.asked and not was_told:
                process.terminate()  # ctrl-C has reached it, too, and a repeated signal is ignored
                was_told = True
        seconds = time.perf_counter() - started
        cpu = cpu_of_children() - cpu_before
    if code == PREEMPTED or stop.asked:
        return False
    if code != 0 or not is_finished(run_dir):
        raise ConfigError([f"{run_dir} has failed, see above; the same command continues it"])
    if is_whole:
        Records(run_dir).replace("seconds.json", json.dumps({"seconds": seconds, "cpu": cpu}) + "\n")
    return True


def runs_left(plan: Plan) -> list[str]:
    """Return the arms of the runs that have not finished."""
    left = []
    for seed, arms in plan.order:
        left += [arm for arm in arms if not is_finished(plan.run_dir(arm, seed))]
    return left


def left_in_words(plan: Plan) -> str:
    """Say how many runs are left, and about how long they take by those that were timed."""
    known: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed, arms in plan.order:
        for arm in arms:
            seconds = seconds_of(plan, arm, seed)
            if seconds is not None:
                known[arm].append(seconds)
    left = runs_left(plan)
    text = f"{counted(len(left), 'run')} of {len(ARMS) * len(plan.order)} left"
    timed = [*known[ENTRY], *known[REFERENCE]]
    if not timed:
        return text
    total = 0.0
    for arm in left:
        total += statistics.fmean(known[arm] or timed)
    return f"{text}, about {math.ceil(total / 60)} min of training"


def task_scores(plan: Plan, arm: str, seed: int) -> pd.Series:
    """Return the ROC AUC of a run on each task, the mean over splits, by (suite, task) in the order of their names."""
    options = plan.options
    parts = {}
    for suite in options.suites:
        how = EvaluateOptions(
            checkpoint=str(plan.run_dir(arm, seed)),
            suite=suite,
            splits=options.splits,
            rows=options.rows,
            n_estimators=1,
            weights=options.weights if arm == ENTRY else "newest",
        )
        results, tasks = results_of(how, (), plan.folder)
        results = results[results["method"] == THIS_MODEL]
        # All tasks count, also those outside the trained range: otherwise an entry could choose its tasks.
        parts[suite] = results.groupby("data")["roc_auc"].mean().sort_index()
        if len(parts[suite]) < len(tasks):
            what = f"{len(parts[suite])} of {counted(len(tasks), 'task')} of suite={suite} have scores"
            again = f"an entry needs all; without {plan.folder / 'scores'} they are scored again"
            raise ConfigError([f"{plan.run_dir(arm, seed)}: {what}; {again}"])
    return pd.concat(parts)


def collect(plan: Plan, by_task: dict[tuple[str, int], pd.Series]) -> dict[str, Any]:
    """Return the content of speedrun.json; by_task: the scores of each arm and seed, as `task_scores` returns them."""
    scores: dict[str, list[float]] = {arm: [] for arm in ARMS}
    halves: dict[str, list[float]] = {"choosing": [], "reporting": []}  # of the entry
    rows = []
    for seed in plan.options.seeds:
        row: dict[str, Any] = {"seed": seed}
        for arm in ARMS:
            of_run = by_task[arm, seed]
            row[arm] = float(of_run.mean())
            row[f"{arm}_seconds"] = seconds_of(plan, arm, seed)
            row[f"{arm}_cpu"] = seconds_of(plan, arm, seed, "cpu")
            scores[arm].append(row[arm])
            if arm == ENTRY:
                number = of_run.groupby(level=0).cumcount()  # within its suite
                halves["choosing"].append(float(of_run[number % 2 == 0].mean()))
                halves["reporting"].append(float(of_run[number % 2 == 1].mean()))
        rows.append(row)
    pairs = [(row[f"{ENTRY}_seconds"], row[f"{REFERENCE}_seconds"]) for row in rows]
    target = target_of(scores[REFERENCE] if plan.other_scores else REFERENCE_SCORES)
    starts = starts_of(plan)
    first = starts[0]
    return {
        "name": plan.folder.resolve().name,
        "command": plan.command,
        "trial": plan.trial + differences(plan),
        "target": target,
        **judge(scores[ENTRY], target, pairs),
        "target_of_reference": target_of(scores[REFERENCE]),
        "halves": {half: statistics.fmean(values) for half, values in halves.items()},
        "seeds": rows,
        "commit": first["commit"],
        "versions": first["versions"],
        "cpus": sorted({machine["cpu"] for start in starts for machine in start["machines"]}),
        "plugins": plan.identity["plugins"],
    }


def starts_of(plan: Plan, seeds: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Return what provenance.jsonl holds of the runs of some seeds, of all by default."""
    starts = []
    for seed in plan.options.seeds if seeds is None else seeds:
        for arm in ARMS:
            starts += Records(plan.run_dir(arm, seed)).lines("provenance.jsonl")
    return starts


def differences(plan: Plan) -> list[str]:
    """Return why the runs are no entry: something has changed between them, or one ended early; empty for an entry."""
    starts = starts_of(plan)
    reasons = []
    if any((start["commit"], start["diff"]) != (starts[0]["commit"], starts[0]["diff"]) for start in starts):
        reasons.append("the code was changed between the runs")
    if any(start["diff"] for start in starts):  # which could slow the reference
        reasons.append("the code has changes that are not committed")
    if any(start["versions"] != starts[0]["versions"] for start in starts):
        reasons.append("packages were changed between the runs")
    for seed in plan.options.seeds:
        if len({machine["host"] for start in starts_of(plan, [seed]) for machine in start["machines"]}) > 1:
            reasons.append(f"the runs of seed {seed} are from several machines")
        reasons += untimely(plan, seed)
        steps = (read_status(plan.run_dir(ENTRY, seed)) or {}).get("step")
        if steps != plan.entry.total_steps:  # such as by a callback, which may have looked at the clock
            reasons.append(f"the run of seed {seed} ended after {steps} of {plan.entry.total_steps} steps")
    for arm in ARMS:
        configs = [Records(plan.run_dir(arm, seed)).config() or {} for seed in plan.options.seeds]
        same = [{key: config[key] for key in config if key not in ("seed", "run_dir")} for config in configs]
        if any(config != same[0] for config in same):  # such as those in a file of --config-dir
            reasons.append(f"settings of the {arm} were changed between the runs")
    return reasons


def untimely(plan: Plan, seed: int) -> list[str]:
    """Return why the times of a timed pair cannot be compared: more than two cores were used, or it had a break."""
    reasons = []
    end = None  # of the first run of the pair, in seconds since 1970
    for arm in dict(plan.order)[seed]:
        seconds = seconds_of(plan, arm, seed)
        cpu = seconds_of(plan, arm, seed, "cpu")
        if seconds is None or cpu is None:
            return []  # a result says so in any case
        cores = cpu / seconds
        if cores > CORES * ROUNDING:
            reasons.append(f"the {arm} of seed {seed} kept {cores:.2f} cores busy")
        text = Records(plan.run_dir(arm, seed)).lines("provenance.jsonl")[0]["time"]
        start = datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp()
        if end is not None and start - end > BREAK:
            reasons.append(f"the runs of seed {seed} are {(start - end) / 60:.0f} min apart")
        end = start + seconds
    return reasons


def target_of(scores: Sequence[float]) -> float:
    """Return the target: the mean over the seeds of the reference minus two standard deviations."""
    return statistics.fmean(scores) - 2 * statistics.stdev(scores)


def judge(scores: Sequence[float], target: float, pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, Any]:
    """Test whether scores exceed the target, and estimate the ratio of times.

    Parameters
    ----------
    scores : sequence of float
        Of the entry, one for each seed.
    target : float
        What their mean must exceed.
    pairs : sequence of tuple
        Seconds of the entry and of the reference for each seed; None where a run was interrupted.

    Returns
    -------
    dict
        `p` of the one-sided t test over seeds; `ratio` of times, the geometric mean over seeds, and its 95 % confidence
        interval, None with an untimed run; whether the target is reached, and whether the ratio is a record.
    """
    spread = statistics.stdev(scores)
    if spread > 0:
        p = float(stats.ttest_1samp(scores, target, alternative="greater").pvalue)
    else:  # scipy divides by zero
        p = float(scores[0] <= target)
    logs = [math.log(entry / reference) for entry, reference in pairs if entry is not None and reference is not None]
    ratio = None
    if len(logs) == len(pairs):
        interval = mean_interval(np.array(logs))
        ratio = [math.exp(value) for value in (interval.mean, interval.low, interval.high)]
    return {
        "score": statistics.fmean(scores),
        "spread": spread,
        "p": p,
        "is_reached": p < LEVEL,
        "ratio": ratio,
        "is_fast_enough": ratio is not None and ratio[0] <= (1 - LEAST_SAVING) * RECORD and ratio[2] < RECORD,
    }


def verdict(result: dict[str, Any]) -> str:
    """Say in a sentence what a result is."""
    reached = f"the target is {'' if result['is_reached'] else 'not '}reached"
    if result["trial"]:
        fast_enough = f"its time is {'' if result['is_fast_enough'] else 'not '}that of a record"
        return f"a trial, no entry ({', '.join(result['trial'])}): {reached}, and {fast_enough}"
    if not result["is_reached"]:
        return f"{reached}: an entry for what did not help"
    if result["ratio"] is None:
        return f"{reached}, but no record, since not all runs were timed"
    if not result["is_fast_enough"]:
        most = (1 - LEAST_SAVING) * RECORD
        return f"{reached}, but no record, which takes a ratio of at most {most:.2f} and an interval below {RECORD:.2f}"
    return "a candidate for a record, which is repeated with other seeds first"


def as_markdown(result: dict[str, Any]) -> str:
    """Format a result as an entry of the page."""
    rows = []
    untimed = []
    cpu: dict[str, list[float]] = {arm: [] for arm in ARMS}  # seconds of each timed run
    busy: dict[str, list[float]] = {arm: [] for arm in ARMS}  # cores
    for row in result["seeds"]:
        for arm in ARMS:
            if row[f"{arm}_seconds"] is not None:
                cpu[arm].append(row[f"{arm}_cpu"])
                busy[arm].append(row[f"{arm}_cpu"] / row[f"{arm}_seconds"])
        entry, reference = row[f"{ENTRY}_seconds"], row[f"{REFERENCE}_seconds"]
        if entry is None or reference is None:
            untimed.append(row["seed"])
        times = ["interrupted" if seconds is None else f"{seconds:.0f}" for seconds in (entry, reference)]
        ratio = "" if entry is None or reference is None else f"{entry / reference:.3f}"
        rows.append([row["seed"], f"{row[ENTRY]:.4f}", f"{row[REFERENCE]:.4f}", *times, ratio])
    header = ("seed", "score", "score of the reference", "seconds", "seconds of the reference", "ratio")
    halves = ", ".join(f"{half} tasks {score:.4f}" for half, score in result["halves"].items())
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    machines = "; ".join(result["cpus"])
    lines = [
        f"### {result['name']}",
        "",
        markdown_table(header, rows),
        "",
        f"- {verdict(result)}",
        f"- score {result['score']:.4f} (standard deviation {result['spread']:.4f}; {halves}), "
        f"target {result['target']:.4f}: p = {result['p']:.2g}",
    ]
    if result["target"] != result["target_of_reference"]:
        lines.append(f"- the reference's seeds in this run would make the target {result['target_of_reference']:.4f}")
    if result["ratio"] is not None:
        ratio, low, high = result["ratio"]
        lines.append(f"- time {ratio:.3f} [{low:.3f}, {high:.3f}] of the reference's (95 %)")
    for arm in ARMS:  # other processes take cores from a run, and speed that the cores share
        if cpu[arm]:
            lines.append(
                f"- the {arm} kept {min(busy[arm]):.2f} to {max(busy[arm]):.2f} cores busy, "
                f"for {min(cpu[arm]):.0f} to {max(cpu[arm]):.0f} s of CPU time"
            )
    if untimed:
        folders = " ".join(f"{arm}-{seed}" for seed in untimed for arm in ARMS)
        lines.append(f"- interrupted runs have no time: remove {folders}, and the same command repeats these pairs")
    lines += [f"- `{result['command']}`", f"- commit {result['commit'] or 'unknown'}; {versions}; {machines}"]
    for module, sha256 in result["plugins"].items():
        lines.append(f"- plug-in {module}, SHA-256 {sha256}")
    return "\n".join(lines)
