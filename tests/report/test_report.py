"""The report: its content, that the page is self-contained, and how a browser displays it."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from browser import BROWSER, browse
from command_line import command
from html_page import Page
from invented_measures import attention_measures

from tabicl_train import train as training
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.scores import METRICS, summarize
from tabicl_train.report.page import table, write_report
from tabicl_train.report.read_run import read_run
from tabicl_train.report.sections import merge
from tabicl_train.report.training_curves import draw_training

pytestmark = pytest.mark.slow

SECTIONS = [
    "overview", "configuration", "curriculum", "loss", "multipliers", "attention", "throughput", "incidents",
    "validation", "real-data",
]  # fmt: skip
TASKS = [f"task {i}" for i in range(5)]


def write_scores(run_dir: Path, lead: float, tasks: list[str] = TASKS) -> None:
    generator, rows = np.random.default_rng(0), []
    for task in tasks:
        for split in (0, 1):
            for method, more in (("this model", lead), ("random <forest>", 0.0)):
                sizes = {"rows": 300, "features": 4, "classes": 2}
                scores = dict(
                    zip(METRICS, np.array([0.7 + more, 0.5, 0.6, 0.1]) + generator.normal(0, 0.01, 4), strict=True)
                )
                rows.append({"data": task, "split": split, "method": method, **sizes, **scores, "seconds": 1.0,
                             "trained_range": "outside" if task == tasks[-1] else "inside"})  # fmt: skip
    pd.DataFrame(rows).to_csv(run_dir / "evaluation.csv", index=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two short runs with every file that a run can have."""
    folders = [tmp_path_factory.mktemp("runs") / name for name in ("one & <only>", "two")]
    for seed, folder in enumerate(folders):
        training.train(compose([
            "experiment=smoke", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu", f"seed={seed}",
            f"run_dir='{folder}'", "validation.every=3", "validation.rows=[40,60]", "validation.tables=2",
            "validation.features=[2,4]", "validation.real_rows=50", "trainer.max_steps=9",
        ]))  # fmt: skip
        write_scores(folder, lead=0.1 * (seed + 1))
        (folder / "entropy").mkdir()
        attention_measures().to_csv(folder / "entropy" / "entropy.csv", index=False)
    incident = {"time": "now", "step": 4, "stage": "smoke", "reason": "the <loss> is not finite", "replay": "again"}
    fall = {"time": "then", "step": 8, "reason": "the mean ROC AUC on real data fell 3 times in a row"}
    (folders[0] / "incidents.jsonl").write_text(f"{json.dumps(incident)}\n{json.dumps(fall)}\n{{'torn': {{}}")
    return folders


@pytest.fixture(scope="module")
def pages(runs, tmp_path_factory) -> dict[int, Path]:
    """Pages by the number of runs on them."""
    folder = tmp_path_factory.mktemp("pages")
    for number in (1, 2):
        write_report(runs[:number], folder / f"{number}.html")
    return {number: folder / f"{number}.html" for number in (1, 2)}


def test_a_page_is_self_contained(pages):
    page = Page(pages[1])
    assert page.ids == SECTIONS and page.links == [f"#{name}" for name in SECTIONS]
    assert len(page.pictures) == 9 and all(min(p.shape[:2]) > 200 and p.std() > 0.05 for p in page.pictures)
    assert not re.search(r"https?:|url\(|@import|//[a-z]", re.sub(r"base64,[^\"]*", "", page.source))
    assert "default-src 'none'" in page.source and page.source.isascii()


def test_a_page_shows_the_content_of_the_files(runs, pages):
    page = Page(pages[1])
    name = "one & <only>"
    metrics, batches, validation = (
        pd.read_csv(runs[0] / f"{file}.csv") for file in ("metrics", "batches", "validation")
    )
    facts = {key: row[name] for key, row in page.table("", name).items()}
    assert facts["status"] == "finished" and facts["steps done"] == "9" and facts["incidents"] == "2"
    assert float(facts["mean loss, last 10% of the steps"]) == pytest.approx(metrics["loss"].iloc[-1], rel=1e-3)
    settings = page.tables[2]
    assert ["prior.name", "dummy"] in settings and "guard.loss" not in dict(settings)
    assert ["guard.loss", "0.9"] in page.tables[3] and "curriculum.stages" not in str(page.tables[3])
    assert page.table("", "smoke")["rows"]["smoke"] == "[40, 80]"
    late = batches[(batches["step"] >= 7) & (batches["rows"] >= 64)]
    losses = next(t for t in page.tables if t[-1][0] == "64..127 rows")
    assert float(losses[-1][1]) == pytest.approx(np.average(late["loss"], weights=late["tables"]), rel=1e-3)
    late = batches[batches["step"] >= 7]
    losses = next(t for t in page.tables if t[-1][0].endswith(" classes"))
    for classes, rows in late.groupby("classes"):
        (mean,) = [row[1] for row in losses if row[0] == f"{classes} classes"]
        assert float(mean) == pytest.approx(np.average(rows["loss"], weights=rows["tables"]), rel=1e-3)
    assert "the <loss> is not finite" in page.table("time", "reason")["now"]["reason"]
    real = validation[validation["data"] != "synthetic"].groupby("step")["roc_auc"].mean()
    scores = page.table("", "best at step")["ROC AUC on real data"]
    assert float(scores["last"]) == pytest.approx(real[9], rel=1e-3)
    assert float(scores["best"]) == pytest.approx(real.max(), rel=1e-3) and int(scores["best at step"]) == real.idxmax()
    assert "Warning: the mean ROC AUC on real data fell 3 times" in page.text
    scores = page.table("method", "ROC AUC")
    expected = summarize(pd.read_csv(runs[0] / "evaluation.csv"))
    assert list(scores) == ["this model", "random <forest>"]
    assert float(scores["this model"]["ROC AUC"]) == pytest.approx(expected.loc["this model", "roc_auc"], rel=1e-3)
    assert scores["random <forest>"]["win rate"] == "1" and scores["this model"]["win rate"] == ""
    assert list(page.table("data", "this model")) == TASKS
    assert f"Outside the trained range, where the network extrapolates: {TASKS[-1]}." in page.text


def test_cells_of_tables(tmp_path):
    frame = pd.DataFrame({"a<b": [12345, None, 0.123456], "text": ["<i>", math.nan, "c"]}, dtype=object)
    numbers = pd.DataFrame({"n": [1.5, math.nan, 98765.4]}, index=pd.Index(["x", "y", "z"], name="name"))
    (tmp_path / "tables.html").write_text(table(frame) + table(numbers))
    assert Page(tmp_path / "tables.html").tables == [
        [["", "a<b", "text"], ["0", "12,345", "<i>"], ["1", "", ""], ["2", "0.1235", "c"]],
        [["name", "n"], ["x", "1.5"], ["y", ""], ["z", "98,765"]],
    ]


def test_the_loss_is_also_shown_relative_to_guessing(runs):
    """Ratios of sums over tables: the noise of few and many classes cancels, and validations have the same scale."""
    steps = np.repeat(np.arange(1, 201), 2)
    generator = np.random.default_rng(0)
    tables, guess_loss = generator.integers(1, 9, 400), generator.choice([0.5, 2.0], 400)
    ratio = 1 - steps / 400  # falls from 1 to 1/2
    batches = pd.DataFrame({"step": steps, "tables": tables, "loss": guess_loss * ratio, "guess_loss": guess_loss})
    validation = pd.DataFrame({
        "step": [100, 100, 100, 200, 200], "data": ["synthetic", "synthetic", "iris", "synthetic", "synthetic"],
        "loss": [0.3, 0.9, 9.0, 0.2, 0.7], "guess_loss": [0.6, 1.0, np.nan, 0.6, 1.2],
    })  # fmt: skip
    metrics = pd.read_csv(runs[0] / "metrics.csv")
    figure = draw_training({"a": metrics}, {"a": batches}, {"a": validation})
    (axes,) = [axes for axes in figure.axes if "guessing" in axes.get_title()]
    every, smooth, points, one = axes.get_lines()
    assert np.allclose(every.get_ydata(), 1 - np.arange(1, 201) / 400)
    assert list(smooth.get_xdata()) == list(range(1, 201))
    assert np.abs(np.diff(smooth.get_ydata())).max() < 0.01 and np.allclose(smooth.get_ydata(), ratio[::2], atol=0.03)
    assert points.get_xydata().tolist() == [[100, pytest.approx(1.2 / 1.6)], [200, pytest.approx(0.5)]]
    assert set(one.get_ydata()) == {1}
    older = batches.drop(columns="guess_loss")  # as older versions wrote it
    figure = draw_training({"a": metrics}, {"a": older}, {})
    assert not [axes for axes in figure.axes if "guessing" in axes.get_title()]


def test_several_runs_side_by_side(pages):
    page = Page(pages[2])
    names = ["one & <only>", "two"]
    assert {name: page.table("", *names)["status"][name] for name in names} == dict.fromkeys(names, "finished")
    (seeds,) = [row for row in page.tables[2] if row[0] == "seed"]
    assert seeds == ["seed", "0", "1"]
    assert sum(t[-1][0] == "checkpoint_rows" for t in page.tables) == 1  # the runs have the same curriculum
    assert list(page.table("method", "ROC AUC")) == [*names, "random <forest>"]
    assert (
        len(page.pictures) == 14
    )  # loss by rows and by classes, multipliers, gates, attention of each, the others for both
    assert "two: " not in page.text


def test_only_tasks_of_all_runs_are_compared(runs, tmp_path):
    other = shutil.copytree(runs[1], tmp_path / "two")
    write_scores(other, lead=0.3, tasks=["task 1", "task 9"])
    merged = merge([read_run(runs[0], "a"), read_run(other, "b")])
    assert list(dict.fromkeys(merged["method"])) == ["a", "b", "random <forest>"]
    assert set(merged["data"]) == {"task 1"} and len(merged) == 6
    assert merged.groupby("method")["roc_auc"].mean()["b"] == pytest.approx(1.0, abs=0.03)
    write_scores(other, lead=0.3, tasks=["task 9"])
    write_report([runs[1], other], tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert "evaluated on different tasks" in page.text
    above = Path(os.path.commonpath([runs[1], other]))  # both folders are called "two"
    assert page.tables[0][0][1:] == [str(runs[1].relative_to(above)), str(other.relative_to(above))]


def test_scores_of_regression(runs, tmp_path):
    shutil.copy(runs[0] / "config.yaml", tmp_path)
    rows = [
        {"data": data, "split": 0, "method": method, "rows": 300, "features": 4, "r2": r2, "rmse": rmse,
         "pinball": pinball, "coverage": 0.75, "width": 1.5, "seconds": 1.0, "trained_range": "inside"}
        for data in ("houses", "cars")
        for method, r2, rmse, pinball in (("this model", 0.5, 1.0, 0.2), ("marginal quantiles", -0.5, 2.0, 0.3))
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "evaluation.csv", index=False)
    write_report([tmp_path], tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    scores = page.table("method", "R2")
    assert scores["this model"]["R2"] == "0.5" and scores["marginal quantiles"]["R2"] == "0"
    assert scores["this model"]["share below marginal quantiles"] == scores["marginal quantiles"]["win rate"] == "1"
    assert scores["marginal quantiles"]["RMSE relative to the best"] == "2"
    assert list(page.table("data", "this model")) == ["houses", "cars"] and "An R2 below 0 counts as 0" in page.text
    assert "mean R2 on 2 real tasks" in str(page.tables[0])
    assert "ROC AUC" not in page.source and len(page.pictures) == 1
    write_report([tmp_path, runs[0]], tmp_path / "both.html")
    assert "evaluated on different tasks" in Page(tmp_path / "both.html").text


@pytest.mark.parametrize("kept", [["config.yaml"], ["metrics.csv"], ["config.yaml", "metrics.csv", "batches.csv"]])
def test_missing_files_are_named(kept, runs, tmp_path):
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    for name in kept:
        shutil.copy(runs[0] / name, run_dir)
        if name.endswith(".csv"):
            with open(run_dir / name, "a") as file:
                file.write("10,smoke,0.")  # killed while writing
    write_report([run_dir], tmp_path / "page.html")
    text = Page(tmp_path / "page.html").text
    for name in ("config.yaml", "metrics.csv", "batches.csv"):
        assert (f"There is no {name}." in text) == (name not in kept)
    for what in ("There were no incidents", "There is no validation.csv", "There is no scaling.csv",
                 "attention was not measured", "there is no evaluation.csv",
                 "There is no provenance.jsonl", f"tabicl-lab entropy 'checkpoint={run_dir}'"):  # fmt: skip
        assert what in text


def test_the_command(runs, tmp_path):
    result = command("report", f"run_dir={runs[1]}")
    assert result.returncode == 0 and result.stdout == f"{runs[1]}/report.html\n", result.stderr
    assert Page(runs[1] / "report.html").ids == SECTIONS
    with pytest.raises(ConfigError, match="there is no run in it"):
        write_report([runs[0], tmp_path], tmp_path / "page.html")
    wrong = command("report", f"run_dir=[{tmp_path}/a,{tmp_path}/b]")
    assert (
        wrong.returncode == 2 and wrong.stderr.count("there is no run in it") == 2 and "Traceback" not in wrong.stderr
    )


LOOK = """<script>document.title = JSON.stringify({
    pictures: Array.from(document.images, i => i.complete && i.naturalWidth > 0 && i.clientWidth > 200),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    height: document.documentElement.scrollHeight})</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no headless browser")
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_displays_it(width, pages, tmp_path):
    source = pages[2].read_text()
    policy = re.search(r"<meta http-equiv=[^>]*>", source)[0]  # it blocks scripts, the one added below too
    (tmp_path / "look.html").write_text(source.replace(policy, "").replace("</body>", LOOK))
    document = browse(f"--window-size={width},900", "--virtual-time-budget=10000", "--dump-dom", tmp_path / "look.html")
    seen = json.loads(re.search(r"<title>(.*?)</title>", document)[1])
    assert seen["pictures"] == [True] * 14
    assert seen["overflow"] <= 0
    browse(f"--window-size={width},{seen['height']}", f"--screenshot={tmp_path}/page.png", pages[2])
    shown = matplotlib.image.imread(tmp_path / "page.png")[..., :3]
    line = np.abs(shown - np.array([0x1F, 0x77, 0xB4]) / 255).max(axis=2) < 0.15  # the first color of the figures
    assert shown.shape[1] == width and line.sum() > 200
