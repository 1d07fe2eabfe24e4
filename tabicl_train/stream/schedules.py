"""Schedules: the learning rate of a step of a stage, by the names of `register.schedule`.

A schedule is a function of the stage and of the step in it, counted from 0, that returns the learning rate. It may also
be a dataclass whose fields are its options and whose objects are called in the same way. All schedules share a linear
warmup, and are called for the steps after it.
"""

from __future__ import annotations

import math
import numbers

from tabicl_train.config.build import build_callable
from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.console import first_line
from tabicl_train.doors import register
from tabicl_train.errors import ConfigError

__all__ = ["learning_rate", "progress"]


def learning_rate(stage: StageConfig, step: int) -> float:
    """Compute the learning rate of a step: a linear warmup to the peak, then the schedule of the stage.

    Parameters
    ----------
    stage : StageConfig
        The stage; its `learning_rate` is the peak.
    step : int
        The step in the stage, counted from 0.

    Returns
    -------
    float
        With W = warmup * steps, ``peak * (step + 1) / (W + 1)`` in the first W steps, then what the schedule returns.

    Raises
    ------
    ConfigError
        If the schedule returns something other than a finite number of at least 0.
    """
    warmup = stage.warmup * stage.steps
    if step < warmup:
        return stage.learning_rate * (step + 1) / (warmup + 1)
    # After the warmup, ask the schedule, which may be a plug-in's.
    schedule = build_callable(register.schedule[stage.schedule], stage.schedule_options)
    rate = schedule(stage, step)
    if not isinstance(rate, numbers.Real) or not 0 <= float(rate) < math.inf:
        problem = f"schedule={stage.schedule} returns {rate!r} for step {step} of a stage of {stage.steps}"
        raise ConfigError([f"{problem}; it must return a finite number of at least 0"])
    # A checkpoint that holds a NumPy number could not be loaded.
    return float(rate)


def progress(stage: StageConfig, step: int, start: float | None = None) -> float:
    """Return the share of a decay that is done, from 0 at its first step to 1 at the last step of the stage.

    Parameters
    ----------
    stage : StageConfig
        The stage.
    step : int
        The step in the stage, counted from 0.
    start : float, optional
        The first step of the decay. Default: the first step after the warmup.

    Returns
    -------
    float
        In [0, 1].
    """
    if start is None:
        start = stage.warmup * stage.steps
    last = stage.steps - 1
    return min(max((step - start) / max(last - start, 1), 0.0), 1.0)


def cosine(stage: StageConfig, step: int) -> float:
    """Fall from the peak to the final rate along half a cosine: ``final + (peak - final) (1 + cos(pi progress)) / 2``.

    References
    ----------
    Loshchilov and Hutter, SGDR, arXiv 1608.03983, section 3.
    """
    peak, final = stage.learning_rate, stage.final_learning_rate
    return final + (peak - final) * (1 + math.cos(math.pi * progress(stage, step))) / 2


def linear(stage: StageConfig, step: int) -> float:
    """Fall from the peak to the final rate in a straight line: ``peak + (final - peak) progress``."""
    peak, final = stage.learning_rate, stage.final_learning_rate
    return peak + (final - peak) * progress(stage, step)


def wsd(stage: StageConfig, step: int) -> float:
    """Stay at the peak, then fall to the final rate in a straight line (warmup, stable, decay).

    The fall begins after a share 1 - decay of the stage's steps, but not before the warmup ends.

    References
    ----------
    Hu et al., MiniCPM, arXiv 2404.06395, section 4.
    """
    start = max(stage.warmup * stage.steps, (1 - stage.decay) * (stage.steps - 1))
    peak, final = stage.learning_rate, stage.final_learning_rate
    return peak + (final - peak) * progress(stage, step, start)


def constant(stage: StageConfig, step: int) -> float:
    """Stay at the peak."""
    return stage.learning_rate


def schedule_problems(curriculum: CurriculumConfig) -> list[str]:
    """List the stages whose schedule fails at the first step after the warmup, or at the last one."""
    problems = []
    for name, stage in curriculum.stages.items():
        try:
            learning_rate(stage, min(math.ceil(stage.warmup * stage.steps), stage.steps - 1))
            learning_rate(stage, stage.steps - 1)
        except Exception as error:
            # A plug-in may raise any error.
            problems.append(f"curriculum.stages.{name}.schedule is {stage.schedule!r}; it fails: {first_line(error)}")
    return problems


register.schedule("cosine", cosine)
register.schedule("linear", linear)
register.schedule("wsd", wsd)
register.schedule("constant", constant)
