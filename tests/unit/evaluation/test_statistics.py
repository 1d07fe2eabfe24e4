"""Intervals and tests against scipy, closed forms and brute force, and what is said about a gain."""

import itertools

import numpy as np
import pytest
from scipy import stats

from tabicl_train.evaluation.statistics import (
    gain_in_words,
    holm,
    mean_interval,
    paired_gain,
    share_interval,
    signed_rank_test,
)

rng = np.random.default_rng(0)
BEFORE = rng.normal(1.0, 0.3, 50)
NOISE = np.tile([0.05, -0.05], 25)
ERROR = 0.05 * np.sqrt(50 / 49) / np.sqrt(50)


def test_the_interval_of_one_factor_is_that_of_a_t_test():
    for values in rng.normal(size=3), rng.normal(size=50):
        expected = values.mean(), *stats.ttest_1samp(values, 0).confidence_interval(0.95)
        without_effect = np.broadcast_to(values[:, None], (len(values), 7))  # tables that make no difference
        for layout in (values, values[None], values[:, None], without_effect):
            found = mean_interval(layout)
            assert (found.mean, found.low, found.high) == pytest.approx(expected)
            assert found.error == pytest.approx(stats.sem(values))


def test_the_interval_counts_the_spread_of_seeds_and_that_of_tables():
    seeds, tables = rng.normal(size=(40, 1)), 3 * rng.normal(size=(1, 200))
    found = mean_interval(seeds + tables)
    half = 1.96 * np.sqrt(seeds.var() / 40 + tables.var() / 200)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.05)


def test_three_seeds_that_agree_by_chance_are_no_claim():
    """Without an effect, three seeds have the same sign in one case of four; intervals of 95 % may claim one in 20."""
    claims = 0
    for _ in range(400):
        parts = rng.normal(size=(3, 1)), 0.15 * rng.normal(size=(1, 12)), 0.5 * rng.normal(size=(3, 12))
        claims += mean_interval(sum(parts)).excludes_zero
    assert claims <= 0.1 * 400


def test_intervals_of_special_values():
    certain = mean_interval(np.full((3, 9), 0.5))  # the same on all tables
    assert (certain.low, certain.high) == pytest.approx((0.5, 0.5))
    assert mean_interval(np.array([[0.9, 1.0], [0.8, 1.0]]), 0, 1).high == 1
    for values in ([0.5], [[0.5]], [[0.5, np.nan], [0.5, 0.5]]):
        single = mean_interval(np.array(values))
        assert np.isnan([single.low, single.high]).all()
        assert not single.excludes_zero


@pytest.mark.parametrize("wins, n", [(0, 4), (4, 4), (3, 10), (40, 75)])
def test_the_interval_of_a_share(wins, n):
    expected = stats.binomtest(wins, n).proportion_ci(method="wilson")
    found = share_interval(wins / n, n)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_a_gain_is_judged_by_a_paired_t_test():
    after = BEFORE - rng.normal(0.05, 0.1, 50)
    found = paired_gain(BEFORE, after)
    expected = stats.ttest_rel(BEFORE, after).confidence_interval(0.95)
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(BEFORE - after), *expected))
    assert paired_gain(BEFORE, BEFORE - 1.01 * ERROR + NOISE).exceeds_error
    assert not paired_gain(BEFORE, BEFORE - 0.99 * ERROR + NOISE).exceeds_error


@pytest.mark.parametrize(
    ("shift", "words"), [(0.1, "better by 0.1"), (-0.1, "worse by 0.1"), (0.0, "no change shown: ")]
)
def test_the_words_say_on_which_side_of_zero_the_interval_lies(shift, words):
    said = gain_in_words(paired_gain(BEFORE, BEFORE - shift + NOISE), 50, "rows")
    assert said.startswith(words) and "50 rows" in said


def test_what_has_no_interval_is_no_gain():
    found = paired_gain(np.array([1.0]), np.array([0.5]))
    assert not found.exceeds_error
    assert gain_in_words(found, 1, "rows") == "no change shown: 0.5000, on too few rows for an interval"
    for before, after in (([np.inf, 1.0], [0.5, 0.5]), ([1.0, 1.0], [np.nan, 0.5])):
        found = paired_gain(np.array(before), np.array(after))
        assert gain_in_words(found, 2, "rows").startswith("none, since the mean loss before or after")


@pytest.mark.parametrize("n", [2, 3, 10, 75])
def test_the_smallest_difference_is_shown_in_80_percent_of_comparisons(n):
    found = mean_interval(rng.normal(size=n))
    shift = found.smallest_shown / found.error / np.sqrt(n)  # in standard deviations of a difference
    repeated = rng.normal(shift, 1, (20_000, n))
    t = repeated.mean(1) / stats.sem(repeated, axis=1)
    is_shown = np.abs(t) > stats.t.ppf(0.975, n - 1)
    assert is_shown.mean() == pytest.approx(0.8, abs=0.012)  # 4 standard errors


def test_the_smallest_difference_of_many_is_2_80_standard_errors():
    found = mean_interval(rng.normal(size=20_000))
    assert found.smallest_shown == pytest.approx((1.959964 + 0.841621) * found.error, rel=1e-3)
    assert (-found).smallest_shown == found.smallest_shown
    assert np.isnan(mean_interval(np.array([0.5])).smallest_shown)
    assert mean_interval(np.full(9, 0.5)).smallest_shown == 0


def test_holm_by_hand():
    # sorted: 0.005 * 4, 0.01 * 3, 0.03 * 2, 0.04 * 1, none smaller than the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == pytest.approx([1, 1])
    assert holm([0.2]) == pytest.approx([0.2])


def test_the_signed_rank_test_counts_all_signs():
    leads = np.array([0.3, -0.1, 0.5, 0.2, -0.05, 0.7, 0.4])
    ranks = stats.rankdata(np.abs(leads))
    half = ranks.sum() / 2
    sums = [ranks[np.array(signs, bool)].sum() for signs in itertools.product([0, 1], repeat=len(leads))]
    as_far = [abs(total - half) >= abs(ranks[leads > 0].sum() - half) for total in sums]
    assert signed_rank_test(leads) == pytest.approx(np.mean(as_far))
    assert signed_rank_test(np.zeros(5)) == 1.0
    assert signed_rank_test(np.r_[leads, np.zeros(20)]) > signed_rank_test(leads)
