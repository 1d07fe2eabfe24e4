"""launch/multinode.sh on several hosts, one of which is lost; the hosts are network namespaces of this machine."""

from pathlib import Path

import pytest
from hosts import CAN_MAKE_HOSTS, hosts
from one_machine_slurm import until
from runs import last, metrics, read
from scripts import ENVIRONMENT, copy_scripts

from tabicl_train.run_dir.records import Records

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not CAN_MAKE_HOSTS, reason="needs root and the programs ip and unshare"),
]
# Steps of about 0.1 s on two idle cores: half a minute for a host to be lost and to come back.
SETTINGS = ["experiment=smoke", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu", "checkpoint.every=20",
            "curriculum.stages.smoke.steps=500"]  # fmt: skip


def steps(run_dir: Path) -> int:
    rows = Records(run_dir).rows("metrics.csv")
    return int(rows[-1]["step"]) if rows else 0


def shapes(run_dir: Path, without: range) -> list[tuple]:
    """The tables of rank 0 in all other steps."""
    rows = [row for row in read(run_dir / "batches.csv") if int(row["step"]) not in without]
    return [tuple(row[key] for key in ("step", "rows", "n", "features", "classes", "tables")) for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run on four ranks that are never disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    launch, run_dir = copy_scripts(folder), folder / "run"
    with hosts(["a", "b"], folder) as group:
        command = [str(launch / "multinode.sh"), "b:29400", "2", "2", *SETTINGS, f"run_dir={run_dir}"]
        both = [group.start(name, command, folder / name, ENVIRONMENT) for name in ("a", "b")]
        assert [host.wait(600) for host in both] == [0, 0], (folder / "a").read_text()
    return run_dir


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_host_that_is_lost_and_comes_back_changes_no_table(nodes, whole, tmp_path):
    """The lost host sorts before the other one by name: rank 0 was there, with the lock and the store of the run.

    With 1:2 the other host goes on alone until it comes back.
    """
    launch, run_dir = copy_scripts(tmp_path), tmp_path / "run"
    with hosts(["a", "b"], tmp_path) as group:
        command = [str(launch / "multinode.sh"), "b:29400", nodes, "2", *SETTINGS, f"run_dir={run_dir}"]
        lost, other = (group.start(name, command, tmp_path / name, ENVIRONMENT) for name in ("a", "b"))
        until(lambda: steps(run_dir) > 45, "the run begins")
        lost.kill()
        lost.wait()
        if nodes == "1:2":
            until(lambda: len(Records(run_dir).lines("provenance.jsonl")) == 2, "the other host goes on")
            before = steps(run_dir)
            until(lambda: steps(run_dir) > before + 20, "it does some steps")
        again = group.start("a", command, tmp_path / "a", ENVIRONMENT)
        assert [again.wait(600), other.wait(600)] == [0, 0], (tmp_path / "b").read_text()
    starts = Records(run_dir).lines("provenance.jsonl")
    first, *restarts = [start["restart"] for start in starts]
    assert first is None and [r["ranks"] for r in restarts] == ([2, 4] if nodes == "1:2" else [4])
    assert "rank 0 on a" in restarts[0]["cause"] and restarts[0]["repeated"] < 60
    fewer_ranks = range(starts[1]["step"] + 1, starts[-1]["step"] + 1)  # in which rank 0 had other tables of a step
    assert shapes(run_dir, fewer_ranks) == shapes(whole, fewer_ranks)
    ours, theirs = ([float(row["loss"]) for row in metrics(folder)] for folder in (run_dir, whole))
    # On another number of ranks only roundings differ (3e-7 was seen); another table changes the second digit.
    assert ours == (theirs if nodes == "2" else pytest.approx(theirs, rel=1e-4))
    assert last(run_dir)["global_step"] == len(theirs) == 500
