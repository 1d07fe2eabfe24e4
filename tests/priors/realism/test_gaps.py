"""Missing cells: how many, which ones, and what they are filled with."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from priors import PriorError, TableSpec, build_prior
from priors.inspection.describe import describe
from priors.random import rng_at
from priors.realism import MECHANISMS, RATES, draw_missing, fill

SPEC = TableSpec(num_rows=120, train_size=70, num_features=6, max_classes=4)
X = rng_at("gaps").standard_normal((2000, 6)).astype(np.float32)
X[:, 5] = rng_at("few values").integers(0, 3, 2000)


def drawn_by(mechanism: str, number: int = 40, strength: float = 0.7) -> list[np.ndarray]:
    drawn = (draw_missing(X, 1000, strength, rng_at("draw", seed)) for seed in range(4 * number))
    return [gaps for gaps, text in drawn if text.endswith(mechanism)][:number]


def test_every_mechanism_is_as_likely():
    texts = [draw_missing(X[:50], 30, 0.5, rng_at("kinds", seed))[1] for seed in range(600)]
    counts = [sum(text.endswith(mechanism) for text in texts) for mechanism in MECHANISMS]
    assert sum(counts) == 600 and min(counts) > 115


@pytest.mark.parametrize("strength", [0.0, 1.0])
@pytest.mark.parametrize("mechanism", MECHANISMS[:3])
def test_columns_with_gaps_have_the_rate_of_the_strength(mechanism, strength):
    tables = drawn_by(mechanism, 30, strength)
    rates = np.concatenate([gaps.mean(0)[gaps.any(0)] for gaps in tables])
    rate = RATES[1] if strength else RATES[0]
    assert rates.mean() == pytest.approx(rate, rel=0.08) and rates.min() > 0.2 * rate and rates.max() < 1.9 * rate
    assert {gaps.any(0).all() for gaps in tables} == {True, False}


def test_gaps_at_random_depend_on_no_value():
    correlations = [correlation(gaps[:, j], X[:, k]) for gaps in drawn_by(MECHANISMS[0]) for j, k in np.ndindex(6, 6)]
    assert np.nanmax(np.abs(correlations)) < 5 / len(X) ** 0.5


def test_gaps_by_value_rise_with_the_rank_of_one_column():
    for gaps in drawn_by(MECHANISMS[1], 15):
        for j in np.flatnonzero(gaps.any(0)):
            others = [abs(correlation(gaps[:, j], X[:, k])) for k in range(6) if k != j]
            assert abs(correlation(gaps[:, j], X[:, j])) > 0.15 > max(others)
    drivers = {
        (j, int(np.argmax([abs(correlation(gaps[:, j], X[:, k])) for k in range(6)])))
        for gaps in drawn_by(MECHANISMS[2])
        for j in np.flatnonzero(gaps.any(0))
    }
    assert len(drivers) == 36  # any column may decide about any, itself too


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return np.corrcoef(a, b)[0, 1] if a.any() else 0.0


def test_equal_values_have_equal_chances_in_all_rows():
    halves = np.array([[gaps[:1000, 5].mean(), gaps[1000:, 5].mean()] for gaps in drawn_by(MECHANISMS[1])])
    assert halves[:, 0].mean() == pytest.approx(halves[:, 1].mean(), rel=0.05)


def test_blocks_are_runs_of_rows():
    for gaps in drawn_by(MECHANISMS[3]):
        starts = (np.diff(gaps.astype(int), axis=0, prepend=0) == 1).sum(0)
        assert 1 <= starts.max() <= 3 and gaps.sum() / max(1, starts.sum()) > 20
    strongest = np.array([gaps.mean(0).max() for gaps in drawn_by(MECHANISMS[3], strength=1.0)])
    assert 0.25 < strongest.mean() < RATES[1] and strongest.max() <= 1.5 * RATES[1]


@pytest.mark.parametrize("name", ["graph_scm", "mlp_scm", "tree_scm", "mix_scm"])
@pytest.mark.parametrize("max_classes", [4, 0])
def test_gaps_change_nothing_else(name, max_classes):
    plain, gappy = (
        build_prior(name, **filterless(name)),
        build_prior(name, realism={"missing": 1.0}, **filterless(name)),
    )
    for seed in range(6):
        spec = replace(SPEC, max_classes=max_classes)
        table, filled = plain.sample(spec, seed), gappy.sample(spec, seed)
        kept = gappy.sample(replace(spec, keeps_missing=True), seed)
        gaps = kept.X.isnan()
        assert torch.equal(kept.y, table.y) and torch.equal(filled.y, table.y) and table.missing == 0
        assert torch.equal(kept.X[~gaps], table.X[~gaps]) and torch.equal(filled.X[~gaps], table.X[~gaps])
        assert kept.missing == filled.missing == gaps.float().mean() and gaps.any() and filled.X.isfinite().all()
        for j in range(table.X.shape[1]):
            known = table.X[: table.train_size, j][~gaps[: table.train_size, j]]
            assert len(known)
            torch.testing.assert_close(filled.X[gaps[:, j], j], known.mean().expand(int(gaps[:, j].sum())))
        assert re.fullmatch(r"realism: [\d.]+% of the cells missing .*", str(filled.plan).splitlines()[-1])
        assert str(filled.plan).startswith(str(table.plan))


def filterless(name: str) -> dict:
    """Without the filter that sees the gaps, and may reject another draw."""
    return {"filter_unpredictable_tables": False} if name == "graph_scm" else {}


def test_no_column_loses_all_labeled_rows():
    for seed in range(300):
        gaps, _ = draw_missing(X[:12], 1 + seed % 3, 1.0, rng_at(seed))
        assert not gaps[: 1 + seed % 3].all(0).any()


def test_a_column_is_filled_with_the_mean_of_its_labeled_rows():
    table = np.array([[1.0, 5.0], [3.0, np.nan], [np.nan, 100.0], [np.nan, np.nan], [50.0, 7.0]], np.float32)
    fill(table, np.isnan(table), 2)
    assert table.tolist() == [[1, 5], [3, 5], [2, 100], [2, 5], [50, 7]]


def test_the_share_of_tables_with_gaps_is_the_option():
    prior = build_prior("tree_scm", realism={"missing": 0.3})
    shares = [prior.sample(TableSpec(20, 10, 2, 2), seed).missing > 0 for seed in range(400)]
    assert 0.22 < np.mean(shares) < 0.38


def test_a_mixture_passes_its_realism_on_to_synthetic_components_without_their_own():
    weights = {"mlp_scm": {"weight": 1, "realism": {"missing": 0.0}}, "tree_scm": {"weight": 1}, "dummy": {"weight": 1}}
    mix = build_prior("mix_scm", components=weights, realism={"missing": 1.0})
    tables = [mix.sample(SPEC, seed) for seed in range(20)]
    assert {(str(table.plan).split()[0].strip(","), table.missing > 0) for table in tables} == {
        ("mlp_scm", False),
        ("tree_scm", True),
        ("dummy", False),
    }


def test_describe_tells_the_share_of_missing_cells():
    for keeps_missing in (False, True):
        spec = replace(SPEC, keeps_missing=keeps_missing)
        tables = [build_prior("tree_scm", realism={"missing": 1.0}).sample(spec, seed) for seed in range(3)]
        line = next(line for line in describe(tables).splitlines() if line.startswith("missing cells"))
        assert float(line.split()[-1]) == pytest.approx(np.mean([table.missing for table in tables]), abs=6e-4)


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
