"""How long each stage of an experiment takes on a machine with a GPU, and which of drawing and step limits it.

python tests/benchmarks/plan_time.py [experiment=card] [workers=15] [slower=1.4] [tflops=30] [host_ms=60] [tables=60]

Drawing is measured on this machine, in CPU seconds of an accepted table, and multiplied by `slower`: a core of the
H100's host took 1.2 (stage 1 of tabicl_v2) to 1.4 times as long (short tables of base) as one of the two-core machine
of the records. A step takes its FLOPs at `tflops` TFLOP/s (30 of them were measured in eager steps of stage 1 of
tabicl_v2, before the kernels), but at least `host_ms`, which is 900 launches of 65 us.
"""

from __future__ import annotations

import sys

from profile_prior import profile, specs_of

from priors.random import one_thread
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.training.planning import expected_work


def main() -> None:
    args = {"experiment": "card", "workers": "15", "slower": "1.4", "tflops": "30", "host_ms": "60", "tables": "60"}
    args |= dict(argument.split("=") for argument in sys.argv[1:])
    config = compose([f"experiment={args['experiment']}"])
    prior = configured_prior(config.prior)

    total = 0.0  # seconds
    print("stage      steps  ms to draw a step  ms of a step  minutes  limited by")
    for name, stage in config.curriculum.stages.items():
        with one_thread():
            drawn = profile(prior, specs_of(config, name), int(args["tables"]))["all"].seconds
        seconds = float(args["slower"]) * sum(drawn) / len(drawn)  # of a table and core there
        drawing = seconds * stage.tables / int(args["workers"])
        flops = expected_work(stage, config.model, config.seed).flops / stage.steps
        step = max(flops / (1e12 * float(args["tflops"])), 1e-3 * float(args["host_ms"]))
        stage_seconds = stage.steps * max(drawing, step)
        total += stage_seconds
        limit = "drawing" if drawing > step else "step"
        print(f"{name:10} {stage.steps:5,} {1e3 * drawing:18.0f} {1e3 * step:13.0f} {stage_seconds / 60:8.1f}  {limit}")
    print(f"{total / 60:.1f} minutes, without start, validation and end")


if __name__ == "__main__":
    main()
