"""Prediction with a TabICL in bounded memory: labeled rows are encoded once, query rows decoded some at a time.

Query rows do not attend to each other. So `encode` computes keys and values of the labeled rows, and `decode` predicts
query rows with them; together they compute what `TabICL.forward` does.

More classes than the network was trained for are predicted by many predictions among few (TabICLv2, arXiv 2602.11139).
At the input, labels are written in digits, and the column stage sees one digit at a time. At the output, the classes
form a tree, and the in-context learner chooses among the few children of each node.

B tables, N rows of which the first n are labeled, M features, G feature groups, I inducing points, E embedding, D row
representation, C classes, Q quantiles. A `network` here is a TabICL, whose module imports this one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.costs import token_groups
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
from tabicl_train.model.stages import InContextLearner

SMALLEST = 1e-6  # added to the probabilities of many classes before their logarithm is taken
CPU_PART = 2**19  # embedding values computed at once on a CPU: 2 MB fit into its cache, 1.3 to 1.7 times faster


class ClassNode(NamedTuple):
    """What in-context learning among few classes keeps of the labeled rows of tables, or of some rows of one table."""

    counts: list[int]  # the labeled rows n of each table
    keys: list[Tensor]  # keys and values of each block, (labeled rows, 2, H, d); none for a single class
    children: list[ClassNode]  # with more classes than the network has, the node of each group of classes
    sizes: list[int]  # classes of each group; all 1 in a node without children


class Encoded(NamedTuple):
    """What is kept of the labeled rows of tables."""

    num_classes: int  # 0 for regression
    columns: list[list[Tensor]]  # keys and values of inducing points by label digit and block, (columns * I, 2, H, d)
    nodes: list[ClassNode]  # one for all tables; with more classes than the network has, one for each table


class ColumnPart(NamedTuple):
    """Some columns of a pack, which are embedded at once."""

    layout: Columns
    log_n: Tensor  # (columns,) float32
    tokens: slice  # the tokens of these columns
    points: slice  # their inducing points


def encoded_bytes(config: TabICLConfig, n: int, num_features: int, num_classes: int) -> int:
    """Return the bytes of `Encoded` for a table, in float32."""
    levels = 1
    if num_classes > config.max_classes > 0:
        levels = len(label_digits(torch.zeros(1), num_classes, config.max_classes))
    column_levels = levels if config.col_target_aware else 1
    points = token_groups(config, num_features) * config.col_num_inducing
    columns = points * config.col_num_blocks * config.embed_dim * column_levels
    rows = n * config.icl_num_blocks * config.row_dim * levels
    # 4 bytes for each value of keys and of values.
    return 4 * 2 * (columns + rows)


@torch.no_grad()
def encode_labeled(network: Any, context: Pack, num_classes: int, tokens: int) -> Encoded:
    """Compute the keys and values of the labeled rows of tables; see `TabICL.encode`."""
    represented, columns = represent_labeled(network, context, num_classes, tokens)  # (labeled rows, D)
    learner = network.icl_predictor
    counts = [n for n, _, _ in context.shapes]
    if num_classes <= network.config.max_classes:
        return Encoded(num_classes, columns, [leaf_node(learner, represented, context.y, counts)])
    # With more classes, each table has a tree of its own.
    nodes = []
    for rows, labels in zip(represented.split(counts), context.y.split(counts), strict=True):
        nodes.append(class_tree(learner, rows, labels, num_classes))
    return Encoded(num_classes, columns, nodes)


@torch.no_grad()
def decode_queries(network: Any, encoded: Encoded, queries: Pack, temperature: float, tokens: int) -> Tensor:
    """Predict the query rows of tables, (query rows, C) or (query rows, Q); see `TabICL.decode`."""
    represented = represent_queries(network, queries, encoded.columns, tokens)  # (query rows, D)
    learner = network.icl_predictor
    counts = [N for N, _, _ in queries.shapes]
    if encoded.num_classes <= network.config.max_classes:
        predicted = answer_at_node(learner, encoded.nodes[0], represented, counts)
        if encoded.num_classes == 0:
            return predicted  # quantiles
        return predicted[:, : encoded.num_classes] / temperature
    # With more classes, their probabilities are products along the paths of a tree.
    probabilities = []
    for node, rows in zip(encoded.nodes, represented.split(counts), strict=True):
        probabilities.append(class_probabilities(learner, node, rows, temperature))
    return torch.log(torch.cat(probabilities) + SMALLEST)


# The column and row stages, some columns and some rows at a time


def represent_labeled(network: Any, pack: Pack, num_classes: int, tokens: int) -> tuple[Tensor, list[list[Tensor]]]:
    """Represent labeled rows, (rows, D), and return the `columns` of Encoded."""
    config = network.config
    column = network.col_embedder
    layout = layout_of(network, pack)
    size = part_size(network, pack, tokens)
    labels = pack.y.index_select(0, layout.columns.labels)  # (tokens,)
    digits = [labels]
    if config.col_target_aware and num_classes > config.max_classes:
        digits = label_digits(labels, num_classes, config.max_classes)
    # Each (tokens, K); a token is a row of a group.
    cells = [column.read(pack, layout.columns, digit) for digit in digits]

    # The column stage sees one digit of the labels at a time, and the embeddings are averaged over the digits.
    embedded = cells[0].new_empty(len(cells[0]), config.embed_dim)  # (tokens, E)
    keys_of_parts: list[list[list[Tensor]]] = [[] for _ in digits]  # by digit, part and block
    for part in column_parts(config, layout.shapes, layout.sizes.device, size):
        embedded_digits = []
        for digit, cells_of_digit in enumerate(cells):
            # (tokens of the part, K) -> (tokens of the part, E), and for each block (columns * I, 2, H, d)
            embedded_digit, keys = column.embed_known(cells_of_digit[part.tokens], part.layout, part.log_n)
            embedded_digits.append(embedded_digit)
            keys_of_parts[digit].append(keys)
        embedded[part.tokens] = reduce(torch.add, embedded_digits) / len(embedded_digits)

    columns = []
    for keys_of_digit in keys_of_parts:
        # For each block, the keys of all parts.
        by_block = zip(*keys_of_digit, strict=True)
        columns.append([torch.cat(keys) for keys in by_block])
    return represent_rows(network, embedded, layout, size), columns


def represent_queries(network: Any, pack: Pack, columns: list[list[Tensor]], tokens: int) -> Tensor:
    """Represent query rows, (rows, D), with the `columns` of Encoded."""
    config = network.config
    column = network.col_embedder
    layout = layout_of(network, pack)
    size = part_size(network, pack, tokens)
    cells = column.read(pack, layout.columns, None)  # (tokens, K)

    embedded = cells.new_empty(len(cells), config.embed_dim)  # (tokens, E)
    for part in column_parts(config, layout.shapes, layout.sizes.device, size):
        # As in `represent_labeled`, the mean over the digits of the labels; query rows have no label themselves.
        embedded_digits = []  # (tokens of the part, E) each
        for keys_of_blocks in columns:
            known = [keys[part.points] for keys in keys_of_blocks]  # (columns of the part * I, 2, H, d) each
            embedded_digit, _ = column.embed_known(cells[part.tokens], part.layout, part.log_n, known)
            embedded_digits.append(embedded_digit)
        embedded[part.tokens] = reduce(torch.add, embedded_digits) / len(embedded_digits)
    return represent_rows(network, embedded, layout, size)


class PackColumns(NamedTuple):
    """The sizes of the tables of a pack, and the layout of their columns."""

    sizes: Tensor  # int64 (B, 3), N, n and G of each table
    shapes: list[Shape]  # the same numbers for the host
    columns: Columns


def layout_of(network: Any, pack: Pack) -> PackColumns:
    sizes, shapes = network.groups(network.config, pack)
    return PackColumns(sizes, shapes, column_layout(sizes, shapes, network.config.col_num_inducing))


def part_size(network: Any, pack: Pack, tokens: int) -> int:
    """Return the tokens that are computed at once; `tokens` is the caller's limit."""
    if pack.X.is_cuda:
        return tokens
    return min(tokens, CPU_PART // network.config.embed_dim)


def column_parts(config: TabICLConfig, shapes: list[Shape], device: torch.device, size: int) -> Iterator[ColumnPart]:
    """Yield the columns in parts of at most `size` tokens, or of one column.

    The tokens of a pack lie column by column, with G columns for each table and one token for each row of a column. So
    a part is a run of consecutive columns, perhaps of several tables, and its tokens and inducing points are slices.
    """
    inducing = config.col_num_inducing
    first_token = first_column = 0
    for shapes_of_part in columns_in_parts(shapes, size):
        sizes = torch.tensor(shapes_of_part, device=device)
        layout = column_layout(sizes, shapes_of_part, inducing)
        # The rows of a pack here are all labeled, or all query rows, and a pack of these counts them as labeled, too.
        end_token = first_token + layout.labeled
        end_column = first_column + len(layout.table)
        yield ColumnPart(
            layout,
            log_counts(sizes),
            tokens=slice(first_token, end_token),
            points=slice(first_column * inducing, end_column * inducing),
        )
        first_token = end_token
        first_column = end_column


def columns_in_parts(shapes: list[Shape], tokens: int) -> list[list[Shape]]:
    """Split the columns into parts of at most so many tokens, or one column: lists of N, n and number of columns."""
    parts: list[list[Shape]] = []
    room = 0
    for N, n, left in shapes:
        while left > 0:
            # There is no room for a column: begin a part, which takes one in any case.
            if N > room:
                parts.append([])
                room = max(tokens, N)
            added = min(left, room // N)
            parts[-1].append((N, n, added))
            room -= added * N
            left -= added
    return parts


def represent_rows(network: Any, embedded: Tensor, layout: PackColumns, size: int) -> Tensor:
    """Embeddings of cells (tokens, E) -> representations of rows (rows, D), in the order of the tables."""
    rows = row_layout(layout.sizes, layout.shapes, network.config.row_num_cls, layout.columns)
    return interact(network, embedded, rows, size).index_select(0, rows.order)


def interact(network: Any, embedded: Tensor, rows: Rows, size: int) -> Tensor:
    """Compute the representations of all rows, (rows, D), for rows with at most `size` tokens at a time."""
    stage = network.row_interactor
    num_cls = network.config.row_num_cls
    x = stage.add_cls(embedded, rows)  # (rows * T, E)
    runs = rows.within.every.runs
    assert isinstance(runs, Tensor)  # not exported
    represented = []
    start = 0
    for count, T, *_ in runs.tolist():
        # All rows with T tokens, as rows are sorted by T.
        tokens = x[start : start + count * T]  # (count * T, E)
        start += count * T
        # Whole rows: rows do not attend to each other, so any number may be computed at once.
        for part in tokens.split(max(1, size // T) * T):
            starts = torch.arange(0, len(part) + 1, T, dtype=torch.int32, device=x.device)
            within = within_rows([[len(part) // T, T]], starts, num_cls)
            represented.append(stage.interact(part, within))
    return torch.cat(represented)


# In-context learning among any number of classes


def label_digits(y: Tensor, num_classes: int, most: int) -> list[Tensor]:
    """Return the digits of labels y, most significant first, with as few digits below `most` as possible.

    All digits have the same radix, the smallest possible: with most=10, 57 classes need two digits of radix 8, and
    label 42 is (5, 2).
    """
    places = next(k for k in itertools.count(1) if most**k >= num_classes)
    radix = next(r for r in itertools.count(1) if r**places >= num_classes)
    return [y // radix**place % radix for place in reversed(range(places))]


def split_classes(num_classes: int, most: int) -> list[int]:
    """Return sizes of the groups of consecutive classes under a node: at most `most`, nearly equal, larger first."""
    groups = min(-(-num_classes // most), most)
    size, larger = divmod(num_classes, groups)
    return [size + 1] * larger + [size] * (groups - larger)


def leaf_node(learner: InContextLearner, rows: Tensor, y: Tensor, counts: list[int]) -> ClassNode:
    """Make the node of tables with few classes from the rows (rows, D) and labels y of all, and the rows of each."""
    # Labeled rows are query rows too.
    shapes = [(2 * n, n, 1) for n in counts]
    sizes = torch.tensor(shapes, device=rows.device)
    keys = learner.keys(rows, y, context_layout(sizes, shapes), log_counts(sizes))
    return ClassNode(counts, keys, children=[], sizes=[])


def answer_at_node(learner: InContextLearner, node: ClassNode, queries: Tensor, counts: list[int]) -> Tensor:
    """Predict query rows (query rows, D) of the tables of a node, `counts` of each, (query rows, C)."""
    shapes = [(n + asked, n, 1) for n, asked in zip(node.counts, counts, strict=True)]
    sizes = torch.tensor(shapes, device=queries.device)
    return learner.answer(queries, node.keys, context_layout(sizes, shapes), log_counts(sizes))


def class_tree(learner: InContextLearner, rows: Tensor, y: Tensor, num_classes: int) -> ClassNode:
    """Make the node of a table with labeled rows (n, D) of the classes y in 0..C-1, and those below it."""
    if num_classes == 1:
        return ClassNode([len(rows)], keys=[], children=[], sizes=[])
    if num_classes <= learner.config.max_classes:
        return leaf_node(learner, rows, y, [len(rows)])._replace(sizes=[1] * num_classes)
    sizes = split_classes(num_classes, learner.config.max_classes)
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    # The group of each row.
    group = torch.bucketize(y, torch.tensor(starts[1:], device=y.device), right=True)  # (n,)
    children = []
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        # The rows of a group are a table of their own, whose classes begin at 0.
        is_inside = group == number
        children.append(class_tree(learner, rows[is_inside], y[is_inside] - start, size))
    return leaf_node(learner, rows, group, [len(rows)])._replace(children=children, sizes=sizes)


def class_probabilities(learner: InContextLearner, node: ClassNode, queries: Tensor, temperature: float) -> Tensor:
    """Compute the probabilities of the classes of a node for query rows, (query rows, D) -> (query rows, C).

    Each node predicts from its own labeled rows; probabilities are multiplied along the paths of the tree.
    """
    if not node.keys:
        return queries.new_ones(len(queries), 1)
    logits = answer_at_node(learner, node, queries, [len(queries)])[:, : len(node.sizes)]
    p = torch.softmax(logits / temperature, dim=-1)  # (query rows, children)
    if not node.children:
        return p
    probabilities = []
    for number, child in enumerate(node.children):
        within_child = class_probabilities(learner, child, queries, temperature)
        probabilities.append(p[:, number, None] * within_child)
    return torch.cat(probabilities, dim=1)
