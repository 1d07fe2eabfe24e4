"""The folder of a run with random weights: what training would have written, without training."""

import dataclasses
from pathlib import Path

import torch
from short_runs import module_of
from small_networks import randomize

from priors.random import STREAM_VERSION
from tabicl_train.config.compose import compose
from tabicl_train.run_dir.records import Records

STEP = 10
SMALLEST = [f"model.{name}" for name in (
    "embed_dim=16", "col_num_blocks=1", "col_num_heads=2", "col_num_inducing=4", "row_num_blocks=1", "row_num_heads=2",
    "row_num_cls=2", "icl_num_blocks=2", "icl_num_heads=2",
)]  # fmt: skip


def random_weights(config, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    module = module_of(config)
    randomize(module)
    return module.state_dict()


def make_run(folder: Path, *overrides: str) -> dict[str, dict[str, torch.Tensor]]:
    """Write a run's folder after step 10, whose best weights are from step 5; returns its weights by kind."""
    config = compose(["experiment=smoke", f"run_dir={folder}", *SMALLEST, *overrides])
    trained, ema, first, second, best = (random_weights(config, seed) for seed in range(5))
    unprefixed = [{name.removeprefix("model."): w for name, w in weights.items()} for weights in (ema, first, second)]
    (folder / "checkpoints").mkdir(parents=True)
    content = {
        "config": dataclasses.asdict(config),
        "callbacks": {"Averages": {"ema": unprefixed[0], "since": 0, "points": unprefixed[1:]}},
    }
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    made = {
        "commit": "c0ffee",
        "diff": "+ x",
        "versions": versions,
        "command": ["tabicl-train", "seed=0", "run_dir=/x"],
    }
    run = content | {"global_step": STEP, "state_dict": trained, "run": made | {"stream_version": STREAM_VERSION}}
    torch.save(run, folder / f"checkpoints/step-{STEP:08d}.ckpt")
    torch.save(content | {"global_step": 5, "state_dict": best}, folder / "checkpoints/best.ckpt")
    records = Records(folder)
    records.append_line("provenance.jsonl", {"step": 0} | made | {"commit": "first", "diff": ""})
    records.append_line("provenance.jsonl", {"step": 5} | made)
    for step in (5, STEP):
        rows = (
            {"step": step, "data": "synthetic", "rows": 64, "loss": step / 8, "accuracy": 0.5, "roc_auc": None},
            {"step": step, "data": "iris", "rows": 60, "loss": 1.5, "accuracy": 0.5, "roc_auc": step / 16},
        )
        records.append_rows("validation.csv", *(row | {"is_best": int(step == 5)} for row in rows))
    mean = {name: (a + b) / 2 for (name, a), b in zip(unprefixed[1].items(), unprefixed[2].values(), strict=True)}
    of_module = {"trained": trained, "best": best}
    plain = {kind: {k.removeprefix("model."): w for k, w in of.items()} for kind, of in of_module.items()}
    return plain | {"ema": unprefixed[0], "last": mean}
