"""Packs: tables that go through a network in one pass without padding, and the positions of their tokens.

In the column stage and in in-context learning, all labeled tokens come before all query tokens, so that each kind is a
slice; within a kind, tables (or columns) are in the order of the pack. In the row stage the tokens of a row are
adjacent, its CLS tokens first, and rows are sorted by their number of tokens.

The host knows the sizes; positions are computed on the device from a copy of them, so nothing waits for a GPU.

B tables of N rows of which the first n are labeled, M features, G feature groups, C CLS tokens, T = C + G tokens of a
row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Pack", "Shape"]

Shape = tuple[int, int, int]  # N, n, M


@dataclass
class Pack:
    """Tables, one after the other.

    Parameters
    ----------
    X : Tensor
        float32 (cells,); each table is (M, N), so that columns are contiguous; NaN is a missing value, for networks
        that support them.
    y : Tensor
        (rows,), the labels of all rows of each table, labeled rows first: classes, int64, or numbers, float32.
    sizes : Tensor
        int64 (B, 3), the rows N, labeled rows n and features M of each table.
    shapes : tuple of Shape
        The same numbers for the host, which would wait for a GPU to read `sizes`.
    """

    X: Tensor
    y: Tensor
    sizes: Tensor
    shapes: tuple[Shape, ...]

    @classmethod
    def of(cls, tables: Iterable[tuple[Tensor, Tensor, int]]) -> Pack:
        """Pack tables X (N, M), y (N,), n."""
        tables = list(tables)
        shapes = tuple((X.shape[0], n, X.shape[1]) for X, _, n in tables)
        X = torch.cat([X.t().flatten() for X, _, _ in tables])
        return cls(X, torch.cat([y for _, y, _ in tables]), torch.tensor(shapes, device=X.device), shapes)

    @classmethod
    def stack(cls, X: Tensor, y_train: Tensor) -> Pack:
        """Pack tables of equal shape whose labels are known for the first rows only.

        Parameters
        ----------
        X : Tensor
            (B, N, M) float32.
        y_train : Tensor
            (B, n), the labels of the first rows; those of the others are 0.

        Returns
        -------
        Pack

        Raises
        ------
        ValueError
            For other shapes.
        """
        if X.dim() != 3 or y_train.dim() != 2 or X.shape[0] != y_train.shape[0] or 0 in X.shape:
            raise ValueError(
                "X must be (tables, rows, features) and y_train (tables, labeled rows), "
                f"are {tuple(X.shape)} and {tuple(y_train.shape)}"
            )
        B, N, M = X.shape
        n = y_train.shape[1]
        y = y_train.new_zeros(B, N)
        y[:, : min(n, N)] = y_train[:, :N]
        sizes = torch.tensor([N, n, M], device=X.device).expand(B, 3)
        return cls(X.transpose(1, 2).flatten(), y.flatten(), sizes, ((N, n, M),) * B)

    def __len__(self) -> int:
        """Return the number of tables B."""
        return len(self.shapes)

    @property
    def cells(self) -> int:
        """Number of cells of all tables."""
        return sum(N * M for N, _, M in self.shapes)

    def tables(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield X (N, M), y (N,) and n of each table, as views."""
        columns = self.X.split([N * M for N, _, M in self.shapes])
        labels = self.y.split([N for N, _, _ in self.shapes])
        for (N, n, M), X, y in zip(self.shapes, columns, labels, strict=True):
            yield X.view(M, N).t(), y, n

    def queries(self) -> Tensor:
        """Return the labels of the query rows of all tables, one table after the other, (query rows,)."""
        labels = self.y.split([size for N, n, _ in self.shapes for size in (n, N - n)])
        return torch.cat(labels[1::2])

    def means(self, values: Tensor) -> Tensor:
        """Average over the query rows of each table, (query rows,) -> (B,); repeatable, unlike index_add on a GPU."""
        return self._means(values, self.sizes[:, 0] - self.sizes[:, 1], max(N - n for N, n, _ in self.shapes))

    def row_means(self, values: Tensor) -> Tensor:
        """Average over all rows of each table, (rows,) -> (B,)."""
        return self._means(values, self.sizes[:, 0], max(N for N, _, _ in self.shapes))

    def _means(self, values: Tensor, counts: Tensor, longest: int) -> Tensor:
        within = torch.arange(longest, device=values.device)
        index = (counts.cumsum(0) - counts)[:, None] + within  # (B, longest)
        padded = values[index.clamp(max=len(values) - 1)].where(within < counts[:, None], 0.0)
        return padded.sum(1) / counts

    def halves(self) -> list[Pack]:
        """Divide the pack in two, tables kept in order; it needs at least two tables."""
        middle = (len(self) + 1) // 2
        ends = [0, *accumulate(N * M for N, _, M in self.shapes)]
        rows = [0, *accumulate(N for N, _, _ in self.shapes)]
        return [
            Pack(self.X[ends[a] : ends[b]], self.y[rows[a] : rows[b]], self.sizes[a:b], self.shapes[a:b])
            for a, b in ((0, middle), (middle, len(self)))
        ]

    def to(self, device: torch.device) -> Pack:
        """Copy the tables to a device, without waiting for it."""
        X, y, sizes = (values.to(device, non_blocking=True) for values in (self.X, self.y, self.sizes))
        return Pack(X, y, sizes, self.shapes)

    def pin_memory(self) -> Pack:
        """Copy the tables to pinned memory."""
        return Pack(self.X.pin_memory(), self.y.pin_memory(), self.sizes.pin_memory(), self.shapes)


class Spans(NamedTuple):
    """Sequences of queries, one after the other, each of which attends to a sequence of keys."""

    # int64 (S, 5) on the CPU, runs of equal sequences: how many, queries and keys of each, first key, table. The keys
    # of a run follow those of the one before. A list in a graph that is exported, where sizes are symbols.
    runs: Tensor | list[list[int]]
    queries: int  # of all sequences
    query_ends: Tensor  # int32 (sequences + 1,) on the device: 0 and the end of each sequence
    key_ends: Tensor  # likewise
    most_queries: int  # of a sequence
    most_keys: int
    uses: int = 1  # sets of sequences that use all keys, one after the other
    table: Tensor | None = None  # int64 (sequences,), if all sequences share their queries up to a factor of the table

    @property
    def shares_queries(self) -> bool:
        return self.table is not None


class Columns(NamedTuple):
    """The column stage: labeled tokens of all columns, then query tokens of all columns."""

    labeled: int  # number of labeled tokens
    table: Tensor  # int64 (columns,), the table of each column
    group: Tensor  # int64 (columns,), the feature group of each column, from 0 in each table
    labels: Tensor  # int64 (labeled tokens,), positions of their labels in Pack.y
    to_inducing: Spans  # from the inducing points of each column to its labeled tokens
    from_inducing: Spans  # from all tokens to the inducing points of their columns


class WithinRows(NamedTuple):
    """Rows of T adjacent tokens, the C CLS tokens of each first."""

    every: Spans  # from all tokens to the tokens of their rows
    collecting: Spans  # from the CLS tokens to the tokens of their rows
    position: Tensor  # int64 (tokens,), the position of each token in its row
    cls: Tensor  # int64 (rows * C,), the positions of the CLS tokens


class Rows(NamedTuple):
    """The row stage; rows are sorted by T."""

    within: WithinRows  # the tokens of each row
    tokens: Tensor  # int64, the position of each column token
    order: Tensor  # int64 (rows,), the position of each row of in-context learning among these rows


class Context(NamedTuple):
    """In-context learning: labeled rows of all tables, then query rows of all tables."""

    labeled: int  # number of labeled rows
    table: Tensor  # int64 (rows,), the table of each row
    labels: Tensor  # int64 (labeled rows,), positions of their labels in Pack.y
    all: Spans  # from all rows to the labeled rows of their tables
    queries: Spans  # from the query rows to the labeled rows of their tables
    sizes: Tensor | None = None  # int64 (B, 3), N, n and a third number of each table; None in a graph that is exported
    shapes: tuple[Shape, ...] = ()  # the same numbers for the host


class InFront(NamedTuple):
    """In-context learning with T more rows in front of the labeled rows of each table; see `rows_in_front`."""

    context: Context  # the layout of all rows, in which the rows in front count as labeled ones
    front: Tensor  # int64 (B * T,), the positions of the rows in front
    labeled: Tensor  # int64 (labeled rows,), the positions of the labeled rows


class TakeRows(torch.autograd.Function):
    """values[index], with repeated indices; on a GPU the gradient is summed in the same order each time."""

    # The rule of autograd, index_add, adds by atomic operations there: in another order each time, and in the dtype of
    # the gradient. Over 50 columns of a table, the sum in bf16 was off by 0.8 %, that of a product with its sums in
    # fp32 by 0.17 % (on a CPU), which is the rounding of the result. A product of a one-hot matrix takes 4 GFLOP for
    # the 65,536 queries of a block of TabICLv2, some 0.3 ms in 12 blocks of a step on an H100 (estimated).

    @staticmethod
    def forward(ctx, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(values)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        if not grad.is_cuda:  # in order, and without products, which are slow for few queries
            return grad.new_zeros(ctx.count, *grad.shape[1:]).index_add_(0, index, grad), None
        return one_hot_sums(grad, index, ctx.count), None


def one_hot_sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum the values (Q, ...) of each index 0..count-1, (count, ...), by a product, whose order is fixed."""
    chosen = (index == torch.arange(count, device=index.device)[:, None]).to(values.dtype)  # (count, Q)
    flat = values.flatten(1)
    with torch.autocast(values.device.type, enabled=False):
        if values.dtype == torch.float32:
            # TF32 would round each value to 10 bits of its fraction. With these bits and the others apart, nothing is
            # lost; a change of torch's setting would break the graph of a compiled block.
            first_bits = (flat.view(torch.int32) & -(2**13)).view(torch.float32)
            sums = chosen @ first_bits + chosen @ (flat - first_bits)
        else:
            sums = chosen @ flat
    return sums.view(count, *values.shape[1:])


def starts_of(lengths: Tensor) -> Tensor:
    """Return the starts of adjacent pieces of these lengths."""
    return lengths.cumsum(0) - lengths


def ends_of(*lengths: Tensor) -> Tensor:
    """Return 0 and the ends of adjacent pieces of these lengths, int32."""
    return torch.cat([lengths[0].new_zeros(1), torch.cat(lengths).cumsum(0)]).int()


def positions(first: Tensor, step: Tensor | int, lengths: Tensor, total: int) -> Tensor:
    """Return first, first + step, first + 2 step, ... of each piece of these lengths, (total, ...)."""
    # first: (pieces, ...); step: (pieces,) or 1; total: the sum of the lengths
    within = torch.arange(total, device=lengths.device)
    shape = (-1,) + (1,) * (first.dim() - 1)
    if isinstance(step, int):
        first = first - step * starts_of(lengths).view(shape)
        return first.repeat_interleave(lengths, 0, output_size=total) + step * within.view(shape)
    terms = torch.stack([first - step * starts_of(lengths), step], -1)
    start, step = terms.repeat_interleave(lengths, 0, output_size=total).unbind(-1)
    return torch.addcmul(start, step, within)


def positions_by_kind(first: Tensor, step: Tensor | int, N: Tensor, n: Tensor, total: int, labeled: int) -> Tensor:
    """Return `positions` of pieces of N, the first n of all pieces before the others of all pieces."""
    # labeled, total: the sums of n and of N
    skipped = n.view((-1,) + (1,) * (first.dim() - 1)) * step
    return torch.cat(
        [positions(first, step, n, labeled), positions(first + skipped, step, N - n, total - labeled)],
    )


def log_counts(sizes: Tensor) -> Tensor:
    """Return the logarithm of the number of labeled rows of each table, float32 (B,); sizes: see `column_layout`."""
    return sizes[:, 1].float().log()


def column_layout(sizes: Tensor, shapes: list[tuple[int, int, int]], inducing: int) -> Columns:
    """Lay out the column stage; sizes: N, n, G of each table, int64 (B, 3) on the device; shapes: as a list."""
    # N = n is possible, but only in all tables.
    N, n, G = sizes.unbind(1)
    device, columns = sizes.device, sum(G for _, _, G in shapes)
    table = torch.arange(len(shapes), device=device).repeat_interleave(G, output_size=columns)
    labeled, queries = n[table], (N - n)[table]
    to, labeled_back, queries_back, key, first = [], [], [], 0, 0
    for (n_rows, n_labeled), same in groupby(enumerate(shapes), lambda item: item[1][:2]):
        members = list(same)
        count = sum(G for _, (_, _, G) in members)
        to.append([count, inducing, n_labeled, key, members[0][0]])
        labeled_back.append([count, n_labeled, inducing, first * inducing, 0])
        queries_back.append([count, n_rows - n_labeled, inducing, first * inducing, 0])
        key, first = key + count * n_labeled, first + count
    tokens = sum(N * G for N, _, G in shapes)
    points = torch.full_like(labeled, inducing)
    both = tokens > key
    most = max(n for _, n, _ in shapes)
    longest = max(max(n, N - n) for N, n, _ in shapes)
    return Columns(
        key,
        table,
        torch.arange(columns, device=device) - starts_of(G)[table],
        positions(starts_of(N)[table], 1, labeled, key),
        Spans(torch.tensor(to), columns * inducing, ends_of(points), ends_of(labeled), inducing, most, table=table),
        Spans(
            torch.tensor(labeled_back + queries_back if both else labeled_back),
            tokens,
            ends_of(labeled, queries) if both else ends_of(labeled),
            ends_of(points, points) if both else ends_of(points),
            longest,
            inducing,
            2 if both else 1,
        ),
    )


def row_layout(sizes: Tensor, shapes: list[tuple[int, int, int]], num_cls: int, columns: Columns) -> Rows:
    """Lay out the row stage; arguments as in `column_layout`."""
    N, n, G = sizes.unbind(1)
    T = G + num_cls
    order = torch.argsort(G, stable=True)
    num_rows = sum(N for N, _, _ in shapes)
    widths = sorted((G + num_cls, N) for N, _, G in shapes)
    runs = [[sum(N for _, N in same), T] for T, same in groupby(widths, lambda width: width[0])]
    first = torch.empty_like(N).index_copy_(0, order, starts_of((N * T)[order]))  # (B,), first token of each table
    first_row = torch.empty_like(N).index_copy_(0, order, starts_of(N[order]))  # (B,)
    row_starts = positions(first[order], T[order], N[order], num_rows)  # (rows,)
    starts = torch.cat([row_starts, (N * T).sum()[None]]).int()
    table = columns.table
    top, step = (first + num_cls)[table] + columns.group, T[table]  # token of a column in the first row of its table
    num_tokens, num_labeled = sum(N * G for N, _, G in shapes), sum(n for _, n, _ in shapes)
    tokens = positions_by_kind(top, step, N[table], n[table], num_tokens, columns.labeled)
    by_kind = positions_by_kind(first_row, 1, N, n, num_rows, num_labeled)
    return Rows(within_rows(runs, starts, num_cls), tokens, by_kind)


def within_rows(runs: list[list[int]], starts: Tensor, num_cls: int) -> WithinRows:
    """Lay out rows; runs: their numbers and T, in order; starts: int32 (rows + 1,), 0 and the end of each row."""
    num_rows, tokens, most = sum(R for R, _ in runs), sum(R * T for R, T in runs), max(T for _, T in runs)
    firsts = accumulate((R * T for R, T in runs), initial=0)
    every = [[R, T, T, first, 0] for (R, T), first in zip(runs, firsts, strict=False)]
    collecting = [[R, num_cls, T, first, 0] for R, T, _, first, _ in every]
    number = torch.arange(num_rows + 1, dtype=torch.int32, device=starts.device)
    first = starts[:-1].long()
    position = torch.arange(tokens, device=starts.device) - first.repeat_interleave(starts.diff(), output_size=tokens)
    return WithinRows(
        Spans(torch.tensor(every), tokens, starts, starts, most, most),
        Spans(torch.tensor(collecting), num_rows * num_cls, number * num_cls, starts, num_cls, most),
        position,
        (first[:, None] + torch.arange(num_cls, device=starts.device)).flatten(),
    )


def context_layout(sizes: Tensor, shapes: list[tuple[int, int, int]]) -> Context:
    """Lay out in-context learning; arguments as in `column_layout`, G is not used."""
    N, n, _ = sizes.unbind(1)
    labeled, rows = sum(n for _, n, _ in shapes), sum(N for N, _, _ in shapes)
    every = torch.arange(len(shapes), device=sizes.device)
    both = torch.cat([n, N - n])
    table = every.repeat(2).repeat_interleave(both, output_size=rows)
    first, last, key = [], [], 0
    for (n_rows, n_labeled), same in groupby(enumerate(shapes), lambda item: item[1][:2]):
        count = len(list(same))
        first.append([count, n_labeled, n_labeled, key, 0])
        last.append([count, n_rows - n_labeled, n_labeled, key, 0])
        key += count * n_labeled
    most, longest = max(n for _, n, _ in shapes), max(N - n for N, n, _ in shapes)
    return Context(
        labeled,
        table,
        positions(starts_of(N), 1, n, labeled),
        Spans(torch.tensor(first + last), rows, ends_of(n, N - n), ends_of(n, n), max(most, longest), most, 2),
        Spans(torch.tensor(last), rows - labeled, ends_of(N - n), ends_of(n), longest, most),
        sizes,
        tuple(shapes),
    )


def rows_in_front(context: Context, rows: int, *, as_queries: bool = False) -> InFront:
    """Lay out in-context learning anew, with more rows in front of the labeled rows of each table.

    Query rows attend to them as to labeled rows; `log_n` stays that of the labeled rows, as it is given apart from the
    layout.

    Parameters
    ----------
    context : Context
        The layout without these rows.
    rows : int
        T, the rows in front of each table.
    as_queries : bool
        Whether they are query rows too, as the labeled rows are in `InContextLearner.keys`.

    Returns
    -------
    InFront
    """
    T = rows
    if context.sizes is None:  # a graph that is exported, whose tables are equal
        ((B, queries, n, *_),) = context.queries.runs
        table = torch.arange(B)[:, None] * (n + T)  # (B, 1), the first row of each table
        longer = equal_context(B, n + T, queries + (T if as_queries else 0))
        front = (table + torch.arange(T)).flatten()
        labeled = (table + T + torch.arange(n)).flatten()
        return InFront(longer, front, labeled)

    N, n, third = context.sizes.unbind(1)
    more = 2 * T if as_queries else T
    sizes = torch.stack([N + more, n + T, third], 1)
    longer = context_layout(sizes, [(N + more, n + T, third) for N, n, third in context.shapes])
    first = starts_of(n + T)  # (B,), the first row of each table among the rows in front and the labeled ones
    front = (first[:, None] + torch.arange(T, device=n.device)).flatten()
    labeled = positions(first + T, 1, n, context.labeled)
    return InFront(longer, front, labeled)


def equal_context(tables: int, labeled: int, queries: int) -> Context:
    """Lay out in-context learning of equal tables in a graph that is exported, where sizes are symbols."""
    B, n = tables, labeled
    table = torch.zeros(B * (n + queries), dtype=torch.int64)  # all tables have the same n, so log n is given once
    every = symbolic_spans([[B, n, n, 0, 0], [B, queries, n, 0, 0]], B * (n + queries))
    return Context(B * n, table, table, every, symbolic_spans([[B, queries, n, 0, 0]], B * queries))


def symbolic_spans(runs: list[list[int]], queries: int, shared: bool = False) -> Spans:
    """Make the parts of Spans that `attend_by_run` reads, with symbolic sizes."""
    nothing, uses = torch.zeros(0), 2 if len(runs) > 1 else 1  # labeled and query rows attend to the same keys
    return Spans(runs, queries, nothing, nothing, 0, 0, uses, nothing if shared else None)
