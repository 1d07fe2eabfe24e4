import contextlib
import dataclasses

import pytest
from command_line import exit_code
from configurations import list_experiments, problems
from table_files import build_frame

from tabicl_train.config.compose import Composer, compose
from tabicl_train.config.schema import flatten
from tabicl_train.errors import ConfigError


def test_all_problems_are_reported_at_once_with_the_nearest_name():
    found = problems(
        "experiment=smoke",
        "model.embed_dm=64",
        "trainer.max_steps=abc",
        "curriculum.stages.smoke.warmpu=0.1",
        "optimizer=sgd",
        "loose words",
        "model.max_classes=11",
    )
    text = "\n".join(found)
    assert len(found) == 6 and "model.max_classes is 11" in text
    assert "model.embed_dm: no such setting; did you mean model.embed_dim?" in text
    assert "trainer.max_steps" in text and "'abc'" in text
    assert "did you mean curriculum.stages.smoke.warmup?" in text
    assert "optimizer=sgd: there is no such choice; there are adamw, muon" in text
    assert "'loose words' is not of the form KEY=VALUE" in text


def test_contradictions_of_all_sections_are_reported_at_once():
    wrong = {
        "model.embed_dim=37": "embed_dim (37) is not divisible by col_num_heads (2)",
        "model.max_classes=11": "model.max_classes is 11",
        "curriculum.stages.smoke.train_share=[0,1]": "train_share is [0.0, 1.0]",
        "trainer.precision=bf17": "trainer.precision is 'bf17'; it must be one of auto, fp32, bf16, fp16",
        "trainer.devices=9": "it must be at least 9, the number of processes",
        "checkpoint.every=0": "checkpoint.every is 0",
        "init_weights=nowhere.ckpt": "there is no such file",
    }
    found = "\n".join(problems("experiment=smoke", *wrong))
    assert [words for words in wrong.values() if words not in found] == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+model.embed=3", "model.embed: no such setting; did you mean model.embed_dim?"),
        ("+curriculum.stages.smoke.row=3", "did you mean curriculum.stages.smoke.rows?"),
        ("seed=-1", "seed is -1"),
        ("seed=123456789012345678901234567890", "seed is 123456789012345678901234567890; it must lie in 0..18446744"),
        ("run_dir=", "run_dir is empty"),
        ("trainer.timeout=inf", "trainer.timeout is inf"),
        ("stream.prefetch=1000000000", "stream.prefetch is 1000000000; it must lie in 1..1000"),
        ("profile.step=20", "profile.step is 20, but the run has 20 steps"),
        ("max_steps=3", "max_steps: no such setting; did you mean trainer.max_steps?"),
        ("tabel=2", "did you mean curriculum.stages.smoke.tables or validation.tables?"),
        ("modle.embed_dim=3", "modle: no such setting; did you mean model.embed_dim?"),
        ("color=3", "color: no such setting; there are name, seed, run_dir"),
        ("curriculum.stages.smoke.train_share.x=3", "train_share.x: no such setting; there are none"),
        ("curriculum.stages.long.steps=3", "there are smoke (+curriculum.stages.long.KEY=VALUE adds a stage)"),
        ("+curriculum.stages.long.step=3", "long.step: no such setting; did you mean curriculum.stages.long.steps"),
        ("+curriculum.stages.long.steps=x", "curriculum.stages.long.steps is 'x'; it must be of type int"),
        ("run_dir=runs/(a,b", "cannot be read; plain text needs quotes: \"run_dir='...'\""),
        ("run_dir=a,b", "has several values, which needs -m; plain text needs quotes: \"run_dir='...'\""),
    ],
)
def test_single_problems(override, words):
    assert words in "\n".join(problems("experiment=smoke", override))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("curriculum.stages.smoke=3", "curriculum.stages.smoke: it must be a mapping, such as {name: 1}"),
        ("validation.rows=[1,null]", "validation.rows is [1, None]; each value must be of type int"),
        ("validation=null", "validation: it needs a value"),
        ("+experiment=demo", "+experiment=demo: leave out the plus: experiment=demo"),
        ("run_dir=${foo}", "run_dir: Interpolation key 'foo' not found"),
        (
            "init_weights=",
            "init_weights is empty; name a run directory, a checkpoint, an export, or weights of the package, such as "
            "mini, or leave it out",
        ),
        (
            "stream.name=ray",
            "stream.num_workers is null, but Ray needs a number: write stream=ray, which sets one, or "
            "stream.num_workers=4",
        ),
        ("model=typo", "model/typo.yaml: model.embed_dm: no such setting; did you mean model.embed_dim?"),
        ("model=text", "model/text.yaml: model.embed_dim is 'x'; it must be of type int"),
    ],
)
def test_messages_have_the_names_that_a_user_typed(override, expected, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/typo.yaml").write_text("embed_dm: 3")
    (tmp_path / "model/text.yaml").write_text("embed_dim: x")
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=smoke", override], str(tmp_path))
    assert caught.value.problems == [expected]


@pytest.mark.slow  # composes a hundred times
def test_no_setting_of_zero_ends_in_a_stack_trace():
    base = ["experiment=smoke", "validation.every=5", "checkpoint.permanent_every=5"]
    for key, value in flatten(dataclasses.asdict(compose([*base, "checkpoint.every=5"]))).items():
        if value is None or type(value) in (int, float, list):
            with contextlib.suppress(ConfigError):
                compose([*base, f"{key}={'[0,0]' if isinstance(value, list) else 0}"])
    assert problems(*base, "checkpoint.every=0") == ["checkpoint.every is 0; it must be at least 1"]


def test_no_experiment_and_a_file_that_is_no_yaml(tmp_path):
    assert compose(["experiment=smoke", "experiment=null"]).curriculum == compose([]).curriculum
    (tmp_path / "model").mkdir()
    (tmp_path / "model/open.yaml").write_text("a: [\n")
    with pytest.raises(ConfigError, match=r"^while parsing a flow node .*model/open.yaml\", line 2"):
        compose(["model=open"], str(tmp_path))


OWN_FILES = {  # content, and what is said about it
    "empty": (b"", "has no settings; write lines of the form KEY: VALUE into it, or leave out"),
    "comment": (b"# a note\n", "has no settings"),
    "list": (b"- a\n", "has no settings"),
    "latin": (b"# caf\xe9\na: 1\n", "is not UTF-8 text: line 1 has the byte 0xe9"),
    "nested": (b"a: " + b"[" * 700 + b"]" * 700, "cannot be read: it is nested too deeply"),
    "itself": (b"a: &a {b: *a}", "is not valid YAML: found unconstructable recursive node in line 1"),
}


@pytest.mark.parametrize("name", OWN_FILES)
def test_a_file_of_ones_own_that_is_empty_or_not_in_utf8_is_named(name, tmp_path):
    content, words = OWN_FILES[name]
    for group in ("experiment", "prior", "sweep"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_bytes(content)
        composer = Composer(str(tmp_path))
        compose_group = composer.compose_sweep if group == "sweep" else composer.compose
        with pytest.raises(ConfigError) as caught:
            compose_group([f"{group}=mine"])
        assert caught.value.problems[0].startswith(f"{tmp_path}/{group}/mine.yaml {words}")


def test_settings_that_are_nested_too_deeply_are_one_line(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/nested.yaml").write_text("# @package _global_\nname: " + "[" * 700 + "]" * 700)
    (tmp_path / "experiment/e.yaml").write_text("# @package _global_\ndefaults: [smoke, nested]\n")
    with pytest.raises(ConfigError, match=r"^the settings, or a file .* are nested too deeply$"):
        compose(["experiment=e"], str(tmp_path))


def test_a_file_that_another_one_names_is_named(tmp_path):
    (tmp_path / "prior").mkdir()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "prior/mine.yaml").write_bytes(b"caf\xe9: 1\n")
    (tmp_path / "experiment/e.yaml").write_text("# @package _global_\ndefaults: [smoke, override /prior: mine]\n")
    with pytest.raises(ConfigError, match=r"prior/mine\.yaml is not UTF-8 text: line 1 has the byte 0xe9"):
        compose(["experiment=e"], str(tmp_path))


def test_a_wrong_choice_brings_no_false_problems():
    assert problems(
        "experiment=nope", "curriculum.stages.demo.steps=4", "prior.causal=true", "trainer.devices=99", "model.embed=3"
    ) == [
        f"experiment=nope: there is no such choice; there are {list_experiments()}",
        "model.embed: no such setting; did you mean model.embed_dim?",
    ]


def test_mistakes_of_different_runs_of_a_sweep_are_reported_at_once(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    wrong = ["name=a,b", "model.embed_dm=1", "optimizer=muon,sgd", "trainer.max_steps=range(0,3)", "seed=0,x"]
    assert exit_code(monkeypatch, "train", "-m", "experiment=smoke", *wrong, "trainer.precision=choice(fp32,bf17)") == 2
    assert sorted(capfd.readouterr().err.splitlines()) == [
        "error: model.embed_dm: no such setting; did you mean model.embed_dim?",
        "error: optimizer=sgd: there is no such choice; there are adamw, muon, muon_all",
        "error: seed=0,x: a seed must be a whole number in 0..18446744073709551615",
        "error: trainer.max_steps is 0; it must be at least 1",
        "error: trainer.precision is 'bf17'; it must be one of auto, fp32, bf16, fp16",
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [("train", "-m"), ("sweep",)])
def test_a_sweep_without_settings_does_not_start_the_default_run(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, *command) == 2
    assert capfd.readouterr().err.startswith("error: there are no settings; tabicl-sweep ")
    assert not list(tmp_path.iterdir())


def test_a_run_does_not_write_its_records_among_the_tables_it_reads(tmp_path, monkeypatch, capfd):
    build_frame(0, 200).to_csv(tmp_path / "metrics.csv", index=False)
    before = (tmp_path / "metrics.csv").read_bytes()
    settings = ["experiment=smoke", "prior=tables", f"prior.folder={tmp_path}", "validation.every=0"]
    sides = ["prior.validation_fraction=0", "prior.test_fraction=0"]
    assert exit_code(monkeypatch, "train", *settings, *sides, f"run_dir={tmp_path}/") == 2
    assert f"which is the input prior.folder ({tmp_path}); choose another name" in capfd.readouterr().err
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_the_folder_of_a_sweep_is_not_taken_for_that_of_a_run(tmp_path, monkeypatch, capfd):
    (tmp_path / "study.log").touch()
    assert exit_code(monkeypatch, "train", "experiment=smoke", f"run_dir={tmp_path}") == 2
    assert "it is the directory of a sweep" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["study.log"]


def test_a_file_that_is_not_utf8_is_named(own_configs):
    path = own_configs / "experiment/own.yaml"
    path.write_bytes(b"# caf\xe9\n" + path.read_bytes())
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=own", "seed=x"], str(own_configs))
    assert caught.value.problems[0] == f"{path} is not UTF-8 text: line 1 has the byte 0xe9; save it as UTF-8"
