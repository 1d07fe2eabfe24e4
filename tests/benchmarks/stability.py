"""Do runs hold in bf16? mini, shortened: 2 seeds x {fp32, bf16} x {QASSMax as published, with a bound}.

    python tests/benchmarks/stability.py [folder=runs/stability] [share=0.17] [seeds=2] [processes=2]
        [SETTING=VALUE ...]

share: of each stage's steps; with 0.17 all eight runs take 34 minutes. Further settings are those of tabicl-train. Two
runs at a time, one thread each; finished runs are not repeated. Prints one line for each run: mean loss of the last
tenth of the logged steps, largest multiplier of any layer, incidents, steps skipped.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from tabicl_train.config.compose import compose

BOUND = 30
BASE = ["experiment=demo", "curriculum=mini", "trainer.accelerator=cpu"]


def train(run_dir: Path, overrides: list[str]) -> None:
    with open(run_dir.with_suffix(".log"), "a") as log:
        command = [sys.executable, "-m", "tabicl_train", *BASE, f"run_dir={run_dir}", *overrides]
        subprocess.run(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)


def read(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def report(name: str, run_dir: Path) -> float:
    rows, scaling = read(run_dir / "metrics.csv"), read(run_dir / "scaling.csv")
    last = [float(row["loss"]) for row in rows[-max(len(rows) // 10, 1) :]]
    loss = sum(last) / len(last)
    multiplier = max(float(row[key]) for row in scaling for key in ("at_smallest", "at_largest"))
    incidents = (run_dir / "incidents.jsonl").read_text().count("\n") if (run_dir / "incidents.jsonl").exists() else 0
    print(f"{name:24}{rows[-1]['step']:>7}{loss:>9.4f}{multiplier:>12.2f}{incidents:>11}{rows[-1]['skipped']:>9}")
    return loss


if __name__ == "__main__":
    args = dict(argument.split("=", 1) for argument in sys.argv[1:])
    folder, share = Path(args.pop("folder", "runs/stability")), float(args.pop("share", 0.17))
    seeds, processes = int(args.pop("seeds", 2)), int(args.pop("processes", 2))
    folder.mkdir(parents=True, exist_ok=True)
    stages = compose(BASE).curriculum.stages
    steps = [f"curriculum.stages.{name}.steps={max(round(stage.steps * share), 1)}" for name, stage in stages.items()]
    steps += [f"{name}={value}" for name, value in args.items()]
    runs = {
        f"seed{seed}-{precision}-{kind}": [f"seed={seed}", f"trainer.precision={precision}", *bound, *steps]
        for (kind, bound), seed, precision in product(
            {"plain": [], "bounded": [f"model.scaling_bound={BOUND}"]}.items(), range(seeds), ("fp32", "bf16")
        )
    }
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda name: train(folder / name, runs[name]), runs))
    print(f"{'run':24}{'steps':>7}{'loss':>9}{'multiplier':>12}{'incidents':>11}{'skipped':>9}")
    losses = {name: report(name, folder / name) for name in runs}
    for name in runs:
        if "bf16" in name:
            fp32 = losses[name.replace("bf16", "fp32")]
            print(f"{name}: {losses[name] / fp32 - 1:+.2%} beside fp32")
