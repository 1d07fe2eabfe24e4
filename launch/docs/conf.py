"""Settings of the site (launch/docs.sh): the Markdown pages where they are, and the docstrings of what users import.

The pages stay in their folders, so that their links work on GitHub and here, and no text is written twice. The few that
only the site needs are in this folder. The source folder of Sphinx is therefore that of the project.
"""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from tabicl_train import __version__
from tabicl_train.config.documentation import plugin_reference, reference

ROOT = Path(__file__).resolve().parents[2]
SITE = "launch/docs"

MENU = yaml.safe_load((ROOT / SITE / "menu.yaml").read_text())

project = "tabicl-train"
author = "The tabicl-train developers"
copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "README"
include_patterns = [
    *("*.md", "configs/**.md", "launch/**.md", "priors/**.md", "tabicl_train/**.md", "tests/*.md"),
    *("launch/docs/**.rst", "launch/docs/*.ipynb"),
]
exclude_patterns = [".*", "build", "dist", "runs", "outputs", "wandb", "**/__pycache__"]
highlight_language = "none"  # most blocks mix commands, output and comments

# Markdown
myst_disable_syntax = ["myst_line_comment"]  # a line that begins with % is text, as on GitHub
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # anchors as on GitHub
nb_execution_mode = "off"  # tests/runs/test_docs.py executes the notebook; its figures are stored in it
nb_merge_streams = True

# Docstrings write names and values as `name`, as Markdown does; what is documented here becomes a link.
default_role = "py:obj"
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # numpydoc sections have them in words
numpydoc_show_class_members = False

# The theme brings its fonts and scripts along, so the pages need no network.
html_theme = "pydata_sphinx_theme"
html_title = f"tabicl-train {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
# The bar on the left lists the pages below one of the first level, if there are any.
html_sidebars = {"README": []} | {page: [] for page in MENU["README"].values() if page not in MENU}
html_theme_options = {
    "logo": {"text": "tabicl-train"},
    "header_links_before_dropdown": 9,
    "navbar_align": "left",
    "navbar_persistent": [],
    "navbar_end": ["search-button-field", "theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}


class CommandHelp(SphinxDirective):
    """The --help of every command, each under its name."""

    def run(self) -> list[nodes.Node]:
        """See docutils."""
        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        sections: list[nodes.Node] = []
        for name, entry in scripts.items():
            module, function = entry.split(":")
            code = f"import sys; sys.argv = ['{name}', '--help']; from {module} import {function}; {function}()"
            if name == "tabicl-train":  # whose main restarts the process
                code = code.replace(f"{module} import main; main()", "tabicl_train.cli import train; train()")
            result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
            text = result.stdout.replace(f"{ROOT}/", "")
            section = nodes.section(ids=[name], names=[name])
            section += nodes.title(text=name)
            section += nodes.literal_block(text, text, language="none")
            sections.append(section)
        return sections


def write_settings(app) -> None:
    """Make the pages of settings from the code; git ignores them."""
    (ROOT / SITE / "settings.md").write_text(reference())
    (ROOT / SITE / "settings_lab.md").write_text(plugin_reference("tabicl_train.lab"))


def made_from_code(app, env, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Name the page to read again, though its file has not changed."""
    return [f"{SITE}/commands"]


def add_menu(app, docname: str, source: list[str]) -> None:
    """Add the pages below a page, which GitHub shows without a menu."""
    if docname in MENU:
        entries = [f"{title} </{page}>" for title, page in MENU[docname].items()]
        source[0] += "\n\n" + "\n".join([":::{toctree}", ":hidden:", "", *entries, ":::"]) + "\n"


def add_index(app, exception: Exception | None) -> None:
    """Make the README the page that a browser opens for the folder."""
    if exception is None and app.builder.name == "html":
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app) -> None:
    """See Sphinx."""
    app.add_directive("command-help", CommandHelp)
    app.connect("builder-inited", write_settings)
    app.connect("env-get-outdated", made_from_code)
    app.connect("source-read", add_menu)
    app.connect("build-finished", add_index)
