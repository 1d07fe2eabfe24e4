import csv
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from tabicl_train import evaluate as evaluation
from tabicl_train.export import export, load_checkpoint, load_model
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.predict import predict_proba
from tabicl_train.weights import load_public, save_public

TINY = TabICLConfig(
    embed_dim=16, col_num_blocks=1, col_num_heads=2, col_num_inducing=4,
    row_num_blocks=1, row_num_heads=2, row_num_cls=2, icl_num_blocks=2, icl_num_heads=2,
)  # fmt: skip


def command(name: str, *arguments: str) -> subprocess.CompletedProcess:
    code = f"from tabicl_train.commands import {name}; {name}()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    overrides = ["experiment=smoke", f"run_dir={folder}", "trainer.max_steps=3", "checkpoint.every=2"]
    subprocess.run([sys.executable, "-m", "tabicl_train", *overrides], check=True, capture_output=True)
    return folder


def test_export_of_a_run_a_checkpoint_and_an_export_agree(run_dir, tmp_path):
    newest = run_dir / "checkpoints" / "step-00000003.ckpt"
    told = command("export", f"checkpoint={run_dir}", f"output={tmp_path}/new/run.ckpt")
    assert told.returncode == 0 and "parameters" in told.stdout
    export(str(newest), str(tmp_path / "file.ckpt"))
    export(str(tmp_path / "file.ckpt"), str(tmp_path / "again.ckpt"))
    weights = torch.load(newest, weights_only=True)["state_dict"]
    for file in ("new/run.ckpt", "file.ckpt", "again.ckpt"):
        config, exported = load_public(tmp_path / file)
        assert config == load_checkpoint(str(run_dir))[0]
        assert {f"model.{k}" for k in exported} == weights.keys()
        assert all(torch.equal(v, weights[f"model.{k}"]) for k, v in exported.items())


def test_an_export_can_start_a_run(run_dir, tmp_path):
    export(str(run_dir), str(tmp_path / "start.ckpt"))
    told = subprocess.run(
        [sys.executable, "-m", "tabicl_train", "experiment=smoke", f"init_weights={tmp_path}/start.ckpt",
         f"run_dir={tmp_path}/run", "trainer.max_steps=1", "curriculum.stages.smoke.learning_rate=1e-30",
         "curriculum.stages.smoke.final_learning_rate=0"], capture_output=True, text=True,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    _, before = load_checkpoint(str(run_dir))
    _, after = load_checkpoint(str(tmp_path / "run"))
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_weights_of_another_model_do_not_start_a_run(tmp_path):
    save_public(TINY, TabICL(TINY).state_dict(), tmp_path / "tiny.ckpt")
    told = subprocess.run(
        [sys.executable, "-m", "tabicl_train", "experiment=smoke", f"init_weights={tmp_path}/tiny.ckpt",
         f"run_dir={tmp_path}/run"], capture_output=True, text=True,
    )  # fmt: skip
    assert told.returncode == 2 and "Traceback" not in told.stderr
    assert "the file's model has col_num_inducing=4, the configuration model.col_num_inducing=8" in told.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("export", [], "checkpoint is missing"),
        ("export", ["checkpont=x", "output=y"], "checkpont: no such setting; did you mean checkpoint?"),
        ("export", ["checkpoint=nowhere", "output=y"], "there is no such file or run directory"),
        ("evaluate", ["checkpoint=nowhere", "splits=many"], "splits"),
        ("evaluate", ["checkpoint=nowhere", "splits=0"], "splits is 0"),
    ],
)
def test_wrong_commands_end_with_2_and_no_trace(name, arguments, words):
    told = command(name, *arguments)
    assert told.returncode == 2 and words in told.stderr and "Traceback" not in told.stderr


def test_a_damaged_checkpoint_is_named(run_dir, tmp_path):
    whole = (run_dir / "checkpoints" / "step-00000003.ckpt").read_bytes()
    (tmp_path / "half.ckpt").write_bytes(whole[: len(whole) // 2])
    told = command("export", f"checkpoint={tmp_path}/half.ckpt", f"output={tmp_path}/x")
    assert told.returncode == 2 and f"{tmp_path}/half.ckpt" in told.stderr and "Traceback" not in told.stderr


def test_prediction_ignores_scale_shift_and_constant_columns():
    torch.manual_seed(0)
    model = TabICL(TINY).eval()
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 4)), np.arange(20) % 3
    p = predict_proba(model, X[:20], y, X[20:])
    assert p.shape == (10, 3) and np.allclose(p.sum(axis=1), 1)
    moved = np.insert(X * [1e3, 1, 0.1, 7] + [5, 0, -3, 1], 2, 4.0, axis=1)
    assert np.allclose(predict_proba(model, moved[:20], y, moved[20:]), p, atol=1e-5)
    assert not np.allclose(predict_proba(model, X[:20], (y + 1) % 3, X[20:]), p, atol=1e-3)


def test_evaluation_scores_known_probabilities():
    y = np.array([0, 1, 1, 0, 1])
    p = np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3], [0.6, 0.4], [0.2, 0.8]])
    scores = evaluation.score(y, p)
    assert scores["roc_auc"] == pytest.approx(5 / 6) and scores["accuracy"] == pytest.approx(0.8)
    assert scores["log_loss"] == pytest.approx(-np.log([0.9, 0.6, 0.3, 0.6, 0.8]).mean())
    three = np.random.default_rng(0).dirichlet(np.ones(3), 30)
    labels = np.arange(30) % 3
    each = [roc_auc_score(labels == c, three[:, c]) for c in range(3)]
    assert evaluation.score(labels, three)["roc_auc"] == pytest.approx(np.mean(each))


def test_evaluate_prints_a_table_and_writes_the_rows(run_dir, tmp_path):
    told = command("evaluate", f"checkpoint={run_dir}", f"output={tmp_path}/rows.csv", "splits=1")
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["iris", "wine", "breast_cancer", "digits", "mean"]
    with open(tmp_path / "rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 3
    assert {row["method"] for row in rows} == {"this model", "logistic regression", "gradient boosting"}
    linear = {row["data"]: float(row["roc_auc"]) for row in rows if row["method"] == "logistic regression"}
    assert min(linear.values()) > 0.97
    ours = [float(row["roc_auc"]) for row in rows if row["method"] == "this model"]
    assert f"{np.mean(ours):.4f}" in lines[-1]
    assert load_model(str(run_dir)).training is False
