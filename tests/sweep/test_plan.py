"""From command lines to jobs."""

import re
from pathlib import Path

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from scipy import stats

from tabicl_train.config.compose import CONFIG_DIR, compose
from tabicl_train.errors import ConfigError
from tabicl_train.planning.run_plan import expected_work
from tabicl_train.sweep.plan import make_plan
from tabicl_train.sweep.space import Choices, Range, axis_of_space, example_points, label, random_point


def names(*overrides: str) -> list[str]:
    return [job.name for job in make_plan(["experiment=smoke", *overrides])[1]]


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make_plan(["experiment=smoke", *overrides])
    return caught.value.problems


@pytest.fixture
def own_sweep(tmp_path):
    """Writes a sweep of a user's own, and returns the options for it."""

    def write(text: str) -> tuple:
        (tmp_path / "sweep").mkdir(exist_ok=True)
        (tmp_path / "sweep/own.yaml").write_text(text)
        return "train", None, str(tmp_path)

    return write


def test_names_tell_the_settings_whatever_their_order():
    found = names("optimizer=muon,adamw", "seed=0,1", "curriculum.stages.smoke.learning_rate=1e-2,0.002")
    assert [name[:-9] for name in found[:3]] == [
        "learning_rate-0.01_optimizer-muon_seed-0",
        "learning_rate-0.01_optimizer-muon_seed-1",
        "learning_rate-0.002_optimizer-muon_seed-0",
    ]
    assert len(set(found)) == 8 and all(re.fullmatch(r".+-[0-9a-f]{8}", name) for name in found)
    reordered = names("curriculum.stages.smoke.learning_rate=0.002,0.01", "seed=1,0", "optimizer=adamw,muon")
    assert sorted(found) == sorted(reordered)


def test_a_fingerprint_follows_what_decides_results_and_nothing_else():
    def end(*overrides):
        (name,) = names(*overrides)
        return name[-8:]

    plain = end()
    for harmless in (
        "run_dir=elsewhere",
        "stream.num_workers=3",
        "checkpoint.every=7",
        "trainer.log_every=5",
        "name=x",
    ):
        assert end(harmless) == plain, harmless
    for other in ("seed=1", "trainer.max_steps=3", "model.embed_dim=32", "validation.every=5", "prior=dummy"):
        assert end(other) != plain, other
    assert end("guard.action=rewind", "checkpoint.every=7") != end("guard.action=rewind")


def test_jobs_are_what_tabicl_train_composes_from_their_arguments(tmp_path, own_sweep):
    files = own_sweep(
        "settings: [experiment=smoke, trainer.max_steps=3, optimizer=adamw]\n"
        "space:\n"
        "  width: {narrow: [model.embed_dim=16], wide: [model.embed_dim=32, trainer.max_steps=2]}\n"
        "  prior: [mlp_scm, dummy]\n"
        "  curriculum.stages.smoke.rows: [[40, 50], [50, 60]]\n"
        "seeds: [3, 4]\n"
    )
    plan, jobs = make_plan(["sweep=own", f"run_dir='{tmp_path}/it\\'s, here'", "optimizer=muon", "width=wide"], *files)
    assert len(jobs) == 1 * 2 * 2 * 2 and plan.folder == tmp_path / "it's, here"
    for job in jobs:
        assert job.arguments[:2] == ["--config-dir", str(tmp_path)]
        assert compose(job.arguments[2:], *files) == job.config
        assert job.config.model.embed_dim == 32 and job.config.trainer.max_steps == 2
        assert job.config.optimizer.name == "muon" and job.config.seed == job.seed
        assert job.params["width"] == "wide" and job.params["prior"] == job.config.prior["name"]
        assert job.config.run_dir == str(job.folder) and job.folder.parent == plan.folder
    assert jobs[0].name.startswith("prior-mlp_scm_rows-40-50_width-wide_seed-3-")


def test_settings_of_the_command_line_win_and_replace_axes(own_sweep):
    files = own_sweep(
        "settings: [experiment=smoke]\nspace: {optimizer: [muon, adamw], optimizer.momentum: [0.5, 0.9]}\n"
    )
    assert len(make_plan(["sweep=own"], *files)[1]) == 4
    assert len(make_plan(["sweep=own", "optimizer=muon_all"], *files)[1]) == 2
    assert len(make_plan(["sweep=own", "optimizer.momentum=0.1,0.2,0.3"], *files)[1]) == 6


def test_settings_of_the_command_line_win_over_those_behind_labels(own_sweep):
    files = own_sweep(
        "settings: [experiment=smoke, optimizer=adamw]\n"
        "space: {width: {narrow: [model.embed_dim=16, trainer.max_steps=3, optimizer=muon]}}\n"
    )
    (job,) = make_plan(["sweep=own", "trainer.max_steps=2", "optimizer=muon_all"], *files)[1]
    assert (job.config.model.embed_dim, job.config.trainer.max_steps) == (16, 2)
    assert job.config.optimizer.name == "muon_all" and job.overrides.count("trainer.max_steps=2") == 1


def test_a_new_stage_and_its_values_can_vary():
    plan, jobs = make_plan(["experiment=smoke", "+curriculum.stages.long.steps=5,6"])
    assert [job.config.curriculum.stages["long"].steps for job in jobs] == [5, 6]
    assert plan.axes[0].key == "curriculum.stages.long.steps" and jobs[0].name.startswith("steps-5_seed-0-")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["sweep.method=gird", "sweep.trails=3", "sweep.jobs=0"],
            ["sweep.jobs is 0", "sweep.method is 'gird'", "sweep.trails: no such setting; did you mean sweep.trials?"],
        ),
        (
            ["sweep.method=gird", "sweep.trials=0", "model.embed_dm=1,2"],
            ["sweep.method is 'gird'", "sweep.trials is 0", "model.embed_dm: no such setting"],
        ),
        (["sweep.seeds=0,1"], ["sweep.seeds=0,1: this setting of the sweep has one value; a list needs brackets"]),
        (["sweep=nothing"], ["sweep=nothing: there is no such choice; there are learning_rate_width"]),
        (["seed=0,-1,x"], ["seed=0,-1,x: a seed must be a whole number"]),
        (["optimizer.momentum=interval(0,0.9)"], ["optimizer.momentum is a range; sweep.method=grid needs a list"]),
        (["optimizer.momentum=interval(0.9,0)", "sweep.method=random"], ["sweep.space.optimizer.momentum has low 0.9"]),
        (["sweep.method=random"], ["sweep.method is 'random', but nothing varies"]),
        (["sweep.metric=real/loss", "seed=0,1"], ["sweep.metric is 'real/loss', but validation.every is 0"]),
        (["sweep.metric=lss"], ["sweep.metric is 'lss'; there is no such metric; did you mean loss?"]),
        (["trainer.nodes=2"], ["trainer.nodes is 2; a job of a sweep runs on one machine"]),
        (["preflight=true"], ["preflight is true, but a sweep trains"]),
        (["trainer.requeue=true"], ["trainer.requeue is true, but a sweep itself starts its jobs again"]),
        (["run_dir=a,b"], ["run_dir=a,b: run_dir is the folder of the whole sweep"]),
        (["run_dir="], ["run_dir=: run_dir is empty; name the folder of the sweep"]),
        (["run_dir=null"], ["run_dir=null: run_dir is empty; name the folder of the sweep"]),
        (["sweep.space.optimizer=[muon]"], ["sweep.space.optimizer=[muon]: on the command line, KEY=VALUE,VALUE"]),
        (["sweep.slurm={partition: gpu}"], ["sweep.slurm has no effect with executor=local"]),
    ],
)
def test_everything_wrong_is_reported_at_once(overrides, expected):
    found = problems(*overrides)
    assert len(found) == len(expected), found
    assert all(line.startswith(start) for line, start in zip(sorted(found), sorted(expected), strict=True)), found


@pytest.mark.parametrize(
    ("override", "setting"),
    [
        ("hydra/launcher=submitit_slurm", "sweep.executor=slurm"),
        ("hydra/launcher=joblib", "sweep.jobs=N"),
        ("hydra/launcher=ray", "sweep.executor=ray"),
        ("hydra/sweeper=optuna", "sweep.method=tpe"),
        ("hydra.sweeper.n_trials=3", "sweep.trials=N"),
        ("hydra.launcher.n_jobs=3", "sweep.jobs=N"),
        ("hydra.sweep.dir=runs/x", "run_dir=FOLDER"),
        ("hydra.mode=MULTIRUN", "tabicl-sweep"),
    ],
)
def test_plugins_of_hydra_are_refused_with_what_does_the_same(override, setting):
    (found,) = problems(override)
    assert found.startswith(f"{override}: ") and setting in found
    with pytest.raises(ConfigError, match=re.escape(setting)):
        compose(["experiment=smoke", override])


def test_a_run_takes_no_settings_of_a_sweep(tmp_path):
    with pytest.raises(ConfigError, match=r"sweep\.jobs=2: a setting of tabicl-sweep"):
        compose(["experiment=smoke", "sweep.jobs=2"])
    (tmp_path / "config.yaml").touch()
    assert "the folder of a run" in problems(f"run_dir={tmp_path}")[0]


@pytest.mark.parametrize("entry", [3, "x", {"low": 1}, {"a": 3}, {"a": ["b"]}, {}, {"low": 1, "high": 2, "lg": True}])
def test_an_entry_that_is_no_axis(entry):
    assert str(axis_of_space("key", entry)).startswith(f"key is {entry!r}; it must be a list")


def test_a_range_of_words_is_no_range():
    axis = axis_of_space("key", {"low": "few", "high": 3, "integer": True})
    assert axis.problems() == ["key needs low and high, two numbers"]


@pytest.mark.parametrize(
    "text", ["plain", "a/b c", "it's", "back\\slash", "end\\", 'a "word"', "caf\u00e9", "a,b=c", "$x", ""]
)
def test_a_text_in_a_space_is_what_tabicl_train_reads(text):
    axis = axis_of_space("key", [text])
    (setting,) = axis.settings(text)
    assert OverridesParser.create().parse_override(setting).value() == text


def test_random_points_do_not_depend_on_order_number_or_other_axes():
    axes = [Range("a", 1, 100, log=True), Choices("b", {"x": "x", "y": "y"}, {}), Range("c", 2, 5, integer=True)]
    points = [random_point(axes, index) for index in range(2000)]
    assert [random_point(axes[::-1], index) for index in (7, 3)] == [points[7], points[3]]
    assert [random_point(axes[:1], index)["a"] for index in range(9)] == [point["a"] for point in points[:9]]
    logs = np.log([point["a"] for point in points]) / np.log(100)
    assert stats.kstest(logs, "uniform").pvalue > 0.01
    counts = np.unique([point["c"] for point in points], return_counts=True)
    assert counts[0].tolist() == [2, 3, 4, 5] and stats.chisquare(counts[1]).pvalue > 0.01
    assert 900 < sum(point["b"] == "x" for point in points) < 1100


def test_examples_of_a_search_have_every_value_and_both_ends():
    axes = [Range("a", 1, 100), Choices("b", {"x": 1, "y": 2, "z": 3}, {})]
    points = example_points(axes)
    assert {point["a"] for point in points} == {1, 100} and {point["b"] for point in points} == {1, 2, 3}


def test_a_label_can_be_part_of_a_file_name():
    axes = [Choices("prior.folder", {}, {}), Range("x", 0, 1)]
    names = {"prior.folder": "folder", "x": "x"}
    assert label(axes, {"prior.folder": "a/b c", "x": 0.123456789}, names) == "folder-a-b-c_x-0.1235"
    assert len(label(axes, {"prior.folder": "a" * 400, "x": 1.0}, names)) == 150


@pytest.mark.parametrize("name", [path.stem for path in sorted((CONFIG_DIR / "sweep").glob("*.yaml"))])
def test_every_shipped_sweep_composes(name):
    plan, jobs = make_plan([f"sweep={name}"])
    assert plan.sweep.name == name and plan.folder == Path("runs", name)
    assert len(jobs) == len({job.name for job in jobs}) == len(plan.points) * len(plan.sweep.seeds) >= 6
    if name == "learning_rate_width":
        flops = [expected_work(job.config, job.config.curriculum.stages["stage1"])[1] for job in jobs[::2]]
        assert max(flops) / min(flops) < 1.03, "the compute is not the same"
