import contextlib
import io
import re
import sys

import numpy as np
import pytest
import torch
from command_line import command
from runs import run
from tiny_network import TINY

from tabicl_train import TabICLClassifier, commands
from tabicl_train.model import TabICL
from tabicl_train.prediction.export import export, load_checkpoint
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
        ("m.safetensors", r"the format is torch's, so the name must end in \.ckpt, \.pt, \.pth"),
        ("m.onnx", "the name must end in"),
        ("m", "the name must end in"),
        ("folder.ckpt", "a folder, not a file"),
        ("file/m.ckpt", "file is a file"),
        ("full/m.ckpt", "it cannot be written"),
    ],
)
def test_an_output_that_cannot_be_is_refused(output, words, tmp_path, monkeypatch):
    save_public(TINY, TabICL(TINY).state_dict(), tmp_path / "tiny.ckpt")
    (tmp_path / "folder.ckpt").mkdir()
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
    assert not (tmp_path / output).is_file()


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
