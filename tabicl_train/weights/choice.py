"""Which weights of a run a command takes: one rule for all commands."""

from __future__ import annotations

import functools
from pathlib import Path

from tabicl_train.console import first_line, info
from tabicl_train.errors import ConfigError
from tabicl_train.run.checkpoint import (
    DamagedCheckpoint,
    averaged_weights,
    is_run_checkpoint,
    newest_valid,
    read_checkpoint,
    saved,
    step_of,
)
from tabicl_train.run.records import Records
from tabicl_train.run.removed import REMOVED
from tabicl_train.weights import no_such_weights

BEST, NEWEST, EMA = "best", "newest", "ema"
TRAINED = "trained"  # another name of the newest weights; exports record this one
CHOICES = (BEST, NEWEST, EMA, TRAINED)
BEST_FILE = "checkpoints/best.ckpt"  # in the run directory
START_FILE = "checkpoints/start.ckpt"  # the weights that the run started from, if they were given and validated

WORDS = {
    BEST: "the best by validation",
    TRAINED: "the newest",
    EMA: "the exponential moving average",
}


def weights_in_words(kind: str, step: int, steps: int | None = None) -> str:
    """Return a phrase for the weights of a run, to be shown with their scores.

    Parameters
    ----------
    kind : str
        trained, best or ema.
    step : int
        Optimizer steps done.
    steps : int, optional
        Steps of the whole run, if known.

    Returns
    -------
    str
    """
    if kind == TRAINED and step == steps:
        return f"the final ones, of step {step:,}"
    total = "" if steps is None else f" of {steps:,}"
    return f"{WORDS.get(kind, kind)}, step {step:,}{total}"


def choice_problems(weights: str | None) -> list[str]:
    """List the problem with a choice of weights, or nothing."""
    if weights == "last":
        advice = REMOVED["averages.last"].advice
        return [f"weights is 'last', which was removed in version 0.3.0 with averages.last; {advice}"]
    if weights is None or weights in CHOICES:
        return []
    return [f"weights is {weights!r}; it must be one of {', '.join(CHOICES)}"]


def find_weights(path: Path, weights: str | None = None) -> tuple[Path, dict, str]:
    """Find the weights that a path and a choice name.

    Parameters
    ----------
    path : Path
        A run directory or a file. Resume and replay do not call this; they always take the newest checkpoint.
    weights : str, optional
        best, newest, trained or ema. Default for a run directory: best if it has them, otherwise newest; a line says
        which. A file holds one set of weights; a checkpoint of a run may also hold the average.

    Returns
    -------
    file : Path
        The file with these weights.
    content : dict
        Its content.
    kind : str
        best, trained or ema.

    Raises
    ------
    ConfigError
        If there are no such weights.
    """
    kind = TRAINED if weights == NEWEST else weights

    # A file.
    if not path.is_dir():
        file, content = load_checkpoint(str(path))
        if kind == BEST and is_run_checkpoint(content):
            raise ConfigError([f"checkpoint is {str(path)!r}; weights=best needs a run directory"])
        return file, content, kind or TRAINED

    # A run directory.
    if kind is None:
        kind = BEST if keeps_best(path) else TRAINED
    source = best_file(path) if kind == BEST else path
    file, content = load_checkpoint(str(source))
    if kind == EMA and not averaged_weights(content):
        raise ConfigError([no_average(file)])

    # Say what was taken, since the default depends on the run.
    step = content["global_step"]
    line = f"weights   {path}: {WORDS[kind]}, of step {step:,}"
    if kind == BEST:
        saved_steps = [step_of(checkpoint) for checkpoint in saved(path / "checkpoints")]
        newest = max(saved_steps, default=step)
        if newest != step:
            line += f" (the newest are of step {newest:,})"
    if kind == TRAINED and weights is None:
        line += " (no weights are marked as the best by validation)"
    say_once(line)
    return file, content, kind


def load_checkpoint(checkpoint: str) -> tuple[Path, dict]:
    """Read a file, or the newest intact checkpoint of a run directory; raises ConfigError if it cannot be read."""
    path = Path(checkpoint)
    if path.is_dir():
        newest = newest_valid(path / "checkpoints")
        if newest is None:
            raise ConfigError([f"checkpoint is {checkpoint!r}; the folder holds no checkpoint of a run"])
        return newest
    try:
        return path, read_checkpoint(path)
    except FileNotFoundError:
        raise ConfigError([no_such_weights("checkpoint", checkpoint)]) from None
    except DamagedCheckpoint as error:
        raise ConfigError([str(error)]) from None
    except (OSError, MemoryError) as error:
        raise ConfigError([f"{path} cannot be read: {first_line(error)}"]) from None


def no_average(file: Path) -> str:
    """Return the error about a checkpoint without an average of the weights."""
    return f"{file} holds no average of the weights: averages.ema was 0, or the run has just begun"


@functools.cache
def say_once(line: str) -> None:
    """Print a line unless this process has already printed it, since an estimator reads its run in every fit."""
    info(line)


def keeps_best(run_dir: Path) -> bool:
    """Whether a validation has chosen best weights, even if their file is missing."""
    if (run_dir / BEST_FILE).exists():
        return True
    return any(row.get("is_best") == "1" for row in Records(run_dir).rows("validation.csv"))


def best_file(run_dir: Path) -> Path:
    """Return the checkpoint with the best weights of a run; raises ConfigError if there is none."""
    path = run_dir / BEST_FILE
    if path.exists():
        return path
    if keeps_best(run_dir):
        raise ConfigError([f"{path}, the best weights of the run, is missing; set weights=newest"])
    raise ConfigError([f"{run_dir} has no best weights: validation.every was 0, or there has been no validation yet"])
