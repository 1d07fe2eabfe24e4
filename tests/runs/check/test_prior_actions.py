import re
from pathlib import Path

import pytest
from command_line import command, exit_code
from table_files import write_table_files
from training_runs import read_metrics

from priors import build_prior
from tabicl_train.check.prior_actions import run_tables
from tabicl_train.config.compose import compose
from tabicl_train.stream.curriculum import plan_step


def test_describe_counts_tables_and_rejections():
    result = command("prior", "describe", "experiment=smoke", "tables=6")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    rows = next(line for line in lines if line.startswith("rows")).split()
    assert 40 <= float(rows[1]) <= float(rows[5]) <= 80
    accepted = re.search(r"6 tables from (\d+) draws: ([\d.]+)% accepted", result.stdout)
    rejected = sum(int(count) for count in re.findall(r"rejected as \w+ +(\d+)", result.stdout))
    assert int(accepted[1]) == 6 + rejected
    assert float(accepted[2]) == pytest.approx(600 / int(accepted[1]), abs=0.05)


def test_describe_shows_own_tables_of_any_length(tmp_path, monkeypatch, capfd):
    folder = write_table_files(tmp_path / "own", 3)
    (folder / "broken.csv").write_text("a\n1\n")
    describe = ["describe", "experiment=smoke", "prior=tables", f"prior.folder={folder}", "tables=2"]
    assert exit_code(monkeypatch, "prior", *describe, "validation.every=5", "validation.rows=[512]") in (0, None)
    lines = capfd.readouterr().out.splitlines()
    shown = [
        "rows: table2.csv 250, table1.csv 200, table0.csv 150",
        "1 files left out: broken.csv (1 columns; a CSV file separates them by commas, semicolons or tabs, or by what "
        "the option separator names)",
    ]
    assert set(shown) <= set(lines) and "2 tables from" in lines[-1]
    assert exit_code(monkeypatch, "prior", *describe, "curriculum.stages.smoke.rows=[60,400]") == 2
    printed = capfd.readouterr()
    lengths = "stage smoke: 3 of 3 tables have at least 60 rows, and 0 at least 400"
    assert {*shown, lengths} <= set(printed.out.splitlines())
    assert "error: curriculum.stages.smoke.rows asks for tables of 400 rows; none of the 3 real tables" in printed.err


def test_fewer_draws_are_described_if_tables_are_real(tmp_path, monkeypatch):
    folder = write_table_files(tmp_path / "own", 3)
    monkeypatch.setattr("priors.inspection.describe_tables", lambda tables: f"{len(list(tables))} draws")
    described = command("prior", "describe", "experiment=smoke", "prior=tables", f"prior.folder={folder}")
    assert described.stdout.splitlines()[-1] == "20 draws"
    assert "20/20" in described.stderr
    assert command("prior", "describe", "experiment=smoke", "prior=dummy").stdout == "40 draws\n"  # all of the run


def test_files_of_a_folder_of_ones_own_are_found(tmp_path):
    (tmp_path / "prior").mkdir()
    (tmp_path / "prior/mine.yaml").write_text("defaults: [schema/mix_scm]\ncomponents: {dummy: {weight: 1}}\n")
    for arguments in (["--config-dir", str(tmp_path), "show"], ["show", f"--config-dir={tmp_path}"]):
        result = command("prior", *arguments, "experiment=smoke", "prior=mine")
        assert result.returncode == 0, result.stderr
        assert "(stage smoke)" in result.stdout
    assert "there is no such choice" in command("prior", "show", "experiment=smoke", "prior=mine").stderr
    assert "usage: tabicl-prior describe|" in command("prior").stdout


@pytest.mark.slow  # draws a page of figures
def test_gallery_is_a_picture_and_a_page_with_every_plan(tmp_path):
    output = f"output={tmp_path}/new/tables.png"
    result = command("prior", "gallery", "experiment=smoke", "prior=graph_scm", "tables=3", output)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "new/tables.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "new/tables.html").read_text()
    assert page.count("<details>") == 3
    assert "data:image/png;base64," in page
    assert "http" not in page


def test_a_gallery_does_not_replace_a_table_behind_a_link(tmp_path, monkeypatch, capfd):
    folder = write_table_files(tmp_path / "tables", 1)
    before = (folder / "table0.csv").read_bytes()
    (tmp_path / "page.html").symlink_to(folder / "table0.csv")
    settings = ["experiment=smoke", "prior=tables", f"prior.folder={folder}", "prior.validation_fraction=0"]
    output = f"output={tmp_path}/page.png"
    assert exit_code(monkeypatch, "prior", "gallery", *settings, "prior.test_fraction=0", output, "tables=1") == 2
    assert "which is the input prior.folder" in capfd.readouterr().err
    assert (folder / "table0.csv").read_bytes() == before
    assert not (tmp_path / "page.png").exists()


def test_show_draws_the_table_that_training_sees():
    config = compose(["experiment=smoke", "seed=3"])
    plan = plan_step(config.curriculum, config.model, 3, 7)
    spec = next(group.spec for group in plan.groups if 5 in group.tables)
    table = build_prior("graph_scm").sample(spec, (3, 7, 5))
    result = command("prior", "show", "experiment=smoke", "prior=graph_scm", "seed=3", "step=7", "table=5")
    assert result.returncode == 0, result.stderr
    assert str(table.plan) in result.stdout
    assert f"{table.X[0, 0]:.3f}" in result.stdout.splitlines()[-5]


def test_tables_of_a_run_follow_its_curriculum(capfd):
    config = compose(["experiment=smoke", "prior=dummy"])
    assert [address for address, _ in run_tables(config, 5)] == [(0, 0), (0, 4), (1, 0), (1, 4), (2, 0)]
    assert len(list(run_tables(config, 200))) == 40
    assert "40/40" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shw"], "there is no action 'shw'; there are describe, gallery, show, dump"),
        (["show", "step=20", "experiment=smoke"], "the run has steps 0..19"),
        (["show", "table=8", "experiment=smoke"], "a step has the tables 0..7"),
        (["describe", "tabls=2", "prior=dummy"], "tabls: no such setting; did you mean tables?"),
        (["gallery", "output=folder", "prior=dummy"], "output is 'folder'; it is a folder, not a file"),
        (["dump", "output=file", "prior=dummy"], "output is 'file'; file is a file"),
        (["dump", "output=dump", "prior=dummy", "first_step=5"], "first_step is 5; it must be a multiple of 100"),
        (["dump", "output=dump", "experiment=smoke", "first_step=20"], "the run has steps 0..19"),
        (["dump", "output=dump", "format=h5", "prior=dummy"], "format is 'h5'; it must be one of folder, file"),
        (["dump", "output=file", "format=file", "prior=dummy"], "which already exists; set overwrite=true"),
        (["dump", "output=a.h5", "format=file", "experiment=smoke"], "set curriculum.stages.NAME.group_size to the"),
    ],
)
def test_wrong_commands_exit_with_2_and_write_nothing(arguments, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    assert exit_code(monkeypatch, "prior", *arguments) == 2
    error = capfd.readouterr().err
    assert message in error
    assert all(line.startswith(("error: ", "usage: ")) for line in error.splitlines())
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


@pytest.mark.slow
def test_machines_share_a_dump_and_a_run_needs_all_of_it(tmp_path, monkeypatch, capfd):
    settings = ["experiment=smoke", "prior=dummy", "curriculum.stages.smoke.steps=120"]

    def dump(name: str, *arguments: str) -> int:
        return exit_code(monkeypatch, "prior", "dump", f"output={tmp_path}/{name}", *settings, *arguments)

    def train() -> int:
        start = [*settings[2:], "experiment=smoke", "prior=hdf5", f"prior.file={tmp_path}/one", "trainer.max_steps=102"]
        return exit_code(monkeypatch, "train", *start, f"run_dir={tmp_path}/run", "stream.num_workers=0")

    assert dump("one") == 0
    assert "tables of steps 0..99; 1 file written" in capfd.readouterr().out
    assert train() == 2
    assert "end after 100 of the run's 102 steps; set trainer.max_steps=100 or prior.pas" in capfd.readouterr().err
    assert dump("two", "first_step=100", "steps=2") == 0
    assert "tables of steps 100..101; 1 file written" in capfd.readouterr().out
    for file in (tmp_path / "two").iterdir():
        file.rename(tmp_path / "one" / file.name)
    assert dump("one", "steps=102") == 0
    assert "tables of steps 0..101; 2 files kept" in capfd.readouterr().out
    assert train() == 0 and len(read_metrics(tmp_path / "run")) == 102
