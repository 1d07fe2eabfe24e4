"""Column converters: types, values, and what flows on."""

import numpy as np
import pytest
from graph_draws import draw_points, draw_scalars
from scipy.special import softmax

from priors.graph.converters import Categorical, Numeric, convert_numeric
from priors.graph.functions import Linear, Points, distinct_rows
from priors.graph.scalars import Weights
from priors.random import rng_at


@pytest.mark.parametrize("warp_flow", [True, False])
def test_warps_are_kumaraswamy_s_and_flow_on_only_if_warp_flow_is_set(warp_flow: bool):
    x = draw_points(4, 50)
    x[3] = 1.0
    converters = [Numeric("warp", 0.5, 2.0, warp_flow), Numeric("identity")]
    converters += [Numeric("warp", 3.0, 0.4, warp_flow), Numeric("warp", 2.0, 2.0, warp_flow)]
    z = x.astype(np.float64)
    u = (z - z.min(1, keepdims=True)) / np.maximum(np.ptp(z, axis=1, keepdims=True), 1e-30)
    a, b = np.array([[0.5], [1.0], [3.0], [2.0]]), np.array([[2.0], [1.0], [0.4], [2.0]])
    expected = 1 - (1 - u**a) ** b
    expected[1] = z[1]
    column, flow = convert_numeric(x.copy(), converters)
    np.testing.assert_allclose(column, expected, atol=1e-4)
    assert not column[3].any(), "a constant"
    assert np.array_equal(flow, column if warp_flow else x)


@pytest.mark.parametrize("p", [0.5, 2.0, 4.0])
def test_neighbor_categories_are_the_nearest_of_random_rows(p: float):
    x = draw_points(3, 200)
    rows = distinct_rows(200, 7, rng_at("n"))
    centers = x[:, rows]
    distance = (np.abs(x.astype(np.float64)[:, None] - centers[:, :, None]) ** p).sum(0)
    expected = distance.argmin(0)  # but for rows about as near to two centers
    function = Linear.draw(draw_scalars(0), 3, 3, 200)
    for what in ("id", "disc", "func", "int"):
        index, flow = Categorical(f"neighbor_{what}", 7, 3, p=p, function=function)(x.copy(), rng_at("n"))
        assert index.dtype == np.int64
        assert (index == expected).mean() > 0.95
        assert index[rows].tolist() == list(range(7))
        if what == "id":
            assert np.array_equal(flow, x)
        elif what == "disc":
            assert np.array_equal(flow, centers[:, index])
        elif what == "func":
            rng = rng_at("n")
            distinct_rows(200, 7, rng)
            np.testing.assert_allclose(flow, function(centers[:, index], rng), rtol=1e-5)
        else:
            assert np.array_equal(flow, np.broadcast_to(index, (3, 200)))
    index, flow = Categorical("neighbor_func", 7, 3, p=p, function=function)(x.copy(), rng_at("n"), flows=False)
    assert (index == expected).mean() > 0.95 and flow is None


def test_softmax_categories_have_the_frequencies_of_the_softmax():
    # 20,000 rows that take four values: in each group the frequencies are those of one softmax.
    values = np.array([[0.0, 1.0, 0.0, 2.0], [1.0, 0.0, 0.0, -1.0], [0.0, 0.0, 1.0, 0.5]], np.float32)
    group = np.arange(20000) % 4
    x = np.ascontiguousarray(values[:, group])
    converter = Categorical("softmax_id", 3, 3, factor=0.8, shares=Weights(3, np.array([3.0]), np.array([0.5])))
    index, flow = converter(x.copy(), rng_at("s"))
    assert np.array_equal(flow, x) and index.dtype == np.int64
    shares = converter.shares.compute(rng_at("s"))[0].astype(np.float64)
    z = x.astype(np.float64)
    z = (z - z.mean(1, keepdims=True)) / (z.std(1, keepdims=True) + 1e-4)
    logits = 0.8 * z + np.log(shares + 1e-4)[:, None]
    for g in range(4):
        frequencies = np.bincount(index[group == g], minlength=3) / 5000
        assert frequencies == pytest.approx(softmax(logits[:, g]), abs=0.03)


def test_what_flows_on_from_softmax_categories():
    x, shares = draw_points(4, 300), Weights(4, np.array([0.1]), np.array([0.1]))
    index, flow = Categorical("softmax_int", 4, 4, shares=shares)(x, rng_at("s"))
    assert np.array_equal(flow, np.broadcast_to(index, (4, 300)))
    assert len(np.unique(index)) == 4
    embedding = Points("normal", 4, Linear.draw(draw_scalars(1), 4, 4, 4))
    index, flow = Categorical("softmax_disc", 4, 4, shares=shares, embedding=embedding)(x, rng_at("s"))
    assert flow.shape == (4, 300)
    pairs = np.unique(np.concatenate([index[None], flow]), axis=1).T
    assert len(pairs) == 4, "one row of the table of embeddings a category"
    assert len(np.unique(pairs[:, 1:], axis=0)) == 4
