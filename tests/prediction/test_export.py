import contextlib
import dataclasses
import io
import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import command
from made_run import STEP, make_run
from runs import run
from small_networks import logits_of
from tiny_network import TINY

from tabicl_train import TabICLClassifier, TabICLRegressor, commands
from tabicl_train.config.folders import CONFIG_DIR
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL
from tabicl_train.prediction.export import build_model, export, load_checkpoint, load_model, read_weights
from tabicl_train.prediction.origin import TrainedRange
from tabicl_train.prediction.public_format import load_public, save_public


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    run(folder, "prior=dummy", "stream.num_workers=0", "trainer.max_steps=3", "checkpoint.every=2")
    return folder


@pytest.mark.slow
def test_export_of_a_run_a_checkpoint_and_an_export_agree(run_dir, tmp_path):
    newest = run_dir / "checkpoints" / "step-00000003.ckpt"
    result = command("export", f"checkpoint={run_dir}", f"output={tmp_path}/new/run.ckpt")
    assert result.returncode == 0 and "parameters" in result.stdout
    export(str(newest), str(tmp_path / "file.ckpt"))
    export(str(tmp_path / "file.ckpt"), str(tmp_path / "again.ckpt"))
    weights = torch.load(newest, weights_only=True)["state_dict"]
    for file in ("new/run.ckpt", "file.ckpt", "again.ckpt"):
        config, exported = load_public(tmp_path / file)
        assert config == load_checkpoint(str(run_dir))[0]
        assert {f"model.{k}" for k in exported} == weights.keys()
        assert all(torch.equal(v, weights[f"model.{k}"]) for k, v in exported.items())


@pytest.mark.slow
def test_a_run_a_checkpoint_and_an_export_predict_alike(run_dir, tmp_path):
    export(str(run_dir), str(tmp_path / "run.ckpt"))
    X, y = np.random.default_rng(0).normal(size=(30, 3)), np.arange(30) % 3
    files = (run_dir, run_dir / "checkpoints" / "step-00000003.ckpt", tmp_path / "run.ckpt")
    p, *others = (TabICLClassifier(file, n_estimators=2).fit(X, y).predict_proba(X) for file in files)
    assert all(np.array_equal(p, other) for other in others) and np.ptp(p) > 0
    older = TabICLClassifier(run_dir / "checkpoints" / "step-00000002.ckpt", n_estimators=2).fit(X, y)
    assert not np.array_equal(p, older.predict_proba(X))


@pytest.mark.slow
def test_an_export_can_start_a_run(run_dir, tmp_path):
    export(str(run_dir), str(tmp_path / "start.ckpt"))
    run(
        tmp_path / "run", f"init_weights={tmp_path}/start.ckpt", "prior=dummy", "stream.num_workers=0",
        "trainer.max_steps=1", "curriculum.stages.smoke.learning_rate=1e-30",
        "curriculum.stages.smoke.final_learning_rate=0",
    )  # fmt: skip
    _, before = load_checkpoint(str(run_dir))
    _, after = load_checkpoint(str(tmp_path / "run"))
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.slow
def test_weights_of_another_model_do_not_start_a_run(tmp_path):
    save_public(TINY, TabICL(TINY).state_dict(), tmp_path / "tiny.ckpt")
    refused = run(tmp_path / "run", f"init_weights={tmp_path}/tiny.ckpt", code=2)
    assert "Traceback" not in refused
    assert "the file's model has col_num_inducing=4, the configuration model.col_num_inducing=8" in refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "checkpoint is missing"),
        (["checkpont=x", "output=y"], "checkpont: no such setting; did you mean checkpoint?"),
        (["checkpoint=nowhere", "output=y.ckpt"], "there is no such file or run directory"),
    ],
)
def test_wrong_commands_end_with_2_and_no_trace(arguments, words):
    result = command("export", *arguments)
    assert result.returncode == 2 and words in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("m.safetensors", r"its name decides the format: FILE\.ckpt, \.pt or \.pth \(tabicl\), FOLDER \(hub\)"),
        ("m.v2", "its name decides the format"),
        ("folder.ckpt", "a folder, not a file"),
        ("folder.onnx", "a folder, not a file"),
        ("file", "a file, not a folder"),
        ("file/m.ckpt", "file is a file"),
        ("file/m", "file is a file"),
        ("full/m.ckpt", "it cannot be written"),
    ],
)
def test_an_output_that_cannot_be_is_refused(output, words, tmp_path, monkeypatch):
    save_public(TINY, TabICL(TINY).state_dict(), tmp_path / "tiny.ckpt")
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file").touch()
    if output.startswith("full"):
        monkeypatch.setattr(
            "tabicl_train.run_dir.atomic.open", lambda _, mode: io.FileIO("/dev/full", mode), raising=False
        )
    monkeypatch.setattr(sys, "argv", ["", f"checkpoint={tmp_path}/tiny.ckpt", f"output={tmp_path}/{output}"])
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit, match="2"):
        commands.export()
    assert re.search(words, stderr.getvalue()) and stderr.getvalue().count("\n") == 1
    assert output == "file" or not (tmp_path / output).is_file()


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (["output=m.pt", "format=hub"], ["output is 'm.pt', whose name says format=tabicl, but format is hub"]),
        (["output=m", "format=tabicl"], ["output is 'm', whose name says format=hub, but format is tabicl"]),
        (["output=m.onnx", "format=hub"], ["output is 'm.onnx', whose name says format=onnx, but format is hub"]),
        (["output=m.ckpt", "format=onnx"], ["output is 'm.ckpt', whose name says format=tabicl, but format is onnx"]),
        (["output=m", "format=torch"], ["format is 'torch'; it must be one of tabicl, hub, onnx"]),
        (["output=m", "classes=3"], ["classes is 3; only format=onnx has a fixed number of classes"]),
        (
            ["output=m.pt", "format=hub", "classes=3"],
            [
                "output is 'm.pt', whose name says format=tabicl, but format is hub",
                "classes is 3; only format=onnx has a fixed number of classes",
            ],
        ),
    ],
)
def test_arguments_that_contradict_each_other_are_refused_at_once(arguments, problems, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = command("export", "checkpoint=nowhere", *arguments)
    assert result.returncode == 2 and result.stderr == "".join(f"error: {problem}\n" for problem in problems)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("weights", ["trained", "ema", "last", "best"])
def test_all_kinds_of_weights_survive_every_way_through_the_formats(weights, tmp_path):
    expected = make_run(tmp_path / "run")[weights]
    export(str(tmp_path / "run"), str(tmp_path / "1.ckpt"), weights)
    for source, output in itertools.pairwise(["1.ckpt", "2", "3", "4.ckpt"]):
        export(str(tmp_path / source), str(tmp_path / output))
    step, commit = (5, "first") if weights == "best" else (STEP, "c0ffee")  # best.ckpt itself does not hold the commit
    for output in ("1.ckpt", "2", "3", "4.ckpt"):
        exported = read_weights(str(tmp_path / output))
        assert exported.tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.tensors.items())
        assert [exported.origin[key] for key in ("weights", "step", "commit")] == [weights, step, commit]


# Those of the other family go to a hub folder only, see tests/test_sequence_runs.py.
TABICL_PRESETS = sorted(path.stem for path in CONFIG_DIR.glob("model/*.yaml") if "schema" not in path.read_text())


@pytest.mark.parametrize("model", TABICL_PRESETS)
def test_every_preset_loads_in_both_formats_and_in_the_client(model, tmp_path):
    tabicl = pytest.importorskip("tabicl")
    weights = make_run(tmp_path / "run", f"model={model}")["trained"]
    for output in ("m.ckpt", "m"):
        export(str(tmp_path / "run"), str(tmp_path / output))
        config, tensors = load_checkpoint(str(tmp_path / output))
        assert config == load_checkpoint(str(tmp_path / "run"))[0]
        assert all(torch.equal(tensor, weights[name]) for name, tensor in tensors.items())
    X, y = np.random.default_rng(0).uniform(-1, 1, size=(30, 3)), np.arange(20) % 3
    options = dict(n_estimators=1, device="cpu")
    of_client = dict(model_path=tmp_path / "m.ckpt", allow_auto_download=False, feat_shuffle_method="none")
    if config.is_regression:
        client = tabicl.TabICLRegressor(**of_client, **options, norm_methods="none")
        ours = TabICLRegressor(tmp_path / "m", **options, norm_methods=("none",))
        p, q = (regressor.fit(X[:20], y).predict(X[20:]) for regressor in (client, ours))
    else:
        client = tabicl.TabICLClassifier(**of_client, **options, norm_methods="none", class_shuffle_method="none")
        ours = TabICLClassifier(tmp_path / "m", **options, norm_methods=("none",))
        p, q = (classifier.fit(X[:20], y).predict_proba(X[20:]) for classifier in (client, ours))
    assert np.abs(p - q).max() < 1e-5 and np.ptp(p, axis=0).max() > 1e-3


def test_a_bounded_scaling_goes_to_the_hub_and_is_refused_for_the_client(tmp_path):
    make_run(tmp_path / "run", "model.scaling_bound=5")
    with pytest.raises(
        ConfigError, match=r"no model\.scaling_bound \(5\.0\); format=hub and format=onnx can express it"
    ):
        export(str(tmp_path / "run"), str(tmp_path / "m.ckpt"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    export(str(tmp_path / "run"), str(tmp_path / "m"))
    config, tensors = load_checkpoint(str(tmp_path / "m"))
    assert config.scaling_bound == 5
    X, y_train = torch.randn(1, 30, 3), torch.zeros(1, 20, dtype=torch.int64)
    networks = [load_model(str(tmp_path / name)) for name in ("run", "m")]
    assert torch.equal(*(logits_of(network, X, y_train) for network in networks))
    unbounded = build_model(dataclasses.replace(config, scaling_bound=None), tensors)
    assert not torch.allclose(
        logits_of(networks[0], X, y_train), logits_of(unbounded, X, y_train), atol=1e-3
    )  # the bound makes a difference


@pytest.mark.parametrize("output", ["m.ckpt", "m"])
def test_an_export_that_computes_something_else_is_not_written(output, tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    export(str(tmp_path / "run"), str(tmp_path / output), "ema")
    other = load_model(str(tmp_path / output))
    monkeypatch.setattr("tabicl_train.prediction.export.load_network", lambda path: other)
    with pytest.raises(ConfigError, match=f"{output} is not written: its logits differ from the network's by "):
        export(str(tmp_path / "run"), str(tmp_path / output))
    monkeypatch.undo()
    assert read_weights(str(tmp_path / output)).origin["weights"] == "ema"
    assert {path.name for path in tmp_path.iterdir()} == {"run", output}


def test_a_checkpoint_of_a_run_is_not_replaced(tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run/checkpoints")
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    for output in (f"step-{STEP:08d}.ckpt", str(tmp_path / "run/checkpoints/new.onnx")):
        with pytest.raises(ConfigError, match="among the checkpoints of a run"):
            export(f"step-{STEP:08d}.ckpt", output)
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    weights = TabICL(TINY).state_dict()
    weights["icl_predictor.ln.weight"][0] = torch.nan
    save_public(TINY, weights, tmp_path / "bad.ckpt")
    with pytest.raises(ConfigError, match="m is not written: the network's logits are not finite"):
        export(str(tmp_path / "bad.ckpt"), str(tmp_path / "m"))
    assert [path.name for path in tmp_path.iterdir()] == ["bad.ckpt"]


def test_a_run_without_the_weights_asked_for_is_named(tmp_path):
    make_run(tmp_path / "run")
    file = tmp_path / "run/checkpoints" / f"step-{STEP:08d}.ckpt"
    with pytest.raises(ConfigError, match="weights=best needs the folder of a run"):
        load_checkpoint(str(file), "best")
    (tmp_path / "run/checkpoints/best.ckpt").unlink()
    with pytest.raises(ConfigError, match=r"keeps no best weights: validation\.every was 0, or"):
        load_checkpoint(str(tmp_path / "run"), "best")
    with pytest.raises(ConfigError, match="weights is 'good'; it must be one of trained, ema, last, best"):
        load_checkpoint(str(tmp_path / "run"), "good")
    with pytest.raises(ConfigError, match="there is no such file or run directory"):
        load_checkpoint(str(tmp_path / "nowhere"), "best")


def test_the_trained_range_travels_with_every_format(tmp_path):
    make_run(tmp_path / "run")
    expected = TrainedRange((12, 72), (2, 6))  # 40..80 rows of which 0.3..0.9 are labeled
    assert read_weights(str(tmp_path / "run")).trained_range == expected
    for output in ("m.ckpt", "m"):
        export(str(tmp_path / "run"), str(tmp_path / output))
        assert read_weights(str(tmp_path / output)).trained_range == expected
    save_public(TINY, TabICL(TINY).state_dict(), tmp_path / "other.ckpt")  # as a file of another program
    assert read_weights(str(tmp_path / "other.ckpt")).trained_range is None


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth"])
def test_the_client_loads_files_of_all_names(suffix, tmp_path):
    tabicl = pytest.importorskip("tabicl")
    save_public(TINY, TabICL(TINY).state_dict(), tmp_path / "tiny.ckpt")
    export(str(tmp_path / "tiny.ckpt"), str(tmp_path / f"again{suffix}"))
    client = tabicl.TabICLClassifier(
        n_estimators=1, model_path=tmp_path / f"again{suffix}", allow_auto_download=False, device="cpu"
    )
    X = np.random.default_rng(0).normal(size=(20, 3))
    assert client.fit(X, np.arange(20) % 2).predict_proba(X).shape == (20, 2)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named(run_dir, tmp_path):
    whole = (run_dir / "checkpoints" / "step-00000003.ckpt").read_bytes()
    (tmp_path / "half.ckpt").write_bytes(whole[: len(whole) // 2])
    result = command("export", f"checkpoint={tmp_path}/half.ckpt", f"output={tmp_path}/x.ckpt")
    assert result.returncode == 2 and f"{tmp_path}/half.ckpt" in result.stderr and "Traceback" not in result.stderr
