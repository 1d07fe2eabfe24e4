"""Settings of checkpoints that lack some, have others, or come from a later version of the program."""

import dataclasses

import pytest
import torch
from tiny_network import TINY, tiny_network

from priors.random import STREAM_VERSION
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.debugging.replay import version_problems
from tabicl_train.errors import ConfigError
from tabicl_train.prediction.export import load_checkpoint
from tabicl_train.prediction.public_format import save_public
from tabicl_train.run_dir import changes
from tabicl_train.run_dir.changes import refuse_changes, up_to_date
from tabicl_train.run_dir.checkpoint import newest_valid, read


def config_of(*overrides: str) -> RunConfig:
    return compose(["experiment=smoke", "prior=graph_scm", *overrides])


def content_of(config: RunConfig) -> dict:
    """What a checkpoint keeps of its run."""
    return {"global_step": 4, "config": dataclasses.asdict(config), "run": {"stream_version": STREAM_VERSION}}


def resume(config: RunConfig, content: dict) -> None:
    refuse_changes(config, content | {"config": up_to_date(content["config"])}, 4)


def test_missing_settings_take_their_defaults(capsys):
    content = content_of(config_of())
    saved = content["config"]
    del saved["model"]["checkpoint_rows"], saved["model"]["ff_factor"], saved["model"]["missing_values"]
    del saved["prior"]["preset"], saved["validation"]
    del saved["curriculum"]["stages"]["smoke"]["clip"], saved["trainer"]["max_hours"]
    resume(config_of(), content)
    assert capsys.readouterr().err == ""
    for change, words in (
        ("model.ff_factor=3", "model.ff_factor was 2, is 3; choose a new run_dir$"),
        ("model.missing_values=true", "model.missing_values was False, is True; choose a new run_dir$"),
        ("prior.preset=released", "prior.preset was [a-z]+, is released; choose a new run_dir, or set resume.allow"),
        ("curriculum.stages.smoke.clip=1", r"curriculum.stages.smoke.clip was 10.0, is 1.0; choose a new run_dir, or"),
    ):
        with pytest.raises(ConfigError, match=words):
            resume(config_of(change), content)
    resume(config_of("trainer.accelerator=cpu", "validation.tables=7"), content)
    assert capsys.readouterr().err.splitlines() == [
        "changed   trainer.accelerator was auto, is cpu",
        "changed   validation.tables was 16, is 7",
    ]


def test_how_a_run_is_launched_is_no_change(capsys):
    launch = [
        "trainer.devices=2",
        "trainer.timeout=9",
        "trainer.max_hours=2",
        "trainer.requeue=true",
    ]
    resume(config_of(*launch, "tensorboard=true"), content_of(config_of()))
    assert capsys.readouterr().err == ""


def test_settings_that_are_gone_are_migrated(monkeypatch):
    values = dataclasses.asdict(config_of("guard.loss=0.7", "model.col_num_heads=1"))
    expected = up_to_date(values)
    values["model"]["width"] = values["model"].pop("embed_dim")
    values["stop_at"] = values["guard"].pop("loss")
    values["model"]["heads"] = values["model"].pop("col_num_heads")
    values["old_logger"] = "csv"
    values["curriculum"]["stages"]["smoke"]["peak"] = values["curriculum"]["stages"]["smoke"].pop("learning_rate")
    for old, migration in {
        "model.width": "model.embed_dim",
        "stop_at": "guard.loss",
        "model.heads": lambda heads: {"model.col_num_heads": heads, "model.row_num_heads": 2 * heads},
        "old_logger": lambda _: {},
    }.items():
        monkeypatch.setitem(changes.MIGRATIONS, old, migration)
    monkeypatch.setitem(changes.STAGE_MIGRATIONS, "peak", "learning_rate")
    before = repr(values)
    assert up_to_date(values) == expected
    assert repr(values) == before


def test_which_tables_share_a_pack_is_no_other_run(tmp_path, capsys):
    content = content_of(config_of())
    del content["config"]["curriculum"]["stages"]["smoke"]["pack_tokens"]
    content["config"]["curriculum"]["stages"]["smoke"]["micro_batch_rows"] = 5000
    path = tmp_path / "checkpoints/step-00000004.ckpt"
    path.parent.mkdir()
    torch.save(content, path)
    content = read(path)
    refuse_changes(config_of(), content, 4)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("changed   tables go through the network in packs of pack_tokens, no longer ")
    assert version_problems(content) == []  # it can be replayed
    refuse_changes(config_of("curriculum.stages.smoke.pack_tokens=1000"), content_of(config_of()), 4)
    words = "changed   curriculum.stages.smoke.pack_tokens was 2500000, is 1000"
    assert capsys.readouterr().err.splitlines() == [words]


def test_settings_that_are_gone_for_good_are_named(tmp_path, capsys):
    content = content_of(config_of())
    content["config"]["guard"]["patience"] = 7
    resume(config_of(), content)
    assert "changed   guard.patience was 7; there is no such setting now" in capsys.readouterr().err
    content["config"]["prior"]["spice"] = 2
    with pytest.raises(ConfigError, match=r"prior\.spice was 2; there is no .*set resume\.allow_changes=true"):
        resume(config_of(), content)
    resume(config_of("resume.allow_changes=true"), content)
    del content["config"]["prior"]["spice"]
    content["config"]["model"]["memory"] = "lstm"
    with pytest.raises(
        ConfigError, match=r"model\.memory was lstm; there is no such setting now; choose a new run_dir"
    ):
        resume(config_of("resume.allow_changes=true"), content)
    torch.save(content | {"state_dict": {}}, tmp_path / "model.ckpt")
    with pytest.raises(ConfigError, match=r"model\.ckpt has model\.memory=lstm, which this version .* does not have"):
        load_checkpoint(str(tmp_path / "model.ckpt"))


def test_weights_are_loaded_without_settings_that_the_checkpoint_lacks(tmp_path):
    config = dataclasses.replace(config_of(), model=TINY)
    content = content_of(config) | {"state_dict": {f"model.{k}": v for k, v in tiny_network().state_dict().items()}}
    del content["config"]["model"]["dropout"], content["config"]["model"]["scaling_bound"]
    torch.save(content, tmp_path / "old.ckpt")
    loaded, weights = load_checkpoint(str(tmp_path / "old.ckpt"))
    assert loaded == TINY and weights.keys() == tiny_network().state_dict().keys()


def test_another_stream_of_tables_is_another_run(capsys):
    content = content_of(config_of())
    content["run"]["stream_version"] = changes.STREAM_VERSION + 1
    was, now = changes.STREAM_VERSION + 1, changes.STREAM_VERSION
    words = rf"is another run: the version of the table stream was {was}, is {now}; choose a new"
    with pytest.raises(ConfigError, match=words) as error:
        resume(config_of(), content)
    assert len(error.value.problems) == 1
    resume(config_of("resume.allow_changes=true"), content)
    assert f"changed   the version of the table stream was {was}, is {now}" in capsys.readouterr().err


def test_files_of_a_later_version_are_refused(tmp_path):
    path = tmp_path / "step-00000004.ckpt"
    torch.save(content_of(config_of()) | {"format_version": 2}, path)
    torch.save(content_of(config_of()), tmp_path / "step-00000003.ckpt")
    words = r"step-00000004\.ckpt was written by a later version of tabicl-train: its format is version 2, and this"
    for load in (read, lambda path: newest_valid(path.parent), lambda path: load_checkpoint(str(path))):
        with pytest.raises(ConfigError, match=words) as error:
            load(path)
        assert len(error.value.problems) == 1
    public = tmp_path / "public.ckpt"
    save_public(TINY, tiny_network().state_dict(), public)
    torch.save(torch.load(public) | {"format_version": 2}, public)
    for load in (lambda path: load_checkpoint(str(path)),):
        with pytest.raises(ConfigError, match=r"public\.ckpt was written by a later version"):
            load(public)


def test_files_without_a_version_are_of_the_first_one(tmp_path):
    public = tmp_path / "public.ckpt"
    save_public(TINY, tiny_network().state_dict(), public)
    content = torch.load(public)
    assert content.pop("format_version") == 1 and content.keys() == {"config", "state_dict", "origin"}
    torch.save(content, public)
    assert load_checkpoint(str(public))[0] == TINY
