"""The scikit-learn classifier: its conventions, input of every kind, and what it says about malformed input."""

import subprocess
import sys
import tempfile

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PowerTransformer, StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from tiny_network import TINY, tiny_network

from tabicl_train import TabICLClassifier
from tabicl_train.errors import ConfigError
from tabicl_train.prediction.classifier import Member
from tabicl_train.prediction.features import FeatureEncoder, Normalizer
from tabicl_train.prediction.predict import predict_logits
from tabicl_train.prediction.public_format import save_public

NETWORK = tiny_network()
FOLDER = tempfile.TemporaryDirectory()
FILE = f"{FOLDER.name}/tiny.ckpt"
save_public(TINY, NETWORK.state_dict(), FILE)
ROWS = 60


def classifier(**options) -> TabICLClassifier:
    return TabICLClassifier(NETWORK, **{"n_estimators": 3, **options})


def table(rows: int = ROWS) -> tuple[pd.DataFrame, np.ndarray]:
    rng = np.random.default_rng(0)
    X = pd.DataFrame(
        {
            "number": rng.normal(size=rows),
            "string": rng.choice(["x", "y", "z"], rows),
            "boolean": rng.random(rows) < 0.5,
            "ordered": pd.Categorical(rng.choice(["lo", "mid", "hi"], rows), ["lo", "mid", "hi"], ordered=True),
            "integer": pd.array(rng.integers(0, 9, rows), dtype="Int64"),
            "time": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 999, rows), "D"),
        }
    )
    return X, rng.choice(["no", "yes", "maybe"], rows)


CHECKS = list(
    estimator_checks_generator(
        TabICLClassifier(FILE, n_estimators=2),
        expected_failed_checks={"check_classifiers_train": "the weights are random, so accuracy is too"},
        mark="xfail",
    )
)


@pytest.mark.parametrize("estimator, check", CHECKS, ids=lambda value: getattr(value, "func", str).__name__)
def test_scikit_learns_conventions(estimator, check):
    check(estimator)


@pytest.mark.multi_process
def test_import_of_the_package_is_light():
    code = "import sys, tabicl_train; assert not {'torch', 'sklearn', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_and_a_network_predict_alike_and_the_network_stays_as_it_was():
    X, y = table()
    NETWORK.train()
    of_network = classifier().fit(X, y).predict_proba(X)
    assert NETWORK.training
    assert np.array_equal(of_network, TabICLClassifier(FILE, n_estimators=3).fit(X, y).predict_proba(X))
    with pytest.raises(ConfigError, match="no such file or run directory"):
        TabICLClassifier("nowhere").fit(X, y)


@pytest.mark.parametrize("features, shift", [([0, 1, 2, 3, 4, 5], 0), ([3, 1, 5, 0, 4, 2], 2)])
def test_a_member_is_one_pass_of_the_network(features, shift):
    X, y = table()
    numbers = FeatureEncoder().fit(X[:40]).transform(X)
    rows = torch.from_numpy(Normalizer("none").fit(numbers[:40]).transform(numbers)[:, features])
    classes, labels = np.unique(y[:40], return_inverse=True)
    with torch.no_grad():
        logits = NETWORK.eval()(rows[None], torch.from_numpy((labels + shift) % 3)[None])[0, :, :3]
    p = (logits / 0.5).softmax(-1)[:, [(c + shift) % 3 for c in range(3)]]
    model = classifier(n_estimators=1, norm_methods=("none",), softmax_temperature=0.5).fit(X[:40], y[:40])
    if shift:
        model.members_ = [Member("none", np.array(features), shift)]
    assert np.allclose(model.predict_proba(X[40:]), p, atol=1e-6)
    assert list(model.classes_) == list(classes) == ["maybe", "no", "yes"]


@pytest.mark.parametrize("classes", [2, 3])
def test_ensemble_averages_logits_of_different_views(classes):
    X, y = table()
    y = np.arange(ROWS) % classes
    options = dict(n_estimators=2 * classes)
    whole = classifier(**options).fit(X[:40], y[:40])
    assert len({(m.norm_method, m.shift) for m in whole.members_}) == 2 * classes  # each with each
    assert len({tuple(m.features) for m in whole.members_}) == 2 * classes
    logs = []
    for member in whole.members_:
        one = classifier(**options).fit(X[:40], y[:40])
        one.members_ = [member]
        logs.append(np.log(one.predict_proba(X[40:])))
    mean = np.exp(np.mean(logs, axis=0))
    assert np.allclose(whole.predict_proba(X[40:]), mean / mean.sum(axis=1, keepdims=True), atol=1e-6)
    assert np.std(logs, axis=0).max() > 1e-3


def test_random_state_decides():
    X, y = table()
    p, again, other = (classifier(random_state=seed).fit(X, y).predict_proba(X) for seed in (1, 1, 2))
    assert np.array_equal(p, again) and not np.allclose(p, other, atol=1e-6)


@pytest.mark.parametrize("classes", [3, 14])
def test_memory_limit_changes_nothing_but_the_size_of_batches(classes, monkeypatch):
    batches = []

    def watched(network, X, *rest):
        batches.append(len(X))
        return predict_logits(network, X, *rest)

    monkeypatch.setattr("tabicl_train.prediction.classifier.predict_logits", watched)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(400, 5)), np.arange(60) % classes
    whole, some, single = (
        classifier(n_estimators=4, memory_gb=gb).fit(X[:60], y).predict_proba(X[60:]) for gb in (4.0, 5e-3, 1e-4)
    )
    assert batches == [4, 2, 2, 1, 1, 1, 1]
    assert np.allclose(whole, some, atol=1e-5) and np.allclose(whole, single, atol=1e-5)


@pytest.mark.parametrize("method", ["none", "power", "quantile"])
def test_units_of_columns_make_no_difference(method):
    rng = np.random.default_rng(0)
    X, y = rng.uniform(-1, 1, size=(60, 5)), np.arange(40) % 3

    def predict(units: list[float]) -> np.ndarray:
        model = classifier(norm_methods=(method,)).fit(X[:40] * units, y)
        return model.predict_proba(X[40:] * units)

    expected = predict([1, 1, 1, 1, 1])
    assert np.allclose(predict([1e-8, 1, 1e20, 1e-100, 1e8]), expected, atol=1e-5)
    tiny = predict([1, 1e-200, 1, 1e-160, 1e-310])  # whose squares underflow
    assert np.isfinite(tiny).all() and np.abs(tiny - tiny[0]).max() > 1e-3


def test_query_rows_do_not_change_preprocessing():
    X, y = table()
    model = classifier().fit(X[:40], y[:40])
    p = model.predict_proba(X[40:])
    assert np.allclose(model.predict_proba(X[40:41]), p[:1], atol=1e-6)
    odd = X[40:].copy()
    odd.loc[59, "number"] = 1e9
    assert np.allclose(model.predict_proba(odd)[:-1], p[:-1], atol=1e-6)
    assert np.isfinite(model.predict_proba(odd)).all()


def test_encoding_of_columns():
    X = pd.DataFrame(
        {
            "number": [1.0, None, 4.0],
            "string": ["b", "a", None],
            "category": pd.Categorical(["lo", "hi", "lo"], ["lo", "never", "hi"]),
            "boolean": [True, False, None],
            "object": pd.Series([1, None, 2.5], dtype=object),
            "digits": ["10", "9", "8"],
            "time": pd.to_datetime(["1970-01-02", None, "1970-01-04"]),
            "constant": [3, 3, 3],
            "empty": [None, None, None],
            "same": [5.0, None, 5.0],
        }
    )
    encoder = FeatureEncoder().fit(X)
    day = 86400e6
    expected = [
        [1, 1, 0, 1, 1, 10, day],
        [2.5, 0, 1, 0, 1.75, 9, 2 * day],
        [4, -1, 0, 0.5, 2.5, 8, 3 * day],
    ]
    assert np.allclose(encoder.transform(X), expected)
    query = X[:1].assign(number=np.nan, string="new", category="never", constant=9, empty="now there is something")
    query["time"] = query["time"].astype("datetime64[ns]")
    # what no labelled row holds is the mean: of -1, 0 and 1 among strings, of 0, 1 and 0 among categories
    assert np.allclose(encoder.transform(query), [[2.5, 0, 1 / 3, 1, 1, 10, day]])


@pytest.mark.parametrize("method", ["none", "power", "quantile"])
def test_normalisation(method):
    rng = np.random.default_rng(0)
    numbers = np.column_stack([rng.normal(5, 1e-8, 500), rng.exponential(1e7, 500), rng.random(500) < 0.5])
    normalizer = Normalizer(method).fit(numbers)
    out = normalizer.transform(numbers)
    assert np.allclose(out.mean(axis=0), 0, atol=1e-4) and np.allclose(out.std(axis=0), 1, atol=1e-4)
    assert out.dtype == np.float32
    far = normalizer.transform(np.array([[1e9, 1e30, -1e30]]))
    assert np.isfinite(far).all() and np.abs(far).max() < 10
    order = np.argsort(numbers[:, 1])
    assert (np.diff(out[order, 1]) >= 0).all()


def test_power_is_yeo_johnson_without_outliers():
    numbers = np.random.default_rng(0).exponential(size=(200, 1))
    expected = make_pipeline(StandardScaler(), PowerTransformer()).fit_transform(numbers)
    assert np.abs(expected).max() < 4
    assert np.allclose(Normalizer("power").fit(numbers).transform(numbers), expected, atol=1e-5)


def test_numpy_arrays_of_objects_and_strings():
    y = np.arange(15) % 3
    objects = np.array([[1, "a"], [10, None], [None, "b"]] * 5, dtype=object)
    assert np.allclose(classifier().fit(objects, y).X_[:3], [[1, 0], [10, -1], [5.5, 1]])
    strings = np.array([["1", "a"], ["10", "b"], ["9", "a"]] * 5)
    assert np.allclose(classifier().fit(strings, y).X_[:3], [[1, 0], [10, 1], [9, 0]])


@pytest.mark.parametrize("kind", [bool, int, float, str, "category", "string"])
def test_kinds_of_labels(kind):
    X, _ = table()
    y = pd.Series(np.arange(ROWS) % 2).astype(kind)
    predicted = classifier().fit(X, y).predict(X)
    assert set(predicted) <= set(y) and len(predicted) == ROWS


def test_nothing_to_learn_from_gives_the_same_answer_everywhere():
    X, y = table()
    X = pd.DataFrame({"constant": 3, "empty": np.full(ROWS, np.nan)})
    p = classifier().fit(X, y).predict_proba(X.assign(constant=np.arange(ROWS)))
    assert np.allclose(p, p[0]) and np.allclose(p.sum(axis=1), 1)


def test_unseen_categories_and_missing_columns_are_answered():
    X, y = table()
    model = classifier().fit(X, y)
    for query in (X.assign(string="new"), X.assign(string=np.nan), X.assign(number=np.nan)):
        p = model.predict_proba(query)
        assert np.isfinite(p).all() and np.allclose(p.sum(axis=1), 1)


def test_many_classes_and_a_class_that_appears_once():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 4)), np.append(np.arange(59) % 25, 25)
    p = classifier().fit(X, y).predict_proba(rng.normal(size=(7, 4)))
    assert p.shape == (7, 26) and np.allclose(p.sum(axis=1), 1) and (p > 0).all()


X, Y = table()
FAULTS = {
    "no rows": (X[:0], Y[:0], r"Found array with 0 sample\(s\) \(shape=\(0, 6\)\) while a minimum of 1 is required"),
    "no columns": (X[[]], Y, r"Found array with 0 feature\(s\) \(shape=\(60, 0\)\) while a minimum of 1 is required"),
    "one dimension": (np.arange(60.0), Y, "Expected 2D array, got 1D array instead"),
    "infinity": (X.assign(number=np.inf), Y, r"Input X contains infinity or a value too large for dtype\('float32'\)"),
    "too large": (X.assign(number=1e300), Y, "Input X contains infinity or a value too large"),
    "one class": (X, ["a"] * ROWS, "needs samples of at least 2 classes .* only one class: a"),
    "labels short": (X, Y[1:], r"Found input variables with inconsistent numbers of samples: \[60, 59\]"),
    "no labels": (X, None, "requires y to be passed, but the target y is None"),
    "missing label": (X, [None, *Y[1:]], "Input y contains NaN"),
    "regression": (X, np.random.default_rng(0).normal(size=ROWS), "Unknown label type: continuous"),
    "mixed column": (
        X.assign(string=["a", 1] * 30),
        Y,
        "'string' .* int, str; each argument must be a string or a number",
    ),
    "sparse": (sparse.eye(60).tocsr(), Y, "Sparse data was passed, but dense data is required"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_malformed_tables_are_refused(fault):
    X, y, words = FAULTS[fault]
    with pytest.raises((ValueError, TypeError), match=words):
        classifier().fit(X, y)


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
    assert "that held numbers in fit: 'number' ('much'), 'integer' ('many'); they are treated as missing" in message
    assert record[0].filename == __file__
    assert np.array_equal(p, model.predict_proba(missing))


def test_a_string_among_numbers_in_one_fold_does_not_stop_cross_validation():
    text = X[["number"]].astype(str)
    text.loc[4, "number"] = "unknown"
    with pytest.warns(UserWarning, match="'number' .'unknown'.; they are treated as missing"):
        scores = cross_val_score(classifier(), text, Y, cv=3, error_score="raise")
    assert np.isfinite(scores).all()


QUERY_FAULTS = {
    "no rows": (X[:0], r"Found array with 0 sample\(s\)"),
    "infinity": (X.assign(number=-np.inf), "Input X contains infinity"),
    "column lacks": (X.drop(columns="number"), "The feature names should match those that were passed during fit"),
    "other order": (X[X.columns[::-1]], "The feature names should match those that were passed during fit"),
    "numbers for strings": (X.assign(string=1.5), "Column 'string' of X held strings in fit, now it holds numbers"),
}


@pytest.mark.parametrize("fault", QUERY_FAULTS)
def test_malformed_queries_are_refused(fault):
    query, words = QUERY_FAULTS[fault]
    model = classifier().fit(X, Y)
    with pytest.raises(ValueError, match=words):
        model.predict(query)


def test_wrong_width_is_refused():
    model = classifier().fit(np.random.default_rng(0).normal(size=(20, 3)), Y[:20])
    with pytest.raises(ValueError, match="X has 4 features, but TabICLClassifier is expecting 3 features as input"):
        model.predict(np.zeros((2, 4)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(n_estimators=0), "n_estimators is 0"),
        (dict(norm_methods=("robust",)), r"norm_methods is \('robust',\); it must hold some of none, power, quantile"),
        (dict(norm_methods=()), "norm_methods"),
        (dict(softmax_temperature=0.0), r"softmax_temperature is 0.0"),
        (dict(memory_gb=-1), "memory_gb is -1"),
    ],
)
def test_wrong_parameters_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        classifier(**options).fit(X, Y)


def client_and_ours(X: np.ndarray, y: np.ndarray, method: str, units: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of the rows without a label; ours with the columns in other units."""
    tabicl = pytest.importorskip("tabicl")
    client = tabicl.TabICLClassifier(
        model_path=FILE, allow_auto_download=False, n_estimators=1, norm_methods=method,
        feat_shuffle_method="none", class_shuffle_method="none", device="cpu",
    )  # fmt: skip
    ours = TabICLClassifier(FILE, n_estimators=1, norm_methods=(method,), device="cpu")
    n = len(y)
    return client.fit(X[:n], y).predict_proba(X[n:]), ours.fit(X[:n] * units, y).predict_proba(X[n:] * units)


@pytest.mark.parametrize("method", ["none", "power"])
@pytest.mark.parametrize("classes", [2, 10, 11, 25, 57, 101])
def test_agreement_with_the_public_client(classes, method):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(5 * classes + 40, 6)) * [1, 10, 0.1, 5, 3, 2] + 1  # outliers are clamped differently
    y = np.resize(np.arange(classes), 5 * classes)
    client, ours = client_and_ours(X, y, method)
    assert np.abs(ours - client).max() < 1e-5
    assert np.abs(client - client[0]).max() > 1e-3


@pytest.mark.parametrize("method", ["none", "power"])
def test_agreement_with_the_public_client_on_small_units_and_two_labelled_rows(method):
    X, y = np.random.default_rng(0).uniform(-1, 1, size=(60, 6)), np.arange(40) % 3
    client, ours = client_and_ours(X, y, method, units=1e-8)  # where the client itself would let the columns fade
    assert np.abs(ours - client).max() < 1e-5
    X[:2] = [[-1] * 6, [1] * 6]  # two labelled rows, and none further away than they are
    client, ours = client_and_ours(X, np.arange(2), method)
    assert np.abs(ours - client).max() < 1e-5
    assert np.abs(client - client[0]).max() > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_agrees():
    on_gpu = classifier().fit(X, Y)
    assert on_gpu.device_.type == "cuda"
    assert np.allclose(on_gpu.predict_proba(X), classifier(device="cpu").fit(X, Y).predict_proba(X), atol=1e-3)
