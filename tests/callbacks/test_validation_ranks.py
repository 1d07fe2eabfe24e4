"""Rank 0 validates and gives the answer alone; a stop signal that only another rank has seen ends both."""

import json
import os
import signal
from pathlib import Path
from unittest import mock

import pytest
from forked import run_ranks
from own_rows import run
from runs import read

from tabicl_train.callbacks.held_out.answer import Answer
from tabicl_train.callbacks.validation import Validation
from tabicl_train.run_dir.status import read_status


WAITING = {"validation": (Validation, "validate_if_due"), "answer": (Answer, "give")}


def train(run_dir: Path, start: Path, signaled: str = "", at: int = -1) -> None:
    """A run of which rank 1 gets SIGTERM when it begins to wait for rank 0 after `at` steps."""

    def patched(owner: type, name: str):
        method = getattr(owner, name)

        def call(self, step, *arguments):
            if (os.environ["RANK"], step) == ("1", at):
                signal.raise_signal(signal.SIGTERM)
            return method(self, step, *arguments)

        return mock.patch.object(owner, name, call)

    with patched(*WAITING[signaled or "answer"]):
        run(run_dir, f"init_weights={start}", best="synthetic", name="dummy")


def test_a_stop_signal_to_another_rank_ends_a_validation_and_the_answer(tmp_path):
    start, folder = tmp_path / "start", tmp_path / "run"
    run(start, "trainer.max_steps=2", "validation.every=0", name="dummy")

    def outcome(*signaled) -> tuple[str, int, list[str]]:
        assert run_ranks(train, folder, start, *signaled, folder=tmp_path) == [0, 0], (
            tmp_path / "stderr.0"
        ).read_text()
        status = read_status(folder)
        return status["status"], status["step"], sorted({row["step"] for row in read(folder / "validation.csv")})

    assert outcome("validation", 2) == ("preempted", 2, ["0"])
    assert outcome("answer", 8) == ("preempted", 8, ["0", "2", "4", "6", "8"])
    assert json.loads((folder / "answer.json").read_text())["step"] == 2
    assert outcome() == ("finished", 8, ["0", "2", "4", "6", "8"])
    assert json.loads((folder / "answer.json").read_text())["step"] == 8
