"""The command, the folders that experiments write, and each experiment at its smallest size."""

import dataclasses
import json
import re
import shlex
import sys
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from command_line import command
from forked_jobs import forked_jobs  # noqa: F401
from lab_experiments import run_small_experiment
from training_runs import write_untrained_run

from tabicl_train import TabICLClassifier, register
from tabicl_train.config.compose import parse_options
from tabicl_train.config.documentation import help_text
from tabicl_train.config.options import ExportOptions
from tabicl_train.lab import classes, needle
from tabicl_train.lab.experiments import Failed, Preempted, options_class
from tabicl_train.sweep.results import Sweep
from tabicl_train.weights.export import export
from tabicl_train.weights.reader import load_model


def files(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", register.experiment)
def test_every_experiment_has_a_folder_a_smallest_size_and_help(name):
    options = options_class(name, register.experiment[name].function)
    assert {"folder", "small"} <= {field.name for field in dataclasses.fields(options)}
    assert help_text(options).startswith(f"usage: tabicl-lab {name} folder=DIR")
    result = command("lab", name, "--help")
    assert result.returncode == 0 and help_text(options) in result.stdout


def test_the_command_without_an_experiment_lists_them():
    result = command("lab")
    assert result.returncode == 0
    assert all(known.question in result.stdout for known in register.experiment.values())
    result = command("lab", "fadding")
    assert result.returncode == 2
    assert "there is no experiment 'fadding'; did you mean 'fading'?" in result.stderr


@pytest.mark.slow  # git, for the page
def test_fading_writes_a_folder(tmp_path):
    folder = tmp_path / "new" / "fading"
    page = run_small_experiment("fading", folder, "gap=3")
    assert files(folder) == {"experiment.json", "fading.csv", "fading.png", "README.md"}
    assert page.startswith("# Attention fading\n\nAn attention layer")
    assert "| gap | 3.0 |" in page
    assert json.loads((folder / "experiment.json").read_text())["options"]["gap"] == 3
    again = run_small_experiment("fading", folder, "gap=4")  # replaces what it wrote
    assert "| gap | 4.0 |" in again
    assert files(folder) == {"experiment.json", "fading.csv", "fading.png", "README.md"}


def test_a_mistake_in_the_options_is_told(tmp_path):
    result = command("lab", "fading", f"folder={tmp_path}/x", "gap=-1")
    assert result.returncode == 2
    assert not (tmp_path / "x").exists()
    assert "gap is -1.0" in result.stderr


@pytest.mark.parametrize(
    ("name", "package"),
    [
        *((name, "matplotlib") for name in register.experiment),
        *((name, "optuna") for name, experiment in register.experiment.items() if experiment.trains),
    ],
)
def test_a_missing_package_is_told_before_a_folder_is_made(name, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    for module in (f"tabicl_train.lab.{name}", "tabicl_train.report.figures", "tabicl_train.report.page"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    needed = {"attention": ["checkpoint=mini", "table=x.csv", "row=0"], "classes": ["checkpoint=mini"]}
    needed["entropy"] = needed["rows"] = needed["codes"] = needed["classes"]
    result = command("lab", name, f"folder={tmp_path}/x", *needed.get(name, []))
    assert result.returncode == 2 and not (tmp_path / "x").exists()
    assert re.fullmatch(rf"error: \w+ needs? {package}: pip install .*", result.stderr.strip())
    assert command("lab", name, "--help").returncode == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("notes.txt", "mine", "holds notes.txt, which is of no experiment"),
        ("experiment.json", '{"experiment": "needle"}', "holds the experiment needle"),
    ],
)
def test_a_folder_of_something_else_is_refused_and_kept(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    result = command("lab", "fading", f"folder={tmp_path}")
    assert result.returncode == 2
    assert message in result.stderr
    assert "choose another name" in result.stderr
    assert files(tmp_path) == {name} and (tmp_path / name).read_text() == text


@pytest.mark.slow
@pytest.mark.usefixtures("forked_jobs")
def test_needle_at_its_smallest_size_twice(tmp_path):
    page = run_small_experiment("needle", tmp_path)
    scores = pd.read_csv(tmp_path / "needle.csv")
    assert set(scores["rule"]) == {"softmax", "SSMax", "QASSMax", "SSA"}
    assert len(scores) == 4 * 2 * 2
    assert scores["accuracy"].between(0, 1).all()
    assert scores["entropy"].between(0, 1).all()
    assert "No claim is made with fewer than 3 seeds" in page
    assert len(list((tmp_path / "runs").glob("*_rule-*"))) == 4
    scores.iloc[:9].to_csv(tmp_path / "needle.csv", index=False)  # as if it had been stopped there
    run_small_experiment("needle", tmp_path)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "needle.csv"), scores)
    lines = [path.read_text().count("\n") for path in (tmp_path / "runs").glob("*/provenance.jsonl")]
    assert lines == [1] * 4  # none was trained again


@pytest.mark.slow
@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize(
    ("name", "tests", "columns"), [("linear", 7, ["error", "largest"]), ("quantifiers", 5, ["drawn", "undecided"])]
)
def test_an_experiment_with_sequences_at_its_smallest_size(name, tests, columns, tmp_path):
    page = run_small_experiment(name, tmp_path)
    scores = pd.read_csv(tmp_path / f"{name}.csv")
    assert len(scores) == 2 * tests * 2
    assert set(scores["rule"]) == {"softmax", "SSA"}
    assert (scores[columns] >= 0).all(axis=None)
    assert "No claim is made with fewer than 3 seeds" in page
    assert len(list((tmp_path / "runs").glob("*/*_rule-*"))) == 2
    assert f"({name}.png)" in page
    (sweep,) = (tmp_path / "runs").iterdir()
    _, export_command = Sweep(sweep).best_run.commands  # the one that the sweep names at its end
    options = parse_options(ExportOptions, shlex.split(export_command)[1:])
    assert "load_network" in export(options.checkpoint, options.output, format=options.format)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_jobs")
def test_curriculum_at_its_smallest_size(tmp_path):
    page = run_small_experiment("curriculum", tmp_path)
    scores = pd.read_csv(tmp_path / "curriculum.csv")
    assert len(scores) == 2 * 3 * 2 * 5 and set(scores["data"]) == {"synthetic"}
    assert sorted(set(scores["n"])) == [16, 32, 64, 128, 256]
    assert "QASSMax minus SSMax" in page
    assert "Real tables" not in page.partition("## How")[0]


@pytest.mark.slow  # git, for the page
def test_classes_at_its_smallest_size(tmp_path, run_dir):
    page = run_small_experiment("classes", tmp_path / "classes", f"checkpoint={run_dir}", "members=2")
    scores = pd.read_csv(tmp_path / "classes" / "classes.csv")
    assert "| 2 members minus one: numbers and columns | 2 members minus one: numbers |" in page
    X, y, asked, truth, _ = classes.draw_clusters(23, classes.ROWS, classes.QUERIES, 0)
    members = TabICLClassifier(load_model(str(run_dir)), n_estimators=2, norm_methods=("none",)).fit(X, y)
    assert scores["accuracy_members"][1] == pytest.approx((members.predict(asked) == truth).mean())
    assert scores[["classes", "digits", "nodes"]].to_numpy().tolist() == [[4, 1, 1], [23, 2, 4]]
    decomposition = pd.read_csv(tmp_path / "classes" / "decomposition.csv")
    assert decomposition.iloc[42].tolist() == [42, 5, 2, 4]  # class, digits, group
    assert "![digits and groups" in page


@pytest.mark.slow
def test_members_differ_in_class_numbers_or_in_columns_alone(run_dir):
    """The mean of their logarithms of probabilities is that of single members which see the table in such a way."""
    network = load_model(str(run_dir))
    X, y, asked, _, _ = classes.draw_clusters(23, classes.ROWS, classes.QUERIES, 0)
    members = TabICLClassifier(network, n_estimators=2, norm_methods=("none",)).fit(X, y).members_
    one = TabICLClassifier(network, n_estimators=1, norm_methods=("none",))
    numbers = columns = 0.0
    for member in members:
        shift, features = member.shift, member.features
        probabilities = one.fit(X, (y + shift) % 23).predict_proba(asked)
        numbers += np.log(np.roll(probabilities, -shift, axis=1))
        columns += np.log(one.fit(X[:, features], y).predict_proba(asked[:, features]))
    for differ_in, expected in {"numbers": numbers, "columns": columns}.items():
        assert np.array_equal(classes.predict_classes(network, X, y, asked, 2, differ_in), expected.argmax(axis=1))


@pytest.mark.parametrize(
    ("error", "code", "text"), [(Preempted(), 75, ""), (Failed("1 of 4 runs have failed"), 1, "error: 1 of 4")]
)
def test_exit_codes_are_those_of_a_sweep(tmp_path, monkeypatch, error, code, text):
    monkeypatch.setattr(needle, "trained_runs", mock.Mock(side_effect=error))
    result = command("lab", "needle", f"folder={tmp_path}")
    assert result.returncode == code and text in result.stderr
    assert files(tmp_path) == {"experiment.json"}  # the same command goes on


@pytest.mark.parametrize("experiment, settings", [("classes", []), ("attention", ["table=rows.csv"])])
def test_classes_need_a_network_that_predicts_them(experiment, settings, tmp_path):
    write_untrained_run(tmp_path / "run", "prior=mlp_scm", "task=regression", "model.num_quantiles=9")
    result = command("lab", experiment, f"folder={tmp_path}/page", f"checkpoint={tmp_path}/run", *settings)
    assert result.returncode == 2
    assert "its network predicts numbers" in result.stderr
    assert not (tmp_path / "page").exists()
