"""From command lines to runs."""

import re
from pathlib import Path

import pytest
from command_line import command
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import FloatDistribution, IntDistribution
from tiers import slow_except

from tabicl_train.config.compose import compose, group_choices, search_folders
from tabicl_train.config.schema import RunConfig
from tabicl_train.errors import ConfigError, install
from tabicl_train.sweep import jobs
from tabicl_train.sweep.plan import Plan, make_plan
from tabicl_train.sweep.space import axis_of_space, examples, label
from tabicl_train.training.planning import expected_work


def plan_problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make_plan(["experiment=smoke", *overrides])
    return caught.value.problems


@pytest.fixture
def own_sweep(tmp_path):
    """Writes a sweep of a user's own, and returns the options for it."""

    def write(text: str) -> tuple:
        (tmp_path / "sweep").mkdir(exist_ok=True)
        (tmp_path / "sweep/own.yaml").write_text(text)
        return (str(tmp_path),)

    return write


def grid_of(*overrides: str, files: tuple = ()) -> tuple[Plan, list[RunConfig]]:
    """A plan, and what tabicl-train composes from the arguments of its runs."""
    plan = make_plan(list(overrides), *files)
    first_setting = 2 if files else 0  # after --config-dir FOLDER
    configs = []
    for point in plan.points:
        for seed in plan.sweep.seeds:
            arguments = plan.arguments(point, seed)
            configs.append(compose(arguments[first_setting:], *files))
    return plan, configs


def test_runs_have_the_settings_of_their_points(tmp_path, own_sweep):
    files = own_sweep(
        "settings: [experiment=smoke, trainer.max_steps=3, optimizer=adamw]\n"
        "space:\n"
        "  width: {wide: [model.embed_dim=32, trainer.max_steps=2]}\n"
        "  prior: [mlp_scm, dummy]\n"
        "  curriculum.stages.smoke.rows: [[40, 50], [50, 60]]\n"
        "seeds: [3, 4]\n"
    )
    folder = f"run_dir='{tmp_path}/it\\'s, here'"
    plan, configs = grid_of("sweep=own", folder, "optimizer=muon", files=files)
    assert plan.arguments(plan.points[0], 3)[:2] == ["--config-dir", str(tmp_path)]
    assert plan.folder == tmp_path / "it's, here" and plan.total == 4
    assert {(config.prior["name"], config.seed) for config in configs} == {
        (prior, seed) for prior in ("mlp_scm", "dummy") for seed in (3, 4)
    }
    for config in configs:
        assert config.model.embed_dim == 32
        assert config.trainer.max_steps == 2
        assert config.optimizer.name == "muon"
    name = plan.run_dir(7, plan.points[0], 3).name
    assert name == "007_prior-mlp_scm_rows-40-50_width-wide_seed-3"
    assert name == plan.run_dir(7, dict(reversed(plan.points[0].items())), 3).name


def test_settings_of_the_command_line_win_and_replace_axes(own_sweep):
    files = own_sweep(
        "settings: [experiment=smoke]\nspace: {optimizer: [muon, adamw], optimizer.momentum: [0.5, 0.9]}\n"
    )
    assert make_plan(["sweep=own"], *files).total == 4
    assert make_plan(["sweep=own", "optimizer=muon_all"], *files).total == 2
    assert make_plan(["sweep=own", "optimizer.momentum=0.1,0.2,0.3"], *files).total == 6


def test_labels_of_a_sweep_can_be_chosen(own_sweep):
    labels = "{one: [optimizer=muon], no two: [optimizer=adamw], three: [optimizer=muon_all]}"
    files = own_sweep(f"settings: [experiment=smoke]\nspace: {{way: {labels}}}\n")
    plan, configs = grid_of("sweep=own", 'way="no two",one', files=files)
    assert plan.points == [{"way": "one"}, {"way": "no two"}]  # in the order of the file
    assert [config.optimizer.name for config in configs] == ["muon", "adamw"]
    with pytest.raises(ConfigError, match="way has no label four; it must be one of one, no two, three"):
        make_plan(["sweep=own", "way=four"], *files)


def test_a_new_stage_and_its_values_can_vary():
    plan, configs = grid_of("experiment=smoke", "+curriculum.stages.long.steps=5,6")
    assert [config.curriculum.stages["long"].steps for config in configs] == [5, 6]
    assert plan.axes[0].key == "curriculum.stages.long.steps"


def test_runs_logged_to_wandb_form_a_group_and_are_named_after_point_and_seed():
    options = ["wandb.mode=offline", "sweep.name=mine", "optimizer.momentum=0.8,0.9", "seed=0,1"]
    _, configs = grid_of("experiment=smoke", *options)
    names = ["momentum-0.8_seed-0", "momentum-0.8_seed-1", "momentum-0.9_seed-0", "momentum-0.9_seed-1"]
    assert [(config.wandb.group, config.wandb.name) for config in configs] == [("mine", name) for name in names]
    _, configs = grid_of("experiment=smoke", *options, "wandb.name=x", "wandb.group=y")
    assert {(config.wandb.group, config.wandb.name) for config in configs} == {("y", "x")}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["sweep.sampler=gird", "sweep.trails=3", "sweep.jobs=0"],
            ["sweep.jobs is 0", "sweep.sampler is 'gird'", "sweep.trails: no such setting; did you mean sweep.trials?"],
        ),
        (["sweep.seeds=0,1"], ["sweep.seeds=0,1: this setting of the sweep takes one value; a list needs brackets"]),
        (["sweep=nothing"], ["sweep=nothing: there is no such choice; there are haystack, ladder, "]),
        (["seed=0,-1,x"], ["seed=0,-1,x: a seed must be a whole number"]),
        (["seed=0,123456789012345678901234567890"], ["seed=0,123456789012345678901234567890: a seed must be a whole"]),
        (["sweep.seeds=[0,18446744073709551616]"], ["sweep.seeds is [0, 18446744073709551616]"]),
        (["seed=range(0,1000000000)"], ["seed=range(0,1000000000): it has more than 10,000 values"]),
        (["optimizer.eps=range(0,1e30)"], ["optimizer.eps=range(0,1e30): it has more than 10,000 values"]),
        (["optimizer.eps=range(0.0,1.0,0)"], ["optimizer.eps=range(0.0,1.0,0): the step of a range must not be 0"]),
        (
            ["optimizer.eps=range(1,2,0.001)", "optimizer.momentum=range(0.1,0.9,0.001)", "seed=0,1"],
            ["the grid has 1,602,000 runs; it must have at most"],
        ),
        (["optimizer.momentum=interval(0,0.9)"], ["optimizer.momentum is a range; sweep.sampler=grid needs a list"]),
        (
            ["guard.loss=interval(1,inf)", "sweep.sampler=random"],
            ["guard.loss=interval(1,inf): low and high must be finite", "sweep.sampler is 'random', but nothing"],
        ),
        (
            ["optimizer.momentum=interval(0.9,0)", "sweep.sampler=random"],
            [
                "optimizer.momentum=interval(0.9,0): low and high must be",
                "sweep.sampler is 'random', but nothing varies",
            ],
        ),
        (["sweep.metric=real/loss", "seed=0,1"], ["sweep.metric is 'real/loss', but validation.every is 0"]),
        (["sweep.metric=lss"], ["sweep.metric is 'lss'; there is no such metric; did you mean loss?"]),
        (["trainer.requeue=true"], ["trainer.requeue is true, but a sweep restarts its runs itself"]),
        (["run_dir=a,b"], ["run_dir=a,b: run_dir is the folder of the whole sweep"]),
        (["run_dir=a/${seed}"], ["run_dir=a/${seed}: run_dir is the folder of the whole sweep; write it without"]),
        (
            ["sweep.space.optimizer=[muon]"],
            ["sweep.space.optimizer=[muon]: on the command line, write KEY=VALUE,VALUE or KEY=interval(LOW,HIGH) for"],
        ),
        (
            ["sweep.submit.partition=gpu"],
            ["sweep.submit.cluster is 'local', where the other options of submit have no"],
        ),
        (["sweep.submit.cluster=slurm", "trainer.devices=2"], ["trainer.devices is 2; leave it out"]),
        (["sweep.pruner=median"], ["sweep.pruner is 'median', which needs a metric of validation"]),
    ],
)
def test_everything_wrong_is_reported_at_once(overrides, expected):
    found = plan_problems(*overrides)
    assert len(found) == len(expected), found
    assert all(line.startswith(start) for line, start in zip(sorted(found), sorted(expected), strict=True)), found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name: caf\xe9\n", "own.yaml is not UTF-8 text: line 1 has the byte 0xe9; save it as UTF-8"),
        (b"seeds: [1\nname: }", "own.yaml is not valid YAML: expected ',' or ']', but got ':' in line 2"),
        (b"5", "own.yaml has no settings; write lines of the form KEY: VALUE into it, or leave out sweep=own"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(content, words, tmp_path, own_sweep):
    files = own_sweep("")
    (tmp_path / "sweep/own.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        make_plan(["sweep=own", "experiment=smoke"], *files)
    (problem,) = caught.value.problems
    assert problem.removeprefix("sweep=own: ") == f"{tmp_path}/sweep/{words}"


def test_without_its_packages_a_sweep_names_the_extra(monkeypatch):
    monkeypatch.setattr("tabicl_train.errors.is_installed", lambda name: name != "optuna")
    result = command("sweep", "experiment=smoke", "seed=0,1")
    assert result.returncode == 2
    assert re.search(r"sweeps need optuna: .*\[sweep\]", result.stderr)


def test_only_a_sweep_on_slurm_needs_submitit(monkeypatch):
    monkeypatch.setattr("tabicl_train.sweep.plan.is_installed", lambda name: name != "submitit")
    assert plan_problems("sweep.submit.cluster=slurm") == [
        f"sweep.submit.cluster is 'slurm', which needs submitit: {install('submitit', 'slurm')}"
    ]


def test_a_run_takes_no_settings_of_a_sweep(tmp_path):
    with pytest.raises(ConfigError, match=r"sweep\.jobs=2: a setting of tabicl-sweep"):
        compose(["experiment=smoke", "sweep.jobs=2"])
    (tmp_path / "config.yaml").touch()
    assert "a run directory" in plan_problems(f"run_dir={tmp_path}")[0]


@pytest.mark.parametrize(
    "entry",
    [3, "x", [], {"low": 1}, {"a": 3}, {"a": ["b", 1]}, {}, {"low": 1, "high": 2, "lg": True},
     {"low": "few", "high": 3}, {"low": 2, "high": 1}, {"low": 0, "high": 1.0, "log": True}],
)  # fmt: skip
def test_an_entry_that_is_no_axis(entry):
    with pytest.raises(ValueError, match="key is "):
        axis_of_space("key", entry)


def test_ranges_are_distributions_of_optuna():
    whole = axis_of_space("a", {"low": 1, "high": 64, "log": True})
    assert whole.distribution == IntDistribution(1, 64, log=True)
    assert whole.overrides(8) == ["a=8"]

    real = axis_of_space("b", {"low": 0, "high": 1.0})
    assert real.distribution == FloatDistribution(0, 1)
    assert real.overrides(0.1) == ["b=0.1"]

    points = examples([whole, axis_of_space("c", ["x", "y", "z"])])
    assert {point["a"] for point in points} == {1, 64}
    assert {point["c"] for point in points} == {"x", "y", "z"}


@pytest.mark.parametrize("values", [[1, True], [[1, 2], [3]], [{"a": 1}, {"a": 2}], [0.5, None, "x"]])
def test_values_of_any_kind_are_what_tabicl_train_reads(values):
    axis = axis_of_space("key", values)
    settings = [axis.overrides(choice)[0] for choice in axis.choices]
    assert [OverridesParser.create().parse_override(text).value() for text in settings] == values


@pytest.mark.parametrize(
    "text", ["plain", "a/b c", "it's", "back\\slash", "end\\", 'a "word"', "caf\u00e9", "a,b=c", "$x", ""]
)
def test_a_text_in_a_space_is_what_tabicl_train_reads(text):
    (setting,) = axis_of_space("key", [text]).overrides(text)
    assert OverridesParser.create().parse_override(setting).value() == text


def test_a_label_can_be_part_of_a_file_name():
    assert label({"prior.folder": "a/b c", "x": 0.123456789}) == "folder-a-b-c_x-0.1235"
    assert len(label({"prior.folder": "a" * 400, "x": 1.0})) == 150


SHIPPED = group_choices(search_folders(None))["sweep"]
MANY_POINTS = {"long_rows", "prior_mixtures"}  # a CPU second each


@pytest.mark.parametrize("name", slow_except(SHIPPED, {*SHIPPED} - MANY_POINTS))
def test_every_shipped_sweep_composes(name):
    plan = make_plan([f"sweep={name}"])
    assert plan.sweep.name == name and plan.folder == Path("runs", name)
    assert plan.total == len(plan.configs)
    assert plan.total * len(plan.sweep.seeds) >= 6
    if name == "learning_rate_width":
        flops = [expected_work(c.curriculum.stages["stage1"], c.model, c.seed).flops for c in plan.configs]
        assert max(flops) / min(flops) < 1.03, "the compute is not the same"


@pytest.mark.parametrize(
    ("overrides", "cores", "gpus", "expected"),
    [
        (["stream.num_workers=0"], 4, None, [""] * 4),
        ([], 4, None, [""] * 2),  # a run and its worker
        (["trainer.devices=2"], 2, None, [""]),
        (["sweep.jobs=3"], 1, None, [""] * 3),
        ([], 16, "2,3,5", ["2", "3", "5"]),
        (["trainer.devices=2"], 16, "2,3,5,6", ["2,3", "5,6"]),
        (["sweep.jobs=3"], 16, "4,7", ["4", "7", "4"]),
        (["sweep.submit.cluster=slurm", "seed=0,1", "optimizer=muon,adamw"], 1, None, [""] * 4),
    ],
)
def test_places_for_runs_at_once(overrides, cores, gpus, expected, monkeypatch):
    plan = make_plan(["experiment=smoke", *overrides])
    monkeypatch.setattr(jobs, "num_cores", lambda: cores)
    monkeypatch.setattr(jobs, "uses_cuda", lambda settings: gpus is not None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus or "")
    assert jobs.slots(plan) == expected
