"""The gain of a training, and what is said about it."""

import numpy as np
import pytest
from scipy import stats

from tabicl_train.prediction.gain import answer, gain

rng = np.random.default_rng(0)
BEFORE = rng.normal(1.0, 0.3, 50)


def test_the_interval_is_that_of_a_paired_t_test():
    after = BEFORE - rng.normal(0.05, 0.1, 50)
    found = gain(BEFORE, after)
    expected = stats.ttest_rel(BEFORE, after).confidence_interval(0.95)
    np.testing.assert_allclose([found.low, found.high], expected, rtol=1e-12)
    np.testing.assert_allclose(found.mean, np.mean(BEFORE - after), rtol=1e-12)


@pytest.mark.parametrize(
    ("shift", "words"),
    [
        (0.1, "better by 0.1"),
        (-0.1, "worse by 0.1"),
        (0.0, "no clear gain: "),
    ],
)
def test_the_answer_says_which_side_of_zero_the_interval_lies_on(shift, words):
    noise = np.tile([0.05, -0.05], 25)
    found = gain(BEFORE, BEFORE - shift + noise)
    said = answer(found, 50, "rows")
    assert said.startswith(words)
    assert "50 rows" in said


def test_a_gain_is_likely_if_it_exceeds_its_standard_error():
    noise = np.tile([0.05, -0.05], 25)
    error = 0.05 * np.sqrt(50 / 49) / np.sqrt(50)
    assert gain(BEFORE, BEFORE - 1.01 * error + noise).is_likely
    assert not gain(BEFORE, BEFORE - 0.99 * error + noise).is_likely


def test_a_single_unit_has_no_interval_and_no_likely_gain():
    found = gain(np.array([1.0]), np.array([0.5]))
    assert found.mean == 0.5
    assert np.isnan(found.low)
    assert not found.is_likely
    assert answer(found, 1, "rows") == "no clear gain: 0.5000, on too few rows for an interval"


def test_a_loss_that_is_not_finite_gives_no_answer():
    for before, after in (([np.inf, 1.0], [0.5, 0.5]), ([1.0, 1.0], [np.nan, 0.5])):
        found = gain(np.array(before), np.array(after))
        assert answer(found, 2, "rows") == "none, since the mean loss before or after the training is not finite"
