"""What the report and sweeps say of a run that was validated on tables of one's own."""

import dataclasses
import json

import pandas as pd
import pytest
import yaml
from made_run import make_run

from tabicl_train.config.compose import compose
from tabicl_train.report.page import write_report
from tabicl_train.report.sections import validation_means
from tabicl_train.report.training_curves import draw_validation
from tabicl_train.run_dir.records import Records
from tabicl_train.sweep.metric import curve, problem


@pytest.fixture
def folder(tmp_path):
    """A run with a validation after step 20 that has rows of all kinds."""
    make_run(tmp_path / "run")
    values = dataclasses.asdict(compose(["experiment=smoke"]))
    Records(tmp_path / "run").replace("config.yaml", yaml.safe_dump(values))
    (tmp_path / "run/provenance.jsonl").unlink()
    common = {"accuracy": 0.5, "roc_auc": None}
    Records(tmp_path / "run").append_rows(
        "validation.csv",
        {"step": 20, "data": "synthetic", "rows": 64, "loss": 1.0} | common,
        {"step": 20, "data": "own", "rows": 40, "loss": 0.25} | common,
        {"step": 20, "data": "own", "rows": 64, "loss": 0.75} | common,
        {"step": 20, "data": "iris", "rows": 60, "loss": 1.5} | common | {"roc_auc": 0.875},
    )
    return tmp_path / "run"


def test_own_synthetic_and_public_tables_are_told_apart(folder):
    rows = pd.read_csv(folder / "validation.csv")
    assert {name: values[20] for name, values in validation_means(rows).items()} == {
        "loss on own tables": 0.5, "loss on synthetic tables": 1.0, "ROC AUC on real data": 0.875
    }  # fmt: skip
    panels = draw_validation({"run": rows}).axes
    assert [axes.get_title() for axes in panels] == [
        "loss on held-out own tables", "loss on held-out synthetic tables", "ROC AUC on real data"
    ]  # fmt: skip
    without = draw_validation({"run": rows[rows["data"] != "iris"]}).axes
    assert [axes.get_title() for axes in without] == [axes.get_title() for axes in panels[:2]]
    labels = [[line.get_label() for line in axes.lines] for axes in panels]
    assert labels == [["40 rows", "64 rows", "mean"], ["64 rows", "mean"], ["iris", "mean"]]
    assert [curve(folder, f"{kind}/loss")[-1] for kind in ("own", "synthetic", "real")] == [
        (20, 0.5), (20, 1.0), (20, 1.5)
    ]  # fmt: skip


def test_the_answer_stands_at_the_top_of_the_validation(folder, tmp_path):
    write_report([folder], tmp_path / "page.html")
    assert "After step" not in (tmp_path / "page.html").read_text()
    sentences = ["own rows: better by 0.1", "synthetic tables: the mean loss changes by 0"]
    Records(folder).replace("answer.json", json.dumps({"step": 20, "best_step": 10, "sentences": sentences}))
    write_report([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    answer = f"After step 20: {sentences[0]}; {sentences[1]}."
    assert page.index(">Validation<") < page.index(answer) < page.index("loss on own tables", page.index(answer))


def test_a_run_without_tables_of_ones_own_has_no_such_metric(folder):
    config = compose(["experiment=smoke", "validation.every=5"])
    assert problem("own/loss", config) == "metric is 'own/loss', but prior=mlp_scm draws no such tables"
    assert problem("synthetic/loss", config) is None
