"""A copy of the file of a network, outside the repository, beside a wheel: from training to other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from unpacked_wheel import unpack_wheel

KILLED = """
import os
import signal
from pathlib import Path

from tabicl_train import register
from tabicl_train.training.callbacks.callback import Callback


@register.callback("killed_once")
class KilledOnce(Callback):
    def before_step(self, state, item):
        if state.step == 3 and not Path("was_killed").exists():
            Path("was_killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
LOADED = """
import torch
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_val_score

import tabicl_train
from tabicl_train import TabICLClassifier
from tabicl_train.model.pack import Pack
from tabicl_train.weights.reader import load_network
from tabicl_train.weights.onnx_format import onnx_predictor

if __name__ == "__main__":
    assert "site" in tabicl_train.__file__, tabicl_train.__file__
    X, y = load_iris(return_X_y=True)
    model = TabICLClassifier("hub", n_estimators=1, plugins="./my_retrieval.py")
    print(len(cross_val_score(model, X, y, cv=2, n_jobs=2)), "folds")

    network = load_network("run", "newest", plugins="./my_retrieval.py")
    assert type(network).__module__ == "my_retrieval" and network.icl_predictor.retrieval.weight != 0
    tables = torch.randn(2, 40, 5), torch.randint(3, (2, 30))
    with torch.no_grad():
        expected = network(Pack.stack(*tables)).unflatten(0, (2, 10))
    torch.testing.assert_close(onnx_predictor("m.onnx")(*tables), expected, rtol=0, atol=1e-4)
"""


@pytest.fixture
def folder(tmp_path):
    """A wheel in `site`, and an empty folder with a copy of the file under another name."""
    site = unpack_wheel(tmp_path)
    folder = tmp_path / "out side"
    folder.mkdir()
    text = (site / "tabicl_train/lab/retrieval.py").read_text()
    assert text.count('"retrieval"') == 2  # the name, in the settings and where it is registered
    (folder / "my_retrieval.py").write_text(text.replace('"retrieval"', '"my_retrieval"'))
    (folder / "killed.py").write_text(KILLED)
    (folder / "loaded.py").write_text(LOADED)
    return folder


def process(folder: Path, arguments: list[str], succeeds: bool = True) -> str:
    environment = os.environ | {"PYTHONPATH": str(folder.parent / "site"), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert (result.returncode == 0) == succeeds, f"{arguments}: {result.stdout}{result.stderr}"
    return result.stdout + result.stderr


def tabicl(folder: Path, name: str, *arguments: str, succeeds: bool = True) -> str:
    """Run a command in a process of its own; return what it prints."""
    script = f"import sys; from tabicl_train import cli as commands; sys.argv[0] = 'tabicl-{name}'; commands.{name}()"
    start = ["-m", "tabicl_train"] if name == "train" else ["-c", script]
    return process(folder, [*start, *arguments], succeeds)


@pytest.mark.slow
def test_one_file_is_trained_resumed_swept_evaluated_exported_and_loaded(folder):
    plugins = "plugins=[./my_retrieval.py,./killed.py]"
    small = [f"model.{value}" for value in ("embed_dim=16", "col_num_blocks=1", "row_num_blocks=1", "icl_num_blocks=2")]
    settings = [plugins, "experiment=smoke", "model=my_retrieval", *small, "optimizer=muon", "checkpoint.every=2"]
    settings += ["trainer.accelerator=cpu", "trainer.log_every=1"]

    # Killed before step 4, and continued by the same command.
    run = [*settings, "+callbacks.killed_once={}", "trainer.max_steps=6", "run_dir=run"]
    tabicl(folder, "train", *run, succeeds=False)
    assert "resumed at step 2" in tabicl(folder, "train", *run)

    sweep = ["-m", *settings, "model.thinking_rows=0,8", "trainer.max_steps=2", "run_dir=sweep"]
    assert "2 points: 2 finished" in tabicl(folder, "train", *sweep)

    scored = tabicl(folder, "evaluate", plugins, "checkpoint=run", "suite=sklearn", "splits=1", "n_estimators=1")
    assert "roc" in scored.lower()

    assert "needs the plug-in" in tabicl(folder, "export", "checkpoint=run", "output=hub", succeeds=False)
    assert "plugins=" in tabicl(folder, "export", plugins, "checkpoint=run", "output=hub")
    tabicl(folder, "export", plugins, "checkpoint=run", "output=m.onnx", "weights=newest")
    assert "2 folds" in process(folder, ["loaded.py"])

    # The network of the same wheel has its preset, and another name.
    assert "thinking_rows: 16" in tabicl(folder, "train", "experiment=demo_long", "model=retrieval", "--cfg", "job")
