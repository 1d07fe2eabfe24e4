"""The command: runs the checks within a time, and writes one page and one JSON file about them.

The checks run in a process of their own, which is replaced after each failure: an error of a kernel leaves a CUDA
context useless, and a kernel may hang or end the process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tabicl_train.config.checks import each_of
from tabicl_train.config.options import GpuCheckOptions
from tabicl_train.config.schema import TrainerConfig
from tabicl_train.console import counted, first_line, info
from tabicl_train.errors import ConfigError, require_page_packages
from tabicl_train.gpu_check import kernels, runs, stages, steps
from tabicl_train.gpu_check.place import CheckFailed, CheckSkipped, PageRow, Place, set_up
from tabicl_train.outputs import folder_problem, write_atomically
from tabicl_train.precision import WORKSPACE, set_up_gpu
from tabicl_train.run_dir.provenance import git, versions

FORMAT = 1  # of the JSON file
JSON, PAGE, LOG = "gpu-check.json", "gpu-check.html", "log.txt"
RESERVE = 10.0  # seconds of the time that are kept for the files
SLOW = 4.0  # a check may take so many times what is expected, within the time that is left
LEAST = 60.0  # seconds that each check may take, if so many are left
NO_GPU = "torch finds no GPU: the checks run in small on the CPU, and nothing here is a figure of a GPU"
TEMPLATE = Path(__file__).with_name("page.html.j2")


@dataclass(frozen=True)
class Check:
    """A check by name, and what it does in one line.

    `seconds` is what it takes on an H100 by estimate (never measured): a check is skipped if less time is left.
    """

    name: str
    what: str
    run: Callable[[Place], None]
    seconds: float


# Wrong numbers first, then time and memory; the compiler, which may take minutes, last.
CHECKS = (
    Check("step_beside_cpu", "a step in fp32 equals that of the CPU", steps.step_beside_cpu, 15),
    Check("attention", "attention at real sizes equals float64", kernels.attention, 20),
    Check("attention_at_the_limit", "so it does near 2^31 elements", kernels.attention_at_the_limit, 20),
    Check("bf16_beside_fp32", "bf16 loses less than one percent in five steps", steps.bf16_beside_fp32, 5),
    Check("scaling_rules", "scaling rules equal those of the CPU, also in Triton", steps.scaling_rules, 15),
    Check("fp32_columns", "columns in fp32 equal those of the CPU", steps.fp32_columns, 2),
    Check("recomputation", "recomputation changes memory, not gradients", steps.recomputation, 2),
    Check("no_wait", "a step does not wait for the device", steps.no_wait, 3),
    Check("halved_pack", "a pack that does not fit is halved", steps.halved_pack, 3),
    Check("pinned_workers", "workers and pinned memory deliver the same tables", steps.pinned_workers, 3),
    Check("resumed_run", "a run goes on after SIGTERM as if undisturbed", runs.resumed_run, 10),
    Check("deterministic_run", "so to the bit, with trainer.deterministic", runs.deterministic_run, 10),
    Check("exchange", "two ranks exchange tensors of the device", runs.exchange, 40),
    Check("tables", "tables of the three stages are drawn", stages.tables, 25),
    Check(
        "eager_bf16", "steps of the stages, eager in bf16", partial(stages.step_of_variant, variant="eager, bf16"), 20
    ),
    Check("memory", "peak memory is within 15 % of the plan", stages.memory, 20),
    Check("real_run", "a run with all workers is stopped and continued", runs.real_run, 90),
    Check(
        "eager_fp32", "steps of the stages, eager in fp32", partial(stages.step_of_variant, variant="eager, fp32"), 30
    ),
    Check("two_gpus", "two GPUs train as one", runs.two_gpus, 60),
    Check("compiled_step", "a compiled step equals an eager one", steps.compiled_step, 60),
    Check(
        "compiled_bf16", "steps of the stages, compiled", partial(stages.step_of_variant, variant="compiled, bf16"), 60
    ),
    Check(
        "compiled_triton",
        "steps of the stages, compiled with Triton",
        partial(stages.step_of_variant, variant="compiled with Triton, bf16"),
        60,
    ),
)
BY_NAME = {check.name: check for check in CHECKS}


@dataclass
class Result:
    """What became of a check: passed, failed or skipped, and why."""

    name: str
    what: str
    result: str
    why: str = ""
    seconds: float = 0.0
    trace: str = ""
    rows: list[tuple[str, PageRow]] = field(default_factory=list)


class Outcome(NamedTuple):
    """What the command has to say at its end."""

    is_gpu: bool
    failed: int  # checks


def check_gpu(options: GpuCheckOptions) -> Outcome:
    """Run the checks and write the files.

    Parameters
    ----------
    options : GpuCheckOptions
        The options of the command.

    Returns
    -------
    Outcome
        Whether there was a GPU, and how many checks have failed.

    Raises
    ------
    ConfigError
        If an option is wrong, or the files cannot be written.
    """
    require_page_packages()
    chosen = chosen_checks(options.checks)
    output = prepare(options)
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    end = time.monotonic() + 60 * options.minutes
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    if not is_cuda:
        info(f"no GPU    {NO_GPU}")
    limit = f"at most {options.minutes:g} minutes"
    info(f"checks    {len(chosen)}, {limit}; messages go to {output / LOG}")
    with tempfile.TemporaryDirectory(prefix="tabicl-gpu-check-") as folder, log_beside(Path(folder), output):
        runner = Runner(device, Path(folder))
        try:
            machine = runner.machine(end)
            info(f"machine   {machine['device']}, torch {machine['torch']}")
            results = run_all(chosen, runner, end)
        finally:
            runner.close()
    content = {
        "format": FORMAT,
        "written": started,
        "is_gpu": is_cuda,
        "minutes": options.minutes,
        "machine": machine,
        "checks": [entry(result) for result in results],
    }
    write_files(output, content)
    failed = [result for result in results if result.result == "failed"]
    skipped = [result for result in results if result.result == "skipped"]
    passed = len(results) - len(failed) - len(skipped)
    info(f"result    {passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    if not is_cuda:
        info(f"no GPU    {NO_GPU}")
    return Outcome(is_cuda, len(failed))


def chosen_checks(names: Any) -> list[Check]:
    """Return the checks of these names, in their order; raises ConfigError for an unknown one."""
    if names is None:
        return list(CHECKS)
    if isinstance(names, str):
        names = [names]
    if problems := each_of("checks", names, tuple(BY_NAME)):
        raise ConfigError(problems)
    return [check for check in CHECKS if check.name in names]


def prepare(options: GpuCheckOptions) -> Path:
    """Create the folder of the files; raises ConfigError if it is not writable or holds other results."""
    output = Path(options.output)
    if output.exists() and not output.is_dir():
        raise ConfigError([f"output is {str(output)!r}; it is a file, not a folder"])
    if problem := folder_problem(output):
        raise ConfigError([f"output is {str(output)!r}; {problem}"])
    if (output / JSON).exists() and not options.overwrite:
        raise ConfigError([f"output is {str(output)!r}, which holds a {JSON} already: set overwrite=true"])
    return output


@contextlib.contextmanager
def log_beside(folder: Path, output: Path) -> Iterator[None]:
    """Copy the log of the checks beside the files at the end."""
    log = folder / LOG
    log.touch()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            shutil.copy(log, output / LOG)


def run_all(chosen: Sequence[Check], runner: Runner, end: float) -> list[Result]:
    """Run the checks one after the other, as long as there is time, and print a line about each."""
    results = []
    is_stopped = False
    width = max(len(check.name) for check in chosen)
    for number, check in enumerate(chosen, 1):
        left = end - RESERVE - time.monotonic()
        result = Result(check.name, check.what, "skipped")
        if is_stopped:
            result.why = "stopped by ctrl-C"
        elif left < check.seconds:
            result.why = "no time left"
            if left > 0:
                result.why = f"{left:.0f} s were left, and it takes about {check.seconds:.0f} s"
        else:
            started = time.monotonic()
            most = max(LEAST, SLOW * check.seconds)
            try:
                runner.run(check, result, started + min(left, most), hangs=most < left)
            except KeyboardInterrupt:
                is_stopped = True
                runner.close()
                result.result, result.why = "skipped", "stopped by ctrl-C"
            result.seconds = time.monotonic() - started
        results.append(result)
        left = max(0.0, end - time.monotonic())
        why = f": {result.why.splitlines()[0][:200]}" if result.why else ""
        place = f"{number:2d} of {len(chosen)}"
        info(f"{place}  {check.name:<{width}}  {result.result}, {result.seconds:.1f} s{why} ({clock(left)} left)")
    return results


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def attempt(check: Check, place: Place) -> tuple[str, str, str]:
    """Run a check in this process -> what became of it, why, and the stack trace of an error."""
    try:
        set_up()
        check.run(place)
        place.wait()  # an error of a kernel shows here at the latest
    except CheckSkipped as skipped:
        return "skipped", str(skipped), ""
    except CheckFailed as failed:
        return "failed", str(failed), stack_trace()
    except Exception as error:
        return "failed", f"{type(error).__name__}: {first_line(error)}", stack_trace()
    return "passed", "", ""


def stack_trace() -> str:
    """Return the stack trace of the error that is being handled, without the name of the home folder."""
    return traceback.format_exc().replace(str(Path.home()), "~")


class Runner:
    """Runs checks in another process, which is killed after a failure, or if a check takes too long."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.process: Any = None
        self.connection: Any = None

    def start(self) -> None:
        """Start the process, if none runs."""
        if self.process is not None:
            return
        # A fork takes no time. With CUDA, which this process has asked for its devices, it would not work.
        context: Any = get_context("spawn" if self.device.type == "cuda" else "fork")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, self.device, self.folder, os.getpid()))
        self.process.start()
        other.close()

    def machine(self, end: float) -> PageRow:
        """Describe the machine; raises ConfigError if even that fails."""
        self.start()
        self.connection.send(None)
        if not self.connection.poll(max(1.0, end - time.monotonic())):
            raise ConfigError(["the GPU does not answer"])
        try:
            return self.connection.recv()
        except EOFError:
            raise ConfigError(["the process that asks the GPU for its name has died"]) from None

    def run(self, check: Check, result: Result, deadline: float, hangs: bool) -> None:
        """Run a check, and fill its result; `hangs`: whether it has failed if it is not done at the deadline."""
        self.start()
        started = time.monotonic()
        self.connection.send((check.name, deadline - started))
        # The process has some seconds more than the check, which looks at its deadline between steps.
        while self.connection.poll(max(0.0, deadline + 5.0 - time.monotonic())):
            try:
                kind, content = self.connection.recv()
            except EOFError:  # it has died
                self.process.join(5)
                code = self.process.exitcode
                ended = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
                result.result, result.why = "failed", f"its process has ended ({ended}); see {LOG}"
                self.close()
                return
            if kind == "row":
                result.rows.append(content)
                continue
            result.result, result.why, result.trace = content
            if result.result == "failed":
                self.close()
            return
        # With more time it would end, or it hangs, which a GPU may do.
        result.result = "failed" if hangs and self.device.type == "cuda" else "skipped"
        result.why = f"not done after {time.monotonic() - started:.0f} s"
        self.close()

    def close(self) -> None:
        """Kill the process and those that it has started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.process = None


def serve(connection: Any, device: torch.device, folder: Path, parent: int) -> None:
    """Run the checks that are asked for, in a process of its own."""
    from tabicl_train.distributed.processes import die_with_parent

    os.setsid()  # a group, which is killed as a whole; ctrl-C does not reach it
    die_with_parent(parent)
    log = open(folder / LOG, "a", buffering=1)  # noqa: SIM115  # as long as the process lives
    for descriptor in (1, 2):  # of this process and those that it starts
        os.dup2(log.fileno(), descriptor)
    sys.stdout = sys.stderr = log
    set_up_gpu(TrainerConfig(accelerator=device.type))  # the allocator, before CUDA starts
    # Torch looks for it at the first product on the GPU and then no more: without it `deterministic_run`, which comes
    # after other checks, would end in torch's error (by its sources; not run on a card).
    os.environ.setdefault(*WORKSPACE)
    torch.set_num_threads(1)
    while True:
        try:
            question = connection.recv()
        except EOFError:
            return
        if question is None:
            connection.send(describe_machine(device))
            continue
        name, seconds = question
        place = Place(device, folder, lambda *row: connection.send(("row", row)), time.monotonic() + seconds)
        connection.send(("result", attempt(BY_NAME[name], place)))


def describe_machine(device: torch.device) -> PageRow:
    """Describe device, versions and commit; not the name of the machine."""
    changed = " with changes" if git("diff", "HEAD") else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts: PageRow = {"device": f"CPU ({platform.machine()})", "GPUs": 0}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        facts = {
            "device": card.name,
            "GPUs": torch.cuda.device_count(),
            "memory of the GPU, GB": card.total_memory / 1e9,
            "compute capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
            "bf16": "yes" if torch.cuda.is_bf16_supported(False) else "no",
            "driver": driver(),
        }
    return {
        **facts,
        "cores": cores,
        "memory, GB": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
        "CUDA of torch": torch.version.cuda or "none",
        "triton": installed_version("triton"),
        **versions(),
        "commit": f"{git('rev-parse', 'HEAD') or 'unknown, outside a checkout'}{changed}",
        "system": platform.platform(),
    }


def installed_version(package: str) -> str:
    """Return the version of a package that may be missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def driver() -> str:
    """Return the version of the driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (result.stdout.splitlines() or ["unknown"])[0].strip()


def entry(result: Result) -> PageRow:
    """Return a result as the JSON file has it."""
    rows = [{"table": table, **row} for table, row in result.rows]
    kept = {"name": result.name, "what": result.what, "result": result.result, "why": result.why}
    return {**kept, "seconds": round(result.seconds, 2), "trace": result.trace, "rows": rows}


def finite(value: Any) -> Any:
    """Replace nan and inf, which JSON does not have, by their names."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def write_files(output: Path, content: dict[str, Any]) -> None:
    """Write the JSON file and the page."""
    content = finite(content)
    text = json.dumps(content, indent=1)
    write_atomically((output / JSON).resolve(), lambda file: file.write(text.encode()))
    page = page_of(content)
    write_atomically((output / PAGE).resolve(), lambda file: file.write(page.encode()))


def page_of(content: dict[str, Any]) -> str:
    """Fill the page from what the JSON file has."""
    import pandas as pd

    from tabicl_train.report.page import fill

    names = ("steps", "memory", "run", "attention", "figures")
    tables: dict[str, list[PageRow]] = {name: [] for name in names}
    for check in content["checks"]:
        for row in check["rows"]:
            tables[row["table"]].append({key: value for key, value in row.items() if key != "table"})
    frames = {}
    for name, rows in tables.items():
        frame = pd.DataFrame(rows)
        frames[name] = frame.set_index(frame.columns[0]) if rows else None
    machine = pd.DataFrame({"value": {key: str_of(value) for key, value in content["machine"].items()}})
    counts = {
        kind: sum(check["result"] == kind for check in content["checks"]) for kind in ("passed", "failed", "skipped")
    }
    return fill(
        TEMPLATE,
        content=content,
        frames=frames,
        machine=machine,
        counts=counts,
        failed=[check for check in content["checks"] if check["result"] == "failed"],
        no_gpu=NO_GPU,
        json_name=JSON,
        counted=counted,
    )


def str_of(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
