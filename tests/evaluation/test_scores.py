"""Scores of known probabilities, and comparisons of methods with known outcomes."""

import math

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from tabicl_train.evaluation.scores import (
    METRICS,
    bucket_name,
    by_bucket,
    by_task,
    calibration_error,
    score,
    summarize,
)


def results(scores: dict[str, dict[str, list[float]]], **sizes) -> pd.DataFrame:
    """ROC AUC = accuracy of method, task, split; log loss and calibration error the opposite."""
    rows = []
    for method, tasks in scores.items():
        for i, (task, splits) in enumerate(tasks.items()):
            for split, value in enumerate(splits):
                size = {name: values[i] for name, values in sizes.items()}
                values = dict(zip(METRICS, (value, 1 - value, value, 1 - value), strict=True))
                rows.append({"data": task, "split": split, "method": method, **size, **values})
    return pd.DataFrame(rows)


def test_two_classes():
    y = np.array([0, 1, 1, 0, 1])
    p = np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3], [0.6, 0.4], [0.2, 0.8]])
    scores = score(y, p)
    assert scores["roc_auc"] == pytest.approx(5 / 6) and scores["accuracy"] == pytest.approx(0.8)
    assert scores["log_loss"] == pytest.approx(-np.log([0.9, 0.6, 0.3, 0.6, 0.8]).mean())


def test_three_classes():
    p = np.random.default_rng(0).dirichlet(np.ones(3), 30)
    y = np.arange(30) % 3
    each = [roc_auc_score(y == c, p[:, c]) for c in range(3)]
    assert score(y, p)["roc_auc"] == pytest.approx(np.mean(each))


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
    assert summary["mean_rank"].to_list() == [(2 + 1 + 2 + 1) / 4, (3 + 2 + 2 + 3) / 4, (1 + 3 + 2 + 2) / 4]
    assert np.allclose(
        summary["normalized_accuracy"], [(0.5 + 1 + 1 + 1) / 4, (0 + 0.5 + 1 + 0) / 4, (1 + 0 + 1 + 0.5) / 4]
    )
    assert summary["win_rate"].to_list()[1:] == [(1 + 1 + 0.5 + 1) / 4, (0 + 1 + 0.5 + 1) / 4]
    assert np.allclose(summary["lead"][1:], [0.075, 0.0375])
    assert math.isnan(summary.loc["ours", "win_rate"])
    for method in ("worse", "mixed"):
        row = summary.loc[method]
        assert row.win_low < row.win_rate < row.win_high and row.lead_low < row.lead < row.lead_high
    assert summary["log_loss"].to_list() == pytest.approx([1 - np.mean(vs) for vs in values.values()])


def test_buckets():
    table = results(
        {"ours": {"a": [0.5], "b": [0.7], "c": [0.9]}, "other": {"a": [0.1], "b": [0.2], "c": [0.3]}},
        rows=[199, 200, 60_000], features=[5, 4, 6], classes=[2, 11, 3],
    )  # fmt: skip
    by_rows = by_bucket(table, "rows")
    assert list(by_rows.index) == ["up to 199", "200 to 499", "1000 or more"]
    assert by_rows["ours"].to_list() == [0.5, 0.7, 0.9] and by_rows["tasks"].to_list() == [1, 1, 1]
    by_features = by_bucket(table, "features")
    assert list(by_features.index) == ["up to 5", "6 to 10"] and by_features["tasks"].to_list() == [2, 1]
    assert by_features["other"].to_list() == pytest.approx([0.15, 0.3])
    assert list(by_bucket(table, "classes").index) == ["up to 2", "3 to 5", "11 or more"]
    assert bucket_name(20, math.inf) == "21 or more"
