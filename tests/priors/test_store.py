import dataclasses
import json
import os
import pickle
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from priors import Prior, PriorError, TableSpec, build_prior
from priors.random import rng_at
from priors.storage.shards import dump
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import build_prior as build_configured
from tabicl_train.curriculum import plan_step
from tabicl_train.errors import ConfigError
from tabicl_train.stream import StepStream

pytestmark = pytest.mark.multi_process

SEED = 5
PRIOR = build_prior("mlp_scm")


def requests(start: int, stop: int, seed: int = SEED) -> list:
    """Two groups of two tables a step, of varying shape."""
    found = []
    for step in range(start, stop):
        rng = rng_at(seed, step)
        for first in (0, 2):
            rows, features = (int(value) for value in rng.integers((20, 1), (60, 6)))
            spec = TableSpec(rows, rows // 2, features, 3, group_seed=(seed, step, first))
            found += [((seed, step, index), spec) for index in (first, first + 1)]
    return found


def assert_same(table, live) -> None:
    assert table.X.dtype == torch.float32 and torch.equal(table.X, live.X)
    assert table.y.dtype == torch.int64 and torch.equal(table.y, live.y)
    assert (table.train_size, table.num_classes) == (live.train_size, live.num_classes)
    assert table.rejections == live.rejections and isinstance(table.rejections, Counter)
    assert table.plan == str(live.plan)


def assert_serves(folder: Path, wanted: list, prior: Prior = PRIOR) -> None:
    disk = build_prior("disk", folder=str(folder))
    for address, spec in wanted:
        assert_same(disk.sample(spec, address), prior.sample(spec, address))


@pytest.fixture(scope="module")
def dumped(tmp_path_factory) -> Path:
    """Steps 0..9 in shards of four steps, drawn by two processes."""
    folder = tmp_path_factory.mktemp("dump") / "tables"
    assert dump(PRIOR, requests(0, 10), folder, shard_size=4, processes=2, total=40) == {"written": 3}
    return folder


@pytest.fixture
def folder(dumped, tmp_path) -> Path:
    """A copy, to be spoilt."""
    return shutil.copytree(dumped, tmp_path / "copy")


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_tables_on_disk_are_the_live_ones(dumped):
    assert shards(dumped) == ["steps-00000000.safetensors", "steps-00000004.safetensors", "steps-00000008.safetensors"]
    assert all(path.stat().st_mode & 0o777 == dumped.stat().st_mode & 0o666 for path in dumped.iterdir())
    wanted = requests(0, 10)
    assert any(PRIOR.sample(spec, address).rejections for address, spec in wanted)
    assert_serves(dumped, wanted)
    assert_serves(dumped, wanted[::-7])


def test_a_shard_describes_itself(dumped):
    with safe_open(dumped / "steps-00000004.safetensors", framework="np") as file:
        metadata, names = file.metadata(), set(file.keys())
    assert metadata["prior"] == "mlp_scm" and json.loads(metadata["options"]) == dataclasses.asdict(PRIOR)
    assert (metadata["seed"], metadata["shard_size"]) == ("5", "4")
    assert json.loads(metadata["versions"])["torch"] == torch.__version__
    record = json.loads(metadata["6.3"])
    spec = dict(requests(4, 8))[(5, 6, 3)]
    assert record["num_rows"] == spec.num_rows and record["group_seed"] == [5, 6, 2] and len(record["checksum"]) == 16
    assert names == {f"{s}.{i}.{part}" for s in range(4, 8) for i in range(4) for part in ("X", "y", "plan")}


def test_the_disk_prior_travels_to_worker_processes(dumped):
    disk = build_prior("disk", folder=str(dumped))
    (address, spec), *_ = requests(9, 10)
    first = disk.sample(spec, address)
    assert_same(
        pickle.loads(pickle.dumps(disk)).sample(spec, address), dataclasses.replace(first, plan=str(first.plan))
    )


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_second_dump_keeps_what_is_there(folder):
    before = stamps(folder)
    assert dump(PRIOR, requests(0, 10), folder, shard_size=4) == {"kept": 3}
    assert dump(PRIOR, requests(5, 7), folder, shard_size=4) == {"kept": 1}
    assert stamps(folder) == before


def test_a_longer_dump_adds_to_the_last_shard(folder):
    before = stamps(folder)
    assert dump(PRIOR, requests(9, 14), folder, shard_size=4) == {"written": 2}
    after = stamps(folder)
    assert [name for name in before if before[name] == after[name]] == shards(folder)[:2]
    assert_serves(folder, requests(0, 14))


class Counting(type(PRIOR)):
    """The same tables, and the addresses that were drawn."""

    def plan(self, spec, seed):
        assert torch.get_num_threads() == 1
        return super().plan(spec, seed)

    def sample(self, spec, seed):
        drawn.append(seed)
        return super().sample(spec, seed)


drawn: list = []
Counting.__module__ = type(PRIOR).__module__


def test_only_missing_tables_are_drawn(folder):
    drawn.clear()
    (folder / "steps-00000004.safetensors").unlink()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert dump(Counting(), requests(3, 11), folder, shard_size=4) == {"kept": 1, "written": 2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert drawn == [address for address, _ in requests(4, 8) + requests(10, 11)]
    assert_serves(folder, requests(0, 11))


def test_a_dump_that_is_killed_leaves_whole_shards_only(folder, monkeypatch):
    for name in shards(folder)[1:]:
        (folder / name).unlink()
    renamed = []

    def replace(source, target):
        assert not Path(target).exists() and os.path.getsize(source) > 1000
        renamed.append(Path(target).name)
        if len(renamed) == 2:
            raise KeyboardInterrupt

        os.rename(source, target)

    monkeypatch.setattr("priors.storage.shards.os.replace", replace)
    with pytest.raises(KeyboardInterrupt):
        dump(PRIOR, requests(0, 10), folder, shard_size=4)
    assert shards(folder) == ["steps-00000000.safetensors", "steps-00000004.safetensors"]
    monkeypatch.undo()
    (folder / "steps-00000008.tmp").write_bytes(b"what a power failure leaves")
    assert_serves(folder, requests(0, 8))
    assert dump(PRIOR, requests(0, 10), folder, shard_size=4) == {"kept": 2, "written": 1}
    assert len(shards(folder)) == 3
    assert_serves(folder, requests(0, 10))


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
def test_a_damaged_shard_is_named_and_mended(spoil, folder, capsys):
    path = folder / "steps-00000004.safetensors"
    spoil(path)
    disk = build_prior("disk", folder=str(folder))
    with pytest.raises(PriorError, match=r"shard .*copy/steps-00000004.safetensors is damaged \("):
        for address, spec in requests(4, 8):
            disk.sample(spec, address)
    for address, spec in requests(0, 4):
        disk.sample(spec, address)  # the others serve on
    assert dump(PRIOR, requests(0, 10), folder, shard_size=4) == {"kept": 2, "written": 1, "damaged": 1}
    assert "steps-00000004.safetensors is damaged (" in capsys.readouterr().err
    fresh = shutil.copytree(folder, folder.parent / "mended")  # another path, as open shards stay open
    assert_serves(fresh, requests(0, 10))


def test_what_is_not_there_is_told(folder):
    disk = build_prior("disk", folder=str(folder))
    spec = dict(requests(5, 6))[(5, 5, 0)]
    (folder / "steps-00000004.safetensors").unlink()
    with pytest.raises(
        PriorError, match=r"shard .*/steps-00000004.safetensors is missing, and table 0 of step 5 with it"
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
    with pytest.raises(PriorError, match=r"tables on disk have the addresses \(seed, step, table\)"):
        disk.sample(spec, 7)
    with pytest.raises(PriorError, match=r"impossible table: num_features is 0"):
        disk.sample(dataclasses.replace(spec, num_features=0), (5, 9, 0))


def test_steps_that_are_missing_are_known_before_they_are_needed(folder):
    disk = build_prior("disk", folder=str(folder))
    assert disk.missing_steps(SEED, [4] * 10) == []
    (folder / "steps-00000004.safetensors").unlink()
    (found,) = disk.missing_steps(SEED, [5, *[4] * 11])
    assert "tables of 7 of the run's 12 steps are missing: 0, 4..7, 10..11 (tabicl-prior" in found
    assert "dump first_step=0 steps=12 writes them" in found
    assert "first_step=4 steps=4 " in disk.missing_steps(SEED, [4] * 10)[0]
    (folder / "steps-00000008.safetensors").write_bytes(b"")
    assert "steps-00000008.safetensors is damaged (" in disk.missing_steps(SEED, [4])[0]


@pytest.mark.parametrize(
    "change", [{"num_rows": 61}, {"train_size": 9}, {"num_features": 6}, {"max_classes": 2}, {"group_seed": (5, 1, 2)}]
)
def test_another_curriculum_is_told(change, dumped):
    (address, spec), *_ = requests(1, 2)
    other = dataclasses.replace(spec, **change)
    message = (
        r"table 0 of step 1 in shard .*/steps-00000000.safetensors is of another curriculum: it is TableSpec\(num_rows"
    )
    with pytest.raises(PriorError, match=message):
        build_prior("disk", folder=str(dumped)).sample(other, address)
    with pytest.raises(PriorError, match=message):
        dump(PRIOR, [(address, other)], dumped, shard_size=4)


@pytest.mark.parametrize(
    ("prior", "seed", "shard_size", "words"),
    [
        (build_prior("dummy"), SEED, 4, "its prior is mlp_scm, not dummy"),
        (build_prior("mlp_scm", causal=True), SEED, 4, "its options is .*causal"),
        (PRIOR, 6, 4, "its seed is 5, not 6"),
        (PRIOR, SEED, 2, "its shard_size is 4, not 2"),
    ],
)
def test_a_folder_holds_one_dump(prior, seed, shard_size, words, dumped):
    before = stamps(dumped)
    with pytest.raises(PriorError, match=rf"shard .*/steps-00000000.safetensors is of another dump: {words}"):
        dump(prior, requests(0, 2, seed), dumped, shard_size)
    assert stamps(dumped) == before


def test_errors_reach_the_caller_from_worker_processes(dumped, tmp_path):
    (address, spec), *_ = requests(1, 2)
    with pytest.raises(PriorError, match="impossible table: num_features is 0"):
        dump(PRIOR, [(address, dataclasses.replace(spec, num_features=0))], tmp_path, processes=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wanted", "options", "words"),
    [
        (requests(4, 5) + requests(0, 1), {"shard_size": 2}, "in the order of their steps"),
        (requests(0, 1) + requests(0, 1, seed=9), {}, "several seeds: 5 and 9"),
        ([], {"shard_size": 0}, "shard_size is 0"),
        ([], {"processes": 0}, "processes is 0"),
    ],
)
def test_impossible_dumps_are_told(wanted, options, words, tmp_path):
    with pytest.raises(PriorError, match=words):
        dump(build_prior("dummy"), wanted, tmp_path, **options)


def test_group_addresses_are_compared_as_tuples(tmp_path):
    spec = TableSpec(30, 15, 2, 2, group_seed=0)
    dump(build_prior("tree_scm"), [((1, 0, 0), spec)], tmp_path)
    for same in (0, (0,)):
        assert_serves(tmp_path, [((1, 0, 0), dataclasses.replace(spec, group_seed=same))], build_prior("tree_scm"))


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("", "folder is not set"),
        ("/nowhere/at/all", "there is no such folder"),
        ("{empty}", "there are no shards in it"),
    ],
)
def test_a_folder_without_shards_is_told_with_the_configuration(folder, words, tmp_path):
    folder = folder.format(empty=tmp_path)
    with pytest.raises(ConfigError, match=words):
        compose(["experiment=smoke", "prior=disk", f"prior.folder={folder}"])


def test_training_from_disk_sees_the_live_stream(tmp_path):
    config = compose(["experiment=smoke", "prior=mix_scm", "seed=3"])
    live = build_configured(config)
    wanted = [
        ((config.seed, step, index), batch.spec)
        for step in range(4)
        for batch in plan_step(config.curriculum, config.model, config.seed, step).micro_batches
        for index in batch.tables
    ]
    dump(live, wanted, tmp_path, shard_size=3)
    stored = build_configured(compose(["experiment=smoke", "prior=disk", f"prior.folder={tmp_path}", "seed=3"]))
    streams = [StepStream(prior, config.curriculum, config.model, 3, range(4)) for prior in (live, stored)]
    for a, b in zip(*streams, strict=True):
        assert a.rejections == b.rejections and len(a.batches) == len(b.batches)
        assert all(torch.equal(x.X, y.X) and torch.equal(x.y, y.y) for x, y in zip(a.batches, b.batches, strict=True))
