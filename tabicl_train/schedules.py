"""Learning rates: pure functions of a stage and the step within it, so that they can be plotted before a run.

All begin with a linear warm-up to the peak and run to the final learning rate of the stage:

    cosine      half a cosine to the end
    linear      a straight line to the end
    wsd         warm-up, stable, decay: the peak, then a straight line over the last `decay` of the steps
    constant    the peak to the end
"""

from __future__ import annotations

import math

from tabicl_train.config.schema import StageConfig


def learning_rate(stage: StageConfig, step: int) -> float:
    """Learning rate of a step (from 0) within its stage."""
    warmup = stage.warmup * stage.steps
    if step < warmup:
        return stage.learning_rate * (step + 1) / (warmup + 1)
    last = stage.steps - 1
    falls_from = max(warmup, (1 - stage.decay) * last) if stage.schedule == "wsd" else warmup
    done = min(max((step - falls_from) / max(last - falls_from, 1), 0.0), 1.0)  # 0 before it falls, 1 at the last step
    peak, final = stage.learning_rate, stage.final_learning_rate
    match stage.schedule:
        case "cosine":
            return final + (peak - final) * (1 + math.cos(math.pi * done)) / 2
        case "linear" | "wsd":
            return peak + (final - peak) * done
        case _:
            return peak
