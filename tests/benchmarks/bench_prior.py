"""Accepted tables per second of a prior and of the released generator, in turn, in one process with one thread.

python tests/benchmarks/bench_prior.py [prior=graph_scm] [preset=released] [rows=1024] [tables=20] [rounds=7]
    [task=classification]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
from generators import PlainTable, own_tables, released_tables

from priors import build_prior
from priors.random import one_thread


@dataclass
class Speed:
    """CPU seconds, and cells of the tables, in each round."""

    tables_per_round: int
    seconds: list[float]
    cells: list[int]

    @property
    def tables_per_s(self) -> float:
        return median(self.tables_per_round / seconds for seconds in self.seconds)

    @property
    def cells_per_s(self) -> float:
        return median(cells / seconds for cells, seconds in zip(self.cells, self.seconds, strict=True))


def measure(
    sources: list[Iterator[PlainTable]], tables: int, rounds: int, clock: Callable = time.process_time
) -> list[Speed]:
    """Measure the speed of sources, which take turns.

    The CPU time of this process with one torch thread is measured, which is the speed of one core whatever else runs.

    Parameters
    ----------
    sources : list of iterator
        They yield tables. One table of each is drawn first to warm up.
    tables : int
        Tables of each source in a round.
    rounds : int
        Number of rounds.
    clock : callable, optional
        The clock, in seconds.

    Returns
    -------
    list of Speed
    """
    with one_thread():
        speeds = [Speed(tables, [], []) for _ in sources]
        for source in sources:
            next(source)
        for _ in range(rounds):
            for source, speed in zip(sources, speeds, strict=True):
                start = clock()
                drawn = [next(source) for _ in range(tables)]
                speed.seconds.append(clock() - start)
                speed.cells.append(sum(X.size for X, _, _ in drawn))
        return speeds


if __name__ == "__main__":
    args = {
        "prior": "graph_scm",
        "rows": "1024",
        "tables": "20",
        "rounds": "7",
        "preset": "released",
        "task": "classification",
    }
    args |= dict(argument.split("=") for argument in sys.argv[1:])
    rows, tables, rounds = (int(args[name]) for name in ("rows", "tables", "rounds"))
    name = args["prior"]
    prior = build_prior(name, **({"preset": args["preset"]} if name == "graph_scm" else {}))
    max_classes = {"classification": 10, "regression": 0}[args["task"]]
    sources = [
        own_tables(prior, rows, max_classes=max_classes),
        released_tables(name, rows, max_classes=max_classes),
    ]
    ours, released = measure(sources, tables, rounds)
    for label, speed in ((name, ours), ("released", released)):
        print(f"{label:10} {speed.tables_per_s:8.2f} tables/s {speed.cells_per_s / 1e6:8.3f} M cells/s at {rows} rows")
    pairs = np.array([released.seconds, ours.seconds])
    ratios = pairs[0] / pairs[1]
    drawn = np.random.default_rng(0).integers(rounds, size=(2000, rounds))  # rounds drawn with replacement
    low, high = np.quantile(pairs[0][drawn].sum(1) / pairs[1][drawn].sum(1), [0.05, 0.95])
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    print(f"ratio {median(ratios):.1f} (median of {rounds} rounds of {tables} tables; {spread})")
    print(f"ratio of sums {pairs[0].sum() / pairs[1].sum():.1f} (90 % interval, bootstrap: {low:.1f} to {high:.1f})")
