"""The commands. Each checks its arguments, reports everything that is wrong with them, and then exits with 2.

Slow imports (torch takes 2 s) are inside the functions that need them, so that --help is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from tabicl_train.console import first_line, info, one_line, print_line
from tabicl_train.doors import plugins
from tabicl_train.errors import (
    ConfigError,
    Diverged,
    ForeignExit,
    foreign_exits,
    install,
    is_installed,
    require_matplotlib,
    require_sweep_packages,
)
from tabicl_train.outputs import expand_home
from tabicl_train.signals import watch_signals
from tabicl_train.training.distributed.processes import (
    PREEMPTED,
    Launch,
    die_with_launcher,
    is_own_launch,
    is_rank,
    torchrun_problems,
)

if TYPE_CHECKING:
    from tabicl_train.config.options import SubmitOptions
    from tabicl_train.config.schema import RunConfig

# Exit codes: 0 success, 1 an error, 2 a wrong configuration, 75 preempted, 128 + N killed by a second stop signal N or,
# for SIGPIPE, because nobody reads the output.
EXIT_CONFIG = 2
FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk, or an exhausted quota
OPTIONS = ("--help", "--version", "--cfg", "--config-dir", "--multirun")  # with dashes; all others are settings
FORMAT_WARNING = warnings.formatwarning
NOTHING_CHOSEN = (
    "there are no settings; tabicl-train experiment=demo trains a small model in four and a half minutes, and "
    "tabicl-train run_dir=runs/mine the default, stage 1 of TabICLv2 with 500,000 steps"
)
NOTHING_VARIES = (
    "there are no settings; tabicl-sweep sweep=learning_rate_width runs a sweep from a file, and tabicl-train -m "
    "experiment=demo seed=0,1 a run for each seed"
)


@contextlib.contextmanager
def plain_end() -> Iterator[None]:
    """End a command without a stack trace.

    This is for wrong arguments, ctrl-C, a full disk, and output that nobody reads. The name of a file that is too long
    counts as a wrong argument, whatever option it belongs to.
    """
    # How errors, warnings and text are printed.
    sys.excepthook = print_trace
    warnings.formatwarning = format_warning
    # By default, Python shows warnings about old names only for the main script, but here plug-ins use them. The option
    # -W wins.
    if not sys.warnoptions:
        warnings.filterwarnings("default", r"tabicl_train\.", DeprecationWarning)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a letter that the terminal cannot show must not end a command
        sys.stdout.reconfigure(errors="backslashreplace")

    # Run the command, and turn errors that users can cause into lines and exit codes.
    try:
        try:
            with safe_path(), foreign_exits():
                if problems := dashed_option_problems(sys.argv[1:]):
                    raise ConfigError(problems)
                sys.argv[1:] = plugins.take(sys.argv[1:])
                yield
        except ForeignExit as error:
            sys.exit(one_line(f"error: {error}"))
        except ConfigError as error:
            print_problems(error)
            sys.exit(EXIT_CONFIG)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                print_problems(ConfigError([f"{error.filename!r}: {error.strerror}"]))
                sys.exit(EXIT_CONFIG)
            if error.errno not in FULL:
                raise
            sys.exit(one_line(f"error: {error}"))
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at the end
        sys.exit(128 + signal.SIGPIPE)


def format_warning(message: Warning | str, *place: Any, **line: Any) -> str:
    """Format a warning as Python does, with its message as `one_line`, since it may name columns of untrusted files."""
    return FORMAT_WARNING(one_line(message), *place, **line)


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Keep the Python processes that a command starts from importing files in the current folder.

    Ranks, runs of a sweep, jobs and processes that draw tables would otherwise import a file tqdm.py there instead of
    the package. A command that itself imports from the current folder (python -m tabicl_train) changes nothing.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    if os.path.abspath(sys.path[0]) != os.getcwd():  # they are equal with python -m tabicl_train
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONSAFEPATH", None)


def dashed_option_problems(words: list[str]) -> list[str]:
    """Return a line for each --key=value or --key value that is not an option of any command, with the right form."""
    problems = []
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        if word.startswith("--") and option not in OPTIONS:
            if not equals:
                is_value = after and not after.startswith("-") and "=" not in after
                value = after if is_value else "VALUE"
            problems.append(f"{option}: settings have no dashes; write {option[2:].replace('-', '_')}={value}")
    return problems


@plain_end()
def train() -> None:
    """tabicl-train experiment=NAME run_dir=DIR KEY=VALUE ..."""
    # During imports, ctrl-C ends the command without a stack trace. A rank starts with it blocked (loopback.py).
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with_launcher()

    # Help, and a sweep.
    args = train_arguments("tabicl-train")
    if args.help and not args.multirun:
        from tabicl_train.config.documentation import train_help

        print(train_help(args.config_dir))
        return
    if not sys.argv[1:]:  # rather than the default of 500,000 steps
        raise ConfigError([NOTHING_CHOSEN])
    if args.multirun:
        run_or_show_sweep(args)
        return

    # The configuration and its plan.
    from tabicl_train.config.compose import compose

    config = compose(args.overrides, args.config_dir)
    if args.cfg:
        from tabicl_train.training.planning import run_plan

        print(yaml.safe_dump(asdict(config), sort_keys=False), end="")
        for line in run_plan(config):
            print_line(line)
        return

    # Training, with one rank for each device.
    devices = config.trainer.devices or 1
    if devices > 1 and not is_rank():
        from tabicl_train.training.checks import check_machine
        from tabicl_train.training.distributed.launch import launch_ranks

        # Each rank checks this too, but before there are ranks each problem of this machine is printed only once.
        if problems := check_machine(config, Launch(size=devices, local_size=devices)):
            raise ConfigError(problems)

        sys.exit(launch_ranks(devices, Path(config.run_dir)))
    run_training(config)


def train_arguments(program: str) -> argparse.Namespace:
    """Parse the arguments of a command that composes a configuration; exits with 2 for an unknown option."""
    parser = argparse.ArgumentParser(program, f"{program} KEY=VALUE ... [--help]", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    args = parser.parse_intermixed_args()
    if args.config_dir is not None:
        args.config_dir = expand_home(args.config_dir)
    if args.version:
        from tabicl_train.run.provenance import describe_installation

        print(describe_installation())
        sys.exit(0)
    return args


def run_training(config: RunConfig) -> None:
    """Train; exits with 1 and one line if that fails, and with 75 if the run is preempted (a rank with 0)."""
    # torch.distributed reads these variables next. Every rank prints the problem, whatever its number.
    if problems := torchrun_problems():
        print_line(f"error: {problems[0]}")
        sys.exit(EXIT_CONFIG)
    with watch_signals(), run_errors(Path(config.run_dir)):  # before the imports, which take seconds
        from tabicl_train.training.loop import train as train_run

        status = train_run(config)
    if status == "preempted" and not is_rank():
        sys.exit(PREEMPTED)


@plain_end()
def submit() -> None:
    """tabicl-submit experiment=NAME run_dir=DIR KEY=VALUE ... submit.nodes=2 ..."""
    # Help, and what needs no configuration.
    args = train_arguments("tabicl-submit")
    if args.help:
        command_options("SubmitOptions", "submit.")
    if args.cfg or args.multirun:
        raise ConfigError(["--cfg and --multirun are not options of tabicl-submit"])
    settings = [text for text in args.overrides if not text.startswith("submit.")]
    if not is_installed("submitit"):
        raise ConfigError([f"submitting needs submitit: {install('submitit', 'slurm')}"])
    if not settings:
        raise ConfigError(["there are no settings of the run, such as experiment=tabicl_v2 or run_dir=runs/mine"])

    # The arguments of tabicl-train in the job: its folder may be another one, so paths are absolute.
    from tabicl_train.config.compose import hydra_text
    from tabicl_train.training.distributed.submit import GPU_WORKERS, submit_job

    options, config = check_submission(args, settings)
    folder = Path(config.run_dir, "jobs").absolute()
    config, workers = config.with_workers(GPU_WORKERS if options.gpus else 1)
    config_dir = [] if args.config_dir is None else ["--config-dir", str(Path(args.config_dir).absolute())]
    settings = [*config_dir, *settings, *workers, f"run_dir={hydra_text(str(folder.parent))}", *plugins.arguments()]

    # Submit it, and say how to watch and end it.
    job = submit_job(settings, options, folder, config.cores)
    print(f"job       {job.job_id}, restarted at its time limit until the run is finished")
    print(f"messages  {shlex.join(['tail', '-F', str(job.paths.stdout)])}")
    if options.cluster == "slurm":
        print(f"watch     squeue -j {job.job_id}\nend       scancel {job.job_id}, which saves a checkpoint first")


def check_submission(args: argparse.Namespace, settings: list[str]) -> tuple[SubmitOptions, RunConfig]:
    """Parse the options of a job, submit.KEY=VALUE, and the configuration of its run.

    Raises
    ------
    ConfigError
        With the problems of both.
    """
    from tabicl_train.config.compose import compose, parse_options
    from tabicl_train.config.options import SubmitOptions
    from tabicl_train.stream.schedules import schedule_problems

    # The options of the job.
    problems = []
    options = None
    config = None
    try:
        options = parse_options(SubmitOptions, [text[7:] for text in args.overrides if text.startswith("submit.")])
    except ConfigError as error:
        problems += [f"submit.{problem}" for problem in error.problems]

    # The configuration, and settings that the job decides.
    try:
        config = compose(settings, args.config_dir)
        problems += config.too_few_tables(options.nodes * max(1, options.gpus)) if options else []
        problems += schedule_problems(config.curriculum)  # before the job waits in a queue
        if (devices := config.trainer.devices) is not None:
            problems.append(f"trainer.devices is {devices}; leave it out, submit.gpus decides")
        if config.trainer.requeue:
            problems.append("trainer.requeue is true; leave it out, the job is restarted anyway")
    except ConfigError as error:
        problems += error.problems
    if problems or options is None or config is None:
        raise ConfigError(problems)
    return options, config


@plain_end()
def sweep() -> None:
    """tabicl-sweep sweep=NAME run_dir=DIR KEY=VALUE ..."""
    run_or_show_sweep(train_arguments("tabicl-sweep"))


def run_or_show_sweep(args: argparse.Namespace) -> None:
    """Run a sweep, or print its settings (--help) or its runs (--cfg).

    It exits with 75 if the sweep is preempted, and with 1 if no run has finished.
    """
    from tabicl_train.config.documentation import sweep_help

    if args.help:
        print(sweep_help(args.config_dir))
        return
    if not args.overrides:
        raise ConfigError([NOTHING_VARIES])
    require_sweep_packages()
    from tabicl_train.sweep.plan import make_plan

    plan = make_plan(args.overrides, args.config_dir)
    if args.cfg:
        print(plan.text())
        return
    from tabicl_train.sweep.run import run_sweep

    status = run_sweep(plan)
    if status != "finished":
        sys.exit(PREEMPTED if status == "preempted" else "error: no run has finished")


@plain_end()
def export() -> None:
    args = command_options("ExportOptions")
    from tabicl_train.weights.export import export as write

    print(write(args.checkpoint, args.output, args.weights, args.format))


@plain_end()
def replay() -> None:
    args = command_options("ReplayOptions")
    from tabicl_train.check.replay import replay as run_again

    run_again(args.run_dir, args.step)


@plain_end()
def evaluate() -> None:
    args = command_options("EvaluateOptions")
    from tabicl_train.evaluation.evaluate import evaluate as score

    results = score(args)
    if args.figure is not None:
        from tabicl_train.report.figures import draw_probes, draw_standing

        draw = draw_probes if args.suite == "probes" else draw_standing
        try:
            draw(results).savefig(args.figure, dpi=200)
            info(f"picture: {args.figure}")
        except (OSError, RuntimeError) as error:  # such as a full disk, or .pgf without xelatex
            raise ConfigError([f"{args.figure} cannot be written: {first_line(error)}"]) from None


@plain_end()
def compare() -> None:
    """tabicl-compare A B [C ...] KEY=VALUE ..."""
    words = [word for word in sys.argv[1:] if is_word(word)]
    sys.argv[1:] = [word for word in sys.argv[1:] if not is_word(word)]
    args = command_options("CompareOptions")
    from tabicl_train.sweep.compare import run_comparison

    run_comparison([expand_home(word) for word in words], args)


def is_word(argument: str) -> bool:
    """Whether an argument is a word rather than KEY=VALUE or an option; the name of a file may contain =."""
    return not argument.startswith("-") and ("=" not in argument or os.path.exists(argument))


@plain_end()
def report() -> None:
    args = command_options("ReportOptions")
    require_matplotlib()
    from tabicl_train.report.page import PAGE, write_report

    if not args.run_dir:
        raise ConfigError(["run_dir is empty; name at least one run"])
    names = args.run_dir if isinstance(args.run_dir, list) else [args.run_dir]
    folders = [Path(str(name)) for name in names]
    output = Path(args.output or folders[0] / PAGE)
    write_report(folders, output, overwrite=args.overwrite or args.output is None)
    print(one_line(output))


@plain_end()
def gpu_check() -> None:
    """tabicl-gpu-check KEY=VALUE ..."""
    # Help.
    args = train_arguments("tabicl-gpu-check")
    if args.help:
        command_options("GpuCheckOptions")
    if args.cfg or args.multirun:
        raise ConfigError(["--cfg and --multirun are not options of tabicl-gpu-check"])
    from tabicl_train.check.gpu.page import JSON, NO_GPU, PAGE
    from tabicl_train.check.gpu.run import check_gpu
    from tabicl_train.config.compose import parse_options
    from tabicl_train.config.options import GpuCheckOptions

    # The options, and with the check preflight the settings of the run that it compares.
    settings = []
    if any("preflight" in word for word in args.overrides if word.startswith("checks=")):
        names = {field.name for field in fields(GpuCheckOptions)}
        settings = [word for word in args.overrides if word.partition("=")[0] not in names]
    options = parse_options(GpuCheckOptions, [word for word in args.overrides if word not in settings])

    # Check, and say where the results are.
    content = check_gpu(options, settings, args.config_dir)
    what = NO_GPU
    if content["is_gpu"]:
        what = 'please send both back, with the form "Result of tabicl-gpu-check" of the issues of this project'
    print(f"{Path(options.output, PAGE)} and {Path(options.output, JSON)}: {what}")
    if any(check["result"] == "failed" for check in content["checks"]):
        sys.exit(1)


@plain_end()
def runs() -> None:
    """tabicl-runs [FOLDER]"""
    from tabicl_train.config.options import RUNS

    if {"-h", "--help"} & set(sys.argv[1:]):
        print(RUNS)
        return
    if len(sys.argv) > 2 or any("=" in word or word.startswith("-") for word in sys.argv[1:]):
        raise ConfigError([f"{shlex.join(sys.argv[1:])}: give one folder: tabicl-runs [folder]"])
    from tabicl_train.run.summary import runs_table

    print(runs_table(Path(expand_home((sys.argv[1:] or ["runs"])[0]))))


@plain_end()
def predict() -> None:
    args = command_options("PredictOptions")
    from tabicl_train.prediction.predict_files import predict_files

    predict_files(args)


@plain_end()
def prior() -> None:
    """tabicl-prior ACTION KEY=VALUE ..."""
    args = train_arguments("tabicl-prior")
    if args.help or not sys.argv[1:]:
        from tabicl_train.config.documentation import help_text
        from tabicl_train.config.options import PriorOptions

        print(help_text(PriorOptions))
        return
    if not args.overrides:
        raise ConfigError(["there is no action, such as describe; tabicl-prior --help lists all actions"])
    if args.cfg or args.multirun:
        raise ConfigError(["--cfg and --multirun are not options of tabicl-prior"])
    from tabicl_train.check.prior_actions import act

    act(args.overrides[0], args.overrides[1:], args.config_dir)


@plain_end()
def lab() -> None:
    """tabicl-lab EXPERIMENT KEY=VALUE ..."""
    try:
        from tabicl_train.lab.experiments import Failed, Preempted, run_experiment
    except ModuleNotFoundError as error:
        raise ConfigError([f"tabicl-lab is not installed: {error}"]) from None

    try:
        run_experiment(sys.argv[1:])
    except Preempted:
        sys.exit(PREEMPTED)
    except Failed as error:
        sys.exit(one_line(f"error: {error}"))


def command_options(name: str, prefix: str = "") -> Any:
    """Parse the arguments of a command into the dataclass of its options; with --help, print the options and exit."""
    from tabicl_train.config import options

    cls = getattr(options, name)
    if {"-h", "--help"} & set(sys.argv[1:]):
        from tabicl_train.config.documentation import help_text

        print(help_text(cls, prefix))
        sys.exit(0)
    from tabicl_train.config.compose import parse_options

    return parse_options(cls, sys.argv[1:])


@contextlib.contextmanager
def run_errors(folder: Path) -> Iterator[None]:
    """Turn errors that end a run into exit code 1 and one line.

    A rank also passes its error to the elastic agent, and writes its stack trace to the run directory.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from priors import PriorError
    from tabicl_train.stream.workers import WorkerDied
    from tabicl_train.training.callbacks.checkpoints import SaveFailed

    handler = get_error_handler()
    if is_rank():
        handler.initialize()
    try:
        with foreign_exits():
            yield
    except ConfigError as error:
        if is_rank():
            print_problems(error)
            end_rank(EXIT_CONFIG)
        raise
    except Exception as error:
        # A known error needs no stack trace.
        is_known = isinstance(error, (ForeignExit, PriorError, WorkerDied, Diverged, SaveFailed, OSError))
        is_known |= str(error).startswith("DataLoader worker")  # torch's error when a worker was killed
        lines = [str(error) if is_known else f"{type(error).__name__}: {first_line(error)}"]
        lines += getattr(error, "__notes__", [])

        # A rank leaves the line to the agent that this program started, and prints it under torchrun.
        if is_rank():
            handler.record_exception(error)
            if not is_known:
                save_trace(folder, error)
            if not is_own_launch():
                for line in [f"error: rank {os.environ['RANK']} failed: {lines[0]}", *lines[1:]]:
                    print_line(line)
            end_rank(1)

        # A single process.
        if not is_known:
            raise
        sys.exit("\n".join(map(one_line, [f"error: {lines[0]}", *lines[1:]])))


def save_trace(folder: Path, error: BaseException) -> None:
    """Append the stack trace of a rank's error to a file in the run directory, or print it if there is no folder."""
    trace = "".join(traceback.format_exception(error))
    if not folder.is_dir():
        print_trace(type(error), error, error.__traceback__)
        return
    with open(folder / f"rank-{os.environ['RANK']}.log", "a") as file:
        file.write(trace + "\n")


def print_trace(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    """Print a stack trace as the interpreter does, each line as `one_line`."""
    for line in "".join(traceback.format_exception(kind, error, place)).splitlines():
        print_line(line)


def end_rank(code: int) -> NoReturn:
    """End a rank immediately, since closing process groups whose other ranks are gone can take forever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def print_problems(error: ConfigError) -> None:
    for problem in error.problems:
        info(f"error: {problem}")
    for note in getattr(error, "__notes__", []):
        info(note)
