"""The report: its content, that the page is self-contained, and figures whose lines are known. The runs are invented;
those of tests/runs/test_regression_runs.py and tests/runs/lab/test_sequence_runs.py were trained."""

import dataclasses
import errno
import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from browser import BROWSER, browse
from command_line import command
from html_page import Page

from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.arms import arm_of_method
from tabicl_train.evaluation.compare import compare_arms, pair
from tabicl_train.evaluation.scores import CLASS_METRICS, standing, summarize
from tabicl_train.report.figures import (
    draw_gates,
    draw_multipliers,
    draw_standing,
    draw_training,
    draw_validation,
)
from tabicl_train.report.page import compared_settings, effort, fill_template, validation_means, write_report

pytestmark = pytest.mark.usefixtures("unrendered")  # but for the page of the fixture `written`
SECTIONS = [
    "overview", "incidents", "validation", "real-data", "throughput", "optimization", "multipliers", "gates",
    "configuration",
]  # fmt: skip
STEPS = np.arange(1, 161)
WEIGHTS = "the best by validation, step 40 of 160"
TASKS = [f"task {i}" for i in range(5)]
METRICS_CSV = pd.DataFrame({
    "step": STEPS, "stage": np.where(STEPS <= 80, "short", "long"), "loss": 1 - STEPS / 400,
    "guess_loss": np.where(STEPS % 2, 0.5, 2.0), "grad_norm": 1.0, "lr": 1e-3, "tables_per_s": 10.0 + STEPS % 3,
    "cells_per_s": 1e4, "tflops_per_s": 0.1, "data_wait": 0.1, "accept_rate": 0.9, "memory_gb": 1.0, "skipped": 0,
})  # fmt: skip
METRICS_CSV["loss"] *= METRICS_CSV["guess_loss"]
SCALING_CSV = pd.DataFrame([
    {"step": step, "stage": "short", "layer": layer, "n_smallest": 20, "n_largest": 60, "at_smallest": step + 20.0,
     "at_largest": step + 60.0, "gate_mean": 1.0, "gate_std": step / 10}
    for step in STEPS for layer in ("column.0", "icl.0")
])  # fmt: skip
VALIDATION_CSV = pd.DataFrame([
    {"step": step, "data": data, "rows": rows, "loss": loss / step, "roc_auc": auc, "guess_loss": guess}
    for step in (20, 40)
    for data, rows, loss, auc, guess in (
        ("synthetic", 64, 10.0, None, 1.0), ("own", 40, 5.0, None, 0.5), ("own", 64, 15.0, None, 0.5),
        ("iris", 60, 30.0, 0.8 - step / 100, None), ("wine", 60, 30.0, 0.9 - step / 100, None),
    )
])  # fmt: skip


def write_scores(run_dir: Path, lead: float, tasks: list[str] = TASKS) -> None:
    generator, rows = np.random.default_rng(0), []
    for task in tasks:
        for split in (0, 1):
            for method, more in (("this model", lead), ("random <forest>", 0.0)):
                sizes = {"rows": 300, "features": 4, "classes": 2}
                values = np.array([0.7 + more, 0.5, 0.6, 0.1]) + generator.normal(0, 0.01, 4)
                scores = dict(zip(CLASS_METRICS, values, strict=True))
                rows.append({"data": task, "split": split, "method": method, **sizes, **scores, "seconds": 1.0,
                             "trained_range": "outside" if task == tasks[-1] else "inside",
                             "weights": WEIGHTS if method == "this model" else "-"})  # fmt: skip
    pd.DataFrame(rows).to_csv(run_dir / "evaluation.csv", index=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two runs: the first has every file that a run can have, the second those about training and real data."""
    folders = [tmp_path_factory.mktemp("runs") / name for name in ("one & <only>", "two")]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        config = dataclasses.asdict(compose(["experiment=smoke", "prior=dummy", f"seed={seed}"]))
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        (folder / "status.json").write_text(json.dumps({"status": "finished", "step": 160}))
        start = {"step": 0, "time": "now", "commit": "c0ffee", "diff": "", "command": ["train"], "versions": {"a": "1"}}
        (folder / "provenance.jsonl").write_text(json.dumps(start) + "\n")
        METRICS_CSV.to_csv(folder / "metrics.csv", index=False)
        write_scores(folder, lead=0.1 * (seed + 1))
    SCALING_CSV.to_csv(folders[0] / "scaling.csv", index=False)
    VALIDATION_CSV.to_csv(folders[0] / "validation.csv", index=False)
    incident = {"time": "now", "step": 4, "stage": "smoke", "reason": "the <loss> is not finite", "replay": "again"}
    fall = {"time": "then", "step": 8, "reason": "the mean ROC AUC on real data fell 3 times in a row"}
    (folders[0] / "incidents.jsonl").write_text(f"{json.dumps(incident)}\n{json.dumps(fall)}\n{{'torn': {{}}")
    gained = {"step": 160, "best_step": 40, "sentences": ["own rows: better by 0.1", "synthetic tables: none"]}
    (folders[0] / "test.json").write_text(json.dumps(gained))
    return folders


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory) -> Path:
    """The page of the first run."""
    path = tmp_path_factory.mktemp("pages") / "page.html"
    write_report(runs[:1], path)
    return path


def test_a_page_is_self_contained(written):
    page = Page(written)
    assert page.ids == SECTIONS
    assert page.links == [*(f"#{name}" for name in SECTIONS), "#real-data"]
    assert len(page.pictures) == 19
    for picture in page.pictures:
        assert min(picture.shape[:2]) > 200
        assert picture.std() > 0.05  # it shows something
    without_pictures = re.sub(r"base64,[^\"]*", "", page.source)
    assert not re.search(r"https?:|url\(|@import|//[a-z]", without_pictures)
    assert "default-src 'none'" in page.source
    assert page.source.isascii()


def test_a_page_shows_the_content_of_the_files(runs, written):
    page = Page(written)
    facts = {key: row["one & <only>"] for key, row in page.table("", "one & <only>").items()}
    assert facts["status"] == "finished"
    assert facts["steps done"] == "160"
    assert facts["incidents"] == "2"
    late = METRICS_CSV["loss"][METRICS_CSV["step"] > 144]
    assert facts["mean loss, last 10% of the steps"] == f"{late.mean():.3f}"  # as all scores of the page
    assert facts["weights scored on real tasks"] == WEIGHTS and f"weights of this model: {WEIGHTS}" in page.text
    *_, changed, settings = page.tables
    assert ["prior.name", "dummy"] in changed
    assert "differ from experiment=smoke:" in page.text
    assert not {"guard.loss", "seed", "name", "curriculum.stages.smoke.rows"} & dict(changed[1:]).keys()
    assert ["guard.loss", "0.9"] in settings
    assert ["curriculum.stages.smoke.rows", "[40, 80]"] in settings
    assert "the <loss> is not finite" in page.table("time", "reason")["now"]["reason"]
    best = {name: row["best at step"] for name, row in page.table("", "best at step").items()}
    assert best == {"loss on own tables": "40", "loss on synthetic tables": "40", "ROC AUC on real data": "20"}
    assert "Warning: the mean ROC AUC on real data fell 3 times" in page.text
    assert "After step 160, by the weights of step 40: own rows: better by 0.1; synthetic tables: none." in page.text
    scores = page.table("method", "ROC AUC")
    results = pd.read_csv(runs[0] / "evaluation.csv")
    counting = results[results["trained_range"] == "inside"]
    assert page.text.index(standing(counting)) < page.text.index("Incidents\n")  # below the first picture
    expected = summarize(counting)
    assert list(scores) == ["this model", "random <forest>"]
    assert scores["this model"]["ROC AUC"] == f"{expected.loc['this model', 'roc_auc']:.4f}"
    (compared,) = compare_arms(pair([arm_of_method(results, each, each) for each in scores]), "roc_auc").pairs
    leads = page.table("ROC AUC", "lead of this model")
    assert leads["random <forest>"]["lead of this model"] == f"{compared.lead:+.4f}"
    assert compared.sentence in page.text and compared.tasks == 4
    by_task = page.table("data", "this model")
    assert list(by_task) == TASKS
    assert [row["trained range"] for row in by_task.values()] == ["", "", "", "", "outside"]
    assert "Means over 4 of 5 tasks" in page.text
    assert f"Outside the trained range, where the network extrapolates: {TASKS[-1]}." in page.text


def test_tables_and_time_are_counted_by_stage():
    metrics = pd.DataFrame({"step": [2, 4, 8], "stage": ["a", "a", "b"], "tables_per_s": [1.0, 2.0, 4.0]})
    config = {"curriculum.stages.a.tables": 2, "curriculum.stages.b.tables": 3}
    assert effort(metrics, config) == (20, 9)
    assert effort(metrics, {"curriculum.stages.a.tables": 2}) is None


def test_a_configuration_without_an_experiment_is_compared_with_the_defaults():
    assert compared_settings({"name": "lost"})[0] == compared_settings({})[0] == "the defaults"


def test_cells_of_tables(tmp_path):
    (tmp_path / "page.html.j2").write_text(
        '{% from "parts.html.j2" import show with context %}{% for frame in frames %}{{ show(frame) }}{% endfor %}'
    )
    frame = pd.DataFrame({"a<b": [12345, None, 0.123456], "text": ["<i>", math.nan, "c"]}, dtype=object)
    numbers = pd.DataFrame({"n": [1.5, math.nan, 98765.4]}, index=pd.Index(["x", "y", "z"], name="name"))
    (tmp_path / "tables.html").write_text(fill_template(tmp_path / "page.html.j2", frames=[frame, numbers]))
    page = Page(tmp_path / "tables.html")
    assert page.tables == [
        [["", "a<b", "text"], ["0", "12,345", "<i>"], ["1", "", ""], ["2", "0.1235", "c"]],
        [["name", "n"], ["x", "1.5"], ["y", ""], ["z", "98,765"]],
    ]
    assert re.findall('<table class="(.*)">', page.source) == ["text", "numbers"]


def test_several_runs_side_by_side(runs, tmp_path):
    names = ["one & <only>", r"$\frac$"]  # which is no formula
    folders = [shutil.copytree(run, tmp_path / name) for run, name in zip(runs, names, strict=True)]
    for name in ("scaling.csv", "validation.csv"):  # figures take time
        (folders[0] / name).unlink()
    write_report(folders, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.ids == SECTIONS
    assert {name: page.table("", *names)["status"][name] for name in names} == dict.fromkeys(names, "finished")
    assert ["seed", "0", "1"] in page.tables[-2]
    assert list(page.table("method", "ROC AUC")) == [*names, "random <forest>"]
    assert len(page.pictures) == 12  # of training, throughput and real data, for both


def test_the_page_of_a_run_is_replaced_and_other_files_only_if_asked_to(runs, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(runs[0] / "config.yaml", run)
    for _ in range(2):
        assert command("report", f"run_dir={run}").returncode == 0
    other = f"output={tmp_path}/page.html"
    assert command("report", f"run_dir={run}", other).returncode == 0
    refused = command("report", f"run_dir={run}", other)
    assert refused.returncode == 2
    assert "page.html', which already exists; set overwrite=true" in refused.stderr
    assert command("report", f"run_dir={run}", other, "overwrite=true").returncode == 0
    (tmp_path / "link.html").symlink_to(run / "config.yaml")
    refused = command("report", f"run_dir={run}", f"output={tmp_path}/link.html", "overwrite=true")
    assert refused.returncode == 2
    assert "which is the input run_dir" in refused.stderr
    assert (run / "config.yaml").read_bytes() == (runs[0] / "config.yaml").read_bytes()


def test_other_numbers_of_ensemble_members_are_named(runs, tmp_path):
    said = "the networks were not scored with the same number of ensemble members (n_estimators): a 8, b "
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(runs[0] / "config.yaml", tmp_path / name)
        write_scores(tmp_path / name, lead=0.1)
    results = pd.read_csv(tmp_path / "a/evaluation.csv")
    members = results["method"].map({"this model": 8})  # nan for the baseline
    results.assign(n_estimators=members).to_csv(tmp_path / "a/evaluation.csv", index=False)
    for of_b, number in ((None, "not recorded"), (members, None)):
        if of_b is not None:
            results.assign(n_estimators=of_b).to_csv(tmp_path / "b/evaluation.csv", index=False)
        write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html", overwrite=True)
        text = Page(tmp_path / "page.html").text
        assert said not in text if number is None else text.count(f"Warning: {said}{number}.") == 1


def test_only_tasks_of_all_runs_are_compared(runs, tmp_path):
    other = tmp_path / "two"
    other.mkdir()
    shutil.copy(runs[1] / "config.yaml", other)
    write_scores(other, lead=0.3, tasks=["task 1", "task 9"])
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copy(runs[0] / "config.yaml", folder)
    write_scores(folder, lead=0.1)
    write_report([folder, other], tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert list(page.table("method", "ROC AUC")) == ["one", "two", "random <forest>"]
    assert list(page.table("data", "one", "two")) == ["task 1"]
    assert float(page.table("method", "ROC AUC")["two"]["ROC AUC"]) == pytest.approx(1.0, abs=0.03)
    assert "3 arms on 1 of " in page.text
    write_scores(other, lead=0.3, tasks=["task 9"])
    same = shutil.copytree(other, tmp_path / "of another day" / "two")
    write_scores(same, lead=0.3, tasks=["task 1"])
    write_report([same, other], tmp_path / "page.html", overwrite=True)
    page = Page(tmp_path / "page.html")
    assert "no task is left on which of another day/two, two can be compared" in page.text
    assert page.tables[0][0][1:] == ["of another day/two", "two"]
    (same / "evaluation.csv").unlink()
    # The only network that was evaluated has the name of its run.
    write_report([same, other], tmp_path / "page.html", overwrite=True)
    assert list(Page(tmp_path / "page.html").table("method", "ROC AUC")) == ["two", "random <forest>"]


def test_several_runs_are_compared_inside_the_range_of_all(runs, tmp_path):
    """The second run was not trained for task 0, nor for wine; in the first one both are inside."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, outside in zip(folders, ([], ["task 0", "wine"]), strict=True):
        folder.mkdir()
        shutil.copy(runs[0] / "config.yaml", folder)
        write_scores(folder, lead=0.1)
        for name, rows in (("evaluation", pd.read_csv(folder / "evaluation.csv")), ("validation", VALIDATION_CSV)):
            marks = np.where(rows["data"].isin(outside), "outside", "inside")
            rows.assign(trained_range=marks).to_csv(folder / f"{name}.csv", index=False)
    write_report(folders, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert "Means over 4 of 5 tasks" in page.text
    assert "Outside the trained range of a run, where the network extrapolates: task 0." in page.text
    results = pd.read_csv(folders[0] / "evaluation.csv")
    inside = summarize(results[results["data"] != "task 0"])["roc_auc"]["this model"]
    assert page.table("method", "ROC AUC")["a"]["ROC AUC"] == f"{inside:.4f}"
    assert page.table("ROC AUC", "mean")["a"]["mean"] == f"{inside:.4f}"
    assert "Outside the trained range of a run, and not included in any mean: wine." in page.text
    assert page.table("", "a", "b")["last validation: ROC AUC on real data"] == {"a": "0.400", "b": "0.400"}  # of iris
    assert validation_means(VALIDATION_CSV)["ROC AUC on real data"].iloc[-1] == pytest.approx(0.45)  # of both


def test_scores_of_regression(runs, tmp_path):
    shutil.copy(runs[0] / "config.yaml", tmp_path)
    rows = [
        {"data": data, "split": 0, "method": method, "rows": 300, "features": 4, "r2": r2, "rmse": rmse,
         "pinball": pinball, "coverage": 0.75, "width": 1.5, "seconds": 1.0, "trained_range": "inside"}
        for data in ("houses", "cars")
        for method, r2, rmse, pinball in (("this model", 0.5, 1.0, 0.2), ("marginal quantiles", -0.5, 2.0, 0.3))
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "evaluation.csv", index=False)
    write_report([tmp_path], tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    scores = page.table("method", "R2")
    assert scores["this model"]["R2"] == "0.500"
    assert scores["marginal quantiles"]["R2"] == "0.000"
    assert page.table("R2", "win rate")["marginal quantiles"]["win rate"] == "1.00"
    assert scores["marginal quantiles"]["RMSE to the best"] == "2.000"
    assert list(page.table("data", "this model")) == ["houses", "cars"]
    assert "An R2 below 0 counts as 0" in page.text
    assert page.table("")["weights scored on real tasks"].popitem()[1].startswith("not recorded")  # earlier versions
    assert "mean R2 on 2 real tasks" in str(page.tables[0])
    assert "ROC AUC" not in page.source and len(page.pictures) == 4


@pytest.mark.parametrize("kept", ["config.yaml", "metrics.csv"])
def test_missing_and_torn_files_are_no_error(kept, runs, tmp_path):
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    shutil.copy(runs[0] / kept, run_dir)
    if kept.endswith(".csv"):
        with open(run_dir / kept, "a") as file:
            file.write("10,smoke,0.")  # killed while writing
    (run_dir / "scaling.csv").write_text("step,layer\n")  # of a run that begins again
    result = command("report", f"run_dir={run_dir}")
    assert result.returncode == 0 and result.stdout == f"{run_dir}/report.html\n", result.stderr
    text = Page(run_dir / "report.html").text
    for name in ("config.yaml", "metrics.csv"):
        assert (f"There is no {name}." in text) == (name != kept)
    for what in ("There were no incidents", "There is no validation.csv", "There is no scaling.csv",
                 "there is no evaluation.csv", "There is no provenance.jsonl"):  # fmt: skip
        assert what in text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.csv", "step,loss\n1,2\n", "has no column stage, grad_norm, lr, "),
        ("metrics.csv", "a,b\n1,2\n", "has no column step, stage"),
        ("metrics.csv", METRICS_CSV.assign(memory_gb="1 GB").to_csv(), "the column memory_gb holds '1 GB'"),
        ("metrics.csv", f"step,stage\n1,{'x' * 10**6}\n", "cannot be read: field larger"),
        ("validation.csv", VALIDATION_CSV.drop(columns="data").to_csv(), "has no column data"),
        ("validation.csv", VALIDATION_CSV.assign(roc_auc="good").to_csv(), "the column roc_auc holds 'good'"),
        ("scaling.csv", SCALING_CSV.drop(columns="at_largest").to_csv(), "has no column at_largest"),
        ("evaluation.csv", "data,method,split\niris,this model,first\n", "the column split holds 'first'"),
        ("provenance.jsonl", '{"step": 0, "time": 5}\n', "line 1 was not written by a run: time is 5"),
        ("incidents.jsonl", '{"step": 0, "reason": ["x"]}\n', "line 1 was not written by a run: reason is"),
    ],
)
def test_a_file_that_no_run_writes_is_one_line_that_names_it(runs, tmp_path, name, content, words):
    for kept in ("config.yaml", "status.json"):
        shutil.copy(runs[0] / kept, tmp_path)
    METRICS_CSV.to_csv(tmp_path / "metrics.csv", index=False)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        write_report([tmp_path], tmp_path / "page.html")
    assert str(error.value).startswith(str(tmp_path / name)) and "\n" not in str(error.value)
    assert not (tmp_path / "page.html").exists()


def test_values_that_cannot_be_shown_are_one_line_that_names_the_run(runs, tmp_path):
    shutil.copy(runs[0] / "metrics.csv", tmp_path)
    (tmp_path / "evaluation.csv").write_text("data,split,method,other\niris,0,this model,1\n")
    with pytest.raises(ConfigError, match=f"^the files of {tmp_path} cannot be shown: .*") as error:
        write_report([tmp_path], tmp_path / "page.html")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("status.json", '{"status": "finished", "step": ' + "[" * 10**5),
        ("test.json", '{"step": 1, "sentences": "none"}'),
    ],
)
def test_a_damaged_status_or_test_is_named_and_left_out(runs, tmp_path, name, content):
    shutil.copy(runs[0] / "metrics.csv", tmp_path)
    (tmp_path / name).write_text(content)
    result = command("report", f"run_dir={tmp_path}")
    assert result.returncode == 0 and f"{name} is left out" in result.stderr and result.stderr.count("\n") == 1


def test_a_run_without_a_finite_number_has_a_page(runs, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(runs[0], run_dir, ignore=shutil.ignore_patterns("evaluation.csv"))
    for name, kept in (("metrics.csv", ["step", "skipped"]), ("scaling.csv", ["step", "n_smallest", "n_largest"])):
        table = pd.read_csv(run_dir / name)
        numbers = [column for column in table.select_dtypes("number") if column not in kept]
        table[numbers] = table[numbers].astype(float)
        table.loc[::2, numbers] = math.inf
        table.loc[1::2, numbers] = math.nan
        table.to_csv(run_dir / name, index=False)
    validation = pd.read_csv(run_dir / "validation.csv").assign(loss=math.nan, roc_auc=math.nan)
    validation.to_csv(run_dir / "validation.csv", index=False)
    result = command("report", f"run_dir={run_dir}")
    assert result.returncode == 0, result.stderr
    assert Page(run_dir / "report.html").ids == SECTIONS


def test_a_page_is_whole_or_absent(runs, tmp_path, monkeypatch):
    page, run_dir = tmp_path / "page.html", tmp_path / "run"
    run_dir.mkdir()
    shutil.copy(runs[1] / "config.yaml", run_dir)
    arguments = ("report", f"run_dir={run_dir}", f"output={page}", "overwrite=true")
    assert command(*arguments).returncode == 0
    before = page.read_bytes()

    def refuse(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    result = command(*arguments)
    assert result.returncode == 2
    assert result.stderr == f"error: output is '{page}'; it cannot be written (No space left on device)\n"
    assert page.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "run"}


def test_folders_without_runs_are_all_named(tmp_path):
    wrong = command("report", f"run_dir=[{tmp_path}/a,{tmp_path}/b]")
    assert wrong.returncode == 2
    assert wrong.stderr.count("there is no run in it") == 2


def test_the_model_stands_out_among_the_bars(runs):
    results = pd.read_csv(runs[0] / "evaluation.csv")
    methods = ["this model", "random <forest>"]
    means = [results.loc[results["method"] == method, "roc_auc"].mean() for method in methods]
    for model, other in (methods, methods[::-1]):
        is_model = results["method"] == model  # the first method in the file
        (axes,) = draw_standing(pd.concat([results[is_model], results[~is_model]])).axes
        labels = axes.get_yticklabels()
        assert [label.get_text() for label in labels] == methods
        assert [bar.get_x() + bar.get_width() for bar in axes.patches] == pytest.approx(means)
        assert [text.get_text() for text in axes.texts] == [f"{mean:.3f}" for mean in means]
        weights = {label.get_text(): label.get_fontweight() for label in labels}
        assert weights == {model: "bold", other: "normal"}


def test_the_loss_is_also_shown_relative_to_guessing():
    """Ratios of sums: the noise of few and many classes cancels, and validations have the same scale."""
    (axes,) = draw_training({"a": METRICS_CSV}, {"a": VALIDATION_CSV})[1].axes
    every, smooth, points, one = axes.get_lines()
    assert np.allclose(every.get_ydata(), 1 - STEPS / 400)
    assert list(smooth.get_xdata()) == list(STEPS)
    assert np.allclose(smooth.get_ydata(), 1 - STEPS / 400, atol=0.01)
    assert points.get_xydata().tolist() == [[20, pytest.approx(1.5 / 2)], [40, pytest.approx(0.75 / 2)]]
    assert set(one.get_ydata()) == {1}


def test_a_loss_of_another_objective_has_no_ratio_to_guessing(tmp_path):
    settings = ["objective=cross_entropy", "objective.label_smoothing=0.2", "+auxiliary_losses.balance=0.1"]
    folders = {}
    for name, more in (("own", []), ("other", settings)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        config = dataclasses.asdict(compose(["experiment=smoke", "prior=dummy", *more]))
        (folders[name] / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        METRICS_CSV.to_csv(folders[name] / "metrics.csv", index=False)
    pages = {}
    for name, shown in (("other", ["other"]), ("both", ["own", "other"])):
        write_report([folders[each] for each in shown], tmp_path / f"{name}.html")
        pages[name] = Page(tmp_path / f"{name}.html")
    guessing = "At a ratio of 1 the network is no better than guessing"
    assert {name: guessing in page.text for name, page in pages.items()} == {"other": False, "both": True}
    assert len(pages["both"].pictures) == len(pages["other"].pictures) + 1
    other = "The training loss is that of objective=cross_entropy and includes auxiliary losses."
    assert other in pages["other"].text and f"other: {other}" in pages["both"].text
    assert "own: The training loss" not in pages["both"].text

    # A validation is of the network's own loss.
    (axes,) = draw_training({"a": METRICS_CSV}, {"a": VALIDATION_CSV}, ["a"])[1].axes
    assert [len(line.get_xdata()) for line in axes.get_lines()] == [2, 2]  # of validations, and the line at 1
    both = draw_training({"a": METRICS_CSV, "b": METRICS_CSV}, {}, ["a"])[1].axes[0]
    assert [line.get_label() for line in both.get_lines() if not line.get_label().startswith("_")] == ["b"]


def test_own_synthetic_and_public_tables_are_told_apart():
    assert {name: values[20] for name, values in validation_means(VALIDATION_CSV).items()} == {
        "loss on own tables": 0.5, "loss on synthetic tables": 0.5, "ROC AUC on real data": pytest.approx(0.65)
    }  # fmt: skip
    panels = [figure.axes[0] for figure in draw_validation({"run": VALIDATION_CSV})]
    assert [axes.get_title() for axes in panels] == [
        "loss on own validation tables", "loss on synthetic validation tables", "ROC AUC on real data"
    ]  # fmt: skip
    labels = [[line.get_label() for line in axes.lines] for axes in panels]
    assert labels == [["40 rows", "64 rows", "mean"], ["64 rows", "mean"], ["iris", "wine", "mean"]]


def test_probes_inside_the_trained_range_are_a_curve_of_their_own_with_the_possible():
    rows = [
        {"step": step, "data": f"probe {name}", "rows": 700, "roc_auc": score + step / 100, "possible": possible,
         "trained_range": position}
        for step in (20, 40)
        for name, score, possible, position in (
            ("xor", 0.2, 0.9, "inside"), ("lookup", 0.4, 0.8, "inside"), ("2 of 100", 0.1, 0.99, "outside")
        )
    ]  # fmt: skip
    validation = pd.concat([VALIDATION_CSV, pd.DataFrame(rows)])
    means = validation_means(validation)
    assert means["ROC AUC on probes"].tolist() == pytest.approx([0.5, 0.7])
    assert means["ROC AUC on real data"].tolist() == pytest.approx([0.65, 0.45])
    axes = draw_validation({"run": validation})[-1].axes[0]
    assert axes.get_title() == "ROC AUC on probes"
    means, possible = (line.get_ydata().tolist() for line in axes.lines)
    assert means == pytest.approx([0.5, 0.7])
    assert possible == pytest.approx([0.85, 0.85])


def test_multipliers_are_lines_from_the_smallest_to_the_largest_n():
    panels = [figure.axes[0] for figure in draw_multipliers(SCALING_CSV)]
    assert [axes.get_title() for axes in panels] == ["column.0", "icl.0"]
    for axes in panels:
        lines, points = axes.collections
        assert len(points.get_offsets()) == 2 * len(lines.get_segments())
        segments, steps = lines.get_segments(), lines.get_array()
        assert len(segments) > 100
        assert steps[0] == 1
        assert steps[-1] == 160
        for (start, end), step in zip(segments, steps, strict=True):
            assert start.tolist() == [20, step + 20]
            assert end.tolist() == [60, step + 60]


def test_gates_are_drawn_where_a_layer_has_one():
    means, deviations = [figure.axes[0] for figure in draw_gates(SCALING_CSV)]
    assert [line.get_ydata()[9] for line in means.get_lines()] == [1.0, 1.0]
    assert [line.get_xydata()[9].tolist() for line in deviations.get_lines()] == [[10, 1.0]] * 2
    assert draw_gates(SCALING_CSV.assign(gate_mean=None)) is None
    without = SCALING_CSV.assign(gate_mean=SCALING_CSV["gate_mean"].where(SCALING_CSV["layer"] == "icl.0"))
    assert len(draw_gates(without)[0].axes[0].get_lines()) == 1


LOOK = """<script>document.querySelectorAll("details").forEach(d => d.open = true); document.title = JSON.stringify({
    pictures: Array.from(document.images, i => i.complete && i.naturalWidth > 0 && i.clientWidth > 200),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth})</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no headless browser")
def test_a_browser_displays_it(written, tmp_path):
    source = written.read_text()
    policy = re.search(r"<meta http-equiv=[^>]*>", source)[0]  # it blocks scripts, the one added below too
    (tmp_path / "look.html").write_text(source.replace(policy, "").replace("</body>", LOOK))
    document = browse("--window-size=500,900", "--virtual-time-budget=10000", "--dump-dom", tmp_path / "look.html")
    seen = json.loads(re.search(r"<title>(.*?)</title>", document)[1])
    assert seen["pictures"] == [True] * 19
    assert seen["overflow"] <= 0
