"""Experiments about the claims of the sources at their smallest size, which says nothing about the claims."""

import pandas as pd
import pytest
from command_line import command
from forked_jobs import forked_jobs  # noqa: F401
from lab_experiments import run_small_experiment


@pytest.mark.slow  # git, for the page
def test_four_tokens(tmp_path):
    page = run_small_experiment("four_tokens", tmp_path)
    assert "| jobs | 0.419 | 0.431 | 0.126 | 0.024 |" in page
    measured = pd.read_csv(tmp_path / "four_tokens.csv")
    assert measured["variance_divided"].between(0.9, 1.1).all()


@pytest.mark.slow
def test_ranking(tmp_path, run_dir):
    page = run_small_experiment("ranking", tmp_path, f"checkpoint={run_dir}")
    turned = pd.read_csv(tmp_path / "trained.csv")
    assert set(turned["table"]) == {0, 1} and turned["turned"].between(0, 1).all()
    assert "those of 2 tables of graph_scm" in page
    assert "at n = 90 (dotted)" in page
    curves = pd.read_csv(tmp_path / "ranking.csv")
    wins = curves["first"] > curves["second"]
    assert set(curves["rule"][~wins]) == {"element-wise"}


@pytest.mark.slow
def test_rows(tmp_path, run_dir, table):
    settings = [f"checkpoint={run_dir}", f"table={table}", "target=class"]
    page = run_small_experiment("rows", tmp_path / "rows", *settings, "rows=[30]")
    scores = pd.read_csv(tmp_path / "rows" / "rows.csv")
    assert scores["rows"].tolist() == [15, 30]
    assert (scores[["peak_gb", "log_loss"]] > 0).all(axis=None)
    assert "30 labeled rows minus 15" in page
    result = command("lab", "rows", f"folder={tmp_path}/x", *settings)
    assert result.returncode == 2
    assert "60000 labeled rows and 2000 query rows are needed" in result.stderr


@pytest.mark.slow
def test_codes(tmp_path, run_dir):
    page = run_small_experiment("codes", tmp_path / "codes", f"checkpoint={run_dir}")
    scores = pd.read_csv(tmp_path / "codes" / "codes.csv")
    passes = scores.set_index(["classes", "way"])["passes"].to_dict()
    assert passes == {
        (10, "digits and groups"): 1, (10, "codes, as many readings"): 1, (10, "codes, as many passes"): 1,
        (20, "digits and groups"): 3, (20, "codes, as many readings"): 2, (20, "codes, as many passes"): 3,
    }  # fmt: skip
    assert scores["accuracy"].between(0, 1).all()
    assert "| 20 | codes, as many passes | 3 |" in page


@pytest.mark.slow
@pytest.mark.usefixtures("forked_jobs")
def test_haystack(tmp_path):
    page = run_small_experiment("haystack", tmp_path)
    scores = pd.read_csv(tmp_path / "haystack.csv")
    assert len(scores) == 5 * 2 * 2 and scores["rule"].nunique() == 5
    assert scores[["needle", "crowd", "entropy"]].apply(lambda column: column.between(0, 1)).all(axis=None)
    assert "No claim is made with fewer than 3 seeds" in page
    assert "QASSMax minus each other rule" in page


@pytest.mark.slow
@pytest.mark.usefixtures("forked_jobs")
def test_scores(tmp_path):
    page = run_small_experiment("scores", tmp_path)
    scores = pd.read_csv(tmp_path / "scores.csv")
    assert len(scores) == 5 * 10 * 2
    assert scores["rule"].nunique() == 5
    assert (scores["error"] > 0).all()
    assert "SSA minus softmax" in page
    assert "No claim is made with fewer than 3 seeds" in page


@pytest.mark.slow
@pytest.mark.usefixtures("forked_jobs")
def test_long_rows(tmp_path):
    page = run_small_experiment("long_rows", tmp_path, "curricula=[fixed_long,growing_long,fixed_short]")
    scores = pd.read_csv(tmp_path / "long_rows.csv")
    assert len(scores) == 3 * 4 * 2 * 5
    assert sorted(scores["n"].unique()) == [16, 32, 64, 128, 256]
    assert scores["entropy"].between(0, 1).all()
    assert scores["rule"].nunique() == 4
    assert "No claim is made with fewer than 3 seeds" in page


@pytest.mark.slow
@pytest.mark.usefixtures("forked_jobs")
def test_long_rows_of_a_single_curriculum_and_rule(tmp_path):
    page = run_small_experiment("long_rows", tmp_path, "curricula=[fixed_short]", "rules=[softmax]")
    assert "| softmax | fixed_short |" in page
    assert "minus another curriculum" not in page


@pytest.mark.slow
def test_invariances(tmp_path):
    page = run_small_experiment("invariances", tmp_path)
    changes = pd.read_csv(tmp_path / "invariances.csv")
    assert len(changes) == 2 and (changes["with positions"] > 1e-2).all()
    assert (changes[["labeled rows", "query rows", "without positions"]] < 1e-4).all(axis=None)
    assert "| 1,000 | 3.9 |" in page
