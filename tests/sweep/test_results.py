"""What is read from a sweep's folder, and how its jobs are ranked, against closed forms."""

import csv
import math
import os
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from invented_sweeps import SETTINGS, begin, end, job, plan, start, write_run

from tabicl_train.config.arguments import parse
from tabicl_train.config.compose import compose
from tabicl_train.config.options import ExportOptions
from tabicl_train.errors import ConfigError
from tabicl_train.prediction.export import check_output
from tabicl_train.run_dir.lock import RunLock
from tabicl_train.sweep.ranking import best_job, command_lines, hydra_text, interval, rank, short_names, table
from tabicl_train.sweep.results import read_sweep, write_csv


def add(folder, *values: float, metric: str = "loss", **params) -> None:
    """A finished job for each value, with seeds 0, 1, ..."""
    for seed, value in enumerate(values):
        name = "-".join(map(str, [*params.values(), seed]))
        job(folder, name, params, value, seed, metric)


def means(folder) -> list[float]:
    return [point.mean for point in rank(read_sweep(folder))]


# ---- reading


def test_a_folder_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no sweep in it"):
        read_sweep(tmp_path)
    (tmp_path / "sweep.yaml").write_text("metric: [")
    with pytest.raises(ConfigError, match="there is no sweep in it"):
        read_sweep(tmp_path)


def test_a_job_that_was_planned_and_one_that_has_finished(tmp_path):
    begin(tmp_path, "real/roc_auc")
    plan(tmp_path, "a", {"x": 1}, seed=3)
    job(tmp_path, "b", {"x": 2}, 0.75, metric="real/roc_auc")
    a, b = read_sweep(tmp_path).jobs
    assert (a.name, a.params, a.seed, a.status) == ("a", {"x": 1}, 3, "planned")
    assert (a.value, a.steps, a.seconds) == (None, 0, None)
    assert (b.status, b.value, b.curve, b.steps, b.seconds) == ("finished", 0.75, [(100, 0.75)], 100, 60.0)
    assert a.folder == tmp_path / "a" and a.overrides == [*SETTINGS, "x=1", "seed=3"]


@pytest.mark.parametrize("status", ["failed", "pruned", "interrupted"])
def test_an_end_other_than_finished_has_its_reason(status, tmp_path):
    begin(tmp_path)
    job(tmp_path, "a", {}, 2.0, status=status, reason="because")
    (a,) = read_sweep(tmp_path).jobs
    assert (a.status, a.reason, a.value) == (status, "because", 2.0)


ENDED_AS = {"finished": "finished", "failed": "failed", "preempted": "interrupted", "running": "killed", None: "killed"}


@pytest.mark.parametrize("run, status", ENDED_AS.items())
def test_a_start_without_an_end(run, status, tmp_path):
    """The run itself says how it ended; while the sweep's process is alive, it is that of an earlier start."""
    begin(tmp_path)
    plan(tmp_path, "a", {})
    start(tmp_path, "a")
    if run is not None:
        write_run(tmp_path / "a", {10: 1.0}, status=run)
    assert read_sweep(tmp_path).jobs[0].status == status
    lock = RunLock(tmp_path)
    lock.acquire()
    try:
        assert read_sweep(tmp_path).jobs[0].status == "running"
    finally:
        lock.release()


def test_only_the_jobs_of_the_latest_call_count_and_keep_their_results(tmp_path):
    begin(tmp_path)
    job(tmp_path, "old", {"x": 1}, 1.0)
    job(tmp_path, "kept", {"x": 2}, 2.0)
    begin(tmp_path, name="again")
    plan(tmp_path, "new", {"x": 3})
    plan(tmp_path, "kept", {"x": 2}, overrides=["now"])
    sweep = read_sweep(tmp_path)
    assert sweep.name == "again" and [(j.name, j.status, j.value) for j in sweep.jobs] == [
        ("new", "planned", None),
        ("kept", "finished", 2.0),
    ]
    assert sweep.jobs[1].overrides == ["now"]


def test_a_torn_last_event_is_left_out(tmp_path):
    begin(tmp_path)
    job(tmp_path, "a", {}, 1.0)
    path = tmp_path / "jobs.jsonl"
    path.write_text(path.read_text() + '{"event": "planned", "jo')
    assert [j.name for j in read_sweep(tmp_path).jobs] == ["a"]


def test_seconds_are_summed_over_the_starts_of_a_job(tmp_path):
    begin(tmp_path)
    plan(tmp_path, "a", {})
    for first, last in ((0, 10), (100, 130)):
        start(tmp_path, "a", after=first)
        end(tmp_path, "a", "interrupted", after=last)
    assert read_sweep(tmp_path).jobs[0].seconds == 40.0
    start(tmp_path, "a", after=200)
    assert read_sweep(tmp_path).jobs[0].seconds == 40.0
    (tmp_path / "a" / "status.json").write_text('{"status": "running", "step": 7, "time": "2026-01-01T00:03:25+0000"}')
    (a,) = read_sweep(tmp_path).jobs
    assert (a.seconds, a.steps) == (45.0, 7)


def test_results_csv_has_a_row_per_job(tmp_path):
    begin(tmp_path, "synthetic/loss")
    job(tmp_path, "a", {"model.x": 0.1, "mix": "one, two"}, 0.1 + 0.2, 4, "synthetic/loss")
    job(tmp_path, "b", {"model.x": 3, "mix": None}, 9.0, metric="synthetic/loss", status="failed", reason='a "b", c')
    plan(tmp_path, "c", {"model.x": 4})
    write_csv(read_sweep(tmp_path))
    with open(tmp_path / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ["job", "model.x", "mix", "seed", "status", "synthetic/loss", "steps", "seconds", "reason"]
    assert [list(row) for row in rows] == [columns] * 3
    assert [list(row.values()) for row in rows] == [
        ["a", "0.1", "one, two", "4", "finished", "0.30000000000000004", "100", "60.0", ""],
        ["b", "3", "", "0", "failed", "9.0", "100", "60.0", 'a "b", c'],
        ["c", "4", "", "0", "planned", "", "0", "", ""],
    ]


# ---- ranking


@pytest.mark.parametrize("metric, order", [("loss", [1.0, 2.0, 3.0]), ("real/roc_auc", [3.0, 2.0, 1.0])])
def test_losses_rank_upwards_and_scores_downwards(metric, order, tmp_path):
    begin(tmp_path, metric)
    for x in (2.0, 3.0, 1.0):
        add(tmp_path, x, metric=metric, x=x)
    assert means(tmp_path) == order
    assert best_job(read_sweep(tmp_path)).params == {"x": order[0]}


def test_seeds_of_equal_parameters_are_grouped(tmp_path):
    begin(tmp_path)
    job(tmp_path, "a", {"x": 1, "y": "m"}, 1.0, seed=0)
    job(tmp_path, "b", {"x": 2, "y": "m"}, 5.0, seed=0)
    job(tmp_path, "c", {"y": "m", "x": 1.0}, 2.0, seed=1)
    job(tmp_path, "d", {"x": 1, "y": "m"}, 3.0, seed=2)
    first, second = rank(read_sweep(tmp_path))
    assert [j.name for j in first.jobs] == ["a", "c", "d"] and first.mean == 2.0
    assert [j.name for j in second.jobs] == ["b"] and second.interval is None
    quantile = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # of t with two degrees of freedom
    half = quantile / math.sqrt(3)  # the values 1, 2, 3 have deviation 1
    assert first.interval == pytest.approx((2 - half, 2 + half), rel=1e-9)


def test_the_interval_of_two_values():
    half = math.tan(0.475 * math.pi) / 2  # with one degree of freedom t is Cauchy's, and the deviation is 1 / sqrt(2)
    assert interval([3.0, 4.0]) == pytest.approx((3.5 - half, 3.5 + half), rel=1e-9)
    assert interval([3.0, 3.0, 3.0]) == (3.0, 3.0) and interval([3.0]) is None and interval([]) is None


def test_a_search_that_tries_a_point_twice_has_one_value_of_its_seed(tmp_path):
    begin(tmp_path)
    job(tmp_path, "a", {"x": 1}, 1.0)
    job(tmp_path, "b", {"x": 1}, 1.0)
    (point,) = rank(read_sweep(tmp_path))
    assert point.values == [1.0] and point.interval is None


def test_diverged_and_failed_seeds_rank_after_whole_points(tmp_path):
    begin(tmp_path)
    add(tmp_path, math.nan, x="all diverged")
    add(tmp_path, 0.1, math.inf, x="one diverged")
    add(tmp_path, 0.2, x="one failed")
    job(tmp_path, "f", {"x": "one failed"}, 0.2, seed=1, status="failed")
    add(tmp_path, 9.0, x="poor")
    job(tmp_path, "g", {"x": "none"}, 0.0, status="failed")
    plan(tmp_path, "h", {"x": "planned"})
    ranked = [point.params["x"] for point in rank(read_sweep(tmp_path))]
    assert ranked == ["poor", "one diverged", "one failed", "all diverged", "planned", "none"]
    assert best_job(read_sweep(tmp_path)).params == {"x": "poor"}


def test_the_best_run_is_the_best_seed_of_the_best_point(tmp_path):
    begin(tmp_path)
    add(tmp_path, 1.0, 9.0, x="lucky")
    add(tmp_path, 3.0, 2.0, x="good")
    best = best_job(read_sweep(tmp_path))
    assert (best.params, best.seed) == ({"x": "good"}, 1)


def test_without_a_result_there_is_no_best_run(tmp_path):
    begin(tmp_path)
    assert best_job(read_sweep(tmp_path)) is None and means(tmp_path) == []
    add(tmp_path, math.nan, x=1)
    assert best_job(read_sweep(tmp_path)) is None


# ---- the table


def rows_of(text: str, first: str) -> list[list[str]]:
    """The cells of the table whose head starts with a word: cells are separated by two spaces."""
    lines = next(part for part in text.split("\n\n") if part.startswith(first)).splitlines()
    starts = [i for i, c in enumerate(lines[0]) if c != " " and (i == 0 or lines[0][i - 2 : i] == "  ")]
    return [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines]


def test_the_table(tmp_path):
    begin(tmp_path, "real/roc_auc", name="mine")
    metric = "real/roc_auc"
    add(tmp_path, 0.5, 0.7, metric=metric, **{"model.embed_dim": 64, "optimizer": "muon"})
    add(tmp_path, 0.9, metric=metric, **{"model.embed_dim": 128, "optimizer": "adamw"})
    for name, status, reason in (("a", "pruned", "low"), ("b", "failed", "why")):
        job(tmp_path, name, {"model.embed_dim": 8, "optimizer": name}, 0.4, 0, metric, status=status, reason=reason)
    plan(tmp_path, "c", {"model.embed_dim": 7, "optimizer": "muon"})
    text = table(read_sweep(tmp_path))
    assert text.startswith("mine: 6 jobs: 3 finished, 1 planned, 1 pruned, 1 failed. Metric: real/roc_auc")
    half = math.tan(0.475 * math.pi) / 10
    assert rows_of(text, "rank") == [
        ["rank", "embed_dim", "optimizer", "real/roc_auc", "95% interval", "seeds", "steps", "status"],
        ["1", "128", "adamw", "0.9000", "-", "1", "100", "finished"],
        ["2", "64", "muon", "0.6000", f"[{0.6 - half:.4f}, {0.6 + half:.4f}]", "2", "100", "2 finished"],
    ]
    assert rows_of(text, "job") == [
        ["job", "status", "real/roc_auc so far", "steps", "reason"],
        ["a", "pruned", "0.4000", "100", "low"],
        ["b", "failed", "0.4000", "100", "why"],
    ]
    assert f"run_dir={tmp_path}/128-adamw-0" in text and "tabicl-export" in text


def test_equal_points_share_a_rank(tmp_path):
    begin(tmp_path)
    for x, value in enumerate([2.0, 1.0, 1.0, 3.0]):
        add(tmp_path, value, x=x)
    _, *rows = rows_of(table(read_sweep(tmp_path)), "rank")
    assert [(row[0], row[1]) for row in rows] == [("1", "1"), ("1", "2"), ("3", "0"), ("4", "3")]


def test_a_single_job_and_none_at_all(tmp_path):
    begin(tmp_path)
    assert table(read_sweep(tmp_path)).startswith("invented: 0 jobs: none planned yet.")
    add(tmp_path, 1.5)
    text = table(read_sweep(tmp_path))
    assert rows_of(text, "rank") == [
        ["rank", "loss", "seeds", "steps", "status"],
        ["1", "1.5000", "1", "100", "finished"],
    ]
    assert "no interval" in text


def test_a_job_that_finished_without_a_value_is_shown(tmp_path):
    begin(tmp_path, "real/roc_auc")
    job(tmp_path, "a", {}, 1.0)  # there is a training loss, but no validation
    assert rows_of(table(read_sweep(tmp_path)), "job")[1] == ["a", "finished", "-", "100", ""]


def test_short_names_are_unique_ends():
    keys = ["curriculum.stages.a.lr", "curriculum.stages.b.lr", "optimizer", "optimizer.momentum", "model.optimizer"]
    assert list(short_names(keys).values()) == ["a.lr", "b.lr", "optimizer", "momentum", "model.optimizer"]


# ---- commands


@pytest.mark.parametrize("folder", ["plain", "lr=0.1,width=2", 'it\'s (1) & "two"', "2026_10"])
def test_the_command_of_the_best_run_composes_to_its_configuration(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [*SETTINGS, "optimizer=adamw", "curriculum.stages.smoke.rows=[40,60]", "seed=3", "name='a, b'"]
    begin(tmp_path / folder)
    plan(tmp_path / folder, "lr=1e-3", {"lr": 1e-3}, overrides=overrides)
    start(tmp_path / folder, "lr=1e-3")
    write_run(tmp_path / folder / "lr=1e-3", {10: 1.0})
    end(tmp_path / folder, "lr=1e-3")
    train, export = map(shlex.split, command_lines(best_job(read_sweep(Path(folder)))))
    assert train[0] == "tabicl-train" and export[0] == "tabicl-export"
    config, expected = compose(train[1:]), compose(overrides)
    expected.run_dir = f"{folder}/lr=1e-3"
    assert config == expected
    options = parse(ExportOptions, export[1:])
    assert options.checkpoint == expected.run_dir and os.path.dirname(options.output) == expected.run_dir
    assert check_output(options.output, options.format, None) == "hub"  # the format that takes every network


NASTY = ["a", "1e5", "", " a ", "a,b", "[1]", "{a}", "'", '"', "\\", '\\"', 'a\\\\"b\\', "a=b", "x y", "#(a)", "%~"]


@pytest.mark.parametrize("text", NASTY)
def test_hydra_reads_back_the_text(text):
    text = f"runs/{text}"
    assert OverridesParser.create().parse_override(f"run_dir={hydra_text(text)}").value() == text
