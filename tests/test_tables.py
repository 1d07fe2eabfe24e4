import re
import subprocess
import sys

import pytest

from priors import build_prior
from tabicl_train.config import compose
from tabicl_train.curriculum import plan_step
from tabicl_train.tables import run_tables


def prior(*arguments: str, cwd=None) -> subprocess.CompletedProcess:
    code = "from tabicl_train.commands import prior; prior()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=cwd)


def test_describe_counts_tables_and_rejections():
    told = prior("describe", "experiment=smoke", "tables=6")
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    rows = next(line for line in lines if line.startswith("rows")).split()
    assert 40 <= float(rows[1]) <= float(rows[5]) <= 80
    accepted = re.search(r"6 tables from (\d+) draws: ([\d.]+)% accepted", told.stdout)
    rejected = sum(int(count) for count in re.findall(r"rejected as \w+ +(\d+)", told.stdout))
    assert int(accepted[1]) == 6 + rejected and float(accepted[2]) == pytest.approx(600 / int(accepted[1]), abs=0.05)


@pytest.mark.parametrize("name", ["graph_scm", "dummy"])
def test_gallery_is_a_picture_and_a_page_of_every_plan(name, tmp_path):
    told = prior("gallery", "experiment=smoke", f"prior={name}", "tables=4", f"output={tmp_path}/new/tables.png")
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "new/tables.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "new/tables.html").read_text()
    assert page.count("<details>") == 4 and "data:image/png;base64," in page and "http" not in page


def test_show_draws_the_table_that_training_sees():
    config = compose(["experiment=smoke", "seed=3"])
    plan = plan_step(config.curriculum, config.model, 3, 7)
    batch = next(b for b in plan.micro_batches if 5 in b.tables)
    table = build_prior("graph_scm").sample(batch.spec, (3, 7, 5))
    told = prior("show", "experiment=smoke", "prior=graph_scm", "seed=3", "step=7", "table=5")
    assert told.returncode == 0, told.stderr
    assert str(table.plan) in told.stdout
    assert f"{table.X[0, 0]:.3f}" in told.stdout.splitlines()[-5]


def test_tables_of_a_run_follow_its_curriculum():
    config = compose(["experiment=smoke", "prior=dummy"])
    addresses = [address for address, _ in run_tables(config, 5)]
    assert addresses == [(0, 0), (0, 4), (1, 0), (1, 4), (2, 0)]


def test_bench_prints_a_line_a_row_count():
    told = prior("bench", "prior=dummy", "rows=[50,80]", "features=[2,4]", "tables=2", "rounds=1")
    assert told.returncode == 0, told.stderr
    assert [line.split()[:2] for line in told.stdout.splitlines()[1:]] == [["dummy", "50"], ["dummy", "80"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shw"], "'shw' is no action; there are describe, gallery, show, bench, dump"),
        (["show", "step=20", "experiment=smoke"], "the run has the steps 0..19"),
        (["show", "table=8", "experiment=smoke"], "a step has the tables 0..7"),
        (["describe", "prior=nope"], "prior=nope: there is no such choice"),
        (["describe", "tables=many"], "tables"),
        (["bench", "peer=other", "prior=dummy"], "peer is 'other'"),
    ],
)
def test_wrong_commands_end_with_2_and_no_trace(arguments, words):
    told = prior(*arguments)
    assert told.returncode == 2 and words in told.stderr and "Traceback" not in told.stderr
