"""The prior `disk`, and a run that trains on stored tables."""

import dataclasses
import pickle

import pytest
import torch
from stored_tables import SEED, assert_same, requests

from priors import build_prior
from priors.storage.dump import dump
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import build_prior as build_configured
from tabicl_train.curriculum import plan_step
from tabicl_train.errors import ConfigError
from tabicl_train.stream import StepStream

pytestmark = pytest.mark.multi_process


def test_the_disk_prior_can_be_pickled_for_worker_processes(dumped):
    disk = build_prior("disk", folder=str(dumped))
    (address, spec), *_ = requests(9, 10)
    first = disk.sample(spec, address)
    assert_same(
        pickle.loads(pickle.dumps(disk)).sample(spec, address), dataclasses.replace(first, plan=str(first.plan))
    )


def test_missing_steps_are_reported_before_they_are_needed(folder):
    disk = build_prior("disk", folder=str(folder))
    assert disk.missing_steps(SEED, [4] * 10) == []
    (folder / "steps-00000004.safetensors").unlink()
    (problem,) = disk.missing_steps(SEED, [5, *[4] * 11])
    assert "tables of 7 of the run's 12 steps are missing: 0, 4..7, 10..11 (tabicl-prior" in problem
    assert "dump first_step=0 steps=12 writes them" in problem
    assert "first_step=4 steps=4 " in disk.missing_steps(SEED, [4] * 10)[0]
    (folder / "steps-00000008.safetensors").write_bytes(b"")
    assert "steps-00000008.safetensors is damaged (" in disk.missing_steps(SEED, [4])[0]


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("", "folder is not set"),
        ("/nowhere/at/all", "there is no such folder"),
        ("{empty}", "there are no shards in it"),
    ],
)
def test_a_folder_without_shards_is_a_configuration_error(folder, message, tmp_path):
    folder = folder.format(empty=tmp_path)
    with pytest.raises(ConfigError, match=message):
        compose(["experiment=smoke", "prior=disk", f"prior.folder={folder}"])


def test_training_from_disk_sees_the_stream_that_is_drawn(tmp_path):
    config = compose(["experiment=smoke", "prior=mix_scm", "seed=3"])
    live = build_configured(config)
    requested = [
        ((config.seed, step, index), group.spec)
        for step in range(4)
        for group in plan_step(config.curriculum, config.model, config.seed, step).groups
        for index in group.tables
    ]
    dump(live, requested, tmp_path, shard_size=3)
    stored = build_configured(compose(["experiment=smoke", "prior=disk", f"prior.folder={tmp_path}", "seed=3"]))
    streams = [StepStream(prior, config.curriculum, config.model, 3, range(4)) for prior in (live, stored)]
    for a, b in zip(*streams, strict=True):
        assert a.rejections == b.rejections and len(a.packs) == len(b.packs)
        assert all(torch.equal(p.X, q.X) and torch.equal(p.y, q.y) for p, q in zip(a.packs, b.packs, strict=True))
