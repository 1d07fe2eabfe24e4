"""Adds a checkpoint of a past version: python add.py NAME FOLDER [KEY=VALUE ...]

NAME: of the file, COMMIT-WHAT; FOLDER: a checkout of that version (`git worktree add --detach FOLDER COMMIT`); then the
settings of the run besides SMALL. The version's own code trains half of the run, which is kept as NAME.ckpt.xz, and
continues a copy of it to its end; sum and norm of each final weight go to runs.json, for the test to compare with.
"""

import json
import lzma
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

PAST = Path(__file__).parent
SMALL = [
    "experiment=smoke", "trainer.accelerator=cpu", "trainer.cpu_threads=1", "stream.num_workers=0",
    "curriculum.stages.smoke.steps=8", "curriculum.stages.smoke.tables=4", "curriculum.stages.smoke.group_size=2",
    "model.embed_dim=8", "model.col_num_inducing=2", "model.col_num_heads=1", "model.row_num_blocks=1",
    "model.row_num_heads=1", "model.row_num_cls=1", "model.icl_num_blocks=1", "model.icl_num_heads=1",
]  # fmt: skip
HALF = 4  # steps


def train(version: str, folder: str, settings: list[str]) -> None:
    code = "from tabicl_train.commands import train; train()"
    environment = os.environ | {"PYTHONPATH": version, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, *settings, "run_dir=run"], cwd=folder, env=environment, check=True)


def summary(weights: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Sum and norm of each weight."""
    return {name: [w.double().sum().item(), w.double().norm().item()] for name, w in weights.items()}


def main(name: str, version: str, *overrides: str) -> None:
    settings = [*SMALL, *overrides]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder, "run", "checkpoints")
        train(str(Path(version).resolve()), folder, [*settings, f"trainer.max_steps={HALF}"])
        half = (checkpoints / f"step-{HALF:08d}.ckpt").read_bytes()
        train(str(Path(version).resolve()), folder, settings)
        end = torch.load(checkpoints / f"step-{2 * HALF:08d}.ckpt", weights_only=True)
    (PAST / f"{name}.ckpt.xz").write_bytes(lzma.compress(half))
    index = PAST / "runs.json"
    runs = json.loads(index.read_text()) if index.exists() else {}
    runs[name] = {"settings": settings, "end": summary(end["state_dict"])}
    index.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
