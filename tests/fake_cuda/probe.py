"""Runs training steps on fake CUDA tensors; a process of its own, since the guard comes before torch.

    python tests/fake_cuda/probe.py check trainer.precision=fp32
    python tests/fake_cuda/probe.py count step=500000

check   the step runs, and the host never waits
count   operators, kernel launches, FLOPs and bytes of the step, by part; before that the operators that move most
faults  what tells of each planted fault

The step's number is `step`, by default 0; other arguments are settings of the run, with curriculum=tabicl_v2. The last
line of the output is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import fake_device

SETTINGS = ("curriculum=tabicl_v2", "run_dir=unused", "trainer.accelerator=cuda", "averages.ema=0.99")


def check(step: int, overrides: list[str]) -> dict:
    """What does not lie on the device after the step."""
    from fake_step import Run

    with fake_device.fake_cuda(), Run([*SETTINGS, *overrides], step) as run:
        run.train_step()
        return {"off_device": run.off_device()}


def count(step: int, overrides: list[str]) -> dict:
    """The costs of each part."""
    from fake_step import Run
    from kernel_count import counted

    with fake_device.fake_cuda(), Run([*SETTINGS, *overrides], step) as run:
        run.fill_optimizer()
        with counted(run.module.model, run.module.optimizer) as counts:
            run.train_step()
        for (part, name), cost in sorted(counts.operators.items(), key=lambda item: -item[1].bytes)[:40]:
            print(f"{part:10} {name:60} {cost.launches:6} launches {cost.bytes / 1e9:8.1f} GB")
        return {part: dataclasses.asdict(cost) for part, cost in counts.parts.items()}


def faults() -> dict:
    """The error of each planted fault, or None."""
    from fake_step import Run
    from planted_faults import FAULTS

    errors = {}
    for name, (planted, overrides, _) in FAULTS.items():
        with fake_device.fake_cuda(), Run([*SETTINGS, *overrides], 3) as run, planted():
            try:
                run.train_step()
            except Exception as error:
                errors[name] = [type(error).__name__, str(error)]
    return errors


def main() -> None:
    task, *arguments = sys.argv[1:]
    options = dict(text.split("=", 1) for text in arguments if text.startswith(("step=", "guard=")))
    overrides = [text for text in arguments if not text.startswith(("step=", "guard="))]
    folder = Path(options.get("guard", tempfile.mkdtemp(prefix="guard")))
    fake_device.load_guard(fake_device.build_guard(folder))
    step = int(options.get("step", 0))
    result = {"check": check, "count": count}[task](step, overrides) if task != "faults" else faults()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
