"""Settings that were removed: where they are refused in one line, and which files of version 0.2.0 are read."""

import copy
import dataclasses

import pytest
import torch
import yaml
from configurations import problems
from dense_network import TinyModule
from networks import TINY
from training_runs import assert_same_end, last_checkpoint, train_short_run

from tabicl_train import register
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import NetworkSettings
from tabicl_train.model.dense import dense
from tabicl_train.report.page import read_run, settings
from tabicl_train.run.checkpoint import saved
from tabicl_train.run.removed import REMOVED, Removed, removal, without_removed
from tabicl_train.sweep.comparable import shared_in_words
from tabicl_train.weights.export import export
from tabicl_train.weights.pretrained import network_config
from tabicl_train.weights.reader import read_weights

OF_RUNS = [key for key in REMOVED if not key.startswith("sweep.")]
SMOKE = dataclasses.asdict(compose(["experiment=smoke"]))
WRONG = "a value that no setting had"


def as_of_0_2_0(values: dict, changes: dict) -> dict:
    """The configuration with values of removed settings, by their keys with * for the name of the stage."""
    values = copy.deepcopy(values)
    for key, value in changes.items():
        *sections, name = key.replace("*", "smoke").split(".")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
        if REMOVED[key].owners:
            section["name"] = REMOVED[key].owners[0]
        section[name] = value
    return values


def neutral(setting: Removed):
    return WRONG if setting.neutral is None else setting.neutral[0]


@pytest.mark.parametrize("key", OF_RUNS)
def test_a_command_line_that_names_one_gets_the_advice(key):
    name = key.replace("*", "smoke")
    line = f"{name}: removed in version 0.3.0; {REMOVED[key].advice}"
    assert removal(name) == line
    assert "\n" not in line
    assert problems("experiment=smoke", f"{name}=1") == [line]


@pytest.mark.parametrize(
    "key", ["preflight", "validation.probes", "curriculum.stages.*.uses", "model.missing_values", "prior.realism.tails"]
)
def test_a_file_that_names_one_gets_the_advice(key, tmp_path):
    name = key.replace("*", "smoke")
    line = f"{name}: removed in version 0.3.0; {REMOVED[key].advice}"
    file = tmp_path / "experiment/mine.yaml"
    file.parent.mkdir()
    setting: object = 1
    for section in reversed(name.split(".")):
        setting = {section: setting}
    content = yaml.safe_dump({"defaults": ["smoke", "_self_"]} | setting)
    file.write_text(f"# @package _global_\n{content}")
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=mine"], str(tmp_path))
    (problem,) = caught.value.problems
    assert problem in (f"experiment/mine.yaml: {line}", line)


@pytest.mark.parametrize("section", ["curriculum.stages.smoke", "+curriculum.stages.more", "curriculum.stages"])
def test_a_dictionary_on_a_command_line_that_names_one_gets_the_advice(section):
    value = "{smoke: {uses: 2}}" if section.endswith("stages") else "{uses: 2}"
    (problem,) = problems("experiment=smoke", f"{section}={value}")
    assert problem.startswith("curriculum.stages.")
    assert problem.endswith(f".uses: removed in version 0.3.0; {REMOVED['curriculum.stages.*.uses'].advice}")


@pytest.mark.parametrize("key", OF_RUNS)
def test_a_file_is_read_if_it_had_no_effect_and_is_refused_with_the_advice_otherwise(key):
    setting = REMOVED[key]
    old = as_of_0_2_0(SMOKE, {key: neutral(setting)})
    without = without_removed("run/step-00000002.ckpt", old)
    if not setting.owners:
        assert without == SMOKE
    if setting.neutral is not None:
        with pytest.raises(ConfigError) as caught:
            without_removed("run/step-00000002.ckpt", as_of_0_2_0(SMOKE, {key: WRONG}))
        name = key.replace("*", "smoke")
        what = f"run/step-00000002.ckpt has {name}={WRONG}, which was removed in version 0.3.0"
        assert caught.value.problems == [f"{what}; {setting.advice}"]


def test_options_of_the_components_of_a_mixture_are_read_as_those_of_a_prior():
    component = {"weight": 1, "realism": {"missing": 0.3, "levels": 0}}
    old = {"prior": {"name": "mix_scm", "components": {"tree_scm": component}}}
    kept = without_removed("run", old)["prior"]["components"]["tree_scm"]
    assert kept == {"weight": 1, "realism": {"missing": 0.3}}
    component["realism"]["levels"] = 0.3
    with pytest.raises(ConfigError, match=r"^run has prior\.components\.tree_scm\.realism\.levels=0.3, which"):
        without_removed("run", old)


def test_an_option_of_the_same_name_of_a_plug_in_stays():
    @dataclasses.dataclass
    class MineConfig(NetworkSettings):
        family: str = "own_gaps"
        missing_values: bool = False

    register.network("own_gaps", dense(TinyModule), settings=MineConfig)
    mine = {"prior": {"name": "mine", "repeat": True}, "model": {"family": "own_gaps", "missing_values": True}}
    assert without_removed("run", mine) == mine


def test_all_values_that_had_an_effect_are_named_at_once():
    changes = {"curriculum.stages.*.uses": 2, "optimizer.cautious_weight_decay": True}
    with pytest.raises(ConfigError) as caught:
        without_removed("run", as_of_0_2_0(SMOKE, changes))
    assert len(caught.value.problems) == 2


def test_runs_of_two_versions_are_compared_without_removed_settings_without_effect(tmp_path):
    changes = {key: neutral(REMOVED[key]) for key in OF_RUNS if not {"hdf5", "disk"} & {*REMOVED[key].owners}}
    old = as_of_0_2_0(SMOKE, changes)
    names = ["old", "new"]
    assert shared_in_words(names, [old, SMOKE]) == "with the same seed, all points are trained on identical tables"
    twice = as_of_0_2_0(SMOKE, {"curriculum.stages.*.uses": 2})
    assert shared_in_words(names, [twice, SMOKE]).startswith("no two points")

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    assert settings([read_run(tmp_path, "old")])["changed"].empty


def test_weights_of_a_network_that_is_no_longer_built_are_refused():
    settings = dataclasses.asdict(TINY)
    assert network_config("a.ckpt", settings | {"residual_scalars": False}) == TINY
    with pytest.raises(ConfigError, match=r"^a.ckpt has model.residual_scalars=True, which was removed"):
        network_config("a.ckpt", settings | {"residual_scalars": True})


def test_a_run_of_0_2_0_is_continued_without_a_word_and_exported(tmp_path, capfd):
    steps = ("curriculum.stages.smoke.steps=4", "checkpoint.every=2", "validation.every=0")
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    train_short_run(whole, *steps)
    train_short_run(run_dir, *steps, "trainer.max_steps=2")

    path = saved(run_dir / "checkpoints")[-1]
    content = last_checkpoint(run_dir)
    changes = {key: neutral(REMOVED[key]) for key in OF_RUNS if not {"hdf5", "disk"} & {*REMOVED[key].owners}}
    content["config"] = as_of_0_2_0(content["config"], changes)
    averages = content["callbacks"]["Averages"]
    averages["points"] = [averages["ema"], averages["ema"]]  # those of averages.last
    torch.save(content, path)

    export(str(run_dir), str(tmp_path / "old.ckpt"), "ema")
    weights = read_weights(tmp_path / "old.ckpt").tensors
    assert all(torch.equal(weights[name], weight) for name, weight in averages["ema"].items())
    with pytest.raises(ConfigError, match=r"^weights is 'last', which was removed .*; averages.ema=0.999 keeps"):
        read_weights(run_dir, "last")

    capfd.readouterr()
    train_short_run(run_dir, *steps)
    lines = capfd.readouterr().err.splitlines()
    assert not [line for line in lines if line.startswith(("changed", "warning"))]
    assert_same_end(whole, run_dir)
    assert last_checkpoint(run_dir)["callbacks"]["Averages"].keys() == {"ema", "since"}


def test_a_run_of_0_2_0_that_used_tables_twice_is_exported_but_not_continued(tmp_path):
    steps = ("curriculum.stages.smoke.steps=2", "checkpoint.every=1", "validation.every=0")
    train_short_run(tmp_path / "run", *steps, "trainer.max_steps=1")
    path = saved(tmp_path / "run/checkpoints")[-1]
    content = last_checkpoint(tmp_path / "run")
    content["config"] = as_of_0_2_0(content["config"], {"curriculum.stages.*.uses": 2})
    torch.save(content, path)
    with pytest.raises(ConfigError) as caught:
        train_short_run(tmp_path / "run", *steps)
    (line,) = caught.value.problems
    assert line.startswith(f"{path} has curriculum.stages.smoke.uses=2, which was removed in version 0.3.0; store ")
    export(str(tmp_path / "run"), str(tmp_path / "model.ckpt"))
