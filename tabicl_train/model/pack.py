"""Tables that go through a network in one pass, one after the other, without a padded cell.

B tables; a table has N rows of which the first n are labeled, and M features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

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
        float32 (cells,); each table is (M, N), so that a column lies in one piece; NaN is a missing value, for networks
        that take them.
    y : Tensor
        (rows,), the labels of all rows of each table, labeled rows first: classes, int64, or numbers, float32.
    sizes : Tensor
        int64 (B, 3), the rows N, labeled rows n and features M of each table.
    shapes : tuple of Shape
        The same numbers for the host, which must not wait for a GPU to know them.
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
        """Copy the tables to memory that a GPU copies from."""
        return Pack(self.X.pin_memory(), self.y.pin_memory(), self.sizes.pin_memory(), self.shapes)
