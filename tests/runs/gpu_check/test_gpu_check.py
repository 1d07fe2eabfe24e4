"""tabicl-gpu-check without a GPU: its files, and checks that fail, crash or do not fit into the time."""

import json
import os
import signal
import time

import pytest
from command_line import command

from tabicl_train.gpu_check import run, steps
from tabicl_train.gpu_check.place import CheckFailed
from tabicl_train.gpu_check.run import Check


def is_wrong(place) -> None:
    place.add("figures", figure="found before", value=0.5)
    raise CheckFailed("the number is wrong")


def raises(place) -> None:
    raise ValueError("not a number")


def dies(place) -> None:
    os._exit(3)


def hangs(place) -> None:
    signal.pause()


CHECKS = (
    Check("wrong", "a wrong number", is_wrong),
    Check("raises", "an error", raises),
    Check("dies", "a crash of the process", dies),
    Check("hangs", "takes too long", hangs, 0.1),
    Check("no_wait", "needs a GPU", steps.no_wait),
    Check("fp32_columns", "columns in fp32", steps.fp32_columns),
)


@pytest.fixture
def few_checks(monkeypatch):
    """Some checks in the place of those of the command."""
    monkeypatch.setattr(run, "CHECKS", CHECKS)
    monkeypatch.setattr(run, "GRACE", 0.1)


def test_checks_that_fail_are_reported_and_the_others_run(few_checks, tmp_path):
    result = command("gpu-check", f"output={tmp_path}/new")
    assert result.returncode == 1, result.stderr
    content = json.loads((tmp_path / "new/gpu-check.json").read_text())
    checks = {check["name"]: check for check in content["checks"]}
    assert {name: check["result"] for name, check in checks.items()} == {
        "wrong": "failed", "raises": "failed", "dies": "failed",
        "hangs": "failed", "no_wait": "skipped", "fp32_columns": "passed",
    }  # fmt: skip
    assert checks["wrong"]["why"] == "the number is wrong"
    assert checks["wrong"]["rows"][0]["value"] == 0.5
    assert "in raises" in checks["raises"]["trace"]
    assert "exit code 3" in checks["dies"]["why"]
    assert not content["is_gpu"] and checks["fp32_columns"]["rows"]
    page = (tmp_path / "new/gpu-check.md").read_text()
    assert "| dies | a crash of the process | failed |" in page and "| found before | 0.5 |" in page
    assert "ValueError: not a number" in page
    for text in (page, result.stderr, result.stdout):
        assert "nothing here is a figure of a GPU" in text

    again = command("gpu-check", f"output={tmp_path}/new")
    assert again.returncode == 2 and "overwrite=true" in again.stderr
    unknown = command("gpu-check", f"output={tmp_path}/new", "overwrite=true", "checks=[fp32_column]")
    assert unknown.returncode == 2 and "fp32_columns" in unknown.stderr


def test_without_time_a_check_is_skipped(tmp_path):
    entry = run.run_check(CHECKS[0], tmp_path, tmp_path, time.monotonic())
    assert (entry["result"], entry["why"], entry["rows"]) == ("skipped", "no time left", [])
