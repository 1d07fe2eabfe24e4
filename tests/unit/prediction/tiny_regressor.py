"""A small regressor with random weights, as such and in a file, and a table with a numeric target."""

import tempfile

import numpy as np
from networks import small_network

from tabicl_train import TabICLRegressor
from tabicl_train.weights.export import save_public

NETWORK = small_network(max_classes=0, bias_free_ln=True).eval()
FOLDER = tempfile.TemporaryDirectory()
FILE = f"{FOLDER.name}/small.ckpt"
save_public(NETWORK.config, NETWORK.state_dict(), FILE)
LABELED = 40


def regressor(**options) -> TabICLRegressor:
    return TabICLRegressor(NETWORK, **{"n_estimators": 3, **options})


def numbers(rows: int = 60, features: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """X (rows, features), and the target of the first 40 rows."""
    rng = np.random.default_rng(0)
    return rng.uniform(-1, 1, size=(rows, features)), 7 + 3 * rng.normal(size=LABELED)
