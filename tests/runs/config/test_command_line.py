import dataclasses
import errno
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from command_line import command, exit_code
from configurations import list_experiments, problems

import tabicl_train
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError, is_installed, require_matplotlib

HELP_MISTAKE_AND_RUN = """
import contextlib, io, os, sys
from tabicl_train import cli as commands

arguments = sys.argv[1:]
sys.argv = ["tabicl-train", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as help_text:
    commands.train()
assert "experiment" in help_text.getvalue()
assert not {"torch", "numba", "pandas", "lightning"} & set(sys.modules)

sys.argv = ["tabicl-train", "experiment=smoke", "model.embed_dm=64"]
try:
    commands.train()
except SystemExit as error:
    assert error.code == 2
assert "lightning" not in sys.modules
assert not os.listdir()

from tabicl_train.stream.steps import StepStream

def draw(self, step, *arguments, draw=StepStream.draw):
    before = set(sys.modules)
    item = draw(self, step, *arguments)
    assert not [name for name in set(sys.modules) - before if name.startswith("priors.")]
    return item

StepStream.draw = draw
sys.argv = ["tabicl-train", *arguments]
commands.train()
assert not {"lightning", "torch._dynamo", "torch._inductor", "scipy.stats", "pandas"} & set(sys.modules)
"""


def test_commands_import_what_they_need_and_workers_share_the_loops_of_a_prior(tmp_path):
    """The help no torch; a wrong configuration, which leaves no trace, no Lightning; and a run no compiler.

    Lightning and torch's compiler take 8 CPU seconds, the loops 2, and 30 where they are not compiled yet.
    """
    settings = ["experiment=smoke", "prior=demo", "prior.components.graph_scm.weight=1", "stream.num_workers=1"]
    settings += ["prior.components.tree_scm.weight=1", "trainer.accelerator=cpu", "validation.every=0"]
    command = [sys.executable, "-c", HELP_MISTAKE_AND_RUN, *settings, "trainer.max_steps=2", "run_dir=run"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[0] == "error: model.embed_dm: no such setting; did you mean model.embed_dim?"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run_dir=file", "run_dir is 'file'; file is a file"),
        ("run_dir=file/run", "run_dir is 'file/run'; file is a file"),
        ("run_dir=closed/run", "run_dir is 'closed/run'; closed is not writable"),
        (f"run_dir={'x' * 300}", "cannot be created (File name too long)"),
        (f"init_weights={'x' * 300}", "xxx': File name too long"),
        ("trainer.accelerator=cuda", "trainer.accelerator is 'cuda'; torch finds no GPU on this machine"),
    ],
)
def test_what_keeps_a_run_from_starting_here_is_reported_in_one_line(override, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("closed").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and access(path, mode))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exit_code(monkeypatch, "train", "experiment=smoke", override) == 2
    error = capfd.readouterr().err
    assert words in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"file", "closed"}


def test_questions_about_the_command(monkeypatch, capfd):
    for name in ("train", "sweep"):
        assert exit_code(monkeypatch, name, "--version") == 0
        first, *rest = capfd.readouterr().out.splitlines()
        assert first == f"tabicl-train {tabicl_train.__version__}"
        assert {line.split()[0] for line in rest} >= {"python", "torch", "lightning", "commit", "device"}
        assert exit_code(monkeypatch, name, "-x") == 2
        assert "unrecognized arguments: -x" in capfd.readouterr().err
    assert exit_code(monkeypatch, "train", "experiment=smok", "--cfg", "job") == 2
    assert capfd.readouterr().err.startswith("error: experiment=smok: there is no such choice")
    assert exit_code(monkeypatch, "train", "--cfg", "job", "experiment=smoke", "seed=7") == 0
    printed = capfd.readouterr()
    assert yaml.safe_load(printed.out) == dataclasses.asdict(compose(["experiment=smoke", "seed=7"]))
    assert "FLOPs" in printed.err


def test_a_missing_extra_is_reported_with_a_way_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,) = problems("experiment=smoke", "wandb.mode=offline")
    assert found.endswith("pip install wandb, or pip install -e '.[wandb]' in the project's folder")
    with pytest.raises(ConfigError, match="pip install matplotlib, or"):
        require_matplotlib()


def test_a_folder_of_the_name_of_a_package_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "some_name").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("some_name")
    assert not is_installed("some_name")
    assert is_installed("torch")


def test_help_is_short_and_names_every_group_and_the_reference(monkeypatch, capfd, own_configs):
    assert exit_code(monkeypatch, "train", "--help", "--config-dir", str(own_configs)) == 0
    text = capfd.readouterr().out
    assert len(text.splitlines()) < 75
    assert "usage: tabicl-train experiment=NAME run_dir=DIR" in text
    assert list_experiments("own") in " ".join(text.split())
    for group in ("model", "prior", "curriculum", "optimizer", "trainer"):
        assert f"\n  {group} " in text
    assert "Steps between checkpoints. (default: 500)" in text
    assert text.splitlines()[-1] == "All settings: python -m tabicl_train.config.documentation"


@pytest.mark.parametrize("name", ["export", "replay", "evaluate", "predict", "report", "runs", "prior"])
def test_commands_explain_their_options(name, monkeypatch, capfd):
    assert exit_code(monkeypatch, name, "--help") == 0
    text = capfd.readouterr().out
    assert text.startswith(f"usage: tabicl-{name} ") and "\n  " in text


def test_wrong_arguments_end_with_all_problems_and_the_usage():
    result = command("replay", "runs", "stp=3", "step=x")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: 'runs' is not of the form KEY=VALUE",
        "error: stp: no such setting; did you mean step?",
        "error: step is 'x'; it must be of type int",
        "error: run_dir is missing",
        "usage: tabicl-replay run_dir=RUN_DIR step=N",
    ]


@pytest.mark.parametrize("name", ["train", "export"])
def test_options_with_dashes_are_told_the_form_of_settings(name):
    result = command(name, "seed=1", "--run-dir", "runs/x", "--seed=3", "--tensorboard", "--info", "model=tiny")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: --run-dir: settings have no dashes; write run_dir=runs/x",
        "error: --seed: settings have no dashes; write seed=3",
        "error: --tensorboard: settings have no dashes; write tensorboard=VALUE",
        "error: --info: settings have no dashes; write info=VALUE",
    ]


@pytest.mark.parametrize("value", ["2024_10", "007", "1e3", "2024-10-05", "on"])
def test_a_folder_may_look_like_a_number(value, monkeypatch, capfd):
    assert exit_code(monkeypatch, "export", f"checkpoint={value}", "output=x.ckpt") == 2
    assert f"checkpoint is '{value}'; there is no such file" in capfd.readouterr().err
    assert compose(["experiment=smoke", f"run_dir={value}"]).run_dir == value


@pytest.mark.parametrize("value", ["nowhere", "[]", "[nowhere,file]"])
def test_a_report_of_no_run_leaves_nothing(value, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "report", f"run_dir={value}") == 2
    assert capfd.readouterr().err.startswith("error: run_dir is ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("buffering", [1, 100_000], ids=["while it prints", "at its end"])
def test_a_command_whose_output_is_no_longer_read_ends_quietly(buffering, monkeypatch, capfd):
    for name in ("train", "evaluate", "prior"):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w", buffering) as output:
            monkeypatch.setattr(sys, "stdout", output)
            assert exit_code(monkeypatch, name, "--help") == 128 + signal.SIGPIPE
    assert capfd.readouterr().err == ""


def test_a_full_disk_ends_a_command_with_the_file_in_one_line(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write raises it, without the file
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=full))
    result = command("lab", "fading", f"folder={tmp_path}/lab")
    assert result.returncode == 1
    line = f"error: [Errno 28] No space left on device: '{tmp_path}/lab/experiment.json'"
    assert result.stderr.splitlines() == [line]
    assert not list((tmp_path / "lab").iterdir())


def test_ctrl_c_ends_a_command_without_a_stack_trace(monkeypatch, capfd):
    monkeypatch.setattr("tabicl_train.evaluation.evaluate.evaluate", mock.Mock(side_effect=KeyboardInterrupt))
    assert exit_code(monkeypatch, "evaluate", "checkpoint=mini") == 128 + signal.SIGINT
    assert "Traceback" not in capfd.readouterr().err


def test_a_value_that_must_be_a_list_is_told_so():
    assert sorted(problems("experiment=smoke", "validation.rows=5", "optimizer.betas={a: 1}", "seed=[1]")) == [
        "optimizer.betas: it must be a list, such as [1,2]",
        "seed is [1]; it must be of type int",
        "validation.rows: it must be a list, such as [1,2]",
    ]
    (problem,) = problems("experiment=smoke", "model=[1]")
    assert problem.startswith("model=[1]: there is no such choice; there are ")


def test_half_a_million_steps_do_not_start_by_accident(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = command("train")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "experiment=demo" in result.stderr and "run_dir=" in result.stderr
    assert list(tmp_path.iterdir()) == []
