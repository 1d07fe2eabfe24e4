import dataclasses
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from command_line import exit_code
from omegaconf import OmegaConf
from runs import metrics

from tabicl_train.config.compose import CONFIG_DIR, compose, compose_sweep
from tabicl_train.config.schema import StageConfig
from tabicl_train.errors import ConfigError, require_matplotlib
from tabicl_train.module import Pretraining
from tabicl_train.prediction.export import export
from tabicl_train.processes.join import one_process
from tabicl_train.processes.signals import watch_signals
from tabicl_train.run_dir.provenance import describe_origin
from tabicl_train.train import build_module

GROUPS = sorted(d.name for d in CONFIG_DIR.iterdir() if d.is_dir())
CHOICES = [(g, f.stem) for g in GROUPS for f in sorted((CONFIG_DIR / g).glob("*.yaml"))]
CHOICES.remove(("prior", "disk"))  # does not compose without a folder of tables: tests/priors/test_store.py has one


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(list(overrides))
    return caught.value.problems


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_yaml_composes(group, choice):
    config = compose([f"{group}={choice}"])
    values = OmegaConf.load(CONFIG_DIR / group / f"{choice}.yaml")
    if group != "experiment":
        part = config.prior if group == "prior" else dataclasses.asdict(getattr(config, group))
        values.pop("defaults", None)
        assert values.items() <= part.items() or group == "curriculum"
    assert config.total_steps > 0


def test_overrides_reach_the_configuration():
    config = compose(
        [
            "experiment=smoke",
            "seed=7",
            "run_dir=elsewhere/x",
            "trainer.max_steps=3",
            "trainer.precision=bf16",
            "model.embed_dim=32",
            "model.max_classes=5",
            "stream.num_workers=2",
            "checkpoint.every=9",
            "curriculum.stages.smoke.learning_rate=0.5",
        ]
    )
    assert (config.seed, config.run_dir, config.total_steps, config.trainer.precision) == (7, "elsewhere/x", 3, "bf16")
    assert (config.model.embed_dim, config.model.max_classes) == (32, 5)
    assert (config.stream.num_workers, config.checkpoint.every) == (2, 9)
    assert config.curriculum.stages["smoke"].learning_rate == 0.5


def test_all_problems_are_told_together_with_the_nearest_name():
    found = problems(
        "experiment=smoke",
        "model.embed_dm=64",
        "trainer.max_steps=abc",
        "curriculum.stages.smoke.warmpu=0.1",
        "optimizer=sgd",
        "loose words",
        "model.max_classes=11",
    )
    text = "\n".join(found)
    assert len(found) == 6 and "model.max_classes is 11" in text
    assert "model.embed_dm: no such setting; did you mean model.embed_dim?" in text
    assert "trainer.max_steps" in text and "'abc'" in text
    assert "did you mean curriculum.stages.smoke.warmup?" in text
    assert "optimizer=sgd: there is no such choice; there are adamw, muon" in text
    assert "'loose words' is not of the form key=value" in text


def test_contradictions_are_told_together():
    found = problems(
        "experiment=smoke",
        "model.embed_dim=36",
        "model.col_num_heads=8",
        "model.max_classes=11",
        "curriculum.stages.smoke.train_share=[0,1]",
        "curriculum.stages.smoke.rows=[90,40]",
        "trainer.precision=bf17",
        "trainer.devices=9",
        "checkpoint.every=0",
        "init_weights=nowhere.ckpt",
    )
    text = "\n".join(found)
    for words in (
        "embed_dim (36) is not divisible by col_num_heads (8)",
        "model.max_classes is 11",
        "train_share is [0.0, 1.0]",
        "rows is [90, 40]",
        "trainer.precision is 'bf17'; it must be one of auto, fp32, bf16, fp16",
        "fewer than the 9 processes",
        "checkpoint.every is 0",
        "there is no such file",
    ):
        assert words in text, text
    assert all(line.startswith(("model.", "curriculum.", "trainer.", "checkpoint.", "init_weights")) for line in found)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+model.embed=3", "model.embed: no such setting; did you mean model.embed_dim?"),
        ("+colour=3", "colour: no such setting"),
        ("+curriculum.stages.smoke.row=3", "did you mean curriculum.stages.smoke.rows?"),
        ("+prior.num_layer=3", "num_layer"),
        ("model=null", "model"),
        ("prior=nope", "there is no such choice"),
        ("curriculum.stages=null", "curriculum.stages"),
        ("seed=-1", "seed is -1"),
        ("run_dir=", "run_dir is empty"),
        ("trainer.timeout=1e20", "trainer.timeout is 1e+20; it must be at most 1e9"),
        ("max_steps=3", "max_steps: no such setting; did you mean trainer.max_steps?"),
        ("tabel=2", "did you mean curriculum.stages.smoke.tables or validation.tables?"),
        ("modle.embed_dim=3", "modle: no such setting; did you mean model.embed_dim?"),
        ("colour=3", "colour: no such setting; there are name, seed, run_dir"),
        ("curriculum.stages.long.steps=3", "there are smoke (+curriculum.stages.long.KEY=VALUE adds a stage)"),
        ("+curriculum.stages.long.step=3", "long.step: no such setting; did you mean curriculum.stages.long.steps"),
        ("+curriculum.stages.long.steps=x", "curriculum.stages.long.steps: Value 'x'"),
        ("+curriculum.stages.long={step: 3}", "curriculum.stages.long"),
    ],
)
def test_single_problems(override, words):
    assert words in "\n".join(problems("experiment=smoke", override))


MODULE, SCRIPT = ["-m", "tabicl_train"], ["-c", "from tabicl_train.commands import train; train()"]


@pytest.mark.parametrize("command", [MODULE, SCRIPT])
def test_a_wrong_command_line_ends_with_2_and_no_trace(command, tmp_path):
    told = subprocess.run(
        [sys.executable, *command, "experiment=smoke", "model.embed_dm=64", f"run_dir={tmp_path}/run"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert told.returncode == 2
    assert told.stderr.strip() == "error: model.embed_dm: no such setting; did you mean model.embed_dim?"
    assert not list(tmp_path.iterdir())


def test_configuration_is_checked_without_importing_lightning():
    code = (
        "import sys\nfrom tabicl_train.config.compose import compose\ncompose(['experiment=smoke'])\n"
        "assert 'lightning' not in sys.modules and 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "overrides",
    [
        ["+curriculum.stages.long.steps=7", "+curriculum.stages.long.rows=[50,60]"],
        ["++curriculum.stages.long.steps=7", "curriculum.stages.long.rows=[50,60]"],
        ["+curriculum.stages.long={steps: 7, rows: [50, 60]}"],
    ],
)
def test_a_stage_is_added(overrides):
    stages = compose(["experiment=smoke", *overrides]).curriculum.stages
    assert list(stages) == ["smoke", "long"]
    assert stages["long"] == StageConfig(steps=7, rows=[50, 60])
    assert stages["smoke"] == compose(["experiment=smoke"]).curriculum.stages["smoke"]


def test_numbers_are_finite_but_for_limits():
    wrong = {
        "model.scaling_bound": "inf",
        "curriculum.stages.smoke.learning_rate": "nan",
        "curriculum.stages.smoke.weight_decay": "nan",
        "optimizer.betas": "[nan, 0.9]",
        "trainer.timeout": "inf",
        "guard.loss": "nan",
    }
    found = problems("experiment=smoke", *(f"{key}={value}" for key, value in wrong.items()))
    assert found == [f"{k} is {v}; it must be a finite number" for k, v in wrong.items()]
    config = compose(["experiment=smoke", "guard.multiplier=inf", "curriculum.stages.smoke.clip=inf"])
    assert config.guard.multiplier == config.curriculum.stages["smoke"].clip == float("inf")


@pytest.fixture
def own_configs(tmp_path) -> Path:
    """A folder of configurations of a user's own."""
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/own.yaml").write_text(
        "# @package _global_\ndefaults: [override /model: tiny, override /prior: dummy, override /curriculum: own]\n"
        "stream: {num_workers: 0}\n"
    )
    (tmp_path / "configs/curriculum").mkdir()
    (tmp_path / "configs/curriculum/own.yaml").write_text("stages: {only: {steps: 3, rows: [40, 50], tables: 4}}\n")
    (tmp_path / "configs/short.yaml").write_text("defaults: [train, _self_]\ntrainer: {max_steps: 2}\n")
    (tmp_path / "configs/loose.yaml").write_text("seed: 1\n")
    return tmp_path / "configs"


def test_configurations_of_ones_own_are_searched_too(own_configs):
    option, override = {"config_dir": str(own_configs)}, f"hydra.searchpath=[{own_configs}]"
    for overrides, options in ((["experiment=own"], option), (["experiment=own", override], {})):
        assert list(compose(overrides, **options).curriculum.stages) == ["only"]
        with pytest.raises(ConfigError) as caught:
            compose([*overrides, "model.embed_dm=3", "curriculum.stages.only.steps=4"], **options)
        assert caught.value.problems == ["model.embed_dm: no such setting; did you mean model.embed_dim?"]
        with pytest.raises(ConfigError, match="there are demo, demo_long, own, smoke"):
            compose([*overrides, "experiment=ow"], **options)
    assert compose(["experiment=own"], "short", **option).total_steps == 2
    for arguments, words in (
        (("train", None, "nowhere"), "--config-dir is 'nowhere'; there is no such folder"),
        (("train", "nowhere", None), "--config-path is 'nowhere'; there is no such folder"),
        (("nothing", None, None), "--config-name is 'nothing'; there is no such file"),
        (("loose", None, str(own_configs)), "run_schema"),
    ):
        with pytest.raises(ConfigError, match=words):
            compose([], *arguments)


def test_a_wrong_choice_brings_no_false_problems():
    assert problems(
        "experiment=nope", "curriculum.stages.demo.steps=4", "prior.causal=true", "trainer.devices=99", "model.embed=3"
    ) == [
        "experiment=nope: there is no such choice; there are demo, demo_long, smoke",
        "model.embed: no such setting; did you mean model.embed_dim?",
    ]


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("model.embed_dm=8,16", ["model.embed_dm: no such setting; did you mean model.embed_dim?"]),
        ("trainer.max_steps=range(0,3)", ["trainer.max_steps is 0; it must be at least 1"]),
        (
            "trainer.precision=choice(fp32,bf17)",
            ["trainer.precision is 'bf17'; it must be one of auto, fp32, bf16, fp16"],
        ),
        ("optimizer=muon,sgd", ["optimizer=sgd: there is no such choice; there are adamw, muon, muon_all"]),
        ("seed=interval(-2,3)", ["seed: Value '-2.0' of type 'float' could not be converted to Integer"]),
        ("averages.ema=interval(2,3)", ["averages.ema is 2.0; it must lie in [0, 1)"]),
    ],
)
def test_every_combination_of_a_sweep_is_checked(override, found):
    with pytest.raises(ConfigError) as caught:
        compose_sweep(["experiment=smoke", "name=a,b", override], "train", None, None)
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(found[0])


def test_combinations_of_a_sweep():
    configs = compose_sweep(["experiment=smoke", "seed=1,2", "prior=glob(mix*)"], "train", None, None)
    assert [c.seed for c in configs] == [1, 1, 2, 2]


def test_a_sweep_over_a_new_stage_of_own_configurations(own_configs, tmp_path, monkeypatch):
    with watch_signals() as stop:
        stop.started -= 7200  # the jobs before took two hours: max_hours is the time of a job
        assert not exit_code(
            monkeypatch, "train", "-m", "--config-dir", str(own_configs), "experiment=own", f"run_dir={tmp_path}/sweep",
            "+curriculum.stages.long.steps=5,6", "trainer.max_hours=1", "trainer.max_steps=1",
        )  # fmt: skip
    for job, steps in ("0", 5), ("1", 6):
        run_dir = tmp_path / "sweep" / job
        config = yaml.safe_load((run_dir / "config.yaml").read_text())
        assert config["curriculum"]["stages"]["long"] == dataclasses.asdict(StageConfig(steps=steps))
        assert config["run_dir"] == str(run_dir) and len(metrics(run_dir)) == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run_dir=file", "run_dir is 'file'; file is a file"),
        ("run_dir=file/run", "run_dir is 'file/run'; file is a file"),
        ("run_dir=closed/run", "run_dir is 'closed/run'; closed is not writable"),
        (f"run_dir={'x' * 300}", "cannot be made (File name too long)"),
        ("trainer.accelerator=cuda", "trainer.accelerator is 'cuda'; torch finds no GPU on this machine"),
    ],
)
def test_what_keeps_a_run_from_starting_here_is_told_in_one_line(override, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("closed").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and access(path, mode))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exit_code(monkeypatch, "train", "experiment=smoke", override) == 2
    error = capfd.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"file", "closed"}


def test_typos_of_a_sweep_end_it_before_it_begins(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "train", "-m", "experiment=smoke", "seed=0,1", "model.embed_dm=1") == 2
    assert capfd.readouterr().err == "error: model.embed_dm: no such setting; did you mean model.embed_dim?\n"
    assert not list(tmp_path.iterdir())


def test_questions_about_the_command(monkeypatch, capfd):
    assert exit_code(monkeypatch, "train", "--version") == 0
    assert capfd.readouterr().out == f"tabicl-train {importlib.metadata.version('tabicl-train')}\n"
    assert exit_code(monkeypatch, "train", "--hydra-help") == 0
    assert 'eval "$(tabicl-train -sc install=bash)"' in capfd.readouterr().out
    assert exit_code(monkeypatch, "train", "-sc", "install=bash") == 0
    assert "hydra_bash_completion tabicl-train" in capfd.readouterr().out
    for line, completions in (
        ("experiment=demo", "experiment=demo experiment=demo_long"),
        ("experiment=demo curriculum.stages.short.lea", "curriculum.stages.short.learning_rate="),
    ):
        monkeypatch.setenv("COMP_LINE", f"tabicl-train {line}")
        assert exit_code(monkeypatch, "train", "-sc", "query=bash") == 0
        assert capfd.readouterr().out.strip() == completions
    assert exit_code(monkeypatch, "train", "experiment=smok", "--help") == 2
    assert capfd.readouterr().err.startswith("error: experiment=smok: there is no such choice")


def test_a_missing_extra_is_told_with_a_way_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,) = problems("experiment=smoke", "wandb.mode=offline")
    assert found.endswith("pip install wandb, or pip install '.[wandb]' in the project's folder")
    with pytest.raises(ConfigError, match="pip install matplotlib, or"):
        require_matplotlib()


def test_provenance_names_the_version_of_the_program():
    assert describe_origin()["versions"]["tabicl-train"] == importlib.metadata.version("tabicl-train")


def test_a_run_starts_from_a_run_a_checkpoint_or_a_public_file(tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    config = compose(["experiment=smoke"])
    for step in 2, 3:
        torch.manual_seed(step)
        content = {
            "global_step": step,
            "config": dataclasses.asdict(config),
            "state_dict": Pretraining(config).state_dict(),
        }
        torch.save(content, tmp_path / f"run/checkpoints/step-0000000{step}.ckpt")
    export(str(tmp_path / "run"), str(tmp_path / "public.ckpt"))
    for start, step in ("run", 3), ("run/checkpoints/step-00000002.ckpt", 2), ("public.ckpt", 3):
        config = compose(["experiment=smoke", f"init_weights={tmp_path}/{start}"])
        module = build_module(config, None, one_process())
        saved = torch.load(tmp_path / f"run/checkpoints/step-0000000{step}.ckpt")["state_dict"]
        assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
    (tmp_path / "empty").mkdir()
    config = compose(["experiment=smoke", f"init_weights={tmp_path}/empty"])
    with pytest.raises(ConfigError, match=r"init_weights: .*holds no checkpoint yet"):
        build_module(config, None, one_process())
    # a run that has begun needs its start no more
    assert compose(["experiment=smoke", "init_weights=gone.ckpt", f"run_dir={tmp_path}/run"])
