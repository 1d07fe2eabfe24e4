"""What holds for every command: code of others that exits, and modules in the current folder."""

import hashlib
import io
import json
import subprocess
import sys
import warnings

import pytest
import safetensors.torch
import torch
from command_line import command, exit_code

from tabicl_train import cli, plugins
from tabicl_train.console import one_line
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
        with pytest.raises(SystemExit, match=r"^error: .*leaving_.*.py called sys.exit\("), cli.plain_end():
            function()
    with pytest.raises(SystemExit) as ours, cli.plain_end():
        cli.command_options("ExportOptions")  # nothing was given
    assert ours.value.code == cli.EXIT_CONFIG
    try:
        leaving.leave()
    except SystemExit as error:
        assert "line 4" in str(picklable(error))  # what a worker sends


FORGED = "\x1b[1A\x9b2K\r\nforged"


def received_runs(folder):
    (folder / f"run{FORGED}").mkdir()
    (folder / f"run{FORGED}" / "status.json").write_text(json.dumps({"status": FORGED, "step": 1}))
    return "runs", str(folder)


def received_scores(folder):
    lines = ["data,split,method,roc_auc,weights"]
    for method in ("this model", f'"{FORGED}"'):
        lines += [f'"{task}{FORGED}",0,{method},0.{task},"{FORGED}"' for task in range(1, 4)]
    (folder / "scores.csv").write_text("\n".join(lines))
    return "compare", str(folder / "scores.csv"), f"output={folder / FORGED}"


def received_network(folder):
    (folder / "model.safetensors").write_bytes(safetensors.torch.save({"weight": torch.zeros(1)}))
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    plugin = {"module": FORGED, "version": None, "files": [], "sha256": "", "uses": [["network", FORGED]]}
    content = {"library_name": "tabicl-train", "format_version": 1, "model": {}, "origin": {"plugins": [plugin]}}
    (folder / "config.json").write_text(json.dumps(content | {"sha256": {"model.safetensors": digest}}))
    return "export", f"checkpoint={folder}", f"output={folder / 'x.ckpt'}"


@pytest.mark.parametrize("received", [received_runs, received_scores, received_network])
def test_received_text_is_printed_without_line_breaks_and_escapes(tmp_path, monkeypatch, received):
    monkeypatch.setattr("tabicl_train.sweep.compare.is_installed", lambda package: False)  # no figures
    done = command(*received(tmp_path))
    assert "forged" in done.stdout + done.stderr
    for line in (done.stdout + done.stderr).split("\n"):
        assert not line.startswith("forged") and one_line(line) == line


def test_nested_metadata_of_weights_are_one_line(tmp_path):
    metadata = {"config": "[" * 10**5, "origin": "{}", "format_version": "1"}
    (tmp_path / "deep.safetensors").write_bytes(safetensors.torch.save({"weight": torch.zeros(1)}, metadata))
    done = command("export", f"checkpoint={tmp_path / 'deep.safetensors'}", f"output={tmp_path / 'x.ckpt'}")
    assert done.returncode == 2 and done.stderr.startswith("error: weights are not read from ")
    assert done.stderr.count("\n") == 1


def test_messages_of_errors_and_warnings_are_printed_without_escapes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tabicl-export"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with pytest.raises(ValueError) as raised, cli.plain_end():
        raise ValueError(FORGED)
    sys.excepthook(raised.type, raised.value, raised.tb)
    shown = capsys.readouterr().err + warnings.formatwarning(UserWarning(FORGED), UserWarning, "file.py", 1)
    assert shown.count("forged") == 2 and not set("\x1b\x9b\r") & set(shown)


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
    with cli.plain_end():
        assert subprocess.run([sys.executable, *arguments], capture_output=True).returncode == 0
    assert subprocess.run([sys.executable, *arguments], capture_output=True).returncode == 3
