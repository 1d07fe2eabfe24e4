"""Runs on real tables: the same draws for any workers and ranks, bit-exact resume, and files that change."""

import re
import shutil
import signal

import pytest
from faults import train_with_faults
from forked import run_ranks
from table_files import build_frame, write_table_files
from test_resume import STEPS, tables
from training_runs import last_checkpoint, train_short_run

from priors.real import real_tables
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.errors import ConfigError
from tabicl_train.training.callbacks.validation import validation_streams
from tabicl_train.weights.export import export
from tabicl_train.weights.reader import read_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_table_files(tmp_path_factory.mktemp("own") / "tables", 6)


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
    build_frame(0, 70).to_csv(tmp_path / "short.csv", index=False)
    train_with_faults(f"run_dir={tmp_path}/weights", "trainer.max_steps=1", "stream.num_workers=0")
    table = ["prior=one_table", f"prior.file={tmp_path}/short.csv", f"init_weights={tmp_path}/weights"]
    return [*table, "stream.num_workers=0"]


def test_the_tables_are_the_same_for_workers_ranks_and_continued_runs(settings, tmp_path):
    whole, other = tmp_path / "whole", tmp_path / "other"
    assert train_with_faults(*settings, f"run_dir={whole}") == "finished"
    continued = [*settings, f"run_dir={other}", "stream.num_workers=2"]
    assert train_with_faults(*continued, f"signal=0,5,{signal.SIGTERM:d}") == "preempted"
    assert run_ranks(train_with_faults, *continued, folder=tmp_path) == [0, 0], (tmp_path / "stderr.0").read_text()
    assert tables(other) == tables(whole) and len(tables(whole)) == STEPS * 8


def test_checkpoints_know_the_sizes_that_real_tables_can_have(tmp_path):
    folder = write_table_files(tmp_path / "tables", 1)
    settings = ["prior=tables", f"prior.folder={folder}", "curriculum.stages.smoke.features=[2,60]"]
    settings += ["prior.validation_fraction=0", "prior.test_fraction=0"]
    train_short_run(tmp_path / "run", *settings, "trainer.max_steps=1")
    shutil.rmtree(folder)  # which an export does not need
    trained = read_weights(tmp_path / "run").trained_range
    assert trained.features == (2, 7)
    export(str(tmp_path / "run"), str(tmp_path / "hub"))
    assert read_weights(tmp_path / "hub").trained_range == trained


def test_a_run_is_continued_on_the_same_tables_only(settings, folder, tmp_path):
    mine = shutil.copytree(folder, tmp_path / "mine")
    run = [*settings, f"prior.folder={mine}", f"run_dir={tmp_path}/run", "trainer.max_steps=2"]
    train_with_faults(*run)
    assert len(last_checkpoint(tmp_path / "run")["run"]["real_tables"]) == 16
    (mine / "broken.csv").write_text("a,b\n1\n")
    assert train_with_faults(*run) == "finished"
    build_frame(9, 100).to_csv(mine / "another.csv", index=False)
    message = (
        "is another run: the hash of the tables in files was .*; choose a new run_dir, or set resume.allow_changes"
    )
    with pytest.raises(ConfigError, match=message):
        train_with_faults(*run, "trainer.max_steps=3")
    assert train_with_faults(*run, "trainer.max_steps=3", "resume.allow_changes=true") == "finished"


def test_a_run_is_continued_on_the_same_file_only(short, tmp_path):
    run = [*short, f"run_dir={tmp_path}/run", "trainer.max_steps=2"]
    train_with_faults(*run)
    copy = shutil.copy(tmp_path / "short.csv", tmp_path / "copy.csv")
    with pytest.raises(ConfigError, match=r"is another run: prior.file was .*short.csv, is .*copy.csv"):
        train_with_faults(*run, f"prior.file={copy}")
    build_frame(1, 70).to_csv(tmp_path / "short.csv", index=False)
    with pytest.raises(ConfigError, match="is another run: the hash of the tables in files was"):
        train_with_faults(*run, "trainer.max_steps=3")


def test_validation_leaves_out_lengths_that_no_table_has(settings, capsys):
    validated = ["validation.every=5", "validation.rows=[60,500]", "validation.best=own"]
    config = compose(["experiment=smoke", *settings, *validated])
    streams = validation_streams(
        config.validation, config.curriculum.priors_by_kind(configured_prior(config.prior)), config.model
    )
    assert [stage.rows for stage in streams["own"].curriculum.stages.values()] == [[60, 60]]
    warning = "warning   validation.rows: 500 left out: no own validation table is that long\n"
    assert capsys.readouterr().err == warning


def test_advice_about_the_tables_of_a_mixture_names_keys_that_can_be_set(folder):
    settings = [
        "experiment=own_tables",
        f"prior.components.tables.folder={folder}",
        "curriculum.stages.own.rows=[60,150]",
    ]
    none = ["prior.components.tables.validation_fraction=0", "prior.components.tables.test_fraction=0"]
    with pytest.raises(ConfigError) as caught:
        compose([*settings, *none])
    (key,) = re.findall(r"raise (\S+),", str(caught.value))
    config = compose([*settings, *none, f"{key}=0.3", "validation.rows=[60]"])
    (line,) = [line for line in real_tables(configured_prior(config.prior)).describe() if "final test" in line]
    (key,) = re.findall(r"raise (\S+),", line)
    assert compose([*settings, f"{key}=0.3", "validation.rows=[60]"])
