"""Do two versions of the priors accept the same distribution of tables? A classifier tries to tell them apart.

python tests/benchmarks/compare_versions.py draw=old.csv seed=0 [experiment=demo] [stage=short] [tables=1000]
python tests/benchmarks/compare_versions.py old.csv new.csv

The first command stores the statistics of the tables of a stage. It is run with each version, with different seeds:
tables that both have would hide a difference, since the classifier has seen them with the other label. The second
command prints what compare_graph_scm.py prints, the ROC AUC by chance, and the shares of components and numbers of
classes.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
from compare_graph_scm import report, statistics, tell_apart
from profile_prior import specs_of

from priors.random import one_thread
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior

REPEATS = 20  # random halves of the tables that are compared with each other, for the ROC AUC by chance


def draw(path: Path, experiment: str, stage: str, tables: int, seed: int) -> None:
    """Store the statistics of the tables of a stage, with their components of the prior."""
    config = compose([f"experiment={experiment}"])
    prior = configured_prior(config.prior)
    rows = []
    for spec, address in islice(specs_of(config, stage, seed), tables):
        table = prior.sample(spec, address)
        found = statistics((table.X.numpy(), table.y.numpy(), table.train_size))
        rows.append({"component": table.source[0] if table.source else "alone", **found})
    pd.DataFrame(rows).to_csv(path, index=False)


def compare(old: pd.DataFrame, new: pd.DataFrame) -> None:
    """Print the comparison of the statistics of two versions."""
    names = [name for name in old if name != "component"]
    report(new[names].to_dict("records"), old[names].to_dict("records"))

    # The ROC AUC by chance: tables of both versions, mixed and divided at random.
    both = np.round(np.concatenate([old[names], new[names]]), 4)
    rng = np.random.default_rng(0)
    by_chance = []
    for _ in range(REPEATS):
        shuffled = rng.permutation(both)
        by_chance.append(tell_apart(shuffled[: len(old)], shuffled[len(old) :])[0])
    low, high = np.quantile(by_chance, [0.05, 0.95])
    print(f"by chance {np.mean(by_chance):.3f}, 90 % of {REPEATS} within {low:.3f} to {high:.3f}")

    for name in ("component", "classes"):
        if name in old:
            shares = pd.DataFrame({"old": old[name].value_counts(), "new": new[name].value_counts()}).fillna(0)
            print((shares / [len(old), len(new)]).round(3).to_string())


if __name__ == "__main__":
    options = dict(argument.split("=") for argument in sys.argv[1:] if "=" in argument)
    files = [argument for argument in sys.argv[1:] if "=" not in argument]
    if files:
        compare(*map(pd.read_csv, files))
    else:
        with one_thread():
            draw(
                Path(options["draw"]),
                options.get("experiment", "demo"),
                options.get("stage", "short"),
                int(options.get("tables", 1000)),
                int(options.get("seed", 0)),
            )
