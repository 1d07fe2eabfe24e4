"""tabicl-compare: pairing, leads and intervals against loops, what it says, and the command on files and networks."""

import numpy as np
import pandas as pd
import pytest
from command_line import command
from matplotlib.figure import Figure
from networks import TINY, TINY_REGRESSOR, tiny_network
from training_runs import UNTRAINED_STEP, write_untrained_run

from tabicl_train.errors import ConfigError
from tabicl_train.evaluation import arms as evaluated_arms
from tabicl_train.evaluation import evaluate as evaluation
from tabicl_train.evaluation.compare import (
    Arm,
    as_latex,
    compare_arms,
    comparisons_as_text,
    default_metrics,
    groups_of,
    pair,
    write_tables,
)
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.weights.export import save_public
from tabicl_train.weights.hub_format import save_hub
from tabicl_train.weights.pretrained import Pretrained

TASKS = [f"task{i}" for i in range(8)]


@pytest.fixture
def unsaved(monkeypatch) -> dict[str, Figure]:
    """The figures of comparisons by the names of their files, which are not written: that takes most of the time."""
    figures = {}
    monkeypatch.setattr(
        "tabicl_train.report.comparison.save_figure", lambda figure, path: figures.update({path.name: figure})
    )
    return figures


def frame(values: dict[tuple[str, int], float], metric: str = "roc_auc", **columns) -> pd.DataFrame:
    """Scores by task and split."""
    index = pd.MultiIndex.from_tuples(values, names=["data", "split"])
    return pd.DataFrame({metric: list(values.values()), **columns}, index=index)


def drawn(seed: int, shift: float = 0.0, metric: str = "roc_auc", **columns) -> pd.DataFrame:
    """Scores of 8 tasks and 3 splits."""
    rng = np.random.default_rng(seed)
    return frame(
        {(task, split): rng.uniform(0.5, 0.7) + shift for task in TASKS for split in range(3)}, metric, **columns
    )


def mean_lead(a: pd.DataFrame, b: pd.DataFrame, metric: str = "roc_auc") -> list[float]:
    """Leads by task, with loops."""
    leads = []
    for task in dict.fromkeys(a.index.get_level_values("data")):
        splits = [split for data, split in a.index if data == task and (task, split) in b.index]
        if splits:
            leads.append(np.mean([a.loc[(task, s), metric] - b.loc[(task, s), metric] for s in splits]))
    return leads


def test_two_arms_are_compared_on_the_tasks_and_splits_that_both_have():
    a = drawn(0).drop([("task1", 2), ("task3", 0), ("task3", 1), ("task3", 2)])
    b = drawn(1).drop([("task1", 0)])
    paired = pair([Arm("A", {None: a}), Arm("B", {None: b})])
    (found,) = compare_arms(paired, "roc_auc").pairs
    leads = mean_lead(a, b)
    expected = mean_interval(np.array(leads))
    assert found.leads == pytest.approx(leads) and len(leads) == 7
    assert (found.lead.mean, found.lead.low, found.lead.high) == pytest.approx(
        (expected.mean, expected.low, expected.high)
    )
    assert found.wins.mean == pytest.approx(np.mean(np.array(leads) > 0))
    assert paired.left_out == ["1 task without scores of every arm"]
    assert (paired.of, found.tasks) == (8, 7)


def test_seeds_are_paired_and_a_fixed_arm_is_paired_with_all_of_them():
    a = Arm("A", {0: drawn(0), 1: drawn(1), 2: drawn(2)})
    b = Arm("B", {2: drawn(5), 0: drawn(6), 7: drawn(7)})
    fixed = Arm("fixed", {None: drawn(9)})
    paired = pair([a, b, fixed])
    assert paired.seeds == [0, 2]
    assert paired.left_out[0] == "of A the seeds 1, which another arm lacks"
    of_b, of_fixed = compare_arms(paired, "roc_auc").pairs
    for found, others in ((of_b, b.scores), (of_fixed, {0: fixed.scores[None], 2: fixed.scores[None]})):
        leads = np.array([mean_lead(a.scores[seed], others[seed]) for seed in (0, 2)])
        expected = mean_interval(leads)
        assert (found.lead.mean, found.lead.low) == pytest.approx((expected.mean, expected.low))
        assert found.spreads[2] == pytest.approx(leads.mean(1).std(ddof=1))
    assert of_fixed.spreads[1] == pytest.approx(0, abs=1e-12)
    by_seed = compare_arms(pair([a, Arm("B", b.scores)]), "roc_auc", by_seed=True).pairs[0]
    of_seeds = mean_interval(np.array([np.mean(mean_lead(a.scores[seed], b.scores[seed])) for seed in (0, 2)]))
    assert (by_seed.lead.low, by_seed.lead.high) == pytest.approx((of_seeds.low, of_seeds.high))
    with pytest.raises(ConfigError, match=r"no seed in common: A has 0; B has 1"):
        pair([Arm("A", {0: drawn(0)}), Arm("B", {1: drawn(0)})])


def test_tasks_outside_the_trained_range_of_any_arm_count_only_if_asked_for():
    # three splits of each task
    of_a = np.repeat(["outside" if task == "task0" else "inside" for task in TASKS], 3).tolist()
    of_b = np.repeat(["outside" if task == "task5" else "unknown" for task in TASKS], 3).tolist()
    everything_outside = ["outside"] * 24
    a = Arm("A", {None: drawn(0, trained_range=of_a)})
    b = Arm("B", {None: drawn(1, trained_range=of_b)})
    forest = Arm("forest", {None: drawn(2, trained_range=everything_outside)}, is_trained=False)

    assert pair([a, b, forest]).tasks == [task for task in TASKS if task not in ("task0", "task5")]
    assert pair([a, b, forest], outside=True).tasks == TASKS
    c = Arm("C", {None: drawn(1, trained_range=everything_outside)})
    with pytest.raises(ConfigError, match="outside=true takes those outside"):
        pair([a, c])


def test_a_lead_is_positive_if_the_first_is_better_and_r2_below_0_counts_as_0():
    arms = [Arm("A", {None: drawn(0, metric="log_loss")}), Arm("B", {None: drawn(0, 0.2, metric="log_loss")})]
    (found,) = compare_arms(pair(arms), "log_loss").pairs
    assert found.lead.mean == pytest.approx(0.2) and found.wins.mean == 1
    a = frame({("x", 0): 0.4, ("x", 1): 0.2, ("y", 0): -1e9}, "r2")
    b = frame({("x", 0): 0.1, ("x", 1): 0.1, ("y", 0): -3.0}, "r2")
    (found,) = compare_arms(pair([Arm("A", {None: a}), Arm("B", {None: b})]), "r2").pairs
    assert found.leads == pytest.approx([0.2, 0.0])


def test_the_default_metrics_are_those_that_all_arms_have():
    network, forest = (
        Arm(name, {None: drawn(0, metric="r2", pinball=loss)}) for name, loss in (("A", 0.1), ("B", np.nan))
    )
    assert default_metrics([network, network]) == ["r2", "pinball"]
    assert default_metrics([network, forest]) == ["r2"]


def test_a_task_counts_only_if_all_scores_are_finite():
    a, b = drawn(0), drawn(1)
    a.loc[("task2", 1)] = np.nan
    paired = pair([Arm("A", {None: a}), Arm("B", {None: b})])
    comparison = compare_arms(paired, "roc_auc")
    assert comparison.pairs[0].leads == pytest.approx(mean_lead(a.drop("task2"), b.drop("task2")))
    assert "left out of ROC AUC: 1 task where a score" in comparisons_as_text(paired, [comparison])


def test_tables_of_other_sizes_are_not_compared():
    arms = [Arm("A", {None: drawn(0, rows=100)}), Arm("B", {None: drawn(1, rows=90)})]
    with pytest.raises(ConfigError, match="task0 has 90 rows for B, and 100 for A"):
        pair(arms)


def test_what_it_says():
    base, better = drawn(0), drawn(0, 0.05)
    noisy = base + np.random.default_rng(3).normal(0, 0.1, (24, 1))

    def sentence(a, b, **options) -> str:
        return compare_arms(pair([Arm("A", a), Arm("B", b)]), "roc_auc", **options).pairs[0].sentence

    assert sentence({None: base}, {None: better}) == (
        "B is better than A by 0.0500 [0.0500, 0.0500] of ROC AUC on 8 tasks"
    )
    assert sentence({None: base}, {None: base}) == "A and B have the same ROC AUC on 8 tasks"
    found = compare_arms(pair([Arm("A", {None: base}), Arm("B", {None: noisy})]), "roc_auc").pairs[0]
    power = f"one of {found.smallest_shown:.4f} would have been seen with a probability of 80 %"
    assert found.sentence.startswith("no difference between A and B is shown: ")
    assert found.sentence.endswith(power)
    alone = sentence({0: base}, {0: better}, by_seed=True)
    assert alone == "B leads A by 0.0500 of ROC AUC over 1 seed; more seeds are needed for an interval"


def test_it_says_where_an_interval_is_not_one_over_tasks():
    arms = [Arm("A", {0: drawn(0), 1: drawn(1)}), Arm("B", {0: drawn(5), 1: drawn(6)})]
    paired = pair(arms)
    assert "two seeds say little" in comparisons_as_text(paired, [compare_arms(paired, "roc_auc")])

    on_one_task = []
    for arm in arms:
        on_one_task.append(Arm(arm.name, {seed: scores.loc[["task0"]] for seed, scores in arm.scores.items()}))
    (difference,) = compare_arms(pair(on_one_task), "roc_auc").pairs
    assert "over 2 seeds on a single task" in difference.sentence


def test_ranks_and_groups():
    arms = [Arm("low", {None: drawn(0)}), Arm("high", {None: drawn(0, 0.2)}), Arm("middle", {None: drawn(0, 0.1)})]
    found = compare_arms(pair(arms), "roc_auc", reference="high")
    assert found.names == ["high", "low", "middle"]
    assert found.ranks.means.to_dict() == {
        "high": 1,
        "middle": 2,
        "low": 3,
    }
    # 8 of 8 tasks have the two-sided p value 2 / 2^8, times 3 pairs 0.023: all of them differ
    assert found.ranks.groups == [] and found.ranks.p == pytest.approx(np.exp(-8))  # chi square of 16 with 2 degrees
    alike = [Arm(name, {None: drawn(0)}) for name in "ABC"]
    assert compare_arms(pair(alike), "roc_auc").ranks.groups == [["A", "B", "C"]]
    pairs = {frozenset(two) for two in ("ab", "bc", "cd", "bd")}
    assert groups_of(list("abcd"), pairs) == [["a", "b"], ["b", "c", "d"]]


def test_arms_can_have_any_name_in_latex():
    arms = [Arm("a_b & 50%", {None: drawn(0)}), Arm("{C}", {None: drawn(1)})]
    paired = pair(arms)
    comparison = compare_arms(paired, "roc_auc")
    text = as_latex([comparison])
    assert r"lead of a\_b \& 50\%" in text
    assert r"\{C\} & 0." in text
    assert r"\toprule" in text
    assert text.count("&") - text.count(r"\&") == 3 * 5
    assert "a_b & 50%" in comparisons_as_text(paired, [comparison])


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\f", "\v", "\x1c", "\x85", "\u2028", "\x00"])
def test_no_name_leaves_its_line_of_latex(end):
    name = f"a{end}\\immediate\\write18{{id}}"
    arms = [Arm(name, {None: drawn(0, trained_range="unknown")}), Arm(f"[4pt]{end}*", {None: drawn(1)})]
    text = as_latex([compare_arms(pair(arms), "roc_auc")])
    assert len(text.splitlines()) == 11 and text.isascii()
    assert not {chr(code) for code in range(32)} & set(text.replace("\n", ""))
    for line in text.splitlines():
        assert line.startswith("%") or r"\immediate" not in line
        assert not line.startswith(("[", "*"))


def test_no_name_is_a_formula_in_a_table(tmp_path):
    names = [f"{first}1+1|x" for first in "=+-@\t\r\n"]
    name = names[-1]
    scores = drawn(0).rename(index=dict(zip(TASKS, names, strict=False)))
    arms = [Arm(name, {None: scores}), Arm("-b", {None: scores}), Arm("c-d", {None: scores + 0.1})]
    for _ in range(2):  # the second time, the same arms are found there
        write_tables(tmp_path, [compare_arms(pair(arms), "roc_auc")])
    table = pd.read_csv(tmp_path / "comparison.csv", lineterminator="\n")
    assert table[["a", "b"]].to_numpy().tolist() == [[f"'{name}", "'-b"], [f"'{name}", "c-d"]]
    assert table["lead"].iloc[1] == pytest.approx(-0.1)
    tasks = pd.read_csv(tmp_path / "comparison_tasks.csv", lineterminator="\n")
    assert set(tasks["data"]) == {*(f"'{name}" for name in names), *TASKS[len(names) :]}
    assert set(tasks["arm"]) == {f"'{name}", "'-b", "c-d"}


def write_scores(path, shift: float, method: str = "this model", tasks=TASKS, **columns) -> None:
    scores = drawn(0, shift).loc[list(tasks)].assign(method=method, log_loss=0.6 - shift, **columns).reset_index()
    other = drawn(1).loc[list(tasks)].assign(method="random forest", log_loss=0.7).reset_index()
    pd.concat([scores, other]).to_csv(path, index=False)


def test_csv_files_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_scores("one.csv", 0.0)
    write_scores("two.csv", 0.1, tasks=TASKS[:7])
    result = command("compare", "one.csv", "two.csv")
    assert result.returncode == 0, result.stderr
    assert "2 arms on 7 of 8 tasks, 3 splits" in result.stdout
    assert "two is better than one by 0.1000 [0.1000, 0.1000] of ROC AUC on 7 tasks" in result.stdout
    assert "two is better than one by 0.1000 [0.1000, 0.1000] of log loss on 7 tasks" in result.stdout
    files = {path.name for path in (tmp_path / "comparison").iterdir()}
    assert files == {"comparison.csv", "comparison.tex", "comparison.pdf", "comparison.png", "comparison_tasks.csv"}
    table = pd.read_csv("comparison/comparison.csv")
    assert table[["metric", "a", "b"]].to_numpy().tolist() == [["roc_auc", "one", "two"], ["log_loss", "one", "two"]]
    assert table["lead"].to_numpy() == pytest.approx([-0.1, -0.1])
    assert command("compare", "one.csv", "two.csv").returncode == 0  # again

    refused = command("compare", "one.csv")  # its network with its other method
    assert refused.returncode == 2
    assert "compares other arms: set overwrite=true" in refused.stderr
    result = command("compare", "one.csv", "two.csv", "two.csv:random forest", "overwrite=true", "metric=roc_auc")
    assert result.returncode == 0 and "mean ranks by ROC AUC on 7 tasks" in result.stdout, result.stderr
    assert {"ranks.pdf", "ranks.png"} < {path.name for path in (tmp_path / "comparison").iterdir()}


@pytest.mark.usefixtures("unsaved")
def test_other_numbers_of_ensemble_members_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, columns in (("eight", {"n_estimators": 8}), ("one", {"n_estimators": 1}), ("old", {})):
        write_scores(f"{name}.csv", 0.0, **columns)
    write_scores("same.csv", 0.1, n_estimators=8)
    said = "the networks were not scored with the same number of ensemble members (n_estimators): "
    for others, numbers in ((["one.csv"], "one 1"), (["old.csv", "same.csv"], "old not recorded, same 8")):
        result = command("compare", "eight.csv", *others, "eight.csv:random forest", "overwrite=true")
        assert f"{said}eight 8, {numbers}\n" in result.stdout, result.stderr
    for words in (["eight.csv", "same.csv"], ["eight.csv"]):
        result = command("compare", *words, "overwrite=true")
        assert result.returncode == 0 and said not in result.stdout


def test_the_terminal_the_table_and_every_figure_have_the_warnings(tmp_path, monkeypatch, unsaved):
    monkeypatch.chdir(tmp_path)
    outside = np.repeat(["outside" if task == "task0" else "inside" for task in TASKS], 3).tolist()
    write_scores("one.csv", 0.0, n_estimators=1, trained_range=outside)
    write_scores("two.csv", 0.1, n_estimators=8, trained_range="unknown")
    warnings = [
        "the networks were not scored with the same number of ensemble members (n_estimators): one 1, two 8",
        "outside the trained range of an arm, and still counted: 1 of 8 tasks",
        "the trained range of two is not recorded for all weights, so that tasks outside it may count",
    ]
    words = ["one.csv", "two.csv", "one.csv:random forest"]
    for option, expected in (("outside=true", warnings), ("outside=false", [warnings[0], warnings[2]])):
        result = command("compare", *words, option)
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[: len(expected)] == [f"warning   {line}" for line in expected]
        assert (tmp_path / "comparison/comparison.tex").read_text().startswith(f"% warning: {expected[0]}\n")
        for name in ("comparison.pdf", "ranks.png"):
            below = " ".join(unsaved[name].texts[-1].get_text().split())
            assert below == " ".join(f"warning: {line}" for line in expected)


def test_mistakes_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_scores("one.csv", 0.0)
    pd.DataFrame({"data": ["x"], "split": [0], "method": ["this model"], "r2": [0.5]}).to_csv("numbers.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for words, message in (
        ([], "nothing to compare"),
        (["mini"], "mini is one arm; name another one"),
        (["one.csv", "other.csv"], "other.csv has no column data, split, method"),
        (["one.csv", "one.csv:lasso"], "has no scores of 'lasso'; its methods are this model, random forest"),
        (["one.csv", "numbers.csv"], "predicts classes and numbers numbers"),
        (["one.csv", "random forest"], "is a baseline, which is scored together with a network"),
        (["one.csv", "missing"], "no such file or run directory"),
        (["mini", "missing.csv"], "missing.csv cannot be read"),
        (["one.csv", "runs/*"], "there is no such run directory"),
        (["one.csv", "one.csv:random forest", "metric=f1"], "metric is 'f1', for which one has no scores"),
        (["one.csv", "one.csv:random forest", "metric=method"], "metric is 'method', for which one has no scores"),
        (["one.csv", "one.csv:random forest", "metric=coverage"], "neither higher nor lower is better"),
        (["one.csv", "one.csv"], "2 arms are called one.csv"),
        (["one.csv", "one.csv:random forest", "suite=keel", "rows=500"], "suite, rows: no network is scored"),
        (["mini", "CatBoost"], "there are no scores of CatBoost on such tasks of suite=sklearn"),
        (["one.csv", "one.csv:random forest", "reference=x"], "reference is 'x'; there are 'one', 'random forest'"),
        (["one.csv", "one.csv:random forest", "suit=sklearn"], "did you mean suite?"),
    ):
        result = command("compare", *words)
        assert result.returncode == 2 and message in result.stderr, (words, result.stderr)
        assert "score  " not in result.stdout + result.stderr  # nothing was scored before


@pytest.mark.slow  # scores two networks nine times
@pytest.mark.usefixtures("unsaved")
def test_networks_are_scored_once_beside_baselines(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(60, 3)), columns=["a", "b", "c"]).assign(label=np.repeat([0, 1], 30))
    table.to_csv(tmp_path / "one.csv", index=False)
    table.assign(a=table["a"] + table["label"]).to_csv(tmp_path / "two.csv", index=False)
    (tmp_path / "tasks.csv").write_text("item,target\none.csv,label\ntwo.csv,label\n")
    save_public(TINY, tiny_network().state_dict(), tmp_path / "tiny.ckpt")
    save_public(TINY, {k: 0.5 * v for k, v in tiny_network().state_dict().items()}, tmp_path / "half.ckpt")
    scored = []
    real = evaluated_arms.score_checkpoint
    monkeypatch.setattr(
        evaluated_arms, "score_checkpoint", lambda o, *rest: scored.append(o.checkpoint) or real(o, *rest)
    )
    monkeypatch.chdir(tmp_path)
    words = ["tiny.ckpt", "half.ckpt", "logistic regression", "suite=folder", "folder=.", "n_estimators=1", "splits=2"]
    result = command("compare", *words)
    assert result.returncode == 0, result.stderr
    assert "3 arms on 2 of 2 tasks, 2 splits" in result.stdout
    assert "is not recorded" in result.stdout
    assert scored == ["tiny.ckpt", "half.ckpt"]
    again = command("compare", *words)
    assert again.stdout == result.stdout and len(scored) == 2

    def interrupted(task, *rest):
        tasks.append(task.name)
        if len(tasks) == 4:  # the second task of the second network; a kill would find the same files
            raise KeyboardInterrupt
        return score_task(task, *rest)

    tasks, score_task = [], evaluation.score_task
    monkeypatch.setattr(evaluation, "score_task", interrupted)
    assert command("compare", *words, "output=other").returncode != 0
    continued = command("compare", *words, "output=other")
    assert tasks == ["one.csv", "two.csv", "one.csv", "two.csv", "two.csv"]
    assert continued.stdout.replace("other", "comparison") == result.stdout
    table.assign(b=0.0).to_csv(tmp_path / "two.csv", index=False)  # other data: scored again
    command("compare", *words)
    assert len(scored) == 7
    (tmp_path / "tasks.csv").write_text("item,target,drop\none.csv,label,a\ntwo.csv,label,a\n")
    without = command("compare", *words)  # another task: scored again
    assert len(scored) == 9 and without.stdout != result.stdout
    save_public(TINY_REGRESSOR, tiny_network(TINY_REGRESSOR).state_dict(), tmp_path / "numbers.ckpt")
    mixed = command("compare", "tiny.ckpt", "numbers.ckpt", *words[3:])
    assert mixed.returncode == 2
    assert "predicts classes and numbers numbers" in mixed.stderr


def folder_with_a_table(folder) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(60, 3)), columns=["a", "b", "c"]).assign(label=np.repeat([0, 1], 30))
    table.to_csv(folder / "one.csv", index=False)
    (folder / "tasks.csv").write_text("item,target\none.csv,label\n")


def test_tasks_without_scores_are_named_every_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder_with_a_table(tmp_path)
    (tmp_path / "tasks.csv").write_text("item,target\none.csv,label\nlost.csv,label\n")
    save_public(TINY, tiny_network().state_dict(), tmp_path / "tiny.ckpt")
    words = ["tiny.ckpt", "logistic regression", "suite=folder", "folder=.", "n_estimators=1", "splits=1"]
    for time in ("first", "second"):
        result = command("compare", *words)
        assert result.returncode == 0, result.stderr
        assert ("lost.csv is skipped" in result.stderr) == (time == "first")
        assert "2 arms on 1 of 2 tasks, 1 split" in result.stdout
        assert "left out: 1 of 2 tasks without any scores: lost.csv\n" in result.stdout


@pytest.mark.usefixtures("unsaved")
def test_weights_are_chosen_in_checkpoints_of_runs_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder_with_a_table(tmp_path)
    write_untrained_run(tmp_path / "run")
    save_public(TINY, tiny_network().state_dict(), tmp_path / "tiny.ckpt")
    save_hub(Pretrained(TINY, tiny_network().state_dict()), tmp_path / "hub", lambda folder: None)
    words = ["tiny.ckpt", "hub", "suite=folder", "folder=.", "n_estimators=1", "splits=1", "outside=true"]
    checkpoint = f"run/checkpoints/step-{UNTRAINED_STEP:08d}.ckpt"
    result = command("compare", checkpoint, *words, "weights=ema")
    assert result.returncode == 0, result.stderr
    assert f"weights of step-{UNTRAINED_STEP:08d}: the exponential moving average, step 10" in result.stdout
    for export in ("tiny.ckpt", "hub"):
        line = f"{export} holds one set of weights, which is used; weights=ema applies to runs only\n"
        assert result.stderr.count(line) == 1
    refused = command("compare", checkpoint, *words, "weights=best")
    assert refused.returncode == 2 and "weights=best needs a run directory" in refused.stderr
    best = command("compare", "run", *words, "weights=best", "output=best")
    assert best.returncode == 0 and "weights of run: the best by validation, step 5" in best.stdout, best.stderr
