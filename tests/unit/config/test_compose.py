import dataclasses
from unittest import mock

import pytest
from configurations import list_experiments

from tabicl_train.config import build as building
from tabicl_train.config import compose as composing
from tabicl_train.config.compose import CONFIG_DIR, compose, search_folders
from tabicl_train.config.schema import StageConfig, configured_prior, flatten
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import TabICLConfig
from tabicl_train.training.checks import check_machine
from tabicl_train.training.distributed.processes import Launch
from tabicl_train.training.planning import settings_without_effect

FILES = [file for folder in search_folders(None) for file in sorted(folder.glob("*/*.yaml"))]
FILES = [file for file in FILES if file.parent.name != "sweep"]  # in tests/unit/sweep
EXPERIMENTS = "".join(file.read_text() for file in FILES if file.parent.name == "experiment")
# They do not compose without tables: their own tests have some.
NEED_TABLES = (
    *("prior/hdf5", "prior/tables", "prior/one_table"),
    *("experiment/fine_tune", "experiment/own_tables"),
)
CHOICES = [
    file
    for file in FILES
    if f"{file.parent.name}/{file.stem}" not in NEED_TABLES
    and f"override /{file.parent.name}: {file.stem}\n" not in EXPERIMENTS
]
NEEDS = {"sequence": "curriculum=sequences", "linear_functions": "model.max_classes=0"}  # by the start of a choice


@pytest.mark.parametrize("file", CHOICES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_yaml_composes(file):
    """An experiment, with the files that it names; it says what it costs, and on which hardware."""
    group, choice = file.parent.name, file.stem
    needed = [setting for start, setting in NEEDS.items() if choice.startswith(start) and group in ("model", "prior")]
    config = compose([f"{group}={choice}", *needed])
    if group == "experiment":
        comment = file.read_text().partition("defaults:")[0]
        steps, tables = config.total_steps, config.curriculum.tables_before(config.total_steps)
        assert f"Cost: {steps:,} steps" in comment
        assert "FLOPs" in comment
        assert "Hardware: " in comment
        assert f"{tables:,} tables" in comment or f"{tables / 1e6:.0f} million tables" in comment
    assert config.total_steps > 0
    assert settings_without_effect(config) == []


def test_the_model_that_is_chosen_is_not_mixed_with_that_of_the_experiment():
    assert compose(["experiment=tabicl_v1", "model=tabicl_v2"]).model == TabICLConfig()
    regressor = compose(["experiment=mini", "task=regression", "model=tiny"]).model
    assert regressor == dataclasses.replace(compose(["model=tiny"]).model, max_classes=0)


def test_a_run_composes_once_and_builds_its_prior_once():
    with (
        mock.patch.object(composing, "hydra_compose", wraps=composing.hydra_compose) as composed,
        mock.patch.object(building, "build", wraps=building.build) as built,
    ):
        wrong = ["experiment=smoke", "prior=needle", "model.embed_dm=3", "trainer.devices=x", "seed=-1", "a=1"]
        with pytest.raises(ConfigError) as caught:
            compose(wrong)
        assert len(caught.value.problems) == 4
        assert (composed.call_count, built.call_count) == (1, 1)
        config = compose(["experiment=smoke", "prior=needle", "seed=3"])
        check_machine(config, Launch())
        prior = configured_prior(config.prior)
        assert prior.needles == config.prior["needles"]
        assert (composed.call_count, built.call_count) == (1, 2)
    composed_again = compose(["experiment=smoke", "prior=needle"])
    assert configured_prior(composed_again.prior) is not prior, "its files may have changed"
    assert configured_prior(config.prior | {"needles": 2}).needles == 2


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


def test_a_folder_of_own_configurations_is_searched_too(own_configs):
    option = {"config_dir": str(own_configs)}
    assert list(compose(["experiment=own"], **option).curriculum.stages) == ["only"]
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=own", "model.embed_dm=3", "curriculum.stages.only.steps=4"], **option)
    assert caught.value.problems == ["model.embed_dm: no such setting; did you mean model.embed_dim?"]
    with pytest.raises(ConfigError, match=list_experiments("own")):
        compose(["experiment=ow"], **option)
    with pytest.raises(ConfigError, match="--config-dir is 'nowhere'; there is no such folder"):
        compose([], "nowhere")
    (own_configs / "curriculum/own.yaml").write_text("stages: {other: {steps: 3, rows: [40, 50], tables: 4}}\n")
    assert list(compose(["experiment=own"], **option).curriculum.stages) == ["other"], "the file as it was before"


def test_files_of_a_folder_with_names_of_ours_are_ignored_which_a_line_says_once(tmp_path, capsys):
    for name in ("model/tiny", "model/base", "model/mine", "experiment/demo", "sweep/ladder"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text("seed: 7\n")
    (tmp_path / "model/base.yaml").write_bytes((CONFIG_DIR / "model/base.yaml").read_bytes())
    expected = compose(["experiment=smoke", "model=tiny"])
    for _ in range(2):
        assert compose(["experiment=smoke", "model=tiny"], str(tmp_path)) == expected
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning   files in {tmp_path} with the names of built-in files are ignored")
    assert line.endswith(": experiment/demo.yaml, model/tiny.yaml, sweep/ladder.yaml")


def test_values_that_hydra_cannot_read_are_quoted():
    for value in ("runs/a(1)", "runs/a=b", "it's", "über/dir", "a [b]", "runs/a+b", "$dir", "{a}"):
        override = f"run_dir={value}" if value != "{a}" else "run_dir=x{a}"
        assert compose(["experiment=smoke", override]).run_dir == override.removeprefix("run_dir=")
    config = compose(["experiment=smoke", "name=a(b)"])
    assert (config.name, config.run_dir) == ("a(b)", "runs/a(b)")


def test_the_task_is_a_property_of_the_model():
    config = compose(["experiment=demo", "task=regression"])
    assert config.model.is_regression and config.model.embed_dim == 48
    guard = config.guard
    assert compose(["experiment=demo_regression", "guard.loss=0.3"]).guard == dataclasses.replace(guard, loss=0.3)
    assert compose(["task=regression", "validation.suites=[]", "model.num_quantiles=9"]).model.outputs == 9
    regressor, classifier = (compose([f"experiment={name}"]) for name in ("tabicl_v2_regression", "tabicl_v2"))
    assert regressor.model == TabICLConfig(max_classes=0, bias_free_ln=True)
    assert regressor.guard.loss == guard.loss
    assert regressor.curriculum == classifier.curriculum
    assert regressor.optimizer == classifier.optimizer


def test_the_recipe_of_tabicl_v2_is_the_published_one_as_its_replication_corrects_it():
    stable, published, pilot = (
        flatten(dataclasses.asdict(compose([f"experiment=tabicl_v2{name}"]))) for name in ("", "_published", "_pilot")
    )
    per_stage = {"warmup": (0.01, 0.02), "weight_decay": (0.01, 0.1)}
    expected = {
        f"curriculum.stages.stage{number}.{key}": values for number in (1, 2, 3) for key, values in per_stage.items()
    } | {
        "curriculum.stages.stage1.col_attention_fp32": (None, "auto"),
        "optimizer.name": ("muon_all", "muon"),
        "optimizer.momentum": (0.9, 0.95),
        "optimizer.adamw_factor": (1.0, 0.125),
        "curriculum.rank_costs": ([], [200, 2400, 0.38]),
        "guard.action": ("warn", "rewind"),
        "guard.after": (5000, 10_000),
        "trainer.log_every": (10, 50),
        "name": ("tabicl_v2_published", "tabicl_v2"),
        "run_dir": ("runs/tabicl_v2_published", "runs/tabicl_v2"),
    }
    assert {key: (published[key], stable[key]) for key in stable if published[key] != stable[key]} == expected
    assert compose(["experiment=tabicl_v2_pilot"]).total_steps == 20_000
    of_the_run = ("name", "run_dir", "trainer.max_steps", "checkpoint.permanent_every", "validation.every")
    assert {key for key in stable if stable[key] != pilot[key]} == set(of_the_run)  # so that tabicl_v2 continues it


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model.num_quantiles=99"], "model.num_quantiles has no effect, since max_classes is 10; regression has 0"),
        (["task=regression", "prior=needle"], "prior=needle draws classes only, but model.max_classes=0 is"),
        (["task=regression", "prior=mix_scm", "+prior.components.needle.weight=1"], "prior=mix_scm draws classes only"),
    ],
)
def test_contradictions_of_the_task_are_refused(overrides, problem):
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=smoke", *overrides])
    (found,) = caught.value.problems
    assert found.startswith(problem)
