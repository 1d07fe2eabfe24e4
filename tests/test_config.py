import dataclasses
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from tabicl_train.config import CONFIG_DIR, ConfigError, compose

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
        "import sys\nfrom tabicl_train.config import compose\ncompose(['experiment=smoke'])\n"
        "assert 'lightning' not in sys.modules and 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
