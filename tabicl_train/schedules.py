"""Learning rates as pure functions of a stage and the step within it, so that they can be plotted before a run.

All begin with a linear warm-up to the peak, the stage's learning rate. The last step has the final learning rate:

    cosine      half a cosine to the end
    linear      a straight line to the end
    wsd         warm-up, stable, decay: the peak, then a straight line over the last `decay` of the steps
    constant    the peak to the end, whatever the final learning rate
"""

from __future__ import annotations

import math

from tabicl_train.config.schema import StageConfig


def learning_rate(stage: StageConfig, step: int) -> float:
    """Compute the learning rate of a step.

    Cosine: Loshchilov and Hutter, SGDR, arXiv 1608.03983, section 3. Warm-up, stable, decay: Hu et al., MiniCPM,
    arXiv 2404.06395, section 4.
    """
    warmup = stage.warmup * stage.steps
    if step < warmup:
        return stage.learning_rate * (step + 1) / (warmup + 1)
    last = stage.steps - 1
    decay_start = max(warmup, (1 - stage.decay) * last) if stage.schedule == "wsd" else warmup
    # 0 before the decay, 1 at the last step
    done = min(max((step - decay_start) / max(last - decay_start, 1), 0.0), 1.0)
    peak, final = stage.learning_rate, stage.final_learning_rate
    match stage.schedule:
        case "cosine":
            return final + (peak - final) * (1 + math.cos(math.pi * done)) / 2
        case "linear" | "wsd":
            return peak + (final - peak) * done
        case _:
            return peak
