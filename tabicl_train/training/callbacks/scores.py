"""Scores of a network on tables: packs of classes or numbers, items of a stream, and tasks of suites."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tabicl_train.config.schema import INTERVAL, judged_by
from tabicl_train.console import first_line, info
from tabicl_train.doors import register
from tabicl_train.errors import ConfigError
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack
from tabicl_train.model.predict import predict
from tabicl_train.model.quantiles import pinball
from tabicl_train.run.curves import OUTSIDE
from tabicl_train.stream.steps import StepItem
from tabicl_train.training.precision import Precision

# The scores of an estimator by their columns in validation.csv.
ESTIMATOR_CLASS_SCORES = {"loss": "log_loss", "accuracy": "accuracy", "roc_auc": "roc_auc"}
ESTIMATOR_NUMBER_SCORES = {"loss": "pinball", "rmse": "rmse", "r2": "r2", "coverage": "coverage"}


@dataclass(frozen=True)
class Scored:
    """Scores of a network on one set of tables.

    Parameters
    ----------
    data : str
        The column `data` of validation.csv: a part of the prior, a task of a suite, or "probe NAME".
    rows : int
        Rows of a table.
    scores : dict
        The scores by column of validation.csv; None where one does not apply.
    losses : list of (hashable, float)
        The loss of each query row or table, with its cluster.
    sizes : dict or None
        The sizes of a task, see `Task.sizes`; None for drawn tables.
    trained_range : str
        The column `trained_range` of validation.csv: inside, outside or empty. `Validation` fills it in.
    """

    data: str
    rows: int
    scores: dict[str, float | None]
    losses: list[tuple[Hashable, float]] = field(default_factory=list)
    sizes: dict[str, int] | None = None
    trained_range: str = ""


def score_network(
    network: Network,
    items: Iterable[tuple[str, StepItem]],
    suites: Sequence[str],
    precision: Precision,
    before_each: Callable[[], None] = lambda: None,
) -> list[Scored]:
    """Score a network in evaluation mode on drawn tables and on the tasks of suites.

    Parameters
    ----------
    network : Network
        The network.
    items : iterable of (str, StepItem)
        Drawn tables, each item with the name of its part of the prior. Its tables have the same number of rows.
    suites : sequence of str
        The names of the suites.
    precision : Precision
        The number format of matrix products for drawn tables.
    before_each : callable
        Called before each set of tables; it may raise an exception to stop.

    Returns
    -------
    list of Scored
        One for each item and each task.
    """
    scored = []
    for part, item in items:
        before_each()
        scored.append(score_item(network, part, item, precision))
    for task in suite_tasks(tuple(suites), network.config.is_regression):
        before_each()
        scored.append(score_in_validation(network, task))
    return scored


def score_packs(
    network: Network, packs: list[Pack], precision: Precision
) -> tuple[dict[str, float | None], list[Tensor]]:
    """Score a network on packs of tables, with equal weights of tables.

    For numbers, the loss uses the quantiles as predicted, and all other scores use sorted ones: crps is twice their
    pinball loss, rmse and r2 are those of their mean, and coverage is the share of targets between two of them. A
    network that predicts the number itself has no crps and no coverage.

    Parameters
    ----------
    network : Network
        The network, in evaluation mode.
    packs : list of Pack
        The tables, in host memory.
    precision : Precision
        The number format of matrix products.

    Returns
    -------
    dict
        The scores, by column of validation.csv.
    list of Tensor
        (query rows,) for each pack, the losses of its query rows.
    """
    # The means over the query rows of each table.
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
        row_values = (losses, *measure(predictions, network.targets(pack)))  # each (query rows,)
        table_values = [network.means(values, pack) for values in row_values]  # each (tables,)
        means_of_tables.append(torch.stack(table_values, 1).double())
    columns = torch.cat(means_of_tables).unbind(1)  # each (tables,), of all packs

    # Their means over tables.
    guess_losses = [network.guess_loss(y.cpu(), n) for pack in packs for _, y, n in pack.tables()]
    guess_loss = statistics.fmean(guess_losses)

    if not network.config.is_regression:
        loss_means, correct = columns
        loss = statistics.fmean(loss_means.tolist())
        accuracy = statistics.fmean(correct.tolist())
        return {"loss": loss, "accuracy": accuracy, "guess_loss": guess_loss}, row_losses
    loss_means, crps, squared_errors, target_means, squared_targets, covered = columns
    # For r2: the mean of the variances within tables, not the variance of the targets of all tables.
    variance = (squared_targets - target_means.square()).mean().item()
    squared_error = squared_errors.mean().item()
    scores: dict[str, float | None] = {
        "loss": loss_means.mean().item(),
        "rmse": math.sqrt(squared_error),
        "r2": 1 - squared_error / variance,
        "guess_loss": guess_loss,
    }
    if network.predicts_quantiles:
        scores |= {"crps": crps.mean().item(), "coverage": covered.mean().item()}
    return scores, row_losses


def is_correct(logits: Tensor, y: Tensor) -> tuple[Tensor]:
    """Return whether the prediction of each row is correct, (query rows,), as 0 or 1."""
    return ((logits.argmax(-1) == y).float(),)


def measure_numbers(quantiles: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return CRPS, squared error, target, its square, and whether it lies in `INTERVAL`, each (query rows,).

    Parameters
    ----------
    quantiles : Tensor
        (query rows, quantiles), in any order.
    y : Tensor
        (query rows,), the targets.
    """
    in_order = quantiles.sort(1).values
    crps = 2 * pinball(in_order, y)
    error = (in_order.mean(1) - y).square()
    lowest_level, highest_level = INTERVAL
    low = in_order[:, nearest_quantile(lowest_level, in_order.shape[1])]
    high = in_order[:, nearest_quantile(highest_level, in_order.shape[1])]
    is_covered = ((low <= y) & (y <= high)).float()
    return crps, error, y, y.square(), is_covered


def nearest_quantile(level: float, num_quantiles: int) -> int:
    """Return the index of the quantile whose level, (index + 1) / (num_quantiles + 1), is nearest."""
    return min(max(round(level * (num_quantiles + 1)) - 1, 0), num_quantiles - 1)


def score_item(network: Network, part: str, item: StepItem, precision: Precision) -> Scored:
    """Score the tables of an item, drawn from a part of the prior.

    Returns
    -------
    Scored
        Its losses are those of query rows with their clusters, or of tables if their rows have no clusters.
    """
    scores, row_losses = score_packs(network, item.packs, precision)
    # For each table of the step, the clusters of its query rows, or None.
    losses: list[tuple[Hashable, float]] = []
    clusters = enumerate(item.clusters)
    for pack, pack_losses in zip(item.packs, row_losses, strict=True):
        table_losses = network.means(pack_losses, pack.to(pack_losses.device)).tolist()
        end = 0
        for (rows, labeled, _), table_loss in zip(pack.shapes, table_losses, strict=True):
            table, clusters_of_rows = next(clusters)
            start = end
            end = start + rows - labeled
            if clusters_of_rows is None:
                # The table is its own cluster.
                losses.append(((item.step, table), table_loss))
            else:
                losses += zip(clusters_of_rows, pack_losses[start:end].tolist(), strict=True)
    return Scored(part, item.packs[0].shapes[0][0], scores, losses)


def cluster_means(scored: Iterable[Scored], part: str) -> dict[Hashable, float]:
    """Return the mean loss of each cluster of a part of the prior; sets outside the trained range do not count."""
    by_cluster: dict[Hashable, list[float]] = {}
    for one in scored:
        if one.data != part or one.trained_range == OUTSIDE:
            continue
        for cluster, loss in one.losses:
            by_cluster.setdefault(cluster, []).append(loss)
    return {cluster: statistics.fmean(losses) for cluster, losses in by_cluster.items()}


@functools.cache
def suite_tasks(suites: tuple[str, ...], numbers: bool) -> list[Any]:
    """Read the tasks of suites as validation scores them; a task that cannot be read is left out with a warning."""
    tasks = []
    for suite in suites:
        # A suite imports scikit-learn and pandas, which takes a second or two.
        for source in register.suite[suite](None, numbers):
            try:
                task = source.for_validation(numbers)
            except Exception as error:
                # Reading may raise any error.
                info(f"warning   {source.name} is left out of validation: {first_line(error)}")
                continue
            if task is not None:
                tasks.append(task)
    return tasks


def score_in_validation(network: Network, task: Any) -> Scored:
    """Score a task of a suite by column of validation.csv, with the best possible score if that is known."""
    # For numbers, the loss is the pinball loss at nine levels, which all estimators predict.
    columns = ESTIMATOR_NUMBER_SCORES if network.config.is_regression else ESTIMATOR_CLASS_SCORES
    try:
        score_by_name = task.score_network(network)
    except (ConfigError, ValueError, torch.OutOfMemoryError) as error:
        # Probabilities may be NaN, for example.
        info(f"warning   {task.name} could not be scored: {first_line(error)}")
        score_by_name = dict.fromkeys(columns.values(), math.nan)
    scores: dict[str, float | None] = {column: score_by_name[name] for column, name in columns.items()}
    for known_scores in task.known_scores(1):
        if known_scores["method"] == "possible":
            scores["possible"] = known_scores[judged_by(scores)]
    return Scored(task.name, len(task.y), scores, sizes=task.sizes)
