"""The table, results.csv and the page, of sweeps whose runs never ran and whose results are known in closed form."""

import csv
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from browser import BROWSER, browse
from command_line import command
from html_page import Page
from optuna.trial import TrialState
from scipy import stats

from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.arms import mean_arm
from tabicl_train.evaluation.compare import Arm
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.stream.curriculum import plan_step
from tabicl_train.sweep import jobs
from tabicl_train.sweep import run as sweep_run
from tabicl_train.sweep.arms import arms_of_sweep
from tabicl_train.sweep.comparable import LEARNING_SETTINGS, shared_in_words
from tabicl_train.sweep.compare import compare_points
from tabicl_train.sweep.plan import Plan, make_plan
from tabicl_train.sweep.results import Sweep, write_page
from tabicl_train.sweep.study import RUNS, has_more, open_study, start_trial

pytestmark = pytest.mark.usefixtures("unrendered")
RATE, WIDTH = "curriculum.stages.smoke.learning_rate", "model.embed_dim"
REAL_ONLY = [
    "validation.rows=[]",
    "validation.best=real",
    "curriculum.stages.smoke.rows=[20,120]",
]  # iris is inside the trained range
SETTINGS = ["experiment=smoke", "validation.every=5", *REAL_ONLY, "trainer.accelerator=cpu"]
GRID = [
    *SETTINGS,
    f"{RATE}=1e-3,1e-2,1e-4",
    f"{WIDTH}=16,32",
    "optimizer=muon",
    "seed=0,1,2",
    "sweep.name='rates & widths'",
]


def invent(plan: Plan, quality: Callable[[dict, int], float], count: int | None = None) -> Sweep:
    """A sweep of so many trials; `quality` of a point and a seed is the loss of the run, nan if it has failed."""
    plan.folder.mkdir(exist_ok=True)
    study = open_study(plan)
    data = "synthetic" if plan.sweep.metric == "synthetic/loss" else "iris"
    for _ in range(plan.total if count is None else count):
        trial = start_trial(plan, study)
        values = []
        for name, seed, _ in trial.user_attrs[RUNS]:
            values.append(quality(trial.params, seed))
            (plan.folder / name).mkdir()
            (plan.folder / name / "validation.csv").write_text(f"step,data,loss\n20,{data},{values[-1]!r}\n")
            if plan.sweep.metric == "loss":
                (plan.folder / name / "metrics.csv").write_text(f"step,loss\n20,{values[-1]!r}\n")
            status = "failed" if math.isnan(values[-1]) else "finished"
            (plan.folder / name / "status.json").write_text(json.dumps({"status": status, "step": 20}))
        if math.isnan(sum(values)):
            trial.set_user_attr("reason", "it <diverged>")
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, sum(values) / len(values))
    return Sweep(plan.folder)


def quality(point: dict, seed: int) -> float:
    return math.nan if point[RATE] == 1e-4 else point[RATE] * 10 + 1 / point[WIDTH] + 0.01 * seed**2


def quality_of_width(point: dict, seed: int) -> float:
    return 1 / point[WIDTH] + 0.01 * seed


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Sweep:
    return invent(make_plan([*GRID, f"run_dir={tmp_path_factory.mktemp('sweeps')}/it"]), quality)


def test_the_ranking_has_means_and_intervals_over_seeds(sweep):
    rows = sweep.ranking()
    best = [1e-2 + 1 / 32 + 0.01 * seed**2 for seed in range(3)]
    low, high = stats.ttest_1samp(best, 0).confidence_interval(0.95)
    assert rows["learning_rate"].tolist() == ["0.001", "0.001", "0.01", "0.01"]
    assert rows["embed_dim"].tolist() == ["32", "16", "32", "16"]
    assert rows["seeds"].tolist() == [3] * 4
    assert rows["real/loss"][1] == f"{sum(best) / 3:.4f}"
    assert rows["95% interval"][1] == f"[{low:.4f}, {high:.4f}]"
    assert sweep.without_result()["reason"].tolist() == ["it <diverged>"] * 2
    assert "6 points: 4 finished, 2 failed" in sweep.text()
    assert ["1", *map(str, rows.loc[1])] in [re.split(r" {2,}", line) for line in sweep.text().splitlines()]


def test_a_sweep_says_which_data_sets_count_and_keeps_them(tmp_path):
    """Of 60 rows, 42 are labeled: iris alone is like tables of the runs."""
    settings = ["experiment=smoke", "validation.every=5", *REAL_ONLY, "seed=0,1", f"run_dir={tmp_path}/it"]
    plan = make_plan(settings)
    assert plan.sweep.metric == "real/loss"
    text = invent(plan, lambda point, seed: 1.0).text()
    assert "real/loss (lower is better), the mean over 1 of 4 data sets, those inside the" in text
    assert "trained range of all runs: iris.\n" in text
    with pytest.raises(ConfigError, match="no public data set lies inside the trained range of all runs"):
        make_plan([*settings, "curriculum.stages.smoke.features=[1,3]", "sweep.metric=real/loss"])
    assert make_plan([*settings, "curriculum.stages.smoke.features=[1,3]"]).sweep.metric == "loss"


def test_the_commands_of_the_best_run_are_its_own(sweep):
    train, export = sweep.best_run.commands
    assert sweep.best_run.seed == 0
    assert train in sweep.text()
    assert export in sweep.text()
    assert f"best run of the best point: {sweep.best_run.name} (0.0413)" in sweep.text()
    config = compose([*sweep.best_run.arguments, f"run_dir='{sweep.best_run.folder}'"])
    assert (config.model.embed_dim, config.seed) == (32, 0)
    assert f"run_dir={sweep.best_run.folder}" in train


def test_results_csv_has_a_row_for_each_run(sweep):
    sweep.write_csv()
    header, *rows = (sweep.folder / "results.csv").read_text().splitlines()
    assert header == "run,learning_rate,embed_dim,seed,status,real/loss,step"
    assert len(rows) == 18
    assert sum(",failed," in row for row in rows) == 6


@pytest.mark.slow  # the browser
def test_the_page_needs_no_network_and_has_the_tables_and_figures(sweep, tmp_path):
    write_page(sweep)
    page = Page(sweep.folder / "sweep.html")
    assert "rates & widths" in page.text
    assert len(page.pictures) == 5  # two of them slices
    assert page.table("rank", "learning_rate")["1"]["embed_dim"] == "32"
    assert len(page.table("run", "status")) == 18
    assert {row["reason"] for row in page.table("trial").values()} == {"it <diverged>"}
    if BROWSER:
        assert "Best run of the best point:" in browse("--dump-dom", sweep.folder / "sweep.html")


@pytest.mark.parametrize(
    ("settings", "count", "pictures"), [(["optimizer=muon,adamw"], 0, 0), ([], 1, 1), (["optimizer=muon,adamw"], 2, 3)]
)
def test_pages_of_few_results(settings, count, pictures, tmp_path):
    found = invent(make_plan([*SETTINGS, *settings, f"run_dir={tmp_path}/it"]), lambda point, seed: 1.0, count)
    write_page(found)
    found.write_csv()
    assert len(Page(found.folder / "sweep.html").pictures) == pictures
    assert ("none has begun" in found.text()) == (count == 0)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_points_depend_on_their_numbers_and_not_on_restarts(sampler, tmp_path):
    search = [*SETTINGS, f"sweep.sampler={sampler}", "sweep.trials=12", f"{RATE}=tag(log,interval(1e-5,1e-1))"]
    tables = []
    for name, parts in (("whole", (12,)), ("parts", (1, 4, 7))):
        plan = make_plan([*search, f"run_dir={tmp_path}/{name}"])
        for part in parts:  # the study is opened anew
            found = invent(plan, lambda point, seed: abs(math.log(point[RATE]) + 5), part)
        tables.append([trial.params[RATE] for trial, _ in found.points])
        assert not has_more(plan, found.study)
    assert tables[0] == tables[1] and len(set(tables[0])) == 12


# Half a second for each number of lines that are left.
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_runs_that_outlived_their_controller_end_the_sweep_whatever_the_journal_lost(every, tmp_path, monkeypatch):
    def refuse(*_):
        pytest.fail("a run that has finished is started again")

    monkeypatch.setattr(jobs, "submit_run", refuse)
    monkeypatch.setattr(sweep_run, "write_page", lambda sweep: None)
    plan = make_plan([*SETTINGS, f"{WIDTH}=16,32", "seed=0,1", f"run_dir={tmp_path}/it"])
    expected = invent(plan, quality_of_width).text()
    journal = plan.folder / "study.log"
    lines = journal.read_text().splitlines(keepends=True)
    for kept in range(0, len(lines), every):
        journal.write_text("".join(lines[:kept]))
        assert sweep_run.run_sweep(plan) == "finished", f"{kept} of {len(lines)} lines are left"
        assert Sweep(plan.folder).text() == expected


@pytest.mark.parametrize("text", ["hello\n", "\x80\xff\n", "[1]\n", '{"a": 1}\n', "null\n", '{"op_code": 99}\n'])
def test_a_journal_with_other_content_is_one_line(text, tmp_path):
    plan = make_plan([*SETTINGS, "seed=0,1", f"run_dir={tmp_path}"])
    journal = tmp_path / "study.log"
    journal.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"^\S+/study\.log is not the journal of a sweep \(.+\); remove it and .+$"):
        open_study(plan)
    with pytest.raises(ConfigError, match="is not the journal of a sweep"):
        Sweep(tmp_path)


@pytest.mark.parametrize(
    ("program", "shown"),
    [("/x/tabicl_train/__main__.py", "tabicl-train"), ("/x/bin/tabicl-train", "tabicl-train"), ("tabicl-sweep",) * 2],
)
def test_the_command_that_continues_a_sweep_can_be_pasted(program, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, "-m", "seed=0,1", "run_dir=my runs"])
    monkeypatch.setattr(sweep_run.Controller, "run", lambda self: False)
    assert sweep_run.run_sweep(make_plan(["experiment=smoke", f"run_dir={tmp_path}/it"])) == "preempted"
    assert capsys.readouterr().err.endswith(f" the same command continues it: {shown} -m seed=0,1 'run_dir=my runs'\n")


@pytest.mark.parametrize(
    ("now", "replaced"),
    [
        ("validation.suites=[]", ["validation.real_rows=0"]),
        ("validation.suites=[sklearn,probes]", ["validation.real_rows=100", "validation.probes=true"]),
    ],
)
def test_a_sweep_of_0_2_0_is_continued_by_what_has_replaced_its_settings(now, replaced, tmp_path):
    plan = make_plan(["experiment=smoke", now, f"{RATE}=1e-3,1e-2", f"run_dir={tmp_path}"])
    old = ["curriculum.stages.smoke.uses=1", "experiment=smoke", *replaced]
    study = open_study(plan)
    study.set_user_attr("identity", plan.identity() | {"settings": old})
    trial = start_trial(plan, study)
    trial.set_user_attr(RUNS, [[name, seed, old] for name, seed, _ in trial.user_attrs[RUNS]])
    assert Sweep(tmp_path).runs[0].arguments == ["experiment=smoke", now]  # of the command that is shown
    open_study(plan)
    study.set_user_attr("identity", plan.identity() | {"settings": ["curriculum.stages.smoke.uses=2", *old]})
    with pytest.raises(ConfigError, match=r"another sweep \(settings was .*uses=2"):
        open_study(plan)


def test_runs_of_a_pruned_point_that_have_finished_are_finished(tmp_path):
    plan = make_plan([*GRID, f"run_dir={tmp_path}/it"])
    plan.folder.mkdir()
    trial = start_trial(plan, study := open_study(plan))
    for (name, _, _), status in zip(trial.user_attrs[RUNS][:2], ("finished", "preempted"), strict=True):
        (plan.folder / name).mkdir()
        (plan.folder / name / "status.json").write_text(json.dumps({"status": status, "step": 20}))
    study.tell(trial, state=TrialState.PRUNED)
    assert [run.status for run in Sweep(plan.folder).runs] == ["finished", "pruned", "pruned"]


def test_a_trial_that_was_killed_while_it_was_asked_for_gets_its_point(tmp_path):
    plan = make_plan([*GRID, f"run_dir={tmp_path}/it"])
    plan.folder.mkdir()
    study = open_study(plan)
    study.ask()
    (running,) = study.get_trials(states=[TrialState.RUNNING])
    first = start_trial(plan, study, running)
    assert set(first.params) == {RATE, WIDTH}
    assert len(first.user_attrs[RUNS]) == 3
    invent(plan, quality, 5)
    assert len({str(trial.params) for trial in study.get_trials()}) == 6
    assert not has_more(plan, study)


def test_points_are_compared_with_the_first_of_the_grid_and_paired_by_seed(sweep):
    compared = compare_points(sweep)
    (comparison,) = compared.comparisons
    names = [f"learning_rate={rate}, embed_dim={width}" for rate in ("0.001", "0.01") for width in (16, 32)]
    assert comparison.names == names and comparison.metric == "real/loss"  # the points with a rate of 1e-4 have failed
    first = [quality({RATE: 1e-3, WIDTH: 16}, seed) for seed in range(3)]
    last = [quality({RATE: 1e-2, WIDTH: 32}, seed) for seed in range(3)]
    assert comparison.pairs[-1].lead.mean == pytest.approx(np.mean(last) - np.mean(first))  # of a loss
    assert comparison.pairs[0].lead.mean == pytest.approx(1 / 32 - 1 / 16)
    assert comparison.pairs[0].seeds == 3
    assert comparison.pairs[0].spreads[0] == pytest.approx(np.std(first, ddof=1))
    assert compared.text.startswith("4 arms paired by 3 seeds\n")


def test_the_effect_of_one_setting_is_the_mean_over_the_others(tmp_path):
    def with_interaction(point: dict, seed: int) -> float:
        return 1 / point[WIDTH] + 0.01 * seed * (point[RATE] > 2e-3) + 0.1 * point[RATE]

    made = invent(make_plan([*GRID, f"{RATE}=1e-3,1e-2", f"run_dir={tmp_path}/it"]), with_interaction)
    low, high = arms_of_sweep(made, by="learning_rate", validated=True)
    assert (low.name, high.name) == ("learning_rate=0.001", "learning_rate=0.01")
    leads = np.array([(1e-2 - 1e-3) * 0.1 + 0.01 * seed for seed in range(3)])
    result = command("compare", str(made.folder), "by=learning_rate")
    assert result.returncode == 0, result.stderr
    row = next(csv.DictReader((made.folder / "comparison.csv").read_text().splitlines()))
    expected = mean_interval(leads)
    assert [float(row[key]) for key in ("lead", "low", "high")] == pytest.approx(
        [expected.mean, expected.low, expected.high]
    )
    wrong = command("compare", str(made.folder), "by=momentum")
    assert wrong.returncode == 2 and "which does not vary" in wrong.stderr


def test_a_missing_score_of_one_setting_is_no_mean_over_the_others():
    index = pd.MultiIndex.from_product([["x", "y"], [0]], names=["data", "split"])
    arms = [
        Arm(name, {0: pd.DataFrame({"loss": losses}, index)}) for name, losses in (("a", [1, 2]), ("b", [3, np.nan]))
    ]
    np.testing.assert_equal(mean_arm("both", arms).scores[0]["loss"].to_numpy(), [2, np.nan])


def test_results_have_a_column_for_each_metric(sweep):
    run = sweep.runs[0].folder
    (run / "validation.csv").write_text("step,data,loss,roc_auc\n20,iris,0.5,0.9\n20,synthetic,0.25,\n")
    (run / "metrics.csv").write_text("step,loss\n1,3.0\n20,2.0\n")
    Sweep(sweep.folder).write_csv()
    first, *_ = csv.DictReader((sweep.folder / "results.csv").read_text().splitlines())
    values = {name: float(first[name]) for name in ("real/roc_auc", "synthetic/loss", "loss")}
    assert values == {"real/roc_auc": 0.9, "synthetic/loss": 0.25, "loss": 2.0}


def test_tables_are_shared_unless_what_decides_them_differs():
    config = compose(["experiment=smoke"])
    (stage,) = config.curriculum.stages.values()
    others = {"schedule": "constant", "fresh_optimizer": False, "frozen": ["row"]}
    others |= {"checkpoint_rows": 7, "col_attention_fp32": True, "schedule_options": {"power": 2}}
    same = "with the same seed, all points are trained on identical tables"
    specs = [group.spec for group in plan_step(config.curriculum, config.model, 0, 5).groups]
    for name in LEARNING_SETTINGS:
        changed = dataclasses.replace(stage, **{name: others[name] if name in others else getattr(stage, name) / 2})
        curriculum = dataclasses.replace(config.curriculum, stages={"smoke": changed})
        two = [dataclasses.asdict(each) for each in (config, dataclasses.replace(config, curriculum=curriculum))]
        assert shared_in_words(["A", "B"], two) == same, name
        planned = plan_step(curriculum, config.model, 0, 5)
        assert [group.spec for group in planned.groups] == specs, name
    other = "no two points are trained on identical tables: their priors or curricula differ"
    for setting, expected in (
        ("model.icl_scaling=none", same),
        ("prior=dummy", other),
        ("curriculum.stages.smoke.rows=[40,81]", other),
    ):
        two = [dataclasses.asdict(each) for each in (config, compose(["experiment=smoke", setting]))]
        assert shared_in_words(["A", "B"], two) == expected, setting


OBJECTIVES = ("objective=cross_entropy", "objective.label_smoothing=0,0.2", "sweep.metric=loss")
PRIORS = ("prior=mlp_scm,graph_scm", "validation.rows=[64]", "validation.best=synthetic")


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (OBJECTIVES, "training loss cannot be compared between points that differ in objective.label_smoothing: "),
        ((*PRIORS, "sweep.metric=synthetic/loss"), "synthetic/loss cannot be compared between points that differ in "),
        ((*PRIORS, "sweep.metric=real/loss"), None),
    ],
)
def test_losses_of_other_objectives_or_tables_are_warned_of_and_no_point_is_better(
    settings, warning, tmp_path, monkeypatch, capsys
):
    def lower_for_the_second(point: dict, seed: int) -> float:
        (value,) = point.values()
        return 0.01 * seed + (1.0 if value in (0, "mlp_scm") else 0.5 + 0.001 * seed**2)

    monkeypatch.setattr(sweep_run, "write_page", lambda sweep: None)
    plan = make_plan([*SETTINGS, *settings, "seed=0,1,2", f"run_dir={tmp_path}/it"])
    with monkeypatch.context() as patched:  # before the first run
        patched.setattr(sweep_run.Controller, "run", lambda self: False)
        sweep_run.run_sweep(plan)
    before = capsys.readouterr().err
    found = invent(plan, lower_for_the_second)
    assert sweep_run.run_sweep(plan) == "finished"
    at_the_end = capsys.readouterr().out
    later = command("compare", str(found.folder)).stdout
    latex = (found.folder / "comparison.tex").read_text()

    for text in (at_the_end, later):
        assert ("is better than" in text) == (warning is None)
        assert ("differ by 0.49" in text) == (warning is not None)
    if warning is None:
        assert "warning" not in before + at_the_end + later + latex
        return
    for text, first_of_results in ((at_the_end, "rank"), (later, "2 arms paired")):
        assert text.count("warning   ") == 1
        assert text.index(f"warning   {warning}") < text.index(first_of_results)
        assert f"compare them by real/loss, or by tabicl-compare {found.folder} suite=NAME" in text
    assert before.count("warning   ") == 1 and f"warning   {warning}" in before
    assert latex.startswith(f"% warning: {warning}")


def test_a_page_and_other_metrics_have_the_warning_too(tmp_path):
    plan = make_plan([*SETTINGS, *PRIORS, "sweep.metric=synthetic/loss", "seed=0,1", f"run_dir={tmp_path}/it"])
    found = invent(plan, lambda point, seed: 1.0 + 0.1 * seed, 1)
    write_page(found)
    page = Page(found.folder / "sweep.html")
    assert "Warning: synthetic/loss cannot be compared between points that differ in prior: their tables" in page.text
    assert "training loss cannot be compared between points that differ in prior" in found.warning("loss")
    assert found.warning("real/loss") is None
