"""The README's commands are run as they stand (shortened), and its file tree is compared with the files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line for _, block in BLOCKS for line in block.splitlines() if re.match(r"(launch/|tabicl-)\S+", line)]
TREE = next(block for _, block in BLOCKS if "pyproject.toml " in block)


def test_the_readme_shows_the_commands_that_are_run_here():
    assert COMMANDS[:2] == ["launch/demo.sh", "launch/test.sh"]
    assert {command.split()[0] for command in COMMANDS[2:]} == {
        "tabicl-train", "tabicl-export", "tabicl-evaluate", "tabicl-prior", "tabicl-figures", "tabicl-replay",
        "tabicl-report",
    }  # fmt: skip


def test_demo_from_another_directory_twice(tmp_path):
    settings = os.environ | {"RUN_DIR": str(tmp_path / "run")}
    for told in ("0", "finished already"):
        result = subprocess.run(
            [ROOT / "launch/demo.sh", "trainer.max_steps=2"], cwd=tmp_path, env=settings, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert told in result.stderr and "\nmean " in result.stdout and "\nthis model " in result.stdout
        assert "Inside the trained range" in result.stdout and "Outside the trained range" in result.stdout
    assert {f.name for f in tmp_path.iterdir()} == {"run"}
    written = {"model.ckpt", "evaluation.csv", "metrics.csv", "report.html"}
    assert written <= {f.name for f in (tmp_path / "run").iterdir()}


def test_ci_and_readme_name_the_same_test_command():
    assert "launch/test.sh" in (ROOT / ".ci/run").read_text()


def test_commands_of_the_readme_run_in_order(tmp_path):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in COMMANDS[2:]:
        shortened = command.replace("trainer.max_steps=1000", "trainer.max_steps=2")
        result = subprocess.run(shortened.split(), cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}: {result.stderr}"


def test_python_of_the_readme_runs():
    (block,) = [block for language, block in BLOCKS if language == "python"]
    names: dict = {}
    exec(block, names)
    assert names["logits"].shape == (1, 80, 10)


@pytest.mark.parametrize("room", ["priors", "tabicl_train", "launch", "configs"])
def test_file_tree_is_true(room):
    tracked = subprocess.run(["git", "ls-files", room], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {Path(f).name for f in tracked.splitlines() if Path(f).suffix in (".py", ".sh", ".txt")}
    names |= {Path(f).parent.name for f in tracked.splitlines() if room == "configs"}
    missing = {name for name in names if name != "__init__.py" and not re.search(rf"\b{re.escape(name)}\b", TREE)}
    assert not missing
    for line in TREE.splitlines():
        if match := re.match(r"[| ]*(\w+\.(?:py|sh))\b", line):
            assert list(ROOT.rglob(match[1])), f"{match[1]} is in the tree, but not in the project"
