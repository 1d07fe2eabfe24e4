"""The actions of tabicl-prior, which show and store the tables that a run would be trained on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from priors import PriorError, Table
from priors.dump import Request
from priors.real import hash_of_tables, real_tables
from tabicl_train.config.compose import compose, parse_options
from tabicl_train.config.options import PriorOptions
from tabicl_train.config.schema import RunConfig, configured_prior
from tabicl_train.console import counted, one_line
from tabicl_train.doors import plugins
from tabicl_train.errors import ConfigError, install, is_installed, require_matplotlib
from tabicl_train.outputs import (
    check_output,
    existing_problems,
    input_problems,
    make_folder,
    naming,
    output_problems,
)
from tabicl_train.stream.curriculum import Group, StepPlan, plan_step, stage_at
from tabicl_train.stream.steps import draw_table
from tabicl_train.training.planning import eligible_tables


def run_tables(config: RunConfig, count: int) -> Iterator[tuple[tuple[int, int], Table]]:
    """Yield the first tables of a run, one of each group, and their addresses (step, table)."""
    prior = configured_prior(config.prior)
    chosen: list[tuple[StepPlan, Group]] = []
    for step in range(config.total_steps):
        plan = plan_step(config.curriculum, config.model, config.seed, step, prior)
        chosen += [(plan, group) for group in plan.groups]
        if len(chosen) >= count:
            break
    for plan, group in tqdm(chosen[:count], unit="table", file=sys.stderr):
        index = group.tables[0]
        yield (plan.step, index), draw_table(prior, group.spec, config.seed, plan.step, index)


def print_description(config: RunConfig, args: Any) -> None:
    """Print a description of the real tables, if any, and distributions over the run's first tables."""
    from priors.inspection import describe_tables

    # Models are fitted to each table, which takes 0.2 s or more. With real tables fewer are enough, since the lines
    # about them say most already.
    has_real_tables = print_real_tables(config)
    count = args.tables or (20 if has_real_tables else 200)
    print(describe_tables(table for _, table in run_tables(config, count)))


def print_real_tables(config: RunConfig) -> bool:
    """Print which real tables there are, which are left out and why, and how many are long enough.

    Returns whether the prior draws from real tables.
    """
    prior = configured_prior(config.prior)
    real = real_tables(prior)
    if real is None:
        return False
    lines = eligible_tables(config.curriculum, prior, config.model.is_regression)
    print("\n".join(map(one_line, [*real.describe(most=100), *lines])), flush=True)
    return True


def gallery(config: RunConfig, args: Any) -> None:
    """Save pictures of the run's first tables."""
    require_matplotlib()
    from priors.inspection import save_gallery

    # The output as it was given, and what is written with its name: a picture and a page.
    picture = Path(args.output or f"{config.prior['name']}.png")
    inputs = input_files(config)
    for path in (picture, picture.with_suffix(".png"), picture.with_suffix(".html")):
        problems = input_problems("output", path, inputs)
        if problems:
            raise ConfigError(problems)
        check_output(path)

    tables = []
    for (step, index), table in run_tables(config, args.tables or 24):
        tables.append((f"step {step}, table {index}", table))
    with naming(picture):
        written = save_gallery(tables, picture)
    for path in written:
        print(path)


def input_files(config: RunConfig) -> list[tuple[str, Path]]:
    """List the files of real tables that the prior reads, each with the setting that names it."""
    files = []
    for setting, path in config.table_inputs:
        if path.is_file():
            files.append((setting, path))
        else:
            files += [(setting, file) for file in path.rglob("*")]
    return files


def show(config: RunConfig, args: Any) -> None:
    """Print the plan and the first rows of the table at an address."""
    # The step and the table must exist.
    if not 0 <= args.step < config.total_steps:
        raise ConfigError([f"step is {args.step}; the run has steps 0..{config.total_steps - 1}"])
    prior = configured_prior(config.prior)
    plan = plan_step(config.curriculum, config.model, config.seed, args.step, prior)
    specs = [group.spec for group in plan.groups if args.table in group.tables]
    if not specs:
        raise ConfigError([f"table is {args.table}; a step has the tables 0..{plan.tables - 1}"])

    # The plan, the first five rows and the first twelve columns.
    spec = specs[0]
    table = draw_table(prior, spec, config.seed, plan.step, args.table)
    print(one_line(f"seed {config.seed}, step {args.step}, table {args.table} (stage {plan.stage}): {spec}"))
    print(f"rejected draws before it: {dict(table.rejections) or 'none'}\n")
    for line in str(table.plan).split("\n"):
        print(one_line(line))
    print()
    for row, target in zip(table.X[:5].tolist(), table.y[:5].tolist(), strict=True):
        values = " ".join(f"{value:8.3f}" for value in row[:12])
        more = " ..." if len(row) > 12 else ""
        print(f"y {target:.4g}   X {values}{more}")


def dump(config: RunConfig, args: Any) -> None:
    """Write the tables of some steps of the run to a folder, or to one file for other programs."""
    problems = []
    if args.output is None:
        problems.append("output is missing; it must name the folder or file for the tables")
    if not is_installed("h5py"):
        problems.append(f"dump needs h5py: {install('h5py', 'hdf5')}")
    if not 0 <= args.first_step < config.total_steps:
        problems.append(f"first_step is {args.first_step}; the run has steps 0..{config.total_steps - 1}")
    if problems:
        raise ConfigError(problems)
    steps = range(args.first_step, min(args.first_step + args.steps, config.total_steps))
    settings = {
        "max_classes": config.model.max_classes,
        "processes": args.processes,
        "prepare": load_plugins(),
        "facts": facts_about(config),
    }
    if args.format == "file":
        write_file(config, args, steps, settings)
    else:
        write_folder(config, args, steps, settings)


def write_folder(config: RunConfig, args: Any, steps: range, settings: dict[str, Any]) -> None:
    """Write the tables of some steps to a folder."""
    from priors.dump import FILE_STEPS, dump_folder

    # A file holds a fixed range of steps. Two machines that write parts of one file would lose each other's tables.
    if args.first_step % FILE_STEPS:
        multiple = f"a multiple of {FILE_STEPS}, the steps of a file"
        raise ConfigError([f"first_step is {args.first_step}; it must be {multiple}"])
    make_folder("output", Path(args.output))
    first_table = config.curriculum.tables_before(steps.start)
    counts = dump_folder(
        configured_prior(config.prior),
        functools.partial(requests_of, config),
        steps,
        first_table,
        args.output,
        **settings,
    )
    tables = config.curriculum.tables_before(steps.stop) - first_table
    files = [f"{counted(count, 'file')} {outcome}" for outcome, count in sorted(counts.items())]
    print(f"{args.output}: {tables} tables of steps {steps[0]}..{steps[-1]}; {', '.join(files)}")


def write_file(config: RunConfig, args: Any, steps: range, settings: dict[str, Any]) -> None:
    """Write the tables of some steps to one file for other programs, nanoTabPFN and TFM-Playground."""
    from priors.dump import dump_file, mixed_rows

    # Check the output, and whether these programs can read such tables.
    problems = output_problems("output", args.output) + existing_problems("output", args.output, args.overwrite)
    problems += input_problems("output", args.output, input_files(config))
    if config.model.missing_values:
        problems.append("the network reads missing values; nanoTabPFN and TFM-Playground cannot read missing values")
    if problems:
        raise ConfigError(problems)

    # They read batches of consecutive tables, which must have equal numbers of rows and labeled rows.
    requests = [request for step in steps for request in requests_of(config, step)]
    batch_size = stage_at(config.curriculum, steps[0])[1].tables
    shapes = [(spec.num_rows, spec.train_size) for _, spec in requests]
    for first in range(0, len(shapes), batch_size):
        problem = mixed_rows(shapes[first : first + batch_size], first)
        if problem:
            advice = "set curriculum.stages.NAME.group_size to the tables of a step"
            raise ConfigError([f"{problem}: {advice}"])

    dump_file(configured_prior(config.prior), requests, args.output, batch_size, **settings)
    print(f"{args.output}: {len(requests)} tables of steps {steps[0]}..{steps[-1]}")
    if len(set(shapes)) > 1:
        loaders = "nanoTabPFN and TFM-Playground"
        print(f"{loaders} must read it with batch_size={batch_size} or a divisor: batches differ in rows or split")


def requests_of(config: RunConfig, step: int) -> list[Request]:
    """Return the address and the specification of each table of a step, in order."""
    plan = plan_step(config.curriculum, config.model, config.seed, step, configured_prior(config.prior))
    specs = {index: group.spec for group in plan.groups for index in group.tables}
    return [((config.seed, step, index), specs[index]) for index in range(plan.tables)]


def facts_about(config: RunConfig) -> dict[str, str]:
    """Return what a dump records about its tables in addition to the options of the prior."""
    facts = {"name": config.prior["name"]}
    fingerprint = hash_of_tables(configured_prior(config.prior))
    if fingerprint is not None:
        facts["real_tables"] = fingerprint
    for record, _ in plugins.uses(config.plugins_used(), ["prior"]):
        facts[f"plug-in {record['module']}"] = record["sha256"]
    return facts


def load_plugins() -> Callable[[], object]:
    """Return a function that imports the plug-ins, for a process that is going to unpickle a prior of one."""
    return functools.partial(plugins.load, [plugin.argument for plugin in plugins.named()])


ACTIONS = {"describe": print_description, "gallery": gallery, "show": show, "dump": dump}


def act(action: str, arguments: list[str], config_dir: str | None) -> None:
    """Run the action of a command line.

    Parameters
    ----------
    action : str
        One of ACTIONS.
    arguments : list of str
        Options of the action and settings of the run.
    config_dir : str or None
        A folder of configuration files of the user.

    Raises
    ------
    ConfigError
        With all problems.
    """
    # Which of the arguments are options of the action; the others are settings of the run.
    option_names = {field.name for field in dataclasses.fields(PriorOptions)}
    options = []
    settings = []
    for text in arguments:
        name, _, _ = text.partition("=")
        if name in option_names:
            options.append(text)
        else:
            settings.append(text)
    args = parse_options(PriorOptions, options)
    if action not in ACTIONS:
        raise ConfigError([f"there is no action {action!r}; there are {', '.join(ACTIONS)}"])

    # Validations are switched off: the actions are about training tables.
    try:
        config = compose([*settings, "validation.every=0", "validation.patience=0"], config_dir, option_names)
    except ConfigError as error:  # such as no real table that is as long as the curriculum asks for
        if action == "describe" and isinstance(error.config, RunConfig):
            with contextlib.suppress(PriorError):
                print_real_tables(error.config)
        raise
    try:
        ACTIONS[action](config, args)
    except PriorError as error:
        raise ConfigError([str(error)]) from None
