"""Missing values of synthetic tables, and what the options leave as it was."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from priors import PriorError, TableSpec, build_prior
from priors.random import rng_at
from priors.realism import MECHANISMS, RATES, draw_missing, fill_with_means, uniform_ranks

SYNTHETIC = ["graph_scm", "mlp_scm", "tree_scm", "mix_scm"]
SPEC = TableSpec(num_rows=100, train_size=60, num_features=5, max_classes=3)


def test_ranks_break_ties_at_random():
    drawn = np.mean([uniform_ranks(np.zeros((1, 50)), rng_at("ties", seed))[0] for seed in range(3000)], axis=0)
    np.testing.assert_allclose(drawn, 0.5, atol=0.03)
    assert uniform_ranks(np.array([[3.0, 1.0, 2.0]]), rng_at(0))[0].tolist() == pytest.approx([5 / 6, 1 / 6, 1 / 2])


@pytest.mark.parametrize("name", SYNTHETIC)
@pytest.mark.parametrize("max_classes", [3, 0])
def test_options_that_are_off_change_no_bit(name, max_classes):
    spec = replace(SPEC, max_classes=max_classes)
    for options in ({}, {"strength": 0.5}):
        for seed in range(3):
            table, plain = (build_prior(name, **more).sample(spec, seed) for more in ({"realism": options}, {}))
            assert torch.equal(table.X, plain.X)
            assert torch.equal(table.y, plain.y)
            assert str(table.plan) == str(plain.plan)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tables_of_any_spec_and_options_are_valid(data):
    rows = data.draw(st.integers(20, 120))
    train_size = data.draw(st.integers(8, rows - 8))
    max_classes = data.draw(st.sampled_from([0, 2, 3, 6]))
    spec = TableSpec(
        rows, train_size, data.draw(st.integers(1, 9)), max_classes, keeps_missing=data.draw(st.booleans())
    )
    options = {
        "missing": data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        "strength": data.draw(st.sampled_from([None, 0.0, 1.0])),
    }
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
    fill_with_means(table, np.isnan(table), 2)
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
        ({"mising": 0.5}, "prior mlp_scm: realism.mising: no such setting; did you mean realism.missing"),
        (0.5, "prior mlp_scm: realism: it must be a mapping"),
    ],
)
def test_wrong_settings_are_reported(options, message):
    with pytest.raises(PriorError, match=message):
        build_prior("mlp_scm", realism=options)
