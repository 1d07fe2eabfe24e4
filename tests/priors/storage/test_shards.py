"""The files that stored tables are in, and what is said about those that cannot be read."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from stored_tables import PRIOR, assert_serves, names, requests, stamps

from priors import PriorError, TableSpec, build_prior
from priors.random import STREAM_VERSION
from priors.storage.dump import dump

pytestmark = pytest.mark.multi_process


def test_stored_tables_equal_drawn_ones(dumped):
    assert names(dumped) == ["steps-00000000.safetensors", "steps-00000004.safetensors", "steps-00000008.safetensors"]
    assert all(path.stat().st_mode & 0o777 == dumped.stat().st_mode & 0o666 for path in dumped.iterdir())
    requested = requests(0, 10)
    assert any(PRIOR.sample(spec, address).rejections for address, spec in requested)
    assert_serves(dumped, requested)
    assert_serves(dumped, requested[::-7])


@pytest.mark.parametrize("name", ["graph_scm", "mlp_scm", "dummy"])
def test_stored_numeric_targets_equal_drawn_ones(name, tmp_path):
    requested = [(address, dataclasses.replace(spec, max_classes=0)) for address, spec in requests(0, 3)]
    prior = build_prior(name)
    assert dump(prior, requested, tmp_path, shard_size=2) == {"written": 2}
    assert_serves(tmp_path, requested, prior)
    assert dump(prior, requested, tmp_path, shard_size=2) == {"kept": 2}
    (address, spec), *_ = requests(0, 1)
    with pytest.raises(PriorError, match=r"is from another curriculum: it is stored as .*max_classes=0"):
        build_prior("disk", folder=str(tmp_path)).sample(spec, address)


def test_a_shard_describes_itself(dumped):
    with safe_open(dumped / "steps-00000004.safetensors", framework="np") as file:
        metadata, names = file.metadata(), set(file.keys())
    assert metadata["prior"] == "mlp_scm" and json.loads(metadata["options"]) == dataclasses.asdict(PRIOR)
    assert (metadata["seed"], metadata["shard_size"]) == ("5", "4")
    assert (metadata["format"], metadata["stream_version"]) == ("tabicl-train tables 1", str(STREAM_VERSION))
    assert json.loads(metadata["versions"])["torch"] == torch.__version__
    record = json.loads(metadata["6.3"])
    spec = dict(requests(4, 8))[(5, 6, 3)]
    assert record["num_rows"] == spec.num_rows and record["group_seed"] == [5, 6, 2] and len(record["checksum"]) == 16
    assert names == {f"{s}.{i}.{part}" for s in range(4, 8) for i in range(4) for part in ("X", "y", "plan")}


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def flip_in_data(path: Path) -> None:
    flip(path, -1)


def flip_in_record(path: Path) -> None:
    flip(path, path.read_bytes().index(b'num_rows\\":') + 12)


def flip_in_plan(path: Path) -> None:
    flip(path, path.read_bytes().rindex(b"mlp_scm, "))


def flip_header_size(path: Path) -> None:
    flip(path, 6)


def other_file(path: Path) -> None:
    path.write_text("steps")


SPOILERS = [truncate, empty, flip_in_data, flip_in_record, flip_in_plan, flip_header_size, other_file]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_damaged_shard_is_named_and_written_again(spoil, folder, capsys):
    path = folder / "steps-00000004.safetensors"
    spoil(path)
    disk = build_prior("disk", folder=str(folder))
    with pytest.raises(PriorError, match=r"shard .*copy/steps-00000004.safetensors is damaged \("):
        for address, spec in requests(4, 8):
            disk.sample(spec, address)
    for address, spec in requests(0, 4):
        disk.sample(spec, address)  # the other shards can be read
    assert dump(PRIOR, requests(0, 10), folder, shard_size=4) == {"kept": 2, "written": 1, "damaged": 1}
    assert "steps-00000004.safetensors is damaged (" in capsys.readouterr().err
    fresh = shutil.copytree(folder, folder.parent / "repaired")  # another path, as open shards stay open
    assert_serves(fresh, requests(0, 10))


def test_a_missing_table_is_named(folder):
    disk = build_prior("disk", folder=str(folder))
    spec = dict(requests(5, 6))[(5, 5, 0)]
    (folder / "steps-00000004.safetensors").unlink()
    with pytest.raises(
        PriorError, match=r"shard .*/steps-00000004.safetensors is missing, and with it table 0 of step 5"
    ):
        disk.sample(spec, (5, 5, 0))
    with pytest.raises(
        PriorError, match=r"steps-00000400.safetensors is missing.*has steps-00000000.*, steps-00000008"
    ):
        disk.sample(spec, (5, 400, 0))
    with pytest.raises(PriorError, match=r"steps-00000008.safetensors holds no table 4 of step 9; it was never dumped"):
        disk.sample(spec, (5, 9, 4))
    with pytest.raises(
        PriorError, match=r"steps-00000008.safetensors holds no table 0 of step 10; it was never dumped"
    ):
        disk.sample(spec, (5, 10, 0))
    with pytest.raises(PriorError, match=r"steps-00000008.safetensors holds tables of seed 5, not of seed 6"):
        disk.sample(spec, (6, 9, 0))
    with pytest.raises(PriorError, match=r"tables on disk have addresses \(seed, step, table\)"):
        disk.sample(spec, 7)
    with pytest.raises(PriorError, match=r"impossible table: num_features is 0"):
        disk.sample(dataclasses.replace(spec, num_features=0), (5, 9, 0))


@pytest.mark.parametrize(
    "change", [{"num_rows": 61}, {"train_size": 9}, {"num_features": 6}, {"max_classes": 2}, {"group_seed": (5, 1, 2)}]
)
def test_a_table_of_another_curriculum_is_refused(change, dumped):
    (address, spec), *_ = requests(1, 2)
    other = dataclasses.replace(spec, **change)
    message = r"table 0 of step 1 in shard .*/steps-00000000.safetensors is from another curriculum: it is stored as"
    with pytest.raises(PriorError, match=message):
        build_prior("disk", folder=str(dumped)).sample(other, address)
    with pytest.raises(PriorError, match=message):
        dump(PRIOR, [(address, other)], dumped, shard_size=4)


def test_group_addresses_are_compared_as_tuples(tmp_path):
    spec = TableSpec(30, 15, 2, 2, group_seed=0)
    dump(build_prior("tree_scm"), [((1, 0, 0), spec)], tmp_path)
    for same in (0, (0,)):
        assert_serves(tmp_path, [((1, 0, 0), dataclasses.replace(spec, group_seed=same))], build_prior("tree_scm"))


def change_metadata(path: Path, **changes: str | None) -> None:
    """Set entries of a shard's metadata, or remove those that are None."""
    with safe_open(path, framework="np") as file:
        metadata = {**file.metadata(), **changes}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, {key: value for key, value in metadata.items() if value is not None})


def test_a_shard_without_a_stream_version_has_version_1(folder, monkeypatch):
    monkeypatch.setattr("priors.storage.shards.STREAM_VERSION", 1)
    for path in folder.iterdir():
        change_metadata(path, stream_version=None)
    before = stamps(folder)
    assert dump(PRIOR, requests(0, 10), folder, shard_size=4) == {"kept": 3}
    assert stamps(folder) == before
    assert_serves(folder, requests(0, 10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"stream_version": "7"},
            f"holds tables of stream version 7, but the priors are at stream version {STREAM_VERSION}",
        ),
        ({"format": "tabicl-train tables 2"}, "has format version 2; only 1 can be read"),
    ],
)
def test_a_shard_of_another_version_is_refused_and_left_alone(changes, message, folder):
    path = folder / "steps-00000004.safetensors"
    change_metadata(path, **changes)
    before = stamps(folder)
    (address, spec), *_ = requests(4, 8)
    disk = build_prior("disk", folder=str(folder))
    with pytest.raises(PriorError, match=f"shard .*/{path.name} {message}"):
        disk.sample(spec, address)
    assert re.search(message, disk.missing_steps(5, [4] * 10)[0])
    with pytest.raises(PriorError, match=message):
        dump(PRIOR, requests(0, 10), folder, shard_size=4)
    assert stamps(folder) == before
