"""Missing values, odd values and odd rows of synthetic tables, and what the options leave as it was."""

import re
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from priors import PriorError, TableSpec, build_prior
from priors.finish import Rejected
from priors.random import rng_at
from priors.realism import (
    MECHANISMS,
    RATES,
    Raw,
    Realism,
    add_irrelevant,
    draw_missing,
    duplicate,
    fill,
    make_levels,
    make_tails_heavy,
    ranks,
    round_numbers,
    shift,
    unbalance,
)

OPTIONS = [field.name for field in fields(Realism) if field.name != "strength"]
SYNTHETIC = ["graph_scm", "mlp_scm", "tree_scm", "mix_scm"]
SPEC = TableSpec(num_rows=100, train_size=60, num_features=5, max_classes=3)


def raw_table(rows: int = 2000, num_classes: int = 3, seed: int = 0, num_rows: int | None = None) -> Raw:
    """Four normal columns and a column of three values; labels uniform, or a normal target."""
    rng = rng_at("raw", seed)
    columns = rng.standard_normal((rows, 5)).astype(np.float32)
    columns[:, 4] = rng.integers(0, 3, rows)
    target = rng.integers(0, num_classes, rows) if num_classes else columns[:, 0] + 1
    finished_rows = num_rows or rows
    return Raw(columns, target, num_classes, TableSpec(finished_rows, finished_rows // 2, 5))


def kurtosis(x: np.ndarray) -> np.ndarray:
    z = (x - x.mean(0)) / x.std(0)
    return (z**4).mean(0)


def test_heavy_tails_keep_the_order_of_values_and_raise_the_kurtosis_with_the_strength():
    gains = []
    for strength in (0.0, 1.0):
        gains.append([])
        for seed in range(10):
            raw, before = raw_table(seed=seed), raw_table(seed=seed).columns.astype(float)
            text = make_tails_heavy(raw, strength, rng_at("tails", seed))
            assert (raw.columns[:, 4] == before[:, 4]).all()
            assert raw.columns.dtype == np.float32
            changed = np.flatnonzero((raw.columns != before).any(0))
            named = text.replace("; ", ", ").replace(": columns", ",").split(", ")
            assert sorted(int(word) for word in named if word.strip().isdigit()) == changed.tolist()
            for j in changed:
                inside = np.abs(before[:, j]) < 3  # values beyond four standard deviations are clamped
                assert (np.diff(raw.columns[inside, j][np.argsort(before[inside, j])]) >= 0).all()
            gains[-1] += (kurtosis(raw.columns[:, changed]) - kurtosis(before[:, changed])).tolist()
    weak, strong = map(np.array, gains)
    assert len(weak) > 20
    assert (weak > 0.05).all()
    assert np.median(strong) > 5
    assert weak.mean() < 3


def test_rounded_columns_have_few_values_near_the_ones_they_had():
    distinct = {}
    for strength in (0.0, 1.0):
        counts = []
        for seed in range(20):
            raw, before = raw_table(seed=seed), raw_table(seed=seed).columns
            text = round_numbers(raw, strength, rng_at("rounding", seed))
            assert (raw.columns[:, 4] == before[:, 4]).all()
            assert "round" in text or "no numeric" in text
            for j in np.flatnonzero((raw.columns != before).any(0)):
                assert np.corrcoef(raw.columns[:, j], before[:, j])[0, 1] > (0.7 if strength else 0.99)
                counts.append(len(np.unique(raw.columns[:, j])))
        distinct[strength] = np.array(counts)
    assert distinct[0.0].max() < 1200
    assert np.median(distinct[1.0]) < 60 < np.median(distinct[0.0])


def test_levels_are_groups_of_neighboring_values_and_never_see_the_target_of_query_rows():
    orders = set()
    for seed in range(30):
        raw, before = raw_table(seed=seed), raw_table(seed=seed).columns
        other = raw_table(seed=seed)
        other.target[other.train_size :] = rng_at("other", seed).permutation(other.target[other.train_size :])
        text = make_levels(raw, 0.5, rng_at("levels", seed))
        make_levels(other, 0.5, rng_at("levels", seed))
        np.testing.assert_array_equal(raw.columns, other.columns)
        assert (raw.columns[:, 4] == before[:, 4]).all()  # it is a category already
        for j in np.flatnonzero((raw.columns != before).any(0)):
            codes = raw.columns[np.argsort(before[:, j]), j]
            assert 20 < len(np.unique(codes)) <= 45
            assert (np.diff(codes) != 0).sum() == len(np.unique(codes)) - 1  # each level is one interval of values
            if "by mean target" in text:
                labeled, labels = raw.columns[: raw.train_size, j], raw.target[: raw.train_size]
                means = [[(labels[labeled == code] == k).mean() for code in np.unique(labeled)] for k in range(3)]
                orders.add("by target")
                assert any((np.diff(of_class) >= 0).all() for of_class in means)
            else:
                orders.add("shuffled")
                assert abs(np.corrcoef(raw.columns[:, j], before[:, j])[0, 1]) < 0.7
    assert orders == {"by target", "shuffled"}


def test_irrelevant_columns_are_independent_of_the_target_and_of_the_others():
    spec = TableSpec(2000, 1000, 40, 2)
    changes = Realism(irrelevant=1.0, strength=1.0).draw(spec, (0, 0))
    assert changes.planned.num_features == 2
    correlations = []
    for seed in range(10):
        rng = rng_at("relevant", seed)
        columns = rng.standard_normal((2000, 2)).astype(np.float32)
        raw = Raw(columns, (columns.sum(1) > 0).astype(int), 2, spec)
        text = add_irrelevant(raw, 1.0, rng_at("irrelevant", seed))
        assert raw.columns.shape == (2000, 40)
        assert text == "columns 2 to 39 are irrelevant"
        np.testing.assert_array_equal(raw.columns[:, :2], columns)
        together = np.column_stack([raw.target, raw.columns])
        correlations.append(np.corrcoef(together.T)[:3, 3:])
    scaled = np.concatenate(correlations).ravel() * np.sqrt(2000)
    assert 0.9 < scaled.std() < 1.1 and np.abs(scaled).max() < 4.5


def test_shift_is_seen_in_labeled_and_query_rows_and_grows_with_the_strength():
    largest = {}
    for strength in (0.0, 1.0):
        largest[strength] = []
        for seed in range(30):
            raw, before = raw_table(seed=seed, num_classes=seed % 2 * 3), raw_table(seed=seed, num_classes=seed % 2 * 3)
            text = shift(raw, strength, rng_at("shift", seed))
            labeled, query = raw.columns[: raw.train_size], raw.columns[raw.train_size :]
            t = (labeled.mean(0) - query.mean(0)) / np.sqrt(4 * raw.columns.var(0) / len(raw.columns))
            named = [int(j) for j in text.split("columns ")[1].split(", with")[0].split(", ")]
            largest[strength].append(np.abs(t).max())
            assert np.abs(np.delete(t, named)).max(initial=0) < 4.5  # two-sided 1e-5 of a normal variable
            together = [np.column_stack([table.columns, table.target]) for table in (raw, before)]
            assert (np.sort(together[0], axis=0) == np.sort(together[1], axis=0)).all()
            assert {tuple(row) for row in together[0]} == {tuple(row) for row in together[1]}
    assert min(largest[0.0]) > 3 and min(largest[1.0]) > 9  # without a shift, 5 columns exceed 3.5 once in 400


def test_shift_leaves_the_same_classes_on_both_sides_or_rejects_the_table():
    raw = raw_table()
    raw.target[:] = 0
    raw.target[np.argmax(raw.columns[:, 0])] = 1  # a single row cannot be on both sides
    with pytest.raises(Rejected, match="split"):
        shift(raw, 1.0, rng_at("shift"))
    constant = raw_table()
    constant.columns[:] = 1
    with pytest.raises(Rejected, match="constant"):
        shift(constant, 1.0, rng_at("shift"))
    sides = 0
    for seed in range(100):
        small = raw_table(20, seed=seed)
        try:
            shift(small, 1.0, rng_at("shift", seed))
        except Rejected:
            continue
        sides += 1
        assert len(set(small.target[:10])) >= 2
        assert set(small.target[:10]) == set(small.target[10:])
    assert sides > 90


@pytest.mark.parametrize(("strength", "ratio"), [(0.0, np.e), (1.0, np.e**4)])
def test_imbalance_has_the_ratio_of_the_strength(strength, ratio):
    found = []
    for seed in range(20):
        raw, before = raw_table(4000, 2, seed, 2000), raw_table(4000, 2, seed)
        shares = np.bincount(before.target) / 2000
        unbalance(raw, strength, rng_at("imbalance", seed))
        assert raw.columns.shape == (2000, 5) and raw.target.shape == (2000,)
        left = shares - np.bincount(raw.target) / 2000  # of each class, among the rows that were not kept
        found.append(np.log(left / shares).max() / np.log(left / shares).min())
        assert np.bincount(raw.target).argmax() == np.bincount(before.target).argmax()
    # in draws without replacement, what is left of a class is the weight's power of what is left of the other
    assert np.median(1 / np.array(found)) == pytest.approx(ratio, rel=0.1)


def test_every_class_keeps_four_rows():
    raw = raw_table(400, 6, num_rows=200)
    raw.target[:] = 0
    raw.target[:15] = np.repeat([1, 2, 3, 4, 5], 3)
    raw.target[15:40] = 5
    unbalance(raw, 1.0, rng_at("imbalance"))
    assert np.bincount(raw.target)[1:5].tolist() == [3, 3, 3, 3]
    assert np.bincount(raw.target)[5] >= 4


@pytest.mark.parametrize(("strength", "share"), [(0.0, 0.02), (1.0, 0.4)])
def test_duplicates_are_counted(strength, share):
    changed_shares = []
    for seed in range(20):
        raw, before = raw_table(500, seed=seed), raw_table(500, seed=seed)
        text = duplicate(raw, strength, rng_at("duplicates", seed))
        counts = [int(word) for word in text.split() if word.isdigit()]
        assert counts[0] == round(share * 500) >= counts[1]
        equal = (raw.columns[:, None] == raw.columns[None]).sum(2)
        np.fill_diagonal(equal, 0)
        close = (equal >= 4) & (raw.target[:, None] == raw.target[None])
        kept = (raw.columns == before.columns).all(1) & (raw.target == before.target)
        assert (~kept).sum() in range(counts[0] - 3, counts[0] + 1)  # a copy may by chance get back its own value
        assert close[~kept].any(1).all()
        exact = (equal[~kept] == 5).any(1).sum()
        assert abs(counts[0] - counts[1] - exact) <= 0.2 * counts[1] + 1  # the value of another row may be the same
        changed_shares.append(counts[1] / counts[0])
        across = close[:250, 250:].any()
    assert across
    assert min(changed_shares) < 0.2
    assert max(changed_shares) > 0.8


def test_ranks_break_ties_at_random():
    drawn = np.mean([ranks(np.zeros((1, 50)), rng_at("ties", seed))[0] for seed in range(3000)], axis=0)
    np.testing.assert_allclose(drawn, 0.5, atol=0.03)
    assert ranks(np.array([[3.0, 1.0, 2.0]]), rng_at(0))[0].tolist() == pytest.approx([5 / 6, 1 / 6, 1 / 2])


@pytest.mark.parametrize("name", SYNTHETIC)
@pytest.mark.parametrize("max_classes", [3, 0])
def test_options_that_are_off_change_no_bit(name, max_classes):
    spec = replace(SPEC, max_classes=max_classes)
    for options in ({}, {"strength": 0.5}, {"imbalance": 1.0} if max_classes == 0 else {}):
        for seed in range(3):
            table, plain = (build_prior(name, **more).sample(spec, seed) for more in ({"realism": options}, {}))
            assert torch.equal(table.X, plain.X)
            assert torch.equal(table.y, plain.y)
            assert str(table.plan) == str(plain.plan)


def test_an_option_leaves_the_table_beneath_it_as_it_was():
    """Shift only reorders rows, and tails and rounding change some columns, whatever else is on."""
    for seed in range(12):
        drawn = {
            options: build_prior("tree_scm", realism=dict.fromkeys(options, 1.0)).sample(SPEC, seed)
            for options in ((), ("shift",), ("tails",), ("rounding",), ("missing",), ("shift", "missing"))
        }
        if any(table.rejections for table in drawn.values()):
            continue  # another attempt is another table
        plain, reordered = (sorted(map(tuple, drawn[key].X.tolist())) for key in ((), ("shift",)))
        torch.testing.assert_close(torch.tensor(plain), torch.tensor(reordered), atol=1e-5, rtol=0)
        for option in ("tails", "rounding"):
            table = drawn[(option,)]
            assert torch.equal(table.y, drawn[()].y)
            assert table.X.shape == drawn[()].X.shape
            line = str(table.plan).splitlines()[-1]
            changed = int((table.X != drawn[()].X).any(0).sum())
            assert changed == sum(word.strip(",;").isdigit() for word in line.split())
        lines = [str(drawn[key].plan).splitlines() for key in (("shift",), ("shift", "missing"))]
        assert lines[0][-1] == lines[1][-2]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tables_of_any_spec_and_options_are_valid(data):
    rows = data.draw(st.integers(20, 120))
    train_size = data.draw(st.integers(8, rows - 8))
    max_classes = data.draw(st.sampled_from([0, 2, 3, 6]))
    spec = TableSpec(
        rows, train_size, data.draw(st.integers(1, 9)), max_classes, keeps_missing=data.draw(st.booleans())
    )
    options = {name: data.draw(st.sampled_from([0.0, 0.5, 1.0])) for name in OPTIONS}
    options["strength"] = data.draw(st.sampled_from([None, 0.0, 1.0]))
    table = build_prior(data.draw(st.sampled_from(["mlp_scm", "tree_scm"])), realism=options).sample(spec, 3)
    assert table.X.shape[0] == rows
    assert 1 <= table.X.shape[1] <= spec.num_features
    assert table.X.dtype == torch.float32
    gaps = table.X.isnan()
    assert not table.X.isinf().any() and not gaps[:train_size].all(0).any()
    assert gaps.float().mean().item() == pytest.approx(table.missing if spec.keeps_missing else 0, abs=1e-6)
    if max_classes:
        labeled, query = set(table.y[:train_size].tolist()), set(table.y[train_size:].tolist())
        assert labeled == query
        assert len(labeled) >= 2
        assert max(labeled) < table.num_classes <= max_classes
    else:
        assert abs(table.y.double().mean()) < 1e-6
        assert abs(table.y.double().std() - 1) < 1e-6


MISSING_SPEC = TableSpec(num_rows=120, train_size=70, num_features=6, max_classes=4)
X = rng_at("gaps").standard_normal((2000, 6)).astype(np.float32)
X[:, 5] = rng_at("few values").integers(0, 3, 2000)


def drawn_by(mechanism: str, number: int = 40, strength: float = 0.7) -> list[np.ndarray]:
    drawn = (draw_missing(X, 1000, strength, rng_at("draw", seed)) for seed in range(4 * number))
    return [missing for missing, text in drawn if text.endswith(mechanism)][:number]


@pytest.mark.parametrize("strength", [0.0, 1.0])
@pytest.mark.parametrize("mechanism", MECHANISMS[:3])
def test_columns_with_missing_values_have_the_rate_of_the_strength(mechanism, strength):
    tables = drawn_by(mechanism, 30, strength)
    rates = np.concatenate([missing.mean(0)[missing.any(0)] for missing in tables])
    rate = RATES[1] if strength else RATES[0]
    assert rates.mean() == pytest.approx(rate, rel=0.08)
    assert rates.min() > 0.2 * rate
    assert rates.max() < 1.9 * rate
    assert {missing.any(0).all() for missing in tables} == {True, False}


def test_missing_values_by_value_rise_with_the_rank_of_one_column():
    for missing in drawn_by(MECHANISMS[1], 15):
        for column in np.flatnonzero(missing.any(0)):
            with_columns = [abs(correlation(missing[:, column], X[:, other])) for other in range(6)]
            with_itself = with_columns.pop(column)
            assert with_itself > 0.15
            assert max(with_columns) < 0.15

    drivers = set()
    for missing in drawn_by(MECHANISMS[2]):
        for column in np.flatnonzero(missing.any(0)):
            with_columns = [abs(correlation(missing[:, column], X[:, other])) for other in range(6)]
            drivers.add((column, int(np.argmax(with_columns))))
    assert len(drivers) == 36  # any column may decide about any, itself too


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return np.corrcoef(a, b)[0, 1] if a.any() else 0.0


def test_blocks_are_runs_of_rows():
    for missing in drawn_by(MECHANISMS[3]):
        starts = (np.diff(missing.astype(int), axis=0, prepend=0) == 1).sum(0)
        assert 1 <= starts.max() <= 3
        assert missing.sum() / max(1, starts.sum()) > 20
    strongest = np.array([missing.mean(0).max() for missing in drawn_by(MECHANISMS[3], strength=1.0)])
    assert 0.25 < strongest.mean() < RATES[1]
    assert strongest.max() <= 1.5 * RATES[1]


@pytest.mark.parametrize("name", ["graph_scm", "mlp_scm", "tree_scm", "mix_scm"])
@pytest.mark.parametrize("max_classes", [4, 0])
def test_missing_values_change_nothing_else(name, max_classes):
    plain, changed = (
        build_prior(name, **filterless(name)),
        build_prior(name, realism={"missing": 1.0}, **filterless(name)),
    )
    for seed in range(6):
        spec = replace(MISSING_SPEC, max_classes=max_classes)
        table, filled = plain.sample(spec, seed), changed.sample(spec, seed)
        kept = changed.sample(replace(spec, keeps_missing=True), seed)
        missing = kept.X.isnan()
        assert torch.equal(kept.y, table.y)
        assert torch.equal(filled.y, table.y)
        assert table.missing == 0
        assert torch.equal(kept.X[~missing], table.X[~missing])
        assert torch.equal(filled.X[~missing], table.X[~missing])
        assert kept.missing == filled.missing == missing.float().mean()
        assert missing.any()
        assert filled.X.isfinite().all()
        for j in range(table.X.shape[1]):
            known = table.X[: table.train_size, j][~missing[: table.train_size, j]]
            assert len(known)
            torch.testing.assert_close(filled.X[missing[:, j], j], known.mean().expand(int(missing[:, j].sum())))
        assert re.fullmatch(r"realism: [\d.]+% of the cells missing .*", str(filled.plan).splitlines()[-1])
        assert str(filled.plan).startswith(str(table.plan))


def filterless(name: str) -> dict:
    """Without the filter that sees the missing, and may reject another draw."""
    return {"filter_unpredictable_tables": False} if name == "graph_scm" else {}


def test_no_column_loses_all_labeled_rows():
    for seed in range(300):
        missing, _ = draw_missing(X[:12], 1 + seed % 3, 1.0, rng_at(seed))
        assert not missing[: 1 + seed % 3].all(0).any()


def test_a_column_is_filled_with_the_mean_of_its_labeled_rows():
    table = np.array([[1.0, 5.0], [3.0, np.nan], [np.nan, 100.0], [np.nan, np.nan], [50.0, 7.0]], np.float32)
    fill(table, np.isnan(table), 2)
    assert table.tolist() == [[1, 5], [3, 5], [2, 100], [2, 5], [50, 7]]


def test_the_share_of_tables_with_missing_values_is_the_option():
    prior = build_prior("tree_scm", realism={"missing": 0.3})
    shares = [prior.sample(TableSpec(20, 10, 2, 2), seed).missing > 0 for seed in range(400)]
    assert 0.22 < np.mean(shares) < 0.38


def test_a_mixture_passes_its_realism_on_to_synthetic_components_without_their_own():
    weights = {"mlp_scm": {"weight": 1, "realism": {"missing": 0.0}}, "tree_scm": {"weight": 1}, "dummy": {"weight": 1}}
    mix = build_prior("mix_scm", components=weights, realism={"missing": 1.0})
    tables = [mix.sample(MISSING_SPEC, seed) for seed in range(20)]
    assert {(str(table.plan).split()[0].strip(","), table.missing > 0) for table in tables} == {
        ("mlp_scm", False),
        ("tree_scm", True),
        ("dummy", False),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing": 1.5}, "prior mlp_scm: realism.missing is 1.5; it must lie in 0..1"),
        ({"missing": "much", "strength": -1}, "realism.missing is 'much'.*realism.strength is -1"),
        ({"mising": 0.5}, "prior mlp_scm: realism has no option 'mising' .did you mean 'missing'"),
        (0.5, "realism is 0.5; it must be of type Realism"),
    ],
)
def test_wrong_settings_are_reported(options, message):
    with pytest.raises(PriorError, match=message):
        build_prior("mlp_scm", realism=options)
