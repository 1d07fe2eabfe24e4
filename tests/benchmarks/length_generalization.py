"""Accuracy and attention entropy on tables up to 16 times longer than any seen in training, by softmax rule.

    python tests/benchmarks/length_generalization.py [steps=2000] [tables=200] [folder=length_generalization]

QASSMax, SSMax and plain softmax in the `small` model, from equal seeds, take every step of one stream together: tables
of at most 160 rows, 128 labeled. Then each predicts the same 128 query rows of unseen tables from 128, 256, ..., 2,048
labeled rows, the shorter contexts being parts of the longer ones. Entropy is that of the query rows' attention over
the labeled rows, as a share of log n (1: all rows alike), mean over heads and blocks of the in-context learner.
Writes length_generalization.csv and .png, and the weights, which a second run with the same folder uses again.
"""

import csv
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from priors import TableSpec
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import build_prior
from tabicl_train.model import TabICL, attention
from tabicl_train.model.pack import Pack
from tabicl_train.module import query_losses
from tabicl_train.optimizer import build_optimizer
from tabicl_train.schedules import learning_rate
from tabicl_train.stream import StepStream
from tabicl_train.workers import Loader

RULES = {"QASSMax": "qassmax_elementwise", "SSMax": "ssmax", "softmax": "none"}
LONGEST, QUERIES = 128, 128
FACTORS = (1, 2, 4, 8, 16)

args = dict(argument.split("=") for argument in sys.argv[1:])
steps, tables = int(args.get("steps", 2000)), int(args.get("tables", 200))
folder = Path(args.get("folder", "length_generalization"))


def configure(rule: str):
    stage = (f"steps={steps}", f"rows=[32,{LONGEST * 5 // 4}]", "train_share=[0.3,0.8]", "features=[2,10]")
    stage += ("tables=16", "learning_rate=0.004", "clip=1.0", "warmup=0.05")
    settings = ["model=small", "prior=mlp_scm_causal", "curriculum=single", "stream.prefetch=8"]
    settings += [f"curriculum.stages.stage1.{value}" for value in stage]
    return compose([*settings, f"model.col_scaling={rule}", f"model.icl_scaling={rule}"])


def train() -> dict[str, TabICL]:
    """One model a rule; a step of the stream is drawn once and taken by all of them."""
    models, optimizers = {}, {}
    for name, rule in RULES.items():
        config = configure(rule)
        torch.manual_seed(0)
        models[name] = TabICL(config.model)
        optimizers[name] = build_optimizer(models[name], config.optimizer)
    if all((folder / f"{name}.pt").exists() for name in RULES):
        for name, model in models.items():
            model.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
        return models
    stage = config.curriculum.stages["stage1"]
    stream = StepStream(build_prior(config.prior), config.curriculum, config.model, config.seed, range(steps))
    losses, started = dict.fromkeys(RULES), time.perf_counter()
    with Loader(stream, config.stream) as loader:
        for item in loader:
            for name, model in models.items():
                losses[name] = take_step(model, optimizers[name], stage, item, losses[name])
            if (item.step + 1) % 100 == 0:
                shown = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
                print(f"step {item.step + 1}/{steps}: {shown}, {time.perf_counter() - started:.0f} s", flush=True)
    for name, model in models.items():
        torch.save(model.state_dict(), folder / f"{name}.pt")
    return models


def take_step(model: TabICL, optimizer, stage, item, smooth: float | None) -> float:
    """One optimizer step; returns the running loss."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(stage, item.step)
        group["weight_decay"] = stage.weight_decay if group["decayed"] else 0.0
    total = 0.0
    for pack in item.packs:
        loss = query_losses(model, pack).mean() * (len(pack) / item.tables)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), stage.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total if smooth is None else 0.98 * smooth + 0.02 * total


@torch.no_grad()
def predict(model: TabICL, X: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Logits of the query rows (QUERIES, C), and the entropy of their attention over the labeled rows / log n."""
    n, entropies, attend = len(y), [], attention.attend

    def observed(q, kv, spans, *rest):
        if q.dim() == 3 and spans.most_keys == n:  # (rows, H, head_dim) of the one table, query rows last
            scores = (
                q[-QUERIES:].transpose(0, 1) @ kv[:, 0].permute(1, 2, 0) / math.sqrt(q.shape[-1])
            )  # (H, QUERIES, n)
            entropies.append(torch.distributions.Categorical(logits=scores).entropy().mean().item() / math.log(n))
        return attend(q, kv, spans, *rest)

    with mock.patch.object(attention, "attend", observed):
        logits = model(Pack.stack(X[None], y[None]))
    in_context = entropies[-model.config.icl_num_blocks :]  # those before are the column embedding's
    return logits, sum(in_context) / len(in_context)


def measure(models: dict[str, TabICL]) -> list[dict]:
    config = configure("none")
    prior, longest = build_prior(config.prior), LONGEST * FACTORS[-1]
    scores = defaultdict(list)
    for index in range(tables):
        spec = TableSpec(longest + QUERIES, longest, 2 + index % 9, config.model.max_classes)
        table = prior.sample(spec, (config.seed + 1, 0, index))
        truth = table.y[longest:]
        for factor in FACTORS:
            context = slice(longest - factor * LONGEST, None)
            for name, model in models.items():
                logits, entropy = predict(model, table.X[context], table.y[context][: factor * LONGEST])
                correct = (logits.argmax(-1) == truth).float().mean().item()
                scores[name, factor].append((correct, F.cross_entropy(logits, truth).item(), entropy))
    rows = []
    for (name, factor), values in scores.items():
        accuracy, loss, entropy = torch.tensor(values, dtype=torch.float64).T
        gain = accuracy - torch.tensor([v[0] for v in scores[name, 1]])
        rows.append({
            "rule": name, "factor": factor, "n": factor * LONGEST, "tables": tables,
            "accuracy": accuracy.mean().item(), "log_loss": loss.mean().item(), "entropy": entropy.mean().item(),
            "gain_over_1x": gain.mean().item(), "gain_se": gain.std().item() / math.sqrt(tables),
        })  # fmt: skip
    return rows


def draw(rows: list[dict]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    titles = {"accuracy": "accuracy", "log_loss": "log loss", "entropy": "attention entropy / log n"}
    for axes, (column, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for name in RULES:
            of_rule = [row for row in rows if row["rule"] == name]
            axes.plot([row["n"] for row in of_rule], [row[column] for row in of_rule], marker="o", label=name)
        axes.axvspan(LONGEST, LONGEST * FACTORS[-1], color="0.95", zorder=0)
        axes.set(xscale="log", xlabel="labeled rows n (gray: longer than in training)", title=title)
        axes.set_xticks([f * LONGEST for f in FACTORS], [f"{f * LONGEST:,}" for f in FACTORS])
        axes.minorticks_off()
    axes.legend()
    return figure


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    rows = measure({name: model.eval() for name, model in train().items()})
    with open(folder / "length_generalization.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    draw(rows).savefig(folder / "length_generalization.png", dpi=150)
    for row in rows:
        print("{rule:8} n {n:>5,}: accuracy {accuracy:.4f} ({gain_over_1x:+.4f} +- {gain_se:.4f} over 1x), "
              "log loss {log_loss:.4f}, entropy {entropy:.3f}".format(**row))  # fmt: skip
