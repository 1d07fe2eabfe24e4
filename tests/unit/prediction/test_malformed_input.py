"""What the classifier says about malformed tables and parameters."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from networks import TINY
from sklearn.model_selection import cross_val_score
from tiny_classifier import NETWORK, ROWS, classifier, table

from tabicl_train import TabICLClassifier, TabICLRegressor
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL

X, Y = table()
FAULTS = {  # those that scikit-learn's own checks leave out
    "too large": (X.assign(number=1e300), Y, r"Input X contains infinity or .* in column 'number'"),
    "complex array": (np.ones((ROWS, 2)) * 1j, Y, "Complex data not supported: X has complex numbers"),
    "complex column": (X.assign(number=X["number"] + 1j), Y, "Complex data not supported: column 'number' of X"),
    "complex object": (X.assign(string=[1.5, 1j] * 30), Y, "Complex data not supported: column 'string' of X"),
    "complex labels": (X, np.arange(ROWS) % 2 * 1j, "Complex data not supported: y has complex numbers"),
    "missing label": (X, [None, *Y[1:]], "Input y contains NaN"),
    "mixed column": (
        X.assign(string=["a", 1] * 30),
        Y,
        "'string' .* int, str; each argument must be a string or a number",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_malformed_tables_are_refused(fault):
    X, y, words = FAULTS[fault]
    with pytest.raises((ValueError, TypeError), match=words) as raised:
        classifier().fit(X, y)
    assert "\n" not in str(raised.value)


def test_values_that_are_no_numbers_count_as_missing_with_one_warning():
    model = classifier().fit(X, Y)
    strange = X.astype({"number": object, "integer": object})
    strange.loc[[3, 7], "number"] = ["much", "more"]
    strange.loc[5, "integer"] = "many"
    missing = X.copy()
    missing.loc[[3, 7], "number"] = np.nan
    missing.loc[5, "integer"] = pd.NA
    with pytest.warns(UserWarning) as record:
        p = model.predict_proba(strange)
    (message,) = [str(warning.message) for warning in record]
    examples = "'number' ('much' among numbers), 'integer' ('many' among numbers)"
    assert f"unlike the others of their columns: {examples}; they are treated as missing" in message
    assert record[0].filename == __file__
    assert np.array_equal(p, model.predict_proba(missing))


def test_a_string_among_numbers_in_one_fold_does_not_stop_cross_validation():
    text = X[["number"]].astype(str)
    text.loc[4, "number"] = "unknown"
    with pytest.warns(UserWarning, match="'number' .'unknown' among numbers.; they are treated as missing"):
        scores = cross_val_score(classifier(), text, Y, cv=3, error_score="raise")
    assert np.isfinite(scores).all()


def test_texts_that_look_like_numbers_or_dates_are_named_with_an_example():
    texts = {"dollars": "$1,0{}", "euros": "1.0{},50 \u20ac", "some": "{}", "days": "{}.1.2024", "mixed": "2024-01-{}"}
    frame = pd.DataFrame({name: [text.format(10 + i % 20) for i in range(ROWS)] for name, text in texts.items()})
    frame.loc[0, "some"], frame.loc[9:, "mixed"] = "?", [f"week {i}" for i in range(9, ROWS)]
    codes = frame[["days"]].astype("category").assign(code=np.resize(["1-2", "3+", "192.168.1.1"], ROWS))
    with pytest.warns(UserWarning) as record:
        classifier().fit(frame, Y)
    (message,) = [str(warning.message) for warning in record]
    for words in (
        "'dollars' (numbers with separators, currency or percent signs, such as '$1,010'; write",
        "'euros' (numbers with separators, currency or percent signs, such as '1.010,50 \u20ac'",
        "'some' (numbers mixed with the text '?'",
        "'days' (dates that are not in the ISO format, such as '10.1.2024'",
        "'mixed' (dates such as '2024-01-10' mixed with the text 'week 9')",
        "for '$1,234', pd.read_csv(file, decimal=',', thousands='.') for '1.234,5'",  # not one advice for both
    ):
        assert words in message
    assert record[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        classifier().fit(codes, Y)


def test_names_and_row_numbers_are_named_once_and_used():
    frame = X.assign(name=[f"name {i}" for i in range(ROWS)], rownames=np.arange(ROWS) + 1)
    with pytest.warns(UserWarning) as record:
        model = classifier().fit(frame, Y)
        model.predict(frame)
    (message,) = [str(warning.message) for warning in record]
    assert "like identifiers: 'name' (texts that differ from row to row), 'rownames' (row numbers). They are" in message
    assert record[0].filename == __file__
    assert len(model.encoder_.varying) == frame.shape[1]


QUERY_FAULTS = {
    "column lacks": (X.drop(columns="number"), "The feature names should match those that were passed during fit"),
    "numbers for strings": (X.assign(string=1.5), "Column 'string' of X held strings in fit, now it holds numbers"),
}
CATEGORIES = np.resize([1, 2, 3], ROWS)
TRUTH = CATEGORIES == 1
TIMES = pd.to_datetime(np.where(TRUTH, "2024-01-01", "2024-02-01"))
OTHER_KINDS = {  # of a column in fit, the same values as another type, and the kinds
    "numbers, strings": (pd.Categorical(CATEGORIES), CATEGORIES.astype(str)),
    "numbers, strings ": (CATEGORIES, CATEGORIES.astype(str) + "x"),
    "strings, numbers": (pd.Categorical(CATEGORIES.astype(str)), pd.array(CATEGORIES, dtype="int64[pyarrow]")),
    "strings, numbers ": (CATEGORIES.astype(str) + "x", CATEGORIES.astype(object)),
    "booleans, strings": (pd.Categorical(TRUTH), TRUTH.astype(str)),
    "booleans, strings ": (TRUTH, TRUTH.astype(str)),
    "strings, booleans": (TRUTH.astype(str), pd.array([None, *TRUTH[1:]], dtype="boolean").astype(object)),
    "bytes, strings": (pd.Categorical(np.where(TRUTH, b"a", b"b").astype(object)), np.where(TRUTH, "a", "b")),
    "times, strings": (pd.Categorical(TIMES), TIMES.strftime("%Y-%m-%d")),
    "times, numbers": (TIMES, CATEGORIES),
    "numbers, durations": (CATEGORIES, pd.to_timedelta(CATEGORIES, unit="D")),
}


def test_numbers_in_a_column_of_durations_are_refused():
    model = classifier(n_estimators=1).fit(pd.DataFrame({"column": pd.to_timedelta(CATEGORIES, unit="D")}), Y)
    with pytest.raises(ValueError, match="held durations in fit, now it holds numbers"):
        model.predict(pd.DataFrame({"column": CATEGORIES}))


@pytest.mark.parametrize("kinds", OTHER_KINDS)
def test_a_column_without_a_value_of_a_kind_seen_in_fit_is_refused(kinds):
    before, now = (pd.DataFrame({"column": values}) for values in OTHER_KINDS[kinds])
    model = classifier(n_estimators=1).fit(before, Y)
    of_fit, of_query = kinds.strip().split(", ")
    words = f"^Column 'column' of X held {of_fit} in fit, now it holds {of_query}, such as .*: convert them, or leave"
    with pytest.raises(ValueError, match=words):
        model.predict(now)
    missing = pd.DataFrame({"column": [None] * ROWS})
    assert np.array_equal(model.predict_proba(missing), model.predict_proba(missing.astype("Float64")))
    some = before.astype(object)
    assert np.array_equal(model.predict_proba(some), model.predict_proba(before))
    some.iloc[1:3] = now.astype(object).iloc[1:3]
    with warnings.catch_warnings(action="ignore"):
        model.predict(some)


@pytest.mark.parametrize("fault", QUERY_FAULTS)
def test_malformed_queries_are_refused(fault):
    query, words = QUERY_FAULTS[fault]
    model = classifier().fit(X, Y)
    with pytest.raises(ValueError, match=words):
        model.predict(query)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: f"{text} ", "'x ' and most others were not in fit; the nearest one that was is 'x'"),
        (str.upper, "'X' and most others were not in fit; the nearest one that was is 'x'"),
        (lambda text: "something else", "'something else' and most others were not in fit"),
        (lambda text: text if text == "y" else f"{text}{text}y", None),  # only some
        (lambda text: None if text != "y" else text, None),
    ],
)
def test_a_column_most_of_whose_values_are_new_is_named_with_the_nearest_one(change, words):
    frame = X.assign(string=np.resize(["x", "y", "y", "z"], ROWS), name=[f"name {i}" for i in range(ROWS)])
    with warnings.catch_warnings(action="ignore"):  # about the names, of which new ones are no surprise
        model = classifier(n_estimators=1).fit(frame, Y)
    query = frame.assign(string=frame["string"].map(change), name="another")
    with warnings.catch_warnings(record=True, action="always") as record:
        p = model.predict_proba(query)
    messages = [str(warning.message) for warning in record]
    if words is None:
        assert messages == []
    else:
        assert messages == [
            f"X has values unlike the others of their columns: 'string' ({words}); they are treated as missing"
        ]
        assert record[0].filename == __file__
        assert np.array_equal(p, model.predict_proba(query.assign(string=None)))


def test_classes_that_differ_by_spaces_are_named():
    with pytest.warns(UserWarning, match="^y has classes that differ only by spaces: ' no', 'no', 'no '$") as record:
        classifier().fit(X, np.resize(["no", "no ", "yes", " no"], ROWS))
    assert record[0].filename == __file__


def test_a_network_that_predicts_numbers_is_refused():
    network = TabICL(replace(TINY, max_classes=0))
    with pytest.raises(ValueError, match="predicts numbers"):
        TabICLClassifier(network).fit(X, Y)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e300])  # the last one is too large for float32
@pytest.mark.parametrize("estimator", [TabICLClassifier, TabICLRegressor])
def test_a_network_whose_weights_are_not_finite_is_refused(estimator, value):
    network = TabICL(replace(TINY, max_classes=0 if estimator is TabICLRegressor else 10)).double()
    with torch.no_grad():
        network.icl_predictor.ln.weight[0] = value
    with pytest.raises(
        ConfigError, match=r"^model: 1 of .* weights are not finite, the first in icl_predictor\.ln\.wei"
    ):
        estimator(network).fit(X, np.arange(len(X)) % 2)
    with pytest.raises(
        ConfigError, match=r"^model: '.*' in its state_dict is not a dense tensor with all of its values"
    ):
        estimator(network.to("meta")).fit(X, np.arange(len(X)) % 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(n_estimators=2.5), r"'n_estimators' parameter of TabICLClassifier must be an int .* Got 2.5 instead"),
        (dict(n_estimators="3"), "'n_estimators' .* Got '3' instead"),
        (dict(n_estimators=None), "'n_estimators' .* Got None instead"),
        (dict(norm_methods=("robust",)), r"norm_methods is \('robust',\); it must be any of none, power, quantile"),
        (dict(norm_methods="robust"), "'norm_methods' .* Got 'robust' instead"),
        (dict(softmax_temperature=0.0), "'softmax_temperature' .* Got 0.0 instead"),
        (dict(softmax_temperature="a"), r"'softmax_temperature' .* or a str among \{'auto'\}. Got 'a' instead"),
        (dict(memory_gb=-1), "'memory_gb' .* Got -1 instead"),
        (dict(device=0), "'device' .* Got 0 instead"),
        (dict(device="gpu"), "device is 'gpu'; torch cannot use it: Expected one of cpu, cuda"),
        (dict(device="cuda:99"), "device is 'cuda:99'; torch cannot use it: "),
        (dict(model=None), "The 'model' parameter of TabICLClassifier must be .* Got None instead"),
    ],
)
def test_wrong_parameters_are_refused(options, words):
    with pytest.raises(ValueError, match=words) as raised:
        TabICLClassifier(**{"model": NETWORK, **options}).fit(X, Y)
    assert "\n" not in str(raised.value)
