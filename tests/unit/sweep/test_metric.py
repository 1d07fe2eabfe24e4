"""The metric of a run, from invented files with known values."""

import math

import pytest

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import CLASS_SCORES, RunConfig
from tabicl_train.run.records import Records
from tabicl_train.sweep.metric import SWEEP_METRICS, compared_data_sets, curve, last_value, metric_problem
from tabicl_train.training.callbacks.validation_history import read_scores


def write_losses(folder, *losses, every: int = 1) -> None:
    rows = [{"step": i * every, "stage": "one", "loss": loss} for i, loss in enumerate(losses, start=1)]
    Records(folder).append_rows("metrics.csv", *rows)


def write_validation(folder, step: int, synthetic: list[float], real: list[float]) -> None:
    rows = [(step, "synthetic", 64, loss, 1 - loss, None, 2.0, None, 0) for loss in synthetic]
    rows += [(step, f"table {i}", 100, 1 - auc, auc / 2, auc, None, None, 0) for i, auc in enumerate(real)]
    columns = ("step", "data", "rows", *CLASS_SCORES, "is_best")
    Records(folder).append_rows("validation.csv", *(dict(zip(columns, row, strict=True)) for row in rows))


def add_text(path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_training_loss_is_the_mean_over_the_last_tenth_of_the_steps(tmp_path):
    write_losses(tmp_path, *(1 / i for i in range(1, 31)), every=10)
    assert last_value(tmp_path, "loss") == pytest.approx((1 / 28 + 1 / 29 + 1 / 30) / 3)


def test_steps_without_a_finite_loss_do_not_count(tmp_path):
    write_losses(tmp_path, *[1.0] * 18, math.nan, 3.0)
    assert last_value(tmp_path, "loss") == 3.0


def test_validation_means_are_those_that_training_reports(tmp_path):
    write_validation(tmp_path, 10, [0.9, 0.7], [0.6, 0.8])
    write_validation(tmp_path, 20, [0.5, 0.6], [0.9, 0.7])
    expected = read_scores(Records(tmp_path).rows("validation.csv"))
    for metric, kind in (("synthetic/loss", "synthetic"), ("real/roc_auc", "real")):
        assert curve(tmp_path, metric) == [(step, scores[kind]) for step, scores in expected.items()]
    assert last_value(tmp_path, "real/accuracy") == pytest.approx(0.4)
    assert last_value(tmp_path, "real/loss") == pytest.approx(0.2)
    assert last_value(tmp_path, "synthetic/accuracy") == pytest.approx(0.45)


def test_points_are_compared_by_the_data_sets_inside_the_range_of_all(tmp_path):
    """Two rules, of which one is better on all data sets that they were trained for, and the other one on digits."""
    columns = ("step", "data", "loss", "trained_range")
    found = {"a": (0.1, 0.2, 0.3, 9.0), "b": (0.2, 0.3, 0.4, 1.0)}
    for name, losses in found.items():
        rows = [(10, *row, "inside") for row in zip(("iris", "wine", "cancer"), losses, strict=False)]
        rows.append((10, "digits", losses[3], "outside"))
        folder = tmp_path / name
        folder.mkdir()
        Records(folder).append_rows("validation.csv", *(dict(zip(columns, row, strict=True)) for row in rows))
    values = {name: last_value(tmp_path / name, "real/loss") for name in found}
    assert values == {"a": pytest.approx(0.2), "b": pytest.approx(0.3)}  # with digits, b would be the better one
    assert last_value(tmp_path / "a", "real/loss", ["iris"]) == 0.1  # another run is narrower
    assert last_value(tmp_path / "a", "real/loss", ["iris", "digits"]) == pytest.approx(4.55)  # a sweep begun earlier


def test_data_sets_of_a_sweep_lie_inside_the_range_of_every_run():
    wide = compose(["experiment=demo", "curriculum.stages.long.features=[2,64]"])

    def compared(*settings: str) -> list[str]:
        found = compared_data_sets("real/loss", [wide, compose(["experiment=demo", *settings])])
        assert list(found) == ["iris", "wine", "breast_cancer", "digits"]
        return [name for name, is_inside in found.items() if is_inside]

    assert compared("curriculum.stages.long.features=[2,64]") == ["iris", "wine", "breast_cancer", "digits"]
    assert compared("curriculum.stages.long.features=[2,64]", "model.max_classes=2") == ["breast_cancer"]
    assert compared("curriculum=own_tables") == ["iris"]  # of 12 features at most
    assert compared("curriculum=own_tables", "init_weights=mini") == ["iris", "wine", "breast_cancer"]  # it has seen 30
    assert compared_data_sets("synthetic/loss", [wide]) is None


def test_a_data_set_that_could_not_be_scored_makes_the_mean_nan(tmp_path):
    write_validation(tmp_path, 10, [0.5], [0.6, math.nan])
    assert math.isnan(last_value(tmp_path, "real/roc_auc"))
    assert last_value(tmp_path, "synthetic/loss") == 0.5


def test_files_that_are_missing_or_only_begun(tmp_path):
    for metric in SWEEP_METRICS:
        assert last_value(tmp_path / "none", metric) is None
    for name in ("metrics.csv", "validation.csv"):
        for text in ("", "step,da", "step,data\n"):
            (tmp_path / name).write_text(text)
            assert all(last_value(tmp_path, metric) is None for metric in SWEEP_METRICS)


def test_rows_from_before_a_rewind_do_not_count(tmp_path):
    write_losses(tmp_path, 1.0, 2.0, 9.0, 9.0)
    add_text(tmp_path / "metrics.csv", "3,one,3.0\n")
    assert last_value(tmp_path, "loss") == 3.0
    for step, auc in ((10, 0.5), (20, 0.6), (30, 0.7), (20, 0.8)):
        write_validation(tmp_path, step, [], [auc, auc])
    assert curve(tmp_path, "real/roc_auc") == [(10, 0.5), (20, 0.8)]


def test_problems_name_what_keeps_a_run_from_writing_the_metric():
    config, own = RunConfig(prior={"name": "mlp_scm"}), {"own/loss", "own/accuracy", "own/r2"}
    assert metric_problem("loss", config) is None
    assert "validation.every is 0" in metric_problem("real/roc_auc", config)
    config.validation.every = 10
    of_task = {metric: metric_problem(metric, config) for metric in SWEEP_METRICS}
    assert {metric for metric, found in of_task.items() if found} == {"real/r2", "synthetic/r2", *own}
    assert of_task["real/r2"] == "metric is 'real/r2', which runs of task=classification do not have"
    config.model.max_classes = 0
    of_task = {metric: metric_problem(metric, config) for metric in SWEEP_METRICS}
    assert {metric for metric, found in of_task.items() if found} == {
        "real/roc_auc", "real/accuracy", "synthetic/accuracy", *own
    }  # fmt: skip
    config.model.max_classes = 10
    config.validation.suites = ["probes"]
    assert "validation.suites is ['probes']" in metric_problem("real/loss", config)
    assert metric_problem("synthetic/loss", config) is None
    config.validation.rows = []
    assert "validation.rows is []" in metric_problem("synthetic/loss", config)
    assert metric_problem("real/auc", config).endswith("did you mean real/roc_auc?")
    assert metric_problem("speed", config).endswith(", ".join(SWEEP_METRICS))
