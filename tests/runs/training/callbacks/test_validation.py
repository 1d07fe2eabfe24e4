"""Validation during training: what it computes, keeps and prints, and that training does not notice it."""

import itertools
import json
import math
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from command_line import command
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import train_test_split
from training_runs import assert_same_end, assert_same_state, read_rows

from priors.dummy import Dummy
from tabicl_train import TabICLClassifier
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import CLASS_SCORES, SYNTHETIC, configured_prior
from tabicl_train.config.schema import REAL as REAL_DATA
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.probes import Probe
from tabicl_train.model.pack import Pack
from tabicl_train.model.quantiles import guess_loss
from tabicl_train.run.curves import curve
from tabicl_train.run.records import Records
from tabicl_train.run.status import read_status
from tabicl_train.run.summary import score_in_words
from tabicl_train.training import loop
from tabicl_train.training.callbacks import scores, validation
from tabicl_train.training.callbacks.callback import Reason
from tabicl_train.training.callbacks.scores import Scored, suite_tasks
from tabicl_train.training.callbacks.validation import Validation, final_test_streams, validation_streams
from tabicl_train.training.callbacks.validation_history import read_scores
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.module import query_losses
from tabicl_train.weights.export import export
from tabicl_train.weights.pretrained import TrainedRange
from tabicl_train.weights.reader import load_model, read_weights

SETTINGS = [
    "experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=8", "checkpoint.every=2",
    "trainer.accelerator=cpu", "model.row_num_blocks=1", "model.icl_num_blocks=1", "model.dropout=0.1",
    "averages.ema=0.9",
    "curriculum.stages.smoke.rows=[40,120]",  # so that iris, with 105 labeled rows, is inside the trained range
]  # fmt: skip
VALIDATED = [
    "validation.every=4", "validation.rows=[40,60]", "validation.tables=6", "validation.features=[2,4]",
]  # fmt: skip
SYNTHETIC_ONLY = [*VALIDATED, "validation.suites=[]"]
REAL = ["iris", "wine", "breast_cancer", "digits"]


class States:
    """The random states at the start of every step."""

    def __init__(self) -> None:
        self.seen = []

    def before_step(self, state, item) -> None:
        states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
        self.seen.append((*states, state.network.training))


def train_eight_steps(run_dir: Path, *overrides: str, callbacks: tuple = ()) -> str:
    return loop.train(compose([*SETTINGS, f"run_dir={run_dir}", *overrides]), callbacks)


def streams_of(make, *overrides: str):
    config = compose([*SETTINGS, *VALIDATED, *overrides])
    return make(config.validation, {SYNTHETIC: configured_prior(config.prior)}, config.model)[SYNTHETIC]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One run twice, once with validation; the random states of both."""
    folder = tmp_path_factory.mktemp("validation")
    for name, settings in (("plain", []), ("validated", VALIDATED)):
        np.random.seed(0)
        states = States()
        train_eight_steps(folder / name, *settings, callbacks=(states,))
        (folder / f"{name}.states").write_text(json.dumps(states.seen))
    return folder


def test_a_run_with_validation_is_the_run_without_to_the_bit(folder):
    assert_same_end(folder / "validated", folder / "plain")
    assert (folder / "validated.states").read_text() == (folder / "plain.states").read_text()
    assert not (folder / "plain/validation.csv").exists()
    assert not (folder / "plain/checkpoints/best.ckpt").exists()


def test_rows_are_loss_and_accuracy_of_the_network_at_that_step(folder):
    rows = read_rows(folder / "validated/validation.csv")
    assert tuple(rows[0]) == ("step", "data", "rows", *CLASS_SCORES, "is_best", "trained_range")
    assert [row["step"] for row in rows] == ["4"] * 6 + ["8"] * 6
    assert [row["data"] for row in rows] == [SYNTHETIC, SYNTHETIC, *REAL] * 2
    assert [row["rows"] for row in rows[:6]] == ["40", "60", "150", "178", "200", "200"]
    assert rows[-1]["guess_loss"] == ""

    network = load_model(str(folder / "validated"), "newest")
    for row, item in zip(rows[6:8], streams_of(validation_streams), strict=True):
        losses = []
        accuracies = []
        guesses = []
        for X, y, n in itertools.chain.from_iterable(pack.tables() for pack in item.packs):
            pack = Pack.of([(X, y, n)])
            with torch.no_grad():
                losses.append(query_losses(network, pack).mean().item())
                predicted = network(pack).argmax(-1)
            accuracies.append((predicted == y[n:]).float().mean().item())
            guesses.append(guess_loss(y, n))
        assert len(losses) == 6
        assert float(row["loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
        assert float(row["accuracy"]) == pytest.approx(np.mean(accuracies), rel=1e-5)
        assert float(row["guess_loss"]) == pytest.approx(np.mean(guesses), rel=1e-6)
        assert row["roc_auc"] == ""


def test_real_data_is_scored_as_by_the_classifier_with_one_ensemble_member(folder):
    row = read_rows(folder / "validated/validation.csv")[-1]  # digits, of which a stratified 200 rows are used
    (task,) = [task for task in suite_tasks(("sklearn",), False) if task.name == row["data"] == "digits"]
    train, query = train_test_split(np.arange(200), test_size=0.3, stratify=task.y, random_state=0)
    newest = load_model(folder / "validated", "newest")
    classifier = TabICLClassifier(newest, n_estimators=1).fit(task.X.iloc[train], task.y[train])
    p = classifier.predict_proba(task.X.iloc[query])
    assert float(row["loss"]) == pytest.approx(log_loss(task.y[query], p), rel=1e-4)
    assert float(row["roc_auc"]) == pytest.approx(roc_auc_score(task.y[query], p, multi_class="ovr"), abs=1e-3)


def test_means_count_only_what_lies_inside_the_trained_range(folder, capfd):
    """Iris is like tables of the run, the others have more rows, features or classes."""
    rows = read_rows(folder / "validated/validation.csv")[-6:]
    assert [row["trained_range"] for row in rows] == ["inside"] * 3 + ["outside"] * 3
    assert curve(folder / "validated", "real/roc_auc")[-1] == (8, float(rows[2]["roc_auc"]))
    assert read_scores(rows)[8][REAL_DATA] == float(rows[2]["roc_auc"])
    assert score_in_words(folder / "validated") == f"ROC AUC {float(rows[2]['roc_auc']):.3f}"


def test_the_best_weights_are_not_those_that_are_best_outside_the_range(tmp_path, capfd):
    """Digits alone gets better, by more than iris gets worse."""
    sizes = {"labeled_rows": 42, "features": 4}

    def score_network(*_):
        iris, digits = next(losses)
        scores = {"accuracy": 0.5, "guess_loss": None}
        return [
            Scored(SYNTHETIC, 40, {"loss": iris, **scores, "guess_loss": 1.6}),
            Scored(SYNTHETIC, 500, {"loss": digits, **scores, "guess_loss": 1.6}),  # the longest table has 120 rows
            Scored("iris", 60, {"loss": iris, "roc_auc": 2 - iris, **scores}, sizes=sizes | {"classes": 3}),
            Scored("digits", 60, {"loss": digits, "roc_auc": 2 - digits, **scores}, sizes=sizes | {"classes": 10}),
        ]

    settings = [*VALIDATED, "validation.every=1", "validation.rows=[40,500]", "model.max_classes=3"]
    for best in (REAL_DATA, SYNTHETIC):
        losses = iter([(1.0, 3.0), (1.1, 1.0)])
        with mock.patch.object(validation, "score_network", score_network):
            train_eight_steps(tmp_path / best, *settings, f"validation.best={best}", "trainer.max_steps=2")
        rows = read_rows(tmp_path / best / "validation.csv")
        assert [row["trained_range"] for row in rows] == ["inside", "outside"] * 4
        assert {row["step"] for row in rows if row["is_best"] == "1"} == {"1"}
        assert "validation step 2: loss 1.1000 on synthetic tables, ROC AUC on 1 of 2 real data sets 0.9000" in (
            capfd.readouterr().err
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(
            ["validation.best=real", "model.max_classes=2"],
            "no data set of validation lies inside the trained",
            marks=pytest.mark.slow,
        ),
        (
            ["validation.rows=[500]"],
            "no set of synthetic tables of validation lies inside the trained range (12 to",
        ),
    ],
)
def test_a_run_whose_best_weights_nothing_can_choose_says_so_at_its_start(settings, words, tmp_path, capfd):
    train_eight_steps(tmp_path / "run", *VALIDATED, "validation.every=2", *settings, "trainer.max_steps=2")
    lines = capfd.readouterr().err
    assert words in lines
    assert lines.index(words) < lines.index("validation step 2")
    assert not (tmp_path / "run/checkpoints/best.ckpt").exists()


@pytest.mark.slow  # four runs
def test_the_range_is_handed_on_from_run_to_run(tmp_path):
    """Through a run directory, its best weights and an export."""
    small = ["trainer.max_steps=2", *SYNTHETIC_ONLY]
    train_eight_steps(tmp_path / "1", *small, "curriculum.stages.smoke.features=[2,9]")
    train_eight_steps(tmp_path / "2", *small, f"init_weights={tmp_path}/1", "curriculum.stages.smoke.rows=[20,80]")
    path = tmp_path / "2/checkpoints/step-00000002.ckpt"
    start = read_weights(tmp_path / "2/checkpoints/start.ckpt").trained_range
    assert start == TrainedRange((12, 108), (2, 9), classes=10)
    assert read_weights(path).trained_range == TrainedRange((6, 108), (2, 9), classes=10)
    export(str(path), str(tmp_path / "2.ckpt"))
    train_eight_steps(tmp_path / "3", *small, f"init_weights={tmp_path}/2.ckpt")
    train_eight_steps(tmp_path / "3", *small, "trainer.max_steps=3")  # a resumed run keeps it
    newest = tmp_path / "3/checkpoints/step-00000003.ckpt"
    assert read_weights(newest).trained_range == TrainedRange((6, 108), (2, 9), classes=10)


def test_validation_tables_are_the_same_in_every_run():
    items = list(streams_of(validation_streams))
    assert [item.tables for item in items] == [6, 6]
    for item, other in zip(items, streams_of(validation_streams, "seed=5", "model=small"), strict=True):
        for pack, same in zip(item.packs, other.packs, strict=True):
            assert pack.shapes == same.shapes
            assert torch.equal(pack.X, same.X)
            assert torch.equal(pack.y, same.y)


def test_training_validation_and_test_tables_are_different_ones(monkeypatch):
    plan = Dummy.plan
    addresses = set()

    def noted_plan(self, spec, seed):
        addresses.add(seed[:3])
        return plan(self, spec, seed)

    def draw(make) -> tuple[set, set]:
        """The addresses and the values of the tables of a stream."""
        addresses.clear()
        values = {pack.X.numpy().tobytes() for item in streams_of(make) for pack in item.packs}
        return set(addresses), values

    monkeypatch.setattr(Dummy, "plan", noted_plan)
    of_validation, validation_values = draw(validation_streams)
    of_test, test_values = draw(final_test_streams)
    assert len(of_validation) == len(of_test) == 12
    assert of_validation.isdisjoint(of_test)
    assert validation_values.isdisjoint(test_values)
    assert all(seed < 0 for seed, _, _ in of_validation | of_test)
    with pytest.raises(ConfigError, match="seed is -1"):  # so no step's table has such an address
        compose([*SETTINGS, "seed=-1"])


def scripted(losses: list[float], roc_aucs: list[float]):
    """A patch that makes the validations of steps 1, 2, ... find these scores."""
    scores = iter(zip(losses, roc_aucs, strict=True))

    def score_network(*_):
        loss, roc_auc = next(scores)
        return [
            Scored(SYNTHETIC, 40, {"loss": loss, "accuracy": 0.5, "guess_loss": 1.6}),
            Scored("iris", 60, {"loss": 1.0, "accuracy": 0.5, "roc_auc": roc_auc}),
        ]

    return mock.patch.object(validation, "score_network", score_network)


def test_best_weights_are_kept_falls_are_reported_and_patience_ends_the_run(tmp_path, capfd):
    every = ["validation.every=1", "validation.tables=1", "checkpoint.keep=8", "checkpoint.every=1"]
    settings = [*VALIDATED, *every, "validation.best=real", "trainer.max_steps=8"]
    losses = [1.5, 1.4, 1.3, 1.1, 1.2, 1.1, math.nan, 1.3]
    with scripted(losses, [0.6, 0.8, 0.7, 0.6, 0.5, 0.4, math.nan, 0.7]):
        train_eight_steps(tmp_path / "run", *settings, "trainer.max_steps=5")
        train_eight_steps(tmp_path / "run", *settings, "validation.patience=5")
    records = Records(tmp_path / "run")
    assert [row["step"] for row in records.rows("validation.csv")][::2] == list("1234567")
    assert {row["step"] for row in records.rows("validation.csv") if row["is_best"] == "1"} == {"1", "2"}
    assert read_status(tmp_path / "run")["status"] == "finished"
    assert read_status(tmp_path / "run")["step"] == 7
    for weights in ("trained", "ema"):
        actual = read_weights(str(tmp_path / "run/checkpoints/best.ckpt"), weights).tensors
        assert_same_state(actual, read_weights(str(tmp_path / "run/checkpoints/step-00000002.ckpt"), weights).tensors)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning") or "ends" in line]
    fell = "the mean ROC AUC on real data fell 3 times in a row"
    ended = "no better score in 5 validations since that of step 2 (validation.patience=5)"
    assert lines == [
        f"warning   step 5: {fell}: 0.8000, 0.7000, 0.6000, 0.5000",
        f"warning   step 6: {fell}: 0.7000, 0.6000, 0.5000, 0.4000",
        f"validation step 7: {ended}; the run ends",
    ]
    assert [line["step"] for line in records.lines("incidents.jsonl")] == [4, 5]
    train_eight_steps(tmp_path / "run", *settings, "validation.patience=5")
    assert f"finished already, 7 steps are done; {ended}" in capfd.readouterr().err


def test_best_weights_of_another_validation_are_replaced_with_a_line(tmp_path, capfd):
    """They are saved before the first checkpoint, and their export names their validation."""
    settings = [*SYNTHETIC_ONLY, "validation.every=1", "checkpoint.every=8"]
    with scripted([1.1, 1.2, 1.3, 1.4], [0.5] * 4):
        train_eight_steps(tmp_path / "run", *settings, "trainer.max_steps=2")
        train_eight_steps(tmp_path / "run", *settings, "trainer.max_steps=3", "validation.patience=2")
    assert "is replaced" not in capfd.readouterr().err  # and patience, which is over, is of the same tables
    result = command("export", f"checkpoint={tmp_path}/run", f"output={tmp_path}/w.ckpt", "weights=best")
    assert "of step 1, by validation on synthetic tables of 40 rows (loss 1.1000)\n" in result.stdout  # and not on iris
    train_eight_steps(tmp_path / "run", *settings, "trainer.max_steps=4", "validation.rows=[50]")
    assert "step 4: the tables have changed, so best.ckpt (step 1) is replaced" in capfd.readouterr().err
    result = command("export", f"checkpoint={tmp_path}/run", f"output={tmp_path}/x.ckpt", "weights=best")
    assert "the best weights are of step 4, by validation on synthetic tables of 50 rows (loss " in result.stdout


def test_a_finished_run_gets_the_last_validation_that_it_lacks(folder, tmp_path):
    run_dir, written = tmp_path / "run", folder / "validated/validation.csv"
    shutil.copytree(folder / "validated", run_dir)
    (run_dir / "checkpoints/best.ckpt").unlink()
    (run_dir / "validation.csv").write_bytes(b"".join(written.read_bytes().splitlines(keepends=True)[:-6]))
    assert train_eight_steps(run_dir, *VALIDATED) == "finished"
    rows = [{**row, "is_best": ""} for row in read_rows(run_dir / "validation.csv")]
    assert rows == [{**row, "is_best": ""} for row in read_rows(written)]
    for weights in ("trained", "ema"):
        best = read_weights(str(run_dir / "checkpoints/best.ckpt"), weights).tensors
        assert_same_state(best, read_weights(str(run_dir / "checkpoints/step-00000008.ckpt"), weights).tensors)
    with mock.patch.object(Validation, "validate", side_effect=AssertionError):
        assert train_eight_steps(run_dir, *VALIDATED) == "finished"  # there is nothing left to do


def test_a_stop_signal_in_a_validation_leaves_it_to_the_next_start(folder, tmp_path):
    """In that of step 4, and in the last one."""
    score, at = validation.score_network, iter([True, False, True])

    def signaled(*arguments):
        if next(at, False):
            signal.raise_signal(signal.SIGTERM)
        return score(*arguments)

    with mock.patch.object(validation, "score_network", signaled):
        for step in (4, 8):
            assert train_eight_steps(tmp_path / "run", *SYNTHETIC_ONLY) == "preempted"
            assert read_status(tmp_path / "run")["step"] == step  # no step more than that of the validation
    assert train_eight_steps(tmp_path / "run", *SYNTHETIC_ONLY) == "finished"
    rows = [row for row in read_rows(folder / "validated/validation.csv") if row["data"] == SYNTHETIC]
    assert [row | {"is_best": ""} for row in read_rows(tmp_path / "run/validation.csv")] == [
        row | {"is_best": ""} for row in rows
    ]
    assert_same_end(tmp_path / "run", folder / "plain")


def test_a_stop_signal_that_another_rank_has_seen_ends_a_validation():
    class Signaled(Ranks):
        def still_working(self, asked):
            return True

        def finish(self, result=False):
            assert not result
            return result

    config = compose([*SETTINGS, *VALIDATED])
    waiting = Validation()
    waiting.context = SimpleNamespace(
        config=config, prior=configured_prior(config.prior), ranks=Signaled(), stop=SimpleNamespace(asked=False),
        records=SimpleNamespace(folder=Path("nowhere"), rows=lambda name: []),
    )  # fmt: skip
    module = SimpleNamespace(model=torch.nn.Linear(1, 1), precision=None)
    state = SimpleNamespace(step=8, module=module)
    waiting.validate_if_due(state)
    assert not waiting.has_ended
    assert waiting.end(state, Reason.DONE) is Reason.STOPPED


def test_a_broken_network_is_no_error_and_never_the_best(tmp_path, capfd):
    class Break:
        def after_step(self, state, item) -> None:
            with torch.no_grad():
                state.network.icl_predictor.ln.weight.fill_(3e38)  # finite, so that they are saved

    settings = [*VALIDATED, "validation.rows=[]", "validation.best=real"]
    train_eight_steps(tmp_path / "run", *settings, "trainer.max_steps=1", callbacks=(Break(),))
    rows = read_rows(tmp_path / "run/validation.csv")
    assert [row["data"] for row in rows] == REAL
    assert {row["roc_auc"] for row in rows} == {"nan"}
    assert "iris could not be scored" in capfd.readouterr().err
    assert not (tmp_path / "run/checkpoints/best.ckpt").exists()
    assert {row["is_best"] for row in rows} == {"0"}


def test_suites_that_cannot_be_scored_are_refused():
    with pytest.raises(ConfigError) as caught:
        compose([*SETTINGS, *VALIDATED, "validation.suites=[sklaern,folder,sklearn,sklearn]"])
    assert caught.value.problems == [
        "validation.suites: there is no suite 'sklaern'; did you mean 'sklearn'?",
        "validation.suites: folder is missing; suite=folder needs one with tables and their tasks.csv",
        "validation.suites has two tasks named 'iris'",
    ]


def test_what_a_run_of_an_earlier_version_has_scored_is_told_if_it_changes(tmp_path, capfd):
    train_eight_steps(tmp_path / "run", *SYNTHETIC_ONLY, "trainer.max_steps=2")
    path = tmp_path / "run/checkpoints/step-00000002.ckpt"
    content = torch.load(path, weights_only=True)
    del content["config"]["validation"]["suites"]
    content["config"]["validation"] |= {"real_rows": 0, "probes": True}
    torch.save(content, path)
    train_eight_steps(tmp_path / "run", *SYNTHETIC_ONLY, "trainer.max_steps=4")
    assert "changed   validation.suites was ['probes'], is []" in capfd.readouterr().err


@pytest.mark.slow  # three more runs
def test_probes_are_a_curve_of_their_own_also_after_a_resume(folder, tmp_path, monkeypatch, capfd):
    """Training, best weights and other scores are those of a run without them; 32 features are outside its range."""
    probes = [Probe("xor", 50, numbers=False), Probe("2 of 32", 50, numbers=False)]
    for probe in probes:
        probe.name = f"probe {probe.probe}"
    monkeypatch.setattr(scores, "suite_tasks", lambda suites, numbers: probes)
    settings = [*VALIDATED, "validation.suites=[probes]"]
    train_eight_steps(tmp_path / "whole", *settings)
    train_eight_steps(tmp_path / "resumed", *settings, "trainer.max_steps=5", "validation.every=4")
    train_eight_steps(tmp_path / "resumed", *settings)
    assert_same_end(tmp_path / "whole", folder / "plain")
    rows = read_rows(tmp_path / "whole/validation.csv")
    assert [row["data"] for row in rows] == [SYNTHETIC, SYNTHETIC, "probe xor", "probe 2 of 32"] * 2
    others = [row for row in read_rows(folder / "validated/validation.csv") if row["data"] == SYNTHETIC]
    assert [row for row in rows if row["data"] == SYNTHETIC] == others
    assert [row["trained_range"] for row in rows[-2:]] == ["inside", "outside"]

    newest = load_model(tmp_path / "whole", "newest")
    draw = probes[0].draw(0, numbers=False)
    p = TabICLClassifier(newest, n_estimators=1).fit(draw.X[:50], draw.y[:50]).predict_proba(draw.X[50:])
    score = roc_auc_score(draw.y[50:], p[:, 1])
    assert float(rows[-2]["roc_auc"]) == pytest.approx(score, abs=1e-3)
    possible = probes[0].possible(0)["roc_auc"]
    line = f"ROC AUC on 1 of 2 probes {float(rows[-2]['roc_auc']):.4f} (possible {possible:.4f})"
    assert line in capfd.readouterr().err

    resumed = [row for row in read_rows(tmp_path / "resumed/validation.csv") if row["step"] in ("4", "8")]
    assert resumed == rows
    assert curve(tmp_path / "resumed", "probes/roc_auc")[-1] == (8, float(rows[-2]["roc_auc"]))


@pytest.mark.parametrize("best", [SYNTHETIC, REAL_DATA])
def test_probes_never_choose_weights(tmp_path, best):
    found = iter([(1.0, 0.8, 0.6), (1.1, 0.7, 0.9)])

    def score_network(*_):
        loss, roc_auc, of_probe = next(found)
        others = {"loss": 2 - of_probe, "accuracy": 0.5, "guess_loss": None}
        return [
            Scored(SYNTHETIC, 40, others | {"loss": loss, "guess_loss": 1.6}),
            Scored("iris", 60, others | {"roc_auc": roc_auc}),
            Scored("probe xor", 700, others | {"roc_auc": of_probe, "possible": 0.95}),
        ]

    with mock.patch.object(validation, "score_network", score_network):
        train_eight_steps(
            tmp_path / "run", *VALIDATED, "validation.every=1", f"validation.best={best}", "trainer.max_steps=2"
        )
    rows = read_rows(tmp_path / "run/validation.csv")
    assert {row["step"] for row in rows if row["is_best"] == "1"} == {"1"}
    assert curve(tmp_path / "run", "probes/roc_auc") == [(1, 0.6), (2, 0.9)]
