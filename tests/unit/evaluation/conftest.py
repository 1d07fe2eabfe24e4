"""Weights that tests of evaluations score."""

import pytest
from networks import TINY, tiny_network

from tabicl_train.weights.export import save_public


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.ckpt"
    save_public(TINY, tiny_network().state_dict(), path)
    return str(path)
