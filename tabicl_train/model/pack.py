"""Packs: tables that go through a network in one pass without padding, and the positions of their tokens.

Tokens of all tables lie one after the other, in an order of their own in each of the three stages:

- Columns: the labeled tokens of all columns, then the query tokens of all columns.
- Rows: the tokens of a row are adjacent, its CLS tokens first. Rows are sorted by their number of tokens.
- In-context learning: the labeled rows of all tables, then the query rows of all tables.

So labeled and query tokens are a slice each in the first and the last stage. Within a kind, columns and rows are in the
order of the pack.

An example: table a has N = 3 rows, of which n = 2 are labeled, and G = 2 feature groups; table b has N = 2, n = 1 and
G = 1. Their columns are a0, a1 and b0; a0.2 is the token of column a0 in row 2. With one CLS token of a row, such as
a.2, T is 3 in table a and 2 in table b:

    columns              a0.0 a0.1 a1.0 a1.1 b0.0 | a0.2 a1.2 b0.1
    rows                 b.0 b0.0, b.1 b0.1, a.0 a0.0 a1.0, a.1 a0.1 a1.1, a.2 a0.2 a1.2
    in-context learning  a.0 a.1 b.0 | a.2 b.1

`Rows.tokens` is then 5 8 6 9 1 | 11 12 3, where the tokens of columns are among those of rows, and `Rows.order` is
2 3 0 | 4 1, where the rows of in-context learning are among the sorted rows. `tests/unit/model/test_pack.py` has all.

The host knows the sizes. Positions are computed on the device from a copy of them, so nothing waits for a GPU, or for
training on a GPU by the process that draws the tables (`FlatLayout`): there they would be 270 launches of a step.

B tables of N rows of which the first n are labeled, M features, G feature groups, I inducing points, C CLS tokens,
T = C + G tokens of a row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Pack", "Shape"]

Shape = tuple[int, int, int]  # N, n, M
KEYS = (32, 64, 128)  # of a program of rows


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
        A padded pack has more cells and labels, zeros after those of the tables, see padding.py.
    sizes : Tensor
        int64 (B, 3), the rows N, labeled rows n and features M of each table.
    shapes : tuple of Shape
        The same numbers for the host, which would wait for a GPU to read `sizes`.
    layout : FlatLayout, optional
        The positions of tokens, where they were computed before.
    """

    X: Tensor
    y: Tensor
    sizes: Tensor
    shapes: tuple[Shape, ...]
    layout: FlatLayout | None = None

    @classmethod
    def of(cls, tables: Iterable[tuple[Tensor, Tensor, int]]) -> Pack:
        """Pack tables of any sizes.

        Parameters
        ----------
        tables : iterable of (Tensor, Tensor, int)
            For each table X (N, M) float32, y (N,) with labeled rows first, and the number n of labeled rows.

        Returns
        -------
        Pack
        """
        tables = list(tables)
        shapes = tuple((X.shape[0], n, X.shape[1]) for X, _, n in tables)
        X = torch.cat([X.t().flatten() for X, _, _ in tables])
        y = torch.cat([y for _, y, _ in tables])
        sizes = torch.tensor(shapes, device=X.device)
        return cls(X, y, sizes, shapes)

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
                f"X has the shape {tuple(X.shape)} and y_train {tuple(y_train.shape)}; "
                "they must be (tables, rows, features) and (tables, labeled rows)"
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

    @property
    def rows(self) -> int:
        """Number of rows of all tables."""
        return sum(N for N, _, _ in self.shapes)

    @property
    def is_padded(self) -> bool:
        """Whether it has more rows than its tables, see padding.py."""
        return len(self.y) > self.rows

    def tables(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield X (N, M), y (N,) and n of each table, as views."""
        columns = self.X[: self.cells].split([N * M for N, _, M in self.shapes])
        labels = self.y[: self.rows].split([N for N, _, _ in self.shapes])
        for (N, n, M), X, y in zip(self.shapes, columns, labels, strict=True):
            yield X.view(M, N).t(), y, n

    def queries(self) -> Tensor:
        """Return the labels of the query rows of all tables, one table after the other, (query rows,)."""
        if self.layout is not None:
            return self.y.index_select(0, self.layout.targets())
        lengths = []
        for N, n, _ in self.shapes:
            lengths += [n, N - n]
        labeled_and_queries = self.y.split(lengths)  # of each table in turn
        return torch.cat(labeled_and_queries[1::2])

    def target_positions(self) -> Tensor:
        """Return the positions in y of the labels of the query rows, (query rows,)."""
        N, n, _ = self.sizes.unbind(1)
        return positions(starts_of(N) + n, 1, N - n, sum(N - n for N, n, _ in self.shapes))

    def means(self, values: Tensor) -> Tensor:
        """Average over the query rows of each table; repeatable, unlike index_add on a GPU.

        Parameters
        ----------
        values : Tensor
            A number for each query row, one table after the other, (query rows,).

        Returns
        -------
        Tensor
            (B,).
        """
        queries = self.sizes[:, 0] - self.sizes[:, 1]
        longest = max(N - n for N, n, _ in self.shapes) if self.layout is None else self.layout.most_targets
        return self._means(values, queries, longest)

    def row_means(self, values: Tensor) -> Tensor:
        """Average over all rows of each table.

        Parameters
        ----------
        values : Tensor
            A number for each row, one table after the other, (rows,).

        Returns
        -------
        Tensor
            (B,).
        """
        return self._means(values, self.sizes[:, 0], longest=max(N for N, _, _ in self.shapes))

    def _means(self, values: Tensor, counts: Tensor, longest: int) -> Tensor:
        """Average over `counts` (B,) adjacent values of each table, padded with zeros to the longest."""
        within = torch.arange(longest, device=values.device)
        index = starts_of(counts)[:, None] + within  # (B, longest)
        padded = values[index.clamp(max=len(values) - 1)].where(within < counts[:, None], 0.0)
        return padded.sum(1) / counts

    def halves(self) -> list[Pack]:
        """Divide the pack in two, tables kept in order; it needs at least two tables."""
        middle = (len(self) + 1) // 2
        first = self.shapes[:middle]
        second = self.shapes[middle:]
        cells = sum(N * M for N, _, M in first)
        rows = sum(N for N, _, _ in first)
        return [
            Pack(self.X[:cells], self.y[:rows], self.sizes[:middle], first),
            Pack(self.X[cells : self.cells], self.y[rows : self.rows], self.sizes[middle:], second),
        ]

    def copy_(self, other: Pack) -> None:
        """Take the tables of a pack whose layout has the same key; all tensors stay where they are."""
        assert self.layout is not None and other.layout is not None
        self.shapes = other.shapes
        self.X.copy_(other.X)
        self.y.copy_(other.y)
        self.sizes.copy_(other.sizes)
        self.layout.values.copy_(other.layout.values)
        # With the `runs` of the other pack, which eager steps may read.
        self.layout = other.layout._replace(values=self.layout.values)

    def to(self, device: torch.device) -> Pack:
        """Copy the tables to a device, without waiting for it."""
        return self._copied(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> Pack:
        """Copy the tables to pinned memory."""
        return self._copied(lambda x: x.pin_memory())

    def _copied(self, copy: Callable[[Tensor], Tensor]) -> Pack:
        layout = None if self.layout is None else self.layout._replace(values=copy(self.layout.values))
        return Pack(copy(self.X), copy(self.y), copy(self.sizes), self.shapes, layout)


# Tensors on the CPU, which the host reads: `Spans.runs` and `RowPrograms.launches`
ON_HOST = ("runs", "launches")


class Piece(NamedTuple):
    """Where a tensor lies in `FlatLayout.values`."""

    first: int
    shape: tuple[int, ...]
    is_float: bool


class FlatLayout(NamedTuple):
    """A layout, nested named tuples such as `Columns`, with all its tensors as one, which one copy takes to a device.

    Positions are int32 in it: those of stage 1 of TabICLv2 take 60 MB a step.
    """

    values: Tensor  # int32 (total,); of float32 numbers, the bits
    structure: Any  # the layout, with a `Piece` in the place of each tensor; those that the host reads are lists
    of_targets: Piece  # the positions of the labels of query rows
    most_targets: int  # query rows of a table

    @classmethod
    def of(cls, layout: Any, targets: Tensor, most_targets: int) -> FlatLayout:
        """Join the tensors of a layout on the CPU, and the positions of the labels of query rows."""
        joined: list[Tensor] = []
        first = 0

        def join(name: str, x: Any) -> Any:
            nonlocal first
            if not isinstance(x, Tensor):
                return x
            if name in ON_HOST:
                return x.tolist()
            piece = Piece(first, tuple(x.shape), x.is_floating_point())
            joined.append(x.flatten().view(torch.int32) if piece.is_float else x.flatten().int())
            # Triton compiles a kernel anew for an array that does not start at a multiple of 16 bytes.
            gap = -x.numel() % 4
            joined.append(joined[-1].new_zeros(gap))
            first += x.numel() + gap
            return piece

        structure = map_fields(layout, join)
        of_targets = join("targets", targets)
        return cls(torch.cat(joined), structure, of_targets, most_targets)

    def open(self) -> Any:
        """Return the layout, whose tensors are views of `values`."""
        return map_fields(self.structure, lambda name, x: torch.tensor(x) if name in ON_HOST else self.view(x))

    @property
    def key(self) -> tuple:
        """All that kernels of a GPU are given by the host: layouts of the same key launch the same, with other tables.

        These are the shapes of all tensors, and numbers such as `most_queries`. `runs`, and the shapes of tables, are
        read elsewhere.
        """

        def number(name: str, x: Any) -> Any:
            if name in ("runs", "shapes"):
                return None
            return tuple(map(tuple, x)) if name in ON_HOST else x

        return map_fields(self.structure, number), self.of_targets, self.most_targets

    def targets(self) -> Tensor:
        """Return the positions of the labels of query rows, (query rows,)."""
        return self.view(self.of_targets)

    def view(self, x: Any) -> Any:
        """Return the tensor of a piece, and anything else as it is."""
        if not isinstance(x, Piece):
            return x
        flat = self.values[x.first : x.first + math.prod(x.shape)].view(x.shape)
        return flat.view(torch.float32) if x.is_float else flat


def map_fields(layout: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """Apply a function to the name and value of each field of nested named tuples, which stay what they are."""
    if not isinstance(layout, tuple) or not hasattr(layout, "_fields") or isinstance(layout, Piece):
        return change(name, layout)
    fields = zip(layout._fields, layout, strict=True)
    return type(layout)(*(map_fields(x, change, field) for field, x in fields))


class EqualSequences(NamedTuple):
    """Adjacent sequences of the same size, each of which has queries and keys of its own: a row of `Spans.runs`."""

    number: int  # of the sequences
    queries: int  # of each sequence
    keys: int  # of each sequence
    first_key: int  # of the first sequence; the keys of the others follow
    table: int = 0  # whose factor the queries have, if sequences share them; see `Spans.table`


class Spans(NamedTuple):
    """Sequences of queries, one after the other, each of which attends to a sequence of keys.

    A CPU computes run by run, a GPU all sequences at once, so the same sequences are described twice: by `runs`, and by
    the ends of queries and keys.

    In the example of this module, the labeled and query tokens of columns a0, a1 and b0 attend to the I = 4 inducing
    points of their columns (`Columns.from_inducing`):

        runs           number  queries  keys  first key
                            2        2     4          0    a0 and a1, labeled
                            1        1     4          8    b0, labeled
                            2        1     4          0    a0 and a1, queries
                            1        1     4          8    b0, queries
        query_ends      0 2 4 5 6 7 8
        key_ends        0 4 8 12 16 20 24
        uses            2, as labeled and query tokens attend to the same 12 keys; key_ends count them twice
    """

    # int64 (runs, 5) on the CPU, an `EqualSequences` each; in a graph that is exported, where sizes are symbols, a list
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
        """Whether all sequences have the same queries, up to a factor of the table."""
        return self.table is not None


class Columns(NamedTuple):
    """The column stage: labeled tokens of all columns, then query tokens of all columns."""

    labeled: int  # number of labeled tokens
    table: Tensor  # int64 (columns,), the table of each column
    group: Tensor  # int64 (columns,), the feature group of each column, from 0 in each table
    labels: Tensor  # int64 (labeled tokens,), positions of their labels in Pack.y
    to_inducing: Spans  # from the inducing points of each column to its labeled tokens
    from_inducing: Spans  # from all tokens to the inducing points of their columns
    cells: Tensor | None = None  # (tokens, features of a token), see `stages.feature_index`; None: computed when read


class WithinRows(NamedTuple):
    """Rows of T adjacent tokens, the C CLS tokens of each first."""

    every: Spans  # from all tokens to the tokens of their rows
    collecting: Spans  # from the CLS tokens to the tokens of their rows
    position: Tensor  # int64 (tokens,), the position of each token in its row
    cls: Tensor  # int64 (rows * C,), the positions of the CLS tokens
    programs: RowPrograms | None = None  # of kernels; None: computed when read, or rows are too wide


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
        # On a CPU index_add adds in order, and a product is slow for few queries.
        if not grad.is_cuda:
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
    """Return first, first + step, first + 2 step, ... for each piece.

    Parameters
    ----------
    first : Tensor
        First position of each piece, (pieces, ...).
    step : Tensor or int
        Distance of neighbors in each piece, (pieces,), or 1.
    lengths : Tensor
        Number of positions of each piece, (pieces,).
    total : int
        Sum of the lengths, known to the host.

    Returns
    -------
    Tensor
        (total, ...).
    """
    # Entry i of the result, in a piece that starts at s, is first + step (i - s) = (first - step s) + step i. So the
    # terms of a piece are repeated in one operation.
    within = torch.arange(total, device=lengths.device)
    shape = (-1,) + (1,) * (first.dim() - 1)
    if isinstance(step, int):
        first = first - step * starts_of(lengths).view(shape)
        return first.repeat_interleave(lengths, 0, output_size=total) + step * within.view(shape)
    terms = torch.stack([first - step * starts_of(lengths), step], -1)
    start, step = terms.repeat_interleave(lengths, 0, output_size=total).unbind(-1)
    return torch.addcmul(start, step, within)


def positions_by_kind(first: Tensor, step: Tensor | int, N: Tensor, n: Tensor, total: int, labeled: int) -> Tensor:
    """Return `positions` of pieces of N, with the first n of every piece before the others of every piece.

    `total` and `labeled` are the sums of N and of n.
    """
    skipped = n.view((-1,) + (1,) * (first.dim() - 1)) * step
    of_labeled = positions(first, step, n, labeled)
    of_queries = positions(first + skipped, step, N - n, total - labeled)
    return torch.cat([of_labeled, of_queries])


def log_counts(sizes: Tensor) -> Tensor:
    """Return the logarithm of the number of labeled rows of each table, float32 (B,); sizes: see `column_layout`."""
    return sizes[:, 1].float().log()


def equal_splits(shapes: Sequence[Shape]) -> Iterator[tuple[int, list[Shape]]]:
    """Yield adjacent tables with the same N and n: the number of the first one, and the shapes of all."""
    first = 0
    for _, members in groupby(shapes, lambda shape: shape[:2]):
        tables = list(members)
        yield first, tables
        first += len(tables)


def column_layout(sizes: Tensor, shapes: list[tuple[int, int, int]], inducing: int) -> Columns:
    """Lay out the tokens of the column stage.

    Parameters
    ----------
    sizes : Tensor
        N, n and G of each table, int64 (B, 3), on the device.
    shapes : list of tuple of int
        The same on the host.
    inducing : int
        Inducing points I of a column.

    Returns
    -------
    Columns
    """
    # N = n is possible, but only in all tables. Then there are no query tokens, and no empty sequences for them.
    num_columns = sum(G for _, _, G in shapes)
    num_tokens = sum(N * G for N, _, G in shapes)
    num_labeled = sum(n * G for _, n, G in shapes)
    has_queries = num_labeled < num_tokens

    # The host: runs of equal columns.
    to_inducing = []
    labeled_from_inducing = []
    queries_from_inducing = []
    first_token = 0  # among the labeled ones
    first_column = 0
    for first_table, tables in equal_splits(shapes):
        rows, labeled, _ = tables[0]
        count = sum(G for _, _, G in tables)
        first_point = first_column * inducing
        to_inducing.append(EqualSequences(count, inducing, labeled, first_token, first_table))
        labeled_from_inducing.append(EqualSequences(count, labeled, inducing, first_point))
        queries_from_inducing.append(EqualSequences(count, rows - labeled, inducing, first_point))
        first_token += count * labeled
        first_column += count

    # The device: the same sizes for each column.
    N, n, G = sizes.unbind(1)
    table = torch.arange(len(shapes), device=sizes.device).repeat_interleave(G, output_size=num_columns)
    labeled_tokens = n[table]
    query_tokens = (N - n)[table]
    points = torch.full_like(labeled_tokens, inducing)
    if has_queries:
        from_inducing = labeled_from_inducing + queries_from_inducing
        token_ends = ends_of(labeled_tokens, query_tokens)
        point_ends = ends_of(points, points)
    else:
        from_inducing = labeled_from_inducing
        token_ends = ends_of(labeled_tokens)
        point_ends = ends_of(points)

    return Columns(
        labeled=num_labeled,
        table=table,
        group=torch.arange(num_columns, device=sizes.device) - starts_of(G)[table],
        labels=positions(starts_of(N)[table], 1, labeled_tokens, num_labeled),
        to_inducing=Spans(
            runs=torch.tensor(to_inducing),
            queries=num_columns * inducing,
            query_ends=ends_of(points),
            key_ends=ends_of(labeled_tokens),
            most_queries=inducing,
            most_keys=max(n for _, n, _ in shapes),
            table=table,
        ),
        from_inducing=Spans(
            runs=torch.tensor(from_inducing),
            queries=num_tokens,
            query_ends=token_ends,
            key_ends=point_ends,
            most_queries=max(max(n, N - n) for N, n, _ in shapes),
            most_keys=inducing,
            uses=2 if has_queries else 1,
        ),
    )


def row_layout(sizes: Tensor, shapes: list[tuple[int, int, int]], num_cls: int, columns: Columns) -> Rows:
    """Lay out the row stage; arguments as in `column_layout`."""
    num_rows = sum(N for N, _, _ in shapes)
    num_labeled = sum(n for _, n, _ in shapes)
    num_tokens = sum(N * G for N, _, G in shapes)  # without CLS tokens

    # Rows are sorted by T; tables with the same T stay in order.
    rows_of_width: Counter[int] = Counter()
    for N_of_table, _, G_of_table in shapes:
        rows_of_width[G_of_table + num_cls] += N_of_table
    runs = [[count, T] for T, count in sorted(rows_of_width.items())]

    N, n, G = sizes.unbind(1)
    T = G + num_cls
    by_width = torch.argsort(G, stable=True)
    # The first token and the first row of each table among the sorted rows, (B,), in the order of the pack.
    first_token = torch.empty_like(N).index_copy_(0, by_width, starts_of((N * T)[by_width]))
    first_row = torch.empty_like(N).index_copy_(0, by_width, starts_of(N[by_width]))

    row_starts = positions(first_token[by_width], T[by_width], N[by_width], num_rows)
    starts = torch.cat([row_starts, (N * T).sum()[None]]).int()

    # The token of a column in the first row of its table; its token in the next row lies T further.
    table = columns.table
    first_of_column = (first_token + num_cls)[table] + columns.group
    return Rows(
        within=within_rows(runs, starts, num_cls),
        tokens=positions_by_kind(first_of_column, T[table], N[table], n[table], num_tokens, columns.labeled),
        order=positions_by_kind(first_row, 1, N, n, num_rows, num_labeled),
    )


def within_rows(runs: list[list[int]], starts: Tensor, num_cls: int) -> WithinRows:
    """Lay out rows; runs: their numbers and T, in order; starts: int32 (rows + 1,), 0 and the end of each row."""
    # The host: runs of rows with the same number of tokens.
    every = []
    collecting = []
    num_rows = 0
    num_tokens = 0
    for count, T in runs:
        every.append(EqualSequences(count, queries=T, keys=T, first_key=num_tokens))
        collecting.append(EqualSequences(count, queries=num_cls, keys=T, first_key=num_tokens))
        num_rows += count
        num_tokens += count * T
    longest = max(T for _, T in runs)

    # The device: ends and positions of each row.
    device = starts.device
    cls_ends = num_cls * torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    row_starts = starts[:-1].long()
    start_of_row = row_starts.repeat_interleave(starts.diff(), output_size=num_tokens)  # of each token
    return WithinRows(
        every=Spans(
            runs=torch.tensor(every),
            queries=num_tokens,
            query_ends=starts,
            key_ends=starts,
            most_queries=longest,
            most_keys=longest,
        ),
        collecting=Spans(
            runs=torch.tensor(collecting),
            queries=num_rows * num_cls,
            query_ends=cls_ends,
            key_ends=starts,
            most_queries=num_cls,
            most_keys=longest,
        ),
        position=torch.arange(num_tokens, device=device) - start_of_row,
        cls=(row_starts[:, None] + torch.arange(num_cls, device=device)).flatten(),
    )


class RowPrograms(NamedTuple):
    """What each program of the row kernels of triton_attention.py computes, for all blocks and both passes."""

    programs: Tensor  # int32 (programs, 4) on the device: first token, tokens of a row, rows, first row
    launches: Tensor  # int64 (3, 3) on the CPU, for each of KEYS: first program, programs, most rows of a program


def row_programs(runs: Tensor, device: torch.device) -> RowPrograms:
    """Divide rows among programs.

    Parameters
    ----------
    runs : Tensor
        `Spans.runs` of rows whose tokens all attend to their rows; see `attention.widest_row`.
    device : torch.device
        Where the kernels run; nothing waits for it.

    Returns
    -------
    RowPrograms
        A program has as many adjacent rows of equal width as fit into 32, 64 or 128 keys, the least that one row needs:
        with 65 keys or more a row has a program of its own.
    """
    # The programs of each size: run by run, as many rows together as fit, in the last one those that are left.
    parts: dict[int, list[Tensor]] = {keys: [] for keys in KEYS}
    most_rows = dict.fromkeys(KEYS, 0)
    first_token = first_row = 0
    for count, width, *_ in runs.tolist():
        keys = next(keys for keys in KEYS if keys >= width)
        together = keys // width
        row = torch.arange(0, count, together)
        rows = (count - row).clamp(max=together)
        parts[keys].append(torch.stack([first_token + row * width, torch.full_like(row, width), rows, first_row + row]))
        most_rows[keys] = max(most_rows[keys], min(count, together))
        first_token += count * width
        first_row += count

    # Those of one size follow one another, as a launch takes adjacent ones.
    launches = []
    first_program = 0
    for keys in KEYS:
        number = sum(part.shape[1] for part in parts[keys])
        launches.append([first_program, number, most_rows[keys]])
        first_program += number
    programs = torch.cat([part for keys in KEYS for part in parts[keys]], 1).int().t().contiguous()
    # From pinned memory the copy does not wait.
    if device.type == "cuda":
        programs = programs.pin_memory()
    return RowPrograms(programs.to(device, non_blocking=True), torch.tensor(launches))


def with_programs(rows: Rows) -> Rows:
    """Add the programs of kernels, unless a row is too wide for them."""
    every = rows.within.every
    assert isinstance(every.runs, Tensor)  # not exported
    if every.most_keys > KEYS[-1]:
        return rows
    programs = row_programs(every.runs, every.query_ends.device)
    return rows._replace(within=rows.within._replace(programs=programs))


def context_layout(sizes: Tensor, shapes: list[tuple[int, int, int]]) -> Context:
    """Lay out in-context learning; arguments as in `column_layout`, G is not used."""
    num_rows = sum(N for N, _, _ in shapes)
    num_labeled = sum(n for _, n, _ in shapes)
    most_labeled = max(n for _, n, _ in shapes)
    most_queries = max(N - n for N, n, _ in shapes)

    # The host: runs of tables with the same numbers of rows and labeled rows.
    labeled_runs = []
    query_runs = []
    first_row = 0  # among the labeled ones
    for _, tables in equal_splits(shapes):
        rows, labeled, _ = tables[0]
        count = len(tables)
        labeled_runs.append(EqualSequences(count, labeled, labeled, first_row))
        query_runs.append(EqualSequences(count, rows - labeled, labeled, first_row))
        first_row += count * labeled

    # The device: the same sizes for each table, with its labeled rows and once more with its query rows.
    N, n, _ = sizes.unbind(1)
    tables_of_kinds = torch.arange(len(shapes), device=sizes.device).repeat(2)  # (2 B,)
    return Context(
        labeled=num_labeled,
        table=tables_of_kinds.repeat_interleave(torch.cat([n, N - n]), output_size=num_rows),
        labels=positions(starts_of(N), 1, n, num_labeled),
        all=Spans(
            runs=torch.tensor(labeled_runs + query_runs),
            queries=num_rows,
            query_ends=ends_of(n, N - n),
            key_ends=ends_of(n, n),
            most_queries=max(most_labeled, most_queries),
            most_keys=most_labeled,
            uses=2,
        ),
        queries=Spans(
            runs=torch.tensor(query_runs),
            queries=num_rows - num_labeled,
            query_ends=ends_of(N - n),
            key_ends=ends_of(n),
            most_queries=most_queries,
            most_keys=most_labeled,
        ),
        sizes=sizes,
        shapes=tuple(shapes),
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
    more_queries = T if as_queries else 0
    # A graph that is exported, whose tables are equal.
    if context.sizes is None:
        ((B, queries, n, *_),) = context.queries.runs
        first = torch.arange(B)[:, None] * (n + T)  # (B, 1), the first row of each table
        longer = equal_context(B, n + T, queries + more_queries)
        front = (first + torch.arange(T)).flatten()
        labeled = (first + T + torch.arange(n)).flatten()
        return InFront(longer, front, labeled)

    N, n, third = context.sizes.unbind(1)
    more_rows = T + more_queries
    sizes = torch.stack([N + more_rows, n + T, third], 1)
    longer = context_layout(sizes, [(N + more_rows, n + T, third) for N, n, third in context.shapes])
    # The first row of each table, among the rows in front and the labeled ones.
    first = starts_of(n + T)  # (B,)
    front = (first[:, None] + torch.arange(T, device=n.device)).flatten()
    labeled = positions(first + T, 1, n, context.labeled)
    return InFront(longer, front, labeled)


def equal_context(tables: int, labeled: int, queries: int) -> Context:
    """Lay out in-context learning of equal tables in a graph that is exported, where sizes are symbols."""
    B = tables
    n = labeled
    labeled_run = [B, n, n, 0, 0]  # see EqualSequences
    query_run = [B, queries, n, 0, 0]
    num_rows = B * (n + queries)
    zeros = torch.zeros(num_rows, dtype=torch.int64)
    return Context(
        labeled=B * n,
        # All tables have the same n, so log n is given once.
        table=zeros,
        # Not read, as labels are an input of the graph.
        labels=zeros,
        all=symbolic_spans([labeled_run, query_run], num_rows),
        queries=symbolic_spans([query_run], B * queries),
    )


def symbolic_spans(runs: list[list[int]], queries: int, shared: bool = False) -> Spans:
    """Make the parts of Spans that `attend_by_run` reads, with symbolic sizes."""
    unused = torch.zeros(0)
    return Spans(
        runs=runs,
        queries=queries,
        query_ends=unused,
        key_ends=unused,
        most_queries=0,
        most_keys=0,
        # Labeled and query rows attend to the same keys.
        uses=2 if len(runs) > 1 else 1,
        table=unused if shared else None,
    )
