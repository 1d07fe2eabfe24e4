"""What a validation measures on held-out tables, synthetic or real, of classes and of numbers."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from tabicl_train.config.monitoring import INTERVAL, QUERY_SHARE
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack
from tabicl_train.model.quantiles import pinball
from tabicl_train.module import Pretraining
from tabicl_train.prediction.predict import predict

Scored = tuple[dict[str, float], list[Tensor]]  # scores by name, and the losses of the query rows of each pack


def score_classes(network: Network, module: Pretraining, packs: list[Pack]) -> Scored:
    """The columns loss, accuracy and guess_loss of CLASS_SCORES, means over the tables."""
    losses, accuracies, row_losses = [], [], []
    for pack in packs:
        with module.precision.autocast(module.device.type):
            logits = predict(network, pack).float()  # (query rows, C)
        row_losses.append(network.row_losses(logits, pack))
        losses += network.means(row_losses[-1], pack).tolist()
        accuracies += network.means((logits.argmax(-1) == network.targets(pack)).float(), pack).tolist()
    scores = {"loss": statistics.fmean(losses), "accuracy": statistics.fmean(accuracies)}
    return scores | {"guess_loss": mean_guess(network, packs)}, row_losses


def score_numbers(network: Network, module: Pretraining, packs: list[Pack]) -> Scored:
    """The columns of NUMBER_SCORES, over the tables with equal weight.

    loss is of the quantiles as the network predicts them, all others of the sorted ones: crps (twice the pinball loss),
    rmse and r2 of their mean, and coverage, the share of targets in the interval between two of them. A network that
    predicts the number itself has no crps and no coverage.
    """
    measures, row_losses = [], []  # measures (tables, 6)
    for pack in packs:
        with module.precision.autocast(module.device.type):
            quantiles = predict(network, pack).float()  # (query rows, Q)
        y = network.targets(pack)
        row_losses.append(network.row_losses(quantiles, pack))
        in_order = quantiles.sort(1).values
        low, high = (in_order[:, place(level, in_order.shape[1])] for level in INTERVAL)
        rows = (
            *(row_losses[-1], 2 * pinball(in_order, y), (in_order.mean(1) - y).square()),
            *(y, y.square(), ((low <= y) & (y <= high)).float()),
        )
        measures.append(torch.stack([network.means(values, pack) for values in rows], 1).double())
    loss, crps, error, mean, square, coverage = torch.cat(measures).unbind(1)  # (tables,)
    variance = (square - mean.square()).mean()
    scores = (loss.mean(), crps.mean(), error.mean().sqrt(), 1 - error.mean() / variance, coverage.mean())
    names = ("loss", "crps", "rmse", "r2", "coverage")
    found = {name: score.item() for name, score in zip(names, scores, strict=True)}
    if not network.predicts_quantiles:
        found = {name: found[name] for name in ("loss", "rmse", "r2")}
    return found | {"guess_loss": mean_guess(network, packs)}, row_losses


def place(level: float, num_quantiles: int) -> int:
    """The place of the quantile whose level is nearest."""
    return min(max(round(level * (num_quantiles + 1)) - 1, 0), num_quantiles - 1)


def mean_guess(network: Network, packs: list[Pack]) -> float:
    return statistics.fmean(network.guess_loss(y.cpu(), n) for pack in packs for _, y, n in pack.tables())


def diabetes(rows: int) -> Pack:
    """scikit-learn's set diabetes, at most so many rows of it, standardized by its labeled rows."""
    from sklearn.datasets import load_diabetes  # a second or two

    X, y = (torch.from_numpy(values) for values in load_diabetes(return_X_y=True))
    chosen = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))[:rows]
    table = torch.cat([X, y[:, None]], 1)[chosen]  # (rows, features and target)
    n = len(table) - round(QUERY_SHARE * len(table))
    table = ((table - table[:n].mean(0)) / table[:n].std(0)).float()
    return Pack.of([(table[:, :-1], table[:, -1], n)])
