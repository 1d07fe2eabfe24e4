"""The site: each page is in its menu, each public name in its reference; it is built, and its notebook is executed."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import command

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "launch/docs"
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_each_page_is_in_the_menu_once():
    pages = {Path(f).with_suffix("") for f in TRACKED if re.search(r"\.md$|^launch/docs/.*\.(rst|ipynb)$", f)}
    pages.remove(Path("README"))  # the first page
    pages.remove(Path(".github/CONTRIBUTING"))  # where GitHub looks; it names ARCHITECTURE.md
    pages |= {Path("launch/docs/settings"), Path("launch/docs/settings_lab")}  # made by conf.py

    menu = yaml.safe_load((SITE / "menu.yaml").read_text())
    listed = []
    for entries in menu.values():
        listed += [Path(page) for page in entries.values()]
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize("module", ["tabicl_train", "priors", "tabicl_train.model"])
def test_each_public_name_is_in_the_reference(module):
    tree = ast.parse((ROOT / module.replace(".", "/") / "__init__.py").read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    reference = "".join(page.read_text() for page in (SITE / "api").glob("*.rst"))
    documented = set(re.findall(rf"^\.\. auto\w+:: {module}\.(\w+)$", reference, re.M))
    assert set(names) <= documented


def cells() -> list[str]:
    """The code of the notebook."""
    notebook = json.loads((SITE / "tour.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_was_executed_from_top_to_bottom():
    notebook = json.loads((SITE / "tour.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = json.dumps([cell["outputs"] for cell in code])
    assert "Traceback" not in outputs
    assert not re.search(r"/(home|tmp|root|work|Users)/", outputs)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its cells as a script, with fewer steps; a line that begins with ! is a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace: dict = {}
    for cell in cells():
        if command_line := re.search(r"^!tabicl-(.*?)( 2> .*)?$", cell, re.M):
            result = command(*shlex.split(command_line[1]), "splits=1", "rows=100")
            assert result.returncode == 0, result.stderr
        else:
            exec(cell.replace("scale_steps=0.2", "scale_steps=0.01"), namespace)
    assert namespace["metrics"]["loss"].notna().all()
    assert len(namespace["scores"]) > 10


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("myst_nb"), reason="needs the extra docs")
def test_the_site_is_built_without_warnings_and_needs_no_network(tmp_path):
    build = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-c", "launch/docs", "-d", tmp_path / "cache"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([*build, ".", tmp_path / "site"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "search.html", "tour.html", "estimators.html"} <= {page.name for page in pages}
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]*)"|<link [^>]*href="([^"]*)"', text)
        assert not [url for pair in loaded for url in pair if re.match(r"(https?:)?//", url)], page
        assert str(ROOT) not in text, page
