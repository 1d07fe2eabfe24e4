"""Networks that take dense batches, such as nanoTabPFN's, as networks that take packs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from tabicl_train.errors import ConfigError
from tabicl_train.model.config import family_of
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack, Shape

__all__ = ["dense"]


def dense(
    build: Callable[[Any], nn.Module], call: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
) -> type[Network]:
    """Make a class of networks from one that takes dense batches.

    Tables of a pack that have the same shape, which are adjacent, become one batch, without padding.

    Parameters
    ----------
    build : callable
        Builds the module from its settings, for example its class.
    call : callable, optional
        `call(module, X, y)` predicts the query rows, by default `module(X, y)`. X is (B, N, M) float32 and y (B, n)
        holds the labels of the first n rows, int64 classes or float32 numbers; the result is (B, N - n, outputs).

    Returns
    -------
    type
        A subclass of `Network` to be registered: `register.network("nano", dense(Nano), settings=NanoConfig)`.
    """

    class DenseNetwork(Network):
        """Calls a module with dense batches."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.config = config
            self.network = build(config)

        def forward(self, pack: Pack, checkpoint_rows: int | None = None) -> Tensor:
            """Predict the query rows of all tables, one table after the other, (query rows, outputs)."""
            predictions = []
            for (N, n, _), tables_of_shape in groupby(pack.tables(), key=shape_of_table):
                tables = list(tables_of_shape)
                X = torch.stack([features for features, _, _ in tables])  # (B, N, M)
                y = torch.stack([labels[:n] for _, labels, _ in tables])  # (B, n)
                predicted = self.network(X, y) if call is None else call(self.network, X, y)  # (B, N - n, outputs)
                if predicted.shape[:2] != (len(tables), N - n):
                    expected = f"({len(tables)}, {N - n}, outputs)"
                    raise ValueError(f"predictions have the shape {tuple(predicted.shape)}; it must be {expected}")
                predictions.append(predicted.flatten(0, 1))
            return torch.cat(predictions)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Let a pickle name the settings or, if they are not registered, what makes the class."""
            # In its module, the name of the class is that of `build`.
            # A subclass has a name of its own.
            if type(self) is not DenseNetwork:
                return super().__reduce_ex__(protocol)
            try:
                is_registered = family_of(self.config) is DenseNetwork
            except ConfigError:
                is_registered = False
            found_by = (family_of, self.config) if is_registered else (dense, build, call)
            return empty_network, found_by, self.__getstate__()

    DenseNetwork.__name__ = DenseNetwork.__qualname__ = getattr(build, "__name__", "DenseNetwork")
    DenseNetwork.__module__ = build.__module__
    return DenseNetwork


def empty_network(find_class: Callable[..., type[Network]], *arguments: Any) -> Network:
    """Return a network without content, which unpickling fills."""
    cls = find_class(*arguments)
    return cls.__new__(cls)


def shape_of_table(table: tuple[Tensor, Tensor, int]) -> Shape:
    X, _, n = table
    return len(X), n, X.shape[1]
