"""Draws from real tables."""

import os
import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from table_files import build_frame, write_table_files

from priors import PriorError, TableSpec, build_prior
from priors.finish import Rejected
from priors.real import draws, real_tables
from priors.real.draws import TableCache, draw_classes, merge_rare, read_columns, size_of
from priors.real.preprocessing import FeatureEncoder, Normalizer
from tabicl_train.config.checks import too_many_rows

SPEC = TableSpec(60, 40, 5, max_classes=4)
NUMBERS = replace(SPEC, max_classes=0)


@pytest.fixture
def folder(tmp_path):
    return write_table_files(tmp_path / "tables")


def prior_of(folder, **options):
    return build_prior("tables", folder=str(folder), **{"validation_fraction": 0.0, "test_fraction": 0.0, **options})


def same(a, b) -> bool:
    return torch.equal(a.X, b.X) and torch.equal(a.y, b.y) and str(a.plan) == str(b.plan)


@pytest.mark.parametrize("spec", [SPEC, NUMBERS], ids=["classes", "numbers"])
def test_a_draw_is_what_its_plan_says(spec, folder):
    """Rows, columns and target of the file, prepared by the estimator's encoder and normalizer."""
    prior = prior_of(folder)
    for seed in range(20):
        table = prior.sample(spec, seed)
        plan = table.plan
        frame = pd.read_csv(folder / plan.task.entry.path)
        target = plan.target.rpartition(": ")[2]
        assert len(set(plan.rows)) == spec.num_rows
        assert len(set(plan.features)) == len(plan.features) == 5
        assert target not in plan.features
        assert frame[target].iloc[plan.rows].notna().all()
        X = frame.assign(day=pd.to_datetime(frame["day"])).iloc[plan.rows][plan.features]
        encoder = FeatureEncoder().fit(X[:40])
        numbers = encoder.transform(X)
        expected = Normalizer(plan.norm_method).fit(numbers[:40]).transform(numbers)
        assert np.array_equal(table.X, expected)
        values = frame[target].iloc[plan.rows].to_numpy()
        pairs = pd.DataFrame({"value": values, "y": table.y})
        if spec.max_classes == 0:
            assert values.dtype == float
            assert np.corrcoef(values, table.y)[0, 1] > 0.9
        elif "cut" in plan.target:
            spans = pairs.groupby("y")["value"].agg(["min", "max"]).sort_values("min")
            merged = len(spans) < plan.target.count(".")
            assert merged or (spans["max"].to_numpy()[:-1] < spans["min"].to_numpy()[1:]).all()
        else:
            assert (pairs.groupby("value")["y"].nunique() == 1).all()


@pytest.mark.parametrize("spec", [SPEC, NUMBERS], ids=["classes", "numbers"])
def test_gaps_are_kept_where_that_is_asked_for(spec, folder):
    """The same rows, columns and targets; of the values, only those of columns with gaps differ."""
    prior, missing = prior_of(folder), 0
    for seed in range(20):
        filled, kept = prior.sample(spec, seed), prior.sample(replace(spec, keeps_missing=True), seed)
        assert str(filled.plan) == str(kept.plan)
        assert torch.equal(filled.y, kept.y)
        frame = pd.read_csv(folder / kept.plan.task.entry.path).iloc[kept.plan.rows][kept.plan.features]
        assert np.array_equal(kept.X.isnan(), frame.isna())
        whole = ~kept.X.isnan().any(0)
        assert torch.equal(filled.X[:, whole], kept.X[:, whole])
        assert filled.X.isfinite().all()
        labeled = kept.X[:40, ~whole].double()
        assert torch.allclose(labeled.nanmean(0), torch.zeros(1, dtype=torch.float64), atol=1e-5)
        assert filled.missing == kept.missing == pytest.approx(float(kept.X.isnan().double().mean()))
        missing += int(kept.X.isnan().sum())
    assert missing > 50


def test_draws_do_not_depend_on_paths_formats_of_others_nor_on_what_was_drawn_before(folder, tmp_path):
    prior = prior_of(folder)
    drawn = [prior.sample(SPEC, seed) for seed in range(12)]
    moved = tmp_path / "moved"
    (moved / "deep").mkdir(parents=True)
    for number in range(4):
        (moved / f"deep/{9 - number}.csv").write_bytes((folder / f"table{number}.csv").read_bytes())
    (moved / "broken.csv").write_text("a,b\n1\n")
    other = pickle.loads(pickle.dumps(prior_of(moved)))
    for seed, table in reversed(list(enumerate(drawn))):
        again = other.sample(SPEC, seed)
        assert torch.equal(again.X, table.X) and torch.equal(again.y, table.y)
    assert prior_of(moved).fingerprint() == prior.fingerprint()
    (moved / "deep/9.csv").unlink()
    assert prior_of(moved).fingerprint() != prior.fingerprint()


def test_rows_columns_and_tables_are_drawn_uniformly(folder, monkeypatch):
    """Tables by the square root of their rows. Values, which take most of the time of a draw, are others."""
    monkeypatch.setattr(
        draws, "prepare_columns", lambda frame, *_: np.random.default_rng(0).normal(size=frame.shape).astype("f4")
    )
    prior = prior_of(folder)
    spec = replace(SPEC, num_features=3)
    plans = [prior.sample(spec, seed).plan for seed in range(600)]

    paths = [plan.task.entry.path for plan in plans]
    weights = np.sqrt([150, 200, 250, 300])
    for number, share in enumerate(weights / weights.sum()):
        assert paths.count(f"table{number}.csv") / 600 == pytest.approx(share, abs=0.06)

    # 60 of the 150 rows of a table: chi-squared of the counts, with the correction for draws without replacement
    of_first = [plan for plan in plans if plan.task.entry.path == "table0.csv" and "gaps" not in plan.target]
    counts = np.bincount(np.concatenate([plan.rows for plan in of_first]), minlength=150)
    expected = len(of_first) * 60 / 150
    chi_squared = ((counts - expected) ** 2 / (expected * (1 - 60 / 150))).sum()
    assert abs(chi_squared - 149) < 4 * np.sqrt(2 * 149)

    of_label = [plan for plan in plans if plan.target.endswith(": label")]
    features = pd.Series(np.concatenate([plan.features for plan in of_label])).value_counts(normalize=True)
    assert len(features) == 7
    assert np.allclose(features, 1 / 7, atol=0.05)
    targets = pd.Series([plan.target.rpartition(": ")[2] for plan in plans]).value_counts(normalize=True)
    assert targets["label"] == pytest.approx(0.5, abs=0.08)
    assert len(targets) == 7


def test_only_long_enough_tables_are_drawn(folder):
    prior = prior_of(folder)
    assert [prior.eligible(rows, False) for rows in (150, 151, 300, 301)] == [(4, 4), (3, 4), (1, 4), (0, 4)]
    paths = {prior.sample(TableSpec(220, 100, 3, 3), seed).plan.task.entry.path for seed in range(20)}
    assert paths == {"table2.csv", "table3.csv"}
    with pytest.raises(PriorError, match="no table has 301 rows with a target; the longest one has 300"):
        prior.sample(TableSpec(301, 100, 3, 3), 0)
    (problem,) = too_many_rows("validation.rows", 100, prior.for_validation(), False)
    assert problem.startswith("validation.rows asks for real tables, but none is left for validation; raise prior.v")


def test_numbers_are_cut_at_quantiles():
    values = np.random.default_rng(0).exponential(size=1000)
    sizes = []
    for seed in range(50):
        labels, text = draw_classes(values, False, 5, np.random.default_rng(seed))
        levels = [float(level) for level in text.partition("quantiles ")[2].split(", ")[:-1]]
        assert labels.max() <= len(levels) <= 4
        if len(np.unique(labels)) == len(levels) + 1:  # none is rare
            ends = np.sort([values[labels == c].max() for c in range(len(levels) + 1)])
            assert np.allclose([(values <= end).mean() for end in ends], [*levels, 1], atol=0.006)
        sizes.append(len(levels) + 1)
    assert set(sizes) == {2, 3, 4, 5}
    few = np.repeat(np.arange(12.0), 10)
    labels, text = draw_classes(few, True, 5, np.random.default_rng(0))  # categories of numbers
    assert text.startswith("12 classes")
    assert np.bincount(labels).tolist() == [10, 10, 10, 10, 80]
    assert draw_classes(few % 9, False, 10, np.random.default_rng(0))[1] == "9 classes, 9 in this table"


@pytest.mark.parametrize(
    ("counts", "most", "expected"),
    [
        ([9, 8], 10, [9, 8]),
        ([5, 9, 7], 2, [9, 12]),
        ([9, 8, 7, 6, 5], 3, [9, 8, 18]),
        ([9, 8, 2, 2], 10, [9, 8, 4]),
        ([9, 8, 3], 10, [9, 11]),
        ([9, 3, 1], 10, [9, 4]),
        ([9, 3], 10, None),
        ([9], 10, None),
        ([1, 1, 1], 10, None),
    ],
)
def test_rare_classes_are_merged(counts, most, expected):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)) * 3, counts))
    if expected is None:
        with pytest.raises(Rejected, match="classes"):
            merge_rare(labels, most)
    else:
        merged = merge_rare(labels, most)
        assert np.bincount(merged).tolist() == expected
        assert all(len(np.unique(merged[labels == label])) == 1 for label in np.unique(labels))


def test_tables_for_validation_and_test_are_never_drawn_in_training(folder):
    for number in range(10, 22):
        build_frame(number, 80).to_csv(folder / f"more{number}.csv", index=False)
    training = prior_of(folder, validation_fraction=0.25, test_fraction=0.25)
    priors = (training, training.for_validation(), training.for_test())
    sides = [paths_of(prior) for prior in priors]
    assert set().union(*sides) == {path.name for path in folder.glob("*.csv")}
    assert sum(map(len, sides)) == 16

    bounds = {"training": (0.5, 1), "validation": (0, 0.25), "test": (0.25, 0.5)}  # of a number made of the content
    for prior, side in zip(priors, sides, strict=True):
        low, high = bounds[prior.side]
        places = [int(task.entry.content, 16) / 2**64 for task in prior.tasks]
        assert places
        assert low <= min(places) and max(places) < high
        for seed in range(15):
            table = prior.sample(SPEC, seed)
            path = table.plan.task.entry.path
            assert path in side
            assert prior.clusters(table) == [path] * 20


def test_a_copy_is_on_the_side_of_the_original(folder):
    for number in range(10, 22):
        build_frame(number, 80).to_csv(folder / f"more{number}.csv", index=False)
    training = prior_of(folder, validation_fraction=0.25, test_fraction=0.25)
    sides = [paths_of(prior) for prior in (training, training.for_validation(), training.for_test())]
    for path in sides[1] | sides[2]:
        pd.read_csv(folder / path).sample(frac=1, random_state=0).to_parquet(folder / f"{path}.parquet")

    training = prior_of(folder, validation_fraction=0.25, test_fraction=0.25)
    for prior, side in zip((training, training.for_validation(), training.for_test()), sides, strict=True):
        assert {path.removesuffix(".parquet") for path in paths_of(prior)} == side


def test_a_mixture_holds_out_what_its_real_tables_hold_out(folder):
    mix = build_prior("mix_scm", components={"dummy": {"weight": 1}, "tables": {"weight": 1, "folder": str(folder)}})
    real = real_tables(mix)
    sides = [prior.priors["tables"].side for prior in (mix, real.for_validation(), real.for_test())]
    assert sides == ["training", "validation", "test"]
    drawn = (mix.sample(SPEC, seed) for seed in range(99))
    table = next(table for table in drawn if table.source[0] == "tables")
    assert real.clusters(table) == [table.source[1]] * 20
    assert real.clusters(mix.priors["dummy"].sample(SPEC, 0)) is None
    assert real.fingerprint()
    assert real.eligible(100, False) == mix.priors["tables"].eligible(100, False)


def paths_of(prior) -> set[str]:
    return {task.entry.path for task in prior.tasks}


def test_tables_that_are_few_are_for_validation(folder):
    lowest = min(prior_of(folder).tasks, key=lambda task: task.place)
    half = lowest.place / 2**65 + 1e-9
    prior = prior_of(folder, validation_fraction=half, test_fraction=half)  # it alone, and it would be for the test
    assert paths_of(prior.for_validation()) == {lowest.entry.path}
    assert len(prior.tasks) == 3
    assert prior.for_test().tasks == []
    assert prior.for_test().eligible(60, False) == (0, 0)
    assert f"1 for validation: {lowest.entry.path}" in prior.describe()
    assert "none for the final test: raise prior.test_fraction, or add tables" in prior.describe()
    only = prior_of(folder, validation_fraction=0.0, test_fraction=2 * half)
    assert only.for_validation().tasks == []
    assert paths_of(only.for_test()) == {lowest.entry.path}
    assert not any("validation" in line for line in prior_of(folder).describe())


def test_families_stay_together(folder):
    for number in range(10, 40):
        build_frame(number, 60).to_csv(folder / f"more{number}.csv", index=False)
    listed = [f"more{number}.csv,label,study {number % 10}" for number in range(10, 40)]
    (folder / "tasks.csv").write_text("\n".join(["item,target,family", *listed, "table0.csv,label,"]))
    prior = prior_of(folder, validation_fraction=0.25, test_fraction=0.25)
    sides = [paths_of(side) for side in (prior, prior.for_validation(), prior.for_test())]
    for number in range(10):
        family = {f"more1{number}.csv", f"more2{number}.csv", f"more3{number}.csv"}
        assert sum(family <= side for side in sides) == 1

    alone = {task.entry.path: task.place for task in prior_of(folder).contents[1] if not task.family}
    assert alone.keys() == {f"table{number}.csv" for number in range(4)}
    assert len(set(alone.values())) == 4

    tables = (prior.sample(SPEC, seed) for seed in range(99))
    of_family = next(table for table in tables if table.plan.task.family)
    assert prior.clusters(of_family) == [of_family.plan.task.family] * 20

    before = prior.fingerprint()
    without_families = [line.rpartition(",")[0] for line in listed]
    (folder / "tasks.csv").write_text("\n".join(["item,target", *without_families]))
    assert prior_of(folder).fingerprint() != before


def test_a_changed_file_stops_the_draws(folder):
    prior = prior_of(folder)
    before = prior.sample(SPEC, 0)
    for path in folder.glob("*.csv"):
        os.utime(path, ns=(0, 0))  # another time, the same content
    assert same(pickle.loads(pickle.dumps(prior)).sample(SPEC, 0), before)
    for path in folder.glob("*.csv"):
        path.write_text(path.read_text().replace("yes", "YES"))
    with pytest.raises(
        PriorError, match=r"tables/table\d.csv has changed since it was indexed, .*: restore it, or `touch`"
    ):
        pickle.loads(pickle.dumps(prior)).sample(SPEC, 0)
    for path in folder.glob("*.csv"):
        path.unlink()
    with pytest.raises(PriorError, match=r"tables/table\d.csv cannot be read any more: .*No such file"):
        pickle.loads(pickle.dumps(prior)).sample(SPEC, 0)


def test_draws_from_files_in_another_form_are_the_same(folder, tmp_path):
    (tmp_path / "others").mkdir()
    for path in folder.glob("*.csv"):
        pd.read_csv(path).to_csv(tmp_path / "others" / path.name, index=False, sep="|", decimal=",")
    other = prior_of(tmp_path / "others", separator="bar", decimal="comma")
    for seed in range(3):
        assert same(prior_of(folder).sample(SPEC, seed), other.sample(SPEC, seed))
    paths = folder / "table0.csv", tmp_path / "others" / "table0.csv"
    usual = build_prior("one_table", file=str(paths[0]))
    single = build_prior("one_table", file=str(paths[1]), separator="bar", decimal="comma")
    assert same(usual.sample(SPEC, 0), single.sample(SPEC, 0))


def test_memory_for_tables_is_bounded(folder):
    entries = {task.entry.path: task.entry for task in prior_of(folder).tasks}
    size = {path: size_of(read_columns(folder, entry)) for path, entry in entries.items()}
    cache = TableCache(folder, size["table0.csv"] + size["table1.csv"])
    for path in ("table0.csv", "table1.csv", "table0.csv"):
        held = cache.columns(entries[path])
        assert cache.columns(entries[path]) is held
    assert list(cache.held) == ["table1.csv", "table0.csv"]
    cache.columns(entries["table2.csv"])
    assert "table1.csv" not in cache.held
    assert cache.bytes == sum(size[path] for path in cache.held) <= cache.most_bytes
    tiny = TableCache(folder, 10)
    assert len(tiny.columns(entries["table0.csv"])) == 8 and tiny.bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": ""}, "folder is not set"),
        ({"folder": "{empty}", "separator": "dot"}, "separator is 'dot'; it must be one of auto, comma, semicolon, "),
        ({"folder": "{empty}", "decimal": ";"}, "decimal is ';'; it must be one of point, comma"),
        ({"folder": "{empty}"}, "there are no .csv, .parquet, .arrow or .feather files in it"),
        ({"folder": "{broken}"}, r"no file in it can be used: a.csv \(line 2 has 1 values, but there are 2 columns\)"),
        ({"validation_fraction": 0.9999, "test_fraction": 0.0}, "no table is for training"),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "leave no tables for training"),
    ],
)
def test_problems_are_reported(options, message, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/a.csv").write_text("a,b\n1\n")
    if "folder" in options:
        path = options["folder"].format(empty=tmp_path / "empty", broken=tmp_path / "broken")
        options = options | {"folder": path}
    with pytest.raises(PriorError, match=f"prior tables: .*{message}"):
        build_prior("tables", **{"folder": str(folder), **options})


def test_the_folder_is_described(folder):
    (folder / "broken.csv").write_text("a,b\n1\n")
    build_frame(9, 30).assign(none=None).to_csv(folder / "none.csv", index=False)
    (folder / "tasks.csv").write_text("item,target\ntable0.csv,label\nnone.csv,label\n")
    assert prior_of(folder).describe() == [
        f"{folder}: 5 tables with 930 rows, from 6 files",
        "rows: table3.csv 300, table2.csv 250, table1.csv 200 and 2 more",
        "3 not in tasks.csv, so their target is a column called target, class, label or y, else the last one: "
        + ", ".join(f"table{task}.csv (label)" for task in order(folder)),
        "1 files left out: broken.csv (line 2 has 1 values, but there are 2 columns)",
        "1 columns left out: 'none' of none.csv (no value)",
    ]


def order(folder) -> list[str]:
    """Numbers of the unlisted tables in the order of their content."""
    return [task.entry.path[5] for task in prior_of(folder).tasks if task.is_guessed]


def test_the_largest_tables_are_those_of_files_that_are_long_enough(folder):
    wide = build_frame(9, 40)
    wide.assign(**{f"x{i}": wide["x"] * i for i in range(2, 6)}).to_csv(folder / "wide.csv", index=False)
    prior = prior_of(folder)
    assert prior.largest(40, False).features == 11
    assert prior.largest(41, False).features == 7  # of the other tables
    assert prior.largest(10**6, False) == (None, None, None)  # such a stage is refused
    drawn = [prior.sample(TableSpec(40, 20, 100, 10), seed) for seed in range(80)]
    assert max(table.X.shape[1] for table in drawn) == 11

    for path in folder.glob("*.csv"):  # without numbers, which are cut into any number of classes
        pd.read_csv(path)[["group", "flag", "label"]].to_csv(path, index=False)
    assert prior_of(folder).largest(40, False) == (None, 2, 3)
    assert prior_of(folder).largest(40, True).classes is None
