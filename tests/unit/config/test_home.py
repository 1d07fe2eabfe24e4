"""A ~ in a path is the home folder, or an error: no folder of that name is made."""

from pathlib import Path

import pytest
from command_line import command
from networks import randomize

from tabicl_train import TabICLClassifier, open_run, plugins
from tabicl_train.config import options
from tabicl_train.config.compose import Composer, compose, parse_options
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.tabicl import TabICL
from tabicl_train.outputs import expand_home
from tabicl_train.sweep.plan import read_settings
from tabicl_train.weights.export import export, save_public

COMMANDS = {
    options.ExportOptions: ["checkpoint", "output"],
    options.ReplayOptions: ["run_dir", "step=1"],
    options.EvaluateOptions: ["checkpoint", "output", "figure", "folder", "tabicl_weights"],
    options.CompareOptions: ["output", "folder"],
    options.PredictOptions: ["train", "test", "output", "checkpoint", "target=~/y"],
    options.GpuCheckOptions: ["output"],
    options.PriorOptions: ["output"],
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
def test_all_paths_of_commands(kind, home):
    names = [name for name in COMMANDS[kind] if "=" not in name]
    others = [word for word in COMMANDS[kind] if "=" in word]
    parsed = parse_options(kind, [*others, *(f"{name}=~/a #1" for name in names)])
    assert [getattr(parsed, name) for name in names] == [f"{home}/a #1"] * len(names)
    if kind is options.PredictOptions:
        assert parsed.target == "~/y"  # a column
    with pytest.raises(ConfigError) as caught:
        parse_options(kind, [*others, *(f"{name}=~no-such-user/a" for name in names)])
    assert sorted(line.split()[0] for line in caught.value.problems) == sorted(names)
    for untouched in ("./~", "a/~", "x~"):
        parsed = parse_options(kind, [*others, *(f"{name}={untouched}" for name in names)])
        assert getattr(parsed, names[0]) == untouched


def test_a_list_of_runs_and_paths_of_runs_and_sweeps(home):
    assert parse_options(options.ReportOptions, ["run_dir=[~/a,b]"]).run_dir == [f"{home}/a", "b"]
    (home / "w").touch()
    (home / "d").mkdir()
    (home / "d/a.csv").write_text("x,y\n" + "1,0\n2,1\n" * 50)
    settings = ["experiment=smoke", "validation.every=0", "run_dir=~/r", "init_weights=~/w"]
    config = compose(
        [
            *settings,
            "prior=tables",
            "prior.folder=~/d",
            "prior.validation_fraction=0",
            "prior.test_fraction=0",
            "curriculum.stages.smoke.rows=[50,60]",
        ]
    )
    assert (config.run_dir, config.init_weights, config.prior["folder"]) == (f"{home}/r", f"{home}/w", f"{home}/d")
    for key in ("run_dir", "init_weights", "prior.components.tables.folder"):
        with pytest.raises(ConfigError, match=f"{key} is '~no-such-user/a': no user has this name"):
            compose(["experiment=own_tables", f"{key}=~no-such-user/a"])
    assert read_settings(options.SweepConfig(), ["run_dir=~/s"], Composer(), []).folder == home / "s"


def test_words_of_commands_and_calls_from_python(home):
    (home / "d").mkdir()
    for name, word in (("runs", "~/d"), ("compare", "~/d/a.csv:x"), ("train", "--config-dir=~/none")):
        assert f"{home}/" in command(name, word).stderr, name
    model = TabICL(TabICLConfig(embed_dim=16, col_num_blocks=1, row_num_blocks=1, icl_num_blocks=1))
    randomize(model)
    save_public(model.config, model.state_dict(), home / "a.ckpt")
    export("~/a.ckpt", "~/b.ckpt")
    for path in ("~/b.ckpt", Path("~/b.ckpt")):
        fitted = TabICLClassifier(path, n_estimators=1).fit([[1.0], [2.0]], [0, 1])
    fitted.export("~/c.safetensors")
    (home / "mine.py").touch()
    assert plugins.find("~/mine.py")[0].source == f"{home}/mine.py"
    with pytest.raises(ConfigError, match=f"{home}/d"):
        open_run("~/d")
    assert {path.name for path in home.iterdir()} == {"a.ckpt", "b.ckpt", "c.safetensors", "d", "mine.py"}
    assert expand_home(Path("./~x")) == "~x"
