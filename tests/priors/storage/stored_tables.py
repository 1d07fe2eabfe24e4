"""Tables to store, and comparisons of stored tables with drawn ones."""

from collections import Counter
from pathlib import Path

import torch

from priors import Prior, TableSpec, build_prior
from priors.random import rng_at

SEED = 5
PRIOR = build_prior("mlp_scm")


def requests(start: int, stop: int, seed: int = SEED) -> list:
    """Two groups of two tables per step, of varying shape."""
    addresses = []
    for step in range(start, stop):
        rng = rng_at(seed, step)
        for first in (0, 2):
            rows, features = (int(value) for value in rng.integers((20, 1), (60, 6)))
            spec = TableSpec(rows, rows // 2, features, 3, group_seed=(seed, step, first))
            addresses += [((seed, step, index), spec) for index in (first, first + 1)]
    return addresses


def assert_same(table, live) -> None:
    assert table.X.dtype == torch.float32 and torch.equal(table.X, live.X)
    dtype = torch.int64 if live.num_classes else torch.float32
    assert table.y.dtype == live.y.dtype == dtype and torch.equal(table.y, live.y)
    assert (table.train_size, table.num_classes) == (live.train_size, live.num_classes)
    assert table.rejections == live.rejections and isinstance(table.rejections, Counter)
    assert table.plan == str(live.plan)


def assert_serves(folder: Path, requested: list, prior: Prior = PRIOR) -> None:
    disk = build_prior("disk", folder=str(folder))
    for address, spec in requested:
        assert_same(disk.sample(spec, address), prior.sample(spec, address))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of every file, which change when it is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
