"""What holds for every command: code of others that exits, and modules in the current folder."""

import io
import subprocess
import sys

import pytest
from command_line import exit_code

from tabicl_train import commands, plugins
from tabicl_train.errors import picklable

LEAVING = """
import argparse, sys
def leave():
    sys.exit(0)
def parse():
    argparse.ArgumentParser().parse_args([])
    raise SystemExit
"""


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_exit_of_other_code_is_an_error_and_one_of_ours_is_not(tmp_path, monkeypatch, is_replaced):
    monkeypatch.setattr(sys, "argv", ["tabicl-export"])
    if is_replaced:  # as wandb does once a run has begun

        def replaced(code: object = None) -> None:
            raise SystemExit(code)

        monkeypatch.setattr(sys, "exit", replaced)
    module = tmp_path / f"leaving_{is_replaced}.py"
    module.write_text(LEAVING)
    plugins.load(module)
    leaving = sys.modules[module.stem]
    for function in (leaving.leave, leaving.parse):
        with pytest.raises(SystemExit, match=r"^error: .*leaving_.*.py has called sys.exit\("), commands.plain_end():
            function()
    with pytest.raises(SystemExit) as ours, commands.plain_end():
        commands.arguments("ExportOptions")  # nothing was given
    assert ours.value.code == commands.EXIT_CONFIG
    try:
        leaving.leave()
    except SystemExit as error:
        assert "line 4" in str(picklable(error))  # what a worker sends


def test_a_plug_in_that_exits_when_it_is_imported_cannot_be_imported(tmp_path):
    (tmp_path / "at_once.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(plugins.ConfigError, match=r"at_once.py cannot be imported: SystemExit: 0"):
        plugins.load(tmp_path / "at_once.py")


def test_a_name_that_the_terminal_cannot_show_hides_nothing(tmp_path, monkeypatch):
    for name in ("plain", "mod\xe8le", "mod\udce8le"):  # the last one is not UTF-8 on the disk
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text('{"status": "finished", "step": 1}')
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert exit_code(monkeypatch, "runs", str(tmp_path)) == 0
    shown = terminal.buffer.getvalue().decode("ascii")
    names = [line.split()[0].rpartition("/")[2] for line in shown.splitlines()[1:]]
    assert sorted(names) == ["mod\\udce8le", "mod\\xe8le", "plain"]


@pytest.mark.parametrize("arguments", [["-c", "import tqdm"], ["-m", "tqdm", "--version"]])
def test_what_a_command_starts_imports_nothing_from_the_current_folder(tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["tabicl-train"])
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tqdm.py").write_text("raise SystemExit(3)\n")
    assert subprocess.run([sys.executable, *arguments], capture_output=True).returncode == 3
    with commands.plain_end():
        assert subprocess.run([sys.executable, *arguments], capture_output=True).returncode == 0
    assert subprocess.run([sys.executable, *arguments], capture_output=True).returncode == 3
