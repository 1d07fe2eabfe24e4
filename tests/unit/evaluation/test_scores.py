"""Scores of known predictions, their means over tasks, and their text."""

import math

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import mean_pinball_loss, roc_auc_score

from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.scores import (
    CLASS_METRICS,
    LEVELS,
    MARGINAL,
    bucket_name,
    by_bucket,
    by_task,
    calibration_error,
    class_scores,
    judged,
    score_numbers,
    scores_as_text,
    standardize,
    standing,
    summarize,
)
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.run.curves import THIS_MODEL


def results(scores: dict[str, dict[str, list[float]]], **sizes) -> pd.DataFrame:
    """ROC AUC = accuracy of method, task, split; log loss and calibration error the opposite."""
    rows = []
    for method, tasks in scores.items():
        for i, (task, splits) in enumerate(tasks.items()):
            for split, value in enumerate(splits):
                size = {name: values[i] for name, values in sizes.items()}
                values = dict(zip(CLASS_METRICS, (value, 1 - value, value, 1 - value), strict=True))
                rows.append({"data": task, "split": split, "method": method, **size, **values})
    return pd.DataFrame(rows)


def test_two_classes():
    y = np.array([0, 1, 1, 0, 1])
    p = np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3], [0.6, 0.4], [0.2, 0.8]])
    scores = class_scores(y, p)
    assert scores["roc_auc"] == pytest.approx(5 / 6)
    assert scores["accuracy"] == pytest.approx(0.8)
    assert scores["log_loss"] == pytest.approx(-np.log([0.9, 0.6, 0.3, 0.6, 0.8]).mean())


def test_three_classes():
    p = np.random.default_rng(0).dirichlet(np.ones(3), 30)
    y = np.arange(30) % 3
    each = [roc_auc_score(y == c, p[:, c]) for c in range(3)]
    assert class_scores(y, p)["roc_auc"] == pytest.approx(np.mean(each))


def test_calibration_error():
    p = np.array([[0.95, 0.05]] * 4 + [[0.35, 0.65]] * 6)
    y = np.array([0, 0, 0, 1] + [1] * 6)  # correct in 3 of 4 at 0.95, in all at 0.65
    assert calibration_error(y, p) == pytest.approx((4 * 0.2 + 6 * 0.35) / 10)
    assert calibration_error(np.array([0, 1]), np.eye(2)) == 0
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), 100_000)
    y = (rng.random((len(p), 1)) > p.cumsum(axis=1)).sum(axis=1)
    assert calibration_error(y, p) < 0.01 < calibration_error(y, p**2 / (p**2).sum(axis=1, keepdims=True))


def test_all_tasks_have_the_same_weight_whatever_their_splits():
    table = results({"a": {"one": [0.5, 0.7], "two": [0.8]}, "b": {"one": [0.9], "two": [0.2]}})
    assert by_task(table, "roc_auc").to_dict() == {
        "a": {"one": pytest.approx(0.6), "two": 0.8},
        "b": {"one": 0.9, "two": 0.2},
    }
    assert summarize(table).loc["a", "roc_auc"] == pytest.approx(0.7)


def test_summary():
    tasks = ["t1", "t2", "t3", "t4"]
    values = {"ours": [0.9, 0.8, 0.7, 0.6], "worse": [0.8, 0.7, 0.7, 0.5], "mixed": [1.0, 0.6, 0.7, 0.55]}
    summary = summarize(results({m: {t: [v] for t, v in zip(tasks, vs, strict=True)} for m, vs in values.items()}))
    assert list(summary.index) == ["ours", "worse", "mixed"]
    assert np.allclose(
        summary["normalized_accuracy"], [(0.5 + 1 + 1 + 1) / 4, (0 + 0.5 + 1 + 0) / 4, (1 + 0 + 1 + 0.5) / 4]
    )
    assert summary["log_loss"].to_list() == pytest.approx([1 - np.mean(vs) for vs in values.values()])


def test_the_standing_of_the_first_method():
    """At 0.7001 and 0.6999, both printed as 0.700, neither is above the other."""
    values = {"ours": 0.7001, "worst": 0.6, "equal": 0.6999, "best": 0.8, "bad": 0.65, "good": 0.79}
    table = results({method: {"t1": [value + 0.1], "t2": [value - 0.1]} for method, value in values.items()})
    assert standing(table) == (
        "mean ROC AUC 0.700 on 2 real tasks: above bad 0.650 and worst 0.600, level with equal 0.700, "
        "below best 0.800 and good 0.790"
    )


def test_buckets():
    table = results(
        {"ours": {"a": [0.5], "b": [0.7], "c": [0.9]}, "other": {"a": [0.1], "b": [0.2], "c": [0.3]}},
        rows=[199, 200, 60_000], features=[5, 4, 6], classes=[2, 11, 3],
    )  # fmt: skip
    by_rows = by_bucket(table, "rows")
    assert list(by_rows.index) == ["up to 199", "200 to 499", "1000 or more"]
    assert by_rows["ours"].to_list() == [0.5, 0.7, 0.9]
    assert by_rows["tasks"].to_list() == [1, 1, 1]
    by_features = by_bucket(table, "features")
    assert list(by_features.index) == ["up to 5", "6 to 10"]
    assert by_features["tasks"].to_list() == [2, 1]
    assert by_features["other"].to_list() == pytest.approx([0.15, 0.3])
    assert list(by_bucket(table, "classes").index) == ["up to 2", "3 to 5", "11 or more"]
    assert bucket_name(20, math.inf) == "21 or more"


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
    assert scores["coverage"] == sum(inside) / 200
    assert scores["width"] == pytest.approx(np.mean([high - low for low, *_, high in quantiles]))
    without = score_numbers(y, mean, None)
    assert {name for name, value in without.items() if math.isnan(value)} == {"pinball", "coverage", "width"}


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_targets_are_standardized_by_the_labeled_rows_at_any_scale(scale):
    y = np.random.default_rng(0).normal(1, 2, size=50)
    labeled = np.arange(0, 50, 2)
    found = standardize(y * scale, labeled)
    assert np.allclose(found, (y - y[labeled].mean()) / y[labeled].std(), atol=1e-12)


def test_labeled_rows_with_one_target_are_refused():
    y = np.where(np.arange(50) < 40, 0.1, 7.0)
    with pytest.raises(ConfigError, match="the target of all 40 labeled rows"):
        standardize(y, np.arange(40))
    assert np.isfinite(standardize(y, np.arange(41))).all()


def number_results(scores: dict[str, list[tuple[float, float, float, float]]]) -> pd.DataFrame:
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


RESULTS = number_results({
    THIS_MODEL: [(0.9, 1.0, 0.1, 0.8), (-0.5, 3.0, 0.4, 0.7), (0.0, 2.0, 0.2, 0.9)],
    "ridge": [(0.8, 2.0, math.nan, math.nan), (-9.0, 1.0, math.nan, math.nan), (0.25, 1.0, math.nan, math.nan)],
    MARGINAL: [(-0.1, 4.0, 0.3, 0.8), (0.0, 2.0, 0.3, 0.8), (0.0, 2.0, 0.2, 0.8)],
})  # fmt: skip


def test_r2_below_0_counts_as_0_after_the_mean_over_splits():
    assert by_task(RESULTS, "r2")[THIS_MODEL].tolist() == pytest.approx([0.9, -0.5, 0.0])
    assert judged(RESULTS)[THIS_MODEL].tolist() == pytest.approx([0.9, 0.0, 0.0])
    assert list(by_task(RESULTS, "pinball")) == [THIS_MODEL, "ridge", MARGINAL]  # that of nan too


def test_summary_of_regression():
    summary = summarize(RESULTS)
    ours, ridge = (summary.loc[method] for method in (THIS_MODEL, "ridge"))
    assert (ours.r2, ours.r2_median) == pytest.approx((0.3, 0.0))
    assert (ridge.r2, ridge.r2_median) == pytest.approx((1.05 / 3, 0.25))
    assert ours.relative_rmse == pytest.approx((1 + 3 + 2) / 3)
    assert ridge.relative_rmse == pytest.approx(4 / 3)
    assert np.isnan([ridge.coverage, ridge.coverage_low]).all()
    expected = mean_interval(np.array([0.8, 0.7, 0.9]), 0, 1)
    assert (ours.coverage_low, ours.coverage_high) == (expected.low, expected.high)


def test_a_perfect_prediction_is_the_best_by_rmse():
    perfect = number_results({THIS_MODEL: [(1.0, 0.0, 0.0, 1.0)], "other": [(0.5, 0.5, 0.1, 0.8)]})
    assert summarize(perfect)["relative_rmse"].tolist() == [1.0, 50.0]
    perfect.loc[perfect["method"] == THIS_MODEL, "rmse"] = 1e-15  # but for rounding
    assert summarize(perfect)["relative_rmse"].tolist() == [1.0, 50.0]


def test_text_shows_the_scores():
    text = scores_as_text(RESULTS, None)
    lines = [line.split() for line in text.splitlines()]
    assert ["task", "1", "this", "model", "-0.500", "3.000", "0.400", "0.70"] in lines
    assert ["task", "1", "ridge", "-9.000", "1.000", "-", "-"] in lines
    assert ["mean", "this", "model", "0.300", "2.000", "0.233", "0.80"] in lines
    ours = [line[2:] for line in lines if line[:1] == ["this"]][-1]
    ridge = [line[1:] for line in lines if line[:1] == ["ridge"]][-1]
    assert ours[:6] == ["0.300", "0.000", "2.000", "0.233", "1.60", "0.80"]
    assert ridge == ["0.350", "0.250", "1.333", "-", "-", "-"]
    assert "R2 by rows" in text
    assert "R2 by features" in text
    assert "classes" not in text
    assert "nan" not in text
    assert text.splitlines()[-1] == "mean R2 0.300 on 3 real tasks: below ridge 0.350"
