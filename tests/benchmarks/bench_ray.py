"""Steps per second drawn by local workers and by Ray actors of this machine, in turn.

    python tests/benchmarks/bench_ray.py [priors=mlp_scm,graph_scm] [workers=2] [steps=20] [rounds=7]

Each round takes `steps` steps from either; what one has drawn ahead when its turn ends is the same for both. Further
options: tables=16 (of a step), rows=1024.
"""

from __future__ import annotations

import sys
import time
from statistics import median

from priors import build_prior
from tabicl_train.config.schema import CurriculumConfig, StageConfig, StreamConfig
from tabicl_train.distributed.ray_actors import RayLoader
from tabicl_train.model import TabICLConfig
from tabicl_train.stream import StepStream
from tabicl_train.workers import Loader

if __name__ == "__main__":
    args = {"priors": "mlp_scm,graph_scm", "workers": "2", "steps": "20", "rounds": "7", "tables": "16", "rows": "1024"}
    args |= dict(argument.split("=") for argument in sys.argv[1:])
    workers, steps, rounds, tables, rows = (int(args[n]) for n in ("workers", "steps", "rounds", "tables", "rows"))
    stage = StageConfig(steps=steps * rounds + 1, rows=[rows, rows], features=[1, 100], tables=tables, group_size=4)
    curriculum = CurriculumConfig({"only": stage})
    for name in args["priors"].split(","):
        stream = StepStream(build_prior(name), curriculum, TabICLConfig(), 0, range(stage.steps))
        settings = {"num_workers": workers, "prefetch": 1}
        with (
            Loader(stream, StreamConfig(**settings)) as local,
            RayLoader(stream, StreamConfig("ray", **settings)) as remote,
        ):
            seconds: list[list[float]] = [[], []]
            for loader in (local, remote):
                loader.start()
                loader.next()  # to warm up
            for _ in range(rounds):
                for loader, spent in zip((local, remote), seconds, strict=True):
                    start = time.perf_counter()
                    for _ in range(steps):
                        loader.next()
                    spent.append(time.perf_counter() - start)
        for kind, spent in zip((f"{workers} local workers", f"{workers} Ray actors"), seconds, strict=True):
            print(f"{name:10} {kind:16} {steps / median(spent):7.2f} steps/s of {tables} tables of {rows} rows")
        ratios = sorted(a / b for a, b in zip(*seconds, strict=True))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"{name:10} ratio {median(ratios):.2f} (median of {rounds} rounds of {steps} steps; {spread})")
