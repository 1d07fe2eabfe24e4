import csv

import numpy as np
import pytest

from tabicl_train.callbacks.diagnostics import BATCHES, SCALING
from tabicl_train.errors import ConfigError
from tabicl_train.report.page import Run, multipliers
from tabicl_train.report.run_figures import draw_losses, draw_scaling, save_figures
from tabicl_train.run_dir.records import Records


@pytest.fixture
def run_dir(tmp_path):
    """Two stages of 80 logged steps: multipliers step + n, and losses that say stage and rows."""
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
    panels = [axes for axes in draw_scaling(run_dir).axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["column.0", "icl.0"]
    for axes in panels:
        (lines,) = axes.collections
        segments, steps = lines.get_segments(), lines.get_array()
        assert len(segments) > 100 and steps[0] == 1 and steps[-1] == 160
        for (start, end), step in zip(segments, steps, strict=True):
            assert start.tolist() == [20, step + 20] and end.tolist() == [60, step + 60]
        assert axes.get_ylim()[1] > 220 and axes.get_xlim()[0] < 20 and axes.get_xlim()[1] > 60


def test_losses_are_means_over_tables_by_rows(run_dir):
    with open(run_dir / "batches.csv") as file:
        rows = list(csv.DictReader(file))
    over_time, by_rows = draw_losses(run_dir, "rows").axes
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
    assert 5 < ends["long"][8] < 7.2 and 3 < ends["long"][6] < 5.2  # 2 to 4 more than rows / 100, by the classes


def test_losses_are_means_over_tables_by_classes(run_dir):
    over_time, by_classes = draw_losses(run_dir, "classes").axes
    assert [line.get_label() for line in over_time.get_lines()][:3] == ["2", "3", "4"]
    with open(run_dir / "batches.csv") as file:
        late = [row for row in csv.DictReader(file) if int(row["step"]) >= 140.25 and row["classes"] == "3"]
    expected = np.average([float(row["loss"]) for row in late], weights=[int(row["tables"]) for row in late])
    (long,) = [line for line in by_classes.get_lines() if line.get_label() == "long"]
    assert list(long.get_xdata()) == [2, 3, 4] and long.get_ydata()[1] == pytest.approx(expected)


def test_pictures_are_written_or_the_error_says_what_is_missing(run_dir):
    names = ("scaling", "loss_by_rows", "loss_by_classes")
    assert save_figures(run_dir) == [run_dir / "figures" / f"{name}.png" for name in names]
    assert all((run_dir / "figures" / f"{name}.png").stat().st_size > 10_000 for name in names)
    with pytest.raises(ConfigError, match="there is no"):
        save_figures(run_dir / "nowhere")


def test_a_run_that_begins_again_has_files_without_rows(tmp_path):
    for name in ("scaling.csv", "batches.csv"):
        Records(tmp_path).append_rows(name, {"step": 1})
        Records(tmp_path).rewind(name, 0)
    with pytest.raises(ConfigError, match=r"there is no row of scaling\.csv or batches\.csv"):
        save_figures(tmp_path)
    assert "There is no scaling.csv" in multipliers(Run("run", tmp_path, *[None] * 8))


def test_a_run_without_scalable_softmax_has_the_other_figures(run_dir):
    (run_dir / "scaling.csv").unlink()
    assert save_figures(run_dir) == [run_dir / "figures" / f"loss_by_{by}.png" for by in ("rows", "classes")]
