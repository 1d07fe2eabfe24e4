"""The actions of tabicl-prior: look at and store the tables that a run would be trained on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from priors import PriorError, Table
from priors.real import real_tables
from tabicl_train import plugins
from tabicl_train.config.compose import compose, parse_options
from tabicl_train.config.options import PriorOptions
from tabicl_train.config.prior_checks import eligible_tables
from tabicl_train.config.schema import RunConfig, build_prior
from tabicl_train.curriculum import plan_step, stage_at
from tabicl_train.errors import ConfigError, require_matplotlib
from tabicl_train.outputs import check_output, input_problems, make_folder, naming
from tabicl_train.stream import planned_table


def run_tables(config: RunConfig, count: int, **changes: Any) -> Iterator[tuple[tuple[int, int], Table]]:
    """Yield the first tables of a run, one of each group, and their addresses (step, table)."""
    # changes: of the TableSpec
    prior = build_prior(config.prior)
    plans = (plan_step(config.curriculum, config.model, config.seed, step) for step in range(config.total_steps))
    addresses = ((plan, group) for plan in plans for group in plan.groups)
    for plan, group in tqdm(list(itertools.islice(addresses, count)), unit="table", file=sys.stderr):
        index = group.tables[0]
        spec = dataclasses.replace(group.spec, **changes)
        yield (plan.step, index), planned_table(prior, plan, spec, config.seed, index)


def describe(config: RunConfig, args: Any) -> None:
    """Print a description of the real tables, if any, and distributions over the run's first tables."""
    from priors.inspection import describe as format_distributions

    # Models are fitted to each table, which takes 0.2 s or more. Of real tables, the lines above say most already.
    has_real_tables = print_real_tables(config)
    count = args.tables or (20 if has_real_tables else 200)
    print(format_distributions(table for _, table in run_tables(config, count)))


def print_real_tables(config: RunConfig) -> bool:
    """Print the real tables, which are left out and why, and how many are long enough; returns if there are any."""
    prior = build_prior(config.prior)
    real = real_tables(prior)
    if real is None:
        return False
    lines = eligible_tables(config.curriculum, prior, config.model.is_regression)
    print("\n".join([*real.describe(most=100), *lines]), flush=True)
    return True


def gallery(config: RunConfig, args: Any) -> None:
    """Save pictures of the run's first tables."""
    require_matplotlib()
    from priors.inspection import save_gallery

    picture = Path(args.output or f"{config.prior['name']}.png")
    inputs = input_files(config)
    for path in (picture, picture.with_suffix(".png"), picture.with_suffix(".html")):
        if problems := input_problems("output", path, inputs):
            raise ConfigError(problems)
        check_output(path)
    tables = [(f"step {s}, table {i}", table) for (s, i), table in run_tables(config, args.tables or 24)]
    with naming(picture):
        written = save_gallery(tables, picture)
    for path in written:
        print(path)


def input_files(config: RunConfig) -> list[tuple[str, Path]]:
    """List the files of real tables that the prior reads, each with its setting."""
    files = []
    for setting, path in config.table_inputs:
        files += [(setting, file) for file in ([path] if path.is_file() else path.rglob("*"))]
    return files


def show(config: RunConfig, args: Any) -> None:
    """Print the plan and the first rows of the table at an address."""
    if not 0 <= args.step < config.total_steps:
        raise ConfigError([f"step is {args.step}; the run has steps 0..{config.total_steps - 1}"])
    plan = plan_step(config.curriculum, config.model, config.seed, args.step)
    spec = next((group.spec for group in plan.groups if args.table in group.tables), None)
    if spec is None:
        raise ConfigError([f"table is {args.table}; a step has the tables 0..{plan.tables - 1}"])
    table = planned_table(build_prior(config.prior), plan, spec, config.seed, args.table)
    print(f"seed {config.seed}, step {args.step}, table {args.table} (stage {plan.stage}): {spec}")
    print(f"rejected draws before it: {dict(table.rejections) or 'none'}\n\n{table.plan}\n")
    for row, target in zip(table.X[:5].tolist(), table.y[:5].tolist(), strict=True):
        values = " ".join(f"{value:8.3f}" for value in row[:12])
        print(f"y {target:.4g}   X {values}" + (" ..." if len(row) > 12 else ""))


def dump(config: RunConfig, args: Any) -> None:
    """Write the tables of some steps of the run to shards."""
    # Shards are written whole, since two machines that each write some steps of one would lose each other's tables.
    # Only the last one may be shorter, at the end of the curriculum. If trainer.max_steps ends a run in the middle of a
    # shard, all steps of the shard are written.
    from priors.disk import SHARD_SIZE
    from priors.disk import dump as write_tables

    if args.output is None:
        raise ConfigError(["output is missing; it is the folder to write the tables to"])
    problems = []
    if not 0 <= args.first_step < config.total_steps:
        problems.append(f"first_step is {args.first_step}; the run has steps 0..{config.total_steps - 1}")
    if args.first_step % SHARD_SIZE:
        problems.append(f"first_step is {args.first_step}; it must be a multiple of {SHARD_SIZE}, the steps of a file")
    if args.steps % SHARD_SIZE and args.first_step + args.steps < config.total_steps:
        problems.append(
            f"steps is {args.steps}; it must be a multiple of {SHARD_SIZE}, the steps of a file, or reach the end of "
            f"the run ({config.total_steps} steps)"
        )
    for name, stage in config.curriculum.stages.items():
        if stage.uses > 1:
            problems.append(f"curriculum.stages.{name}.uses is {stage.uses}; set it in the run that reads the tables")
    if problems:
        raise ConfigError(problems)
    make_folder("output", Path(args.output))
    stop = min(args.first_step + args.steps, config.total_steps)
    whole_shards = -(-stop // SHARD_SIZE) * SHARD_SIZE
    curriculum_steps = sum(stage.steps for stage in config.curriculum.stages.values())
    steps = range(args.first_step, min(whole_shards, curriculum_steps))
    tables = sum(stage_at(config.curriculum, step)[1].tables for step in steps)
    requests = (
        ((config.seed, step, index), group.spec)
        for step in steps
        for group in plan_step(config.curriculum, config.model, config.seed, step).groups
        for index in group.tables
    )
    prior = build_prior(config.prior)
    facts = {"name": config.prior["name"]}
    real = real_tables(prior)
    if real is not None:
        facts["real_tables"] = real.fingerprint()
    for record, _ in plugins.uses(config.plugins_used(), ["prior"]):
        facts[f"plug-in {record['module']}"] = record["sha256"]
    # A process unpickles the prior, whose plug-in it must have imported before.
    prepare = functools.partial(plugins.load, [plugin.argument for plugin in plugins.named()])
    counts = write_tables(
        prior, requests, args.output, processes=args.processes, total=tables, prepare=prepare, facts=facts
    )
    shards = ", ".join(f"{count} shard{'s' * (count > 1)} {outcome}" for outcome, count in sorted(counts.items()))
    print(f"{args.output}: {tables} tables of steps {steps[0]}..{steps[-1]}; {shards}")


ACTIONS = {"describe": describe, "gallery": gallery, "show": show, "dump": dump}


def act(action: str, arguments: list[str], config_dir: str | None) -> None:
    """Run the action of a command line; raises ConfigError with all problems."""
    own = {field.name for field in dataclasses.fields(PriorOptions)}
    args = parse_options(PriorOptions, [text for text in arguments if text.partition("=")[0] in own])
    if action not in ACTIONS:
        raise ConfigError([f"there is no action {action!r}; there are {', '.join(ACTIONS)}"])
    settings = [text for text in arguments if text.partition("=")[0] not in own]
    try:
        config = compose([*settings, "validation.every=0", "validation.patience=0"], config_dir, own)
    except ConfigError as error:  # for example, no table is as long as the curriculum asks for
        if action == "describe" and isinstance(error.config, RunConfig):
            with contextlib.suppress(PriorError):
                print_real_tables(error.config)
        raise
    try:
        ACTIONS[action](config, args)
    except PriorError as error:
        raise ConfigError([str(error)]) from None
