"""Which settings may differ from those of the checkpoint that a run continues from, without training."""

import dataclasses

import pytest
import torch
from tiny_network import TINY, tiny_network

from priors.random import STREAM_VERSION
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.errors import ConfigError
from tabicl_train.prediction.export import load_checkpoint
from tabicl_train.prediction.public_format import load_public, save_public
from tabicl_train.resume import refuse_changes
from tabicl_train.run_dir.checkpoint import FORMAT_VERSION, newest_valid, read

TABLES = ("rows=[30,50]", "features=[2,4]", "tables=4", "group_size=2", "warmup=0")
STAGES = ["curriculum=mini_v2"]
for name, steps in (("stage1", 2), ("stage2", 2), ("stage3", 1)):
    STAGES += [f"curriculum.stages.{name}.{value}" for value in (f"steps={steps}", *TABLES)]


def config_of(*overrides: str) -> RunConfig:
    return compose(["experiment=smoke", "prior=graph_scm", *overrides])


def content_of(config: RunConfig, steps: int = 4) -> dict:
    """What a checkpoint keeps of its run."""
    run = {"stream_version": STREAM_VERSION, "real_tables": None}
    return {"global_step": steps, "config": dataclasses.asdict(config), "run": run}


def resume(config: RunConfig, content: dict) -> None:
    refuse_changes(content, dataclasses.asdict(config))


def test_a_setting_of_the_model_of_tables_or_of_a_stage_makes_another_run_and_others_are_told(capsys):
    content = content_of(config_of())
    for change, words in (
        ("model.ff_factor=3", "model.ff_factor was 2, is 3; choose a new run_dir$"),
        ("seed=5", "seed was 0, is 5; choose a new run_dir, or set resume.allow_changes=true$"),
        ("prior.preset=released", "prior.preset was corrected, is released; choose a new run_dir, or set resume.allow"),
        ("curriculum.stages.smoke.clip=1", r"curriculum.stages.smoke.clip was 10.0, is 1.0; choose a new run_dir, or"),
        ("optimizer=adamw", "optimizer.name was muon, is adamw; choose a new run_dir, or"),
    ):
        with pytest.raises(ConfigError, match=words):
            resume(config_of(change), content)
        if not change.startswith("model"):
            resume(config_of(change, "resume.allow_changes=true"), content)
    assert len(capsys.readouterr().err.splitlines()) == 4
    with pytest.raises(ConfigError, match=r"model\.ff_factor was 2, is 3; choose a new run_dir$"):
        resume(config_of("model.ff_factor=3", "resume.allow_changes=true"), content)
    told = ["averages.ema=0.5", "curriculum.stages.smoke.pack_tokens=1000", "model.dropout=0.1"]
    with pytest.raises(ConfigError) as error:
        resume(config_of(*told), content)
    assert [problem.split()[4] for problem in error.value.problems] == ["model.dropout"]  # its weights fit
    resume(config_of(*told[:2]), content)
    assert capsys.readouterr().err.splitlines() == [
        "changed   averages.ema was 0.0, is 0.5",
        "changed   curriculum.stages.smoke.pack_tokens was 2500000, is 1000",
    ]


def test_launch_and_files_of_a_run_are_no_change_and_neither_is_a_default_that_is_written_out(capsys):
    launch = [
        "trainer.devices=2",
        "trainer.timeout=9",
        "trainer.max_hours=2",
        "trainer.max_steps=9",
        "tensorboard=true",
    ]
    written = config_of().prior | {"preset": "corrected"}
    content = content_of(dataclasses.replace(config_of(), prior={"name": "graph_scm"}))
    resume(dataclasses.replace(config_of(*launch, "stream.num_workers=1", "checkpoint.keep=1"), prior=written), content)
    assert capsys.readouterr().err == ""
    resume(dataclasses.replace(config_of(), init_weights="third.ckpt"), content)
    assert capsys.readouterr().err.startswith("warning   init_weights=third.ckpt has no effect: the run continues from")


def test_an_option_that_a_prior_no_longer_has_is_named(capsys):
    content = content_of(config_of())
    content["config"]["prior"]["spice"] = 2
    with pytest.raises(ConfigError, match=r"prior\.spice was 2; there is no .*set resume\.allow_changes=true"):
        resume(config_of(), content)
    resume(config_of("resume.allow_changes=true"), content)
    assert "changed   prior.spice was 2; there is no such setting now" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["version of the table stream", "hash of the real tables"])
def test_other_tables_are_another_run(what, capsys):
    content = content_of(config_of())
    content["run"]["stream_version" if "stream" in what else "real_tables"] = 99
    with pytest.raises(ConfigError, match=rf"is another run: the {what} was 99, is \w+; choose a new") as error:
        resume(config_of(), content)
    assert len(error.value.problems) == 1
    resume(config_of("resume.allow_changes=true"), content)
    assert f"changed   the {what} was 99, is " in capsys.readouterr().err


def test_at_a_boundary_the_coming_stage_may_change_and_others_may_follow():
    config = config_of(*STAGES)
    content, at_end = content_of(config, 2), content_of(config, 5)
    free = config_of(*STAGES, "curriculum.stages.stage2.learning_rate=1e-5", "curriculum.stages.stage2.steps=9")
    resume(free, content)
    with pytest.raises(ConfigError, match=r"stage2\.learning_rate was 0\.0\d+, is 1e-05"):
        resume(free, content_of(config, 3))
    with pytest.raises(ConfigError, match=r"stage1\.steps was 2, is 3"):
        resume(config_of(*STAGES, "curriculum.stages.stage1.steps=3"), content)
    config.curriculum.stages["stage4"] = config.curriculum.stages["stage3"]
    resume(config, at_end)
    config.curriculum.stages = dict(reversed(config.curriculum.stages.items()))
    with pytest.raises(ConfigError, match="the stages that have started are stage1; the run now has stage4"):
        resume(config, content)


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_files_of_another_format_version_are_refused_in_one_line(version, tmp_path):
    path, public = tmp_path / "step-00000004.ckpt", tmp_path / "public.ckpt"
    torch.save(content_of(config_of()) | {"format_version": version}, path)
    save_public(TINY, tiny_network().state_dict(), public)
    torch.save(torch.load(public) | {"format_version": version}, public)
    for name, load in (
        ("step-00000004", read),
        ("step-00000004", lambda path: newest_valid(path.parent)),
        ("step-00000004", lambda path: load_checkpoint(str(path))),
        ("public", lambda _: load_public(public)),
        ("public", lambda _: load_checkpoint(str(public))),
    ):
        words = rf"{name}\.ckpt was written by another version of tabicl-train: its format is version {version}, and"
        with pytest.raises(ConfigError, match=words) as error:
            load(path)
        assert len(error.value.problems) == 1
