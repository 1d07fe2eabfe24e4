"""Runs on real tables: the same draws for any workers and ranks, bit-exact resume, and files that change."""

import shutil
import signal

import own_tables
import pytest
from command_line import command
from forked import run_ranks
from interrupted import train, train_rank
from runs import assert_same_end, last, metrics
from test_resume import STEPS, tables

from priors import PriorError
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError

pytestmark = pytest.mark.multi_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return own_tables.write(tmp_path_factory.mktemp("own") / "tables", 6)


@pytest.fixture
def settings(folder):
    return [
        "prior=tables",
        f"prior.folder={folder}",
        "prior.validation_fraction=0.15",
        "prior.test_fraction=0.15",
        "stream.num_workers=0",
    ]


@pytest.fixture
def short(tmp_path):
    """Settings of runs on one table, with fewer rows than some draws ask for."""
    own_tables.frame(0, 70).to_csv(tmp_path / "short.csv", index=False)
    return ["prior=one_table", f"prior.file={tmp_path}/short.csv", "stream.num_workers=0"]


@pytest.mark.parametrize("prior", ["settings", "short"])
def test_the_tables_are_the_same_for_workers_ranks_and_continued_runs(prior, request, tmp_path):
    settings = request.getfixturevalue(prior)
    assert train(tmp_path, [*settings, f"run_dir={tmp_path}/whole"]) == "finished"
    other = [*settings, f"run_dir={tmp_path}/other", "stream.num_workers=2"]
    assert train(tmp_path, [*other, f"signal={signal.SIGTERM:d}"]) == "preempted"
    assert train(tmp_path, other) == "finished"
    assert_same_end(tmp_path / "other", tmp_path / "whole")
    codes = run_ranks(train_rank, tmp_path, *settings, f"run_dir={tmp_path}/two", folder=tmp_path)
    assert codes == [0, 0], (tmp_path / "stderr.0").read_text()
    expected = tables(tmp_path, "whole")
    assert len(expected) == STEPS * 8
    assert tables(tmp_path, "other") == tables(tmp_path, "two") == expected
    seen = (tmp_path / "whole/tables_seen.csv").read_text()
    name = settings[0].removeprefix("prior=")
    assert seen.splitlines()[1].startswith(f"{name},,{STEPS * 8},")
    assert [(tmp_path / name / "tables_seen.csv").read_text() for name in ("other", "two")] == [seen, seen]


def test_a_run_is_continued_on_the_same_tables_only(settings, folder, tmp_path):
    mine = shutil.copytree(folder, tmp_path / "mine")
    run = [*settings, f"prior.folder={mine}", f"run_dir={tmp_path}/run", "trainer.max_steps=2"]
    train(tmp_path, run)
    assert len(last(tmp_path / "run")["run"]["real_tables"]) == 16
    (mine / "broken.csv").write_text("a,b\n1\n")
    assert train(tmp_path, run) == "finished"
    own_tables.frame(9, 100).to_csv(mine / "another.csv", index=False)
    message = "is another run: the hash of the real tables was .*; choose a new run_dir, or set resume.allow_changes"
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, [*run, "trainer.max_steps=3"])
    assert train(tmp_path, [*run, "trainer.max_steps=3", "resume.allow_changes=true"]) == "finished"


def test_a_run_is_continued_on_the_same_file_only(short, tmp_path):
    run = [*short, f"run_dir={tmp_path}/run", "trainer.max_steps=2"]
    train(tmp_path, run)
    copy = shutil.copy(tmp_path / "short.csv", tmp_path / "copy.csv")
    with pytest.raises(ConfigError, match=r"is another run: prior.file was .*short.csv, is .*copy.csv"):
        train(tmp_path, [*run, f"prior.file={copy}"])
    own_tables.frame(1, 70).to_csv(tmp_path / "short.csv", index=False)
    with pytest.raises(ConfigError, match="is another run: the hash of the real tables was"):
        train(tmp_path, [*run, "trainer.max_steps=3"])


def test_fine_tuning_needs_weights_and_scores_held_out_rows(short, tmp_path):
    train(tmp_path, [f"run_dir={tmp_path}/start", "trainer.max_steps=1"])
    words = ["experiment=fine_tune", "model=tiny", *short, f"run_dir={tmp_path}/run", "trainer.max_steps=20"]
    result = command("train", *words)
    assert result.returncode == 2 and "error: init_weights is not set; prior=one_table fine-tunes" in result.stderr
    result = command("train", *words, f"init_weights={tmp_path}/start")
    assert result.returncode == 0, result.stderr
    assert "short.csv: 70 rows, 7 features, target 'label' (a column called" in result.stderr
    steps = [line.split(",")[0] for line in (tmp_path / "run/validation.csv").read_text().splitlines()[1:]]
    assert steps == ["0", "10", "20"]
    assert command("train", *words).returncode == 0  # a run that goes on has weights of its own
    exported = command("export", f"checkpoint={tmp_path}/run", f"output={tmp_path}/best.ckpt", "weights=best")
    assert exported.returncode == 0, exported.stderr


def test_a_command_trains_validates_on_held_out_tables_and_tells(settings, folder, tmp_path):
    words = [*settings, "experiment=smoke", "trainer.max_steps=2", "stream.num_workers=1"]
    validation = ["validation.every=2", "validation.rows=[60]", "validation.tables=2", "validation.real_rows=0"]
    result = command("train", *words, *validation, "validation.best=own", f"run_dir={tmp_path}/run")
    assert result.returncode == 0, result.stderr
    assert f"          {folder}: 6 tables with 1,650 rows, from 6 files\n" in result.stderr
    assert "held out, drawn in validation: table" in result.stderr
    assert "6 not in tasks.csv, so their target is a column called target, class, label or y, else " in result.stderr
    assert "tables have 40 rows, and " in result.stderr
    assert len(metrics(tmp_path / "run")) == 2 and (tmp_path / "run/validation.csv").read_text().count("\n") == 2
    described = command("prior", "describe", *settings, "experiment=smoke", "tables=2").stdout
    assert f"{folder}: 6 tables with" in described and "labeled share" in described


@pytest.fixture
def files_change_after_a_step(tmp_path, monkeypatch):
    """Those in the folder of a test."""
    from tabicl_train.callbacks.metrics import Metrics

    end = Metrics.on_train_batch_end

    def change_files(*arguments, **keywords):
        for path in tmp_path.rglob("*.csv"):
            path.write_text(path.read_text().replace("red", "redder"))
        return end(*arguments, **keywords)

    monkeypatch.setattr(Metrics, "on_train_batch_end", change_files)


@pytest.mark.usefixtures("files_change_after_a_step")
def test_a_file_that_changes_stops_the_run(settings, short, folder, tmp_path):
    mine = shutil.copytree(folder, tmp_path / "mine")
    result = command("train", "experiment=smoke", *settings, f"prior.folder={mine}", f"run_dir={tmp_path}/run")
    assert result.returncode == 1
    assert "mine/table" in result.stderr and ".csv has changed since it was indexed" in result.stderr
    with pytest.raises(PriorError, match=r"short\.csv has changed since it was indexed"):
        train(tmp_path, [*short, f"run_dir={tmp_path}/other"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["curriculum.stages.smoke.rows=[40,500]"],
            r"curriculum.stages.smoke.rows has tables of 500 rows; none of the \d real tables for it is that long",
        ),
        (
            ["validation.every=5", "validation.rows=[60,500]"],
            r"validation.rows has tables of 500 rows; none of the \d real tables for it is that long",
        ),
        (["prior.validation_fraction=2"], r"prior tables: validation_fraction is 2(.0)?; it must lie in \[0, 1\)"),
    ],
)
def test_what_the_tables_cannot_serve_is_reported_before_the_run(overrides, message, settings):
    with pytest.raises(ConfigError, match=message):
        compose(["experiment=smoke", *settings, *overrides])
