"""Scores of several networks on the same tables: kept while they are made, and in arrays for their means."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import numpy as np
import pandas as pd
from tqdm import tqdm

from tabicl_train.distributed.signals import watch_signals
from tabicl_train.lab.folder import Folder
from tabicl_train.lab.runs import Preempted

FEWEST_SEEDS = 3  # for a claim
NO_CLAIM = f"No claim is made with fewer than {FEWEST_SEEDS} seeds."

Row = dict[str, object]


def score_all(
    folder: Folder, name: str, keys: list[str], units: Iterable[tuple[Hashable, ...]], score: Callable[..., list[Row]]
) -> pd.DataFrame:
    """NAME.csv with the scores of all units; those that it already holds are not made again.

    units: for each, the values of `keys`
    score: rows of a unit, which also gets the keys' columns
    Raises Preempted after a signal; the units until then are kept.
    """
    path = folder.path / f"{name}.csv"
    found = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=keys)
    done, units = set(found[keys].itertuples(index=False, name=None)), list(units)
    left = [unit for unit in units if unit not in done]
    with watch_signals() as stop:
        for unit in tqdm(left, initial=len(units) - len(left), total=len(units), unit="table"):
            if stop.asked:
                raise Preempted
            rows = [dict(zip(keys, unit, strict=True)) | row for row in score(*unit)]
            found = pd.concat([found, pd.DataFrame(rows)], ignore_index=True) if len(found) else pd.DataFrame(rows)
            folder.csv(name, found)
    wanted = pd.MultiIndex.from_tuples(units, names=keys)
    return found[pd.MultiIndex.from_frame(found[keys]).isin(wanted)].reset_index(drop=True)


def by_seed_and_table(rows: pd.DataFrame, column: str, table: str = "table") -> np.ndarray:
    """A column of the scores of one kind of network, (seeds, tables); `table` is the column that tells tables apart."""
    return rows.pivot_table(index="seed", columns=table, values=column).to_numpy(float)
