"""Which settings may differ from those of the checkpoint that a run continues from, without training."""

import contextlib
import copy
import dataclasses
import math
import re
import shlex

import pytest
import torch
from networks import TINY, tiny_network

from priors.random import STREAM_VERSION
from tabicl_train import register
from tabicl_train.config.compose import compose
from tabicl_train.config.on_resume import Severity
from tabicl_train.config.schema import RunConfig
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import NetworkSettings
from tabicl_train.run.checkpoint import FORMAT_VERSION, newest_valid, read_checkpoint
from tabicl_train.training.resume import changes_since, refuse_changes, severity_of_model
from tabicl_train.weights.export import save_public
from tabicl_train.weights.reader import read_weights

TABLES = ("rows=[30,50]", "features=[2,4]", "tables=4", "group_size=2", "warmup=0")
STAGES = ["curriculum=tabicl_v2"]
for name, steps in (("stage1", 2), ("stage2", 2), ("stage3", 1)):
    STAGES += [f"curriculum.stages.{name}.{value}" for value in (f"steps={steps}", *TABLES)]


def config_of(*overrides: str) -> RunConfig:
    return compose(["experiment=smoke", "prior=graph_scm", *overrides])


def content_of(values: dict, steps: int = 4) -> dict:
    """What a checkpoint keeps of its run."""
    run = {"stream_version": STREAM_VERSION, "real_tables": None}
    return {"global_step": steps, "config": values, "run": run}


@pytest.fixture(scope="module")
def composed() -> dict:
    return dataclasses.asdict(config_of())


def changed(values: dict, **settings) -> dict:
    """The values with other ones, by their dotted names with __ for a dot."""
    values = copy.deepcopy(values)
    for name, value in settings.items():
        *parts, key = name.split("__")
        section = values
        for part in parts:
            section = section[part]
        section[key] = value
    return values


def test_settings_of_model_tables_and_stages_make_another_run_and_others_are_told(composed, capsys):
    content = content_of(composed)
    for name, value, words in (
        ("model__ff_factor", 3, "model.ff_factor was 2, is 3; choose a new run_dir$"),
        ("seed", 5, "seed was 0, is 5; choose a new run_dir, or set resume.allow_changes=true$"),
        (
            "prior__preset",
            "released",
            "prior.preset was corrected, is released; choose a new run_dir, or set resume.allo",
        ),
        (
            "curriculum__stages__smoke__clip",
            1.0,
            "curriculum.stages.smoke.clip was 10.0, is 1.0; choose a new run_dir, or",
        ),
        ("optimizer__name", "adamw", "optimizer.name was muon, is adamw; choose a new run_dir, or"),
        ("model__dropout", 0.1, "model.dropout was 0.0, is 0.1; choose a new run_dir, or"),  # its weights fit
    ):
        with pytest.raises(ConfigError, match=words):
            refuse_changes(content, changed(composed, **{name: value}))
        allowed = changed(composed, resume__allow_changes=True, **{name: value})
        with pytest.raises(ConfigError, match=words) if name == "model__ff_factor" else contextlib.nullcontext():
            refuse_changes(content, allowed)
    assert len(capsys.readouterr().err.splitlines()) == 5
    refuse_changes(content, changed(composed, averages__ema=0.5, curriculum__stages__smoke__pack_tokens=1000))
    assert capsys.readouterr().err.splitlines() == [
        "changed   averages.ema was 0.0, is 0.5",
        "changed   curriculum.stages.smoke.pack_tokens was 2500000, is 1000",
    ]


def test_an_option_declares_what_its_change_means(composed):
    severities = {
        "name": "free",
        "stream.prefetch": "free",  # of a section that declares it
        "trainer.max_steps": "start",
        "trainer.log_every": "free",
        "trainer.tf32": "told",
        "seed": "refused",
        "optimizer.name": "refused",
        "optimizer.momentum": "told",
        "prior.preset": "refused",
        "model.ff_factor": "never",
        "model.scaling_bound": "refused",
        "curriculum.stages.smoke.clip": "refused",
        "curriculum.stages.smoke.pack_tokens": "told",
    }
    values = changed(composed, **{option.replace(".", "__"): 9 for option in severities} | {"optimizer__name": "adamw"})
    changes = changes_since(content_of(composed), values)
    assert {change.option: change.severity.value for change in changes} == severities
    coming = changes_since(content_of(composed, steps=0), values)
    assert {change.severity for change in coming if change.option.startswith("curriculum")} == {Severity.TOLD}


def test_a_setting_of_an_outside_network_makes_another_one_unless_declared_otherwise():
    @dataclasses.dataclass
    class Settings(NetworkSettings):
        family: str = "mine"
        width: int = 8
        chunk: int = dataclasses.field(default=4, metadata={"resume": "told"})
        dropout: float = 0.1

    assert severity_of_model("width", Settings) is Severity.NEVER
    assert severity_of_model("chunk", Settings) is Severity.TOLD
    assert severity_of_model("dropout", Settings) is Severity.REFUSED


def test_options_of_plug_ins_mean_for_a_run_what_they_declare(composed, monkeypatch):
    @dataclasses.dataclass
    class Options:
        beta: float = 0.9
        chunk: int = dataclasses.field(default=4, metadata={"resume": "free"})
        shrink: float = dataclasses.field(default=0.0, metadata={"resume": "refused"})

    for registry in (register.optimizer, register.objective):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    register.optimizer("mine", torch.optim.SGD, options=Options)
    register.objective("mine", Options)
    section = {"name": "mine", "beta": 0.9, "chunk": 4, "shrink": 0.0}
    before = changed(composed, optimizer=section, objective=section)
    other = section | {"beta": 0.8, "chunk": 5, "shrink": 0.1}
    changes = changes_since(content_of(before), changed(before, optimizer=other, objective=other))
    assert {change.option: change.severity.value for change in changes} == {
        "optimizer.beta": "told",
        "optimizer.chunk": "free",
        "optimizer.shrink": "refused",
        "objective.beta": "refused",
        "objective.chunk": "free",
        "objective.shrink": "refused",
    }


def test_a_run_of_another_kind_is_refused_in_six_lines_the_most_telling_first(composed):
    other = dataclasses.asdict(compose(["experiment=demo", "model.dropout=0.1", "optimizer=adamw", "seed=3"]))
    with pytest.raises(ConfigError) as caught:
        refuse_changes(content_of(composed), other)
    problems = [problem.partition(" is another run: ")[2] for problem in caught.value.problems]
    assert [problem.split()[0] for problem in problems[:4]] == ["prior.name", "its", "seed", "model.col_num_heads"]
    assert problems[1].startswith("its stages smoke have started; this command has short, long; choose a new run_dir")
    assert len(problems) == 6
    assert re.match(r"\d+ more settings differ; choose", problems[5])


def test_launch_and_files_of_a_run_and_defaults_that_are_written_out_are_no_change(composed, capsys):
    launch = {f"trainer__{name}": 9 for name in ("devices", "timeout", "max_hours", "max_steps")}
    launch |= {"tensorboard": True, "stream__num_workers": 1, "checkpoint__keep": 1}
    prior = {"name": "graph_scm"}
    content = content_of(changed(composed, prior=prior))
    refuse_changes(content, changed(composed, prior=prior | {"preset": "corrected"}, **launch))
    assert capsys.readouterr().err == ""
    refuse_changes(content, changed(composed, init_weights="third.ckpt"))
    assert capsys.readouterr().err.startswith("warning   init_weights=third.ckpt has no effect: the run continues from")


def test_options_that_a_run_is_older_than_are_no_change(composed, capsys):
    saved = copy.deepcopy(composed)
    del saved["model"]["scaling_bound"], saved["curriculum"]["scale_steps"]
    del saved["optimizer"]["adamw_factor"], saved["trainer"]["deterministic"]
    del saved["curriculum"]["stages"]["smoke"]["checkpoint_rows"]
    refuse_changes(content_of(saved), composed)
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match=r"curriculum\.stages\.smoke\.checkpoint_rows was None, is 9"):
        refuse_changes(content_of(saved), changed(composed, curriculum__stages__smoke__checkpoint_rows=9))


def test_an_option_that_a_prior_no_longer_has_is_named(composed, capsys):
    content = content_of(changed(composed, prior__spice=2))
    with pytest.raises(ConfigError, match=r"prior\.spice was 2; there is no .*set resume\.allow_changes=true"):
        refuse_changes(content, composed)
    refuse_changes(content, changed(composed, resume__allow_changes=True))
    assert "changed   prior.spice was 2; there is no such setting now" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["version of the table stream", "hash of the tables in files"])
def test_other_tables_are_another_run(what, composed, capsys):
    content = content_of(composed)
    content["run"]["stream_version" if "stream" in what else "real_tables"] = 99
    with pytest.raises(ConfigError, match=rf"is another run: the {what} was 99, is \w+; choose a new") as error:
        refuse_changes(content, composed)
    assert len(error.value.problems) == 1
    refuse_changes(content, changed(composed, resume__allow_changes=True))
    assert f"changed   the {what} was 99, is " in capsys.readouterr().err


def test_at_a_boundary_the_coming_stage_may_change_and_others_may_follow():
    values = dataclasses.asdict(config_of(*STAGES))
    free = changed(values, curriculum__stages__stage2__learning_rate=1e-5, curriculum__stages__stage2__steps=9)
    refuse_changes(content_of(values, 2), free)
    with pytest.raises(ConfigError, match=r"stage2\.learning_rate was 0\.0\d+, is 1e-05"):
        refuse_changes(content_of(values, 3), free)
    with pytest.raises(ConfigError, match=r"stage1\.steps was 2, is 3"):
        refuse_changes(content_of(values, 2), changed(values, curriculum__stages__stage1__steps=3))
    stages = values["curriculum"]["stages"]
    longer = changed(values, curriculum__stages=stages | {"stage4": stages["stage3"]})
    refuse_changes(content_of(values, 5), longer)
    longer["curriculum"]["stages"] = dict(reversed(longer["curriculum"]["stages"].items()))
    with pytest.raises(ConfigError, match="its stages stage1 have started; this command has stage4"):
        refuse_changes(content_of(values, 2), longer)


def refused(content: dict, values: dict) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        refuse_changes(content, values)
    return caught.value.problems


def cosine(done: float) -> float:
    """The learning rate of the stage smoke after this share of its decay."""
    return 1e-7 + (1e-3 - 1e-7) * (1 + math.cos(math.pi * done)) / 2


def test_a_jump_of_the_learning_rate_is_told_with_a_stage_that_has_none(composed, capsys):
    longer = changed(composed, curriculum__stages__smoke__steps=40)
    refusal, advice = refused(content_of(composed, 20), longer)
    assert "smoke.steps was 20, is 40; choose a new run_dir" in refusal
    assert advice.startswith("to train longer, leave")
    refuse_changes(content_of(composed, 20), changed(longer, resume__allow_changes=True))
    _, warning, instead = capsys.readouterr().err.splitlines()
    coming = cosine((20 - 4) / (39 - 4))
    assert f"warning   the learning rate goes from 1e-07 at step 20 to {coming:.3g} at step 21, since" in warning
    assert instead.removeprefix("          instead") == advice.removeprefix("to train longer")

    (override,) = [word for word in shlex.split(advice) if word.startswith("+curriculum")]
    with_stage = dataclasses.asdict(config_of(override))
    refuse_changes(content_of(composed, 20), with_stage)
    assert capsys.readouterr().err == "changed   the stages were smoke, are smoke, more\n"
    smoke, more = with_stage["curriculum"]["stages"].values()
    assert more == smoke | {"fresh_optimizer": False} and more["warmup"] == 0.1

    unclipped = changed(with_stage, curriculum__stages__more__clip=math.inf)
    *_, advice = refused(content_of(unclipped, 40), changed(unclipped, curriculum__stages__more__steps=60))
    second = shlex.split(advice)[-1]
    assert second.startswith("+curriculum.stages.more2={steps: 40, ")
    assert config_of(override, second).curriculum.stages["more2"].clip == math.inf


def test_another_learning_rate_is_told_of_a_stage_that_goes_on_and_not_of_a_new_one(composed, capsys):
    changes = {"curriculum__stages__smoke__steps": 40, "resume__allow_changes": True}
    refuse_changes(content_of(composed, 10), changed(composed, **changes))
    _, warning = capsys.readouterr().err.splitlines()
    trained, coming = cosine((9 - 2) / (19 - 2)), cosine((10 - 4) / (39 - 4))
    assert f" from {trained:.3g} at step 10 to {coming:.3g} at step 11, since" in warning
    values = dataclasses.asdict(config_of(*STAGES))
    refuse_changes(content_of(values, 2), changed(values, curriculum__stages__stage2__learning_rate=1e-5))
    assert "learning rate goes" not in capsys.readouterr().err


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_files_of_another_format_version_are_refused_in_one_line(version, composed, tmp_path):
    path, public = tmp_path / "step-00000004.ckpt", tmp_path / "public.ckpt"
    torch.save(content_of(composed) | {"format_version": version}, path)
    save_public(TINY, tiny_network().state_dict(), public)
    torch.save(torch.load(public) | {"format_version": version}, public)
    for name, load in (
        ("step-00000004", read_checkpoint),
        ("step-00000004", lambda path: newest_valid(path.parent)),
        ("step-00000004", lambda path: read_weights(str(path))),
        ("public", lambda _: read_weights(str(public))),
    ):
        words = rf"{name}\.ckpt was written by another version of tabicl-train: its format is version {version}, and"
        with pytest.raises(ConfigError, match=words) as error:
            load(path)
        assert len(error.value.problems) == 1
