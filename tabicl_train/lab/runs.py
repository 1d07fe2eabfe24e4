"""The runs of an experiment, trained as a sweep, and their scores, which are kept while they are made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from tqdm import tqdm

from tabicl_train.distributed.processes import watch_signals
from tabicl_train.errors import require_sweep_packages
from tabicl_train.lab import Failed, Preempted
from tabicl_train.lab.folder import Folder, markdown
from tabicl_train.statistics import Estimate

if TYPE_CHECKING:
    from tabicl_train.sweep.results import SweepRun

FEWEST_SEEDS = 3  # for a claim
NO_CLAIM = f"No claim is made with fewer than {FEWEST_SEEDS} seeds."

Row = dict[str, object]


def trained_runs(settings: list[str], folder: Path) -> list[SweepRun]:
    """The runs of a grid, trained unless they are, in its order, the last parameter and then the seed varying fastest.

    settings: as on the command line of tabicl-sweep; folder: of the sweep
    Raises Preempted after a signal, and Failed if any run has failed.
    """
    require_sweep_packages()
    from tabicl_train.sweep.plan import make_plan
    from tabicl_train.sweep.results import Sweep
    from tabicl_train.sweep.run import run_sweep

    plan = make_plan([*settings, f"run_dir={folder}"])
    if run_sweep(plan) == "preempted":
        raise Preempted
    points = plan.points
    runs = sorted(Sweep(folder).runs, key=lambda run: (points.index(run.params), run.seed))
    if failed := [run for run in runs if run.status != "finished"]:
        raise Failed(f"{len(failed)} of {len(runs)} runs have failed; the first is {failed[0].folder}")
    return runs


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


def shown(frame: pd.DataFrame, signed: bool = False) -> str:
    """A table of a page, whose cells are texts or Estimates, and whose columns may be numbers."""
    form = "+.3f" if signed else ".3f"
    frame = frame.map(lambda cell: format(cell, form) if isinstance(cell, Estimate) else str(cell))
    return markdown(frame.rename(columns=lambda name: name if isinstance(name, str) else f"{name:,}"))
