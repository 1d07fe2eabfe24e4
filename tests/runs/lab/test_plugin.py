"""The laboratory as a plug-in of this package: the rest does not know it, and does without it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import command

import tabicl_train
from tabicl_train import cli as commands
from tabicl_train import plugins, register
from tabicl_train.errors import ConfigError

PACKAGE = Path(tabicl_train.__file__).parent
LAB = PACKAGE / "lab"
OWN_NAMES = re.compile("sequencemodel|sequence_model|sequence_small|needle|quantifier|linear_function", re.IGNORECASE)
OWN = '''
from dataclasses import dataclass
from pathlib import Path
from omegaconf import MISSING
from tabicl_train import register

@dataclass
class Options:
    """tabicl-lab mine folder=DIR [times=3]

    Writes a file.
    """

    folder: str = MISSING
    """Folder to write."""
    times: int = 3
    """How often."""

@register.experiment("mine", question="how a file is written", packages=())
def run(options: Options) -> None:
    Path(options.folder).mkdir()
    (Path(options.folder) / "mine.txt").write_text("mine " * options.times)
'''
ON_FIRST_NEED = """
import io, contextlib, sys
from tabicl_train import cli as commands

def printed(command, *arguments):
    sys.argv = [command, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        getattr(commands, command)()
    return text.getvalue()

assert "quantifiers" in printed("train", "--help") and "tabicl_train.lab" not in sys.modules
assert "needle" in printed("sweep", "--help") and "tabicl_train.lab" not in sys.modules
assert "one matching row among thousands" in printed("lab", "--help") and "torch" not in sys.modules
assert "family: sequence" in printed("train", "experiment=quantifiers", "--cfg", "job")
"""


def outside() -> list[Path]:
    """The files of the program outside the laboratory, without compiled ones."""
    files = [path for folder in (PACKAGE, PACKAGE.parent / "priors") for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if LAB not in path.parents and path.suffix in (".py", ".md", ".yaml", ".csv", ".j2")]


def test_nothing_outside_names_what_the_laboratory_brings():
    texts = {path: path.read_text() for path in [*outside(), *(PACKAGE.parent / "configs").rglob("*.*ml")]}
    assert [f"{path}: {word}" for path, text in texts.items() for word in OWN_NAMES.findall(text)] == []
    importers = {path.name for path, text in texts.items() if path.suffix == ".py" and "tabicl_train.lab" in text}
    assert importers == {"cli.py"}  # for the command


@pytest.mark.slow  # 5 CPU seconds: a new Python imports everything
def test_it_is_imported_on_first_need(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", ON_FIRST_NEED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def work_without_it() -> None:
    """Train, resume, export, evaluate and report in a process that cannot import the laboratory."""
    assert not [name for name in sys.modules if name.startswith("tabicl_train.lab")]
    sys.modules["tabicl_train.lab"] = None
    run = ["experiment=smoke", "run_dir=run", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu"]
    for name, *arguments in (
        ("train", *run, "trainer.max_steps=2"),
        ("train", *run, "trainer.max_steps=3"),
        ("export", "checkpoint=run", "output=model.ckpt"),
        ("evaluate", "checkpoint=run", "suite=sklearn", "splits=1", "rows=60", "n_estimators=1"),
        ("report", "run_dir=run"),
    ):
        sys.argv = [f"tabicl-{name}", *arguments]
        getattr(commands, name)()
    sys.argv = ["tabicl-lab", "fading", "folder=x"]
    commands.lab()


@pytest.mark.slow  # 14 CPU seconds; that nothing else imports or names the laboratory is read in the files above
def test_a_run_needs_no_laboratory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A new Python: a forked process has loaded the laboratory.
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]}; import test_plugin as test; "
    result = subprocess.run([sys.executable, "-c", code + "test.work_without_it()"], capture_output=True, text=True)
    text = result.stderr
    assert result.returncode == 2, text
    assert text.splitlines()[-1].startswith("error: tabicl-lab is not installed: "), text
    assert "resumed at step 2" in text
    assert (tmp_path / "model.ckpt").exists() and (tmp_path / "run/report.html").exists()


@pytest.fixture
def own(monkeypatch, tmp_path):
    """A folder with an experiment in mine.py, which is forgotten at the end."""
    monkeypatch.setattr(register.experiment, "_entries", dict(register.experiment))
    monkeypatch.setattr(plugins, "_named", {})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_an_experiment_of_a_file_is_listed_checked_and_run(own):
    listed = command("lab", "--help", "plugins=[./mine.py]")
    assert re.search(r"^  mine +how a file is written$", listed.stdout, re.MULTILINE)
    wrong = command("lab", "mine", "folder=x", "time=2", "plugins=[./mine.py]")
    assert wrong.returncode == 2
    assert "time: no such setting; did you mean times?" in wrong.stderr
    result = command("lab", "mine", "folder=x", "times=2", "plugins=[./mine.py]")
    assert result.returncode == 0
    assert (own / "x/mine.txt").read_text() == "mine mine "


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("options: Options", "options"), "the experiment mine is not a function of its options; write it as def run"),
        (("packages=()", 'packages=("no_such_package",)'), "mine needs no_such_package: pip install no_such_package"),
        (('question="how a file is written", ', ""), r"register.experiment\('mine'\): .*'question'"),
    ],
)
def test_a_mistake_of_an_experiment_is_one_line(change, words, own):
    (own / "mine.py").write_text(OWN.replace(*change))
    result = command("lab", "mine", "folder=x", "plugins=[./mine.py]")
    assert result.returncode == 2
    assert re.search(words, result.stderr)
    assert not (own / "x").exists()


def test_a_folder_of_configurations_inside_a_package_is_searched(own):
    (own / "my_package/configs/prior").mkdir(parents=True)
    (own / "my_package/__init__.py").write_text("")
    (own / "my_package/configs/prior/mine.yaml").write_text("defaults: [schema/dummy]\n")
    from tabicl_train.config.compose import compose

    with pytest.raises(ConfigError):
        compose(["experiment=smoke", "prior=mine"])
    sys.path.insert(0, str(own))
    try:
        assert compose(["experiment=smoke", "prior=mine", "plugins=my_package"]).prior["name"] == "dummy"
    finally:
        sys.path.remove(str(own))
        sys.modules.pop("my_package", None)
