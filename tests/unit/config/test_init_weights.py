"""Weights that a run starts from: those of a run, a checkpoint, a public file or a hub folder."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import NetworkSettings
from tabicl_train.training.resume import initial_weights, other_function
from tabicl_train.training.state import untrained_module
from tabicl_train.weights.export import export


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose(["experiment=smoke"])


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory) -> Path:
    """Two checkpoints of a run with different weights, and the newest one in two other formats."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "run/checkpoints").mkdir(parents=True)
    for step in (2, 3):
        module = untrained_module(dataclasses.replace(config, seed=step))
        content = {"global_step": step, "config": dataclasses.asdict(config), "state_dict": module.state_dict()}
        torch.save(content, folder / f"run/checkpoints/step-0000000{step}.ckpt")
    export(str(folder / "run"), str(folder / "public.ckpt"))
    export(str(folder / "run"), str(folder / "hub"))
    return folder


def assert_weights_of(step: int, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    saved = torch.load(folder / f"run/checkpoints/step-0000000{step}.ckpt")["state_dict"]
    assert {f"model.{name}" for name in weights} == saved.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, saved[f"model.{name}"]), name


@pytest.mark.parametrize(
    ("start", "step"), [("run", 3), ("run/checkpoints/step-00000002.ckpt", 2), ("public.ckpt", 3), ("hub", 3)]
)
def test_a_run_starts_from_a_run_a_checkpoint_a_public_file_or_a_hub_folder(start, step, config, folder):
    weights = initial_weights(f"{folder}/{start}", config.model).tensors
    assert_weights_of(step, folder, weights)


def test_a_folder_without_checkpoints_is_one_line(config, tmp_path):
    with pytest.raises(ConfigError, match=r"init_weights: .*holds no checkpoint of a run"):
        initial_weights(str(tmp_path), config.model)


def test_a_start_from_another_function_than_that_of_the_file_is_told(config, folder, capsys):
    def warnings(**settings) -> list[str]:
        initial_weights(f"{folder}/run", dataclasses.replace(config.model, **settings))
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]

    assert warnings() == warnings(dropout=0.1, checkpoint_rows=7) == []
    (line,) = warnings(scaling_bound=5.0, dropout=0.1)
    assert line.startswith("warning   init_weights: model.scaling_bound was None, is 5.0; the same weights now")


def test_settings_of_an_outside_network_are_told_unless_its_scores_stay_the_same():
    @dataclasses.dataclass
    class Settings(NetworkSettings):
        family: str = "mine"
        width: int = 8
        temperature: float = dataclasses.field(default=1.0, metadata={"resume": "refused"})
        chunk: int = dataclasses.field(default=4, metadata={"resume": "free"})

    saved = Settings(temperature=2.5, chunk=8, dropout=0.1, checkpoint_rows=5)
    assert other_function(saved, Settings()) == ["model.temperature was 2.5, is 1.0"]
    assert other_function(Settings(), Settings()) == []


def test_a_run_that_has_begun_needs_its_start_no_more(folder):
    assert compose(["experiment=smoke", "init_weights=gone.ckpt", f"run_dir={folder}/run"])
