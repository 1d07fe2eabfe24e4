"""What a GPU must do: the first tests to run when there is one, with `launch/test.sh gpu`.

DEVICE=cpu runs those that do not need CUDA itself, to check the tests.
"""

import copy
import os

import numpy as np
import pytest
import torch
from forked import run_ranks, train
from short_runs import run
from small_networks import small_network, tables_of

DEVICE = os.environ.get("DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]
