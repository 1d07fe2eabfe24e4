"""Runs that start from weights: the best ones are never below the start, and the run says what they have gained."""

import json
import signal
from pathlib import Path
from unittest import mock

import numpy as np
import own_rows
import pytest
import torch
from own_rows import configured, installed, train_on_own_rows
from scipy import stats
from training_runs import assert_same_state, read_rows

from priors.table import TableSpec
from tabicl_train.config.schema import configured_prior
from tabicl_train.model.pack import Pack
from tabicl_train.run.records import Records
from tabicl_train.run.status import read_status
from tabicl_train.signals import watch_signals
from tabicl_train.training.callbacks import best_weights
from tabicl_train.training.callbacks.validation import final_test_streams, validation_streams
from tabicl_train.weights.reader import load_network, read_weights

GAINS = ["curriculum.stages.smoke.learning_rate=0.01", "curriculum.stages.smoke.steps=6"]
NO_GAIN = "no gain found: the weights you started from stay the best ones"


class Killed(BaseException):
    pass


class At:
    """Does something with the run's Stop after a step."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def after_step(self, state, item) -> None:
        if state.step == self.step:
            with watch_signals() as stop:  # that of the run
                self.action(stop)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run from which the others start, and one that gains."""
    folder = tmp_path_factory.mktemp("final_test")
    train_on_own_rows(folder / "start", "trainer.max_steps=2", "validation.every=0", name="dummy")
    train_on_own_rows(folder / "gains", *GAINS, f"init_weights={folder}/start")
    return folder


def found_in(run_dir: Path) -> dict:
    return json.loads((run_dir / "test.json").read_text())


def streams_of(config, make=final_test_streams):
    with installed():
        return make(config.validation, config.curriculum.priors_by_kind(configured_prior(config.prior)), config.model)


def query_rows(item) -> set[int]:
    """The numbers of the query rows of an item."""
    numbers = set()
    for pack in item.packs:
        for X, _, n in pack.tables():
            numbers.update((100 * X[n:, 0]).round().int().tolist())
    return numbers


def test_a_gain_is_reported_with_the_interval_of_its_rows(folder):
    losses = losses_by_row(folder)
    assert {number % 4 for number in losses} == {3}  # no row of validation or training
    assert len(losses) > 40
    of_validation = list(streams_of(configured(folder), validation_streams)["own"])
    assert len(of_validation) == 2
    for item in of_validation:
        assert {number % 4 for number in query_rows(item)} == {2}

    means = np.array([np.mean(pairs, 0) for pairs in losses.values()])
    gains = means[:, 0] - means[:, 1]
    low, high = stats.t.interval(0.95, len(gains) - 1, gains.mean(), stats.sem(gains))
    assert low > 0

    found = found_in(folder / "gains")
    assert found["step"] == 6
    assert found["best_step"] > 0
    part = found["parts"]["own"]
    assert part["clusters"] == len(losses)
    assert part["of"] == "rows"
    assert [part["start"], part["best"]] == pytest.approx(means.mean(0), rel=1e-5)
    assert [part["gain"], part["low"], part["high"]] == pytest.approx([gains.mean(), low, high], rel=1e-3)
    (sentence,) = found["sentences"]
    assert sentence.startswith(f"own rows: better by {gains.mean():.4f} [{low:.4f}, {high:.4f}] on {len(losses)} rows")


def losses_by_row(folder) -> dict[int, list[tuple[float, float]]]:
    """The losses of each row, known by its number, at the start and with the best weights: a pair for each table."""
    start = load_network(str(folder / "start"))
    best = load_network(str(folder / "gains/checkpoints/best.ckpt"))
    losses = {}
    for item in streams_of(configured(folder))["own"]:
        for pack in item.packs:
            for X, y, n in pack.tables():
                of_models = []
                for network in (start, best):
                    with torch.no_grad():
                        logits = network(Pack.of([(X, y, n)]))
                    of_models.append(torch.nn.functional.cross_entropy(logits, y[n:], reduction="none").tolist())
                numbers = (100 * X[n:, 0]).round().int().tolist()
                for number, before, after in zip(numbers, *of_models, strict=True):
                    losses.setdefault(number, []).append((before, after))
    return losses


def test_a_run_that_gets_worse_keeps_the_weights_it_started_from(folder, tmp_path, capfd):
    worse = "curriculum.stages.smoke.learning_rate=5"
    assert (
        train_on_own_rows(tmp_path / "run", worse, "trainer.max_steps=4", f"init_weights={folder}/start") == "finished"
    )
    losses = [float(row["loss"]) for row in read_rows(tmp_path / "run/validation.csv")]
    assert losses[-1] > losses[0]
    start = read_weights(str(folder / "start")).tensors
    for name in ("best", "start"):
        assert_same_state(read_weights(str(tmp_path / f"run/checkpoints/{name}.ckpt")).tensors, start)
    assert found_in(tmp_path / "run") == {"step": 4, "best_step": 0, "sentences": [NO_GAIN], "parts": {}}
    export = f"tabicl-export checkpoint={tmp_path}/run output={tmp_path}/run/best.ckpt"
    lines = capfd.readouterr().err.splitlines()
    at = lines.index(f"test      {NO_GAIN}")
    assert lines[at + 1] == f"          the best weights are those of step 0: {export}"


def test_a_run_that_is_killed_finds_the_same_to_the_bit(folder, tmp_path):
    """Killed between best.ckpt and the rows of step 0 and of step 4, after which it has only its copy of the start."""
    torn, whole = tmp_path / "torn", folder / "gains"
    settings, append = [*GAINS, f"init_weights={folder}/start"], Records.append_rows

    def kill_at(step: int):
        def killed(self, name, *rows):
            if name == "validation.csv" and rows[0]["step"] == step:
                raise Killed
            append(self, name, *rows)

        return mock.patch.object(Records, "append_rows", killed)

    for step in (0, 4):
        with kill_at(step), pytest.raises(Killed):
            train_on_own_rows(torn, *settings)
    (folder / "start").rename(folder / "moved")
    try:
        assert train_on_own_rows(torn, *settings) == "finished"
    finally:
        (folder / "moved").rename(folder / "start")
    for name in ("validation.csv", "test.json"):
        assert (torn / name).read_bytes() == (whole / name).read_bytes()
    for name in ("best", "start"):
        one, other = (torch.load(at / f"checkpoints/{name}.ckpt", weights_only=True) for at in (torn, whole))
        assert_same_state(one["state_dict"], other["state_dict"])
        assert one["global_step"] == other["global_step"]


def test_only_a_gain_above_its_standard_error_replaces_the_start(folder, tmp_path):
    short = ["trainer.max_steps=2", *GAINS, f"init_weights={folder}/start"]
    by_cluster, is_start = best_weights.cluster_means, iter([True])

    def spread(found, part):
        """Losses that fall by less than their standard error: by -1 and by 1.01."""
        later = not next(is_start, False)
        return {key: 10 + later * (0.99 - 2 * (i % 2)) for i, key in enumerate(by_cluster(found, part))}

    with mock.patch.object(best_weights, "cluster_means", spread):
        train_on_own_rows(tmp_path / "lucky", *short)
    losses = [float(row["loss"]) for row in read_rows(tmp_path / "lucky/validation.csv")]
    assert min(losses) < losses[0]
    assert found_in(tmp_path / "lucky")["best_step"] == 0


@pytest.mark.slow  # six runs
def test_only_a_whole_run_is_tested_unless_a_signal_leaves_it_to_the_next_start(folder, tmp_path):
    settings, found = [*GAINS, f"init_weights={folder}/start"], tmp_path / "run/test.json"
    for step in (3, 6):  # also at the last step, whose validation is left to the next start
        limit = At(step, lambda stop: setattr(stop, "limit", 0.0))
        assert train_on_own_rows(tmp_path / "run", *settings, callbacks=(limit,)) == "preempted"
        assert not found.exists()
    assert train_on_own_rows(tmp_path / "run", *settings) == "finished"
    assert found.read_bytes() == (folder / "gains/test.json").read_bytes()
    signaled = At(6, lambda stop: stop.handle(signal.SIGTERM))
    settings = [*settings, "validation.every=5"]
    assert train_on_own_rows(tmp_path / "other", *settings, callbacks=(signaled,)) == "preempted"
    assert read_status(tmp_path / "other")["status"] == "preempted"
    assert not (tmp_path / "other/test.json").exists()
    assert train_on_own_rows(tmp_path / "other", *settings) == "finished"
    assert found_in(tmp_path / "other")["step"] == 6


@pytest.mark.slow
def test_a_start_without_a_checkpoint_takes_nothing_from_a_failed_start(folder, tmp_path):
    def fail(stop) -> None:
        raise Killed

    with pytest.raises(Killed):
        train_on_own_rows(tmp_path / "run", *GAINS, f"init_weights={folder}/start", callbacks=(At(1, fail),))
    assert (tmp_path / "run/checkpoints/start.ckpt").exists()
    assert train_on_own_rows(tmp_path / "run", *GAINS, "model.embed_dim=8") == "finished"
    assert not (tmp_path / "run/test.json").exists()
    assert not (tmp_path / "run/checkpoints/start.ckpt").exists()


def test_the_parts_of_a_mixture_are_scored_apart(folder, tmp_path):
    prior = {"name": "mix_scm", "components": {"dummy": {"weight": 1}, own_rows.NAME: {"weight": 3}}}
    train_on_own_rows(tmp_path / "run", *GAINS, "trainer.max_steps=2", f"init_weights={folder}/start", **prior)
    rows = read_rows(tmp_path / "run/validation.csv")
    assert [(row["data"], row["rows"]) for row in rows[:4]] == [
        ("synthetic", "40"), ("synthetic", "60"), ("own", "40"), ("own", "60")
    ]  # fmt: skip
    streams = streams_of(configured(tmp_path, **prior))
    for part, is_own in (("own", True), ("synthetic", False)):
        tables = [streams[part].prior.sample(TableSpec(40, 20, 3, 4), (-2, 0, number)) for number in range(20)]
        assert {isinstance(table.plan, list) for table in tables} == {is_own}
    found = found_in(tmp_path / "run")
    assert list(found["parts"]) == ["synthetic", "own"]
    assert found["parts"]["synthetic"]["clusters"] == 12
    assert [sentence.split(":")[0] for sentence in found["sentences"]] == ["synthetic tables", "own rows"]
