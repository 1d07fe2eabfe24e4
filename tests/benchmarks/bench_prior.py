"""Accepted tables per second of graph_scm and of the released generator: one thread, in turn, in one process.

python tests/benchmarks/bench_prior.py [rows=1024] [tables=20] [rounds=7] [preset=released] [task=classification]
"""

from __future__ import annotations

import sys
from statistics import median

import numpy as np

from priors import build_prior
from priors.inspection.bench import measure, own_tables, released_tables

if __name__ == "__main__":
    args = {"rows": "1024", "tables": "20", "rounds": "7", "preset": "released", "task": "classification"}
    args |= dict(argument.split("=") for argument in sys.argv[1:])
    rows, tables, rounds = (int(args[name]) for name in ("rows", "tables", "rounds"))
    prior = build_prior("graph_scm", preset=args["preset"])
    max_classes = {"classification": 10, "regression": 0}[args["task"]]
    sources = [
        own_tables(prior, rows, max_classes=max_classes),
        released_tables("graph_scm", rows, max_classes=max_classes),
    ]
    ours, released = measure(sources, tables, rounds)
    for name, speed in (("graph_scm", ours), ("released", released)):
        print(f"{name:10} {speed.tables_per_s:8.2f} tables/s {speed.cells_per_s / 1e6:8.3f} M cells/s at {rows} rows")
    pairs = np.array([released.seconds, ours.seconds])
    ratios = pairs[0] / pairs[1]
    drawn = np.random.default_rng(0).integers(rounds, size=(2000, rounds))  # rounds drawn with replacement
    low, high = np.quantile(pairs[0][drawn].sum(1) / pairs[1][drawn].sum(1), [0.05, 0.95])
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    print(f"ratio {median(ratios):.1f} (median of {rounds} rounds of {tables} tables; {spread})")
    print(f"ratio of sums {pairs[0].sum() / pairs[1].sum():.1f} (90 % interval, bootstrap: {low:.1f} to {high:.1f})")
