"""Filling shards: what is kept, what is drawn, and what is left when a dump ends early."""

import dataclasses
import os
import resource
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from stored_tables import PRIOR, SEED, assert_serves, names, requests, stamps

from priors import PriorError, build_prior
from priors.storage.dump import dump

pytestmark = pytest.mark.multi_process


def test_a_second_dump_keeps_what_is_there(folder):
    before = stamps(folder)
    assert dump(PRIOR, requests(0, 10), folder, shard_size=4) == {"kept": 3}
    assert dump(PRIOR, requests(5, 7), folder, shard_size=4) == {"kept": 1}
    assert stamps(folder) == before


def test_a_longer_dump_adds_to_the_last_shard(folder):
    before = stamps(folder)
    assert dump(PRIOR, requests(9, 14), folder, shard_size=4) == {"written": 2}
    after = stamps(folder)
    assert [name for name in before if before[name] == after[name]] == names(folder)[:2]
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

    monkeypatch.setattr("priors.storage.shards.os.replace", replace)
    with pytest.raises(KeyboardInterrupt):
        dump(PRIOR, requests(0, 10), folder, shard_size=4)
    assert names(folder) == ["steps-00000000.safetensors", "steps-00000004.safetensors"]
    monkeypatch.undo()
    (folder / ".unfinished-x").mkdir()
    (folder / ".unfinished-x/steps-00000008.safetensors").write_bytes(b"what a power failure leaves")
    assert_serves(folder, requests(0, 8))
    assert dump(PRIOR, requests(0, 10), folder, shard_size=4) == {"kept": 2, "written": 1}
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert_serves(folder, requests(0, 10))


def test_two_dumps_at_once_may_write_the_same_shard(tmp_path, monkeypatch):
    rename = os.replace
    renamed = []

    def replace(source, target):
        renamed.append(source)
        if len(renamed) == 1:  # the other dump comes between the file and its new name
            assert dump(PRIOR, requests(0, 4), tmp_path, shard_size=4) == {"written": 1}
        rename(source, target)

    monkeypatch.setattr("priors.storage.shards.os.replace", replace)
    assert dump(PRIOR, requests(0, 4), tmp_path, shard_size=4) == {"written": 1}
    assert len(set(renamed)) == 2 and names(tmp_path) == ["steps-00000000.safetensors"]
    assert_serves(tmp_path, requests(0, 4))


def test_a_full_disk_is_one_error_and_leaves_whole_shards_only(folder):
    (folder / "steps-00000004.safetensors").unlink()
    before = stamps(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # the limit of a file, since a disk cannot be filled
    try:
        with pytest.raises(PriorError, match=r"steps-00000004\.safetensors cannot be written \(.*too large"):
            dump(PRIOR, requests(0, 10), folder, shard_size=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert stamps(folder) == before


@dataclass
class Killed(type(PRIOR)):
    """The same tables, but the process that draws one of step 9 is killed while the file `fuse` exists."""

    fuse: str = ""

    def sample(self, spec, seed):
        if seed[1] == 9 and os.path.exists(self.fuse):
            os.unlink(self.fuse)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(spec, seed)


def test_a_killed_process_ends_the_dump_with_one_error_and_nothing_is_lost(tmp_path):
    fuse, folder = tmp_path / "fuse", tmp_path / "tables"
    fuse.touch()
    prior = Killed(fuse=str(fuse))
    with pytest.raises(PriorError, match=r"a process that was drawing tables was killed.* the same command draws"):
        dump(prior, requests(0, 12), folder, shard_size=4, processes=2)
    complete = names(folder)
    assert "steps-00000008.safetensors" not in complete and not any(name.startswith(".") for name in complete)
    counts = dump(prior, requests(0, 12), folder, shard_size=4, processes=2)
    assert counts == Counter(kept=len(complete), written=3 - len(complete))
    assert_serves(folder, requests(0, 12))


@pytest.mark.parametrize(
    ("prior", "seed", "shard_size", "message"),
    [
        (build_prior("dummy"), SEED, 4, "its prior is mlp_scm, not dummy"),
        (build_prior("mlp_scm", causal=True), SEED, 4, "its options is .*causal"),
        (PRIOR, 6, 4, "its seed is 5, not 6"),
        (PRIOR, SEED, 2, "its shard_size is 4, not 2"),
    ],
)
def test_a_folder_holds_one_dump(prior, seed, shard_size, message, dumped):
    before = stamps(dumped)
    with pytest.raises(PriorError, match=rf"shard .*/steps-00000000.safetensors belongs to another dump: {message}"):
        dump(prior, requests(0, 2, seed), dumped, shard_size)
    assert stamps(dumped) == before


def test_options_that_a_dump_of_a_past_version_lacks_take_their_defaults(monkeypatch, tmp_path):
    def without_realism(prior):
        return {name: value for name, value in dataclasses.asdict(prior).items() if name != "realism"}

    with monkeypatch.context() as past:
        past.setattr("priors.storage.dump.asdict", without_realism)
        dump(PRIOR, requests(0, 5), tmp_path, 4)
    assert dump(PRIOR, requests(0, 12), tmp_path, 4) == Counter(kept=1, written=2)
    assert_serves(tmp_path, requests(0, 12))
    with pytest.raises(PriorError, match="belongs to another dump: its options is"):
        dump(build_prior("mlp_scm", realism={"missing": 0.5}), requests(0, 12), tmp_path, 4)


def test_errors_reach_the_caller_from_worker_processes(dumped, tmp_path):
    (address, spec), *_ = requests(1, 2)
    with pytest.raises(PriorError, match="impossible table: num_features is 0"):
        dump(PRIOR, [(address, dataclasses.replace(spec, num_features=0))], tmp_path, processes=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("requested", "options", "message"),
    [
        (requests(4, 5) + requests(0, 1), {"shard_size": 2}, "in the order of their steps"),
        (requests(0, 1) + requests(0, 1, seed=9), {}, "several seeds: 5 and 9"),
        ([], {"shard_size": 0}, "shard_size is 0"),
        ([], {"processes": 0}, "processes is 0"),
    ],
)
def test_impossible_dumps_are_refused(requested, options, message, tmp_path):
    with pytest.raises(PriorError, match=message):
        dump(build_prior("dummy"), requested, tmp_path, **options)
