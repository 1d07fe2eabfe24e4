"""Paired comparisons of what has scores on the same tasks: networks, baselines, points of a sweep.

Each of them is an arm. A score of a task is the mean over its splits; two arms are compared on the same tasks and
splits and, if they have seeds, seed by seed. The lead of an arm over another is by how much its score is better, be
higher or lower better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from priors.real.tasks import shortened
from tabicl_train.config.schema import judged_by
from tabicl_train.console import counted, one_line, text_table
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.scores import FORMATS, NO_WEIGHTS, differing_members
from tabicl_train.evaluation.statistics import Estimate, holm, mean_interval, signed_rank_test, win_rate
from tabicl_train.run.curves import OUTSIDE, UNKNOWN
from tabicl_train.run.records import Records

LOWER_IS_BETTER = ("loss", "rmse", "pinball", "calibration_error", "crps", "seconds")  # ends of names of metrics
SIZES = ["rows", "labeled_rows", "features", "classes"]  # equal for all arms if their tasks are the same tables
# Of intervals neither more coverage nor less width is better.
WITHOUT_DIRECTION = [*SIZES, "n_estimators", "coverage", "width"]
NAMES = {name: title for name, (title, _) in FORMATS.items()} | {"rmse": "RMSE", "loss": "training loss"}
DEFAULT_METRICS = {"roc_auc": ("roc_auc", "log_loss"), "r2": ("r2", "pinball")}
TABLE = "comparison.csv"
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")  # begin a formula in a spreadsheet
LEAST_TASKS = 6  # with fewer, the signed-rank test has no p value below 0.05
COLUMNS = (
    *("metric", "a", "b", "mean_a", "mean_b", "lead", "low", "high", "smallest_shown"),
    *("win_rate", "win_low", "win_high", "p", "p_holm", "tasks", "splits", "seeds"),
    *("spread_a", "spread_b", "spread_lead"),
)


@dataclass(frozen=True)
class Arm:
    """Something with scores, or whose scores arms.py finds: by its paths, its parts or, for a baseline, its name.

    Parameters
    ----------
    name : str
        What it is called.
    scores : dict
        For each seed a row per task and split, with the index (data, split); without seeds, the only key is None.
    paths : dict
        The networks to score, by seed as well.
    parts : tuple of Arm
        The arms whose mean it is.
    is_trained : bool
        False for a baseline, which has no trained range.
    listed : tuple of str
        All tasks of the suite that it was scored on, if known; some may have no scores.
    """

    name: str
    scores: dict[Hashable, pd.DataFrame] = field(default_factory=dict)
    paths: dict[Hashable, str] = field(default_factory=dict)
    parts: tuple[Arm, ...] = ()
    is_trained: bool = True
    listed: tuple[str, ...] = ()

    @property
    def has_seeds(self) -> bool:
        """Whether it was trained with several seeds, by which it is paired."""
        return None not in self.scores

    def frame(self, seed: Hashable) -> pd.DataFrame:
        """Return its scores with a seed; without seeds, they are the same for every seed of another arm."""
        return self.scores[seed if self.has_seeds else None]


@dataclass(frozen=True)
class Paired:
    """The arms on the tasks, splits and seeds that all of them have."""

    arms: list[Arm]
    seeds: list[Hashable]  # [None] if no arm has any
    index: pd.MultiIndex  # (data, split)
    of: int  # tasks of the suite, or that any arm has scores of
    left_out: list[str]  # why there are fewer, and which seeds are missing
    num_outside: int = 0  # tasks outside the trained range of an arm, which count because they were asked for

    @property
    def tasks(self) -> list[str]:
        """The tasks, in the order of the first arm."""
        return list(dict.fromkeys(self.index.get_level_values("data")))

    @property
    def splits(self) -> int:
        """The largest number of splits of a task."""
        return int(self.index.get_level_values("data").value_counts().max())

    def values(self, metric: str) -> pd.DataFrame:
        """Return means over splits: a row per task and a column per (arm, seed); only tasks that all have finite."""
        columns = {}
        for arm in self.arms:
            for seed in self.seeds:
                frame = arm.frame(seed)
                if metric not in frame or not pd.api.types.is_numeric_dtype(frame[metric]):
                    raise ConfigError([f"metric is {metric!r}, for which {arm.name} has no scores"])
                columns[arm.name, seed] = frame.loc[self.index, metric]
        by_split = pd.DataFrame(columns)
        # The mean over the other splits of one arm would not be paired with that of another arm.
        is_finite = np.isfinite(by_split).all(axis=1).groupby(level="data", sort=False).all()
        means = by_split.groupby(level="data", sort=False).mean()[is_finite]
        return means.clip(lower=0) if metric == "r2" else means


@dataclass(frozen=True)
class Pair:
    """How two arms compare by a metric."""

    metric: str
    a: str
    b: str
    mean_a: float
    mean_b: float
    lead: Estimate  # of a over b: positive if a is better
    wins: Estimate  # share of tasks, or of seeds, on which a is better, a tie being half of one
    p: float  # of Wilcoxon's signed-rank test
    tasks: int
    splits: int
    seeds: int
    by_seed: bool  # whether the interval is over seeds only
    spreads: tuple[float, float, float]  # standard deviations over seeds of both means and of the lead; nan without
    leads: np.ndarray = field(repr=False)  # by task in the order of `task_names`, or by seed
    task_names: list[str] = field(repr=False, default_factory=list)
    p_holm: float = math.nan
    is_comparable: bool = True  # otherwise scores are of different objectives or tables, and neither arm is better

    @property
    def smallest_shown(self) -> float:
        """The smallest true lead that this comparison shows with a probability of 80 %."""
        return self.lead.smallest_shown

    @property
    def where(self) -> str:
        """What the comparison is over."""
        seeds = counted(self.seeds, "seed")
        if self.by_seed:
            return f"over {seeds}"
        if self.seeds == 1:
            return f"on {counted(self.tasks, 'task')}"
        if self.tasks == 1:
            return f"over {seeds} on a single task"  # says nothing about other tasks
        return f"on {self.tasks} tasks and {seeds}"

    @property
    def sentence(self) -> str:
        """What the comparison says, in words."""
        name = NAMES.get(self.metric, self.metric)
        lead, better, worse = self.lead, self.a, self.b
        if self.lead.mean < 0:
            lead, better, worse = -self.lead, self.b, self.a
        if not self.is_comparable:
            return f"{self.a} and {self.b} differ by {lead:.4f} of {name} {self.where}"
        if not np.any(self.leads):
            return f"{self.a} and {self.b} have the same {name} {self.where}"
        if not math.isfinite(self.lead.error):
            needed = "seeds" if self.by_seed else "tasks"
            found = f"{better} leads {worse} by {lead:.4f} of {name} {self.where}"
            return f"{found}; more {needed} are needed for an interval"
        if not self.lead.excludes_zero:
            power = f"one of {self.smallest_shown:.4f} would have been seen with a probability of 80 %"
            found = f"{self.lead:.4f} of {name} {self.where}"
            return f"no difference between {self.a} and {self.b} is shown: {found}; {power}"
        sentence = f"{better} is better than {worse} by {lead:.4f} of {name} {self.where}"
        if len(self.leads) >= LEAST_TASKS and self.p_holm > 0.05:
            sentence += f", which the signed-rank test does not confirm ({p_equation(self.p_holm)})"
        return sentence

    def row(self) -> dict[str, object]:
        """Return its row of comparison.csv."""
        values = (
            *(self.metric, self.a, self.b, self.mean_a, self.mean_b),
            *(self.lead.mean, self.lead.low, self.lead.high, self.smallest_shown),
            *(self.wins.mean, self.wins.low, self.wins.high, self.p, self.p_holm),
            *(self.tasks, self.splits, self.seeds, *self.spreads),
        )
        return dict(zip(COLUMNS, values, strict=True))


@dataclass(frozen=True)
class MeanRanks:
    """Mean ranks of three or more arms over tasks, and which of them are not shown to differ."""

    means: pd.Series  # by arm, the best first; 1 is the best
    p: float  # of Friedman's test
    groups: list[list[str]]  # arms of which no pair differs by the signed-rank test with Holm's correction
    tasks: int


@dataclass(frozen=True)
class Comparison:
    """The comparison of one arm with all others by a metric."""

    metric: str
    names: list[str]  # of the arms, the reference first
    pairs: list[Pair]  # the reference with each of the others
    values: pd.DataFrame  # see Paired.values
    ranks: MeanRanks | None  # of three or more arms on six or more tasks
    warnings: list[str]  # why arms may differ, or seem to, for another reason; the table and the figures have them, too

    @property
    def by_seed(self) -> bool:
        """Whether intervals are over seeds only."""
        return self.pairs[0].by_seed


def is_lower_better(metric: str) -> bool:
    """Whether a lower value of a metric is better."""
    return metric.endswith(LOWER_IS_BETTER)


def pair(arms: Sequence[Arm], outside: bool = False) -> Paired:
    """Find the tasks, splits and seeds that all arms have scores of.

    Parameters
    ----------
    arms : sequence of Arm
        Arms with scores.
    outside : bool
        Whether tasks outside the trained range of an arm count, too.

    Returns
    -------
    Paired

    Raises
    ------
    ConfigError
        If nothing is left, or a task has other sizes for another arm.
    """
    # Tasks and splits that every arm has with every seed.
    seeds = common_seeds(arms)
    frames = []
    for arm in arms:
        frames += [(arm, arm.frame(seed)) for seed in seeds]
    check_sizes(frames)
    index = frames[0][1].index
    every = set(index.get_level_values("data"))
    for _, frame in frames[1:]:
        every |= set(frame.index.get_level_values("data"))
        index = index[index.isin(frame.index)]

    # Why there are fewer tasks: without scores, or outside a trained range.
    left_out = []
    found = set(index.get_level_values("data"))
    # Said at every call: a task that cannot be read is skipped with a warning in the call that scores it, and no more.
    listed = dict.fromkeys(itertools.chain.from_iterable(arm.listed for arm in arms))
    unscored = [task for task in listed if task not in every]
    of = len(every) + len(unscored)
    if unscored:
        left_out.append(f"{len(unscored)} of {counted(of, 'task')} without any scores: {shortened(unscored)}")
    if missing := len(every) - len(found):
        left_out.append(f"{counted(missing, 'task')} without scores of every arm")
    beyond: set[str] = set()
    for arm, frame in frames:
        if arm.is_trained and "trained_range" in frame:
            is_outside = frame["trained_range"] == OUTSIDE
            beyond |= found & set(frame.index[is_outside].get_level_values("data"))
    if beyond and not outside:
        left_out.append(f"{counted(len(beyond), 'task')} outside the trained range of an arm")
        index = index[~index.get_level_values("data").isin(beyond)]

    for arm in arms:
        if arm.has_seeds and (extra := [str(seed) for seed in arm.scores if seed not in seeds]):
            left_out.append(f"of {arm.name} the seeds {', '.join(extra)}, which another arm lacks")
    if index.empty:
        advice = "; outside=true takes those outside a trained range, too" if found else ""
        reasons = "; ".join(left_out) or "there are none"
        raise ConfigError([f"no task is left on which {joined_names(arms)} can be compared: {reasons}{advice}"])
    return Paired(list(arms), seeds, index, of, left_out, num_outside=len(beyond) if outside else 0)


def joined_names(arms: Sequence[Arm]) -> str:
    return ", ".join(arm.name for arm in arms)


def common_seeds(arms: Sequence[Arm]) -> list[Hashable]:
    """Return the seeds that all arms with seeds have; raises ConfigError if there is none."""
    with_seeds = [arm for arm in arms if arm.has_seeds]
    if not with_seeds:
        return [None]
    seeds = list(with_seeds[0].scores)
    for arm in with_seeds[1:]:
        seeds = [seed for seed in seeds if seed in arm.scores]
    if not seeds:
        held = [f"{arm.name} has {', '.join(map(str, arm.scores))}" for arm in with_seeds]
        raise ConfigError([f"the arms have no seed in common: {'; '.join(held)}"])
    return seeds


def default_metrics(arms: Sequence[Arm]) -> list[str]:
    """Return what arms are compared by; raises ConfigError if some of them predict classes, and others numbers."""
    kinds = {}  # an arm of each kind: judged by ROC AUC, or by R2
    frames = []
    for arm in arms:
        frame = arm.frame(next(iter(arm.scores)))
        frames.append(frame)
        kinds[judged_by(frame)] = arm.name
    if len(kinds) > 1:
        raise ConfigError([f"{kinds['roc_auc']} predicts classes and {kinds['r2']} numbers; compare those of one kind"])
    by, other = DEFAULT_METRICS[next(iter(kinds))]
    has_other = all(other in frame and frame[other].notna().any() for frame in frames)  # a forest has no pinball loss
    return [by, other] if has_other else [by]


def check_sizes(frames: list[tuple[Arm, pd.DataFrame]]) -> None:
    """Check that all arms have seen the same tables.

    Parameters
    ----------
    frames : list of (Arm, DataFrame)
        The arms, each with its scores by `data` and `split`, where `data` is the name of a task.

    Raises
    ------
    ConfigError
        If one of SIZES of a task differs between two arms.
    """
    first_sizes: dict[tuple[str, str], tuple[float, str]] = {}  # by task and name of the size; which arm has it
    for arm, frame in frames:
        first_splits = frame[~frame.index.get_level_values("data").duplicated()]
        tasks = first_splits.index.get_level_values("data")
        for size in SIZES:
            if size not in frame:
                continue
            for task, value in zip(tasks, first_splits[size], strict=True):
                if not math.isfinite(value):  # unknown for this arm
                    continue
                first_value, first_arm = first_sizes.setdefault((task, size), (value, arm.name))
                if value != first_value:
                    sizes = f"{value:g} {size.replace('_', ' ')} for {arm.name}, and {first_value:g} for {first_arm}"
                    what = f"{task} has {sizes}"
                    raise ConfigError([f"{what}; compare scores with the same suite, rows and version of the data"])


def compare_arms(paired: Paired, metric: str, reference: str | None = None, by_seed: bool = False) -> Comparison:
    """Compare one arm with each of the others by a metric.

    Parameters
    ----------
    paired : Paired
        The arms.
    metric : str
        A column of their scores.
    reference : str, optional
        The name of the one arm, by default the first.
    by_seed : bool
        Whether intervals are over seeds alone, for scores whose tasks are no sample of anything, such as validation
        tables.

    Returns
    -------
    Comparison

    Raises
    ------
    ConfigError
        If no task has the metric, or there is no arm of this name.
    """
    if metric in WITHOUT_DIRECTION:
        raise ConfigError([f"metric is {metric!r}, for which neither higher nor lower is better"])
    values = paired.values(metric)
    if values.empty:
        raise ConfigError([f"metric is {metric!r}, which no task has for {joined_names(paired.arms)}"])
    names = [arm.name for arm in paired.arms]
    if reference is not None:
        if reference not in names:
            raise ConfigError([f"reference is {reference!r}; there are {', '.join(map(repr, names))}"])
        names = [reference, *(name for name in names if name != reference)]
    pairs = [pair_of(paired, values, metric, names[0], other, by_seed) for other in names[1:]]
    adjusted = holm([found.p for found in pairs])
    pairs = [replace(found, p_holm=float(p)) for found, p in zip(pairs, adjusted, strict=True)]
    ranks = None
    if len(names) > 2 and len(values) >= LEAST_TASKS and not by_seed:
        ranks = rank(values.T.groupby(level=0, sort=False).mean().T[names], metric)
    return Comparison(metric, names, pairs, values, ranks, warnings_of(paired))


def warnings_of(paired: Paired) -> list[str]:
    """Warn of networks that were not scored alike, and of tasks that may lie outside what they were trained on."""
    warnings = []
    networks = {}
    unknown = []
    for arm in paired.arms:
        if not arm.is_trained:
            continue
        rows = pd.concat([arm.frame(seed) for seed in paired.seeds])
        networks[arm.name] = rows
        if "trained_range" in rows and (rows["trained_range"] == UNKNOWN).any():
            unknown.append(arm.name)
    if members := differing_members(networks):
        warnings.append(members)
    if paired.num_outside:
        number = f"{paired.num_outside} of {counted(len(paired.tasks), 'task')}"
        warnings.append(f"outside the trained range of an arm, and still counted: {number}")
    if unknown:
        missing = f"the trained range of {', '.join(unknown)} is not recorded for all weights"
        warnings.append(f"{missing}, so that tasks outside it may count")
    return warnings


def pair_of(paired: Paired, values: pd.DataFrame, metric: str, a: str, b: str, by_seed: bool) -> Pair:
    """Compare two arms; values: see `Paired.values`, other arguments as of `compare`."""
    # By how much a is better, and how much that varies between seeds.
    sign = -1 if is_lower_better(metric) else 1
    of_a = values[a].to_numpy().T  # (seeds, tasks)
    of_b = values[b].to_numpy().T
    leads = sign * (of_a - of_b)
    has_seeds = len(paired.seeds) > 1
    spreads = (math.nan, math.nan, math.nan)
    if has_seeds:
        spreads = (spread_of_seeds(of_a), spread_of_seeds(of_b), spread_of_seeds(leads))

    # What tests take as independent: seeds, or tasks.
    samples = leads.mean(1) if by_seed else leads.mean(0)
    return Pair(
        metric=metric,
        a=a,
        b=b,
        mean_a=float(of_a.mean()),
        mean_b=float(of_b.mean()),
        lead=mean_interval(samples if by_seed else leads),
        wins=win_rate(samples),
        p=signed_rank_test(samples),
        tasks=len(values),
        splits=paired.splits,
        seeds=len(paired.seeds),
        by_seed=by_seed,
        spreads=spreads,
        leads=samples,
        task_names=[] if by_seed else list(values.index),
    )


def spread_of_seeds(values: np.ndarray) -> float:
    """Return the standard deviation of the means of seeds, of values (seeds, tasks)."""
    return float(values.mean(1).std(ddof=1))


def rank(table: pd.DataFrame, metric: str) -> MeanRanks:
    """Rank the columns (arms) of a table with a row per task, and group those that are not shown to differ.

    Friedman's test and mean ranks are as in Demsar (JMLR 7, 2006). Groups are by signed-rank tests of all pairs with
    Holm's correction instead of Nemenyi's, as Benavoli et al. (JMLR 17(5), 2016) recommend, since whether two arms
    differ should not depend on the others.
    """
    ranks = table.rank(axis=1, ascending=is_lower_better(metric))
    means = ranks.mean().sort_values(kind="stable")
    if (table.nunique(axis=1) == 1).all():  # scipy divides by zero
        return MeanRanks(means, 1.0, [list(means.index)], len(table))
    friedman = float(stats.friedmanchisquare(*(table[name] for name in table)).pvalue)
    all_pairs = list(itertools.combinations(means.index, 2))
    p_values = holm([signed_rank_test((table[a] - table[b]).to_numpy()) for a, b in all_pairs])
    alike = {frozenset(names) for names, p in zip(all_pairs, p_values, strict=True) if p > 0.05}
    return MeanRanks(means, friedman, groups_of(list(means.index), alike), len(table))


def groups_of(names: list[str], alike: set[frozenset]) -> list[list[str]]:
    """Return the longest runs of two or more neighboring names whose pairs are all alike."""
    groups: list[list[str]] = []
    for start in range(len(names)):
        end = start + 1
        while end < len(names) and all(frozenset((names[end], other)) in alike for other in names[start:end]):
            end += 1
        is_part = bool(groups) and set(names[start:end]) <= set(groups[-1])
        if end - start > 1 and not is_part:
            groups.append(names[start:end])
    return groups


def table_of(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return comparison.csv: a row per metric and pair."""
    rows = []
    for each in comparisons:
        rows += [found.row() for found in each.pairs]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def table_of_tasks(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return a row per metric, task, arm and seed with the score, the mean over splits."""
    rows = []
    for each in comparisons:
        for (name, seed), column in each.values.items():
            for task, score in column.items():
                rows.append({"metric": each.metric, "data": task, "arm": name, "seed": seed, "score": score})
    return pd.DataFrame(rows)


def comparisons_as_text(paired: Paired, comparisons: Sequence[Comparison]) -> str:
    """Format what is compared, a table for each metric, and a sentence for each pair."""
    parts = [scope(paired, comparisons)]
    parts += [text_table(*table_in_words(each)) for each in comparisons]
    sentences = []
    for each in comparisons:
        sentences += [found.sentence for found in each.pairs]
    parts.append("\n".join(map(one_line, sentences)))
    spreads = [seeds_in_words(each) for each in comparisons]
    spreads = [line for line in spreads if line]  # empty without seeds
    if spreads:
        parts.append("\n".join(map(one_line, spreads)))
    if len(paired.seeds) == 2 and not comparisons[0].by_seed:
        # 3,000 simulated comparisons of 20 or 75 tasks each: 87 % if seeds vary as much as tasks, 95 % if a tenth.
        parts.append("two seeds say little about others: these intervals may include the truth in only 87 % of cases")
    for each in comparisons:
        if each.ranks is not None:
            parts.append(one_line(ranks_in_words(each)))
    return "\n\n".join(parts)


def table_in_words(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the header and the lines of the table of a comparison, which begins with the name of the metric."""
    reference = comparison.names[0]
    title = NAMES.get(comparison.metric, comparison.metric)
    header = [title, "mean", f"lead of {reference}", "win rate", "p", "p (Holm)", "smallest shown"]
    lines = [[reference, f"{comparison.pairs[0].mean_a:.4f}", *[""] * 5]]
    lines += [[found.b, f"{found.mean_b:.4f}", *cells_of_pair(found)] for found in comparison.pairs]
    return header, lines


def scope(paired: Paired, comparisons: Sequence[Comparison]) -> str:
    """Say how many arms, tasks, splits and seeds are compared, and what is left out."""
    first = comparisons[0]
    arms = counted(len(paired.arms), "arm")
    if first.by_seed:
        sets = len(first.values)
        mean = "" if sets == 1 else f", each score the mean of {sets} sets of tables"
        line = f"{arms} paired by {counted(len(paired.seeds), 'seed')}{mean}"
    else:
        line = f"{arms} on {len(paired.tasks)} of {counted(paired.of, 'task')}, {counted(paired.splits, 'split')}"
        line += f", paired by {counted(len(paired.seeds), 'seed')}" if paired.seeds != [None] else ""
    lines = [line, *lines_of_weights(paired), *(f"left out: {reason}" for reason in paired.left_out)]
    for each in comparisons:
        not_finite = len(paired.tasks) - len(each.values)
        if not_finite and not each.by_seed:  # validations of different tables have different metrics
            name = NAMES.get(each.metric, each.metric)
            lines.append(f"left out of {name}: {counted(not_finite, 'task')} where a score of an arm is not a number")
    return "\n".join(map(one_line, lines))


def lines_of_weights(paired: Paired) -> list[str]:
    """Say for each network which weights were scored, if its scores tell."""
    lines = []
    for arm in paired.arms:
        names = []
        for seed in paired.seeds:
            frame = arm.frame(seed)
            if "weights" in frame:
                names += [name for name in frame["weights"].dropna().unique() if name != NO_WEIGHTS]
        if names:
            lines.append(f"weights of {arm.name}: {'; '.join(dict.fromkeys(names))}")
    return lines


def cells_of_pair(found: Pair) -> list[str]:
    """Return the cells of a pair: lead, win rate, p values, smallest difference."""
    smallest = "-" if math.isnan(found.smallest_shown) else f"{found.smallest_shown:.4f}"
    wins = f"{found.wins.mean:.2f}"
    return [f"{found.lead:+.4f}", wins, p_text(found.p), p_text(found.p_holm), smallest]


def p_text(p: float) -> str:
    return f"{p:.4f}" if p >= 0.0001 else "<0.0001"


def p_equation(p: float) -> str:
    return f"p = {p:.4f}" if p >= 0.0001 else "p < 0.0001"


def seeds_in_words(comparison: Comparison) -> str:
    """Say how much the means of the arms vary between seeds; an empty text without seeds."""
    first = comparison.pairs[0]
    if math.isnan(first.spreads[0]):
        return ""
    arms = [(first.a, first.spreads[0]), *((found.b, found.spreads[1]) for found in comparison.pairs)]
    spreads = ", ".join(f"{name} {spread:.4f}" for name, spread in arms)
    leads = ", ".join(f"{found.spreads[2]:.4f}" for found in comparison.pairs)
    name = NAMES.get(comparison.metric, comparison.metric)
    return f"standard deviation of {name} over {first.seeds} seeds: {spreads}; of the leads {leads}"


def ranks_in_words(comparison: Comparison) -> str:
    """Give mean ranks, Friedman's test, and the groups without a shown difference."""
    ranks = comparison.ranks
    assert ranks is not None
    means = ", ".join(f"{name} {mean:.2f}" for name, mean in ranks.means.items())
    name = NAMES.get(comparison.metric, comparison.metric)
    line = f"mean ranks by {name} on {ranks.tasks} tasks: {means} (Friedman's test: {p_equation(ranks.p)})"
    groups = [f"no difference shown among {', '.join(group)}" for group in ranks.groups]
    return "; ".join([line, *groups])


def all_warnings(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the warnings of all metrics, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(each.warnings for each in comparisons)))


def as_latex(comparisons: Sequence[Comparison]) -> str:
    """Format the table as LaTeX, for the package booktabs, with the warnings as comments."""
    lines = [*(f"% warning: {line}" for line in all_warnings(comparisons)), "% needs \\usepackage{booktabs}"]
    for each in comparisons:
        title = latex(NAMES.get(each.metric, each.metric))
        reference = latex(each.names[0])
        lines += [
            "\\begin{tabular}{lrrrrr}",
            "\\toprule",
            f"{title} & mean & lead of {reference} & win rate & $p$ (Holm) & smallest shown \\\\",
            "\\midrule",
            f"{reference} & {each.pairs[0].mean_a:.4f} & & & & \\\\",
        ]
        for found in each.pairs:
            lead, wins, _, p, smallest = (text.replace("<", "$<$") for text in cells_of_pair(found))
            lead = lead.replace("-", "$-$").replace("+", "$+$")
            lines.append(f"{latex(found.b)} & {found.mean_b:.4f} & {lead} & {wins} & {p} & {smallest} \\\\")
        lines += ["\\bottomrule", "\\end{tabular}", f"% {each.pairs[0].where}; 95 % confidence intervals", ""]
    # A name of a file may hold a line break, after which a comment would go on as commands.
    return "\n".join("".join(character if character.isprintable() else " " for character in line) for line in lines)


def latex(text: str) -> str:
    """Escape a text for LaTeX."""
    special = {character: f"\\{character}" for character in "&%$#_{}"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {"[": "{[}", "*": "{*}"}  # after the end of a row they would be its options
    return "".join(special.get(character, character) for character in text)


def without_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """Put an apostrophe before texts that a spreadsheet would compute, such as a name that begins with =."""
    return table.map(lambda cell: f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULAS) else cell)


def write_tables(folder: Path, comparisons: Sequence[Comparison], overwrite: bool = False) -> None:
    """Write comparison.csv, .tex and comparison_tasks.csv; raises ConfigError if other arms are compared there."""
    table = without_formulas(table_of(comparisons))
    records = Records(folder)
    path = folder / TABLE
    if path.exists() and not overwrite:
        held = [(row.get("a"), row.get("b")) for row in records.rows(TABLE)]
        if held and set(held) != set(zip(table["a"], table["b"], strict=True)):
            raise ConfigError([f"{path} compares other arms: set overwrite=true, or another output"])
    records.replace(TABLE, table.to_csv(index=False))
    records.replace("comparison.tex", as_latex(comparisons))
    records.replace("comparison_tasks.csv", without_formulas(table_of_tasks(comparisons)).to_csv(index=False))
