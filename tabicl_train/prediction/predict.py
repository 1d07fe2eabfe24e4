"""Predictions for tables of any size and any number of classes, and of numbers, in bounded memory.

More classes than the network was trained for are predicted by many predictions among few (TabICLv2, arXiv 2602.11139).
At the input, labels are written in digits, and the column stage sees one digit at a time. At the output, the classes
form a tree, and the in-context learner chooses among the few children of each node.

B tables, N rows of which the first n are labeled, M features, G feature groups, E embedding, D row representation,
C classes, Q quantiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from tabicl_train.model.family import Network
from tabicl_train.model.pack import (
    Columns,
    Pack,
    Rows,
    Shape,
    column_layout,
    context_layout,
    log_counts,
    row_layout,
    within_rows,
)
from tabicl_train.model.tabicl import InContextLearner, TabICL

SMALLEST = 1e-6  # added to the probabilities of many classes before their logarithm is taken
CPU_PART = 2**19  # embedding values computed at once on a CPU: 2 MB stay in its cache, 1.3 to 1.7 times faster


@torch.no_grad()
def predict_logits(
    model: TabICL, pack: Pack, num_classes: int, temperature: float = 1.0, tokens: int = 2**22
) -> Tensor:
    """Predict logits (query rows, C) of all tables; with more classes than max_classes, logarithms of probabilities.

    pack: labels are in 0..C-1; with more than max_classes classes, each must occur in every table
    num_classes: C
    tokens: (table, row, feature) in memory at a time, approximately; or twice those of the labeled rows of a table, if
        that is more
    """
    logits = [forward(model, part, num_classes, temperature, tokens) for part in parts(pack, tokens)]
    return torch.cat(logits)


@torch.no_grad()
def quantile_parts(model: TabICL, pack: Pack, tokens: int = 2**22) -> Iterator[Tensor]:
    """Predict quantiles (some query rows, Q) of some rows after others: all can be more than the memory.

    They are at `quantiles.levels`, and nothing keeps them from crossing; tokens as in predict_logits.
    """
    for part in parts(pack, tokens):
        yield forward(model, part, 0, 1.0, tokens)


def parts(pack: Pack, tokens: int) -> list[Pack]:
    """Split the pack into parts of so many tokens; of a longer table, each part has other query rows."""
    found: list[list[tuple[Tensor, Tensor, int]]] = []
    room = 0
    for X, y, n in pack.tables():
        # Query rows do not see each other. A part of fewer than n of them would mostly recompute the labeled rows.
        size = max(n, tokens // X.shape[1] - n)
        for queries, labels in zip(X[n:].split(size), y[n:].split(size), strict=True):
            table = torch.cat([X[:n], queries]), torch.cat([y[:n], labels]), n
            if table[0].numel() > room:
                found.append([])
                room = tokens
            found[-1].append(table)
            room -= table[0].numel()
    return [pack] if len(found) == 1 else [Pack.of(tables) for tables in found]


def forward(model: TabICL, pack: Pack, num_classes: int, temperature: float, tokens: int) -> Tensor:
    """Compute what predict_logits returns, or with num_classes=0 quantiles, for all query rows at once."""
    config = model.config
    sizes, shapes = model.groups(pack)
    part = tokens if pack.X.is_cuda else min(tokens, CPU_PART // config.embed_dim)
    columns = column_layout(sizes, shapes, config.col_num_inducing)
    embedded = embed(model, pack, columns, shapes, num_classes, part)  # (tokens, E)
    rows = row_layout(sizes, shapes, config.row_num_cls, columns)
    represented = interact(model, embedded, rows, part).index_select(0, rows.order)  # (rows, D)
    if num_classes <= config.max_classes:
        context = context_layout(sizes, shapes)
        labels = pack.y.index_select(0, context.labels)
        predictions = model.icl_predictor(represented, labels, context, log_counts(sizes))
        return predictions[:, :num_classes] / temperature if num_classes > 0 else predictions
    labeled, queries = represented.split([sum(n for _, n, _ in shapes), sum(N - n for N, n, _ in shapes)])
    own = zip(labeled.split([n for _, n, _ in shapes]), queries.split([N - n for N, n, _ in shapes]), strict=True)
    p = [
        class_probabilities(model.icl_predictor, torch.cat(rows), y[:n], num_classes, temperature)
        for rows, (_, y, n) in zip(own, pack.tables(), strict=True)
    ]
    return torch.log(torch.cat(p) + SMALLEST)


def embed(model: TabICL, pack: Pack, columns: Columns, shapes: list[Shape], num_classes: int, part: int) -> Tensor:
    """Embed all cells, (tokens, E), computed for columns with at most `part` tokens at a time.

    shapes: N, n and the number of feature groups of each table
    """
    config, column = model.config, model.col_embedder
    labels = pack.y.index_select(0, columns.labels)
    many = config.col_target_aware and num_classes > config.max_classes
    digits = label_digits(labels, num_classes, config.max_classes) if many else [labels]
    read = [column.read(pack, columns, digit) for digit in digits]
    embedded = read[0].new_empty(len(read[0]), config.embed_dim)
    labeled, queries = 0, columns.labeled  # where the next columns start
    for some in columns_in_parts(shapes, part):
        own = torch.tensor(some, device=labels.device)
        piece = column_layout(own, some, config.col_num_inducing)
        after = queries + piece.from_inducing.queries - piece.labeled
        at = slice(labeled, labeled + piece.labeled), slice(queries, after)
        log_n = log_counts(own)
        per_digit = (column.embed(torch.cat([cells[at[0]], cells[at[1]]]), piece, log_n) for cells in read)
        mean = reduce(torch.add, per_digit) / len(read)
        embedded[at[0]], embedded[at[1]] = mean[: piece.labeled], mean[piece.labeled :]
        labeled, queries = at[0].stop, after
    return embedded


def columns_in_parts(shapes: list[Shape], tokens: int) -> list[list[Shape]]:
    """Split the columns into parts of at most so many tokens, or one column; each is N, n and number of columns."""
    found: list[list[Shape]] = []
    room = 0
    for N, n, G in shapes:
        while G > 0:
            if N > room:
                found.append([])
                room = max(tokens, N)
            some = min(G, room // N)
            found[-1].append((N, n, some))
            room -= some * N
            G -= some
    return found


def interact(model: TabICL, embedded: Tensor, rows: Rows, part: int) -> Tensor:
    """Representations of all rows, (rows, D), computed for rows with at most `part` tokens at a time."""
    stage, num_cls = model.row_interactor, model.config.row_num_cls
    x = stage.add_cls(embedded, rows)  # (rows * T, E)
    found = []
    every = rows.within.every.runs
    assert isinstance(every, Tensor)  # not exported
    runs = [(count, T) for count, T, *_ in every.tolist()]
    for of_width, (_, T) in zip(x.split([count * T for count, T in runs]), runs, strict=True):
        for some in of_width.split(max(1, part // T) * T):
            count = len(some) // T
            starts = torch.arange(0, len(some) + 1, T, dtype=torch.int32, device=x.device)
            found.append(stage.interact(some, within_rows([[count, T]], starts, num_cls)))
    return torch.cat(found)


def label_digits(y: Tensor, num_classes: int, most: int) -> list[Tensor]:
    """The digits of labels y, most significant first: as few digits below `most` as num_classes need.

    All digits have the same radix, the smallest possible: 57 classes need two digits below 8, and 42 is (5, 2).
    """
    places = next(k for k in itertools.count(1) if most**k >= num_classes)
    radix = next(r for r in itertools.count(1) if r**places >= num_classes)
    return [y // radix**place % radix for place in reversed(range(places))]


def split_classes(num_classes: int, most: int) -> list[int]:
    """Sizes of the groups of consecutive classes under a node: at most `most`, nearly equal, larger ones first."""
    groups = min(-(-num_classes // most), most)
    return [num_classes // groups + (group < num_classes % groups) for group in range(groups)]


def class_probabilities(
    learner: InContextLearner, rows: Tensor, y_train: Tensor, num_classes: int, temperature: float
) -> Tensor:
    """rows (N, D), y_train (n,) in 0..C-1 -> probabilities of the query rows (N - n, C).

    Each node predicts from its own labeled rows alone; probabilities are multiplied along the paths.
    """
    labeled, queries = rows[: len(y_train)], rows[len(y_train) :]
    most = learner.config.max_classes
    if num_classes == 1:
        return rows.new_ones(len(queries), 1)
    if num_classes <= most:
        shape = len(rows), len(y_train), 1
        table = torch.tensor([shape], device=rows.device)
        logits = learner(rows, y_train, context_layout(table, [shape]), log_counts(table))[:, :num_classes]
        return torch.softmax(logits / temperature, dim=-1)
    sizes = split_classes(num_classes, most)
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    group = torch.bucketize(y_train, torch.tensor(starts[1:], device=y_train.device), right=True)  # (n,)
    of_groups = class_probabilities(learner, rows, group, len(sizes), temperature)  # (N - n, groups)
    parts = []
    for child, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        own = group == child
        context = torch.cat([labeled[own], queries])
        within = class_probabilities(learner, context, y_train[own] - start, size, temperature)  # (N - n, size)
        parts.append(of_groups[:, child, None] * within)
    return torch.cat(parts, dim=1)


@torch.no_grad()
def predict(network: Network, pack: Pack) -> Tensor:
    """Predict (query rows, outputs) with a network of any family; with a TabICL in bounded memory."""
    if not isinstance(network, TabICL):
        return network(pack)
    if network.config.is_regression:
        return torch.cat(list(quantile_parts(network, pack)))
    return predict_logits(network, pack, network.config.max_classes)
