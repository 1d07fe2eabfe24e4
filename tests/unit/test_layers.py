"""Who may import whom. The tree has an order: imports run downwards only, lazy ones included."""

import ast
import functools
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the bottom up: priors, and the folders and files of tabicl_train.
ROOMS = (
    *("priors", "errors", "console", "outputs", "signals", "doors"),  # what all others use
    *("model", "run", "weights", "config", "stream"),  # networks, files of runs, settings and tables
    *("prediction", "evaluation", "training"),
    *("report", "check", "sweep", "lab", "cli", "__main__"),  # tools
)
LIBRARIES = {  # what a room must not import, directly or through others
    "priors": {"lightning", "hydra", "omegaconf", "polars", "tabicl_train"},
    "model": {"lightning", "hydra", "omegaconf", "numpy", "scipy", "pandas", "sklearn", "priors"},
    "run": {"lightning", "hydra"},
    "weights": {"lightning", "hydra", "omegaconf"},
    "prediction": {"lightning", "hydra", "omegaconf", "polars"},
    "evaluation": {"lightning", "hydra", "omegaconf"},
}

# What training and reading weights do without.
APART = (
    *("tabicl_train.weights.export", "tabicl_train.weights.hub_format", "tabicl_train.weights.onnx_format"),
    *("tabicl_train.evaluation.", "tabicl_train.config.compose", "tabicl_train.config.options"),
)
SHARED = "tabicl_train.evaluation.statistics"  # of which validation takes intervals

# What all rooms may import of the priors: it needs nothing but the standard library.
BOTTOM = ("priors.errors", "priors.options", "priors.registry")

# What training reaches: both are counted, so that files are not glued. Raise them for a reason only.
MOST_FILES = 95
MOST_LINES = 12_400  # of code, without docstrings and comments
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_name(path): path for folder in ("tabicl_train", "priors") for path in (ROOT / folder).rglob("*.py")}


@functools.cache  # not at import: parsing takes 0.6 s, which each test process would spend
def imports(module: str) -> set[str]:
    """Full names of the modules that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in FILES else node.module for name in full}
    return names - {module}


def room_of(module: str) -> str:
    """The folder of a module, or its file at the top of tabicl_train; or priors."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "tabicl_train" else package


def test_every_file_lies_in_a_room():
    assert {room_of(module) for module in FILES if module != "tabicl_train"} == set(ROOMS)


@pytest.mark.parametrize("module", sorted(FILES))
def test_imports_run_downwards(module):
    if module == "tabicl_train":  # offers the estimators
        return
    for name in imports(module):
        if name.partition(".")[0] in ("tabicl_train", "priors") and name != "tabicl_train":
            assert name in FILES, f"{module} imports {name}, which has moved"
            assert ROOMS.index(room_of(name)) <= ROOMS.index(room_of(module)), f"{module} imports {name}"


def test_no_module_imports_itself_through_others():
    done, path = set(), []

    def visit(module):
        assert module not in path, f"import cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module in done:
            return
        path.append(module)
        for name in sorted(imports(module) & FILES.keys()):
            visit(name)
        path.pop()
        done.add(module)

    for module in sorted(FILES):
        visit(module)


@pytest.mark.parametrize("room", LIBRARIES)
def test_heavy_libraries_stay_where_they_belong(room):
    assert room in ROOMS
    for module in reached(module for module in FILES if room_of(module) == room):
        for name in imports(module):
            library = name.partition(".")[0]
            is_prior = library == "priors" and (room == "priors" or name in BOTTOM)
            assert library not in LIBRARIES[room] or is_prior, f"{room} reaches {name} through {module}"


@pytest.mark.parametrize("module", BOTTOM)
def test_builder_and_registry_need_nothing_else(module):
    assert {name.partition(".")[0] for name in imports(module) - set(BOTTOM)} <= sys.stdlib_module_names


@pytest.mark.parametrize("module", ["training.loop", "weights.reader"])
def test_what_reads_weights_reaches_nothing_that_writes_them(module):
    """And a run is validated through the door of suites, and needs no parser of command lines."""
    assert SHARED in FILES
    assert all(any(name.startswith(start) for name in FILES) for start in APART)
    found = reached([f"tabicl_train.{module}"])
    assert not {name for name in found - {SHARED} if name.startswith(APART)}


def test_training_reaches_no_more_than_it_did():
    found = reached(["tabicl_train.training.loop"])
    lines = sum(code_lines(FILES[module]) for module in found)
    assert len(found) <= MOST_FILES, len(found)
    assert lines <= MOST_LINES, lines


def code_lines(path: Path) -> int:
    """Count the lines of a file that have code; docstrings and comments may grow."""
    lines = set()
    at_start = True  # of a statement
    with path.open() as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in LAYOUT_TOKENS:
                at_start = at_start or token.type == tokenize.NEWLINE
                continue
            if token.type != tokenize.STRING or not at_start:
                lines.update(range(token.start[0], token.end[0] + 1))
            at_start = False
    return len(lines)


def reached(modules: Iterable[str]) -> set[str]:
    """Return modules with all those of ours that they import, directly or through others."""
    found, todo = set(), list(modules)
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += imports(module) & FILES.keys()
    return found
