"""Scores of a network on tables: packs of classes or numbers, items of a stream, public real data, and probes."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tabicl_train.config.schema import INTERVAL, PROBE, QUERY_SHARE, judged_by
from tabicl_train.console import first_line, info
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack
from tabicl_train.model.quantiles import pinball
from tabicl_train.precision import Precision
from tabicl_train.prediction.predict import predict
from tabicl_train.run_dir.curves import OUTSIDE
from tabicl_train.stream import StepItem

# What the scores of an estimator are called in validation.csv.
ESTIMATOR_CLASS_SCORES = {"loss": "log_loss", "accuracy": "accuracy", "roc_auc": "roc_auc"}
ESTIMATOR_NUMBER_SCORES = {"loss": "pinball", "rmse": "rmse", "r2": "r2", "coverage": "coverage"}


@dataclass(frozen=True)
class Scored:
    """Scores of a network on one set of tables."""

    data: str  # a part of the prior, a public real table, or "probe NAME"
    rows: int  # of a table
    scores: dict[str, float | None]  # by column of validation.csv; None where it does not apply
    losses: list[tuple[Hashable, float]] = field(default_factory=list)  # of each query row or table, by cluster
    sizes: dict[str, int] | None = None  # of a public real table or a probe, see Task.sizes; None for drawn tables
    trained_range: str = ""  # inside, outside or empty, the column of validation.csv; Validation knows it


def score_network(
    network: Network,
    items: Iterable[tuple[str, StepItem]],
    real_rows: int,
    with_probes: bool,
    precision: Precision,
    before_each: Callable[[], None] = lambda: None,
) -> list[Scored]:
    """Score a network in evaluation mode on drawn tables, public real ones of at most `real_rows` rows, and probes."""
    # The tables of an item have the same number of rows; it comes with the name of its part of the prior. `before_each`
    # is called before each set of tables, and may raise an exception to stop.
    scored = []
    for part, item in items:
        before_each()
        scored.append(score_item(network, part, item, precision))
    for task in real_tasks(network.config.is_regression, real_rows):
        before_each()
        scored.append(score_real(network, task, precision))
    if with_probes:
        for probe in probe_tasks(network.config.is_regression):
            before_each()
            scored.append(score_probe(network, probe))
    return scored


def score_packs(
    network: Network, packs: list[Pack], precision: Precision
) -> tuple[dict[str, float | None], list[Tensor]]:
    """Return scores by column of validation.csv, with equal weights of tables, and losses of each pack's query rows."""
    # For numbers, the loss uses the quantiles as predicted, and all other scores use sorted ones: crps (twice the
    # pinball loss), rmse and r2 of their mean, and coverage, the share of targets in the interval between two of them.
    # A network that predicts the number itself has no crps and no coverage.
    device = next(network.parameters()).device
    measure = measure_numbers if network.config.is_regression else is_correct
    row_losses = []
    means_of_tables = []
    for pack_on_host in packs:
        pack = pack_on_host.to(device)
        with precision.autocast(device.type):
            predictions = predict(network, pack).float()  # (query rows, outputs)
        losses = network.row_losses(predictions, pack)
        row_losses.append(losses)
        of_rows = (losses, *measure(predictions, network.targets(pack)))  # each (query rows,)
        of_tables = [network.means(values, pack) for values in of_rows]  # each (tables,)
        means_of_tables.append(torch.stack(of_tables, 1).double())
    columns = torch.cat(means_of_tables).unbind(1)  # each (tables,), of all packs
    guess_losses = [network.guess_loss(y.cpu(), n) for pack in packs for _, y, n in pack.tables()]
    guess_loss = statistics.fmean(guess_losses)

    if not network.config.is_regression:
        of_loss, of_correct = columns
        loss = statistics.fmean(of_loss.tolist())
        accuracy = statistics.fmean(of_correct.tolist())
        return {"loss": loss, "accuracy": accuracy, "guess_loss": guess_loss}, row_losses
    of_loss, of_crps, of_squared_error, of_target, of_squared_target, of_coverage = columns
    # The mean of the variances within tables, not that of the targets of all tables.
    variance = (of_squared_target - of_target.square()).mean().item()
    squared_error = of_squared_error.mean().item()
    scores: dict[str, float | None] = {
        "loss": of_loss.mean().item(),
        "rmse": math.sqrt(squared_error),
        "r2": 1 - squared_error / variance,
        "guess_loss": guess_loss,
    }
    if network.predicts_quantiles:
        scores |= {"crps": of_crps.mean().item(), "coverage": of_coverage.mean().item()}
    return scores, row_losses


def is_correct(logits: Tensor, y: Tensor) -> tuple[Tensor]:
    """Return whether the prediction is correct, of each row."""
    return ((logits.argmax(-1) == y).float(),)


def measure_numbers(quantiles: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return CRPS, squared error, target, its square, and whether it lies in the interval, of each row."""
    in_order = quantiles.sort(1).values
    crps = 2 * pinball(in_order, y)
    error = (in_order.mean(1) - y).square()
    lowest_level, highest_level = INTERVAL
    low = in_order[:, place(lowest_level, in_order.shape[1])]
    high = in_order[:, place(highest_level, in_order.shape[1])]
    is_covered = ((low <= y) & (y <= high)).float()
    return crps, error, y, y.square(), is_covered


def place(level: float, num_quantiles: int) -> int:
    """Return the index of the quantile with the nearest level."""
    return min(max(round(level * (num_quantiles + 1)) - 1, 0), num_quantiles - 1)


def score_item(network: Network, part: str, item: StepItem, precision: Precision) -> Scored:
    """Score tables of a part of the prior, and keep the loss of each table, or of each query row with its cluster."""
    scores, row_losses = score_packs(network, item.packs, precision)
    losses: list[tuple[Hashable, float]] = []
    clusters = enumerate(item.clusters)  # for each table of the step, those of its query rows, or None
    for pack, of_rows in zip(item.packs, row_losses, strict=True):
        of_tables = network.means(of_rows, pack.to(of_rows.device)).tolist()
        end = 0
        for (rows, labeled, _), of_table in zip(pack.shapes, of_tables, strict=True):
            table, clusters_of_rows = next(clusters)
            start = end
            end = start + rows - labeled
            if clusters_of_rows is None:  # the table is its own cluster
                losses.append(((item.step, table), of_table))
            else:
                losses += zip(clusters_of_rows, of_rows[start:end].tolist(), strict=True)
    return Scored(part, item.packs[0].shapes[0][0], scores, losses)


def cluster_means(scored: Iterable[Scored], part: str) -> dict[Hashable, float]:
    """Return the mean loss of each cluster of a part of the prior, without sets outside the trained range."""
    by_cluster: dict[Hashable, list[float]] = {}
    for one in scored:
        if one.data != part or one.trained_range == OUTSIDE:
            continue
        for cluster, loss in one.losses:
            by_cluster.setdefault(cluster, []).append(loss)
    return {cluster: statistics.fmean(losses) for cluster, losses in by_cluster.items()}


@functools.cache
def real_tasks(is_regression: bool, rows: int) -> list[Any]:
    """Load the public real tables for `score_real`."""
    if rows == 0:
        return []
    if is_regression:
        return [diabetes(rows)]
    from tabicl_train.evaluation.suites import load_suite  # scikit-learn and pandas, a second or two

    return list(load_suite("sklearn", None, rows))


@functools.cache
def probe_tasks(is_regression: bool) -> list[Any]:
    """Draw the probes for `score_probe`."""
    from tabicl_train.evaluation.probes import validation_probes  # scikit-learn and pandas, a second or two

    return list(validation_probes(is_regression))


def diabetes(rows: int) -> Pack:
    """Load at most so many rows of scikit-learn's set diabetes, standardized by its labeled rows."""
    from sklearn.datasets import load_diabetes

    X, y = load_diabetes(return_X_y=True)
    table = torch.cat([torch.from_numpy(X), torch.from_numpy(y)[:, None]], 1)  # (rows, features and target)
    table = table[torch.randperm(len(X), generator=torch.Generator().manual_seed(0))[:rows]]
    n = len(table) - round(QUERY_SHARE * len(table))
    table = ((table - table[:n].mean(0)) / table[:n].std(0)).float()
    return Pack.of([(table[:, :-1], table[:, -1], n)])


def sizes_of(task: Any) -> dict[str, int]:
    """Return the sizes of a public real table."""
    if not isinstance(task, Pack):
        return task.sizes
    _, labeled_rows, features = task.shapes[0]
    return {"labeled_rows": labeled_rows, "features": features}


def name_of(task: Any) -> str:
    """Return the name of a public real table."""
    return "diabetes" if isinstance(task, Pack) else task.name


def score_real(network: Network, task: Any, precision: Precision) -> Scored:
    """Score a public real table; classes are predicted by a TabICLClassifier with one ensemble member, in fp32."""
    if isinstance(task, Pack):
        scores, _ = score_packs(network, [task], precision)
        return Scored(name_of(task), task.shapes[0][0], scores, sizes=sizes_of(task))
    scores = score_estimator(network, task)
    return Scored(name_of(task), len(task.y), scores, sizes=sizes_of(task))


def score_probe(network: Network, probe: Any) -> Scored:
    """Score the first draw of a probe by an estimator with one ensemble member, in fp32, and what is possible on it."""
    scores = score_estimator(network, probe)
    possible = probe.possible(0)[judged_by(scores)]
    return Scored(PROBE + probe.probe, len(probe.y), scores | {"possible": possible}, sizes=probe.sizes)


def score_estimator(network: Network, task: Any) -> dict[str, float | None]:
    """Score an estimator with one ensemble member on the first split of a task, by column of validation.csv."""
    # The loss of numbers is the pinball loss at nine levels, which estimators predict, instead of all of the network's.
    from tabicl_train.evaluation.evaluate import score_task
    from tabicl_train.prediction.classifier import TabICLClassifier
    from tabicl_train.prediction.regressor import TabICLRegressor

    device = str(next(network.parameters()).device)
    if network.config.is_regression:
        columns = ESTIMATOR_NUMBER_SCORES
        estimator = TabICLRegressor(network, n_estimators=1, device=device)
    else:
        columns = ESTIMATOR_CLASS_SCORES
        estimator = TabICLClassifier(network, n_estimators=1, device=device)
    try:
        (scores,) = score_task(task, {"": lambda: estimator}, splits=1)
    except (ValueError, torch.OutOfMemoryError) as error:  # for example probabilities that are not numbers
        info(f"warning   {task.name} could not be scored: {first_line(error)}")
        scores = dict.fromkeys(columns.values(), math.nan)
    return {column: scores[name] for column, name in columns.items()}
