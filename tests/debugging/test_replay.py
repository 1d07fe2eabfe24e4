"""Replays of a run that was rewound."""

import dataclasses
from pathlib import Path

import pytest
import torch
from runs import last, metrics
from short_runs import REWIND, STAGES, Ruin, run

from priors.random import STREAM_VERSION
from tabicl_train.callbacks import guard
from tabicl_train.config.compose import compose, from_values
from tabicl_train.debugging.replay import replay, replay_values
from tabicl_train.errors import ConfigError


class RuinTwice(Ruin):
    def on_train_batch_start(self, item, module, **_) -> None:
        super().on_train_batch_start(item=item, module=module)
        if item.step == 11:  # after the reset of the optimizer in the second stage
            self.after = 13


@pytest.fixture
def rewound(tmp_path, monkeypatch) -> Path:
    """Back from 8 to 6, the end of the first stage, and from 14 to 12, the end of the second one."""
    monkeypatch.setattr(guard, "HORIZON", 2)
    monkeypatch.setattr(guard, "MEMORY", 0.5)
    kept = "curriculum.stages.stage3.fresh_optimizer=false"
    run(tmp_path / "run", *REWIND, kept, callbacks=(RuinTwice(7),), settings=STAGES)
    assert last(tmp_path / "run")["callbacks"]["Guard"]["abandoned"] == [[6, 8], [12, 14]]
    return tmp_path / "run"


def assert_same_step(run_dir: Path, step: int, capsys) -> str:
    capsys.readouterr()
    replay(str(run_dir), step)
    printed = capsys.readouterr().out
    row = metrics(run_dir)[step]
    assert f"all tables: loss {float(row['loss']):.6g}, gradient norm {float(row['grad_norm']):.4g}" in printed
    return printed


@pytest.mark.slow
def test_a_replay_uses_the_weights_of_a_run_that_was_rewound(rewound, tmp_path, capsys):
    folder = rewound / "checkpoints"
    assert "went back" not in assert_same_step(rewound, 6, capsys)
    assert "went back" not in assert_same_step(rewound, 9, capsys)  # from the checkpoint of step 8, saved after it
    for step in (2, 4, 8, 10, 14, 16, 18):
        (folder / f"step-{step:08d}.ckpt").unlink()
    assert "from step 14 to the weights of step 12" in assert_same_step(rewound, 15, capsys)  # from step 12
    assert "from step 8 to the weights of step 6" in assert_same_step(rewound, 9, capsys)  # from step 6
    (rewound / "incidents.jsonl").rename(tmp_path / "incidents.jsonl")
    assert "from step 8 to the weights of step 6" in assert_same_step(rewound, 9, capsys)  # a checkpoint lists it
    (folder / "step-00000006.ckpt").unlink()
    assert "from step 8 to the weights of step 6" in assert_same_step(rewound, 9, capsys)  # from step 0


def test_a_replay_needs_neither_devices_nor_files_that_it_does_not_use():
    values = dataclasses.asdict(compose(["experiment=smoke"]))
    values |= {"init_weights": "gone.ckpt", "trainer": values["trainer"] | {"accelerator": "cuda", "devices": 8}}
    config = from_values(replay_values(values, from_checkpoint=True))
    assert config.init_weights is None and config.trainer.accelerator == "auto" and config.trainer.devices is None
    with pytest.raises(ConfigError, match=r"init_weights is 'gone\.ckpt'"):  # from step 0 it needs them
        from_values(replay_values(values, from_checkpoint=False))


@pytest.mark.parametrize(
    ("setting", "version", "words"),
    [
        (
            "max_hours",
            99,
            rf"04\.ckpt cannot be replayed: the version of the table stream was 99, is {STREAM_VERSION}; its tables",
        ),
        ("cpu_threads", STREAM_VERSION, r"'many' .*trainer\.cpu_threads"),
    ],
)
def test_a_run_of_another_version_is_refused(setting, version, words, tmp_path):
    config = dataclasses.asdict(compose(["experiment=smoke"]))
    config["trainer"][setting] = "many" if setting == "cpu_threads" else 7
    content = {"global_step": 4, "config": config, "run": {"stream_version": version}, "callbacks": {"Guard": {}}}
    (tmp_path / "checkpoints").mkdir()
    torch.save(content, tmp_path / "checkpoints/step-00000004.ckpt")
    with pytest.raises(ConfigError, match=words) as error:
        replay(str(tmp_path), 5)
    assert len(error.value.problems) == 1
