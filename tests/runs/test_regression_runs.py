"""Runs that predict numbers: the same line as for classes, from the tables to the exports."""

from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import read_metrics, read_rows, train_short_run

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.errors import ConfigError
from tabicl_train.model.pack import Pack
from tabicl_train.model.quantiles import guess_loss
from tabicl_train.report.page import write_report
from tabicl_train.training.callbacks.validation import validation_streams
from tabicl_train.weights.export import export
from tabicl_train.weights.reader import load_model

NUMBERS = ("task=regression", "model.num_quantiles=99")
VALIDATED = (
    "validation.every=8", "validation.rows=[40,60]", "validation.tables=5", "validation.features=[2,4]",
    "validation.best=real",
    # So that diabetes lies inside the trained range.
    "curriculum.stages.smoke.rows=[20,160]", "curriculum.stages.smoke.features=[2,10]",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A validated run of 16 steps in two parts, and a run of classes."""
    folder = tmp_path_factory.mktemp("runs")
    for steps in (8, 16):
        train_short_run(folder / "numbers", *NUMBERS, *VALIDATED, "prior=mlp_scm_causal", f"trainer.max_steps={steps}")
    train_short_run(folder / "classes", "trainer.max_steps=1")
    return folder


def scores_of(network, tables) -> dict[str, float]:
    """The scores of regression by their definitions, in float64."""
    a = np.arange(1, 100) / 100
    losses, crps, errors, variances, covered, guesses = [], [], [], [], [], []
    for X, y, n in tables:
        with torch.no_grad():
            q = network(Pack.of([(X, y, n)])).double().numpy()  # (query rows, 99)
        queries = y[n:, None].double().numpy()
        losses.append(np.maximum(a * (queries - q), (a - 1) * (queries - q)).mean())
        q = np.sort(q, axis=1)
        crps.append(2 * np.maximum(a * (queries - q), (a - 1) * (queries - q)).mean())
        errors.append(((q.mean(1) - queries[:, 0]) ** 2).mean())
        variances.append(queries.var())
        covered.append(((q[:, 9] <= queries[:, 0]) & (queries[:, 0] <= q[:, 89])).mean())
        guesses.append(guess_loss(y, n))
    return {
        "loss": np.mean(losses),
        "crps": np.mean(crps),
        "rmse": np.mean(errors) ** 0.5,
        "r2": 1 - np.mean(errors) / np.mean(variances),
        "coverage": np.mean(covered),
        "guess_loss": np.mean(guesses),
    }


def test_validation_scores_are_those_of_their_definitions(folder):
    rows = read_rows(folder / "numbers/validation.csv")
    expected_rows = []
    for step in ("8", "16"):
        expected_rows += [(step, "synthetic", "40"), (step, "synthetic", "60"), (step, "diabetes", "200")]
    assert [(row["step"], row["data"], row["rows"]) for row in rows] == expected_rows

    network = load_model(str(folder / "numbers"), "newest")
    config = compose(["experiment=smoke", "prior=mlp_scm_causal", *NUMBERS, *VALIDATED])
    streams = validation_streams(config.validation, {"synthetic": configured_prior(config.prior)}, config.model)
    for row, item in zip(rows[3:5], streams["synthetic"], strict=True):
        expected = scores_of(network, [table for pack in item.packs for table in pack.tables()])
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert "accuracy" not in row

    of_diabetes = [row for row in rows if row["data"] == "diabetes"]
    best_row = max(of_diabetes, key=lambda row: float(row["r2"]))
    best = torch.load(folder / "numbers/checkpoints/best.ckpt", weights_only=True)
    assert best["global_step"] == int(best_row["step"])


@pytest.mark.usefixtures("unrendered")
def test_tables_of_numbers_have_no_classes(folder, tmp_path):
    assert all(0.05 < float(row["guess_loss"]) < 0.6 for row in read_metrics(folder / "numbers"))
    write_report([folder / "numbers"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "R2 on real data" in page and "ROC AUC on real data" not in page


def test_a_run_of_one_task_does_not_start_from_the_other(folder, tmp_path):
    export(str(folder / "classes"), str(tmp_path / "classes.ckpt"))
    kinds = "a classifier", "a regressor"
    for start, settings, (one, other) in (
        (tmp_path / "classes.ckpt", NUMBERS, kinds), (folder / "numbers", (), kinds[::-1])
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            train_short_run(tmp_path / "run", *settings, f"init_weights={start}")
        (problem,) = caught.value.problems
        assert problem.startswith(f"init_weights: the file's model is {one}; this run trains {other}")


def test_a_run_does_not_continue_with_the_other_task(folder):
    for name, settings, kinds, values in (
        ("classes", NUMBERS, "a classifier, and this configuration a regressor", "10, is 0"),
        ("numbers", (), "a regressor, and this configuration a classifier", "0, is 10"),
    ):
        words = rf"another run: it trains {kinds}, .* \(model\.max_classes was {values}\); choose a new run_dir"
        with pytest.raises(ConfigError, match=words):
            train_short_run(folder / name, *settings)
