"""The page of a sweep and its figures: what they show of sweeps with known results, and in every state of a sweep."""

import itertools
import math
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from html_page import Page
from invented_sweeps import begin, end, grid, job, plan, start, write_run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tabicl_train.sweep.axes import MetricAxis, ParameterAxis, metric_axis, parameter_axes, wrapped
from tabicl_train.sweep.figures import draw_learning_curves, draw_parallel_coordinates, draw_parameters
from tabicl_train.sweep.page import write_page
from tabicl_train.sweep.ranking import rank
from tabicl_train.sweep.results import Sweep, read_sweep

LR, WIDTH = "curriculum.stages.one.learning_rate", "model.embed_dim"
RATES, WIDTHS = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2], [64, 128, 256, 512]
SECTIONS = ["overview", "ranking", "parameters", "learning-curves", "jobs-without-a-result"]


def quality(**params) -> float:
    """The best rate falls by half a decade as the width doubles."""
    doublings = math.log2(params[WIDTH] / 64)
    return 0.6 - 0.03 * doublings + 0.04 * (math.log10(params[LR]) + 2.0 + doublings / 2) ** 2


@pytest.fixture(scope="module")
def sixty(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps") / "sixty"
    grid(folder, {LR: RATES, WIDTH: WIDTHS}, 3, quality, "synthetic/loss", name="width & rate")
    return folder


@pytest.fixture
def mixed(tmp_path) -> Path:
    """Six jobs: two finished, and one each that failed, was pruned, runs, or is planned."""
    begin(tmp_path, "real/roc_auc", name="mixed")
    for i, name in enumerate(["good", "poor", "failed", "pruned", "running", "planned"]):
        plan(tmp_path, name, {"optimizer": ["muon", "adamw"][i % 2], WIDTH: 64 * 2 ** (i // 2), "mix": f"<{i}> & more"})
        if name == "planned":
            continue
        start(tmp_path, name)
        steps = range(10, 60 if name in ("good", "poor") else 40, 10)
        write_run(tmp_path / name, {s: 0.9 - 0.1 * i - 1 / s for s in steps}, "real/roc_auc", "running")
        if name != "running":
            end(tmp_path, name, name if name in ("failed", "pruned") else "finished", reason=f"of <{name}>")
    return tmp_path


def page_of(folder: Path) -> Page:
    """Its page; a warning, such as one of a figure without enough space, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_page(read_sweep(folder), folder / "page.html")
    return Page(folder / "page.html")


# ---- the page


def test_a_page_of_sixty_jobs(sixty):
    page = page_of(sixty)
    assert page.ids == SECTIONS and len(page.pictures) == 3
    assert page.links == [f"#{name}" for name in SECTIONS]
    assert "60 jobs: 60 finished. Metric: synthetic/loss" in page.text and "width & rate" in page.text
    varied = page.table("parameter", "values")
    assert varied[LR]["values"] == "0.0003, 0.001, 0.003, 0.01, 0.03" and varied["seed"]["values"] == "0, 1, 2"
    best = rank(read_sweep(sixty))[0]
    first = page.table("rank", "learning_rate", "embed_dim")["1"]
    assert first["synthetic/loss"] == f"{best.mean:.4f}" and float(first["learning_rate"]) == best.params[LR]
    assert first["95% interval"] == "[{:.4f}, {:.4f}]".format(*best.interval)
    assert len(page.table("job", "status", "minutes")) == 60
    assert "every job that has started has finished" in page.text


def test_the_page_of_a_sweep_that_runs(mixed):
    page = page_of(mixed)
    assert page.ids == SECTIONS and len(page.pictures) == 3
    assert {row["optimizer"] for row in page.table("rank", "optimizer").values()} == {"muon", "adamw"}
    others = page.table("job", "reason")
    assert [others[name]["reason"] for name in ("failed", "pruned")] == ["of <failed>", "of <pruned>"]
    assert set(others) == {"failed", "pruned", "running"} or set(others) == {"failed", "pruned", "killed"}
    assert f"run_dir={mixed}/good" in page.text and "tabicl-export checkpoint=" in page.text
    assert set(page.table("job", "minutes")) == {"good", "poor", "failed", "pruned", "running", "planned"}


def test_values_that_stand_for_several_settings_are_explained(tmp_path):
    space = {"mix": {"one": ["prior=dummy"], "two": ["prior=mix_scm", "x=1"]}, "lr": [1, 2], "y": {"low": 1, "high": 2}}
    begin(tmp_path, space=space)
    plan(tmp_path, "a", {"mix": "one", "lr": 1, "y": 1.5})
    settings = page_of(tmp_path).table("value", "settings")
    assert settings == {"mix=one": {"settings": "prior=dummy"}, "mix=two": {"settings": "prior=mix_scm x=1"}}


def test_pages_without_results(tmp_path):
    begin(tmp_path)
    assert page_of(tmp_path).pictures == []
    plan(tmp_path, "a", {"x": 1})
    plan(tmp_path, "b", {"x": 2})
    page = page_of(tmp_path)
    assert page.pictures == [] and "No job has finished with a result yet." in page.text
    start(tmp_path, "a")
    write_run(tmp_path / "a", {10: math.nan})
    end(tmp_path, "a", "failed")
    assert page_of(tmp_path).pictures == []
    write_run(tmp_path / "b", {10: 1.0, 20: math.nan})
    start(tmp_path, "b")
    assert len(page_of(tmp_path).pictures) == 1  # the learning curve


@pytest.mark.parametrize("params, pictures", [([{}], 1), ([{}] * 3, 1), ([{"x": 1}, {"x": 2}], 2), ([{"x": 1}], 1)])
def test_pages_with_one_parameter_or_none(params, pictures, tmp_path):
    begin(tmp_path)
    for i, point in enumerate(params):
        job(tmp_path, f"{i}", point, 1.0 + i, seed=i)
    page = page_of(tmp_path)
    assert len(page.pictures) == pictures and ("No parameter was varied" in page.text) == (pictures == 1)


def test_equal_results_and_diverged_ones(tmp_path):
    begin(tmp_path)
    for i, value in enumerate([1.0, 1.0, math.nan, 1e9, math.inf, 1.0]):
        job(tmp_path, f"{i}", {"x": i % 3, "y": [0.1, 1e9][i // 3], "z": None if i else "a $\\frac$ of it"}, value)
    assert len(page_of(tmp_path).pictures) == 3


def test_a_full_disk_keeps_the_old_page(mixed, monkeypatch, capsys):
    page_of(mixed)
    old = (mixed / "page.html").read_text()

    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tabicl_train.run_dir.records.write_atomically", full)
    write_page(read_sweep(mixed), mixed / "page.html")
    assert (mixed / "page.html").read_text() == old and "page.html cannot be written" in capsys.readouterr().err


# ---- axes


def axis_of(tmp_path, *values) -> ParameterAxis:
    begin(tmp_path)
    for i, value in enumerate(values):
        plan(tmp_path, f"{i}", {"x": value})
    (axis,) = parameter_axes(read_sweep(tmp_path))
    return axis


@pytest.mark.parametrize(
    "values, scale",
    [
        ([1e-3, 1e-2], "log"), ([256, 64, 128], "log"), ([0.9, 0.95, 0.99], "linear"), ([0, 1, 100], "linear"),
        ([1, 2, 3], "linear"), ([0.8 + i / 100 for i in range(20)], "linear"), (["a", "b"], "names"),
        ([True, False], "names"), ([1, "auto"], "names"),
        (["48", "24", "32"], "linear"), (["1e-3", "2e-3", "1e-2"], "log"),
        ([None, 1.0], "names"), ([[1], [2]], "names"),
    ],
)  # fmt: skip
def test_scales(values, scale, tmp_path):
    axis = axis_of(tmp_path, *values, values[0])
    assert axis.scale == scale
    assert axis.values == (sorted(values, key=float) if axis.is_numeric else values)
    positions = [axis.position(value) for value in axis.values]
    assert positions == sorted(positions)
    if scale == "log":
        assert positions == pytest.approx(sorted(math.log10(float(value)) for value in values))


def test_a_parameter_with_one_value_was_not_varied(tmp_path):
    begin(tmp_path)
    plan(tmp_path, "a", {"x": 1, "y": 2})
    plan(tmp_path, "b", {"x": 1, "y": 3})
    assert [axis.key for axis in parameter_axes(read_sweep(tmp_path))] == ["y"]


@pytest.mark.parametrize("values", [np.geomspace(1e-4, 0.03, 40), np.linspace(0.8, 0.98, 40), [1, 2, 63, 64]])
def test_labels_keep_their_distance(values, tmp_path):
    axis = axis_of(tmp_path, *map(float, values))
    ticks = list(axis.ticks(gap=0.1))
    low, high = axis.ends
    assert len(ticks) >= 2 and low <= min(ticks) and max(ticks) <= high
    assert min(np.diff(ticks)) >= 0.1 * (high - low)


def test_an_outlier_does_not_flatten_the_axis_of_the_metric(sixty):
    sweep = read_sweep(sixty)
    axis = metric_axis(sweep, [0.5, 0.6, 0.7, 50.0, math.nan])
    assert (axis.low, axis.high) == (0.5, pytest.approx(0.5 + 6 * 0.15))
    assert axis.share(0.5) == 1 and axis.share(50.0) == 0 and axis.share(0.725) == pytest.approx(0.75)
    sweep.metric = "real/roc_auc"
    axis = metric_axis(sweep, [0.9, 0.8, 0.85])
    assert (axis.low, axis.high) == (0.8, 0.9) and axis.share(0.9) == 1 and axis.share(0.8) == 0
    assert sum(axis.color(0.9)[:3]) < sum(axis.color(0.8)[:3])  # darker is better


def test_names_are_wrapped_at_underscores_and_dots():
    assert wrapped("cautious_weight_decay", 15) == "cautious_\nweight_decay" and wrapped("lr", 15) == "lr"


# ---- figures


def lines_of(axes, marker: str = "None") -> list:
    return [line for line in axes.lines if line.get_marker() == marker and line.get_linestyle() != "None"]


def test_parallel_coordinates_have_a_line_per_point(sixty):
    sweep = read_sweep(sixty)
    figure = draw_parallel_coordinates(sweep)
    lines = [line for line in lines_of(figure.axes[0]) if len(line.get_xdata()) == 3]
    assert len(lines) == 20
    widest = max(lines, key=lambda line: line.get_linewidth())
    best = rank(sweep)[0]
    expected = [RATES.index(best.params[LR]) / 4, WIDTHS.index(best.params[WIDTH]) / 3, 1]
    assert widest.get_ydata() == pytest.approx(expected, abs=0.05)  # the rates are nearly, and values are spread
    assert len({tuple(line.get_ydata()[:2]) for line in lines}) == 20


def test_the_best_rate_of_each_width_is_ringed(sixty):
    figure = draw_parameters(read_sweep(sixty))
    axes = figure.axes[0]
    rings = [line for line in axes.lines if line.get_fillstyle() == "none"]
    best = [min(RATES, key=lambda rate: quality(**{LR: rate, WIDTH: width})) for width in WIDTHS]
    assert best == [1e-2, 3e-3, 1e-3, 3e-4]
    assert [10 ** float(ring.get_xdata()[0]) for ring in rings] == pytest.approx(best)
    for line, width in zip(lines_of(axes), WIDTHS, strict=True):
        assert line.get_ydata() == pytest.approx([quality(**{LR: rate, WIDTH: width}) for rate in RATES], abs=0.007)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [str(width) for width in WIDTHS]


def test_the_metric_against_one_parameter_is_the_mean_over_jobs(tmp_path):
    begin(tmp_path)
    for i, (x, y, z) in enumerate(itertools.product([1, 2], ["a", "b"], ["c", "d"])):
        job(tmp_path, f"{i}", {"x": x, "y": y, "z": z}, 1.0 + i)
    panels = draw_parameters(read_sweep(tmp_path)).axes
    (line,) = lines_of(panels[0])
    assert line.get_ydata() == pytest.approx([2.5, 6.5])
    heights = [[segment[0, 1] for segment in panel.collections[0].get_segments()] for panel in panels[1:3]]
    assert heights == [pytest.approx([3.5, 5.5]), pytest.approx([4.0, 5.0])]
    dots = [line for line in panels[0].lines if line.get_fillstyle() == "full" and line.get_marker() == "o"]
    assert sorted(np.concatenate([line.get_ydata() for line in dots])) == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8])


def test_values_beyond_the_edge_and_failures_are_marked(tmp_path):
    begin(tmp_path)
    for x, value in enumerate([1.0, 1.1, 1.2, 99.0, math.nan]):
        job(tmp_path, f"{x}", {"x": x}, value)
    job(tmp_path, "failed", {"x": 5}, 1.0, status="failed")
    (axes,) = draw_parameters(read_sweep(tmp_path)).axes
    marks = {line.get_marker(): list(line.get_xdata()) for line in axes.lines if len(line.get_xdata())}
    assert marks["^"] == [3] and marks["x"] == [4, 5]
    assert axes.get_ylim()[1] < 2


def test_learning_curves_show_every_job(mixed):
    (axes,) = draw_learning_curves(read_sweep(mixed)).axes
    curves = [line for line in axes.lines if len(line.get_xdata()) > 1]
    assert sorted(len(line.get_xdata()) for line in curves) == [3, 3, 3, 5, 5]
    steps, values = next(line.get_data() for line in curves if line.get_ydata()[-1] == pytest.approx(0.88))
    assert list(steps) == [10, 20, 30, 40, 50] and values == pytest.approx(0.9 - 1 / steps)
    ends = {line.get_marker(): line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1}
    assert ends == {"x": 30, "s": 30}


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Texts of a figure that cover each other."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = []
    for axes in figure.axes:
        legend = axes.get_legend()
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())  # ticks beyond are not drawn
            labels = [label for tick in axis.get_major_ticks() for label in (tick.label1, tick.label2)
                      if low <= tick.get_loc() <= high]  # fmt: skip
            texts += [*labels, axis.label]
        texts += axes.texts
        texts += [*legend.get_texts(), legend.get_title()] if legend else []
    texts = [text for text in texts if text.get_visible() and text.get_text() and text.get_rotation() in (0, 90)]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer()).shrunk(0.9, 0.9)) for text in texts]
    return [(a, b) for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.overlaps(y)]


def search(folder: Path) -> Sweep:
    """Random values of six parameters with long names."""
    begin(folder, "real/accuracy", method="random")
    generator = np.random.default_rng(0)
    names = ["mlp_scm only", "half mlp_scm, half tree_scm", "a mixture with a long description of all its parts"]
    for i in range(60):
        params = {
            "curriculum.stages.stage1.learning_rate": float(10 ** generator.uniform(-4, -1.5)),
            "optimizer.momentum": float(generator.uniform(0.8, 0.99)),
            "optimizer.cautious_weight_decay": bool(generator.integers(2)),
            "model.icl_num_blocks": int(generator.integers(1, 13)),
            "mixture": names[generator.integers(3)],
            "curriculum.stages.stage1.tables": int(generator.integers(4, 2000)),
        }
        job(folder, f"{i}", params, float(generator.uniform(0.5, 0.9)), metric="real/accuracy")
    return read_sweep(folder)


def test_labels_do_not_overlap(sixty, mixed, tmp_path):
    sweeps = [read_sweep(sixty), read_sweep(mixed), search(tmp_path / "search")]
    for sweep, draw in itertools.product(sweeps, (draw_parallel_coordinates, draw_parameters, draw_learning_curves)):
        assert overlaps(draw(sweep)) == []


def test_a_moved_sweep_folder_still_has_its_page(sixty, tmp_path):
    moved = shutil.copytree(sixty, tmp_path / "moved")
    assert f"run_dir={moved}/" in page_of(moved).text


def test_group_colors_run_from_dark_to_light():
    axis = MetricAxis(0, 1, lower_is_better=True)
    brightness = [sum(axis.color(value)[:3]) for value in np.linspace(0, 1, 9)]
    assert brightness == sorted(brightness)
