"""Two processes of which only the first one sees the folder of the run, as on two machines without a shared disk."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import short_runs
from forked import run_ranks

from tabicl_train.callbacks import guard

pytestmark = pytest.mark.slow  # test_everything.py resumes such a run


class Trouble(short_runs.Ruin):
    """Ruins the weights after a step; digests of them go to FOLDER/NAME.start|end.RANK."""

    def __init__(self, folder: Path, name: str, after: int) -> None:
        super().__init__(after)
        self.path = folder / name

    def on_train_start(self, module, **_) -> None:
        self.write_digest(module, "start")

    def on_train_end(self, module, **_) -> None:
        self.write_digest(module, "end")

    def write_digest(self, module, when: str) -> None:
        values = b"".join(p.detach().numpy().tobytes() for p in module.model.parameters())
        path = self.path.with_name(f"{self.path.name}.{when}.{os.environ['RANK']}")
        path.write_text(hashlib.sha256(values).hexdigest())


def train(folder: Path, name: str, after: int, *overrides: str) -> None:
    os.chdir(folder / f"machine-{os.environ['RANK']}")
    guard.HORIZON, guard.MEMORY = 2, 0.5
    trouble = Trouble(folder, name, after)
    status = short_runs.run(Path(name), "trainer.devices=2", "checkpoint.every=2", *overrides, callbacks=(trouble,))
    assert status == "finished"


def test_both_processes_have_the_weights_of_rank_0_at_the_start_and_after_a_rewind(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"machine-{rank}").mkdir()
    for name, after, *settings in (
        ("rewound", 9, *short_runs.REWIND, "trainer.precision=fp16", "trainer.max_steps=13"),
        ("from-weights", -1, "init_weights=rewound", "trainer.max_steps=1"),
    ):
        codes = run_ranks(train, tmp_path, name, after, *settings, folder=tmp_path)
        assert codes == [0, 0], (tmp_path / "stderr.0").read_text()
        assert (tmp_path / f"{name}.end.0").read_text() == (tmp_path / f"{name}.end.1").read_text()
    assert (tmp_path / "from-weights.start.1").read_text() == (tmp_path / "rewound.end.0").read_text()
    assert list((tmp_path / "machine-1").iterdir()) == []
    lines = (tmp_path / "machine-0/rewound/incidents.jsonl").read_text().splitlines()
    assert [json.loads(line)["action"] for line in lines if "back_to" in line] == ["rewind"]
