"""Padded packs: few sizes, so that the step of a small network is captured once for each and replayed for all packs.

A CUDA graph replays the same launches with the same numbers, but the totals of a pack, such as its columns, differ from
step to step. So they are rounded up to those of a typical pack times 1, 1.15, 1.15^2, ...: with 64 tables a step `mini`
needs 6 such sizes and computes 25 % more tokens, with 4 tables 8 sizes and 45 % more.

What a pack lacks to its size are pads, sequences like those of tables, at the end of their region (see pack.py):

    columns              labeled tokens | pads | query tokens | pads      tables of one column each
    rows                 rows | pads                                      rows of the tokens of the columns' pads
    in-context learning  labeled rows | pads | query rows | pads          tables, as many as there are

They need not be the same tables in all stages. Their cells are zeros, no token of a table attends to them, and each has
a labeled token, so that no sequence is without keys. So all memory is written, and outputs of pads are finite numbers
that no loss reads: their gradients are zeros. (Zeros times the NaN of unwritten memory would be NaN in each weight.)

B tables, N rows of which the first n are labeled, G feature groups, C CLS tokens of a row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from tabicl_train.model.pack import KEYS, Columns, Context, RowPrograms, Rows, Shape, ends_of, row_programs, within_rows

RATIO = 1.15  # of a size to the one before
SIZES = 12  # the largest is 4.7 times a typical pack


class Totals(NamedTuple):
    """What a pack has in total."""

    columns: int
    labeled_tokens: int
    query_tokens: int
    labeled_rows: int
    query_rows: int
    programs_32: int  # of row kernels, see `KEYS`
    programs_64: int
    programs_128: int

    @property
    def rows(self) -> int:
        return self.labeled_rows + self.query_rows

    @property
    def tokens(self) -> int:
        """Tokens of columns."""
        return self.labeled_tokens + self.query_tokens

    @property
    def programs(self) -> tuple[int, ...]:
        return self[-len(KEYS) :]


class Size(NamedTuple):
    """All numbers on which the launches of a step depend."""

    tables: int  # without pads
    totals: Totals
    most_rows: int  # labeled rows of a table, and query rows
    most_tokens: int  # of a row, with CLS tokens


class Pads(NamedTuple):
    """The sequences that a pack lacks to its size."""

    columns: list[Shape]  # tables of one column
    rows: list[int]  # tokens of each, with CLS tokens
    tables: list[Shape]  # of in-context learning


def totals_of(shapes: Sequence[Shape], cls: int, rows_of_pads: Sequence[int] = ()) -> Totals:
    """Return the totals of tables of N, n and G; rows_of_pads: the tokens of more rows, which count as programs."""
    # Rows by their number of tokens, and the programs that they fill: see `pack.row_programs`.
    rows = Counter(rows_of_pads)
    for N, _, G in shapes:
        rows[G + cls] += N
    programs = dict.fromkeys(KEYS, 0)
    for width, count in rows.items():
        keys = next((keys for keys in KEYS if keys >= width), None)
        # A row that is too wide for kernels has no program.
        if keys is not None:
            programs[keys] += -(-count // (keys // width))
    return Totals(
        sum(G for _, _, G in shapes),
        sum(n * G for _, n, G in shapes),
        sum((N - n) * G for N, n, G in shapes),
        sum(n for _, n, _ in shapes),
        sum(N - n for N, n, _ in shapes),
        *programs.values(),
    )


def mean_size(packs: Sequence[Sequence[Shape]], most_rows: int, most_tokens: int, cls: int) -> Size:
    """Return the mean size of planned packs, of tables with at most so many rows, and tokens of a row."""
    totals = [totals_of(shapes, cls) for shapes in packs]
    means = [sum(values) / len(values) for values in zip(*totals, strict=True)]
    # Pads are rows of about the same width, of which programs hold fewer than of narrow and wide ones.
    first = -len(KEYS)
    means[first:] = [1.3 * programs for programs in means[first:]]
    return Size(len(packs[0]), Totals(*map(math.ceil, means)), most_rows, most_tokens)


def round_up(shapes: Sequence[Shape], typical: Size, cls: int) -> tuple[Size, Pads] | None:
    """Return the smallest size that tables fit into, and their pads; None if they fit into none."""
    if len(shapes) != typical.tables:
        return None
    exact = totals_of(shapes, cls)
    for number in range(SIZES):
        totals = Totals(*(math.ceil(RATIO**number * total) for total in typical.totals))
        size = typical._replace(totals=totals)
        pads = pads_between(exact, size, cls)
        if pads is not None and all(map(int.__le__, totals_of(shapes, cls, pads.rows), totals)):
            return size, pads
    return None


def pads_between(exact: Totals, size: Size, cls: int) -> Pads | None:
    """Divide what is missing among pads of about equal lengths; None if one would be too short or too long."""
    missing = Totals(*map(int.__sub__, size.totals, exact))
    if min(missing) < 0:
        return None
    pads = Pads(
        one_column_tables(missing.labeled_tokens, missing.query_tokens, missing.columns),
        [cls + tokens for tokens in divided(missing.tokens, missing.rows)],
        one_column_tables(missing.labeled_rows, missing.query_rows, size.tables),
    )
    # Where a total lacks nothing, there is no pad for what is missing of the other ones.
    has_all = sum(N for N, _, _ in pads.columns) == sum(pads.rows) - cls * missing.rows == missing.tokens
    for N, n, _ in pads.columns + pads.tables:
        if not 1 <= n <= size.most_rows or N - n > size.most_rows:
            return None
    return pads if has_all and max(pads.rows, default=0) <= size.most_tokens else None


def one_column_tables(labeled: int, queries: int, number: int) -> list[Shape]:
    """Divide labeled and query rows among so many tables."""
    return [(n + q, n, 1) for n, q in zip(divided(labeled, number), divided(queries, number), strict=True)]


def divided(total: int, parts: int) -> list[int]:
    """Divide a number into parts that differ by at most 1; nothing is divided into 0 parts."""
    return [(total + part) // parts for part in range(parts)]


def pad_columns(columns: Columns, last: int, size: Size) -> Columns:
    """Complete a layout of tables and pads, of which those from number `last` on share its factor of the queries."""
    table = columns.table.clamp(max=last)
    runs = columns.to_inducing.runs
    assert isinstance(runs, Tensor)  # not exported
    runs = torch.cat([runs[:, :-1], runs[:, -1:].clamp(max=last)], 1)
    return columns._replace(
        table=table,
        # The labels of pads are any labels.
        labels=columns.labels.clamp(max=size.totals.rows - 1),
        to_inducing=columns.to_inducing._replace(runs=runs, table=table, most_keys=size.most_rows),
        from_inducing=columns.from_inducing._replace(most_queries=size.most_rows),
    )


def pad_rows(rows: Rows, exact: Totals, size: Size, pads: list[int], cls: int) -> Rows:
    """Add pads, rows of so many tokens, to the layout of the rows of tables; exact: the totals of these."""
    every = rows.within.every
    assert isinstance(every.runs, Tensor)  # not exported
    runs = every.runs[:, [0, 2]].tolist()
    runs += [[len(list(equal)), width] for width, equal in groupby(pads)]
    ends = ends_of(every.query_ends.diff(), torch.tensor(pads, dtype=torch.int32))
    within = within_rows(runs, ends, cls)
    within = within._replace(
        every=within.every._replace(most_queries=size.most_tokens, most_keys=size.most_tokens),
        collecting=within.collecting._replace(most_keys=size.most_tokens),
    )
    if size.most_tokens <= KEYS[-1]:
        programs = row_programs(torch.tensor(runs), torch.device("cpu"))
        within = within._replace(programs=pad_programs(programs, size, cls))

    # The columns' pads, and rows, in the order of their stages: labeled ones are inserted, others added.
    tokens = torch.arange(every.queries, within.every.queries)
    tokens = tokens[within.position[every.queries :] >= cls]
    labeled_tokens = size.totals.labeled_tokens - exact.labeled_tokens
    numbers = torch.arange(exact.rows, size.totals.rows)
    labeled_rows = size.totals.labeled_rows - exact.labeled_rows
    return Rows(
        within,
        insert(rows.tokens, exact.labeled_tokens, tokens, labeled_tokens),
        insert(rows.order, exact.labeled_rows, numbers, labeled_rows),
    )


def insert(values: Tensor, at: int, pads: Tensor, number: int) -> Tensor:
    """Insert the first `number` pads at a position, and add the others at the end."""
    return torch.cat([values[:at], pads[:number], values[at:], pads[number:]])


def pad_programs(programs: RowPrograms, size: Size, cls: int) -> RowPrograms:
    """Add programs without rows, so that there are as many as in other packs."""
    parts = []
    launches = []
    first = 0
    narrowest = cls  # of a pad without tokens of columns
    for keys, (start, number, _), total in zip(KEYS, programs.launches.tolist(), size.totals.programs, strict=True):
        without_rows = torch.tensor([[0, 1, 0, 0]], dtype=torch.int32).expand(total - number, 4)
        parts += [programs.programs[start : start + number], without_rows]
        launches.append([first, total, max(1, keys // narrowest)])  # at most so many rows of a program
        first += total
        narrowest = keys + 1
    return RowPrograms(torch.cat(parts), torch.tensor(launches))


def pad_context(context: Context, size: Size) -> Context:
    """Complete a layout of tables and pads."""
    return context._replace(
        all=context.all._replace(most_queries=size.most_rows, most_keys=size.most_rows),
        queries=context.queries._replace(most_queries=size.most_rows, most_keys=size.most_rows),
    )
