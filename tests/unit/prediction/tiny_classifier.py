"""A tiny network, as such and in a file, and a table with columns of every type."""

import tempfile

import numpy as np
import pandas as pd
from networks import TINY, tiny_network

from tabicl_train import TabICLClassifier
from tabicl_train.weights.export import save_public

NETWORK = tiny_network()
FOLDER = tempfile.TemporaryDirectory()
FILE = f"{FOLDER.name}/tiny.ckpt"
save_public(TINY, NETWORK.state_dict(), FILE)
ROWS = 60


def classifier(**options) -> TabICLClassifier:
    return TabICLClassifier(NETWORK, **{"n_estimators": 3, **options})


def table(rows: int = ROWS) -> tuple[pd.DataFrame, np.ndarray]:
    rng = np.random.default_rng(0)
    X = pd.DataFrame(
        {
            "number": rng.normal(size=rows),
            "string": rng.choice(["x", "y", "z"], rows),
            "boolean": rng.random(rows) < 0.5,
            "ordered": pd.Categorical(rng.choice(["lo", "mid", "hi"], rows), ["lo", "mid", "hi"], ordered=True),
            "integer": pd.array(rng.integers(0, 9, rows), dtype="Int64"),
            "time": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 999, rows), "D"),
        }
    )
    return X, rng.choice(["no", "yes", "maybe"], rows)
