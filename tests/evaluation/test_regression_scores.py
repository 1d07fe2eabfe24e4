"""Scores of known numbers and quantiles, and comparisons of methods with known outcomes."""

import math

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import mean_pinball_loss

from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.scores import (
    COVERAGE,
    LEVELS,
    MARGINAL,
    by_bucket,
    by_task,
    judged,
    score_numbers,
    standardize,
    summarize,
)
from tabicl_train.evaluation.scores_text import THIS_MODEL, as_text
from tabicl_train.statistics import mean_interval


def predictions(rows: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.normal(size=rows)
    return y, y + rng.normal(size=rows), np.sort(rng.normal(size=(rows, len(LEVELS))), axis=1)


def test_scores_agree_with_their_definitions():
    y, mean, quantiles = predictions()
    scores = score_numbers(y, mean, quantiles)
    assert scores["r2"] == pytest.approx(1 - ((y - mean) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    assert scores["rmse"] == pytest.approx(math.sqrt(((y - mean) ** 2).mean()))
    each = [mean_pinball_loss(y, q, alpha=level) for q, level in zip(quantiles.T, LEVELS, strict=True)]
    assert scores["pinball"] == pytest.approx(np.mean(each), rel=1e-6)
    inside = [low <= value <= high for value, (low, *_, high) in zip(y, quantiles, strict=True)]
    assert scores["coverage"] == sum(inside) / 200 and pytest.approx(0.8) == COVERAGE
    assert scores["width"] == pytest.approx(np.mean([high - low for low, *_, high in quantiles]))


def test_without_quantiles_their_scores_are_nan():
    y, mean, quantiles = predictions()
    without = score_numbers(y, mean, None)
    assert {name for name, value in without.items() if math.isnan(value)} == {"pinball", "coverage", "width"}
    assert without["r2"] == score_numbers(y, mean, quantiles)["r2"]


@pytest.mark.parametrize("scale", [1e-300, 1e-12, 1.0, 1e12, 1e300])
def test_targets_are_standardized_by_the_labeled_rows_at_any_scale(scale):
    y = np.random.default_rng(0).normal(1, 2, size=50)
    labeled = np.arange(0, 50, 2)
    found = standardize(y * scale, labeled)
    assert np.allclose(found, (y - y[labeled].mean()) / y[labeled].std(), atol=1e-12)


def test_a_target_that_is_almost_constant_keeps_its_differences():
    y = np.arange(50) % 7.0
    labeled = np.arange(0, 50, 2)
    assert np.allclose(standardize(1e16 + 2 * y, labeled), standardize(y, labeled), atol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e300])
def test_labeled_rows_with_one_target_are_refused(value):
    y = np.where(np.arange(50) < 40, value, 7.0)
    with pytest.raises(ConfigError, match="the target of all 40 labeled rows"):
        standardize(y, np.arange(40))
    assert np.isfinite(standardize(y, np.arange(41))).all()


def results(scores: dict[str, list[tuple[float, float, float, float]]]) -> pd.DataFrame:
    """Of methods: R2, RMSE, pinball loss and coverage of tasks with two splits, which differ by 0.2 in R2."""
    rows = []
    for task in range(len(next(iter(scores.values())))):
        for split in (0, 1):
            for method, of_tasks in scores.items():
                r2, rmse, pinball, coverage = of_tasks[task]
                values = {"r2": r2 + 0.2 * split - 0.1, "rmse": rmse, "pinball": pinball, "coverage": coverage}
                row = {
                    "data": f"task {task}",
                    "split": split,
                    "method": method,
                    "rows": 100 * (task + 1),
                    "features": 3,
                }
                rows.append(row | values | {"width": 2 * coverage, "trained_range": "unknown"})
    return pd.DataFrame(rows)


RESULTS = results({
    THIS_MODEL: [(0.9, 1.0, 0.1, 0.8), (-0.5, 3.0, 0.4, 0.7), (0.0, 2.0, 0.2, 0.9)],
    "ridge": [(0.8, 2.0, math.nan, math.nan), (-9.0, 1.0, math.nan, math.nan), (0.25, 1.0, math.nan, math.nan)],
    MARGINAL: [(-0.1, 4.0, 0.3, 0.8), (0.0, 2.0, 0.3, 0.8), (0.0, 2.0, 0.2, 0.8)],
})  # fmt: skip


def test_r2_below_0_counts_as_0_after_the_mean_over_splits():
    assert by_task(RESULTS, "r2")[THIS_MODEL].tolist() == pytest.approx([0.9, -0.5, 0.0])
    assert judged(RESULTS)[THIS_MODEL].tolist() == pytest.approx([0.9, 0.0, 0.0])
    assert list(by_task(RESULTS, "pinball")) == [THIS_MODEL, "ridge", MARGINAL]  # that of nan too


def test_summary():
    summary = summarize(RESULTS)
    ours, ridge, marginal = (summary.loc[method] for method in (THIS_MODEL, "ridge", MARGINAL))
    assert (ours.r2, ours.r2_median) == pytest.approx((0.3, 0.0))
    assert (ridge.r2, ridge.r2_median) == pytest.approx((1.05 / 3, 0.25))
    assert ours.relative_rmse == pytest.approx((1 + 3 + 2) / 3) and ridge.relative_rmse == pytest.approx(4 / 3)
    assert ours.below_marginal == pytest.approx(1 / 3)  # below, above, equal
    assert np.isnan([ridge.below_marginal, marginal.below_marginal, ridge.coverage, ours.lead]).all()
    expected = mean_interval(np.array([0.8, 0.7, 0.9]), 0, 1)
    assert (ours.coverage_low, ours.coverage_high) == (expected.low, expected.high)
    assert (ridge.win_rate, ridge.lead) == pytest.approx((1.5 / 3, (0.1 + 0.0 - 0.25) / 3))  # 0 and 0 are a tie
    assert (marginal.win_rate, marginal.lead) == pytest.approx((2 / 3, 0.3))
    assert (ours.mean_rank, ridge.mean_rank) == pytest.approx(((1 + 2 + 2.5) / 3, (2 + 2 + 1) / 3))


def test_a_perfect_prediction_is_the_best_by_rmse():
    perfect = results({THIS_MODEL: [(1.0, 0.0, 0.0, 1.0)], "other": [(0.5, 0.5, 0.1, 0.8)]})
    assert summarize(perfect)["relative_rmse"].tolist() == [1.0, 50.0]
    perfect.loc[perfect["method"] == THIS_MODEL, "rmse"] = 1e-15  # but for rounding
    assert summarize(perfect)["relative_rmse"].tolist() == [1.0, 50.0]
    assert summarize(perfect)["below_marginal"].isna().all()  # there is nothing to compare with


def test_text_shows_the_scores():
    text = as_text(RESULTS, None)
    lines = [line.split() for line in text.splitlines()]
    assert ["task", "1", "this", "model", "-0.500", "3.000", "0.400", "0.70"] in lines
    assert ["task", "1", "ridge", "-9.000", "1.000", "-", "-"] in lines
    assert ["mean", "this", "model", "0.300", "2.000", "0.233", "0.80"] in lines
    ours = [line[2:] for line in lines if line[:1] == ["this"]][-1]
    ridge = [line[1:] for line in lines if line[:1] == ["ridge"]][-1]
    assert ours[:6] == ["0.300", "0.000", "2.000", "0.233", "0.33", "1.60"]
    assert ridge[:6] == ["0.350", "0.250", "1.333", "-", "-", "-"]
    assert "its lead in R2" in text and "R2 by rows" in text and "R2 by features" in text and "classes" not in text
    assert "nan" not in text


def test_text_of_numbers_too_long_for_their_column():
    bad = results({THIS_MODEL: [(0.9, 1.0, 0.1, 0.8)], "ridge": [(-1.4e32, 2.0, math.nan, math.nan)]})
    assert ["task", "0", "ridge", "-1e+32", "2.000", "-", "-"] in [line.split() for line in as_text(bad, None).splitlines()]


def test_buckets_hold_means_of_what_is_judged():
    assert by_bucket(RESULTS, "rows")[THIS_MODEL].tolist() == pytest.approx([0.9, 0.0])
