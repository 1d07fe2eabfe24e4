"""The scikit-learn classifier: its conventions, its ensemble, and input of every type."""

import datetime
import enum
import itertools
import pickle
import warnings
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from networks import TINY, small_network
from scipy.special import softmax
from sklearn.utils.estimator_checks import estimator_checks_generator
from tiny_classifier import FILE, NETWORK, ROWS, classifier, table
from tiny_regressor import regressor

from priors.real.preprocessing import FeatureEncoder, Member, Normalizer
from tabicl_train import TabICLClassifier
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL, predict
from tabicl_train.model.encoding import encoded_bytes
from tabicl_train.model.pack import Pack
from tabicl_train.prediction import ensemble
from tabicl_train.prediction.classifier import best_temperature

CHECKS = list(
    estimator_checks_generator(
        TabICLClassifier(FILE, n_estimators=1),
        expected_failed_checks={"check_classifiers_train": "the weights are random, so accuracy is too"},
        mark="xfail",
    )
)
DEFAULT = [pytest.param(*both, marks=pytest.mark.slow) for both in estimator_checks_generator(TabICLClassifier())]


@pytest.mark.parametrize("estimator, check", CHECKS + DEFAULT, ids=lambda value: getattr(value, "func", str).__name__)
def test_scikit_learns_conventions(estimator, check):
    check(estimator)


def test_a_file_and_a_network_predict_alike_and_the_network_stays_as_it_was():
    X, y = table()
    NETWORK.train()
    of_network = classifier().fit(X, y).predict_proba(X)
    assert NETWORK.training
    assert np.array_equal(of_network, TabICLClassifier(FILE, n_estimators=3).fit(X, y).predict_proba(X))
    with pytest.raises(ConfigError, match=r"^model is 'nowhere'; there is no such file or run directory"):
        TabICLClassifier("nowhere").fit(X, y)


@pytest.mark.parametrize("features, shift", [([0, 1, 2, 3, 4, 5], 0), ([3, 1, 5, 0, 4, 2], 2)])
def test_a_member_is_one_pass_of_the_network(features, shift):
    X, y = table()
    classes, labels = np.unique(y[:40], return_inverse=True)
    encoder = FeatureEncoder().fit(X[:40], np.eye(3)[labels])
    numbers, features = encoder.transform(X), encoder.views[0][features]
    rows = torch.from_numpy(Normalizer("none").fit(numbers[:40]).transform(numbers)[:, features])
    with torch.no_grad():
        logits = NETWORK.eval()(Pack.stack(rows[None], torch.from_numpy((labels + shift) % 3)[None]))[:, :3]
    p = (logits / 0.5).softmax(-1)[:, [(c + shift) % 3 for c in range(3)]]
    model = classifier(n_estimators=1, norm_methods=("none",), softmax_temperature=0.5).fit(X[:40], y[:40])
    if shift:
        model.members_ = [Member("none", features, shift)]
    assert np.allclose(model.predict_proba(X[40:]), p, atol=1e-6)
    assert list(model.classes_) == list(classes) == ["maybe", "no", "yes"]


def test_names_of_categories_make_no_difference_to_the_first_member_but_to_others():
    codes, x = np.arange(90) % 6, np.random.default_rng(0).normal(size=90)
    y = (np.arange(90) // 6 < 3 * codes % 11).astype(int)  # all shares differ
    X = pd.DataFrame({"x": x})
    first, second = (X.assign(code=np.array(list(names))[codes]) for names in ("abcdef", "dfbeac"))
    for members, alike in ((1, True), (4, False)):
        a, b = (classifier(n_estimators=members).fit(X[:60], y[:60]).predict_proba(X[60:]) for X in (first, second))
        assert np.allclose(a, b, atol=1e-6) == alike


def test_an_ensemble_averages_logits_of_different_members():
    X, y = table()
    classes = 3
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


def test_the_passes_of_a_plan_cover_every_member_and_row_once():
    plan = ensemble.plan_passes(num_members=5, num_rows=130, together=2, size=64)
    assert plan.groups == [range(2), range(2, 4), range(4, 5)]
    assert plan.padding == 62
    assert [one.rows for one in plan.passes_of([range(2, 4)])] == [slice(0, 64), slice(64, 128), slice(128, 130)]

    covered = []
    for one in plan.passes:
        covered += itertools.product(one.members, range(130)[one.rows])
    assert sorted(covered) == list(itertools.product(range(5), range(130)))


def passes_of(model: TabICLClassifier, monkeypatch) -> list[tuple[str, int, int]]:
    """The list that will hold the calls of encode and decode, with their tables and the rows of each."""
    found = []

    def watched(name, call):
        def wrapped(network, *arguments, **options):
            pack = next(x for x in arguments if isinstance(x, Pack))
            found.append((name, len(pack), pack.shapes[0][0]))
            return call(network, *arguments, **options)

        return wrapped

    for module, name in (("ensemble", "encode"), ("classifier", "decode")):
        monkeypatch.setattr(f"tabicl_train.prediction.{module}.{name}", watched(name, getattr(predict, name)))
    return found


@pytest.mark.parametrize("classes", [pytest.param(3, marks=pytest.mark.slow), 14])
def test_memory_limit_changes_nothing_but_the_size_of_passes_and_what_is_kept(classes, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # with more, passes run side by side in any order
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(110, 5)), np.arange(60) % classes
    found = []
    for gb, together in ((4.0, 1), (4.0, 2), (3e-4, 1), (3e-5, 1)):
        model = classifier(n_estimators=4, memory_gb=gb).fit(X[:60], y)
        sizes = replace(model._sizes(classes), members=together)  # 2: as on a GPU
        rows = sizes.rows
        kept = sizes.kept
        monkeypatch.setattr(model, "_sizes", lambda _, sizes=sizes: sizes)
        calls = passes_of(model, monkeypatch)
        found += [model.predict_proba(X[60:]), model.predict_proba(X[60:])]
        answers = [("decode", together, rows)] * -(-50 // rows)
        of_first = 4 // together * [("encode", together, 60), *answers]
        again = [call for first in range(0, 4, together) for call in of_first[: 1 + len(answers)][first < kept :]]
        assert calls == of_first + again
        assert (gb, min(kept, 4)) in ((4.0, 4), (3e-4, 4 if classes == 3 else 2), (3e-5, 0))
        of_a_member = encoded_bytes(model.network_.config, 60, 5, classes)
        stored = sum(x.nbytes for x in tensors(model._kept))
        assert stored == min(kept, 4) * of_a_member <= gb * 2**30 / 2
    assert all(np.allclose(p, found[0], atol=1e-5) for p in found)
    assert all(np.array_equal(*found[i : i + 2]) for i in range(0, 8, 2))


def tensors(kept):
    """All tensors in nested containers."""
    if isinstance(kept, torch.Tensor):
        return [kept]
    if isinstance(kept, dict):
        kept = list(kept.values())
    return [x for one in kept for x in tensors(one)] if isinstance(kept, list | tuple) else []


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


def test_numpy_arrays_of_objects_and_strings():
    y = np.arange(15) % 3
    objects = np.array([[1, "a"], [10, None], [None, "b"]] * 5, dtype=object)
    assert np.allclose(classifier().fit(objects, y).X_[:3, :2], [[1, 0], [10, -1], [5.5, 1]])
    strings = np.array([["1", "a"], ["10", "b"], ["9", "a"]] * 5)
    assert np.allclose(classifier().fit(strings, y).X_[:3], [[1, 0], [10, 1], [9, 0]])


@pytest.mark.parametrize("kind", [bool, float, "category", "string"])
def test_kinds_of_labels(kind):
    X, _ = table()
    y = pd.Series(np.arange(ROWS) % 2).astype(kind)
    predicted = classifier().fit(X, y).predict(X)
    assert set(predicted) <= set(y) and len(predicted) == ROWS


def objects(labels: list) -> pd.Series:
    return pd.Series(labels, dtype=object)


DAYS = [datetime.date(2024, 1, 1), datetime.date(2024, 2, 1)]
LABELS = {  # as they are given, and the classes
    "Int64": (pd.Series([2**60, 2**60 + 1], dtype="Int64"), np.array([2**60, 2**60 + 1])),
    "Int8": (pd.Series([1, 2], dtype="Int8"), np.array([1, 2], np.int8)),
    "boolean": (pd.Series([False, True], dtype="boolean"), np.array([False, True])),
    "integers of Arrow": (pd.Series([2**60, 2**60 + 1], dtype="int64[pyarrow]"), np.array([2**60, 2**60 + 1])),
    "truth of Arrow": (pd.Series([False, True], dtype="bool[pyarrow]"), np.array([False, True])),
    "text of Arrow": (pd.Series(["a", "b"], dtype="string[pyarrow]"), objects(["a", "b"])),
    "dates of Arrow": (pd.Series(DAYS, dtype="date32[pyarrow]"), objects(DAYS)),
    "categories": (pd.Series([2**60, 2**60 + 1], dtype="Int64").astype("category"), np.array([2**60, 2**60 + 1])),
    "frame": (pd.DataFrame({"y": pd.array([2**60, 2**60 + 1], dtype="Int64")}), np.array([2**60, 2**60 + 1])),
    "objects of truth": (objects([False, True]), np.array([False, True])),
    "objects of numbers": (objects([1, 2]), np.array([1, 2])),
    "larger": ([2**70, 2**70 + 1], objects([2**70, 2**70 + 1])),
    "decimals": (objects([Decimal("1.10"), Decimal(2)]), objects([Decimal("1.10"), Decimal(2)])),
    "dates": (objects(DAYS), objects(DAYS)),
    "zoned times": (pd.Series(pd.to_datetime(DAYS, utc=True)), objects(list(pd.to_datetime(DAYS, utc=True)))),
    "intervals": (pd.cut(pd.Series([1, 5]), [0, 2, 8]), objects([pd.Interval(0, 2), pd.Interval(2, 8)])),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_keep_their_type_and_value(name):
    y, classes = LABELS[name]
    rows = np.resize([0, 1], ROWS)
    y = y.iloc[rows].reset_index(drop=True) if isinstance(y, pd.Series | pd.DataFrame) else [y[row] for row in rows]
    X, _ = table()
    with warnings.catch_warnings(action="ignore"):  # of scikit-learn, about a column as y
        model = classifier(n_estimators=1).fit(X, y)
    assert model.classes_.dtype == classes.dtype and model.classes_.tolist() == classes.tolist()
    assert [type(label) for label in model.classes_] == [type(label) for label in np.asarray(classes)]
    expected = classifier(n_estimators=1).fit(X, rows).predict(X)
    assert model.predict(X).tolist() == [classes.tolist()[number] for number in expected]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    ("labels", "types"),
    [
        ([1, "a"], "int, str"),
        ([True, 2], "bool, int"),
        (list(Color), "Color"),
        ([{"a"}, {"b"}], "set"),
        ([DAYS[0], pd.Timestamp(DAYS[1])], "Timestamp, date"),
    ],
)
def test_labels_without_an_order_are_refused_with_their_types(labels, types):
    X, _ = table()
    for y in (labels * (ROWS // 2), objects(labels * (ROWS // 2))):
        with pytest.raises(ValueError, match=f"^y has labels of the type {types}; convert them first .*$"):
            classifier().fit(X, y)


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
    assert p.shape == (7, 26)
    assert np.allclose(p.sum(axis=1), 1)
    assert (p > 0).all()


def test_a_row_has_the_same_bits_whichever_rows_it_is_predicted_with():
    rng = np.random.default_rng(0)
    X, y = (
        rng.normal(size=(450, 6)),
        np.arange(150) % 3,
    )  # inducing points and rows of few keys, and more rows than a pass
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            model = TabICLClassifier(small_network(), n_estimators=2).fit(X[:150], y)
            p = model.predict_proba(X[150:])
            for some in (np.arange(1), np.arange(299, 300), rng.permutation(300), np.arange(0, 300, 7)):
                assert np.array_equal(model.predict_proba(X[150:][some]), p[some])
    finally:
        torch.set_num_threads(threads)


def test_what_is_kept_is_not_pickled():
    X, y = table()
    model = classifier().fit(X, y)
    before = len(pickle.dumps(model))
    p = model.predict_proba(X)
    stored = pickle.dumps(model)
    assert tensors(model._kept) and len(stored) == before
    assert np.array_equal(pickle.loads(stored).predict_proba(X), p)
    model.device_ = torch.device("cuda")  # as on a machine with a GPU
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X), p)
    model.device = "cuda:99"
    with pytest.warns(UserWarning, match="device='cuda:99' is not available, so the CPU is used"):
        assert pickle.loads(pickle.dumps(model)).device_.type == "cpu"


@pytest.mark.parametrize("name", ["hub", "network.ckpt", "network.txt"])
def test_the_name_of_an_export_decides_its_format(name, tmp_path):
    X, y = table()
    config = replace(TINY, scaling_bound=5.0) if name == "hub" else TINY
    model = TabICLClassifier(TabICL(config), n_estimators=1).fit(X, y)
    if name == "network.txt":
        with pytest.raises(ConfigError, match="its name decides the format"):
            model.export(tmp_path / name)
        return
    model.export(tmp_path / name)
    again = TabICLClassifier(tmp_path / name, n_estimators=1).fit(X, y)
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))


def test_dates_and_decimals_of_arrow():
    pa = pytest.importorskip("pyarrow")
    X, y = table()
    known = np.arange(ROWS) != 3
    prices = [Decimal(k).scaleb(-2) if k != 3 else None for k in range(ROWS)]
    types = {"time": pd.ArrowDtype(pa.date32()), "price": pd.ArrowDtype(pa.decimal128(10, 2))}
    X = X.assign(time=X["time"].where(known), price=pd.Series(prices, dtype=object))
    p = classifier().fit(X, y).predict_proba(X)
    arrow = X.assign(time=X["time"].dt.date).astype(types)
    assert np.array_equal(classifier().fit(arrow, y).predict_proba(arrow), p)


@pytest.mark.parametrize("classes", [2, 14])
def test_the_temperature_of_auto_has_the_least_loss(classes):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(150, 3)), np.array([f"c{i:02}" for i in np.arange(150) % classes])
    y[:3] = "rare", "rare", "alone"  # of which a fold may have none
    model = classifier(softmax_temperature="auto", n_estimators=1).fit(X, y)
    assert model.softmax_temperature_ != 0.9
    if classes == 2:
        fixed = classifier(softmax_temperature=model.softmax_temperature_, n_estimators=1).fit(X, y)
        assert np.allclose(fixed.predict_proba(X), model.predict_proba(X), atol=1e-6)
    logits, own = 3 * rng.normal(size=(5000, 3)), np.log(np.linspace(0.2, 5, 241))
    labels = (logits / 2.5 + rng.gumbel(size=logits.shape)).argmax(1)
    found = best_temperature(logits, labels)
    losses = [-np.log(softmax(logits / np.exp(t), 1)[np.arange(5000), labels]).mean() for t in own]
    assert abs(found - np.exp(own[np.argmin(losses)])) < 0.03
    assert abs(found - 2.5) < 0.2
    assert best_temperature(np.eye(2)[[0, 1]] * 9, np.array([0, 1])) > 0.5  # two rows do not prove certainty


@pytest.mark.parametrize("options", [{}, {"softmax_temperature": "auto"}, {"n_estimators": 1}])
def test_a_single_class_is_predicted(options):
    X, _ = table()
    model = classifier(**options).fit(X, ["a"] * ROWS)
    assert list(model.classes_) == ["a"] and set(model.predict(X)) == {"a"}
    assert (model.predict_proba(X) == np.ones((ROWS, 1))).all()


def test_a_single_norm_method_may_be_a_string():
    X, y = table()
    expected = classifier(norm_methods=("quantile",)).fit(X, y).predict_proba(X)
    assert np.array_equal(classifier(norm_methods="quantile").fit(X, y).predict_proba(X), expected)


@pytest.mark.parametrize("output", ["pandas", "polars"])
def test_the_output_that_scikit_learn_is_set_to_changes_nothing(output):
    pytest.importorskip(output)
    X, y = table()
    model = classifier(norm_methods=("none", "power", "quantile"))
    expected = model.fit(X, y).predict_proba(X)
    with sklearn.config_context(transform_output=output):
        assert np.array_equal(model.predict_proba(X), expected)
        assert np.array_equal(model.fit(X, y).predict_proba(X), expected)
    assert np.array_equal(model.predict_proba(X), expected)


def in_double_precision(predict) -> np.ndarray:
    torch.set_default_dtype(torch.float64)
    try:
        return predict()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("file", [FILE, "mini"], ids=["file", "name"])
def test_the_state_of_torch_neither_changes_nor_matters(file):
    X, y = table()

    def predict() -> np.ndarray:
        return TabICLClassifier(file, n_estimators=2).fit(X, y).predict_proba(X)

    state = torch.get_rng_state()
    expected = predict()
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(in_double_precision(predict), expected)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("make", [classifier, regressor])
def test_what_numpy_is_told_about_tiny_numbers_does_not_matter(make):
    """Such as p-values, which become 0 in float32 and in squares."""
    X, _ = table()
    X = X.assign(p=10.0 ** -np.linspace(1, 320, ROWS), q=np.where(X["boolean"], np.nan, 1e-200))
    y = np.arange(ROWS) % 2 if make is classifier else X["p"].to_numpy()
    norm_methods = ("none", "power", "quantile")
    expected = make(norm_methods=norm_methods).fit(X, y).predict(X)
    with np.errstate(all="raise"):
        found = make(norm_methods=norm_methods).fit(X, y).predict(X)
    assert np.array_equal(found, expected)


def test_what_was_kept_in_half_precision_is_not_used_in_full():
    X, y = table()
    classifier = TabICLClassifier(FILE, n_estimators=2).fit(X, y)
    with torch.autocast("cpu", torch.bfloat16):
        classifier.predict_proba(X)
    expected = TabICLClassifier(FILE, n_estimators=2).fit(X, y).predict_proba(X)
    assert np.array_equal(classifier.predict_proba(X), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"max_classes": 10},  # fewer than there are classes
        {"icl_scaling": "ssa_trainable", "col_grouping": "disjoint"},
    ],
)
def test_the_default_type_of_torch_does_not_matter_to_other_networks(options):
    X, _ = table()
    y = np.arange(ROWS) % 14
    network = TabICL(replace(TINY, **options))

    def predict() -> np.ndarray:
        return TabICLClassifier(network, n_estimators=2).fit(X.where(X != "x"), y).predict_proba(X)

    assert np.array_equal(in_double_precision(predict), predict())


def test_auto_with_hardly_any_rows():
    X = np.arange(4.0)[:, None]
    for y in ([0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 1, 1]):
        model = classifier(softmax_temperature="auto").fit(X, y)
        assert np.allclose(model.predict_proba(X).sum(1), 1)
        assert 0.1 <= model.softmax_temperature_ <= 10


def test_fine_tune_says_what_to_do_instead():
    with pytest.raises(TypeError, match="tabicl-train experiment=fine_tune"):
        TabICLClassifier(fine_tune=True)
    with pytest.raises(ImportError, match="experiment=fine_tune"):
        from tabicl_train import FineTune  # noqa: F401
    named_in_a_pickle = b"ctabicl_train.prediction.fine_tune\nFineTune\n."
    with pytest.raises(ImportError, match=r"experiment=fine_tune .* its method export in version 0\.2\.0$"):
        pickle.loads(named_in_a_pickle)
