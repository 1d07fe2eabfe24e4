"""Tables for your own training loop: the stream that a run trains on, as a torch dataset."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from priors import Prior, PriorError, build_prior
from priors.options import check
from tabicl_train.config.checks import other_sizes
from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.family import NetworkConfig
from tabicl_train.stream.steps import StepItem, StepStream

__all__ = ["Batch", "TableStream"]

ENDLESS = sys.maxsize  # steps of a stream without an end


class Batch(NamedTuple):
    """Tables of one shape: B tables with N rows, the first n of them labeled, and M features."""

    X: Tensor
    """float32 (B, N, M); a table whose constant columns were dropped has zeros in the last columns."""
    y: Tensor
    """(B, N), the labels of all rows: classes, int64, or numbers, float32. A network may see `y[:, :n]`."""
    n: int
    """Labeled rows."""
    features: Tensor
    """int64 (B,), the columns of each table that are not zeros."""


class TableStream(IterableDataset):
    """The steps of your own training loop, drawn from a prior.

    An item holds the tables of one step. Table i of step s is a pure function of (seed, s, i), so the items and their
    order are the same for any number of workers: `DataLoader(stream, batch_size=None, num_workers=2)`.

    Parameters
    ----------
    prior : str, mapping or Prior
        The name of a registered prior, its options with its `name` as in `RunConfig.prior`, or a prior.
    curriculum : CurriculumConfig, optional
        Sizes and number of the tables of each step, as in `RunConfig.curriculum`. Default: a stream of equal steps,
        set by the next four parameters.
    rows : int or (int, int), optional
        Rows of a table, labeled and query rows together, or their range. Default: 128.
    features : int or (int, int), optional
        Features of a table, or their range. Constant columns are dropped, so a table may have fewer. Default: 10.
    labeled_share : float or (float, float), optional
        Share of the rows that are labeled, or its range. Default: 0.5.
    tables : int, optional
        Tables of a step, all with the same rows, labeled rows and features. Default: 32.
    model : NetworkConfig, optional
        Settings of the network. The stream depends on its max_classes (0 for numbers), its missing_values and its
        costs, which decide how packs are divided. Default: those of TabICL, with ten classes.
    seed : int
        Seed of the tables.
    start : int
        The first step, such as the next one of a loop that is continued.
    stop : int, optional
        The step after the last one. Default: the end of the curriculum, or of the tables of a prior that stores them;
        equal steps of other priors do not end.
    dense : bool
        Whether items are batches of equal tables, for networks that take X (B, N, M).
    rank, ranks : int
        Which share of the tables of each step to draw, if several processes train; not with `dense`.

    Yields
    ------
    StepItem or Batch
        A step, with its packs and the number of its tables over all ranks; or, with `dense`, a batch.

    Raises
    ------
    ConfigError
        With everything that is wrong with the arguments.
    PriorError
        If the prior or one of its options does not exist.

    Examples
    --------
    >>> stream = TableStream("mlp_scm", rows=150, features=5, tables=32, dense=True)
    >>> X, y, n, _ = next(iter(stream))
    >>> X.shape, y.shape, n
    (torch.Size([32, 150, 5]), torch.Size([32, 150]), 75)
    """

    def __init__(
        self,
        prior: str | Mapping[str, Any] | Prior,
        curriculum: CurriculumConfig | None = None,
        *,
        rows: int | tuple[int, int] | None = None,
        features: int | tuple[int, int] | None = None,
        labeled_share: float | tuple[float, float] | None = None,
        tables: int | None = None,
        model: NetworkConfig | None = None,
        seed: int = 0,
        start: int = 0,
        stop: int | None = None,
        dense: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__()
        # The sizes of tables: from the curriculum, or from the arguments for equal steps.
        sizes = {"rows": rows, "features": features, "labeled_share": labeled_share, "tables": tables}
        given = [name for name, value in sizes.items() if value is not None]
        problems = []
        has_equal_steps = curriculum is None
        if curriculum is None:
            number = 32 if tables is None else tables
            stage = StageConfig(
                steps=ENDLESS,
                rows=lowest_and_highest(128 if rows is None else rows),
                features=lowest_and_highest(10 if features is None else features),
                train_share=lowest_and_highest(0.5 if labeled_share is None else labeled_share),
                tables=number,
                # At least 1, so that a wrong number is reported once, as `tables`.
                group_size=max(1, number),
                pack_tokens=ENDLESS,
            )
            curriculum = CurriculumConfig({"tables": stage})
            problems = [line.replace("train_share", "labeled_share") for line in check(stage)]
        else:
            problems = check(curriculum, "curriculum")
            if given:
                problems.append(f"{', '.join(given)}: the curriculum sets the sizes of tables; leave out one of them")

        # The steps, and the share of this rank.
        last = sum(stage.steps for stage in curriculum.stages.values())
        stop = last if stop is None else stop
        if not 0 <= start <= stop <= last:
            end = "" if last == ENDLESS else f", and the curriculum ends at {last:,}"
            problems.append(f"start is {start} and stop is {stop}; they must satisfy 0 <= start <= stop{end}")
        if not 0 <= rank < ranks:
            problems.append(f"rank is {rank}; it must lie in 0..ranks-1, where ranks is {ranks}")
        fewest_tables = min((stage.tables for stage in curriculum.stages.values()), default=0)
        # No tables at all are reported above.
        if 1 <= fewest_tables < ranks:
            problems.append(f"a step has {fewest_tables} tables, but ranks is {ranks}; each rank needs at least one")

        # A dense batch is one group on one rank.
        if dense:
            if ranks > 1:
                problems.append("dense is true, but dense batches are not divided among ranks; give each its own seed")
            for name, stage in curriculum.stages.items():
                if stage.group_size < stage.tables:
                    sizes_of_groups = f"group_size is {stage.group_size} and tables {stage.tables}"
                    problems.append(f"stages.{name}: {sizes_of_groups}; a dense batch needs one group in each step")
        if problems:
            raise ConfigError(problems)

        # The prior. If it has stored tables, their sizes must be those asked for.
        if isinstance(prior, str):
            prior = build_prior(prior)
        elif not isinstance(prior, Prior):
            prior = build_prior(**prior)
        if prior.stored_sizes is not None:
            sized = [name for name in given if name != "tables"]
            problems = []
            if sized:
                problems.append(f"{', '.join(sized)}: stored tables have their own sizes; leave this out")
            elif not has_equal_steps:
                problems = [f"curriculum.{line}" for line in other_sizes(curriculum, prior)]
            if problems:
                raise ConfigError(problems)

        stop = min(stop, curriculum.whole_steps(prior))
        model = TabICLConfig() if model is None else model
        self.dense = dense
        self.stream = StepStream(prior, curriculum, model, seed, range(start, stop), rank, ranks)

    def __iter__(self) -> Iterator[StepItem | Batch]:
        """Yield the items of all steps; worker w of W in a DataLoader yields steps start + w, start + w + W, ..."""
        worker = get_worker_info()
        steps = self.stream.steps
        if worker is not None:
            steps = steps[worker.id :: worker.num_workers]
        for step in steps:
            item = self.stream.draw(step)
            yield as_batch(item) if self.dense else item


def lowest_and_highest(value: Any) -> list[Any]:
    """Return [lowest, highest] for a pair, or for a number, which is both."""
    return list(value) if isinstance(value, tuple | list) else [value, value]


def as_batch(item: StepItem) -> Batch:
    """Stack the tables of a step, which must have the same rows; missing columns become zeros at the end."""
    tables: list[tuple[Tensor, Tensor, int]] = []
    for pack in item.packs:
        tables += pack.tables()
    if len({(len(y), n) for _, y, n in tables}) > 1:  # tables from files
        raise PriorError(f"the tables of step {item.step} differ in rows or labeled rows; they cannot be stacked")
    _, y, n = tables[0]
    features = torch.tensor([X.shape[1] for X, _, _ in tables])
    dense_X = torch.zeros(len(tables), len(y), int(features.max()))
    for place, (X, _, _) in zip(dense_X, tables, strict=True):
        place[:, : X.shape[1]] = X
    return Batch(dense_X, torch.stack([y for _, y, _ in tables]), n, features)
