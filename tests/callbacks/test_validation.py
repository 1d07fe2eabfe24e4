"""Validation during training: what it computes, keeps and prints, and that training does not notice it."""

import contextlib
import json
import math
import shutil
import signal
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from runs import assert_same_end, assert_same_state, read
from short_runs import beside
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import train_test_split

from priors.dummy import Dummy
from tabicl_train import TabICLClassifier
from tabicl_train import train as training
from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.held_out.draws import held_out_streams
from tabicl_train.callbacks.held_out.selection import read_scores
from tabicl_train.callbacks.validation import COLUMNS, Validation
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import SYNTHETIC
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.distributed.signals import Stop
from tabicl_train.errors import ConfigError
from tabicl_train.model.pack import Pack
from tabicl_train.model.quantiles import guess_loss
from tabicl_train.module import query_losses
from tabicl_train.prediction.export import export, load_checkpoint, load_model
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.status import read_status

pytestmark = pytest.mark.slow

SETTINGS = [
    "experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=8", "checkpoint.every=2",
    "trainer.accelerator=cpu", "model.dropout=0.1", "averages.ema=0.9",
]  # fmt: skip
VALIDATED = [
    "validation.every=2", "validation.rows=[40,60]", "validation.tables=6", "validation.features=[2,4]",
    "validation.real_rows=60",
]  # fmt: skip
VALIDATE = Validation.validate
REAL = ["iris", "wine", "breast_cancer", "digits"]


class Killed(BaseException):
    pass


class States:
    """The random states at the start of every step."""

    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_start(self, module, **_) -> None:
        self.seen.append((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), module.model.training))


def run(run_dir: Path, *overrides: str, callbacks: tuple = ()) -> str:
    with beside(*callbacks):
        return training.train(compose([*SETTINGS, f"run_dir={run_dir}", *overrides]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One run twice, once with validation; the random states of both."""
    folder = tmp_path_factory.mktemp("validation")
    for name, settings in (("plain", []), ("validated", [*VALIDATED, "stream.num_workers=1"])):
        np.random.seed(0)
        run(folder / name, *settings, callbacks=(states := States(),))
        (folder / f"{name}.states").write_text(json.dumps(states.seen))
    return folder


def test_a_run_with_validation_is_the_run_without_to_the_bit(folder):
    assert_same_end(folder / "validated", folder / "plain")
    assert (folder / "validated.states").read_text() == (folder / "plain.states").read_text()
    assert not (folder / "plain/validation.csv").exists() and not (folder / "plain/checkpoints/best.ckpt").exists()


def test_rows_are_loss_and_accuracy_of_the_network_at_that_step(folder):
    rows = read(folder / "validated/validation.csv")
    assert tuple(rows[0]) == COLUMNS
    assert [(row["step"], row["data"]) for row in rows] == [
        (str(step), data) for step in (2, 4, 6, 8) for data in (SYNTHETIC, SYNTHETIC, *REAL)
    ]
    assert [row["rows"] for row in rows[:6]] == ["40", "60", "60", "60", "60", "60"]
    network = load_model(str(folder / "validated"))
    stream = held_out_streams(compose([*SETTINGS, *VALIDATED]))[SYNTHETIC]
    for row, item in zip(rows[-6:-4], stream, strict=True):
        losses, right = [], []
        tables = [table for pack in item.packs for table in pack.tables()]
        guesses = [guess_loss(y, n) for _, y, n in tables]
        for X, y, n in tables:
            one = Pack.of([(X, y, n)])
            with torch.no_grad():
                losses.append(query_losses(network, one).mean().item())
                p = network(one)
            right.append((p.argmax(-1) == y[n:]).float().mean().item())
        assert len(losses) == 6
        assert float(row["loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
        assert float(row["accuracy"]) == pytest.approx(np.mean(right), rel=1e-5)
        assert float(row["guess_loss"]) == pytest.approx(np.mean(guesses), rel=1e-6)
        assert row["roc_auc"] == ""
    assert rows[-1]["guess_loss"] == ""


def test_the_probe_is_the_classifier_with_one_estimator_on_a_held_out_part(folder):
    row = read(folder / "validated/validation.csv")[-3]  # wine, of which a stratified 60 rows are used
    assert row["data"] == "wine"
    config = compose([*SETTINGS, *VALIDATED])
    records, averages = Records(folder / "validated"), Averages(config.averages)
    validation = Validation(config, records, Ranks(), averages, Stop(), lambda values, step: None)
    (task,) = [task for task in validation.tasks if task.name == "wine"]
    train, query = train_test_split(np.arange(60), test_size=0.3, stratify=task.y, random_state=0)
    classifier = TabICLClassifier(folder / "validated", n_estimators=1).fit(task.X.iloc[train], task.y[train])
    p = classifier.predict_proba(task.X.iloc[query])
    assert float(row["loss"]) == pytest.approx(log_loss(task.y[query], p), rel=1e-4)
    assert float(row["roc_auc"]) == pytest.approx(roc_auc_score(task.y[query], p, multi_class="ovr"), abs=1e-3)


def test_held_out_tables_are_the_same_in_every_run_and_in_no_step(monkeypatch):
    changes = [], ["seed=5", "model=small"]
    streams = [held_out_streams(compose([*SETTINGS, *VALIDATED, *more]))[SYNTHETIC] for more in changes]
    for a, b in zip(*streams, strict=True):
        assert [p.shapes for p in a.packs] == [p.shapes for p in b.packs]
        assert all(torch.equal(p.X, q.X) and torch.equal(p.y, q.y) for p, q in zip(a.packs, b.packs, strict=True))
    addresses, plan = [], Dummy.plan
    monkeypatch.setattr(Dummy, "plan", lambda self, spec, seed: addresses.append(seed) or plan(self, spec, seed))
    assert len(list(streams[0])) == 2
    assert {tuple(a[:3]) for a in addresses} == {(-1, k, i) for k in range(2) for i in range(6)}
    with pytest.raises(ConfigError, match="seed is -1"):  # so no step's table has such an address
        compose([*SETTINGS, "seed=-1"])


@pytest.mark.parametrize("killed", ["between the save and the validation", "after another validation"])
def test_a_run_in_two_parts_writes_the_same_rows(killed, folder, tmp_path):
    torn, whole = tmp_path / "torn", folder / "validated"
    run(torn, *VALIDATED, "trainer.max_steps=4")
    written = (whole / "validation.csv").read_bytes().splitlines(keepends=True)
    assert (torn / "validation.csv").read_bytes() == b"".join(written[:13])
    left = written[:7] if "between" in killed else written[:15]
    (torn / "validation.csv").write_bytes(b"".join(left))
    run(torn, *VALIDATED)
    assert (torn / "validation.csv").read_bytes() == b"".join(written)
    assert_same_end(torn, whole)


def scripted(losses: list[float], roc_aucs: list[float]) -> contextlib.AbstractContextManager:
    """A patch that makes the validations of steps 1, 2, ... find these scores."""

    def validate(self, step, *arguments):
        def drawn(self, network, module, part):
            return (SYNTHETIC, 40, losses[step - 1], 0.5, None, 1.6), []

        def real(self, network, module, task):
            return (task.name, 60, 1.0, 0.5, roc_aucs[step - 1], None), []

        with mock.patch.multiple(Validation, score_drawn=drawn, score_real=real):
            VALIDATE(self, step, *arguments)

    return mock.patch.object(Validation, "validate", validate)


LOSSES = [1.5, 1.4, 1.3, 1.1, 1.2, 1.1, math.nan, 1.3]
ROC_AUCS = [0.6, 0.8, 0.7, 0.6, 0.5, 0.4, math.nan, 0.7]


@pytest.mark.parametrize(("best", "step"), [("real", 2), ("synthetic", 4)])
def test_best_weights_are_kept_and_three_falls_in_a_row_are_told(best, step, tmp_path, capfd):
    settings = [*VALIDATED, "validation.every=1", f"validation.best={best}", "checkpoint.keep=8", "checkpoint.every=1"]
    with scripted(LOSSES, ROC_AUCS):
        run(tmp_path / "run", *settings, "trainer.max_steps=6")
        run(tmp_path / "run", *settings)
    kept = tmp_path / "run/checkpoints/best.ckpt"
    for weights in ("trained", "ema"):
        _, actual = load_checkpoint(str(kept), weights)
        _, expected = load_checkpoint(str(tmp_path / f"run/checkpoints/step-{step:08d}.ckpt"), weights)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], w) for name, w in expected.items())
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    assert warnings == [
        f"warning   step {at}: the mean ROC AUC on real data fell 3 times in a row: {values}"
        for at, values in ((5, "0.8000, 0.7000, 0.6000, 0.5000"), (6, "0.7000, 0.6000, 0.5000, 0.4000"))
    ]
    incidents = [json.loads(line) for line in (tmp_path / "run/incidents.jsonl").read_text().splitlines()]
    assert [line["step"] for line in incidents] == [4, 5] and "fell 3 times" in incidents[0]["reason"]
    scores = read_scores(Records(tmp_path / "run").rows("validation.csv"))
    assert scores[4] == {"synthetic": 1.1, "real": 0.6} and list(scores) == list(range(1, 9))


@pytest.mark.parametrize("write", [(Validation, "keep"), (Records, "append_rows")])
def test_a_kill_at_either_write_of_a_validation_loses_no_best_weights(write, tmp_path):
    owner, method = write
    original = getattr(owner, method)

    def killed(self, *arguments):
        if "validation.csv" in arguments or method == "keep":
            raise Killed
        original(self, *arguments)

    settings = [*VALIDATED, "validation.every=4", "checkpoint.every=4", "trainer.max_steps=8"]
    with scripted(LOSSES, ROC_AUCS[::-1]):
        with mock.patch.object(owner, method, killed), pytest.raises(Killed):
            run(tmp_path / "run", *settings)
        assert not (tmp_path / "run/validation.csv").exists()
        run(tmp_path / "run", *settings)
    content = torch.load(tmp_path / "run/checkpoints/best.ckpt", weights_only=True)
    assert (content["global_step"], content["scores"]) == (8, {"synthetic": 1.3, "real": 0.6})
    assert list(read_scores(Records(tmp_path / "run").rows("validation.csv"))) == [4, 8]


def best_of(run_dir: Path) -> tuple[int, float]:
    """Step and score of the best weights."""
    content = torch.load(run_dir / "checkpoints/best.ckpt", weights_only=True)
    return content["global_step"], content["scores"]["real"]


def test_best_weights_stay_when_their_step_is_done_again(tmp_path):
    settings = [*VALIDATED, "trainer.max_steps=4"]
    for roc_auc in (0.9, 0.5):  # of step 4; that of step 2 is 0.8
        with scripted(LOSSES, [0.0, 0.8, 0.0, roc_auc]):
            run(tmp_path / "run", *settings)
        (tmp_path / "run/checkpoints/step-00000004.ckpt").unlink()
    assert best_of(tmp_path / "run") == (4, 0.9)


def test_best_weights_of_a_run_that_begins_again_at_step_0_are_forgotten(tmp_path):
    class Kill:
        def on_train_batch_start(self, step, **_) -> None:
            if step == 3:
                raise Killed

    settings = [*VALIDATED, "checkpoint.every=4", "trainer.max_steps=4"]
    with scripted(LOSSES, [0.0, 0.9, 0.0, 0.9]), pytest.raises(Killed):
        run(tmp_path / "run", *settings, callbacks=(Kill(),))
    assert best_of(tmp_path / "run") == (2, 0.9)
    with scripted(LOSSES, [0.0, 0.1, 0.0, 0.2]):
        run(tmp_path / "run", *settings)
    assert best_of(tmp_path / "run") == (4, 0.2)


def test_a_finished_run_gets_the_last_validation_that_it_lacks(folder, tmp_path):
    run_dir, written = tmp_path / "run", folder / "validated/validation.csv"
    shutil.copytree(folder / "validated", run_dir)
    (run_dir / "checkpoints/best.ckpt").unlink()
    (run_dir / "validation.csv").write_bytes(b"".join(written.read_bytes().splitlines(keepends=True)[:-6]))
    (run_dir / "status.json").unlink()
    assert run(run_dir, *VALIDATED) == "finished"
    assert read_status(run_dir)["status"] == "finished"
    assert (run_dir / "validation.csv").read_bytes() == written.read_bytes()
    for weights in ("trained", "ema"):
        _, best = load_checkpoint(str(run_dir / "checkpoints/best.ckpt"), weights)
        _, expected = load_checkpoint(str(run_dir / "checkpoints/step-00000008.ckpt"), weights)
        assert_same_state(best, expected)
    with mock.patch.object(Validation, "validate", side_effect=AssertionError):
        assert run(run_dir, *VALIDATED) == "finished"  # there is nothing left to do
        (run_dir / "validation.csv").unlink()
        assert run(run_dir) == "finished"


class StopsIn:
    """A stop signal in the middle of the last validation."""

    def __init__(self) -> None:
        self.score = Validation.score_drawn

    def __call__(self, validation, network, module, part):
        signal.raise_signal(signal.SIGTERM)
        return self.score(validation, network, module, part)


def test_a_stop_signal_ends_a_validation_and_the_next_start_does_it(folder, tmp_path):
    settings = [*VALIDATED, "validation.every=100"]
    stops = StopsIn()
    with mock.patch.object(Validation, "score_drawn", lambda *a: stops(*a)):
        assert run(tmp_path / "run", *settings) == "preempted"
        assert (read_status(tmp_path / "run")["status"], read_status(tmp_path / "run")["step"]) == ("preempted", 8)
        assert run(tmp_path / "run", *settings) == "preempted"  # again in the last one, which is all that is left
    assert not (tmp_path / "run/validation.csv").exists()
    assert run(tmp_path / "run", *settings) == "finished"
    assert read(tmp_path / "run/validation.csv") == read(folder / "validated/validation.csv")[-6:]


def test_one_in_the_middle_of_a_run_is_not_lost_to_a_stop_signal(folder, tmp_path):
    stops = StopsIn()
    with mock.patch.object(Validation, "score_drawn", lambda *a: stops(*a)):
        assert run(tmp_path / "run", *VALIDATED) == "preempted"
    assert read_status(tmp_path / "run")["step"] == 2  # no step more than that of the validation
    assert run(tmp_path / "run", *VALIDATED) == "finished"
    assert read(tmp_path / "run/validation.csv") == read(folder / "validated/validation.csv")


def test_the_weights_that_a_run_starts_from_can_be_its_best(folder, tmp_path):
    start = tmp_path / "start.ckpt"
    export(str(folder / "plain"), str(start))
    settings = [*VALIDATED, "trainer.max_steps=4", f"init_weights={start}"]
    with scripted(LOSSES, [0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.9]):  # the last one is that of step 0
        run(tmp_path / "run", *settings)
    assert list(read_scores(Records(tmp_path / "run").rows("validation.csv"))) == [0, 2, 4]
    _, best = load_checkpoint(str(tmp_path / "run/checkpoints/best.ckpt"), "trained")
    assert_same_state(best, load_checkpoint(str(start))[1])


def test_a_single_kind_of_tables_or_a_broken_network_is_no_error(tmp_path, capfd):
    class Break:
        def on_train_batch_end(self, module, **_) -> None:
            with torch.no_grad():
                module.model.icl_predictor.decoder[-1].bias.fill_(math.nan)

    run(tmp_path / "broken", *VALIDATED, "validation.rows=[]", "trainer.max_steps=2", callbacks=(Break(),))
    rows = read(tmp_path / "broken/validation.csv")
    assert [row["data"] for row in rows] == REAL and {row["roc_auc"] for row in rows} == {"nan"}
    assert "iris could not be scored" in capfd.readouterr().err
    assert not (tmp_path / "broken/checkpoints/best.ckpt").exists()
    settings = ["validation.real_rows=0", "validation.best=synthetic"]
    run(tmp_path / "synthetic", *VALIDATED, *settings, "trainer.max_steps=2")
    assert [row["rows"] for row in read(tmp_path / "synthetic/validation.csv")] == ["40", "60"]
    assert (tmp_path / "synthetic/checkpoints/best.ckpt").exists()


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=smoke", "validation.every=5", "validation.rows=[5]", "validation.real_rows=0",
                 "validation.features=[3,2]", "validation.tables=0"])  # fmt: skip
    assert len(caught.value.problems) == 4 and all(p.startswith("validation.") for p in caught.value.problems)
    assert any("best is 'real', but real_rows is 0" in p for p in caught.value.problems)


def test_stored_tables_have_no_held_out_ones(tmp_path):
    (tmp_path / "steps-00000000.safetensors").touch()
    with pytest.raises(ConfigError, match=r"validation.rows must be \[\] with prior=disk"):
        compose(["experiment=smoke", "prior=disk", f"prior.folder={tmp_path}", "validation.every=5"])
