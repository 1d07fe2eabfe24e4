"""Training steps on fake CUDA tensors; a process of its own, since the guard comes before torch.

    python tests/fake_cuda/probe.py count stage1
    python tests/fake_cuda/probe.py store

suite  what test_fake_cuda.py asserts: checks, planted faults, costs of a step; in JSON
count  what a case of CASES costs: operators, kernel launches, FLOPs and bytes by part, and the operators that
       launch and move most
store  writes the costs of some cases to costs.json, by which tests/benchmarks/gpu.py predicts times
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fake_device

SETTINGS = ("curriculum=tabicl_v2", "run_dir=unused", "trainer.accelerator=cuda")
COSTS = Path(__file__).with_name("costs.json")
PLAIN = "stage1, plain"  # without Triton, and attention as one call for each run of equal sequences
LONG = ("curriculum.stages.stage3.rows=[60000,60000]", "curriculum.stages.stage3.tables=1")
# Steps of the curriculum, no first ones, and settings. The tables of stage 1 are those of a real step, of average size.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "stage1": (2, ()),
    PLAIN: (2, ()),
    "stage2": (500_001, ()),
    "stage3": (540_001, ()),
    "long": (540_001, LONG),
}
STORED = ("stage1", "stage2", "long")
FEW_BLOCKS = ("model.col_num_blocks=1", "model.row_num_blocks=2", "model.icl_num_blocks=2")
FEW_TABLES = tuple(f"curriculum.stages.{stage}.tables=8" for stage in ("stage1", "stage2", "stage3"))
STEPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "stage 1": (0, FEW_BLOCKS),
    "fp32": (1, ("trainer.precision=fp32", *FEW_TABLES, *FEW_BLOCKS)),
    "fp16 and dropout": (2, ("trainer.precision=fp16", "model.dropout=0.1", *FEW_TABLES, *FEW_BLOCKS)),
    "signed averaging": (
        3,
        ("model.col_scaling=ssa_trainable", "model.icl_scaling=ssa_trainable", *FEW_TABLES, *FEW_BLOCKS),
    ),
    "stage 2": (500_000, (*FEW_TABLES, *FEW_BLOCKS)),
    "stage 3": (540_000, (*FEW_TABLES, *FEW_BLOCKS)),
    "a table of 60,000 rows": (540_000, (*LONG, *FEW_BLOCKS)),
}


def check(step: int, overrides: tuple[str, ...]) -> list[str]:
    """What does not lie on the device after a step, in which the host may not wait."""
    from fake_step import Run

    with fake_device.fake_cuda(), Run([*SETTINGS, "averages.ema=0.99", *overrides], step) as run:
        run.train_step()
        return run.off_device()


@contextlib.contextmanager
def plain() -> Iterator[None]:
    from tabicl_train.model.kernels.row_attention import attend_rows_by_run

    def attend_rows(q, kv, runs, starts, cos, sin, interleaved):
        return attend_rows_by_run(q, kv, runs.tolist(), cos, sin, interleaved)

    with (
        mock.patch("tabicl_train.model.attention.fits_one_launch", return_value=False),
        mock.patch("tabicl_train.model.attention.attend_rows", attend_rows),
        mock.patch("tabicl_train.model.scaling.HAS_TRITON", False),
    ):
        yield


def count(case: str) -> dict[str, Any]:
    """The costs of each operator, by part: launches, FLOPs, bytes and calls; the tokens of the step."""
    from fake_step import Run
    from kernel_count import counted

    step, overrides = CASES[case]
    kernels = plain() if case == PLAIN else contextlib.nullcontext()
    with kernels, fake_device.fake_cuda(), Run([*SETTINGS, *overrides], step) as run:
        run.fill_optimizer()
        with counted(run.module.model, run.optimizer) as counts:
            run.train_step()
        tokens = sum(map(run.module.tokens_of, run.item.packs))
        operators = sorted([*key, *dataclasses.astuple(cost)] for key, cost in counts.operators.items())
        return {"passes": len(run.item.packs), "tokens": tokens, "operators": operators}


def faults() -> dict[str, str]:
    """The type of the error that tells of each planted fault."""
    from fake_step import Run
    from planted_faults import FAULTS

    errors = {}
    for name, (planted, overrides, _) in FAULTS.items():
        with fake_device.fake_cuda(), Run([*SETTINGS, *overrides], 3) as run, planted():
            try:
                run.train_step()
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"
    return errors


def suite() -> dict[str, Any]:
    from planted_faults import MANY_HEADS

    steps = {**STEPS, "more columns than a launch takes": (3, MANY_HEADS)}
    checks = {name: check(step, overrides) for name, (step, overrides) in steps.items()}
    return {"checks": checks, "faults": faults(), "costs": count("stage1")}


def show(content: dict[str, Any]) -> None:
    parts: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0])
    for part, _, *cost in content["operators"]:
        for name in (part, "all"):
            parts[name] = [a + b for a, b in zip(parts[name], cost, strict=True)]
    print(f"{content['passes']} passes, {content['tokens']:,} tokens")
    print(f"{'part':12}{'operators':>10}{'launches':>10}{'TFLOP':>10}{'GB':>10}")
    for part in sorted(parts, key=lambda name: (name == "all", name)):
        operators, launches, flops, moved = parts[part]
        print(f"{part:12}{operators:10}{launches:10}{flops / 1e12:10.3f}{moved / 1e9:10.1f}")
    for column in (3, 5):  # launches, bytes
        print()
        for part, name, _, launches, _, moved in sorted(content["operators"], key=lambda row: -row[column])[:25]:
            print(f"{part:10} {name:60} {launches:6} launches {moved / 1e9:8.1f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("suite", "count", "store"))
    parser.add_argument("cases", nargs="*", default=list(CASES), help="of count; by default all")
    parser.add_argument("--guard", type=Path, help="folder of the compiled guard; by default it is compiled anew")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fake_device.load_guard(fake_device.build_guard(args.guard or Path(folder)))
        if args.task == "suite":
            print(json.dumps(suite()))
            return
        contents = {case: count(case) for case in (STORED if args.task == "store" else args.cases)}
    if args.task == "store":
        rows = {
            case: ",\n".join(json.dumps(row) for row in content.pop("operators")) for case, content in contents.items()
        }
        texts = (
            f'"{case}": {json.dumps(content)[:-1]}, "operators": [\n{rows[case]}]}}'
            for case, content in contents.items()
        )
        COSTS.write_text("{" + ",\n".join(texts) + "}\n")
        return
    for case, content in contents.items():
        print(case, end=": ")
        show(content)


if __name__ == "__main__":
    main()
