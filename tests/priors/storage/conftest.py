import shutil
from pathlib import Path

import pytest
from stored_tables import PRIOR, requests

from priors.storage.dump import dump


@pytest.fixture(scope="package")
def dumped(tmp_path_factory) -> Path:
    """Steps 0..9 in shards of four steps, drawn by two processes."""
    folder = tmp_path_factory.mktemp("dump") / "tables"
    assert dump(PRIOR, requests(0, 10), folder, shard_size=4, processes=2, total=40) == {"written": 3}
    return folder


@pytest.fixture
def folder(dumped, tmp_path) -> Path:
    """A copy of the stored tables, to be changed."""
    return shutil.copytree(dumped, tmp_path / "copy")
