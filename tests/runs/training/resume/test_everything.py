"""One run that does everything: growing rows, QASSMax, two ranks, bf16, a kill, a stop, an export, predictions."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from forked import run_ranks
from kills import arm
from training_runs import assert_same_end, last_checkpoint, read_metrics

from tabicl_train import TabICLClassifier
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.outputs import owner_problem
from tabicl_train.run.records import Records
from tabicl_train.training import loop
from tabicl_train.weights.export import export

STAGES = ("first", "middle", "last")
SETTINGS = [
    "experiment=smoke", "curriculum=growing_rows", "model.col_scaling=qassmax", "model.icl_scaling=qassmax",
    "trainer.devices=2", "trainer.accelerator=cpu", "trainer.precision=bf16", "checkpoint.every=2",
    *(f"curriculum.stages.{stage}.{value}" for stage in STAGES for value in ("steps=2", "tables=4", "features=[2,4]")),
    *(f"curriculum.stages.{stage}.rows=[20,{rows}]" for stage, rows in zip(STAGES, (20, 30, 40), strict=True)),
]  # fmt: skip


class StopRank1:
    """SIGINT to one rank, in the third step that it trains."""

    def before_step(self, state, item) -> None:
        if os.environ["RANK"] == "1" and state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)


def train(folder: Path, point: str, config: RunConfig) -> None:
    os.chdir(folder / f"machine-{os.environ['RANK']}")  # which have no shared disk
    if point and os.environ["RANK"] == "0":
        arm(point)
    callbacks = (StopRank1(),) if config.stream.num_workers else ()
    assert loop.train(config, callbacks) == ("preempted" if callbacks else "finished")


def test_a_killed_run_ends_as_an_undisturbed_one_and_the_package_predicts_with_it(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"machine-{rank}").mkdir()
    for run_dir, workers, point, codes in (
        ("whole", 0, "", [0, 0]),
        ("torn", 1, "", [0, 0]),  # stopped
        ("torn", 0, "append,metrics.csv,1,middle", [-signal.SIGKILL, 1]),  # after step 5
        ("torn", 0, "", [0, 0]),
    ):
        config = compose([*SETTINGS, f"stream.num_workers={workers}", f"run_dir={run_dir}"])
        assert run_ranks(train, tmp_path, point, config, folder=tmp_path) == codes, (tmp_path / "stderr.0").read_text()
    whole, torn = tmp_path / "machine-0/whole", tmp_path / "machine-0/torn"
    assert list((tmp_path / "machine-1").iterdir()) == []
    assert [path.name for path in torn.rglob("*") if owner_problem(path) is None] == []  # new files go into RUN_FILES
    starts = [start["step"] for start in Records(torn).lines("provenance.jsonl")]
    assert starts in ([0, 3, 4], [0, 3, 3])  # a save beside training may not have reached the disk
    assert_same_end(torn, whole)
    assert [row["stage"] for row in read_metrics(torn)] == [stage for stage in STAGES for _ in range(2)]
    assert last_checkpoint(torn)["config"]["model"]["icl_scaling"] == "qassmax"

    export(str(torn), str(tmp_path / "model.ckpt"))
    tabicl = pytest.importorskip("tabicl")
    rng = np.random.default_rng(0)
    X, y = rng.uniform(-1, 1, (60, 5)), np.arange(40) % 3
    package = tabicl.TabICLClassifier(
        model_path=tmp_path / "model.ckpt", allow_auto_download=False, n_estimators=1, norm_methods="none",
        feat_shuffle_method="none", class_shuffle_method="none", device="cpu",
    ).fit(X[:40], y)  # fmt: skip
    expected = TabICLClassifier(torn, n_estimators=1, norm_methods=("none",), device="cpu").fit(X[:40], y)
    p = package.predict_proba(X[40:])
    assert np.abs(p - expected.predict_proba(X[40:])).max() < 1e-5
    assert np.ptp(p, axis=0).max() > 1e-4
