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


def tables_of(config, steps: int) -> list:
    """The tables of the first steps of a run, as requests."""
    return [
        ((config.seed, step, index), group.spec)
        for step in range(steps)
        for group in plan_step(config.curriculum, config.model, config.seed, step).groups
        for index in group.tables
    ]


def test_training_from_disk_sees_the_stream_that_is_drawn(tmp_path):
    mix = "curriculum.stages.smoke.mix={mlp_scm:1,tree_scm:1}"
    config = compose(["experiment=smoke", "prior=mix_scm", "seed=3", mix])
    live = build_configured(config.prior)
    dump(live, tables_of(config, 4), tmp_path, shard_size=3)
    stored = build_configured(
        compose(["experiment=smoke", "prior=disk", f"prior.folder={tmp_path}", "seed=3", mix]).prior
    )
    streams = [StepStream(prior, config.curriculum, config.model, 3, range(4)) for prior in (live, stored)]
    for a, b in zip(*streams, strict=True):
        assert a.rejections == b.rejections and len(a.packs) == len(b.packs)
        assert all(torch.equal(p.X, q.X) and torch.equal(p.y, q.y) for p, q in zip(a.packs, b.packs, strict=True))


def test_a_mixture_needs_the_stored_tables_of_the_stages_that_use_them(tmp_path):
    config = compose(["experiment=smoke", "prior=dummy", "seed=3", "trainer.max_steps=4"])
    dump(build_configured(config.prior), tables_of(config, 4), tmp_path, shard_size=2)
    stage = "curriculum.stages.smoke"
    mixture = ["experiment=smoke", "prior=mix_scm", "seed=3", "+prior.components.disk.weight=1", f"{stage}.steps=4"]
    mixture += [f"+prior.components.disk.folder={tmp_path}", f"run_dir={tmp_path}/run"]
    later = ["+curriculum.stages.later.steps=2", "+curriculum.stages.later.tables=4"]
    assert compose(mixture).missing_steps() == []
    (problem,) = compose([*mixture, *later]).missing_steps()
    assert problem.startswith("prior.components.disk.folder is ") and "tables of 2 of the run's 6 steps" in problem
    assert compose([*mixture, *later, "+curriculum.stages.later.mix.mlp_scm=1"]).missing_steps() == []
    streamed = compose([*mixture, f"{stage}.mix={{disk:1}}"])
    for item in StepStream(build_configured(streamed.prior), streamed.curriculum, streamed.model, 3, range(4)):
        assert item.sources.total() == item.tables
    with pytest.raises(ConfigError, match=r"validation.rows must be"):
        compose([*mixture, "validation.every=1", "validation.rows=[40]"])
