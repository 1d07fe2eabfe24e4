"""The README's commands are run as they stand (shortened), and its file tree is compared with the files."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from command_line import command

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line for _, block in BLOCKS for line in block.splitlines() if re.match(r"(launch/|tabicl-)\S+", line)]
TREE = next(block for _, block in BLOCKS if "pyproject.toml " in block)

# Settings behind those of the README, with which the same commands take seconds.
VALIDATE_LESS = ["validation.rows=[64]", "validation.tables=1", "validation.real_rows=50"]
TRAIN_LESS = ["trainer.max_steps=2", *VALIDATE_LESS]
EVALUATE_LESS = ["splits=1", "rows=100", "n_estimators=1"]
LESS = {
    "tabicl-train experiment=demo run_dir": TRAIN_LESS,
    "tabicl-train experiment=demo preflight": ["preflight_steps=2", "curriculum.stages.short.tables=4"],
    "tabicl-train experiment=demo prior=disk": VALIDATE_LESS[2:],
    "tabicl-evaluate": EVALUATE_LESS,
    "tabicl-prior describe": ["tables=5"],
    "tabicl-prior gallery": ["tables=2"],
    "tabicl-prior bench": ["tables=2", "rounds=1"],
}


def test_the_readme_shows_the_commands_that_are_run_here():
    assert COMMANDS[:2] == ["launch/demo.sh", "launch/test.sh"]
    assert {command.split()[0] for command in COMMANDS[2:]} == {
        "tabicl-train", "tabicl-export", "tabicl-evaluate", "tabicl-prior", "tabicl-replay", "tabicl-report",
    }  # fmt: skip
    assert all(any(command.startswith(start) for command in COMMANDS) for start in LESS)


def test_the_package_installs_the_commands_that_are_run_here():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {
        f"tabicl-{name}": f"tabicl_train.commands:{name}"
        for name in {c.split()[0].removeprefix("tabicl-") for c in COMMANDS[2:]}
    }


def test_demo_from_another_directory_twice(tmp_path):
    # The script takes settings of the training only; bash puts this function in the place of the command.
    evaluate = f'() {{ command tabicl-evaluate "$@" {" ".join(EVALUATE_LESS)}; }}'
    settings = os.environ | {"RUN_DIR": str(tmp_path / "run"), "BASH_FUNC_tabicl-evaluate%%": evaluate}
    for told in ("0", "finished already"):
        result = subprocess.run(
            [ROOT / "launch/demo.sh", *TRAIN_LESS], cwd=tmp_path, env=settings, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert told in result.stderr and "\nmean " in result.stdout and "\nthis model " in result.stdout
        assert "Inside the trained range" in result.stdout and "Outside the trained range" in result.stdout
    assert {f.name for f in tmp_path.iterdir()} == {"run"}
    written = {"model.ckpt", "evaluation.csv", "metrics.csv", "report.html"}
    assert written <= {f.name for f in (tmp_path / "run").iterdir()}


def test_ci_and_readme_name_the_same_test_command():
    assert "launch/test.sh" in (ROOT / ".ci/run").read_text()


def test_commands_of_the_readme_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in COMMANDS[2:]:
        program, *arguments = line.split()
        less = [setting for start, settings in LESS.items() if line.startswith(start) for setting in settings]
        result = command(program.removeprefix("tabicl-"), *arguments, *less)
        assert result.returncode == 0, f"{line}: {result.stderr}"


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
