"""Columns of any type as numbers, and their normalization; the power transform, against scikit-learn's."""

import warnings

import numpy as np
import pandas as pd
import pytest
import scipy
import sklearn
from scipy.stats import yeojohnson_llf
from sklearn.preprocessing import PowerTransformer, StandardScaler

from priors.real.preprocessing import FeatureEncoder, Normalizer, YeoJohnson


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
    # what no labeled row holds is the mean: of -1, 0 and 1 among strings, of 0, 1 and 0 among categories
    assert np.allclose(encoder.transform(query), [[2.5, 0, 1 / 3, 1, 1, 10, day]])
    rounded = pd.DataFrame({"x": [0.1, 0.1, 0.1, None]})  # their mean is not 0.1
    assert not FeatureEncoder().fit(rounded).transform(rounded).any()


def test_gaps_are_kept_where_that_is_asked_for():
    """Unknown values and missing categories too; and a column of which only the gaps vary is one to see."""
    X = pd.DataFrame(
        {
            "number": [1.0, None, 4.0],
            "string": ["b", "a", None],
            "same": [5.0, None, 5.0],
            "constant": [3, 3, 3],
            "empty": [None, None, None],
        }
    )
    encoder = FeatureEncoder(keeps_missing=True).fit(X)
    expected = [[1, 1, 5], [np.nan, 0, np.nan], [4, np.nan, 5]]
    assert np.array_equal(encoder.transform(X), expected, equal_nan=True)
    query = X[:1].assign(number=np.nan, string="new")
    assert np.array_equal(encoder.transform(query), [[np.nan, np.nan, 5]], equal_nan=True)


def test_dates_are_times_of_whatever_type_in_fit_and_in_queries():
    times = pd.Series(pd.to_datetime(["2024-03-01", "1999-12-31", "2024-03-02", None]))
    forms = {
        "date": times.dt.date,
        "objects": times.astype(object),
        "text": times.dt.strftime("%Y-%m-%d"),
        "with a time": times.dt.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "zone": times.dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"),
    }
    expected = FeatureEncoder(keeps_missing=True).fit(times.to_frame()).transform(times.to_frame())
    for name, values in forms.items():
        for first, then in ((values, times), (times, values)):
            encoder = FeatureEncoder(keeps_missing=True).fit(first.to_frame("day"))
            assert np.array_equal(encoder.transform(then.to_frame("day")), expected, equal_nan=True), name
    mixed = pd.DataFrame({"day": ["2024-03-01", "unknown", "2024-03-02", "2024-03-03"]})
    with pytest.warns(UserWarning, match=r"'day' \('unknown' among times\); they are treated as missing") as record:
        codes = FeatureEncoder(keeps_missing=True).fit(mixed).transform(mixed)
    assert len(record) == 1
    with warnings.catch_warnings(action="error"):  # who makes it a category has the texts
        kept = FeatureEncoder().fit(mixed.astype("category")).transform(mixed.astype("category"))
    assert kept[:, 0].tolist() == [0, 3, 1, 2]
    assert np.array_equal(np.diff(codes[[0, 2, 3], 0]), [86400e6, 86400e6])
    assert np.isnan(codes[1, 0])
    with pytest.warns(UserWarning, match=r"'day' \(3.0 among times\)"):
        few = encoder.transform(pd.DataFrame({"day": [3.0, times[0]]}))
    assert np.isnan(few[:, 0]).tolist() == [True, False]


@pytest.mark.parametrize(
    "values, order, codes",
    [
        (["no", True, "no"], ["no", True], [0, 1, 0]),
        ([b"y", b"x", b"y"], [b"x", b"y"], [1, 0, 1]),
        (["a", None, "b"], ["b", "a"], [1, -1, 0]),
    ],
)
def test_pandas_categories_keep_their_order_whatever_their_type(values, order, codes):
    X = pd.DataFrame({"category": pd.Categorical(values, order)})
    encoder = FeatureEncoder().fit(X)
    assert encoder.transform(X)[:, 0].tolist() == codes
    assert encoder.transform(X.astype(object))[:, 0].tolist() == codes


def test_copies_have_categories_in_the_order_of_their_targets():
    """Those of fewer than five rows, and new ones, have the mean rank; not every column has a copy."""
    names = [*("abcd" * 5), "e"]
    mean = {"a": 2.0, "b": -1.0, "c": 7.0, "d": 0.0, "e": 100.0}
    target = np.array([mean[name] for name in names])[:, None]
    X = pd.DataFrame(
        {
            "name": names,
            "two": [str(name < "c" or name == "e") for name in names],
            "id": [str(row) for row in range(21)],
            "order": pd.Categorical(names, list("edcba"), ordered=True),
        }
    )
    encoder = FeatureEncoder().fit(X, target)
    by_target, by_name = encoder.views
    assert by_target.tolist() == [4, 1, 2, 3]
    assert by_name.tolist() == [0, 1, 2, 3]
    numbers = encoder.transform(X)
    assert numbers.shape == (21, 5)
    assert numbers[:5, 4].tolist() == [2, 0, 3, 1, 2]
    assert numbers[20, 4] == 1.5
    assert encoder.transform(X[:1].assign(name="new"))[0, 4] == 1.5


def test_copies_with_classes_have_categories_in_the_order_of_their_shares():
    """b and c are told apart best, a and d have shares between theirs."""
    rows_by_class = {"a": [4, 4, 2], "b": [10, 0, 0], "c": [0, 9, 1], "d": [6, 2, 2]}
    names = []
    labels = []
    for name, counts in rows_by_class.items():
        names += [name] * sum(counts)
        labels += np.repeat([0, 1, 2], counts).tolist()
    X = pd.DataFrame({"name": names})
    ranks = FeatureEncoder().fit(X, np.eye(3)[labels]).transform(X)[:, 1]
    rank_of = dict(zip(names, ranks, strict=True))
    assert [rank_of[name] for name in "bdac"] in ([0, 1, 2, 3], [3, 2, 1, 0])


def test_effects_of_many_levels_are_shrunken_and_no_row_tells_its_own_target():
    rng = np.random.default_rng(0)
    level = np.arange(160) % 40
    target = (level % 2 + 0.3 * rng.normal(size=160))[:, None]
    X = pd.DataFrame({"level": [f"level {i:02}" for i in level]})
    encoder = FeatureEncoder().fit(X, target)
    numbers = encoder.transform(X)
    assert [len(view) for view in encoder.views] == [1] * 4
    effects = [numbers[:40, view[0]] for view in encoder.views]
    assert np.array_equal(effects[0], effects[3])
    assert np.array_equal(effects[1], np.arange(40))
    means = target.reshape(4, 40).mean(axis=0) - target.mean()
    shares = effects[0] / (means * np.sign(effects[0][1]))  # the direction has any sign
    assert np.ptp(shares) < 1e-6 and 0.8 < shares[0] < 1
    assert encoder.transform(X[:1].assign(level="new"))[0, encoder.views[0][0]] == 0
    crossfitted = encoder.crossfitted(numbers, target)[:, encoder.views[0][0]]
    target[7] += 0.5
    changed = FeatureEncoder().fit(X, target)
    again = changed.crossfitted(changed.transform(X), target)[:, encoder.views[0][0]]
    assert np.isclose(again[7], crossfitted[7])
    assert not np.isclose(again[47], crossfitted[47])


@pytest.mark.parametrize("outputs", [1, 3])
def test_missing_values_that_tell_the_target_have_indicators_in_half_of_the_views(outputs):
    rng = np.random.default_rng(0)
    gone = rng.random(120) < 0.5
    label = np.where(rng.random(120) < 0.9, gone, ~gone).astype(int)
    target = (
        np.eye(3)[label + (np.arange(120) % 3 == 0)] if outputs == 3 else label[:, None] + rng.normal(size=(120, 1))
    )
    X = pd.DataFrame(rng.normal(size=(120, 5)), columns=list("abcde"))
    X.loc[gone, ["a", "d"]] = np.nan  # missing together: one indicator
    X.loc[rng.random(120) < 0.5, "b"] = np.nan  # at random
    X.loc[np.flatnonzero(gone)[:4], "c"] = np.nan  # too few
    encoder = FeatureEncoder().fit(X, target)
    assert encoder.indicators == [0]
    assert [len(view) for view in encoder.views] == [5, 6, 6, 5]
    assert np.array_equal(encoder.transform(X)[:, encoder.views[1][5]], gone)
    assert FeatureEncoder(keeps_missing=True).fit(X, target).indicators == []
    assert FeatureEncoder().fit(X, np.ones((120, 1))).indicators == []


@pytest.mark.parametrize("method", ["none", "power", "quantile"])
def test_normalization(method):
    rng = np.random.default_rng(0)
    numbers = np.column_stack([rng.normal(5, 1e-8, 500), rng.exponential(1e7, 500), rng.random(500) < 0.5])
    normalizer = Normalizer(method).fit(numbers)
    out = normalizer.transform(numbers)
    assert np.allclose(out.mean(axis=0), 0, atol=1e-4)
    assert np.allclose(out.std(axis=0), 1, atol=1e-4)
    assert out.dtype == np.float32
    far = normalizer.transform(np.array([[1e9, 1e30, -1e30]]))
    assert np.isfinite(far).all() and np.abs(far).max() < 10
    order = np.argsort(numbers[:, 1])
    assert (np.diff(out[order, 1]) >= 0).all()


def test_quantiles_of_many_rows_do_not_depend_on_global_random_numbers():
    numbers = np.random.default_rng(0).normal(size=(10_001, 1))
    first, second = (Normalizer("quantile").fit(numbers).transform(numbers) for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("method", ["none", "power"])
def test_gaps_change_nothing_about_the_values_that_are_known(method):
    rng = np.random.default_rng(0)
    numbers = rng.exponential(size=(200, 3))
    numbers[rng.random(numbers.shape) < 0.3] = np.nan
    found = Normalizer(method).fit(numbers).transform(numbers)
    for column, own in zip(numbers.T, found.T, strict=True):
        known = column[~np.isnan(column), None]
        expected = Normalizer(method).fit(known).transform(known)[:, 0]
        assert np.array_equal(np.isnan(own), np.isnan(column))
        assert np.allclose(own[~np.isnan(own)], expected, atol=1e-6)


rng = np.random.default_rng(0)
ROWS = 77
COLUMNS = {
    "normal": rng.normal(size=ROWS),
    "skewed": rng.exponential(size=ROWS) ** 3,
    "heavy tails": rng.standard_cauchy(ROWS) ** 3,
    "two values": rng.integers(0, 2, ROWS) * 1.0,
    "one value differs": (np.arange(ROWS) == 5) * 1.0,
    "equal": np.full(ROWS, 0.1),
    "gaps": np.where(rng.random(ROWS) < 0.3, np.nan, rng.exponential(size=ROWS)),
    "hardly different": 1 + 1e-12 * rng.normal(size=ROWS),
}
SCIPY = tuple(map(int, scipy.__version__.split(".")[:2]))
# Since 1.18 scipy searches in another way: powers differ by about 1e-8, and by more where the likelihood is flat.
OTHER_SEARCH = SCIPY >= (1, 18)
# Before scikit-learn 1.9 and scipy 1.15, the peer itself searches and transforms in other ways, by as much.
OLD_PEER = tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 9) or SCIPY < (1, 15)
SHAPES = {"scaled": lambda x: StandardScaler().fit_transform(x), "raw": abs, "negative": lambda x: -abs(x)}


@pytest.mark.skipif(OLD_PEER, reason="needs scikit-learn 1.9 and scipy 1.15")
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_scikit_learns_to_the_bit(column, shape):
    x = SHAPES[shape](COLUMNS[column][:, None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = PowerTransformer(standardize=False).fit(x)
        found = YeoJohnson().fit(x)
        if OTHER_SEARCH and found.powers != list(peer.lambdas_):
            known = x[~np.isnan(x)]
            ours, theirs = (yeojohnson_llf(powers[0], known) for powers in (found.powers, peer.lambdas_))
            assert ours == pytest.approx(theirs, rel=1e-6)
            peer.lambdas_ = np.array(found.powers)
        expected = peer.transform(np.concatenate([x, 3 * x]))
    assert found.powers == list(peer.lambdas_)
    assert np.array_equal(found.transform(np.concatenate([x, 3 * x])), expected, equal_nan=True)
