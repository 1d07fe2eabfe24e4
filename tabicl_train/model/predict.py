"""Predictions of a network of any family: the function that was trained, in bounded memory where the network can.

A network predicts by `forward`, unless its class has the pair `encode` and `decode` (see model/family.py), which reuse
what was computed of the labeled rows. `agreement` compares both ways.

B tables, N rows of which the first n are labeled, M features, C classes, Q quantiles.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tabicl_train.errors import ConfigError
from tabicl_train.model.family import Network, encodes, random_tables
from tabicl_train.model.pack import Pack

TOKENS = 2**22  # cells (table, row, feature) in memory at a time, by default
# Of the tables on which both ways are compared: rows, labeled rows, features.
COMPARED = ((21, 13, 6), (9, 4, 1), (40, 31, 3))
TOLERANCE = 1e-4  # of the difference between both ways, relative to the largest prediction; TabICL has 1e-6
PERTURBATION = 0.02  # standard deviation that is added to weights: layers that start at zero hide differences


class LabeledRows(NamedTuple):
    """What is kept of the labeled rows for a network without `encode`: the rows themselves."""

    num_classes: int
    labeled: Pack


@torch.no_grad()
def encode(network: Network, context: Pack, num_classes: int, tokens: int = TOKENS) -> Any:
    """Keep what predictions need of the labeled rows of tables.

    Parameters
    ----------
    network : Network
        A network of any family.
    context : Pack
        Tables that have labeled rows only, with labels in 0..num_classes-1, or numbers.
    num_classes : int
        C; 0 for regression.
    tokens : int
        About so many cells are in memory at a time, or those of the labeled rows of a table if these are more.

    Returns
    -------
    object
        For `decode`.

    Raises
    ------
    ConfigError
        For more classes than the network has, if it cannot divide them.
    """
    if encodes(type(network)):
        return network.encode(context, num_classes=num_classes, tokens=tokens)
    most = network.config.max_classes
    if num_classes > most:
        problem = f"the table has {num_classes} classes, and the network predicts at most {most}"
        raise ConfigError([f"{problem}; a network with the methods encode and decode can predict more"])
    return LabeledRows(num_classes, context)


@torch.no_grad()
def decode(network: Network, state: Any, queries: Pack, temperature: float = 1.0, tokens: int = TOKENS) -> Tensor:
    """Predict query rows.

    Parameters
    ----------
    network : Network
        As for `encode`.
    state : object
        From `encode`, of tables with the same features.
    queries : Pack
        Tables that have query rows only; see `pack_of_queries`.
    temperature : float
        Logits are divided by it.
    tokens : int
        As for `encode`.

    Returns
    -------
    Tensor
        Logits (query rows, C) or, with num_classes=0, the outputs of the network (query rows, Q).
    """
    if encodes(type(network)):
        return network.decode(state, queries, temperature=temperature, tokens=tokens)
    # Without that pair, labeled and query rows are joined to whole tables, and labels of query rows are zeros.
    joined = []
    cells = queries.X.split([N * M for N, _, M in queries.shapes])
    for (labeled, y, n), query_cells in zip(state.labeled.tables(), cells, strict=True):
        # The cells of a table lie column by column.
        rows = query_cells.view(labeled.shape[1], -1).t()  # (query rows, M)
        labels = torch.cat([y, y.new_zeros(len(rows))])
        joined.append((torch.cat([labeled, rows]), labels, n))
    predicted = outputs_of(network, Pack.of(joined))
    if state.num_classes == 0:
        return predicted
    return predicted[:, : state.num_classes] / temperature


def representation_problem(network: Network) -> str | None:
    """Return why a network has no representations of rows, or None."""
    cls = type(network)
    if encodes(cls) and hasattr(cls, "represent"):
        return None
    return f"{cls.__name__} has no representations of rows: it needs the methods encode, decode and represent"


@torch.no_grad()
def represent(network: Network, state: Any, queries: Pack, tokens: int = TOKENS) -> Tensor:
    """Compute the representations of query rows, (query rows, D); arguments as in `decode`.

    Raises ConfigError for a network that has none.
    """
    problem = representation_problem(network)
    if problem is not None:
        raise ConfigError([problem])
    return network.represent(state, queries, tokens=tokens)


def predict_logits(
    network: Network, pack: Pack, num_classes: int, temperature: float = 1.0, tokens: int = TOKENS
) -> Tensor:
    """Predict the query rows of all tables, (query rows, C) or (query rows, Q); arguments as in `decode`.

    With more than max_classes classes, each must occur in every table, and logarithms of probabilities are returned.
    """
    return torch.cat(list(predict_parts(network, pack, num_classes, temperature, tokens)))


def predict_parts(network: Network, pack: Pack, num_classes: int, temperature: float, tokens: int) -> Iterator[Tensor]:
    """Yield what `predict_logits` returns for some query rows at a time."""
    for tables in groups_of_tables(pack, tokens):
        context = Pack.of((X[:n], y[:n], n) for X, y, n in tables)
        state = encode(network, context, num_classes, tokens)
        queries = [X[n:] for X, _, n in tables]
        if len(tables) > 1:
            yield decode(network, state, pack_of_queries(queries), temperature, tokens)
        else:
            # A single table may be too long, so its query rows are divided.
            size = max(1, tokens // queries[0].shape[1])
            for rows in queries[0].split(size):
                yield decode(network, state, pack_of_queries([rows]), temperature, tokens)


def groups_of_tables(pack: Pack, tokens: int) -> list[list[tuple[Tensor, Tensor, int]]]:
    """Divide the tables X (N, M), y (N,), n of a pack into groups of so many tokens, or of a single table."""
    groups: list[list[tuple[Tensor, Tensor, int]]] = []
    room = 0
    for table in pack.tables():
        if table[0].numel() > room:
            groups.append([])
            room = tokens
        groups[-1].append(table)
        room -= table[0].numel()
    return groups


def pack_of_queries(tables: Iterable[Tensor]) -> Pack:
    """Pack only query rows, (rows, M) of each table."""
    return Pack.of((X, torch.empty(0, device=X.device), len(X)) for X in tables)


def outputs_of(network: Network, pack: Pack) -> Tensor:
    """Return the predictions of a network, (query rows, outputs), without the auxiliary losses beside them."""
    predictions = network(pack)
    return predictions[0] if isinstance(predictions, tuple) else predictions


@torch.no_grad()
def predict(network: Network, pack: Pack) -> Tensor:
    """Predict (query rows, outputs) of a pack, as validation does."""
    if not encodes(type(network)):
        return outputs_of(network, pack)
    return predict_logits(network, pack, network.config.max_classes)


def forward_differs(network: Network, perturbed: bool = False) -> str | None:
    """Compare `forward` with `encode` and `decode` on three small tables.

    Parameters
    ----------
    network : Network
        It is copied, and no random state changes.
    perturbed : bool
        Whether noise is added to the weights of the copy first. At the start of a run, layers whose weights are zero
        would hide differences.

    Returns
    -------
    str or None
        The difference in one line; None if there is none, or only one way.
    """
    if not encodes(type(network)):
        return None
    # A copy, and tables from a generator of its own, so that nothing of the run changes.
    network = copy.deepcopy(network).float().eval()
    device = next(network.parameters()).device
    generator = torch.Generator().manual_seed(0)
    if perturbed:
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += PERTURBATION * noise.to(device)
    tables = []
    for X, y, n in random_tables(network.config, COMPARED, generator):
        tables.append((X.to(device), y.to(device), n))

    with torch.no_grad():
        trained = outputs_of(network, Pack.of(tables)).float()
        scored = predict(network, Pack.of(tables)).float()
    difference = (trained - scored).abs().max().item()
    # Weights that are not finite are refused elsewhere.
    if not math.isfinite(difference):
        return None
    if difference <= TOLERANCE * max(1.0, trained.abs().max().item()):
        return None
    name = type(network).__name__
    return (
        f"{name}.encode and decode predict something else than {name}.forward, which is trained: logits differ by "
        f"{difference:.2g}; correct them, or leave both out"
    )
