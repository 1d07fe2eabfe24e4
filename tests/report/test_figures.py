"""Figures of the report whose lines are known, and what the page shows of runs that lack some of them."""

import csv

import numpy as np
import pandas as pd
import pytest
from invented_measures import attention_measures

from tabicl_train.callbacks.diagnostics import BATCHES, SCALING
from tabicl_train.report.attention_figure import draw_attention, draw_gates
from tabicl_train.report.loss_groups_figure import draw_loss_groups
from tabicl_train.report.multipliers_figure import draw_multipliers
from tabicl_train.report.page import render, write_report
from tabicl_train.report.read_run import read_run
from tabicl_train.run_dir.records import Records

ALT_TEXTS = {
    "scaling": "multipliers of the scalable softmax",
    "gates": "gates of the scalable softmax",
    "rows": "loss by the rows of a table",
    "classes": "loss by the classes of a table",
}


@pytest.fixture
def run_dir(tmp_path):
    """Two stages of 80 logged steps: multipliers are step + n, and losses depend on stage, rows and classes."""
    generator = np.random.default_rng(0)
    batches, scaling = [], []
    for step in range(1, 161):
        stage = "short" if step <= 80 else "long"
        for rows in (100, 120) if step <= 80 else (100, 300):
            classes = 2 + step % 3
            shape = (rows, rows // 2, 4, classes, int(generator.integers(1, 5)))
            batches.append((step, stage, *shape, rows / 100 + classes + step / 1000, 6.0))
        for layer in ("column.0", "icl.0"):
            scaling.append((step, stage, layer, 20, 60, step + 20.0, step + 60.0, 1.0, 0.0))
    for name, columns, rows in (("batches", BATCHES, batches), ("scaling", SCALING, scaling)):
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            csv.writer(file).writerows([columns, *rows])
    return tmp_path


def test_multipliers_are_lines_from_the_smallest_to_the_largest_n(run_dir):
    panels = [axes for axes in draw_multipliers(pd.read_csv(run_dir / "scaling.csv")).axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["column.0", "icl.0"]
    for axes in panels:
        lines, points = axes.collections
        assert len(points.get_offsets()) == 2 * len(lines.get_segments())
        segments, steps = lines.get_segments(), lines.get_array()
        assert len(segments) > 100 and steps[0] == 1 and steps[-1] == 160
        for (start, end), step in zip(segments, steps, strict=True):
            assert start.tolist() == [20, step + 20] and end.tolist() == [60, step + 60]
        assert axes.get_ylim()[1] > 220 and axes.get_xlim()[0] < 20 and axes.get_xlim()[1] > 60


def test_attention_is_a_line_per_layer_and_a_band_over_heads():
    grid = draw_attention(attention_measures()).axes
    assert len(grid) == 15 and len(draw_attention(attention_measures(gate=False)).axes) == 12
    assert [axes.get_title() for axes in grid[:3]] == [
        "inducing points of the columns", "in context: labeled rows", "in context: query rows",
    ]  # fmt: skip
    for axes, layers in zip(grid[:3], (1, 2, 3), strict=True):
        lines = axes.get_lines()
        assert len(lines) == len(axes.collections) == layers
        for layer, (line, band) in enumerate(zip(lines, axes.collections, strict=True)):
            mean = 0.1 * (layer + 1) + 0.02  # over two heads and two tables
            assert line.get_xydata().tolist() == [[100, pytest.approx(mean)], [1000, pytest.approx(mean)]]
            low, high = band.get_paths()[0].get_extents().get_points()[:, 1]
            assert (low, high) == (pytest.approx(mean - 0.01), pytest.approx(mean + 0.01))  # means over tables
    labeled, queries = ([line.get_color() for line in axes.get_lines()] for axes in grid[1:3])
    assert [*labeled, queries[-1]] == queries and len(set(queries)) == 3  # a layer has one color
    assert [line.get_ydata().tolist() for line in grid[9].get_lines()] == [[2, 3]]


def test_gates_are_drawn_where_a_layer_has_one():
    rows = [(step, "a", layer, 2, 9, 1.0, 1.0, step / 10, 0.5) for step in (1, 2) for layer in ("column.0", "icl.0")]
    scaling = pd.DataFrame(rows, columns=SCALING)
    means, deviations = draw_gates(scaling).axes
    assert [line.get_xydata().tolist() for line in means.get_lines()] == [[[1, 0.1], [2, 0.2]]] * 2
    assert [line.get_ydata().tolist() for line in deviations.get_lines()] == [[0.5, 0.5]] * 2
    assert draw_gates(scaling.assign(gate_mean=None)) is None
    assert len(draw_gates(scaling.assign(gate_mean=[0.1, None, 0.2, None])).axes[0].get_lines()) == 1


def test_losses_are_means_over_tables_by_rows(run_dir):
    with open(run_dir / "batches.csv") as file:
        rows = list(csv.DictReader(file))
    over_time, by_rows = draw_loss_groups(pd.read_csv(run_dir / "batches.csv"), "rows").axes
    lines = {line.get_label(): line for line in over_time.get_lines() if "..." not in line.get_label()}
    assert {"64..127", "256..511"} <= set(lines)
    first = [row for row in rows if int(row["step"]) <= 4]  # a fortieth of the run
    tables = [int(row["tables"]) for row in first]
    expected = np.average([float(row["loss"]) for row in first], weights=tables)
    assert lines["64..127"].get_ydata()[0] == pytest.approx(expected)
    assert min(lines["256..511"].get_xdata()) > 79
    ends = {
        line.get_label(): dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in by_rows.get_lines()
    }
    assert list(ends) == ["short", "long"]
    assert list(ends["short"]) == [6] and list(ends["long"]) == [6, 8]
    assert [label.get_text() for label in by_rows.get_xticklabels()] == ["64..127", "256..511"]
    assert 5 < ends["long"][8] < 7.2 and 3 < ends["long"][6] < 5.2  # rows / 100, and 2 to 4 more for the classes


def test_losses_are_means_over_tables_by_classes(run_dir):
    over_time, by_classes = draw_loss_groups(pd.read_csv(run_dir / "batches.csv"), "classes").axes
    assert [line.get_label() for line in over_time.get_lines()][:3] == ["2", "3", "4"]
    with open(run_dir / "batches.csv") as file:
        late = [row for row in csv.DictReader(file) if int(row["step"]) >= 140.25 and row["classes"] == "3"]
    expected = np.average([float(row["loss"]) for row in late], weights=[int(row["tables"]) for row in late])
    (long,) = [line for line in by_classes.get_lines() if line.get_label() == "long"]
    assert list(long.get_xdata()) == [2, 3, 4] and long.get_ydata()[1] == pytest.approx(expected)


def test_the_page_has_the_figures_of_the_files_that_there_are(run_dir):
    page = render([read_run(run_dir, "run")])
    assert all(f'alt="{alt}' in page for alt in ALT_TEXTS.values()) and "There is no scaling.csv" not in page
    pictures = [part.split('"')[0] for part in page.split('src="data:image/png;base64,')[1:]]
    assert len(pictures) == 4 and all(len(picture) > 13_000 for picture in pictures)  # 10 kB
    (run_dir / "scaling.csv").unlink()  # as in a run without scalable softmax
    page = render([read_run(run_dir, "run")])
    assert ALT_TEXTS["scaling"] not in page and "There is no scaling.csv" in page
    assert ALT_TEXTS["rows"] in page and ALT_TEXTS["classes"] in page


def test_a_run_that_starts_over_has_files_without_rows(tmp_path):
    (tmp_path / "config.yaml").write_text("name: run")
    for name in ("scaling.csv", "batches.csv"):
        Records(tmp_path).append_rows(name, {"step": 1})
        Records(tmp_path).rewind(name, 0)
    write_report([tmp_path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "There is no scaling.csv" in page and "There is no batches.csv" in page and "<img" not in page
