"""The files of the page Extend, together, from a folder outside the repository: from training to other processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import read_rows

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "tabicl_train/EXTEND.md"
KILLED = """
import os
import signal
from pathlib import Path

from tabicl_train import register
from tabicl_train.training.callbacks.callback import Callback


@register.callback("killed_once")
class KilledOnce(Callback):
    on_all_ranks = True

    def before_step(self, state, item):
        mark = Path("was_killed")
        if state.step == 3 and self.context.ranks.rank == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
ESTIMATOR = """
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_val_score
from tabicl_train import TabICLClassifier, open_run

if __name__ == "__main__":
    X, y = load_iris(return_X_y=True)
    names = ["sharpened.py", "power.py", "ring.py", "focal.py", "lion.py"]
    model = TabICLClassifier("hub", n_estimators=1, plugins=names)
    print(len(cross_val_score(model, X, y, cv=2, n_jobs=2)), "folds")
"""


@pytest.fixture
def folder(tmp_path):
    """An empty folder with the files of the page."""
    folder = tmp_path / "out side"
    folder.mkdir()
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        (folder / name).write_text(text)
    (folder / "killed.py").write_text(KILLED)
    (folder / "estimator.py").write_text(ESTIMATOR)
    return folder


def tabicl(folder: Path, name: str, *arguments: str, code: int = 0) -> str:
    """Run a command in a process of its own; return what it prints."""
    script = f"import sys; from tabicl_train import cli as commands; sys.argv[0] = 'tabicl-{name}'; commands.{name}()"
    start = ["-m", "tabicl_train"] if name == "train" else ["-c", script]
    return process(folder, [*start, *arguments], code)


def process(folder: Path, arguments: list[str], code: int = 0) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert (result.returncode == 0) == (code == 0), f"{arguments}: {result.stdout}{result.stderr}"
    return result.stdout + result.stderr


@pytest.mark.slow
def test_one_file_for_each_door(folder):
    names = ["ring", "power", "sharpened", "focal", "polynomial", "lion", "lowest_loss", "killed"]
    plugins = f"plugins=[{','.join(f'./{name}.py' for name in names)}]"
    small = ["model=sharpened", "model.embed_dim=16", "model.col_num_blocks=1", "model.icl_num_blocks=1"]
    settings = [plugins, "experiment=smoke", "prior=ring", *small, "model.icl_scaling=power", "objective=focal"]
    settings += ["curriculum.stages.smoke.schedule=polynomial", "curriculum.stages.smoke.schedule_options={power: 3}"]
    settings += ["optimizer=lion", "+callbacks.lowest_loss={}", "+callbacks.killed_once={}", "checkpoint.every=2"]
    settings += ["trainer.accelerator=cpu", "trainer.max_steps=5", "trainer.log_every=1"]

    # Two ranks, killed before step 4, are continued by the same command.
    run = [*settings, "trainer.devices=2", "run_dir=run"]
    tabicl(folder, "train", *run, code=1)
    assert "resumed at step 2" in tabicl(folder, "train", *run)
    assert [row["step"] for row in read_rows(folder / "run/lowest_loss.csv")] == ["1", "2", "3", "4", "5"]

    # A sweep, whose runs are processes of their own.
    sweep = ["-m", *settings, "objective.gamma=0,1", "trainer.max_steps=2", "run_dir=sweep", "trainer.devices=1"]
    assert "2 points: 2 finished" in tabicl(folder, "train", *sweep)

    # A task of one's own, and an experiment.
    needed = [plugins.replace("]", ",./moons.py,./distances.py,./mean_labels.py]")]
    scored = tabicl(folder, "evaluate", *needed, "checkpoint=run", "suite=moons", "splits=1", "n_estimators=1")
    assert "two moons" in scored
    assert "distances" in tabicl(folder, "lab", *needed, "distances", "folder=distances", "points=20")

    # A network of dense batches is trained, with a validation on that task, and scored.
    dense = [*needed, "experiment=smoke", "model=mean_labels", "trainer.max_steps=2"]
    dense += ["validation.every=2", "validation.rows=[]", "validation.suites=[moons]", "validation.best=real"]
    tabicl(folder, "train", *dense, "run_dir=dense")
    assert [row["data"] for row in read_rows(folder / "dense/validation.csv")] == ["two moons"]
    assert "two moons" in tabicl(folder, "evaluate", *needed, "checkpoint=dense", "suite=moons", "splits=1")

    # Exports and reports need the plug-ins; an estimator takes them into the processes of joblib.
    assert "needs the plug-in" in tabicl(folder, "export", "checkpoint=run", "output=hub", "format=hub", code=2)
    assert "plugins=" in tabicl(folder, "export", *needed, "checkpoint=run", "output=hub", "format=hub")
    tabicl(folder, "report", *needed, "run_dir=run")
    assert (folder / "run/report.html").is_file()
    assert "2 folds" in process(folder, ["estimator.py"])
