"""One run that does everything: growing rows, QASSMax, two ranks, bf16, a kill, a resume, an export, predictions."""

import os
import signal

import forked
import numpy as np
import pytest
from kills import arm
from runs import assert_same_end, last, metrics

from tabicl_train import TabICLClassifier
from tabicl_train.prediction.export import export
from tabicl_train.run_dir.records import Records

STAGES = ("first", "middle", "last")
SETTINGS = [
    "experiment=smoke", "curriculum=growing_rows", "model.col_scaling=qassmax", "model.icl_scaling=qassmax",
    "trainer.devices=2", "trainer.accelerator=cpu", "trainer.precision=bf16", "stream.num_workers=1",
    "checkpoint.every=2",
    *(f"curriculum.stages.{stage}.{value}" for stage in STAGES for value in ("steps=3", "tables=8")),
]  # fmt: skip


def train(point: str, *settings: str) -> None:
    if point and os.environ["RANK"] == "0":
        arm(point)
    forked.train(*settings)


def test_a_killed_run_ends_as_an_undisturbed_one_and_the_tabicl_package_predicts_with_it(tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for run_dir, point, codes in (
        (whole, "", [0, 0]),
        (torn, "append,metrics.csv,4,middle", [-signal.SIGKILL, 1]),  # of the second stage
        (torn, "", [0, 0]),
    ):
        found = forked.run_ranks(train, point, *SETTINGS, f"run_dir={run_dir}", folder=tmp_path)
        assert found == codes, (tmp_path / "stderr.0").read_text()
    starts = [start["step"] for start in Records(torn).lines("provenance.jsonl")]
    assert starts in ([0, 4], [0, 2])  # a save beside training may not have reached the disk
    assert_same_end(torn, whole)
    assert [row["stage"] for row in metrics(torn)] == [stage for stage in STAGES for _ in range(3)]
    assert last(torn)["config"]["model"]["icl_scaling"] == "qassmax"

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
    assert np.abs(p - expected.predict_proba(X[40:])).max() < 1e-5 and np.ptp(p, axis=0).max() > 1e-4
