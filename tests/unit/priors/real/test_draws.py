"""Draws of labeled and query rows from the rows of one table, and how rows are held out."""

import numpy as np
import pandas as pd
import pytest
import torch
from table_files import build_frame

from priors import PriorError
from priors.finish import Rejected
from priors.real.draws import SourceRows, draw_rows, split_by_content
from priors.real.preprocessing import FeatureEncoder, Normalizer


def rows_of(kind: str, count: int = 120) -> SourceRows:
    """Rows with two classes, or with numbers."""
    frame = build_frame(0, count)
    X = frame[["x", "gaps", "group", "flag", "size"]]
    if kind == "numbers":
        return SourceRows(X, frame["price"].to_numpy(), 0)
    return SourceRows(X, np.unique(frame["label"], return_inverse=True)[1], 2)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_draw_is_the_table_as_an_estimator_sees_it(kind):
    rows, methods, shifts = rows_of(kind), set(), set()
    for seed in range(20):
        table = rows.draw(np.arange(20, 120), 50, 40, None, np.random.default_rng(seed))
        plan = table.plan
        drawn = np.concatenate([plan.labeled, plan.queries])
        assert len(set(drawn)) == 50
        assert drawn.min() >= 20
        assert table.train_size == len(plan.labeled) == 40
        encoder = FeatureEncoder().fit(rows.X.iloc[plan.labeled])
        encoded = encoder.transform(rows.X.iloc[drawn])
        X = Normalizer(plan.member.norm_method).fit(encoded[:40]).transform(encoded)
        assert sorted(plan.member.features) == list(range(5))
        assert np.array_equal(table.X, X[:, plan.member.features])
        y = rows.y[drawn]
        if kind == "classes":
            assert np.array_equal(table.y, (y + plan.member.shift) % 2)
            assert table.num_classes == 2
        else:
            assert np.allclose(table.y, (y - y[:40].mean()) / y[:40].std(), atol=1e-5)
            assert table.y.dtype == torch.float32 and table.num_classes == 0
        methods.add(plan.member.norm_method)
        shifts.add(plan.member.shift)
    assert methods == {"none", "power"}
    assert shifts == ({0, 1} if kind == "classes" else {0})


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_query_rows_change_nothing_about_labeled_ones(kind):
    rows, other = rows_of(kind), rows_of(kind)
    other.X = other.X.copy()
    other.X.loc[40:, "x"] = 1e4
    other.X.loc[40:, "group"] = "unseen"
    other.y = np.where(np.arange(120) < 40, rows.y, 0)
    tables = [
        each.make_table(np.arange(40), np.arange(40, 120), np.random.default_rng(seed))
        for seed in range(4)
        for each in (rows, other)
    ]
    for a, b in zip(tables[::2], tables[1::2], strict=True):
        assert torch.equal(a.X[:40], b.X[:40])
        assert torch.equal(a.y[:40], b.y[:40])
        assert not torch.equal(a.X, b.X)


def test_no_query_has_a_class_that_is_not_labeled():
    y = np.repeat(np.arange(5), [60, 30, 6, 2, 1])
    queried = set()
    for seed in range(300):
        train_size = (14, 3)[seed % 2]  # also with fewer labeled rows than classes
        labeled, queries = draw_rows(y, 5, 20, train_size, np.random.default_rng(seed))
        assert len(labeled) == max(train_size, 5)
        assert len({*labeled, *queries}) == len(labeled) + len(queries) == 20
        assert set(y[labeled]) == set(range(5))
        queried |= set(y[queries])
    assert queried == {0, 1, 2, 3}  # the only row of class 4 is always labeled


def test_rows_are_drawn_uniformly_and_a_short_table_gives_all():
    y = np.random.default_rng(0).normal(size=40)
    counts = np.zeros((2, 40))
    for seed in range(2000):
        for side, drawn in enumerate(draw_rows(y, 0, 20, 15, np.random.default_rng(seed))):
            counts[side, drawn] += 1
    assert np.allclose(counts / 2000, [[15 / 40], [5 / 40]], atol=0.05)  # more than four standard errors
    labeled, queries = draw_rows(y, 0, 1000, 800, np.random.default_rng(0))
    assert sorted([*labeled, *queries]) == list(range(40))
    assert len(labeled) == 32
    with pytest.raises(PriorError, match="10 rows of 10 classes are too few: none is left for a query"):
        draw_rows(np.arange(10), 10, 100, 80, np.random.default_rng(0))


def test_constant_labeled_rows_are_rejected():
    rows = rows_of("numbers")
    rows.y = np.where(np.arange(120) < 60, 1.0, rows.y)
    with pytest.raises(Rejected, match="target"):
        rows.make_table(np.arange(60), np.arange(60, 120), np.random.default_rng(0))
    rows.y = np.append(np.arange(119.0), 1e300)
    with pytest.raises(Rejected, match="target"):
        rows.make_table(np.arange(60), np.arange(60, 120), np.random.default_rng(0))


def test_copies_of_a_row_stay_together_and_rows_stay_where_they_were():
    frame = build_frame(1, 400)
    twice = pd.concat([frame, frame.sample(frac=0.5, random_state=0)]).sample(frac=1, random_state=1)
    more = pd.concat([frame, build_frame(2, 100)], ignore_index=True)

    def sides(table: pd.DataFrame, *shares: float) -> list[set[tuple]]:
        rows = SourceRows(table.drop(columns="price"), table["price"].to_numpy(), 0)
        values = [tuple(row) for row in table.fillna(-1).to_numpy()]
        split = split_by_content(rows, *shares)
        assert sorted(np.concatenate(split)) == list(range(len(table)))
        return [{values[number] for number in side} for side in split]

    once = sides(frame, 0.2, 0.1)
    assert sides(twice, 0.2, 0.1) == once
    assert not once[0] & once[1] and not (once[0] | once[1]) & once[2]
    assert [len(side) / 400 for side in once] == pytest.approx([0.7, 0.2, 0.1], abs=0.07)
    assert all(small <= large for small, large in zip(once, sides(more, 0.2, 0.1), strict=True))
    assert sides(frame, 0.2, 0.0)[2] == set()


def test_training_has_rows_of_all_classes():
    X = pd.DataFrame({"x": np.arange(300.0)})
    y = np.append(np.repeat(np.arange(3), 90), np.arange(3, 33))  # thirty classes of one row
    training, validation, test = split_by_content(SourceRows(X, y, 33), 0.3, 0.3)
    assert set(training) >= set(range(270, 300))
    assert len(validation) > 50 < len(test)


@pytest.mark.parametrize(
    ("rows", "shares", "message"),
    [
        (
            SourceRows(pd.DataFrame({"x": np.arange(40.0)}), np.zeros(40, int), 1),
            (0.1, 0.1),
            r"a single class \(red\); two ",
        ),
        (rows_of("numbers", 40), (0.5, 0.49), "rows are for training, where at least 10 are needed: use more rows or"),
        (rows_of("numbers", 40), (1e-6, 0.2), "0 of the 40 rows are for validation, where at least 2 are needed"),
        (rows_of("classes", 40), (0.2, 1e-6), "0 of the 40 rows are for the final test, where at least 2 are needed"),
    ],
)
def test_sides_that_cannot_be_used_are_refused(rows, shares, message):
    with pytest.raises(ValueError, match=message):
        split_by_content(rows, *shares, names=["red"])
