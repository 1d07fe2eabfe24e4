"""What describe and gallery say about tables with a numeric target."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from priors import TableSpec, build_prior
from priors.inspection import describe_tables, informative_columns, plot_graph, plot_table, save_gallery, statistics
from priors.random import rng_at
from priors.table import Table


def make_table(X: np.ndarray, y: np.ndarray, train_size: int) -> Table:
    return Table(torch.from_numpy(X.astype(np.float32)), torch.from_numpy(y.astype(np.float32)), train_size, 0)


def test_statistics_of_a_numeric_target():
    X = rng_at("statistics").standard_normal((400, 3))
    y = np.where(X[:, 1] > 0, 2.0, -0.5)
    y[X[:, 0] > 1.5] = 5.0
    found = statistics(make_table(X, y, 300))
    assert (found["rows"], found["labeled share"], found["features"]) == (400, 0.75, 3)
    assert found["distinct targets"] == 3
    assert found["lowest target"] == -0.5
    assert found["highest target"] == 5
    assert found["commonest target"] == np.unique(y, return_counts=True)[1].max() / 400
    assert found["skewness of target"] == pytest.approx((y**3).mean())
    assert found["kurtosis of target"] == pytest.approx((y**4).mean())
    assert 0.4 < found["skill of ridge regression"] < 0.8 < found["skill of extra trees"] <= 1
    noise = statistics(make_table(X, rng_at("noise").standard_normal(400), 300))
    assert 0 <= noise["skill of ridge regression"] < 0.1
    assert 0 <= noise["skill of extra trees"] < 0.1
    constant = np.append(rng_at("noise").standard_normal(300), np.zeros(100))  # among the query rows
    assert statistics(make_table(X, constant, 300))["skill of ridge regression"] == 0


def test_the_share_of_tables_that_can_be_learned():
    """A label that follows a feature is learned, and one of noise is not; a histogram counts both."""
    rng = rng_at("learnable")
    tables = []
    for labels in (lambda X: X[:, 0] > 0, lambda X: rng.random(len(X)) > 0.5, lambda X: rng.random(len(X)) > 0.5):
        X = rng.standard_normal((300, 3)).astype(np.float32)
        tables.append(Table(torch.from_numpy(X), torch.from_numpy(labels(X).astype(np.int64)), 200, 2))
    followed, *noise = (statistics(table)["ROC AUC out of bag"] for table in tables)
    assert followed > 0.97 and all(abs(value - 0.5) < 0.1 for value in noise)
    text = describe_tables(tables)
    lines = dict(re.findall(r"^  (\d\.\d\d) +([\d.]+)% ?#*$", text, re.MULTILINE))
    assert lines["0.95"] == "33.3"
    assert float(lines["0.50"]) + float(lines["0.55"]) == pytest.approx(66.7)


def test_the_informative_columns_are_those_that_a_number_depends_on():
    rng = rng_at("informative")
    X = rng.standard_normal((800, 5))
    y = X[:, 3] ** 2 + 0.3 * rng.standard_normal(800) + 0.5 * X[:, 1]
    assert informative_columns(X, y.astype(np.float32))[:2] == [3, 1]


@pytest.mark.parametrize(("layers", "columns"), [(5, 6), (10, 2)])
def test_labels_of_a_causal_graph_do_not_overlap(layers, columns):
    names = [[f"x{columns * layer + k}" for k in range(columns)] for layer in range(layers)]
    nodes = [
        SimpleNamespace(
            index=layer,
            columns=[SimpleNamespace(name=name) for name in of_layer],
            edges=lambda layer=layer: [(layer - 1, object())] if layer else [],
        )
        for layer, of_layer in enumerate(names)
    ]
    figure = Figure(figsize=(6.4, 4.4), dpi=80)
    ax = figure.subplot_mosaic([["scatter", "plan"]])["plan"]
    plot_graph(ax, nodes)
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) == layers
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_missing_cells_do_not_hide_a_column():
    X = rng_at("missing cells").standard_normal((100, 3))
    X[:, 0] = np.sign(X[:, 0])
    X[::5] = np.nan
    figure = Figure()
    plot_table(figure, "missing", make_table(X, np.nan_to_num(X[:, 1] + X[:, 2]), 50))
    assert "1 categorical, 2 numeric columns" in [ax.get_xlabel() for ax in figure.axes]
    assert np.isfinite(figure.axes[0].collections[0].get_offsets()).all()


def test_gallery_shows_numeric_targets_of_any_width(tmp_path):
    tables = [(f"width {m}", build_prior("dummy").sample(TableSpec(40, 20, m, 0), m)) for m in (1, 2, 5)]
    assert save_gallery(tables, tmp_path / "numbers.png") == [tmp_path / "numbers.png", tmp_path / "numbers.html"]
    assert (tmp_path / "numbers.png").stat().st_size > 10_000
    page = (tmp_path / "numbers.html").read_text()
    assert page.count("numeric target</pre>") == 3 and "histogram" in page
