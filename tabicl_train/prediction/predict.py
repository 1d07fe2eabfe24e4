"""Predictions of classes, any number of them, or numbers for tables of any size, in bounded memory.

Query rows do not attend to each other. So `learn` computes keys and values of the labeled rows once, and `answer`
predicts query rows with them, some at a time.

More classes than the network was trained for are predicted by many predictions among few (TabICLv2, arXiv 2602.11139).
At the input, labels are written in digits, and the column stage sees one digit at a time. At the output, the classes
form a tree, and the in-context learner chooses among the few children of each node.

B tables, N rows of which the first n are labeled, M features, G feature groups, I inducing points, E embedding, D row
representation, C classes, Q quantiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.family import Network
from tabicl_train.model.pack import (
    Pack,
    Rows,
    Shape,
    column_layout,
    context_layout,
    log_counts,
    row_layout,
    within_rows,
)
from tabicl_train.model.tabicl import InContextLearner, TabICL, token_groups

SMALLEST = 1e-6  # added to the probabilities of many classes before their logarithm is taken
CPU_PART = 2**19  # embedding values computed at once on a CPU: 2 MB fit into its cache, 1.3 to 1.7 times faster


class Node(NamedTuple):
    """What in-context learning among few classes keeps of the labeled rows of tables, or of some rows of one table."""

    counts: list[int]  # the labeled rows n of each table
    keys: list[Tensor]  # keys and values of each block, (labeled rows, 2, H, d); none for a single class
    children: list[Node]  # with more classes than the network has, the node of each group of classes
    sizes: list[int]  # of the groups


class Learned(NamedTuple):
    """What is kept of the labeled rows of tables."""

    columns: list[list[Tensor]]  # keys and values of inducing points by label digit and block, (columns * I, 2, H, d)
    nodes: list[Node]  # one for all tables; with more classes than the network has, one for each table


def learned_bytes(config: TabICLConfig, n: int, num_features: int, num_classes: int) -> int:
    """Return the bytes of `Learned` for a table, in float32."""
    many = num_classes > config.max_classes > 0
    levels = len(label_digits(torch.zeros(1), num_classes, config.max_classes)) if many else 1
    columns = token_groups(config, num_features) * config.col_num_blocks * config.col_num_inducing * config.embed_dim
    rows = n * config.icl_num_blocks * config.row_dim
    return 4 * 2 * (columns * (levels if config.col_target_aware else 1) + rows * levels)


@torch.no_grad()
def predict_logits(
    model: TabICL, pack: Pack, num_classes: int, temperature: float = 1.0, tokens: int = 2**22
) -> Tensor:
    """Predict logits (query rows, C) of all tables; with more classes than max_classes, logarithms of probabilities."""
    # Labels are in 0..num_classes-1; with more than max_classes classes, each must occur in every table. About `tokens`
    # (table, row, feature) are in memory at a time, or those of the labeled rows of a table if these are more.
    return torch.cat(list(predictions(model, pack, num_classes, temperature, tokens)))


def predictions(model: TabICL, pack: Pack, num_classes: int, temperature: float, tokens: int) -> Iterator[Tensor]:
    """Yield what predict_logits returns, or with num_classes=0 quantiles, for some query rows at a time."""
    for tables in groups_of_tables(pack, tokens):
        learned = learn(model, Pack.of((X[:n], y[:n], n) for X, y, n in tables), num_classes, tokens)
        size = max(len(X) - n for X, _, n in tables)  # all query rows, except for a table that is too long
        if len(tables) == 1:
            size = max(1, tokens // tables[0][0].shape[1])
        for queries in zip(*(X[n:].split(size) for X, _, n in tables), strict=True):
            yield answer(model, learned, pack_of_queries(queries), num_classes, temperature, tokens)


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


@torch.no_grad()
def learn(model: TabICL, pack: Pack, num_classes: int, tokens: int) -> Learned:
    """Compute the keys and values of the labeled rows of tables; arguments as in predict_logits, without query rows."""
    represented, columns = represent(model, pack, num_classes, None, tokens)
    learner, counts = model.icl_predictor, [n for n, _, _ in pack.shapes]
    if num_classes <= model.config.max_classes:
        return Learned(columns, [leaf(learner, represented, pack.y, counts)])
    rows, labels = represented.split(counts), pack.y.split(counts)
    return Learned(columns, [tree(learner, *own, num_classes) for own in zip(rows, labels, strict=True)])


@torch.no_grad()
def answer(model: TabICL, learned: Learned, pack: Pack, num_classes: int, temperature: float, tokens: int) -> Tensor:
    """Predict the query rows of tables, as predict_logits does, or with num_classes=0 quantiles."""
    # learned: of tables with the same columns; pack: see pack_of_queries
    represented, _ = represent(model, pack, num_classes, learned.columns, tokens)
    learner, counts = model.icl_predictor, [N for N, _, _ in pack.shapes]
    if num_classes <= model.config.max_classes:
        found = ask(learner, learned.nodes[0], represented, counts)
        return found[:, :num_classes] / temperature if num_classes > 0 else found
    own = zip(learned.nodes, represented.split(counts), strict=True)
    return torch.log(torch.cat([class_probabilities(learner, *one, temperature) for one in own]) + SMALLEST)


def represent(
    model: TabICL, pack: Pack, num_classes: int, known: list[list[Tensor]] | None, tokens: int
) -> tuple[Tensor, list[list[Tensor]]]:
    """Represent labeled or query rows, (rows, D), and return the `columns` of Learned, `known` for query rows."""
    # On a CPU, some columns, and then some rows, are computed at a time.
    config, column = model.config, model.col_embedder
    sizes, shapes = model.groups(pack)
    part = tokens if pack.X.is_cuda else min(tokens, CPU_PART // config.embed_dim)
    columns, points = column_layout(sizes, shapes, config.col_num_inducing), config.col_num_inducing
    if known is None:
        labels = pack.y.index_select(0, columns.labels)
        many = config.col_target_aware and num_classes > config.max_classes
        digits = label_digits(labels, num_classes, config.max_classes) if many else [labels]
        cells = [column.read(pack, columns, digit) for digit in digits]
    else:
        cells = [column.read(pack, columns, None)] * len(known)
    embedded = cells[0].new_empty(len(cells[0]), config.embed_dim)
    kept: list[list[list[Tensor]]] = [[] for _ in cells]  # of each digit and part
    start = first = 0  # token and column of the next part
    for some in columns_in_parts(shapes, part):
        own = torch.tensor(some, device=sizes.device)
        piece = column_layout(own, some, points)
        at, keys = slice(start, start + piece.labeled), slice(first * points, (first + len(piece.table)) * points)
        per_digit = []
        for digit, of_digit in enumerate(cells):
            own_keys = None if known is None else [block[keys] for block in known[digit]]
            found, left = column.embed_known(of_digit[at], piece, log_counts(own), own_keys)
            per_digit.append(found)
            kept[digit].append(left)
        embedded[at] = reduce(torch.add, per_digit) / len(cells)
        start, first = at.stop, first + len(piece.table)
    rows = row_layout(sizes, shapes, config.row_num_cls, columns)
    represented = interact(model, embedded, rows, part).index_select(0, rows.order)
    if known is None:
        known = [[torch.cat(of_block) for of_block in zip(*parts, strict=True)] for parts in kept]
    return represented, known


def columns_in_parts(shapes: list[Shape], tokens: int) -> list[list[Shape]]:
    """Split the columns into parts of at most so many tokens, or one column: lists of N, n and number of columns."""
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
    """Compute the representations of all rows, (rows, D), for rows with at most `part` tokens at a time."""
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
    """Return the digits of labels y, most significant first: the fewest possible digits below `most`."""
    # All digits have the same radix, the smallest possible: 57 classes need two digits below 8, and 42 is (5, 2).
    places = next(k for k in itertools.count(1) if most**k >= num_classes)
    radix = next(r for r in itertools.count(1) if r**places >= num_classes)
    return [y // radix**place % radix for place in reversed(range(places))]


def split_classes(num_classes: int, most: int) -> list[int]:
    """Return sizes of the groups of consecutive classes under a node: at most `most`, nearly equal, larger first."""
    groups = min(-(-num_classes // most), most)
    return [num_classes // groups + (group < num_classes % groups) for group in range(groups)]


def leaf(learner: InContextLearner, rows: Tensor, y: Tensor, counts: list[int]) -> Node:
    """Make the node of tables with few classes from the rows (rows, D) and labels y of all, and the rows of each."""
    shapes = [(2 * n, n, 1) for n in counts]  # labeled rows are query rows too
    sizes = torch.tensor(shapes, device=rows.device)
    return Node(counts, learner.keys(rows, y, context_layout(sizes, shapes), log_counts(sizes)), [], [])


def ask(learner: InContextLearner, node: Node, queries: Tensor, counts: list[int]) -> Tensor:
    """Predict query rows (query rows, D) of the tables of a node, `counts` of each, (query rows, C)."""
    shapes = [(n + asked, n, 1) for n, asked in zip(node.counts, counts, strict=True)]
    sizes = torch.tensor(shapes, device=queries.device)
    return learner.answer(queries, node.keys, context_layout(sizes, shapes), log_counts(sizes))


def tree(learner: InContextLearner, rows: Tensor, y: Tensor, num_classes: int) -> Node:
    """Make the node of a table with labeled rows (n, D) of the classes y in 0..C-1, and those below it."""
    if num_classes == 1:
        return Node([len(rows)], [], [], [])
    if num_classes <= learner.config.max_classes:
        return leaf(learner, rows, y, [len(rows)])._replace(sizes=[1] * num_classes)
    sizes = split_classes(num_classes, learner.config.max_classes)
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    group = torch.bucketize(y, torch.tensor(starts[1:], device=y.device), right=True)  # (n,)
    below = [
        tree(learner, rows[group == child], y[group == child] - start, size)
        for child, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    return leaf(learner, rows, group, [len(rows)])._replace(children=below, sizes=sizes)


def class_probabilities(learner: InContextLearner, node: Node, queries: Tensor, temperature: float) -> Tensor:
    """Compute the probabilities of the classes of a node for query rows (query rows, D), (query rows, C)."""
    # Each node predicts from its own labeled rows only; probabilities are multiplied along the paths.
    if not node.keys:
        return queries.new_ones(len(queries), 1)
    logits = ask(learner, node, queries, [len(queries)])[:, : len(node.sizes)]
    p = torch.softmax(logits / temperature, dim=-1)
    if not node.children:
        return p
    within = [class_probabilities(learner, child, queries, temperature) for child in node.children]
    return torch.cat([p[:, i, None] * own for i, own in enumerate(within)], dim=1)


@torch.no_grad()
def predict(network: Network, pack: Pack) -> Tensor:
    """Predict (query rows, outputs) with a network of any family; with a TabICL in bounded memory."""
    if not isinstance(network, TabICL):
        return network(pack)
    return predict_logits(network, pack, network.config.max_classes)
