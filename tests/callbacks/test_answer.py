"""Runs that start from weights: the best ones are never below the start, and the run says what they have gained."""

import json
import math
import signal
from pathlib import Path
from unittest import mock

import numpy as np
import own_rows
import pytest
import torch
from own_rows import OwnRows, configured, installed, run
from runs import assert_same_state, read
from scipy import stats

from priors.table import TableSpec
from tabicl_train import train as training
from tabicl_train.callbacks.held_out.draws import answer_streams, unit_losses
from tabicl_train.distributed.signals import watch_signals
from tabicl_train.model.pack import Pack
from tabicl_train.prediction.export import load_checkpoint, load_network
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.status import read_status

pytestmark = pytest.mark.slow

GAINS = ["curriculum.stages.smoke.learning_rate=0.01", "curriculum.stages.smoke.steps=12"]


class Killed(BaseException):
    pass


class At:
    """Does something with the run's Stop after a step."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, step, **_) -> None:
        if step == self.step:
            with watch_signals() as stop:  # that of the run
                self.action(stop)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run from which the others start, and one that gains."""
    folder = tmp_path_factory.mktemp("answer")
    run(folder / "start", "trainer.max_steps=2", "validation.every=0", name="dummy")
    run(folder / "gains", *GAINS, f"init_weights={folder}/start")
    return folder


def answer_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "answer.json").read_text())


def test_a_gain_is_told_with_the_interval_of_its_rows(folder, capfd):
    found = answer_of(folder / "gains")
    start, best = load_network(str(folder / "start")), load_network(str(folder / "gains/checkpoints/best.ckpt"))
    losses: dict[int, list[tuple[float, float]]] = {}
    with installed():
        items = list(answer_streams(configured(folder))["own"])
    for X, y, n in (table for item in items for pack in item.packs for table in pack.tables()):
        one = Pack.of([(X, y, n)])
        with torch.no_grad():
            before, after = (-model(one).log_softmax(1)[range(len(y) - n), y[n:]] for model in (start, best))
        for number, *pair in zip((100 * X[n:, 0]).round().int().tolist(), before, after, strict=True):
            losses.setdefault(number, []).append([float(loss) for loss in pair])
    assert {number % 4 for number in losses} == {3}  # no row of validation or training
    means = np.array([np.mean(pairs, 0) for pairs in losses.values()])
    gains = means[:, 0] - means[:, 1]
    low, high = stats.t.interval(0.95, len(gains) - 1, gains.mean(), stats.sem(gains))
    own = found["parts"]["own"]
    assert (own["units"], own["of"]) == (len(losses), "rows") and len(losses) > 40
    assert [own[key] for key in ("start", "best")] == pytest.approx(means.mean(0), rel=1e-5)
    assert [own[key] for key in ("gain", "low", "high")] == pytest.approx([gains.mean(), low, high], rel=1e-3)
    assert low > 0 and found["best_step"] > 0 and found["step"] == 12
    assert found["sentences"] == [
        f"own rows: better by {gains.mean():.4f} [{low:.4f}, {high:.4f}] on {len(losses)} rows that took no part in "
        "training or selection (mean loss, 95 % interval)"
    ]


def test_a_run_that_gets_worse_keeps_the_weights_it_started_from(folder, tmp_path, capfd):
    worse = "curriculum.stages.smoke.learning_rate=0.5"
    assert run(tmp_path / "run", worse, f"init_weights={folder}/start") == "finished"
    losses = [float(row["loss"]) for row in read(tmp_path / "run/validation.csv")]
    assert losses[-1] > losses[0]
    _, start = load_checkpoint(str(folder / "start"))
    for name in ("best", "start"):
        assert_same_state(load_checkpoint(str(tmp_path / f"run/checkpoints/{name}.ckpt"))[1], start)
    *_, answer, command = capfd.readouterr().err.splitlines()
    words = "no gain found: the weights you started from stay the best ones"
    assert answer == f"answer    {words}"
    assert answer_of(tmp_path / "run") == {"step": 8, "best_step": 0, "sentences": [words], "parts": {}}
    export = f"tabicl-export checkpoint={tmp_path}/run output={tmp_path}/run/best.ckpt weights=best"
    assert command == f"          the best weights are those of step 0: {export}"


def test_a_run_that_is_killed_gives_the_same_answer_to_the_bit(folder, tmp_path):
    torn, whole = tmp_path / "torn", folder / "gains"
    settings, append = [*GAINS, f"init_weights={folder}/start"], Records.append_rows

    def kill_at(step):
        def killed(self, name, *rows):  # between best.ckpt and the rows
            if name == "validation.csv" and rows[0]["step"] == step:
                raise Killed
            append(self, name, *rows)

        return mock.patch.object(Records, "append_rows", killed)

    for step in (0, 6, answer_of(whole)["best_step"]):
        with kill_at(step), pytest.raises(Killed):
            run(torn, *settings)
    (folder / "start").rename(folder / "moved")  # the run has its own copy of what it started from
    try:
        assert run(torn, *settings) == "finished"
    finally:
        (folder / "moved").rename(folder / "start")
    for name in ("validation.csv", "answer.json"):
        assert (torn / name).read_bytes() == (whole / name).read_bytes()
    for name in ("best", "start"):
        one, other = (torch.load(at / f"checkpoints/{name}.ckpt", weights_only=True) for at in (torn, whole))
        assert_same_state(one["state_dict"], other["state_dict"])
        assert one["global_step"] == other["global_step"]


def test_a_better_mean_alone_does_not_replace_the_start(folder, tmp_path):
    """Losses of many units that fall by less than their standard error."""
    with mock.patch("tabicl_train.callbacks.validation.paired", return_value=mock.Mock(exceeds_error=False)):
        run(tmp_path / "run", "trainer.max_steps=4", *GAINS, f"init_weights={folder}/start")
    losses = [float(row["loss"]) for row in read(tmp_path / "run/validation.csv")]
    assert min(losses) < losses[0] and answer_of(tmp_path / "run")["best_step"] == 0


def test_a_start_whose_loss_is_not_finite_is_replaced_by_weights_whose_loss_is(folder, tmp_path, capfd):
    first = iter([math.inf])

    def losses(losses):
        found = unit_losses(losses)
        return dict.fromkeys(found, next(first, 1.0))

    with mock.patch("tabicl_train.callbacks.validation.unit_losses", losses):
        run(tmp_path / "run", "trainer.max_steps=4", *GAINS, f"init_weights={folder}/start")
    assert answer_of(tmp_path / "run")["best_step"] > 0

    def not_finite(losses):
        return dict.fromkeys(unit_losses(losses), math.nan)

    capfd.readouterr()
    (tmp_path / "run/answer.json").unlink()
    with mock.patch("tabicl_train.callbacks.held_out.answer.unit_losses", not_finite):
        run(tmp_path / "run", "trainer.max_steps=4", *GAINS, f"init_weights={folder}/start")
    words = "own rows: none, since the mean loss before or after the training is not finite"
    assert f"answer    {words}" in capfd.readouterr().err
    own = answer_of(tmp_path / "run")["parts"]["own"]
    assert own["gain"] is own["start"] is own["low"] is None


def test_a_time_limit_gives_an_answer_and_a_signal_leaves_it_to_the_next_start(folder, tmp_path, capfd):
    settings = [*GAINS, f"init_weights={folder}/start"]
    limit = At(7, lambda stop: setattr(stop, "limit", 0.0))
    config = configured(tmp_path / "early", *settings, "trainer.max_hours=1e-9")
    with installed():
        assert training.train(config) == "preempted"
    assert "answer    none yet, since the run has ended before its first validation" in capfd.readouterr().err
    assert run(tmp_path / "run", *settings, callbacks=(limit,)) == "preempted"
    assert answer_of(tmp_path / "run")["step"] == 7
    asked = At(12, lambda stop: stop.handle(signal.SIGTERM))
    assert run(tmp_path / "run", *settings, "validation.every=5", callbacks=(asked,)) == "preempted"
    assert answer_of(tmp_path / "run")["step"] == 7 and read_status(tmp_path / "run")["status"] == "preempted"
    assert run(tmp_path / "run", *settings) == "finished"
    assert answer_of(tmp_path / "run")["step"] == 12
    capfd.readouterr()
    assert run(tmp_path / "run", *settings) == "finished"
    assert "answer" not in capfd.readouterr().err


def test_a_run_says_that_nothing_is_held_out_for_the_answer(folder, tmp_path, capfd):
    with mock.patch.object(OwnRows, "usable", lambda self, rows, numeric: (0 if self.side == 3 else 1, 1)):
        run(tmp_path / "run", *GAINS, f"init_weights={folder}/start")
    assert answer_of(tmp_path / "run")["sentences"] == ["own tables: none, since none are held out for it"]
    assert answer_of(tmp_path / "run")["parts"] == {}


def test_the_parts_of_a_mixture_are_scored_apart(folder, tmp_path):
    components = {"dummy": {"weight": 1}, own_rows.NAME: {"weight": 3}}
    prior = {"name": "mix_scm", "components": components}
    run(tmp_path / "run", *GAINS, f"init_weights={folder}/start", **prior)
    rows = read(tmp_path / "run/validation.csv")
    assert [(row["data"], row["rows"]) for row in rows[:4]] == [
        ("synthetic", "40"), ("synthetic", "60"), ("own", "40"), ("own", "60")
    ]  # fmt: skip
    with installed():
        config = configured(tmp_path, **prior)
        streams = answer_streams(config)
        assert all(isinstance(table.plan, list) for table in tables_of(streams["own"].prior))
        assert not any(isinstance(table.plan, list) for table in tables_of(streams["synthetic"].prior))
    found = answer_of(tmp_path / "run")
    assert list(found["parts"]) == ["synthetic", "own"] and found["parts"]["synthetic"]["units"] == 12
    synthetic, own = found["sentences"]
    values = found["parts"]["synthetic"]
    interval = f"{-values['gain']:+.4f} [{-values['high']:+.4f}, {-values['low']:+.4f}]"
    words = f"the mean loss changes by {interval} on 12 tables that took no part (95 % interval)"
    assert synthetic == f"synthetic tables: {words}"
    assert own.startswith("own ") and "selection" in own


def tables_of(prior) -> list:
    return [prior.sample(TableSpec(40, 20, 3, 4), (-2, 0, number)) for number in range(20)]
