"""tabicl-predict: from files to a file of predictions, with the weights in the package."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from command_line import exit_code
from table_files import build_frame

from tabicl_train import TabICLClassifier, TabICLRegressor
from tabicl_train.prediction import predict_files

TRAIN, TEST = build_frame(0, 60), build_frame(1, 25)


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
    assert "output is 'out.csv', which already exists; set overwrite=true" in capfd.readouterr().err


def test_a_column_of_texts_is_one_also_if_all_query_texts_look_like_numbers(monkeypatch):
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


def test_columns_like_identifiers_are_named_once_and_used(monkeypatch, capfd):
    names = [f"name {i}" for i in range(60)]
    TRAIN.assign(customer_id=np.arange(60) + 1000, name=names).to_csv("train.csv", index=False)
    TEST.assign(customer_id=np.arange(25), name="somebody").to_csv("test.csv", index=False)
    assert predict(monkeypatch, "target=label") == 0
    warned = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    assert warned == [
        "warning   'customer_id' looks like an identifier (a different value in each row) and is used; "
        "drop=[customer_id] leaves it out",
        "warning   'name' looks like an identifier (texts that differ from row to row) and is used; "
        "drop=[name] leaves it out",
    ]


def test_texts_that_differ_by_spaces_are_named_once(monkeypatch, capfd):
    """In a column of which most values are new, in all rows together, and among classes."""
    monkeypatch.setattr(predict_files, "ROWS", 10)
    labels = np.resize(["no", "yes", "no "], len(TRAIN))
    TRAIN.assign(label=labels).to_csv("train.csv", index=False)
    TEST.assign(group=TEST["group"].where(TEST.index < 5, TEST["group"] + " ")).to_csv("test.csv", index=False)
    assert predict(monkeypatch, "target=label") == 0
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    example = TEST["group"][5]
    assert said == [
        "warning   'label' has classes that differ only by spaces: 'no', 'no '",
        f"warning   X has values unlike the others of their columns: 'group' ('{example} ' and most others were not in "
        f"fit; the nearest one that was is '{example}'); they are treated as missing",
    ]


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["9223372036854775808", "1"], ["1", "9223372036854775808"]),
        (["1e30", "1"], ["1", "1e30"]),
        (["010", "007"], ["007", "010"]),
        (["10", "2"], ["2", "10"]),  # in the order of numbers
        (["1.0", "2", "1", ""], ["1.0", "2"]),  # equal numbers are one class, and without a value there is none
        (
            ["9007199254740993", "9007199254740992", "", "0"],
            ["0", "9007199254740992", "9007199254740993"],
        ),  # not float64
        (["0.50", "1.5"], ["0.50", "1.5"]),
        (["TRUE", "FALSE"], ["FALSE", "TRUE"]),
        ([" b", "a"], [" b", "a"]),
    ],
)
def test_classes_are_written_as_in_the_file(texts, names, monkeypatch):
    column = [texts[i % len(texts)] for i in range(len(TRAIN))]
    TRAIN.assign(code=column).to_csv("train.csv", index=False)
    assert predict(monkeypatch, "target=code") == 0
    found = pd.read_csv("out.csv", dtype={"code": str})
    assert list(found) == ["code", *(f"probability_{name}" for name in names)]
    best = found.iloc[:, 1:].to_numpy().argmax(axis=1)
    assert list(found["code"]) == [names[i] for i in best]
    known = [text != "" for text in column]
    numbers = [names.index(text if text in names else "1.0") for text in column if text]
    expected = TabICLClassifier(n_estimators=1).fit(TRAIN[known], numbers).predict_proba(TEST)
    np.testing.assert_allclose(found.iloc[:, 1:], expected, rtol=1e-12)


@pytest.mark.parametrize("ending", ["csv", "parquet", "feather"])
@pytest.mark.parametrize("values", [[2**60, 2**60 + 1], [2**63, 2**63 + 1, None]])
def test_large_whole_numbers_are_different_classes(values, ending, monkeypatch):
    """float64 has one number for both, and a missing value makes pandas read whole numbers as float64."""
    column = pd.array(np.resize(np.array(values, object), len(TRAIN)), dtype="UInt64")
    table = pa.Table.from_pandas(TRAIN.assign(code=column)).replace_schema_metadata()  # as others write it
    {"csv": pa.csv.write_csv, "parquet": pa.parquet.write_table, "feather": pa.feather.write_feather}[ending](
        table, f"train.{ending}"
    )
    assert predict(monkeypatch, f"train=train.{ending}", "target=code") == 0
    assert list(pd.read_csv("out.csv")) == ["code", *(f"probability_{value}" for value in values[:2])]


def test_whole_numbers_of_other_files_are_classes_without_a_point(monkeypatch):
    TRAIN.assign(code=np.where(TRAIN["flag"], 2.0, np.nan)).fillna({"code": 10.0}).to_parquet("train.parquet")
    assert predict(monkeypatch, "train=train.parquet", "target=code") == 0
    assert list(pd.read_csv("out.csv")) == ["code", "probability_2", "probability_10"]


def test_files_may_have_another_separator_and_decimal_mark(monkeypatch):
    for frame, name in ((TRAIN, "train"), (TEST, "test")):
        frame.to_csv(f"{name}.csv", index=False)
        frame.to_csv(f"{name}-bar.csv", index=False, sep="|", decimal=",")
    assert predict(monkeypatch, "target=price") == 0
    files = ["train=train-bar.csv", "test=test-bar.csv", "output=bar.csv"]
    assert predict(monkeypatch, "target=price", *files, "separator=|", "decimal=comma") == 0
    assert Path("bar.csv").read_text() == Path("out.csv").read_text()


@pytest.mark.parametrize(
    ("words", "marks", "line"),
    [
        ("[auto]", [None, "high"], "train.csv, test.csv: 'null' in 'mark' counts as missing"),
        ("[]", ["null", "high"], None),
        ("[high]", ["null", None], "train.csv, test.csv: 'high' in 'mark' counts as missing"),
    ],
)
def test_words_for_missing_values_are_classes_of_a_target_and_said_of_features(words, marks, line, monkeypatch, capfd):
    tables = {}
    for name, frame in (("train", TRAIN), ("test", TEST)):
        tables[name] = frame[["x", "size"]].assign(mark=np.where(frame["flag"], *marks))
        written = frame[["x", "size"]].assign(mark=np.where(frame["flag"], "null", "high"))
        written.assign(code=np.resize(["None", "NA", "Mild", ""], len(frame))).to_csv(f"{name}.csv", index=False)
    assert predict(monkeypatch, "target=code", f"missing_words={words}") == 0
    said = [text for text in capfd.readouterr().err.splitlines() if "counts as missing" in text]
    assert said == ([] if line is None else [f"warning   {line}; missing_words=[...] says which words do"])
    found = pd.read_csv("out.csv", keep_default_na=False)
    assert list(found) == ["code", "probability_Mild", "probability_NA", "probability_None"]
    known = np.arange(len(TRAIN)) % 4 < 3
    labels = np.resize(["None", "NA", "Mild", ""], len(TRAIN))[known]
    expected = TabICLClassifier(n_estimators=1).fit(tables["train"][known], labels).predict_proba(tables["test"])
    np.testing.assert_allclose(found.iloc[:, 1:], expected, rtol=1e-12)


def test_words_beside_the_numbers_of_a_target_are_missing(monkeypatch, capfd):
    """As R writes them; and so are words that the user names, among classes, too."""
    TRAIN.assign(price=TRAIN["price"].where(TRAIN["flag"]), label=TRAIN["label"].replace("no", "?")).to_csv(
        "train.csv", index=False, na_rep="NA"
    )
    number = int((~TRAIN["flag"]).sum())
    assert predict(monkeypatch, "target=price") == 0
    assert f"left out  {number} rows of train.csv without a target" in capfd.readouterr().err
    assert predict(monkeypatch, "target=label", "missing_words=[auto,'?']", "overwrite=true") == 2
    assert "error: the target 'label' of train.csv: a single value" in capfd.readouterr().err


@pytest.mark.parametrize("values", [[None, 1.0, None, -1.0], [1.0, -1.0, None]])
@pytest.mark.parametrize("write", ["polars", "pyarrow", "pandas"])
def test_a_blank_line_of_a_file_of_one_column_is_a_row(write, values, monkeypatch, capfd):
    """As polars and pyarrow write a missing value."""
    TRAIN[["gaps", "label"]].to_csv("train.csv", index=False)
    if write == "polars":
        pytest.importorskip("polars").DataFrame({"gaps": values}).write_csv("test.csv")
    elif write == "pyarrow":
        pa.csv.write_csv(pa.table({"gaps": values}), "test.csv")
    else:
        pd.DataFrame({"gaps": values}).to_csv("test.csv", index=False)
    assert predict(monkeypatch, "target=label") == 0
    model = TabICLClassifier(n_estimators=1).fit(TRAIN[["gaps"]], TRAIN["label"])
    expected = model.predict_proba(pd.DataFrame({"gaps": np.array(values, float)}))
    np.testing.assert_allclose(pd.read_csv("out.csv").iloc[:, 1:], expected, rtol=1e-12)
    line = f"warning   test.csv: its blank lines count as rows with a missing value: {values.count(None)}, the first"
    assert (line in capfd.readouterr().err) == (write != "pandas")


@pytest.mark.parametrize("output", ["train.csv", "./test.csv", "symbolic.csv", "hard.csv"])
def test_an_input_is_not_replaced(output, monkeypatch, capfd):
    Path("symbolic.csv").symlink_to("train.csv")
    Path("hard.csv").hardlink_to("test.csv")
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    assert predict(monkeypatch, "target=label", f"output={output}", "overwrite=true") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "which is the input t" in line and "choose another name" in line
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


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
        (
            ["target=probability_yes", "train=probability.csv"],
            "target is 'probability_yes', which is also the output's column for the class 'yes': rename the column in",
        ),
        (["target=day"], "the target 'day' of train.csv has times, which cannot be predicted"),
        (["target=label", "test=none.csv"], "none.csv cannot be read: No such file or directory"),
        (["target=label", "test=broken.csv"], "broken.csv cannot be read: unexpected end of data"),
        (["target=label", "output=out.txt"], "output is 'out.txt'; it must be a .csv file"),
        (["target=label", "train=nested.parquet"], "nested.parquet: the column 'gaps' holds values of the type list"),
        (["target=label", "test=nested.parquet"], "nested.parquet: the column 'gaps' holds values of the type list"),
        (["target=gaps", "train=nested.parquet"], "the target 'gaps' of nested.parquet: values of the type list"),
        (["target=label", "test=union.arrow"], "union.arrow cannot be used: the column 'gaps' has the type dense_u"),
        (["target=label", "separator=dot"], "separator is 'dot'; it must be one of auto, comma, "),
    ],
)
def test_what_cannot_be_predicted_is_said_in_a_line(options, line, monkeypatch, capfd):
    TEST.drop(columns="gaps").to_csv("less.csv", index=False)
    TRAIN.rename(columns={"label": "probability_yes"}).to_csv("probability.csv", index=False)
    Path("broken.csv").write_text('a,b\n1,"2\n')
    TRAIN.assign(gaps=[[1.0]] * len(TRAIN)).to_parquet("nested.parquet")
    union = pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [pa.array([1, 2])])
    with pa.ipc.new_file("union.arrow", pa.schema({"gaps": union.type})) as file:
        file.write_table(pa.table({"gaps": union}))
    assert predict(monkeypatch, *options) == 2
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith("error: ") and line in last
    assert not list(Path().glob("out*"))


def test_predictions_that_are_not_finite_are_not_written(monkeypatch, capfd):
    """As those of a network that has diverged, although its weights are finite."""
    predictions = predict_files.output_columns

    def spoiled(*arguments):
        table = predictions(*arguments)
        table.iloc[-1, -1] = np.nan
        return table

    monkeypatch.setattr(predict_files, "output_columns", spoiled)
    assert predict(monkeypatch, "target=label") == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line == "error: checkpoint is 'mini'; its predictions are not finite, so nothing is written"
    assert not Path("out.csv").exists()
