"""suite=openml: folders of the package openml, and the protocols of others."""

import hashlib
import pickle
import re
import sys
import types
from pathlib import Path

import made_openml
import numpy as np
import pandas as pd
import pytest
from command_line import command
from made_openml import table, write_task
from sklearn.dummy import DummyClassifier
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, train_test_split

from tabicl_train.errors import ConfigError
from tabicl_train.evaluation import evaluate as evaluation
from tabicl_train.evaluation import openml_cache
from tabicl_train.evaluation.evaluate import score_task
from tabicl_train.evaluation.openml_cache import SERVER, sample_of_cc18_d3
from tabicl_train.evaluation.suites import sources


@pytest.fixture(scope="module")
def protocols(tmp_path_factory) -> str:
    """A folder with all tasks of the protocols."""
    folder = tmp_path_factory.mktemp("openml")
    made_openml.write_protocols(folder)
    return str(folder)


def listed(folder: Path | str, tasks: str | None, numbers: bool = False) -> list:
    return sources("openml", str(folder), numbers, tasks=tasks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "number", "scores", "labeled_rows", "remark"),
    [
        ("nano", 38, 1, 48, "by the protocol of nano, by which a random forest has 0.8068"),
        ("tabarena_lite", 38, 1, 40, "by the protocol of tabarena_lite"),
        ("cc18_d3", 55, 5, 48, "by the protocol of cc18_d3, by which CatBoost has 0.9023"),
    ],
)
def test_every_protocol_runs(tasks, number, scores, labeled_rows, remark, protocols, checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation, "BASELINES", {"other": lambda: DummyClassifier(strategy="prior")})
    settings = ("suite=openml", f"folder={protocols}", f"tasks={tasks}", f"output={tmp_path}/rows.csv")
    result = command("evaluate", f"checkpoint={checkpoint}", *settings, "n_estimators=1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(remark)
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert rows["data"].nunique() == number
    assert set(rows.groupby(["data", "method"]).size()) == {scores}
    assert set(rows["labeled_rows"]) == {labeled_rows}


def test_a_regressor_has_the_tasks_with_numbers(protocols):
    found = listed(protocols, "tabarena_lite", numbers=True)
    assert len(found) == 13
    assert {"diamonds", "wine_quality"} <= {source.name for source in found}
    task = found[0].load(None)
    assert task.is_regression and task.X.shape == (60, 4)
    with pytest.raises(ConfigError, match="whose targets are all classes, but the network predicts numbers"):
        listed(protocols, "nano", numbers=True)


class Shifted(DummyClassifier):
    """Its probabilities lie higher in some folds, so that a mean over folds has another ROC AUC than all rows."""

    def predict_proba(self, X: pd.DataFrame) -> np.ndarray:
        p = 1 / (1 + np.exp(-X["x0"].to_numpy() - 3 * X["x0"].iloc[0]))
        return np.stack([1 - p, p], axis=1)


def test_nano_has_one_seed_and_one_score_of_all_folds(tmp_path, monkeypatch):
    frame = table(1300, 118, 2, seed=0)
    write_task(tmp_path, 7, frame)
    monkeypatch.setattr(openml_cache, "chosen_tasks", lambda _: [7])
    (source,) = listed(tmp_path, "nano")
    task = source.load(None)

    X, y = frame.drop(columns="target"), frame["target"].astype(str)
    X = X.iloc[:, np.random.default_rng(11).choice(119, 100, replace=False)]
    _, X, _, y = train_test_split(X, y, test_size=1000, stratify=y, random_state=11)
    assert list(task.X) == list(X) and task.X["x0"].tolist() == X["x0"].tolist()
    assert [f"c{label}" for label in task.y] == y.tolist()

    (row,) = score_task(task, {"shifted": lambda: Shifted(strategy="prior")}, None)
    targets, parts = [], []
    for labeled, query in StratifiedKFold(5, shuffle=True, random_state=11).split(X, y):
        model = Shifted(strategy="prior").fit(X.iloc[labeled], y.iloc[labeled])
        parts.append(model.predict_proba(X.iloc[query])[:, 1])
        targets.append(y.iloc[query] == "c1")
    expected = roc_auc_score(np.concatenate(targets), np.concatenate(parts))
    assert row["roc_auc"] == pytest.approx(expected)
    assert abs(expected - np.mean(list(map(roc_auc_score, targets, parts)))) > 0.01


def test_cc18_d3_takes_the_rows_of_lightpfn():
    """The digests are of the indices that its own functions returned for these tables."""
    tables = {37: (1300, 119, 3, "315b47d43bd3"), 39: (900, 131, 4, "deaea56ee36b"), 41: (45000, 11, 2, "fee8ec53c986")}
    for task, (rows, features, classes, expected) in tables.items():
        labels = table(rows, features - 1, classes, seed=task - 37)["target"].cat.codes.to_numpy(np.int64)
        sample = sample_of_cc18_d3(labels, features, 1000, task)
        digest = hashlib.blake2b(digest_size=6)
        for indices in (sample.rows, sample.columns, *(query for _, query in sample.folds)):
            digest.update(indices.astype(np.int64).tobytes())
        assert digest.hexdigest() == expected, task
    rare = np.repeat([0, 1, 2], [20_000, 30, 7])
    kept = rare[sample_of_cc18_d3(rare, 3, 1000, 1).rows]
    assert np.bincount(kept).tolist() == [990, 5, 5]  # five of a class whose share would be one row or none


@pytest.mark.parametrize("form", ["pq", "arff"])
def test_a_folder_is_read_as_the_package_reads_it(form, tmp_path, monkeypatch):
    openml = pytest.importorskip("openml")
    frame = table(40, 3, 3, seed=1).assign(id=np.arange(40.0), leak=1.0)
    write_task(tmp_path, 5, frame, repeats=2, ignored=("leak",), row_id="id", form=form)
    (source,) = listed(tmp_path, "5")
    task = source.load(None)

    def request(*_, **__):
        raise AssertionError("a request")

    for name in ("_send_request", "_download_minio_file"):
        monkeypatch.setattr(openml._api_calls, name, request)
    monkeypatch.setenv("OPENML_SKIP_PARQUET", str(form == "arff"))
    monkeypatch.setattr(openml.config, "_root_cache_directory", tmp_path)
    its_task = openml.tasks.get_task(5, download_splits=True, download_data=True)
    X, y, is_category, _ = its_task.get_dataset().get_data(target=its_task.target_name)
    assert list(task.X) == list(X) == ["x0", "x1", "x2", "color"]
    assert is_category == [False] * 3 + [True]
    assert task.X["color"].astype(str).tolist() == X["color"].astype(str).tolist()
    assert np.allclose(task.X[["x0", "x1", "x2"]], X[["x0", "x1", "x2"]].astype(float), equal_nan=True)
    assert [f"c{label}" for label in task.y] == y.astype(str).tolist()
    assert len(list(task.splits(None))) == 3 and len(task.folds) == 6  # those of the first repeat, and all
    for number, split in enumerate(task.splits(6)):
        its_labeled, its_query = its_task.get_train_test_split_indices(repeat=number // 3, fold=number % 3)
        assert split.labeled.tolist() == its_labeled.tolist()
        assert split.query.tolist() == its_query.tolist()


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_in_a_folder_are_not_read(tmp_path):
    write_task(tmp_path, 5, table(40, 3, 2, seed=1))
    for path in [*(tmp_path / SERVER).rglob("*.arff"), *(tmp_path / SERVER).rglob("*.pq")]:
        path.with_suffix(".pkl.py3").write_bytes(pickle.dumps(Trap(tmp_path / "caught")))
    (source,) = listed(tmp_path, "5")
    assert len(source.load(None).X) == 40 and not (tmp_path / "caught").exists()


def test_tasks_by_number_with_fewer_folds_and_rows(tmp_path, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "BASELINES", {})
    for task, kind in ((5, 1), (6, 2), (8, 1)):
        write_task(tmp_path, task, table(200, 3, 2 if kind == 1 else 0, seed=task), kind, repeats=2)
    settings = ("suite=openml", f"folder={tmp_path}", "tasks=5,6,8", f"output={tmp_path}/rows.csv", "n_estimators=1")
    result = command("evaluate", f"checkpoint={checkpoint}", *settings, "splits=4", "rows=60")
    assert result.returncode == 0, result.stderr
    assert "1 task of the other kind left out: the network predicts classes" in result.stderr
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert rows.groupby("data").size().to_dict() == {"made (5)": 4, "made (8)": 4}
    assert set(rows["rows"]) == {60}
    assert set(rows["labeled_rows"]) < set(range(30, 50))
    (source,) = listed(tmp_path, "8")
    sampled, whole = source.load(60), source.load(None)
    for part, all_rows in zip(sampled.splits(6), whole.splits(6), strict=True):
        assert sorted([*part.labeled, *part.query]) == list(range(60))
        values = whole.X["x0"].iloc[all_rows.query]
        assert sampled.X["x0"].iloc[part.query].isin(values).all()


@pytest.mark.slow
def test_whether_it_is_the_protocol_of_others_is_said(protocols, checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation, "BASELINES", {})
    every = openml_cache.chosen_tasks
    monkeypatch.setattr(openml_cache, "chosen_tasks", lambda tasks: every(tasks)[:2])
    settings = (f"checkpoint={checkpoint}", "suite=openml", f"folder={protocols}", "n_estimators=1")
    result = command("evaluate", *settings, "tasks=nano", f"output={tmp_path}/rows.csv")
    assert result.returncode == 0, result.stderr
    said = "by the protocol of nano, by which a random forest has 0.8068 (arXiv 2606.03681)"
    assert result.stdout.splitlines()[-1] == said
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert list(rows["split"]) == [0, 0]
    assert set(rows["labeled_rows"]) == {48}
    assert set(rows["rows"]) == {60}
    monkeypatch.chdir(tmp_path)
    compared = command("compare", "rows.csv", *settings[1:], "tasks=nano", settings[0].removeprefix("checkpoint="))
    assert compared.returncode == 0 and "the same ROC AUC on 2 tasks" in compared.stdout, compared.stderr
    result = command("evaluate", *settings, "tasks=nano", "splits=1", "rows=40")
    *_, last = result.stdout.splitlines()
    assert last.startswith("not the protocol of nano, so not to be compared with scores of others: ")
    assert last.endswith(": splits is 1, not 5; rows is 40, not 1000")
    assert openml_cache.CC18_D3.remark(None, None, 54, 55).endswith("of others: 54 of 55 tasks are scored")
    result = command("evaluate", *settings, "tasks=nano", "splits=6")
    assert result.returncode == 2
    assert "splits is 6; a task of suite=openml has only 5" in result.stderr


def test_what_is_missing_or_wrong_is_one_line(tmp_path, checkpoint):
    folder = tmp_path / "some"
    write_task(folder, 5, table(30, 2, 2, seed=5))
    write_task(folder, 6, table(30, 2, 2, seed=6), kind=5)
    (folder / SERVER / "datasets" / "1005" / "dataset_1005.pq").rename(tmp_path / "aside.pq")
    module = "python -m tabicl_train.evaluation.openml_cache"
    result = command("evaluate", f"checkpoint={checkpoint}", "suite=openml", f"folder={folder}", "tasks=5,9")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"error: {folder} lacks 2 of 2 tasks (5, 9); where there is a network: {module} folder={folder} tasks=5,9"
    ]
    for arguments, words in (
        (
            (folder, "nano"),
            r"lacks 38 of 38 tasks \(363613, 363614, 363616, \.\.\.\); where there is a network: python",
        ),
        ((folder, None), "tasks is missing; suite=openml needs one of nano, tabarena_lite, cc18_d3, or numbers: 31,37"),
        ((folder, "nanu"), "tasks is 'nanu'; it must be one of nano, tabarena_lite, cc18_d3, or numbers"),
        ((folder, "6"), "task 6 of OpenML is of the kind 'Clustering'; supervised tasks can be scored"),
    ):
        with pytest.raises(ConfigError, match=words):
            listed(*arguments)
    with pytest.raises(ConfigError, match="folder is missing; suite=openml needs one"):
        sources("openml", None, tasks="nano")
    with pytest.raises(ConfigError, match="tasks is 'nano', which suite=sklearn does not take"):
        sources("sklearn", None, tasks="nano")


def replaced(old: str, new: str):
    return lambda lines: [line.replace(old, new) for line in lines]


def of_type(name: str):
    return lambda lines: [line for line in lines if line.startswith(name)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda lines: [*lines, *replaced("TEST", "TRAIN")(of_type("TEST")(lines))],
            "fold 0 of .* has the row .* twice",
        ),
        (lambda lines: [*lines, *of_type("TRAIN")(lines)], "fold 0 of repeat 0 has the row .* twice"),
        (
            lambda lines: [*lines, *(f"{line}1" for line in lines if line.endswith(",0,1"))],
            "row .* is a query row of two folds of repeat 0",
        ),
        (of_type("TRAIN"), "fold 0 of repeat 0 has no query rows"),
        (of_type("TEST"), "fold 0 of repeat 0 has no labeled rows"),
        (of_type("OTHER"), "has no folds"),
        (replaced("TEST", "CHECK"), "has the type CHECK; it must be TRAIN or TEST"),
        (replaced(",7,", ",30,"), r"has the rowid 30; it must be one of 0\.\.29"),
        (replaced(",7,", ",-7,"), "has the rowid -7"),
        (replaced(",7,", ",7.5,"), "has the rowid 7.5"),
        (replaced(",7,", ",?,"), "has the rowid nan"),
        (replaced(",7,", ",seven,"), "has the rowid seven"),
        (replaced(",0,1", ",0,1.5"), r"has the fold 1.5; it must be one of 0, 1, \.\.\."),
    ],
)
def test_impossible_folds_are_refused(change, words, tmp_path):
    write_task(tmp_path, 5, table(30, 2, 2, seed=5))
    path = tmp_path / SERVER / "tasks/5/datasplits.arff"
    heading, _, lines = path.read_text().partition("@DATA\n")
    path.write_text("\n".join([heading + "@DATA", *change(lines.split()), ""]))
    (source,) = listed(tmp_path, "5")
    with pytest.raises(ConfigError, match=words):
        source.load(None)


@pytest.mark.parametrize("number", ["many", "-5", "1005.5", "../../etc", ""])
def test_a_data_set_without_a_number_is_refused(number, tmp_path):
    write_task(tmp_path, 5, table(30, 2, 2, seed=5))
    path = tmp_path / SERVER / "tasks/5/task.xml"
    path.write_text(path.read_text().replace(">1005<", f">{number}<"))
    with pytest.raises(ConfigError, match=rf"task\.xml names the data set '{re.escape(number)}', which is not a "):
        listed(tmp_path, "5")


def test_only_what_is_missing_is_downloaded(tmp_path, monkeypatch, capsys):
    write_task(tmp_path, 5, table(30, 2, 2, seed=5))
    asked = []

    def get_task(task: int, **settings) -> None:
        asked.append((task, settings["download_splits"]))
        if task == 8:
            raise OSError("no route")
        write_task(tmp_path, task, table(30, 2, 2, seed=task))

    package = types.ModuleType("openml")
    package.config = types.SimpleNamespace(set_root_cache_directory=lambda folder: asked.append(folder))
    package.tasks = types.SimpleNamespace(get_task=get_task)
    monkeypatch.setitem(sys.modules, "openml", package)
    openml_cache.main([f"folder={tmp_path}", "tasks=5,7"])
    assert asked == [str(tmp_path), (7, True)]
    assert "2 tasks of 5,7: " in capsys.readouterr().err
    for words, message in (
        ([f"folder={tmp_path}", "tasks=8"], r"task 8 cannot be downloaded \(OSError: no route\); the same command"),
        (
            ["tasks=8"],
            r"usage: python -m tabicl_train.evaluation.openml_cache folder=CACHE tasks=nano\|tabarena_lite\|",
        ),
    ):
        with pytest.raises(SystemExit) as ending:
            openml_cache.main(words)
        assert ending.value.code == 2
        assert re.search(message, capsys.readouterr().err)
