"""The run directory while a run uses it: its lock, status, records and loggers, and how it begins and ends.

Only rank 0 reads and writes; the other ranks get what it has found.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from priors.real import hash_of_tables, real_tables
from tabicl_train.config.schema import RunConfig, configured_prior
from tabicl_train.console import counted, first_line, info
from tabicl_train.doors import plugins
from tabicl_train.errors import Diverged
from tabicl_train.model.config import family_of
from tabicl_train.outputs import make_folder
from tabicl_train.run import checkpoint
from tabicl_train.run.provenance import describe_machine, describe_origin, record_start
from tabicl_train.run.records import Records
from tabicl_train.run.status import RunLock, RunStatus
from tabicl_train.run.summary import end_lines
from tabicl_train.signals import Stop
from tabicl_train.training.callbacks.callback import Callbacks, Reason, RunContext
from tabicl_train.training.callbacks.final_test import TEST, is_test_missing
from tabicl_train.training.callbacks.guard import failure_of
from tabicl_train.training.callbacks.tensorboard_logger import TensorBoardLogger
from tabicl_train.training.callbacks.validation import end_by_patience, is_validation_missing
from tabicl_train.training.callbacks.validation_history import VALIDATION
from tabicl_train.training.callbacks.wandb_logger import WandbLogger
from tabicl_train.training.distributed.processes import shares_store, start_command
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.distributed.requeue import requeue
from tabicl_train.training.optimizer import optimizer_remarks
from tabicl_train.training.planning import eligible_tables, run_plan
from tabicl_train.training.precision import policy
from tabicl_train.training.resume import Left, Start, find_checkpoint
from tabicl_train.training.state import TrainState
from tabicl_train.weights.choice import BEST_FILE, START_FILE

__all__ = ["RunFolder"]


class RunFolder:
    """The run directory, from the start of a run to its end.

    Parameters
    ----------
    config : RunConfig
        The run.
    ranks : Ranks
        All ranks of the run.
    """

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self.config = config
        self.values = asdict(config)
        self.plugins = config.plugins_used()
        self.real_tables = hash_of_tables(configured_prior(config.prior))
        self.ranks = ranks
        self.path = Path(config.run_dir)
        self.records = Records(self.path)
        self.status = RunStatus(self.records)
        self.lock = RunLock(self.path)

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig, ranks: Ranks) -> Iterator[RunFolder]:
        """Use a run directory until the end of the context; `find_start` locks it."""
        folder = cls(config, ranks)
        try:
            yield folder
        finally:
            folder.lock.release()

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes."""
        return self.ranks.rank == 0

    def find_start(self) -> Start:
        """Lock the folder and find where the run begins.

        Raises
        ------
        ConfigError
            On all ranks: if they differ, if another process uses the folder, if it belongs to another run, or if its
            checkpoints are gone.
        """
        self.ranks.raise_on_all_ranks(differences_from_first(self.config.seed, self.real_tables, self.ranks))

        # What rank 0 does, and the others wait for.
        def lock_and_read() -> Start:
            make_folder("run_dir", self.path)
            self.lock.acquire()
            checkpoint.remove_temporary_files(self.path)
            checkpoint.remove_temporary_files(self.path / "checkpoints")
            content = find_checkpoint(self.values, self.real_tables, self.plugins)
            steps = 0 if content is None else content["global_step"]
            ended, left = self._what_is_left(steps)
            last = self.config.total_steps if ended is None else steps
            return Start(steps, last, content, ended, left)

        return self.ranks.from_first(lock_and_read)

    def _what_is_left(self, step: int) -> tuple[str | None, Left]:
        """Return why validation ended the run, or None, and what is left to do after `step` steps."""
        ended = end_by_patience(self.config, self.records, step)
        if ended is None and step < self.config.total_steps:
            return None, Left.STEPS
        if ended is None and step > self.config.total_steps:
            return None, Left.PAST
        is_missing = is_validation_missing(self.config, self.records, step)
        is_missing = is_missing or is_test_missing(self.config.validation, self.records, step)
        return ended, Left.SCORES if is_missing else Left.NOTHING

    def finish_earlier(self, start: Start) -> str:
        """Print that there is nothing left to do.

        Returns
        -------
        str
            "finished".

        Raises
        ------
        Diverged
            If all steps were done, but the run has failed, see `failure_of`.
        """
        # Fewer steps were asked for than are done.
        if start.left is Left.PAST:
            done = f"{start.steps} steps are done, and this command asks for {self.config.total_steps}"
            info(f"{self.path}: nothing to do, {done}; the run and its status stay as they are")
            return "finished"
        # All steps are done: did the run fail at its end?
        failure = self.ranks.from_first(lambda: failure_of(self.path))
        if failure is not None:
            if self.is_writer:
                cause = f"Diverged: {failure}"
                self.status.write(status="failed", step=start.steps, saved=start.steps, cause=cause)
            raise Diverged(failure)
        remark = start.ended or "to train further, add a stage or steps"
        info(f"{self.path}: finished already, {start.steps} steps are done; {remark}")
        if self.is_writer:
            self.status.finish_earlier(start.steps)
            self._print_end()
        return "finished"

    def begin(self, state: TrainState, start: Start, context: RunContext) -> None:
        """Remove the rows of steps that will be repeated, record this start, and print the settings in force."""
        # What checkpoints and records say about this start.
        origin = describe_origin()
        machines = self.ranks.gather(describe_machine(context.device))
        device = machines[0]["gpu"] or platform.machine()
        context.facts |= {
            "plugins": self.plugins,
            "real_tables": self.real_tables,
            "ranks": self.ranks.size,
            "device": device,
            **origin,
        }
        if not self.is_writer:
            return

        # The records, up to the step where the run begins.
        self.records.loggers = self._build_loggers(start.steps)
        self.status.values |= {"step": start.steps, "saved": start.steps}
        self.status.write()
        if start.content is None:
            self._clear(context.callbacks)
        else:
            self._rewind(context.callbacks, start.steps)
        # A start that only computes missing scores keeps the record of the start that trained.
        if start.has_steps:
            self.records.replace("config.yaml", yaml.safe_dump(self.values, sort_keys=False))
            record_start(self.records, start.steps, origin, machines)
            self._introduce(state, context)

    def _build_loggers(self, step: int) -> list[Any]:
        """Build the loggers of wandb and TensorBoard, if the run uses them."""
        loggers: list[Any] = []
        if self.config.wandb.mode != "disabled":
            loggers.append(WandbLogger(self.config.wandb, self.path, self.values))
        if self.config.tensorboard:
            loggers.append(TensorBoardLogger(self.path, step))
        return loggers

    def _clear(self, callbacks: list[Any]) -> None:
        """Remove the records of an earlier start that ended before its first checkpoint; its settings may differ."""
        for name in (*row_files(callbacks), VALIDATION, TEST, START_FILE, BEST_FILE):
            (self.path / name).unlink(missing_ok=True)

    def _rewind(self, callbacks: list[Any], step: int) -> None:
        """Remove the rows of steps after the checkpoint, left behind by a killed process; these steps are repeated."""
        for name in row_files(callbacks):
            self.records.rewind(name, step)
        # At step 0, also remove the rows of the initial weights, which `Validation.start` scores again.
        last_validated = step if step > 0 else -1
        self.records.rewind(VALIDATION, last_validated)

    def _introduce(self, state: TrainState, context: RunContext) -> None:
        """Print the settings in force."""
        # The run, and the processes of each rank that draw tables.
        config = self.config
        drawers = counted(context.loader.drawers, "Ray actor" if config.stream.name == "ray" else "worker")
        resumed = f", resumed at step {state.step}" if state.step else ""
        info(f"run       {config.run_dir}{resumed}")
        info(f"prior     {config.prior['name']}, seed {config.seed}, {drawers}")

        # Real tables.
        real = real_tables(context.prior)
        described = real.describe() if real else []
        eligible = eligible_tables(config.curriculum, context.prior, config.model.is_regression)
        for line in [*described, *eligible]:
            info(f"          {line}")

        # Devices and the compiler.
        has_blocks = next(state.network.blocks(), None) is not None
        compiled = ", compiled blocks (the first steps take long)" if state.module.compiled and has_blocks else ""
        info(f"device    {self.ranks.size} x {state.device.type}{compiled}")
        if config.trainer.compile and not has_blocks:
            info("warning   trainer.compile has no effect: networks of this family have no blocks to compile")
        if shares_store():
            info("warning   restarts by torchrun may fail; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (launch/README.md)")

        # The optimizer, the number formats, and the plan.
        has_decay = any(stage.weight_decay > 0 for stage in config.curriculum.stages.values())
        about_optimizer = optimizer_remarks(state.network, state.optimizer, config.optimizer.name, has_decay)
        for line in [*about_optimizer, *policy(config.trainer), *run_plan(config)]:
            info(line)

    @contextmanager
    def failures(self, callbacks: Callbacks, state: TrainState) -> Iterator[None]:
        """Record an error that ends training, and raise it."""
        try:
            yield
        except BaseException as error:
            callbacks.on_exception(state, error)
            if self.is_writer:
                # On a full disk, the error that is raised below says so.
                with contextlib.suppress(OSError):
                    self.status.write(status="failed", cause=f"{type(error).__name__}: {first_line(error)}")
            self.records.close_loggers(1)
            raise

    def close(self, state: TrainState, reason: Reason, start: Start, stop: Stop) -> str:
        """Record and print how this start of the run ended.

        Parameters
        ----------
        state : TrainState
            Weights, optimizer and steps done.
        reason : Reason
            Why training ended.
        start : Start
            Where this start began.
        stop : Stop
            Whether this process was asked to stop.

        Returns
        -------
        str
            "finished" or "preempted".
        """
        self.records.close_loggers()
        status = "finished" if reason.is_end else "preempted"
        if not self.is_writer:
            return status
        self.status.write(status=status, step=state.step)

        # Finished.
        if status == "finished":
            number = int(state.module.skipped)
            skipped = f", {number} of them skipped" if number else ""
            info(f"finished  {state.step} steps{skipped}")
            self._print_end()
            return status

        # Preempted: `Checkpoints` has saved after the last step.
        path = self.path / "checkpoints" / f"step-{state.step:08d}.ckpt"
        # If a callback or a signal to another rank ended the run, this process was not asked to stop.
        cause = stop.cause if reason == Reason.STOPPED and stop.asked else reason.value
        command = start_command()
        info(f"preempted at step {state.step} ({cause}): saved to {path}; the same command continues{command}")
        # A start that took no step since it had no tables would be queued again and again, and end in the same way.
        if reason != Reason.NO_TABLES or state.step > start.steps:
            requeue(self.config.trainer)
        return status

    def _print_end(self) -> None:
        for line in end_lines(self.path, family_of(self.config.model).predicts_real_tables):
            info(line)


def differences_from_first(seed: int, real_tables: str | None, ranks: Ranks) -> list[str]:
    """List how this rank differs from rank 0; all ranks call this.

    Parameters
    ----------
    seed : int
        The seed of this rank's configuration.
    real_tables : str or None
        The hash of the real tables that this rank sees.
    ranks : Ranks
        All ranks.
    """
    seed_of_first, tables_of_first, plugins_of_first = ranks.from_first(lambda: (seed, real_tables, plugins.named()))
    problems = []
    if seed != seed_of_first:
        problems.append(f"seed is {seed}, but {seed_of_first} on rank 0")
    if real_tables != tables_of_first:
        problems.append("the tables in the prior's files differ from those on rank 0")
    hashes = {plugin.sha256 for plugin in plugins_of_first}
    for plugin in plugins.named():
        if plugin.sha256 not in hashes:
            problems.append(f"the plug-in {plugin.module} differs from that on rank 0")
    return problems


def row_files(callbacks: list[Any]) -> list[str]:
    """Return the files to which callbacks add rows while a run trains."""
    names: list[str] = []
    for callback in callbacks:
        names += getattr(callback, "files", ())
    return names
