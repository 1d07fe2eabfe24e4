"""The prior of the rows of one real table."""

import itertools
import os
import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from table_files import build_frame

from priors import PriorError, TableSpec, build_prior
from priors.real import real_tables
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError

SPEC = TableSpec(60, 48, 10)
NUMBERS = replace(SPEC, max_classes=0)


@pytest.fixture
def file(tmp_path):
    """200 rows, of which 50 are there twice."""
    frame = build_frame(0, 150)
    pd.concat([frame, frame[:50]]).to_csv(tmp_path / "own.csv", index=False)
    return str(tmp_path / "own.csv")


@pytest.mark.parametrize("spec", [SPEC, NUMBERS], ids=["classes", "numbers"])
def test_rows_for_validation_and_test_are_never_drawn_in_training(spec, file):
    """Nor their copies; and each row is drawn for one purpose."""
    training = build_prior("one_table", file=file, target="label" if spec.max_classes else "price")
    numbers = training.rows(numeric=spec.max_classes == 0).numbers
    in_training = set()
    for seed in range(25):
        table = training.sample(spec, seed)
        queries = numbers[table.plan.queries].tolist()
        assert training.clusters(table) == queries
        in_training.update(queries, numbers[table.plan.labeled].tolist())

    held_out = []
    for prior in (training.for_validation(), training.for_test()):
        numbers = prior.rows(numeric=spec.max_classes == 0).numbers
        tables = [prior.sample(spec, seed) for seed in range(5)]
        rows = set(prior.clusters(tables[0]))
        held_out.append(rows)
        for table in tables:  # every held-out row, from at most num_rows training rows
            queries = numbers[table.plan.queries].tolist()
            assert prior.clusters(table) == queries
            assert sorted(queries) == sorted(rows)
            labeled = set(numbers[table.plan.labeled].tolist())
            assert labeled <= in_training
            assert len(labeled) == 60 == table.train_size

    sides = [in_training, *held_out]
    assert min(map(len, sides)) >= 5
    assert sorted(itertools.chain(*sides)) == list(range(200))
    frame = pd.read_csv(file).fillna(-1).to_numpy()
    of_training, of_validation, of_test = [{tuple(frame[number]) for number in side} for side in sides]
    assert of_training.isdisjoint(of_validation)
    assert of_training.isdisjoint(of_test)
    assert of_validation.isdisjoint(of_test)


def test_draws_for_validation_differ_and_are_those_of_their_address(file):
    prior = build_prior("one_table", file=file)
    drawn = [prior.for_validation().sample(SPEC, seed) for seed in range(6)]
    assert len({str(table.plan.member) for table in drawn}) == 6
    other = pickle.loads(pickle.dumps(prior.for_validation()))
    for seed, table in reversed(list(enumerate(drawn))):
        again = other.sample(SPEC, seed)
        assert torch.equal(again.X, table.X) and torch.equal(again.y, table.y)
    assert prior.fingerprint() == other.fingerprint() == prior.for_test().fingerprint()
    assert prior.fingerprint() != build_prior("one_table", file=file, target="price").fingerprint()


def test_a_short_table_gives_all_of_its_rows_and_a_wide_one_some_of_its_features(file):
    prior = build_prior("one_table", file=file)
    table = prior.sample(TableSpec(1000, 800, 3), 0)
    count = len(prior.rows(False).sides["training"])
    assert table.X.shape == (count, 3)
    assert table.train_size == round(0.8 * count)
    assert prior.for_validation().sample(TableSpec(1000, 800, 3), 0).X.shape[1] == 7
    assert prior.eligible(10**6, False) is None  # so no curriculum is too long for it


def test_its_largest_tables_have_the_rows_for_training_and_all_features_and_classes(file):
    for target, max_classes in (("label", 10), ("price", 0)):
        prior = build_prior("one_table", file=file, target=target)
        table = prior.sample(TableSpec(1000, 800, 100, max_classes), 0)
        assert prior.largest(1000, max_classes == 0) == (*table.X.shape, table.num_classes or None)


def test_options_choose_the_target_and_the_features(file):
    prior = build_prior("one_table", file=file, target="group", drop=["x", "day"], categorical=["size"])
    rows = prior.rows(False).rows
    assert list(rows.X) == ["gaps", "flag", "size", "price", "label"]
    assert rows.num_classes == 3
    assert rows.X["size"].dtype == "category"
    assert prior.describe() == [
        f"{file}: 200 rows, 5 features, target 'group'",
        "10% of the rows for validation, 10% for the final test",
    ]
    assert (
        build_prior("one_table", file=file)
        .describe()[0]
        .endswith("target 'label' (a column called target, class, label or y, else the last one)")
    )


def test_rows_without_a_target_are_left_out(file):
    frame = pd.read_csv(file)
    frame.loc[::3, "label"] = None
    frame.to_csv(file, index=False)
    prior = build_prior("one_table", file=file)
    assert set(prior.rows(False).numbers) == set(np.flatnonzero(np.arange(200) % 3))


def test_it_may_be_part_of_a_mixture(file):
    components = {"dummy": {"weight": 1}, "one_table": {"weight": 1, "file": file}}
    mix = build_prior("mix_scm", components=components)
    assert {mix.sample(SPEC, seed).X.shape[1] == 7 for seed in range(20)} == {True, False}
    real = real_tables(mix)
    assert mix.priors["one_table"].fingerprint() == real.fingerprint()
    assert real.ineligible(10) == []
    assert real.ineligible(0)[0].startswith("component one_table: the target 'label' of")


def test_a_changed_file_stops_the_draws(file):
    prior = build_prior("one_table", file=file)
    os.utime(file, ns=(0, 0))  # another time, the same content
    prior.sample(SPEC, 0)
    build_frame(3, 150).to_csv(file, index=False)
    for each in (pickle.loads(pickle.dumps(prior)), pickle.loads(pickle.dumps(prior.for_validation()))):
        with pytest.raises(PriorError, match=r"own\.csv has changed since it was indexed"):
            each.sample(SPEC, 0)


LABELS = {
    "empty": "",
    "text": "x,label\n" + "".join(f"{n * n},{'ab'[n % 2]}\n" for n in range(50)),
    "many": "x,label\n" + "".join(f"{n * n},class {n % 12}\n" for n in range(100)),
    "numbers": "x,label\n" + "".join(f"{n * n},{n / 3}\n" for n in range(100)),
    "short": "x,label\n" + "".join(f"{n * n},{n % 2}\n" for n in range(12)),
}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("empty", [], "empty.csv cannot be used: it is empty"),
        ("text", ["task=regression"], "the target 'label' of .*text.csv has categories, but the network predicts numb"),
        ("many", [], "the target 'label' of .*many.csv has 12 classes, more than the network's 10$"),
        ("numbers", [], "numbers.csv has 100 classes, more than the network's 10: set task=regression if they are num"),
        ("short", [], r"short.csv: \d+ of the 12 rows are for \w+, where at least \d+ are needed: use more rows or"),
        ("text", ["prior.drop=[x]"], "text.csv: it has no column other than its target"),
        ("text", ["prior.validation_fraction=0"], r"validation_fraction is 0(.0)?; it must lie in \(0, 1\)"),
        ("text", ["prior.file=nowhere.csv"], "nowhere.csv cannot be read: No such file or directory"),
        ("text", ["prior.file=a.xlsx"], "a.xlsx must be one of .csv, .parquet, .arrow, .feather files"),
        ("text", ["prior.file="], "file is not set; it is the table to train on"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_sentence(name, settings, message, tmp_path):
    (tmp_path / f"{name}.csv").write_text(LABELS[name])
    with pytest.raises(ConfigError, match=message) as caught:
        compose(["experiment=fine_tune", f"prior.file={tmp_path}/{name}.csv", *settings])
    assert len(caught.value.problems) == 1
