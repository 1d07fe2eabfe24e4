"""Fixtures that several folders share."""

import gc
from collections.abc import Iterator
from pathlib import Path

import kept_metadata  # noqa: F401
import pytest
from plugin_folder import forget_plugins


def pytest_configure() -> None:
    """Look for garbage less often: the many objects of imported packages were looked through again and again, which
    took an eighth of the tests' CPU time."""
    gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of all further looks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def forget_plugins_of_file() -> Iterator[None]:
    """Forget, after each file of tests, the plug-ins that it has loaded: commands run in this process.

    So tests register in a test or a fixture, not when their file is imported.
    """
    yield
    forget_plugins()


@pytest.fixture
def unrendered(monkeypatch) -> None:
    """Draw figures, but write each as a single pixel: rendering takes most of the time of a page."""
    from matplotlib.figure import Figure
    from matplotlib.image import imsave

    def savefig(figure, file, **_) -> None:
        imsave(file, [[[1.0, 1.0, 1.0]]], format="png")

    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture
def own_configs(tmp_path) -> Path:
    """A folder of a user's own configuration files."""
    folder = tmp_path / "configs"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment/own.yaml").write_text(
        "# @package _global_\ndefaults: [override /model: tiny, override /prior: dummy, override /curriculum: own]\n"
        "stream: {num_workers: 0}\n"
    )
    (folder / "curriculum").mkdir()
    (folder / "curriculum/own.yaml").write_text("stages: {only: {steps: 3, rows: [40, 50], tables: 4}}\n")
    return folder
