"""What the experiments with sequences share: networks with softmax and with SSA, their errors by sigma and length."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from omegaconf import MISSING

from priors import TableSpec, build_prior
from tabicl_train.lab.folder import (
    HELD_OUT,
    Folder,
    Row,
    Runs,
    by_seed_and_table,
    markdown,
    score_all,
    trained_runs,
)
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack
from tabicl_train.prediction.predict import predict
from tabicl_train.statistics import Estimate, mean_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINED = 40  # rows of the longest sequence of training
SHIFT, LONG = 5, 5 * TRAINED  # sigma and rows at which the rules are compared
PLACES = [(1, TRAINED), (SHIFT, TRAINED), (1, LONG), (SHIFT, LONG)]  # (sigma, rows) of the tables of pages
SIGMAS = range(1, 11)  # standard deviations of the test sequences; 1 is that of training
LENGTHS = (10, 20, 40, 100, LONG)  # rows of the test sequences
SEQUENCES = 32  # of each block, for each sigma and length
BLOCKS = 10  # of test sequences, whose means the intervals are taken from
SMALL = [
    "seed=0",
    "model.num_blocks=1",
    *(f"curriculum.stages.sequences.{value}" for value in ("steps=2", "tables=4", "group_size=4")),
]


@dataclass
class SequenceOptions:
    """What both experiments can be asked."""

    folder: str = MISSING
    """Folder to write; the runs are inside, in runs/."""
    small: bool = False
    """Two steps of training, one seed, and a few test sequences."""


def scored(
    folder: Folder,
    options: SequenceOptions,
    variations: dict[str, list[str]],
    errors: Callable[[Network, str, Callable[..., Pack]], Row],
) -> pd.DataFrame:
    """Train and score the networks of the experiment's sweep under each variation of its settings.

    errors: of a network under a variation on what its third argument, `draw` of a sigma, length and block, draws
    returns: a row for each run, sigma, length and block: also variation, rule, seed, and the errors
    """
    runs: Runs = {}
    for name, settings in list(variations.items())[: 1 if options.small else None]:
        settings = [f"sweep={folder.experiment}", *settings, *(SMALL if options.small else [])]
        own = trained_runs(settings, folder.path / "runs" / name.replace(" ", "_"))
        runs |= {f"{name}/{run}": ({"variation": name} | known, path) for run, (known, path) in own.items()}
    count, blocks = (2, 2) if options.small else (SEQUENCES, BLOCKS)

    def score(network: Network, known: Row, sigma: int, length: int) -> list[Row]:
        draws = [functools.partial(draw, count, sigma, length, block) for block in range(blocks)]
        return [{"block": b} | errors(network, str(known["variation"]), own) for b, own in enumerate(draws)]

    tests = itertools.product(*(([1, SHIFT], [TRAINED, LONG]) if options.small else (SIGMAS, LENGTHS)))
    return score_all(folder, runs, ["sigma", "length"], tests, score)


def draw(count: int, sigma: int, length: int, block: int, prior: str, classes: int, **settings) -> Pack:
    """Test sequences of a prior, the same ones for all networks."""
    spec, source = TableSpec(length, length // 2, 1, classes), build_prior(prior, sigma=float(sigma), **settings)
    tables = (source.sample(spec, (HELD_OUT, sigma, length, block, number)) for number in range(count))
    return Pack.of((table.X, table.y, table.train_size) for table in tables)


def predicted(network: Network, pack: Pack) -> torch.Tensor:
    """Predictions of sequences of equal length, (sequences, rows, outputs) float64."""
    return predict(network, pack).double().unflatten(0, (len(pack), -1))


def values(scores: pd.DataFrame, column: str, **where) -> np.ndarray:
    """The errors of the rows whose columns have the values `where`, (seeds, blocks)."""
    chosen = scores[np.logical_and.reduce([scores[name] == value for name, value in where.items()])]
    return by_seed_and_table(chosen, column, "block")


def comparison(scores: pd.DataFrame, columns: dict[str, str], form: str, highest: float = np.inf) -> str:
    """Mean errors with intervals at PLACES, a row for each variation, rule and column; columns: with their titles."""
    rows = []
    for (variation, rule), own in scores.groupby(["variation", "rule"], sort=False):
        for column, title in columns.items():
            found = [values(own, column, sigma=sigma, length=length) for sigma, length in PLACES]
            texts = (format(mean_interval(means, 0.0, highest), form) for means in found)
            rows.append([f"{rule}, {variation}{title}", *texts])
    header = ["network", *(f"sigma {sigma}, {length} rows" for sigma, length in PLACES)]
    return markdown(pd.DataFrame(rows, columns=header))


def undecided(scores: pd.DataFrame, column: str, most: float, **where) -> str | None:
    """Why no claim is decided: a rule's mean error exceeds `most` where tests are as in training; else None."""
    where |= {"sigma": 1, "length": TRAINED}
    found = {rule: mean_interval(values(scores, column, rule=rule, **where), 0.0) for rule in scores["rule"].unique()}
    if max(error.mean for error in found.values()) <= most:
        return None
    reached = " and ".join(f"{error:.2g} with {rule}" for rule, error in found.items())
    return (
        f"not decided at this size: in the trained range (sigma 1, {TRAINED} rows) the error is {reached}, and one of "
        f"at most {most:g} would show that the task is learned. That takes more steps or larger networks"
    )


def contrast(scores: pd.DataFrame, column: str, share: float, **where) -> Estimate:
    """SSA's error minus this share of softmax's on the same sequences, in the rows that have the values `where`."""
    softmax, ssa = (values(scores, column, rule=rule, **where) for rule in ("softmax", "SSA"))
    return mean_interval(ssa - share * softmax)


def heat_maps(scores: pd.DataFrame, columns: dict[str, str], logarithmic: bool) -> Figure:
    """Errors by sigma and length, a row of maps for each variation and column, a map for each rule.

    columns: of the scores, with their titles
    logarithmic: colors tell the common logarithm of the error; otherwise the error, 0 to 0.5
    """
    from matplotlib.figure import Figure

    rows = list(itertools.product(scores["variation"].unique(), columns))
    rules = list(scores["rule"].unique())
    figure = Figure(figsize=(1 + 4 * len(rules), 2.6 * len(rows)), layout="constrained")
    means = {
        (variation, column, rule): own.pivot_table(index="length", columns="sigma", values=column)
        for (variation, rule), own in scores.groupby(["variation", "rule"])
        for column in columns
    }
    shown = {key: np.log10(mean.clip(lower=1e-6)) if logarithmic else mean for key, mean in means.items()}
    every = np.concatenate([mean.to_numpy().ravel() for mean in shown.values()])
    low, high = (every.min(), every.max()) if logarithmic else (0.0, 0.5)
    for grid, (variation, column) in zip(figure.subplots(len(rows), len(rules), squeeze=False), rows, strict=True):
        for axes, rule in zip(grid, rules, strict=True):
            mean = shown[variation, column, rule]
            image = axes.imshow(mean, aspect="auto", origin="lower", cmap="viridis", vmin=low, vmax=high)
            axes.set_xticks(range(mean.shape[1]), mean.columns)
            axes.set_yticks(range(mean.shape[0]), mean.index)
            axes.set(title=f"{rule}, {variation}{columns[column]}", xlabel="sigma", ylabel="rows")
    figure.colorbar(image, ax=figure.axes, label="log10 of the error" if logarithmic else "error", shrink=0.6)
    return figure
