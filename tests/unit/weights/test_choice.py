"""Which weights of a run the commands take."""

import dataclasses

import pytest
import torch
from training_runs import SMALLEST_MODEL, UNTRAINED_STEP, write_untrained_run

from tabicl_train import TabICLClassifier
from tabicl_train.config import options
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.lab import attention, classes, entropy
from tabicl_train.training.resume import initial_weights
from tabicl_train.weights.choice import say_once
from tabicl_train.weights.reader import read_weights


@pytest.fixture
def made(tmp_path):
    say_once.cache_clear()
    return tmp_path / "run", write_untrained_run(tmp_path / "run")


def same(tensors, expected) -> bool:
    return tensors.keys() == expected.keys() and all(torch.equal(w, expected[name]) for name, w in tensors.items())


def test_the_best_weights_are_taken_unless_others_are_chosen(made, capfd):
    folder, kinds = made
    best = f"weights   {folder}: the best by validation, of step 5 (the newest are of step 10)"
    newest = f"weights   {folder}: the newest, of step 10"
    for choice, kind, line in (
        (None, "best", best),
        ("best", "best", None),  # said already
        ("newest", "trained", newest),
        ("trained", "trained", None),
        ("ema", "ema", f"weights   {folder}: the exponential moving average, of step 10"),
    ):
        found = read_weights(folder, choice)
        assert same(found.tensors, kinds[kind])
        assert found.origin["weights"] == kind
        assert capfd.readouterr().err.splitlines() == ([] if line is None else [line])
    for name in ("best", f"step-{UNTRAINED_STEP:08d}"):  # a file is taken as it is
        found = read_weights(folder / f"checkpoints/{name}.ckpt").tensors
        assert same(found, kinds["best" if name == "best" else "trained"])
    assert capfd.readouterr().err == ""


def test_the_newest_weights_are_taken_of_a_run_without_best_ones(made, capfd):
    folder, kinds = made
    (folder / "checkpoints/best.ckpt").unlink()
    with pytest.raises(ConfigError, match=r"best\.ckpt, the best weights of the run, is missing; set weights=newest"):
        read_weights(folder)  # validation.csv names them: others are not taken in their place without a word
    (folder / "validation.csv").unlink()
    assert same(read_weights(folder).tensors, kinds["trained"])
    line = f"weights   {folder}: the newest, of step 10 (no weights are marked as the best by validation)\n"
    assert capfd.readouterr().err == line


def test_an_average_that_a_run_does_not_keep_is_refused_before_a_line_names_it(made, capfd):
    folder, _ = made
    path = folder / f"checkpoints/step-{UNTRAINED_STEP:08d}.ckpt"
    content = torch.load(path, weights_only=True)
    del content["callbacks"]["Averages"]
    torch.save(content, path)
    with pytest.raises(ConfigError, match=r"0010\.ckpt holds no average of the weights: averages\.ema was 0"):
        read_weights(folder, "ema")
    assert capfd.readouterr().err == ""


def test_runs_and_estimators_start_from_the_same_weights(made):
    folder, kinds = made
    config = compose(["experiment=smoke", f"run_dir={folder}", *SMALLEST_MODEL])
    assert same(initial_weights(str(folder), config.model).tensors, kinds["best"])
    classifier = TabICLClassifier(folder, n_estimators=1).fit([[0.0], [1.0], [2.0]], [0, 1, 1])
    assert same(classifier.network_.state_dict(), kinds["best"])


def test_every_command_that_reads_a_run_has_the_choice():
    commands = [kind for kind in vars(options).values() if dataclasses.is_dataclass(kind)]
    commands += [attention.AttentionOptions, classes.ClassesOptions, entropy.EntropyOptions]
    readers = []
    for command in commands:
        fields = {field.name: field for field in dataclasses.fields(command)}
        if "checkpoint" in fields:
            readers.append(command)
            assert fields["weights"].default is None, command
    assert len(readers) == 6
