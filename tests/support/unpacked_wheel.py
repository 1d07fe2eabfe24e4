"""The package as a user installs it: a wheel of the checkout, beside which no file of the checkout is found."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from hatchling.build import build_wheel; import sys; build_wheel(sys.argv[1])"


def unpack_wheel(folder: Path) -> Path:
    """Build a wheel in a folder, and return where it is unpacked; skips the test without what builds it."""
    pytest.importorskip("hatch_fancy_pypi_readme")
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")  # what pip does with a wheel of Python files
    return folder / "site"
