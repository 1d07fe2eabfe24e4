import numpy as np
import pytest
import torch

from priors import TableSpec, build_prior
from tabicl_train.lab.priors.needle import CROWD, DISTANCE, NOISE

SIZES = [(2, 4, 60, 20), (3, 4, 400, 64), (6, 10, 5000, 40)]  # features, needles, negatives, query rows


def draw(features: int, needles: int, negatives: int, queries: int, seed: int = 0):
    spec = TableSpec(needles + negatives + queries, needles + negatives, features, needles)
    return build_prior("needle", needles=needles).sample(spec, seed)


@pytest.mark.parametrize("size", SIZES)
def test_the_nearest_labeled_row_tells_the_class_of_a_query_and_is_a_needle(size):
    table = draw(*size)
    n, needles = table.train_size, size[1]
    nearest = torch.cdist(table.X[n:], table.X[:n]).argmin(1)
    assert (table.y[nearest] == table.y[n:]).all()
    assert len(set(nearest.tolist())) == needles == table.num_classes
    counts = sorted(np.bincount(table.y[:n]))
    assert counts == [1] * (needles - 1) + [size[2] + 1]  # all others share a class
    asked = np.bincount(table.y[n:])
    assert asked.max() - asked.min() <= 1  # the class of the negatives is as frequent as the others
    assert table.rejections.total() == 0  # rows that were permuted for the split would move needles among the queries


def test_where_the_rows_lie():
    """Before standardization: a uniform ball of negatives, needles outside of it, and queries around them."""
    prior = build_prior("needle")
    plan = prior.plan(TableSpec(20_000, 19_000, 3), (1,))
    columns, labels, _ = prior.execute(plan)
    radius = columns[:19_000].norm(dim=1).sort().values
    assert radius[-4:].numpy() == pytest.approx(DISTANCE)
    assert radius[-5] <= CROWD
    shares = [(radius <= CROWD * share ** (1 / 3)).double().mean() for share in (0.1, 0.5, 0.9)]
    assert shares == pytest.approx([0.1, 0.5, 0.9], abs=0.02)
    products = plan.directions @ plan.directions.T  # orthogonal or opposite
    np.testing.assert_allclose(products[products > -0.5], np.eye(4)[products > -0.5], atol=1e-12)
    queries = columns[19_000:].double().numpy() - DISTANCE * plan.directions[labels[19_000:]]
    assert queries.std() == pytest.approx(NOISE, rel=0.05)
    assert abs(queries.mean()) < 0.02


def test_there_are_fewer_needles_where_there_is_no_room_for_four():
    prior = build_prior("needle")
    for spec, needles in ((TableSpec(30, 20, 1), 2), (TableSpec(30, 27, 5, 3), 3), (TableSpec(13, 3, 5, 3), 3)):
        table = prior.sample(spec, 0)
        assert table.num_classes == len(table.y.unique()) == needles
