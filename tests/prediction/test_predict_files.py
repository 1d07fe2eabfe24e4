"""tabicl-predict: from files to a file of predictions, with the weights in the package."""

from pathlib import Path

import numpy as np
import own_tables
import pandas as pd
import pytest
from command_line import exit_code

from tabicl_train import TabICLClassifier, TabICLRegressor
from tabicl_train.prediction import predict_files

TRAIN, TEST = own_tables.frame(0, 60), own_tables.frame(1, 25)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TRAIN.to_csv("train.csv")  # with the numbers of the rows, which have no name
    TEST[TEST.columns[::-1]].to_csv("test.csv", index=False)


def predict(monkeypatch, *options: str) -> int:
    defaults = {"train": "train.csv", "test": "test.csv", "output": "out.csv", "n_estimators": "1"}
    given = dict(option.split("=", 1) for option in options)
    return exit_code(monkeypatch, "predict", *(f"{key}={value}" for key, value in (defaults | given).items()))


def test_classes_have_the_probabilities_of_the_classifier_in_the_order_of_the_file(monkeypatch, capfd):
    monkeypatch.setattr(predict_files, "ROWS", 10)
    monkeypatch.setattr(predict_files, "LINE_SECONDS", 0)
    frame = TRAIN.assign(label=TRAIN["label"].where(TRAIN.index != 3))
    frame.to_csv("train.csv")
    assert predict(monkeypatch, "target=label", "drop=[flag]") == 0
    text = capfd.readouterr().err
    assert "left out  1 row of train.csv without a target" in text
    assert "predicted 20 of 25 rows" in text and "predicted 25 of" in text
    assert "'label' (2 classes) of 25 rows from 59 labeled ones with 6 columns" in text
    found = pd.read_csv("out.csv")
    assert list(found) == ["label", "probability_no", "probability_yes"]
    known = frame.drop(index=3)
    model = TabICLClassifier(n_estimators=1).fit(known.drop(columns=["label", "flag"]), known["label"])
    expected = model.predict_proba(TEST.drop(columns=["label", "flag"]))
    np.testing.assert_allclose(found.iloc[:, 1:], expected, rtol=1e-12)
    assert list(found["label"]) == list(model.classes_[expected.argmax(axis=1)])
    assert predict(monkeypatch, "target=label") == 2
    assert "output is 'out.csv', which is there already: set overwrite=true" in capfd.readouterr().err


def test_a_column_of_texts_is_one_also_where_all_that_are_asked_for_look_like_numbers(monkeypatch):
    codes = np.where(TRAIN["flag"], "012", TRAIN["group"])
    TRAIN.assign(code=codes).to_csv("train.csv", index=False)
    TEST.assign(code="012").to_csv("test.csv", index=False)
    assert predict(monkeypatch, "target=label") == 0
    model = TabICLClassifier(n_estimators=1).fit(TRAIN.drop(columns="label").assign(code=codes), TRAIN["label"])
    expected = model.predict_proba(TEST.drop(columns="label").assign(code="012"))
    np.testing.assert_allclose(pd.read_csv("out.csv").iloc[:, 1:], expected, rtol=1e-12)


def test_categories_of_whole_numbers_are_numbers_in_a_file_of_text(monkeypatch):
    pytest.importorskip("pyarrow")
    TRAIN.astype({"size": "category"}).to_parquet("train.parquet")
    assert predict(monkeypatch, "train=train.parquet", "target=label") == 0
    X = TRAIN.drop(columns="label")
    expected = TabICLClassifier(n_estimators=1).fit(X, TRAIN["label"]).predict_proba(TEST.drop(columns="label"))
    np.testing.assert_allclose(pd.read_csv("out.csv").iloc[:, 1:], expected, rtol=1e-12)


def test_numbers_have_a_mean_and_an_interval(monkeypatch, capfd):
    assert predict(monkeypatch, "target=price", "coverage=0.5") == 0
    assert "'price' (numbers) of 25 rows from 60 labeled ones with 7 columns" in capfd.readouterr().err
    found = pd.read_csv("out.csv")
    model = TabICLRegressor(n_estimators=1).fit(TRAIN.drop(columns="price"), TRAIN["price"])
    X = TEST.drop(columns="price")
    np.testing.assert_allclose(found["price"], model.predict(X), rtol=1e-6)
    np.testing.assert_allclose(found[["price_lower", "price_upper"]], model.predict_interval(X, 0.5), rtol=1e-12)


def test_few_numbers_are_classes_unless_the_user_or_the_network_says_otherwise(monkeypatch):
    for option, columns in (("task=null", 6), ("task=regression", 3), ("checkpoint=mini-regressor", 3)):
        assert predict(monkeypatch, "target=size", "overwrite=true", option) == 0
        assert pd.read_csv("out.csv").shape == (25, columns)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["target=cost"], "train.csv has no column 'cost'; it has Unnamed: 0, x, gaps"),
        (["target=label", "drop=[idd]"], "train.csv has no column 'idd'"),
        (["target=label", "test=less.csv"], "less.csv lacks the column 'gaps' of train.csv"),
        (["target=label", "task=regression"], "task is 'regression', but the target 'label' of train.csv holds text"),
        (["target=price", "checkpoint=mini-classifier"], "has numbers; task=classification takes them for classes"),
        (["target=day"], "the target 'day' of train.csv has times, which are not predicted"),
        (["target=label", "test=none.csv"], "none.csv cannot be read: No such file or directory"),
        (["target=label", "test=broken.csv"], "broken.csv cannot be read: unexpected end of data"),
        (["target=label", "output=out.txt"], "output is 'out.txt'; it must be a .csv file"),
    ],
)
def test_what_cannot_be_predicted_is_said_in_a_line(options, line, monkeypatch, capfd):
    TEST.drop(columns="gaps").to_csv("less.csv", index=False)
    Path("broken.csv").write_text('a,b\n1,"2\n')
    assert predict(monkeypatch, *options) == 2
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith("error: ") and line in last
    assert not list(Path().glob("out*"))


def test_predictions_that_are_not_finite_are_not_written(monkeypatch, capfd):
    """As those of a network that has diverged, although its weights are finite."""
    predictions = predict_files.predictions

    def spoiled(*arguments):
        table = predictions(*arguments)
        table.iloc[-1, -1] = np.nan
        return table

    monkeypatch.setattr(predict_files, "predictions", spoiled)
    assert predict(monkeypatch, "target=label") == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line == "error: checkpoint is 'mini'; its predictions are not finite, nothing is written"
    assert not Path("out.csv").exists()
