"""Two processes of which only the first one sees the folder of the run, as on two machines without a shared disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import assert_same_end

pytestmark = pytest.mark.multi_process

SCRIPT = """
import hashlib, os, signal, sys
from pathlib import Path
from unittest import mock

import lightning as L
import torch

from tabicl_train import train as training
from tabicl_train.callbacks import guard
from tabicl_train.config.compose import compose

SETTINGS = [
    "experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=8", "checkpoint.every=2",
    "trainer.accelerator=cpu", "trainer.devices=2", "averages.ema=0.9", "model.dropout=0.1",
]
rank = int(os.environ["RANK"])
folder = Path(sys.argv[1])
os.chdir(folder / f"machine-{rank}")
guard.HORIZON, guard.MEMORY = 2, 0.5


class Trouble(L.Callback):
    def __init__(self, name, step):
        self.name, self.step = name, step

    def on_train_batch_start(self, trainer, module, item, _):
        if item.step == self.step and self.name == "stop" and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if item.step == self.step and self.name == "ruin":
            with torch.no_grad():
                for p in module.model.icl_predictor.decoder.parameters():
                    p.mul_(100)

    def on_train_start(self, trainer, module):
        self.write_digest(module, "start")

    def on_train_end(self, trainer, module):
        self.write_digest(module, "end")

    def write_digest(self, module, when):
        values = b"".join(p.detach().numpy().tobytes() for p in module.model.parameters())
        (folder / f"{module.config.run_dir}.{when}.{rank}").write_text(hashlib.sha256(values).hexdigest())


def train(run_dir, *overrides, trouble=("none", None)):
    chosen = training.run_callbacks
    with mock.patch.object(training, "run_callbacks", lambda *a: [Trouble(*trouble), *chosen(*a)]):
        return training.train(compose([*SETTINGS, f"run_dir={run_dir}", *overrides]))


assert train("whole") == "finished"
assert train("torn", trouble=("stop", 4)) == "preempted"
assert train("torn") == "finished"
assert train("torn") == "finished"  # there is nothing left to do
assert train("from-weights", "init_weights=whole", "trainer.max_steps=1") == "finished"
rewind = ("guard.after=3", "guard.loss=10", "guard.action=rewind", "checkpoint.keep=9")
assert train("rewound", *rewind, trouble=("ruin", 6)) == "finished"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("separate")
    for rank in (0, 1):
        (folder / f"machine-{rank}").mkdir()
    (folder / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    result = subprocess.run([*launch, folder / "script.py", folder], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return folder


def digest(folder: Path, name: str) -> str:
    """Of a rank's weights at the start or the end of a training."""
    return (folder / name).read_text()


def test_a_run_continues_to_the_bit_and_writes_nothing_elsewhere(folder):
    assert_same_end(folder / "machine-0/torn", folder / "machine-0/whole")
    assert list((folder / "machine-1").iterdir()) == []


@pytest.mark.parametrize("name", ["whole", "torn", "from-weights", "rewound"])
def test_both_processes_end_with_the_same_weights(name, folder):
    assert digest(folder, f"{name}.end.0") == digest(folder, f"{name}.end.1")


def test_initial_weights_are_those_that_rank_0_has_read(folder):
    assert digest(folder, "from-weights.start.1") == digest(folder, "whole.end.0")


def test_a_rewind_goes_back_on_both_processes(folder):
    lines = (folder / "machine-0/rewound/incidents.jsonl").read_text().splitlines()
    (incident,) = [json.loads(line) for line in lines if "back_to" in line]
    assert (incident["step"], incident["back_to"], incident["action"]) == (6, 4, "rewind")
