"""The command tabicl-gpu-check: runs the checks within a time, each in a process of its own, and writes their results.

They need processes of their own since an error of a kernel leaves a CUDA context useless, and a kernel may hang or end
the process.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tabicl_train.check.gpu import kernels, runs, stages, steps
from tabicl_train.check.gpu.page import JSON, LOG, NO_GPU, write_files
from tabicl_train.check.gpu.place import CheckFailed, CheckSkipped, Place, Row, set_up
from tabicl_train.check.gpu.preflight import preflight
from tabicl_train.config.options import GpuCheckOptions
from tabicl_train.config.schema import TrainerConfig, one_of
from tabicl_train.console import first_line, info
from tabicl_train.errors import ConfigError
from tabicl_train.outputs import folder_problem
from tabicl_train.run.provenance import git, versions
from tabicl_train.signals import die_with_parent
from tabicl_train.training.precision import set_up_gpu

FORMAT = 1  # of the JSON file
LONG = 300.0  # seconds, for checks that compile, draw many tables or start other processes
GRACE = 5.0  # seconds after its deadline that a check has to end by itself, since it looks at it between steps only
# A fork takes no time, whereas a new Python would import everything again for each check. CUDA must start in the forked
# process, so this process never asks for a GPU.
FORK = get_context("fork")


@dataclass(frozen=True)
class Check:
    """A check.

    Parameters
    ----------
    name : str
        Its name in the option `checks`.
    what : str
        What it shows, in one line.
    run : callable
        The check, which raises CheckFailed or CheckSkipped.
    seconds : float, optional
        Time that it may take on a GPU before it counts as hung.
    """

    name: str
    what: str
    run: Callable[[Place], None]
    seconds: float = 120.0


# Checks of results come first, then those of time and memory. The compiler comes last, since it may take minutes.
CHECKS = (
    Check("step_beside_cpu", "a step in fp32 equals that of the CPU", steps.step_beside_cpu),
    Check("attention", "attention at real sizes equals float64", kernels.attention),
    Check("attention_at_the_limit", "attention near 2^31 elements equals float64", kernels.attention_at_the_limit),
    Check("preflight", "steps in the precision of a run are close to those in fp32", preflight, LONG),
    Check("scaling_rules", "scaling rules equal those of the CPU, also in Triton", steps.scaling_rules),
    Check("fp32_columns", "columns in fp32 equal those of the CPU", steps.fp32_columns),
    Check("recomputation", "recomputation changes memory, not gradients", steps.recomputation),
    Check("no_wait", "a step does not wait for the device", steps.no_wait),
    Check("captured_steps", "whole steps as CUDA graphs equal eager ones", steps.captured_steps),
    Check("halved_pack", "a pack that does not fit is halved", steps.halved_pack),
    Check("pinned_workers", "workers and pinned memory deliver the same tables", steps.pinned_workers),
    Check("resumed_run", "a run continues after SIGTERM as if undisturbed", runs.resumed_run),
    Check("deterministic_run", "with trainer.deterministic, it does so to the bit", runs.deterministic_run),
    Check("exchange", "two ranks exchange tensors of the device", runs.exchange, LONG),
    Check(
        "eager_bf16", "steps of the stages, eager in bf16", partial(stages.step_of_variant, variant="eager, bf16"), LONG
    ),
    Check("memory", "peak memory is within 15 % of the plan", stages.memory),
    Check("small_steps", "steps of small networks", stages.small_steps),
    Check("real_run", "a run with all workers is stopped and continued", runs.real_run, LONG),
    Check("drawing", "tables of the three stages are drawn", stages.draw_stages),
    Check(
        "eager_fp32", "steps of the stages, eager in fp32", partial(stages.step_of_variant, variant="eager, fp32"), LONG
    ),
    Check("two_gpus", "two GPUs train as one", runs.two_gpus, LONG),
    Check("compiled_step", "a compiled step equals an eager one", steps.compiled_step),
    Check(
        "compiled_triton",
        "steps of the stages, compiled with Triton",
        partial(stages.step_of_variant, variant="compiled with Triton, bf16"),
        LONG,
    ),
    Check(
        "compiled_bf16",
        "steps of the stages, compiled",
        partial(stages.step_of_variant, variant="compiled, bf16"),
        LONG,
    ),
)


def check_gpu(options: GpuCheckOptions, settings: Sequence[str] = (), config_dir: str | None = None) -> Row:
    """Run the checks and write the files anew after each of them.

    Parameters
    ----------
    options : GpuCheckOptions
        The options of the command.
    settings : sequence of str, optional
        Settings of the run that `preflight` compares. Default: those of a small run.
    config_dir : str, optional
        A folder of configuration files of the user.

    Returns
    -------
    dict
        The content of the JSON file.

    Raises
    ------
    ConfigError
        If an option is wrong, the files cannot be written, or the machine cannot be described.
    """
    # The checks, the output, and the time.
    chosen = chosen_checks(options.checks)
    if settings:
        preflight_of_run = partial(preflight, settings=settings, config_dir=config_dir)
        chosen = [replace(check, run=preflight_of_run) if check.name == "preflight" else check for check in chosen]
    output = prepare_output(options)
    end = time.monotonic() + 60 * options.minutes
    content: Row = {
        "format": FORMAT,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "is_gpu": False,
        "minutes": options.minutes,
        "machine": {},
        "checks": [],
    }
    info(f"checks    {len(chosen)}, at most {options.minutes:g} minutes; messages go to {output / LOG}")
    with tempfile.TemporaryDirectory(prefix="tabicl-gpu-check-") as folder:
        # The machine is described by a check, too, since this process must not start CUDA.
        asked = run_check(MACHINE, Path(folder), output, end)
        if asked["result"] != "passed":
            raise ConfigError([f"the machine cannot be described: {asked['why']}"])
        content["machine"] = {name: value for name, value in asked["rows"][0].items() if name != "table"}
        content["is_gpu"] = content["machine"]["GPUs"] > 0
        info(f"machine   {content['machine']['device']}, torch {content['machine']['torch']}")
        if not content["is_gpu"]:
            info(f"no GPU    {NO_GPU}")

        # The checks, with a line for each.
        width = max(len(check.name) for check in chosen)
        for number, check in enumerate(chosen, 1):
            entry = run_check(check, Path(folder), output, end)
            content["checks"].append(entry)
            write_files(output, content)
            line = f"{number:2d} of {len(chosen)}  {check.name:<{width}}  {entry['result']}, {entry['seconds']:.1f} s"
            why = f": {entry['why'].splitlines()[0][:200]}" if entry["why"] else ""
            info(f"{line}{why} ({max(0.0, end - time.monotonic()):.0f} s left)")
    return content


def chosen_checks(names: Any) -> list[Check]:
    """Return the checks with these names, in the order of CHECKS; raises ConfigError for an unknown name."""
    if names is None:
        return list(CHECKS)
    if isinstance(names, str):
        names = [names]
    problems = [line for name in names for line in one_of("checks", name, tuple(check.name for check in CHECKS))]
    if problems:
        raise ConfigError(problems)
    return [check for check in CHECKS if check.name in names]


def prepare_output(options: GpuCheckOptions) -> Path:
    """Create the folder of the files; raises ConfigError if it is not writable or holds other results."""
    output = Path(options.output)
    if output.exists() and not output.is_dir():
        raise ConfigError([f"output is {str(output)!r}; it is a file, not a folder"])
    if problem := folder_problem(output):
        raise ConfigError([f"output is {str(output)!r}; {problem}"])
    if (output / JSON).exists() and not options.overwrite:
        raise ConfigError([f"output is {str(output)!r}, which already holds a {JSON}; set overwrite=true"])
    (output / LOG).write_text("")
    return output


def run_check(check: Check, folder: Path, output: Path, end: float) -> Row:
    """Run a check in a process of its own, if there is time left.

    Parameters
    ----------
    check : Check
        The check.
    folder : Path
        A folder for its files.
    output : Path
        The folder of the log.
    end : float
        The value of time.monotonic() at which all checks should be done.

    Returns
    -------
    dict
        The entry of the check in the JSON file.
    """
    entry: Row = {"name": check.name, "what": check.what, "result": "skipped", "why": "no time left"}
    entry |= {"seconds": 0.0, "trace": "", "rows": []}
    started = time.monotonic()
    if started >= end:
        return entry

    # The process sends rows and, at the end, the result.
    deadline = min(end, started + check.seconds)
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=serve, args=(check, folder, output / LOG, deadline, sender, os.getpid()))
    process.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, deadline + GRACE - time.monotonic())):
            kind, content = receiver.recv()
            if kind == "result":
                entry |= content
                break
            entry["rows"].append(content)
        else:
            entry |= {"result": "failed" if deadline < end else "skipped", "why": "not done in time"}
    except EOFError:  # the process has died
        process.join()
        code = process.exitcode or 0
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        entry |= {"result": "failed", "why": f"its process has died ({ended}); see {LOG}"}
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
        process.kill()
        process.join()
        receiver.close()
    return entry | {"seconds": round(time.monotonic() - started, 2)}


def serve(check: Check, folder: Path, log: Path, deadline: float, sender: Connection, parent: int) -> None:
    """Run a check in this forked process, and send its rows and its result."""
    os.setsid()  # a process group that can be killed as a whole, and that ctrl-C does not reach
    die_with_parent(parent)
    file = open(log, "a", buffering=1)  # noqa: SIM115  # as long as the process lives
    for descriptor in (1, 2):  # output of this process and of those that it starts
        os.dup2(file.fileno(), descriptor)
    sys.stdout = sys.stderr = file
    set_up_gpu(TrainerConfig())  # the allocator, before CUDA starts
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    place = Place(device, folder, lambda row: sender.send(("row", row)), deadline)
    sender.send(("result", attempt(check, place)))


def attempt(check: Check, place: Place) -> Row:
    """Run a check in this process; returns its result, the reason, and the stack trace of an error."""
    try:
        set_up()
        check.run(place)
        place.wait()  # errors of kernels are raised here at the latest
    except CheckSkipped as skipped:
        return {"result": "skipped", "why": str(skipped)}
    except CheckFailed as failed:
        return {"result": "failed", "why": str(failed), "trace": stack_trace()}
    except ConfigError as error:
        return {"result": "failed", "why": "; ".join(error.problems)}
    except Exception as error:
        return {"result": "failed", "why": f"{type(error).__name__}: {first_line(error)}", "trace": stack_trace()}
    return {"result": "passed", "why": ""}


def stack_trace() -> str:
    """Return the stack trace of the error that is being handled, with ~ for the home folder."""
    return traceback.format_exc().replace(str(Path.home()), "~")


def add_machine(place: Place) -> None:
    """Describe device, versions and commit, without the name of the machine."""
    # The device, and what torch knows about a GPU.
    changed = " with changes" if git("diff", "HEAD") else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts: Row = {"device": f"CPU ({platform.machine()})", "GPUs": 0}
    if place.is_cuda:
        card = torch.cuda.get_device_properties(place.device)
        facts = {
            "device": card.name,
            "GPUs": torch.cuda.device_count(),
            "memory of the GPU, GB": card.total_memory / 1e9,
            "compute capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
            "bf16": "yes" if torch.cuda.is_bf16_supported(False) else "no",
            "driver": driver(),
        }

    # The rest of the machine, and the software.
    place.add(
        "machine",
        **facts,
        **{
            "cores": cores,
            "memory, GB": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
            "CUDA of torch": torch.version.cuda or "none",
            "triton": installed_version("triton"),
            **versions(),
            "commit": f"{git('rev-parse', 'HEAD') or 'unknown, outside a checkout'}{changed}",
            "system": platform.platform(),
        },
    )


MACHINE = Check("machine", "what the machine is", add_machine)


def installed_version(package: str) -> str:
    """Return the version of a package that may be missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def driver() -> str:
    """Return the version of the GPU's driver; "unknown" without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (result.stdout.splitlines() or ["unknown"])[0].strip()
