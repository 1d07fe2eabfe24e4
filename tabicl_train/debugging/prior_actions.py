"""The actions of tabicl-prior: looking at, measuring and storing the tables that a run would be trained on."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from priors import Table
from tabicl_train.config.checks import at_least
from tabicl_train.config.schema import RunConfig, build_prior
from tabicl_train.curriculum import plan_step, stage_at
from tabicl_train.errors import ConfigError, install, require_matplotlib
from tabicl_train.run_dir.outputs import check_output, make_folder
from tabicl_train.stream import draw_table


def run_tables(config: RunConfig, count: int) -> Iterator[tuple[tuple[int, int], Table]]:
    """The first tables of a run with their addresses (step, table); a group's tables once, as they are alike."""
    prior = build_prior(config)
    addresses = (
        (step, batch)
        for step in range(config.total_steps)
        for batch in plan_step(config.curriculum, config.model, config.seed, step).micro_batches
    )
    for step, batch in tqdm(itertools.islice(addresses, count), total=count, unit="table", file=sys.stderr):
        index = batch.tables[0]
        yield (step, index), draw_table(prior, batch, config.seed, step, index)


def describe(config: RunConfig, told: Any) -> None:
    from priors.inspection.describe import describe as write

    print(write(table for _, table in run_tables(config, told.tables or 200)))


def gallery(config: RunConfig, told: Any) -> None:
    require_matplotlib()
    from priors.inspection.gallery import save_gallery

    picture = Path(told.output or f"{config.prior['name']}.png")
    for path in (picture, picture.with_suffix(".png"), picture.with_suffix(".html")):
        check_output(path)
    tables = [(f"step {s}, table {i}", table) for (s, i), table in run_tables(config, told.tables or 24)]
    for path in save_gallery(tables, picture):
        print(path)


def show(config: RunConfig, told: Any) -> None:
    if not 0 <= told.step < config.total_steps:
        raise ConfigError([f"step is {told.step}; the run has the steps 0..{config.total_steps - 1}"])
    plan = plan_step(config.curriculum, config.model, config.seed, told.step)
    batch = next((b for b in plan.micro_batches if told.table in b.tables), None)
    if batch is None:
        raise ConfigError([f"table is {told.table}; a step has the tables 0..{plan.tables - 1}"])
    table = draw_table(build_prior(config), batch, config.seed, told.step, told.table)
    print(f"seed {config.seed}, step {told.step}, table {told.table} (stage {plan.stage}): {batch.spec}")
    print(f"draws rejected before it: {dict(table.rejections) or 'none'}\n\n{table.plan}\n")
    for row, label in list(zip(table.X.tolist(), table.y.tolist(), strict=True))[:5]:
        print(f"y {label}   X " + " ".join(f"{value:8.3f}" for value in row[:12]) + (" ..." if len(row) > 12 else ""))


def bench(config: RunConfig, told: Any) -> None:
    from priors.inspection.bench import measure, own_tables, released_tables

    if told.peer not in (None, "tabicl"):
        raise ConfigError([f"peer is {told.peer!r}; it must be tabicl"])
    if told.peer:
        try:
            import tabicl.prior  # noqa: F401
        except ImportError as error:  # it imports packages that it does not install
            packages = "tabicl==2.2.0 xgboost-cpu"
            raise ConfigError([f"peer=tabicl needs {error.name}: {install(packages, 'test')}"]) from None
    name = config.prior["name"]
    released = f"{'released':>10}{'ratio':>8}" if told.peer else ""
    print(f"{'prior':12}{'rows':>8}{'tables/s':>10}{'cells/s':>12}{released}")
    for rows in told.rows:
        sources = [own_tables(build_prior(config), rows, *told.features, seed=config.seed)]
        if told.peer:
            sources.append(released_tables(name, rows, *told.features, seed=config.seed))
        own, *peer = measure(sources, told.tables or 10, told.rounds)
        line = f"{name:12}{rows:>8}{own.tables_per_s:>10.2f}{own.cells_per_s:>12.3g}"
        print(line + "".join(f"{p.tables_per_s:>10.2f}{own.tables_per_s / p.tables_per_s:>8.1f}" for p in peer))


def dump(config: RunConfig, told: Any) -> None:
    from priors.storage.shards import SHARD_SIZE
    from priors.storage.shards import dump as write

    if told.output is None:
        raise ConfigError(["output is missing; it is the folder that the tables are written to"])
    found = at_least(1, steps=told.steps, processes=told.processes)
    if not 0 <= told.first_step < config.total_steps:
        found.append(f"first_step is {told.first_step}; the run has the steps 0..{config.total_steps - 1}")
    if told.first_step % SHARD_SIZE:  # two machines that write one file would lose each other's tables
        found.append(f"first_step is {told.first_step}; it must be a multiple of {SHARD_SIZE}, the steps of a file")
    if found:
        raise ConfigError(found)
    make_folder("output", Path(told.output))
    steps = range(told.first_step, min(told.first_step + told.steps, config.total_steps))
    tables = sum(stage_at(config.curriculum, step)[1].tables for step in steps)
    requests = (
        ((config.seed, step, index), batch.spec)
        for step in steps
        for batch in plan_step(config.curriculum, config.model, config.seed, step).micro_batches
        for index in batch.tables
    )
    outcome = write(build_prior(config), requests, told.output, processes=told.processes, total=tables)
    shards = ", ".join(f"{count} shards {what}" for what, count in sorted(outcome.items()))
    print(f"{told.output}: {tables} tables of steps {steps[0]}..{steps[-1]}; {shards}")


ACTIONS = {"describe": describe, "gallery": gallery, "show": show, "bench": bench, "dump": dump}
