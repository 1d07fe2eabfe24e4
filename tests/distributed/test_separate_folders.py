"""Two processes of which only the first one sees the folder of the run, as on two machines without a shared disk."""

import json
from pathlib import Path

import pytest
from forked import run_ranks
from runs import assert_same_end
from separate_folders import train

pytestmark = pytest.mark.multi_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("separate")
    for rank in (0, 1):
        (folder / f"machine-{rank}").mkdir()
    rewind = ("guard.after=3", "guard.loss=10", "guard.action=rewind", "checkpoint.keep=9")
    for expected, trouble, *settings in (
        ("finished", ("none", 0), "whole"),
        ("preempted", ("stop", 4), "torn"),
        ("finished", ("none", 0), "torn"),
        ("finished", ("none", 0), "torn"),  # there is nothing left to do
        ("finished", ("none", 0), "from-weights", "init_weights=whole", "trainer.max_steps=1"),
        ("finished", ("ruin", 6), "rewound", *rewind),
    ):
        codes = run_ranks(train, folder, expected, trouble, *settings, folder=folder)
        assert codes == [0, 0], (folder / "stderr.0").read_text()
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
