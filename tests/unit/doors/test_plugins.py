"""Plug-ins: files and packages outside this repository, named on the command line or installed."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import command
from configurations import problems
from plugin_folder import SOURCE, forget_plugins
from training_runs import read_metrics, read_rows, train_short_run

from tabicl_train import TabICLClassifier, plugins, register
from tabicl_train.config.compose import compose
from tabicl_train.config.options import EvaluateOptions
from tabicl_train.config.schema import configured_prior
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.identity import identity, identity_changes
from tabicl_train.model import TabICLConfig
from tabicl_train.stream.table_stream import TableStream
from tabicl_train.training.callbacks.build import build_callbacks
from tabicl_train.training.callbacks.callback import Callback, Callbacks, stateful
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.weights.pretrained import Pretrained
from tabicl_train.weights.reader import load_network

PAGE = Path(__file__).parents[3] / "tabicl_train/EXTEND.md"
POLYNOMIAL = PAGE.read_text().partition("```python\n# polynomial.py\n")[2].partition("```")[0]
STAGE = "curriculum.stages.smoke"
SMOKE = ["experiment=smoke", "trainer.accelerator=cpu", "stream.num_workers=0", "trainer.log_every=1"]


def test_a_file_brings_a_prior_a_rule_a_network_and_a_callback_without_yaml(fresh):
    settings = [*SMOKE, "plugins=[./mine.py]", "prior=ring", "prior.radius=1.2", "model=doubled", "model.factor=3"]
    settings += ["model.embed_dim=16", "model.col_num_blocks=1", "model.icl_num_blocks=1", "model.icl_scaling=power"]
    settings += ["+callbacks.lowest_loss={factor: 2}", f"run_dir={fresh}/run"]
    for steps in (2, 4):
        train_short_run(fresh / "run", *settings[len(SMOKE) :], f"trainer.max_steps={steps}", settings=SMOKE)
    losses = [2 * float(row["loss"]) for row in read_metrics(fresh / "run")]
    lowest = [float(row["lowest"]) for row in read_rows(fresh / "run/lowest_loss.csv")]
    assert lowest == pytest.approx([min(losses[: number + 1]) for number in range(4)])
    content = torch.load(fresh / "run/checkpoints/step-00000004.ckpt", weights_only=True)
    assert content["config"]["model"]["family"] == "doubled"
    assert "lowest_loss" in content["callbacks"]


def test_a_schedule_of_a_file_trains_and_resumes(fresh):
    (fresh / "other.py").write_text(POLYNOMIAL)
    settings = [*SMOKE, "plugins=[./other.py]", "prior=dummy", f"{STAGE}.schedule=polynomial", f"{STAGE}.warmup=0"]
    power = f"{STAGE}.schedule_options={{power: 3}}"
    for steps in (2, 4):
        train_short_run(fresh / "run", power, f"trainer.max_steps={steps}", settings=settings)
    stage = compose(["experiment=smoke"]).curriculum.stages["smoke"]
    peak, final = stage.learning_rate, stage.final_learning_rate
    expected = [final + (peak - final) * (1 - step / (stage.steps - 1)) ** 3 for step in range(4)]
    assert [float(row["lr"]) for row in read_metrics(fresh / "run")] == pytest.approx(expected)
    content = torch.load(fresh / "run/checkpoints/step-00000004.ckpt", weights_only=True)
    assert [plugin["uses"] for plugin in content["run"]["plugins"]] == [[["schedule", "polynomial"]]]
    with pytest.raises(ConfigError, match=r"is another run: .*schedule_options.power was 3, is 2"):
        train_short_run(fresh / "run", power.replace("3", "2"), settings=settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["prior=ring", "prior.radiu=2"], "prior.radiu: no such setting; did you mean prior.radius?"),
        (["model=doubled", "model.family=tabicl"], "model.family is 'tabicl'; it cannot be changed"),
        (["+callbacks.lowest_los={}"], "there is no callback 'lowest_los'; did you mean 'lowest_loss'?"),
        (["+callbacks.guard={}"], "callbacks.guard: settings of the run choose the built-in callbacks; leave it out"),
        (
            ["+callbacks.lowest_loss={factr: 1}"],
            "lowest_loss.factr: no such setting; did you mean callbacks.lowest_loss.factor?",
        ),
        (["+callbacks.lowest_loss={factor: big}"], "callbacks.lowest_loss.factor is 'big'; it must be of type float"),
        ([f"{STAGE}.schedule=wave"], f"{STAGE}.schedule: there is no schedule 'wave'; there are cosine, linear, wsd, "),
        (
            [f"{STAGE}.schedule=polynomial", f"{STAGE}.schedule_options={{powr: 1}}"],
            f"{STAGE}.schedule_options.powr: no such setting; did you mean {STAGE}.schedule_options.power?",
        ),
        (
            [f"{STAGE}.schedule=polynomial", f"+{STAGE}.schedule_options.power=0"],
            f"{STAGE}.schedule_options.power is 0.0; it must be positive",
        ),
        (
            [f"{STAGE}.schedule_options={{power: 1}}"],
            f"{STAGE}.schedule_options.power: no such setting; there are none",
        ),
        (["+requires_plugins=[absent]"], "the configuration needs plug-ins; if you trust them, add plugins=[absent]"),
    ],
)
def test_options_of_plug_ins_are_checked_like_ours(settings, words, fresh):
    (fresh / "other.py").write_text(POLYNOMIAL)
    (problem,) = problems(*SMOKE, "plugins=[./mine.py,./other.py]", *settings)
    assert words in problem


class Counts(Callback):
    """A callback whose state is a number."""

    def __init__(self):
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def test_callbacks_of_one_class_have_a_state_each(fresh):
    register.callback("one", Counts)
    register.callback("other", Counts)
    config = compose([*SMOKE, "prior=dummy", "+callbacks.one={}", "+callbacks.other={}"])
    context = SimpleNamespace(config=config, prior=configured_prior(config.prior), ranks=Ranks())
    *_, one, other = (callback for callback in build_callbacks(context) if isinstance(callback, Counts))
    Callbacks([one, other], context).load({"callbacks": {"one": {"number": 1}, "other": {"number": 2}}})
    assert (one.number, other.number) == (1, 2)
    assert stateful([one, other]) == {"one": one, "other": other}
    with pytest.raises(ConfigError, match="two callbacks have the state_name 'Counts'; give one of them another"):
        Callbacks([Counts(), Counts()], context)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x = 1 +", "SyntaxError: invalid syntax"),
        (
            "import nothing_of_this_name",
            r"ModuleNotFoundError: No module .* \(other.py, line 1\)",
        ),
        (
            SOURCE.replace('"ring"', '"mlp_scm"'),
            "two priors are called 'mlp_scm': .* and other:Ring",
        ),
        (SOURCE.replace('"power"', '"ssmax"'), "two scaling rules are called 'ssmax': .* and other:Power"),
    ],
)
def test_a_broken_plug_in_is_one_line(content, words, fresh):
    (fresh / "other.py").write_text(content)
    with pytest.raises(ConfigError, match=words) as error:
        plugins.load(["./other.py"])
    assert len(error.value.problems) == 1
    assert "\n" not in error.value.problems[0]
    assert "other" not in sys.modules


@pytest.mark.parametrize("source", ["./missing.py", "json.py", "no-name.py", "nothing_of_this_name"])
def test_files_and_modules_that_cannot_be_plug_ins_are_named(source, fresh):
    if source != "./missing.py":
        (fresh / "json.py").write_text("")
        (fresh / "no-name.py").write_text("")
    with pytest.raises(ConfigError, match=f"plugins: .*{source.removeprefix('./')}"):
        plugins.load([source])


def test_a_child_gets_absolute_paths_and_refuses_a_file_that_has_changed(fresh):
    (plugin,) = plugins.load(["./mine.py"])
    (argument,) = plugins.arguments()
    assert argument == f"plugins=[{fresh}/mine.py#{plugin.sha256[:16]}]"
    assert plugin.record() == {"module": "mine", "version": None, "sha256": plugin.sha256, "files": ["mine.py"]}
    assert plugins.take(["a=1", argument]) == ["a=1"]
    (fresh / "mine.py").write_text(SOURCE + "\n")
    with pytest.raises(ConfigError, match="has changed since the command"):
        plugins.take([argument])


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("import helper", ["helper.py"]),
        ("import json, torch, priors, helper as h", ["helper.py"]),  # folders of these names are not meant
        ("from helper import *", ["helper.py"]),
        ("def late():\n    from helper import x", ["helper.py"]),
        ("import chain", ["chain.py", "helper.py"]),
        ("from package.part import x", ["package/__init__.py", "package/part.py"]),
        ("from folder import part", ["folder/other.py", "folder/part.py"]),
        ("import importlib\nhelper = importlib.import_module('helper')", ["helper.py"]),
        ("register.network('made', 'helper:Net', settings='folder.other:Settings')", ["folder/other.py", "helper.py"]),
        ("run_path(Path(__file__).with_name('helper.py'))", ["helper.py"]),
        ("import mine\nx = 'a helper'", []),
        ("x = 1 +", []),
    ],
)
def test_modules_of_its_folder_that_a_loose_file_imports_belong_to_it(source, imported, fresh):
    modules = ["helper", "other", "json", "folder/part", "folder/other", "package/__init__", "package/part", "chain"]
    for name in [*modules, "priors/__init__"]:
        (fresh / name).parent.mkdir(exist_ok=True)
        (fresh / f"{name}.py").write_text("x = 1\n")
    (fresh / "chain.py").write_text("import helper, mine\n")
    (fresh / "folder/part.py").write_text("from . import other\n")
    (fresh / "mine.py").write_text(source)
    (before,) = plugins.find("./mine.py")
    assert before.files == ("mine.py", *imported)
    assert plugins.name_of(before.record()) == "mine.py"
    for name in imported:
        with open(fresh / name, "a") as file:
            file.write("x = 2\n")
        (after,) = plugins.find("./mine.py")
        assert after.sha256 != before.sha256
        before = after


def test_an_installed_plug_in_that_is_broken_fails_only_what_asks_for_it(fresh, monkeypatch):
    metadata = fresh / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tabicl_train.plugins]\nbroken = missing_module\nmine = mine\n")
    monkeypatch.syspath_prepend(fresh)
    with pytest.warns(RuntimeWarning, match="^the plug-in broken of the package broken cannot be imported"):
        assert compose([*SMOKE, "prior=ring"]).prior["name"] == "ring"
    (problem,) = problems(*SMOKE, "+callbacks.other={}")
    assert "the plug-in broken of the package broken cannot be imported: ModuleNotFoundError" in problem


@pytest.mark.slow  # with a kill in test_all_doors.py
def test_two_ranks_load_a_file_of_the_command(fresh):
    settings = [
        *SMOKE[:2],
        "plugins=./mine.py",
        "prior=ring",
        "optimizer=sgd",
        "run_dir=run",
        "trainer.devices=2",
        "trainer.max_steps=2",
    ]
    result = command("train", *settings)
    assert result.returncode == 0, result.stderr
    assert json.loads((fresh / "run/status.json").read_text())["status"] == "finished"
    again = command("export", "checkpoint=run", "output=hub")
    assert again.returncode == 0, again.stderr  # the prior is not needed


def test_registered_records_name_the_file_that_they_come_from(fresh):
    plugins.load(["./mine.py"])
    assert register.scaling.plugin("power") == "mine"
    assert register.scaling.plugin("ssmax") is None
    assert register.network.plugin("tabicl") is None
    assert dataclasses.is_dataclass(register.network["doubled"].settings)


def test_a_resume_with_another_file_is_refused_and_a_checkpoint_names_what_it_needs(fresh):
    settings = [*SMOKE[:2], "plugins=./mine.py", "prior=ring", "run_dir=run", "stream.num_workers=0", "optimizer=sgd"]
    assert command("train", *settings, "trainer.max_steps=2").returncode == 0
    content = torch.load(fresh / "run/checkpoints/step-00000002.ckpt", weights_only=True)
    (record,) = content["run"]["plugins"]
    assert record["module"] == "mine" and record["files"] == ["mine.py"]
    assert record["uses"] == [["prior", "ring"], ["optimizer", "sgd"]]
    assert str(fresh) not in str(record)
    with pytest.raises(ConfigError, match=r"run needs the plug-in nowhere \(prior ring\); add plugins=\[nowhere.py\]"):
        plugins.require([record | {"module": "nowhere", "files": ["nowhere.py"]}], {"prior"}, "run")
    plugins.require([record | {"module": "nowhere"}], {"network"}, "run")  # the prior is not needed

    (fresh / "mine.py").write_text(SOURCE + "\n")
    plugins._named.clear()
    sys.modules.pop("mine")
    refused = command("train", *settings)
    assert refused.returncode == 2
    assert "the hash of the plug-in mine was" in refused.stderr
    assert command("train", *settings, "resume.allow_changes=true", "trainer.max_steps=3").returncode == 0


def test_an_export_of_a_plug_in_is_scored_by_its_own_forward_and_needs_the_plug_in(fresh):
    settings = [*SMOKE[:2], "plugins=./mine.py", "model=doubled", "model.factor=3", "prior=dummy", "run_dir=run"]
    settings += [f"model.{name}" for name in ("embed_dim=16", "col_num_blocks=1", "row_num_blocks=1")]
    settings += ["model.icl_num_blocks=1", "model.col_num_inducing=4", "trainer.max_steps=2", "stream.num_workers=0"]
    assert command("train", *settings).returncode == 0
    result = command("export", "checkpoint=run", "output=hub", "plugins=./mine.py")
    assert result.returncode == 0, result.stderr
    network = load_network("hub")
    assert type(network).__name__ == "Doubled" and network.config.factor == 3

    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((40, 3)), np.arange(40) % 3
    shuffled = {"n_estimators": 1, "norm_methods": "none", "random_state": None}
    tripled = TabICLClassifier("hub", **shuffled).fit(X[:30], y[:30]).predict_proba(X[30:])
    network.config.factor = 1
    plain = TabICLClassifier(network, **shuffled).fit(X[:30], y[:30]).predict_proba(X[30:])
    expected = plain**3 / (plain**3).sum(1, keepdims=True)  # three times the logits
    np.testing.assert_allclose(tripled, expected, rtol=1e-3)

    for kind, name in (
        ("network", "doubled"),
        ("scaling", "power"),
        ("callback", "lowest_loss"),
        ("optimizer", "sgd"),
    ):
        getattr(register, kind)._entries.pop(name)
    plugins._named.clear()
    sys.modules.pop("mine")
    for source in ("hub", "run"):
        with pytest.raises(ConfigError, match=r"needs the plug-in mine \(network doubled\); add plugins=\[mine.py\]"):
            load_network(source)


def test_a_file_of_values_for_a_network_without_its_plug_in_says_what_to_add(fresh):
    (fresh / "model").mkdir()
    text = "defaults: [tiny, override /model/schema@_global_.model: tripled]\n"
    (fresh / "model/mine.yaml").write_text(text)
    with pytest.raises(
        ConfigError, match=r"there is no network 'tripled'; .*; if a plug-in registers it, add plugins="
    ):
        compose(["experiment=smoke", "model=mine"], str(fresh))


STORED = """
import numpy as np

from priors import Prior
from tabicl_train import register


@register.prior("stored")
class Stored(Prior):
    stored_sizes = np.array([[40, 20, 30], [600, 20, 50]])
    stored_classes = 3
"""


def test_a_prior_of_stored_sizes_gets_the_checks_of_a_file_of_tables(fresh):
    (fresh / "other.py").write_text(STORED)
    settings = ["experiment=smoke", "plugins=[./other.py]", "prior=stored", "validation.every=0"]
    with pytest.raises(ConfigError) as error:
        compose([*settings, "model.max_classes=2"])
    assert error.value.problems == [
        "curriculum.stages.smoke: the stored tables have other sizes; set curriculum.stages.smoke.rows=[40,600] "
        "curriculum.stages.smoke.features=[30,50] curriculum.stages.smoke.train_share=[0.033,0.5]",
        "model.max_classes is 2, but the stored tables of prior=stored have up to 3 classes",
    ]
    with pytest.raises(ConfigError, match=r"validation.rows is .* since prior=stored stores only"):
        compose([*settings, "validation.every=2", "validation.rows=[64]"])
    with pytest.raises(ConfigError, match=r"components.stored: its tables have sizes of their own"):
        compose([*settings[:2], "prior=mix_scm", "+prior.components.stored={weight: 1}"])
    with pytest.raises(ConfigError, match="rows: stored tables have their own sizes"):
        TableStream("stored", rows=50)


def test_scores_are_those_of_the_code_of_the_suite(fresh):
    found = []
    for value in (1, 2):
        forget_plugins()
        (fresh / "mine.py").write_text(
            f"from tabicl_train import register\n@register.suite('made')\ndef made(folder, numbers): return [{value}]\n"
        )
        plugins.load("./mine.py")
        found.append(identity(EvaluateOptions(suite="made"), Pretrained(TabICLConfig(), {}), []))
    assert identity_changes(*found) == ["the code of mine changed"]
