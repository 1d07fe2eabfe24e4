"""Stored tables: their files, what fills them, and the prior `disk` that serves them."""

import dataclasses
import os
import pickle
import re
import shutil
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from priors import Prior, PriorError, TableSpec, build_prior
from priors.checksum import KEY, is_damaged
from priors.disk import FORMAT, FORMAT_VERSION, Shard, dump
from priors.random import STREAM_VERSION, rng_at
from tabicl_train.config.compose import compose
from tabicl_train.config.prior_checks import missing_steps
from tabicl_train.config.schema import CurriculumConfig, StageConfig, configured_prior
from tabicl_train.curriculum import plan_step
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICLConfig
from tabicl_train.stream import StepItem, StepStream

SEED = 5
PRIOR = build_prior("mlp_scm")


def requests(start: int, stop: int, seed: int = SEED) -> list:
    """Two groups of two tables per step, of varying shape."""
    addresses = []
    for step in range(start, stop):
        rng = rng_at(seed, step)
        for first in (0, 2):
            rows, features = (int(value) for value in rng.integers((20, 1), (60, 6)))
            spec = TableSpec(rows, rows // 2, features, 3, group_seed=(seed, step, first))
            addresses += [((seed, step, index), spec) for index in (first, first + 1)]
    return addresses


@pytest.fixture(scope="module", autouse=True)
def shards_of_four_steps():
    with mock.patch("priors.disk.SHARD_SIZE", 4):
        yield


@pytest.fixture(scope="module")
def dumped(tmp_path_factory) -> Path:
    """Steps 0..9, drawn by two processes."""
    folder = tmp_path_factory.mktemp("dump") / "tables"
    assert dump(PRIOR, requests(0, 10), folder, processes=2, total=40) == {"written": 3}
    return folder


@pytest.fixture
def folder(dumped, tmp_path) -> Path:
    """A copy of the stored tables, to be changed."""
    return shutil.copytree(dumped, tmp_path / "copy")


def assert_serves(folder: Path, requested: list, prior: Prior = PRIOR) -> None:
    disk = pickle.loads(pickle.dumps(build_prior("disk", folder=str(folder))))  # as in worker processes
    for address, spec in requested:
        table, live = disk.sample(spec, address), prior.sample(spec, address)
        assert table.X.dtype == torch.float32 and torch.equal(table.X, live.X)
        dtype = torch.int64 if live.num_classes else torch.float32
        assert table.y.dtype == live.y.dtype == dtype
        assert torch.equal(table.y, live.y)
        assert (table.train_size, table.num_classes) == (live.train_size, live.num_classes)
        assert table.rejections == live.rejections
        assert isinstance(table.rejections, Counter)
        assert table.plan == str(live.plan) and table.missing == live.missing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of every file, which change when it is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_stored_tables_equal_drawn_ones(dumped):
    assert names(dumped) == ["steps-00000000.safetensors", "steps-00000004.safetensors", "steps-00000008.safetensors"]
    assert all(path.stat().st_mode & 0o777 == dumped.stat().st_mode & 0o666 for path in dumped.iterdir())
    requested = requests(0, 10)
    assert any(PRIOR.sample(spec, address).rejections for address, spec in requested)
    assert_serves(dumped, requested)
    assert_serves(dumped, requested[::-7])


@pytest.mark.parametrize("options", [{}, {"realism": {"missing": 1.0}}])
def test_numeric_targets_and_missing_values_are_stored(options, tmp_path):
    requested = [(address, dataclasses.replace(spec, max_classes=0)) for address, spec in requests(0, 3)]
    prior = build_prior("mlp_scm", **options)
    assert dump(prior, requested, tmp_path) == {"written": 1}
    assert_serves(tmp_path, requested, prior)
    assert dump(prior, requested, tmp_path) == {"kept": 1}


def test_a_longer_dump_keeps_what_is_there_and_adds_to_the_last_shard(folder):
    before = stamps(folder)
    assert dump(PRIOR, requests(5, 7), folder) == {"kept": 1}
    assert stamps(folder) == before
    assert dump(PRIOR, requests(8, 14), folder) == {"written": 2}
    after = stamps(folder)
    assert [name for name in before if before[name] == after[name]] == names(folder)[:2]
    assert_serves(folder, requests(0, 14))


def test_a_dump_that_is_interrupted_leaves_whole_shards_only(folder, monkeypatch):
    for name in names(folder)[1:]:
        (folder / name).unlink()
    renamed = []

    def replace(source, target):
        assert not Path(target).exists() and os.path.getsize(source) > 1000
        renamed.append(Path(target).name)
        if len(renamed) == 2:
            raise KeyboardInterrupt

        os.rename(source, target)

    monkeypatch.setattr("priors.disk.os.replace", replace)
    with pytest.raises(KeyboardInterrupt):
        dump(PRIOR, requests(0, 10), folder)
    assert names(folder) == ["steps-00000000.safetensors", "steps-00000004.safetensors"]
    monkeypatch.undo()
    assert dump(PRIOR, requests(0, 10), folder) == {"kept": 2, "written": 1}
    assert_serves(folder, requests(0, 10))


@dataclass
class Killed(type(PRIOR)):
    """The same tables, but the process that draws one of step 9 is killed."""

    def sample(self, spec, seed):
        if seed[1] == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(spec, seed)


@pytest.mark.slow  # 6 CPU seconds: its processes import everything
def test_a_killed_process_ends_the_dump_with_one_error(tmp_path):
    with pytest.raises(PriorError, match=r"a process that was drawing tables was killed.* the same command draws"):
        dump(Killed(), requests(0, 12), tmp_path, processes=2)
    assert not any(name.startswith((".", "steps-00000008")) for name in names(tmp_path))


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (build_prior("dummy"), "its prior is mlp_scm, not dummy"),
        (build_prior("mlp_scm", causal=True), "its options is .*causal"),
    ],
)
def test_a_folder_holds_one_dump(prior, message, dumped):
    before = stamps(dumped)
    with pytest.raises(PriorError, match=rf"shard .*/steps-00000000.safetensors belongs to another dump: {message}"):
        dump(prior, requests(0, 2), dumped)
    assert stamps(dumped) == before


def with_options(options: str) -> bytes:
    head = {"format": f"{FORMAT} {FORMAT_VERSION}", "stream_version": str(STREAM_VERSION), "options": options}
    return save({"a": np.zeros(1)}, head)


SPOILERS = {
    "truncated": lambda content: content[:-100],
    "other file": lambda _: b"steps",
    "nested": lambda _: with_options("[" * 10**5),
    "no object": lambda _: with_options("[1]"),
}


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_damaged_shard_is_named(spoil, folder):
    path = folder / "steps-00000004.safetensors"
    path.write_bytes(SPOILERS[spoil](path.read_bytes()))
    disk, message = build_prior("disk", folder=str(folder)), r"shard .*copy/steps-00000004.safetensors is damaged \("
    with pytest.raises(PriorError, match=message):
        disk.sample(requests(4, 5)[0][1], (SEED, 4, 0))
    address, spec = requests(0, 1)[0]
    disk.sample(spec, address)  # the other shards can be read
    with pytest.raises(PriorError, match=message + ".*: delete it, and dump into its folder again"):
        dump(PRIOR, requests(0, 10), folder)


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("place", ["the last value", "a record"])
def test_changed_bits_in_a_shard_are_noticed(place, folder):
    path = folder / "steps-00000004.safetensors"
    record = path.read_bytes().index(b'num_classes\\": ') + len(b'num_classes\\": ')
    flip(path, -1 if place == "the last value" else record)
    disk = build_prior("disk", folder=str(folder))
    requested = requests(4, 8)
    for address, spec in requested[:2]:  # of a table that was not changed, too
        with pytest.raises(PriorError, match=f"shard {path} is damaged .its tables do not match its checksum.: delete"):
            disk.sample(spec, address)
    path.unlink()
    assert dump(PRIOR, requested, folder) == {"written": 1}
    assert_serves(folder, requested)


def test_a_shard_is_verified_once_and_an_old_one_has_no_checksum(folder):
    assert [path.name for path in folder.iterdir() if KEY not in Shard(path).metadata] == []
    with mock.patch("priors.disk.is_damaged", wraps=is_damaged) as verify:
        assert_serves(folder, requests(4, 8))
    assert verify.call_count == 1
    path = folder / "steps-00000008.safetensors"
    tensors, metadata = load_file(path), Shard(path).metadata
    del metadata[KEY]
    save_file(tensors, path, metadata)
    assert_serves(folder, requests(8, 10))


@pytest.mark.parametrize(
    ("address", "change", "message"),
    [
        ((5, 5, 0), {}, "shard .*/steps-00000004.safetensors is missing, and with it table 0 of step 5"),
        ((5, 9, 4), {}, "steps-00000008.safetensors holds no table 4 of step 9; it was never dumped"),
        ((6, 9, 0), {}, "steps-00000008.safetensors holds tables of seed 5, not of seed 6"),
        (7, {}, r"tables on disk have addresses \(seed, step, table\)"),
        ((5, 9, 0), {"num_rows": 61}, "table 0 of step 9 in shard .* is from another curriculum: it is stored as"),
    ],
)
def test_why_there_is_no_table_is_said(address, change, message, folder):
    (folder / "steps-00000004.safetensors").unlink()
    spec = dataclasses.replace(dict(requests(9, 10))[(5, 9, 0)], **change)
    with pytest.raises(PriorError, match=message):
        build_prior("disk", folder=str(folder)).sample(spec, address)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"stream_version": "7"},
            f"holds tables of stream version 7, but the priors are at stream version {STREAM_VERSION}",
        ),
        ({"format": "tabicl-train tables 2"}, "has the format tabicl-train tables 2, not tabicl-train tables 1"),
    ],
)
def test_a_shard_of_another_version_is_refused_and_left_alone(changes, message, folder):
    path = folder / "steps-00000004.safetensors"
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, {**metadata, **changes})
    before = stamps(folder)
    (address, spec), *_ = requests(4, 8)
    disk = build_prior("disk", folder=str(folder))
    with pytest.raises(PriorError, match=f"shard .*/{path.name} {message}"):
        disk.sample(spec, address)
    assert re.search(message, disk.missing_steps(5, [4] * 10)[0])
    with pytest.raises(PriorError, match=message):
        dump(PRIOR, requests(0, 10), folder)
    assert stamps(folder) == before


def test_a_folder_without_shards_is_an_error(tmp_path):
    with pytest.raises(PriorError, match="there are no shards in it"):
        build_prior("disk", folder=str(tmp_path))


def test_missing_steps_are_reported_before_they_are_needed(folder):
    disk = build_prior("disk", folder=str(folder))
    assert disk.missing_steps(SEED, [4] * 10) == []
    (folder / "steps-00000004.safetensors").unlink()
    (problem,) = disk.missing_steps(SEED, [5, *[4] * 11])
    assert "tables of 7 of the run's 12 steps are missing, in 0..11 (tabicl-prior" in problem
    assert "dump first_step=0 steps=12 writes them" in problem
    assert "first_step=4 steps=4 " in disk.missing_steps(SEED, [4] * 10)[0]
    (folder / "steps-00000008.safetensors").write_bytes(b"")
    assert "steps-00000008.safetensors is damaged (" in disk.missing_steps(SEED, [4])[0]


def test_a_mixture_streams_stored_tables_and_needs_those_of_the_stages_that_use_them(tmp_path):
    config = compose(["experiment=smoke", "prior=mix_scm", "seed=3", "trainer.max_steps=4"])
    live = configured_prior(config.prior)
    requested = [
        ((config.seed, step, index), group.spec)
        for step in range(4)
        for group in plan_step(config.curriculum, config.model, config.seed, step).groups
        for index in group.tables
    ]
    dump(live, requested, tmp_path)
    stage = "curriculum.stages.smoke"
    mixture = ["experiment=smoke", "prior=mix_scm", "seed=3", "+prior.components.disk.weight=1", f"{stage}.steps=4"]
    mixture += [f"+prior.components.disk.folder={tmp_path}", f"run_dir={tmp_path}/run"]
    later = ["+curriculum.stages.later.steps=2", "+curriculum.stages.later.tables=4"]
    assert missing_steps(compose(mixture)) == []
    (problem,) = missing_steps(compose([*mixture, *later]))
    assert problem.startswith("prior.components.disk.folder is ")
    assert "tables of 2 of the run's 6 steps" in problem
    assert missing_steps(compose([*mixture, *later, "+curriculum.stages.later.mix.mlp_scm=1"])) == []
    stored = configured_prior(compose(["experiment=smoke", "prior=disk", f"prior.folder={tmp_path}", "seed=3"]).prior)
    streams = [StepStream(prior, config.curriculum, config.model, 3, range(4)) for prior in (live, stored)]
    for a, b in zip(*streams, strict=True):
        assert a.rejections == b.rejections and len(a.packs) == len(b.packs)
        assert all(torch.equal(p.X, q.X) and torch.equal(p.y, q.y) for p, q in zip(a.packs, b.packs, strict=True))
    with pytest.raises(ConfigError, match=r"validation.rows must be"):
        compose([*mixture, "validation.every=1", "validation.rows=[40]"])


def test_the_largest_tables_are_those_that_are_stored_if_they_are_of_real_ones(tmp_path):
    specs = [TableSpec(60, 30, 4, 3), TableSpec(50, 30, 5, 3)]
    requested = [((SEED, step, 0), specs[step % 2]) for step in range(6)]
    dump(PRIOR, requested, tmp_path / "synthetic")
    assert build_prior("disk", folder=str(tmp_path / "synthetic")).largest(50, False) == (None, None, None)
    dump(PRIOR, requested, tmp_path / "real", facts={"real_tables": "a hash"})
    tables = [PRIOR.sample(spec, address) for address, spec in requested]
    largest = build_prior("disk", folder=str(tmp_path / "real")).largest(50, False)
    assert largest == (60, max(table.X.shape[1] for table in tables), max(table.num_classes for table in tables))


STAGE = StageConfig(steps=14, rows=[30, 60], features=[2, 5], tables=4, group_size=2)
MODEL = TabICLConfig(max_classes=3)  # with many classes in few rows, hardly any other split would be valid
PASSED = CurriculumConfig({"first": STAGE, "second": dataclasses.replace(STAGE, steps=7)})


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> Path:
    """The first four steps of one stage, its last two, and the first six of the next, in a file each of four."""
    folder = tmp_path_factory.mktemp("halves")
    for steps in (range(4), range(12, 20)):
        requested = []
        for step in steps:
            for group in plan_step(PASSED, MODEL, SEED, step).groups:
                requested += [((SEED, step, index), group.spec) for index in group.tables]
        dump(build_prior("dummy"), requested, folder)
    return folder


def passed(folder: Path, passes: int, steps: range) -> list[StepItem]:
    prior = build_prior("disk", folder=str(folder), passes=passes)
    return list(StepStream(prior, PASSED, MODEL, SEED, steps))


def tables_of(item: StepItem) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    return [table for pack in item.packs for table in pack.tables()]


def assert_same(items: list[StepItem], others: list[StepItem]) -> None:
    for item, other in zip(items, others, strict=True):
        assert item.step == other.step
        for (X, y, n), (other_X, other_y, other_n) in zip(tables_of(item), tables_of(other), strict=True):
            assert torch.equal(X, other_X) and torch.equal(y, other_y) and n == other_n


def test_a_pass_has_the_tables_of_its_stage_in_other_permutations(halves):
    items = passed(halves, 3, range(21))
    assert_same(items[:4], passed(halves, 1, range(4)))
    assert_same(items[12:20], passed(halves, 1, range(12, 20)))
    assert_same(items[7:], passed(halves, 3, range(7, 21)))  # begun in the middle
    sources = {4: 0, 5: 1, 6: 2, 7: 3, 8: 0, 9: 1, 10: 2, 11: 3, 20: 14}
    for step, source in sources.items():
        pairs = zip(tables_of(items[source]), tables_of(items[step]), strict=True)
        for (X, y, n), (other_X, other_y, other_n) in pairs:
            assert (X.shape, n) == (other_X.shape, other_n)
            # Their values are distinct, so that a row is known by its smallest one, and a column too.
            rows = other_X.min(1).values.argsort(), X.min(1).values.argsort()
            columns = other_X.min(0).values.argsort(), X.min(0).values.argsort()
            assert torch.equal(other_X[rows[0]][:, columns[0]], X[rows[1]][:, columns[1]])
            classes = {tuple(pair) for pair in torch.stack([y[rows[1]], other_y[rows[0]]], 1).tolist()}
            assert len(classes) == len(y.unique()) == len({new for _, new in classes})
            assert set(X[:n].min(1).values.tolist()) != set(other_X[:n].min(1).values.tolist())
    assert not torch.equal(tables_of(items[4])[0][0], tables_of(items[8])[0][0])


def test_a_run_needs_enough_passes_and_says_where_they_begin(halves):
    once, twice, enough = (build_prior("disk", folder=str(halves), passes=passes) for passes in (1, 2, 3))
    firsts = [0] * 14 + [14] * 7
    again = "writes them, or prior.passes=3 uses those of each stage again)"
    (problem,) = once.missing_steps(SEED, [4] * 21, firsts)
    assert "tables of 9 of the run's 21 steps are missing, in 4..20 " in problem and problem.endswith(again)
    (problem,) = twice.missing_steps(SEED, [4] * 21, firsts)
    assert "tables of 4 of the run's 21 steps are missing, in 8..11 " in problem and problem.endswith(again)
    assert enough.missing_steps(SEED, [4] * 21, firsts) == []
    (problem,) = enough.missing_steps(SEED, [5] * 21, firsts)  # whose steps have four tables
    assert problem.endswith("writes them)")
    assert once.pass_lines({"first": (14, 4), "second": (7, 4)}) == []
    assert enough.pass_lines({"first": (14, 4), "second": (7, 4)}) == [
        "stage first: the tables of 4 steps are stored; pass 2 begins with step 4, pass 3 begins with step 8",
        "stage second: the tables of 6 steps are stored; pass 2 begins with step 20",
    ]


def test_stored_tables_whose_order_has_a_meaning_are_not_passed_again(tmp_path):
    for facts, why in (
        ({"real_tables": "a hash"}, "real tables may have to stay apart"),
        ({"name": "quantifiers"}, "columns and rows of prior quantifiers have an order"),
        ({"name": "unknown"}, "name its plug-in"),
    ):
        folder = tmp_path / facts.get("name", "real")
        dump(PRIOR, requests(0, 1), folder, facts=facts)
        with pytest.raises(PriorError, match=f"passes is 2; it must be 1, since .*{why}"):
            build_prior("disk", folder=str(folder), passes=2)
