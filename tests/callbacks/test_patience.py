"""validation.patience: a run ends when its scores have not improved for a while, on all ranks and after any restart."""

import math
from pathlib import Path
from unittest import mock

import pytest
from forked import exit_code, ranks
from own_rows import run

from tabicl_train.callbacks.held_out.selection import out_of_patience
from tabicl_train.callbacks.validation import Validation
from tabicl_train.config.monitoring import ValidationConfig
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.status import read_status

LOSSES = [1.0, 0.8, 0.9, 0.8, 0.85, 0.7, 0.6, 0.5]  # of steps 1 to 8: 3 without a better one end with step 5
VALIDATE = Validation.validate
PATIENT = ["validation.every=1", "validation.patience=3"]


def go(folder: Path, *overrides: str) -> None:
    """A run whose validations find LOSSES."""

    def validate(self, step, *arguments):
        def drawn(self, network, module, part):
            return ("synthetic", 40, LOSSES[step - 1], 0.5, None, 1.6), []

        with mock.patch.object(Validation, "score_drawn", drawn):
            VALIDATE(self, step, *arguments)

    with mock.patch.object(Validation, "validate", validate):
        assert run(folder, *overrides, best="synthetic", name="dummy") == "finished"


def rows(losses: list[float]) -> list[dict[str, str]]:
    return [
        {"step": str(step), "data": "own", "rows": "40", "loss": str(loss), "roc_auc": ""}
        for step, loss in enumerate(losses, start=1)
    ]


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        (LOSSES, 5), ([1.0, 1.0, 1.0, 1.0], 4), ([1.0, math.nan, math.nan, math.nan], 4),
        ([math.nan, 2.0, 1.0, 1.5], None), ([3.0, 2.0, 1.0, 0.5], None),
    ],
)  # fmt: skip
def test_the_end_follows_from_the_rows_up_to_a_step(losses, ends):
    settings = ValidationConfig(every=1, best="own", patience=3)
    over = [step for step in range(1, len(losses) + 1) if out_of_patience(settings, rows(losses[:step]), step)]
    assert over[:1] == ([] if ends is None else [ends])
    later = rows(losses)  # those of steps that are computed again do not count
    assert all(out_of_patience(settings, later, step) is None for step in range(ends or len(losses)))
    assert out_of_patience(ValidationConfig(every=1, best="own"), rows([1.0] * 9), 9) is None


@pytest.mark.slow
def test_a_run_ends_as_finished_and_stays_so(tmp_path, capfd):
    go(tmp_path / "whole", *PATIENT)
    line = "no better score in 3 validations since that of step 2 (validation.patience=3); the run ends"
    assert f"validation step 5: {line}" in capfd.readouterr().err
    status = read_status(tmp_path / "whole")
    assert (status["status"], status["step"]) == ("finished", 5)
    go(tmp_path / "whole", *PATIENT)
    assert "finished already, 5 steps are done" in capfd.readouterr().err
    for steps in (3, 8):
        go(tmp_path / "torn", *PATIENT, f"trainer.max_steps={steps}")
    written = [Records(tmp_path / name).rows("validation.csv") for name in ("torn", "whole")]
    assert written[0] == written[1] and [row["step"] for row in written[1]][::2] == list("12345")
    go(tmp_path / "torn", "validation.every=1", "validation.patience=4")
    assert read_status(tmp_path / "torn")["step"] == 8


@pytest.mark.slow
@pytest.mark.multi_process
def test_all_ranks_end_together(tmp_path):
    for _ in range(2):
        with ranks(go, tmp_path / "run", *PATIENT, folder=tmp_path) as processes:
            assert [exit_code(process) for process in processes] == [0, 0], (tmp_path / "stderr.0").read_text()
    assert [row["step"] for row in Records(tmp_path / "run").rows("validation.csv")][::2] == list("12345")
    assert read_status(tmp_path / "run")["status"] == "finished"
