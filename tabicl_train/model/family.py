"""The interface of a family of networks.

A family is two classes: a dataclass of settings (`NetworkConfig`), which checkpoints keep, and the network (`Network`);
tabicl_train/EXTEND.md describes how to add one. Losses and costs have defaults, so a network of one's own needs its
settings, `forward` and nothing else.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.console import first_line
from tabicl_train.errors import ConfigError
from tabicl_train.model.attention import Attention
from tabicl_train.model.pack import FlatLayout, Pack, Shape
from tabicl_train.model.padding import Size
from tabicl_train.model.quantiles import guess_loss, pinball
from tabicl_train.model.scaling import SSA, Scaling

__all__ = ["Network", "NetworkConfig"]


class NetworkConfig(Protocol):
    """The settings of a network, a dataclass: all that is needed to build it and to compute its cost."""

    max_classes: int  # the most classes of a table in training; 0 for regression, whose targets are numbers
    dropout: float  # rate, in [0, 1)
    checkpoint_rows: int  # recompute activations in the backward pass of packs with a longer table; 0 = never

    @property
    def missing_values(self) -> bool:
        """Whether the network supports missing values, NaN in Pack.X."""
        ...

    @property
    def is_regression(self) -> bool:
        """Whether numbers are predicted, not classes."""
        ...

    @property
    def outputs(self) -> int:
        """Values predicted for a query row."""
        ...

    def problems(self) -> list[str]:
        """Return every contradiction among the settings, one sentence each."""
        ...


class Network(nn.Module, ABC):
    """A network that predicts the query rows of tables from other rows, built from its settings alone.

    B tables, N rows of which the first n are labeled, M features. Query rows are those from n on, unless the family
    overrides `targets` and `means`.
    """

    parts: ClassVar[Mapping[str, str]] = {}  # the parts that a stage can freeze, each with the name of its module
    predicts_quantiles: ClassVar[bool] = True  # whether numbers are predicted as quantiles
    predicts_real_tables: ClassVar[bool] = True  # whether estimators take it, and it is validated on real data
    config: Any  # the settings
    # The pair that may replace `forward` in predictions, see `encodes`; most networks have neither.
    encode: Callable[..., Any]
    decode: Callable[..., Tensor]
    # represent(state, queries, *, tokens) -> (query rows, D) beside that pair: what estimators return from `embed`.
    represent: Callable[..., Tensor]

    @abstractmethod
    def __init__(self, config: Any) -> None:
        """Build it with random weights; raises ValueError with every problem of the settings."""
        super().__init__()

    def __deepcopy__(self, memo: dict) -> Network:
        """Copy the network; one that keeps what has no copy, such as an activation, is built from settings and weights.

        Raises ConfigError if that fails, too.
        """
        # First as copy.deepcopy does. Which errors that raises depends on what the network keeps.
        before = dict(memo)
        try:
            memo[id(self)] = twin = type(self).__new__(type(self))
            twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        except Exception as reason:
            memo.clear()
            memo.update(before)
            try:
                memo[id(self)] = twin = rebuilt(self)
            except Exception as error:
                why = f"{first_line(reason)}; from settings and weights: {' '.join(str(error).split())}"
                raise ConfigError([f"{type(self).__name__} cannot be copied: {why}"]) from None
        return twin

    @abstractmethod
    def forward(self, pack: Pack, checkpoint_rows: int | None = None) -> Tensor:
        """Predict the query rows of all tables, one table after the other.

        Parameters
        ----------
        pack : Pack
            The tables.
        checkpoint_rows : int, optional
            The limit for this call; by default the settings'.

        Returns
        -------
        Tensor
            (query rows, outputs).
        """

    def row_losses(self, predictions: Tensor, pack: Pack) -> Tensor:
        """Compute the loss of each query row: by default cross entropy of logits, or pinball loss of quantiles.

        Parameters
        ----------
        predictions : Tensor
            As from `forward`, (query rows, outputs).
        pack : Pack
            The tables, with targets as the prior drew them: int64 classes or, if max_classes is 0, float32 numbers.

        Returns
        -------
        Tensor
            (query rows,) float32.
        """
        if self.config.is_regression:
            return pinball(predictions, self.targets(pack))
        return F.cross_entropy(predictions.float(), self.targets(pack), reduction="none")

    def losses(self, predictions: Tensor, pack: Pack) -> Tensor:
        """Compute the loss of each table, the mean over its query rows.

        Parameters
        ----------
        predictions : Tensor
            As from `forward`, (query rows, outputs).
        pack : Pack
            The tables.

        Returns
        -------
        Tensor
            (B,) float32.
        """
        return self.means(self.row_losses(predictions, pack), pack)

    @staticmethod
    def guess_loss(y: Tensor, train_size: int) -> float:
        """Compute the loss of predicting the query rows of a table from labels alone.

        Parameters
        ----------
        y : Tensor
            Labels of all rows, (N,), on the CPU.
        train_size : int
            n.

        Returns
        -------
        float
        """
        return guess_loss(y, train_size)

    def targets(self, pack: Pack) -> Tensor:
        """Return the labels of the query rows of all tables, (query rows,)."""
        return pack.queries()

    def means(self, values: Tensor, pack: Pack) -> Tensor:
        """Average over the query rows of each table.

        Parameters
        ----------
        values : Tensor
            (query rows,).
        pack : Pack
            The tables.

        Returns
        -------
        Tensor
            (B,).
        """
        return pack.means(values)

    @classmethod
    def forward_flops(cls, config: Any, num_rows: int, train_size: int, num_features: int) -> float:
        """Count the FLOPs of one table's forward pass, by which ranks are balanced; the backward pass is twice that.

        By default they are unknown, nan, and ranks are balanced by `pack_tokens`.

        Parameters
        ----------
        config : NetworkConfig
            The settings.
        num_rows, train_size, num_features : int
            N, n and M.

        Returns
        -------
        float
        """
        return math.nan

    @classmethod
    def kept_values(
        cls, config: Any, num_rows: int, train_size: int, num_features: int, recomputed: bool = False
    ) -> float:
        """Count the values of one table in memory at the peak of the backward pass.

        By default they are unknown, nan.

        Parameters
        ----------
        config : NetworkConfig
            The settings.
        num_rows, train_size, num_features : int
            N, n and M.
        recomputed : bool
            Whether the backward pass recomputes activations.

        Returns
        -------
        float
        """
        return math.nan

    @classmethod
    def kept_bytes(
        cls, config: Any, num_rows: int, train_size: int, num_features: int, recomputed: bool, in_16_bits: bool
    ) -> float:
        """Count the bytes of `kept_values`: 4 each, or 2.2 by default under autocast, which leaves some in float32.

        Parameters
        ----------
        config, num_rows, train_size, num_features, recomputed
            As in `kept_values`.
        in_16_bits : bool
            Whether matrix products are in bf16 or fp16.

        Returns
        -------
        float
        """
        return (2.2 if in_16_bits else 4) * cls.kept_values(config, num_rows, train_size, num_features, recomputed)

    @staticmethod
    def pack_tokens(config: Any, num_rows: int, num_features: int) -> int:
        """Count one table against the token budget of a pack: by default its cells and labels.

        Parameters
        ----------
        config : NetworkConfig
            The settings.
        num_rows, num_features : int
            N and M.

        Returns
        -------
        int
        """
        return num_rows * (num_features + 1)

    @classmethod
    def prepared(cls, config: Any, pack: Pack) -> FlatLayout | None:
        """Return what `forward` would compute of a pack's sizes on the device, or None.

        Where training is on a GPU, the processes that draw tables call it, and `pack.layout` has the result.
        """
        return None

    @classmethod
    def typical_size(
        cls, config: Any, packs: Sequence[Sequence[Shape]], most_rows: int, most_features: int
    ) -> Size | None:
        """Return the size of a typical pack.

        Parameters
        ----------
        config : NetworkConfig
            The settings.
        packs : sequence of sequence of Shape
            The tables N, n, M of a few packs of a stage.
        most_rows, most_features : int
            The most rows and features of a table in the stage.

        Returns
        -------
        Size or None
            None, as by default, says that the steps of such a network cannot be replayed as CUDA graphs.
        """
        return None

    @classmethod
    def padded(cls, config: Any, pack: Pack, typical: Size) -> Pack | None:
        """Return a pack with its layout, filled up to one of a few sizes, see padding.py.

        It is called instead of `prepared` where steps are replayed as CUDA graphs.

        Parameters
        ----------
        config : NetworkConfig
            The settings.
        pack : Pack
            The tables, on the CPU.
        typical : Size
            From `typical_size`, for the stage.

        Returns
        -------
        Pack or None
            None if it is too large.
        """
        return None

    @classmethod
    def embedding_width(cls, config: Any) -> int:
        """Return the values of an embedding of a cell, which decide how many query rows are predicted at once.

        By default it is estimated from what a training step keeps: a prediction has about 16 embeddings of each cell
        in memory at a time (measured with TabICL). It is 128 if that is unknown.
        """
        rows, features = 128, 8
        kept = cls.kept_values(config, rows, rows // 2, features)
        return 128 if math.isnan(kept) else max(1, round(kept / (rows * features * 16)))

    @staticmethod
    def encoded_bytes(config: Any, train_size: int, num_features: int, num_classes: int) -> float:
        """Count the bytes of what `encode` keeps for a table; without that method, the labeled rows themselves.

        Parameters
        ----------
        config : NetworkConfig
            The settings.
        train_size, num_features, num_classes : int
            n, M and the classes of the table, 0 for regression.

        Returns
        -------
        float
        """
        return 4 * train_size * (num_features + 1)

    @staticmethod
    def size_problem(config: Any, num_rows: int, num_features: int) -> str | None:
        """Return why the network cannot process a table of a size.

        Parameters
        ----------
        config, num_rows, num_features
            As in `pack_tokens`.

        Returns
        -------
        str or None
            The reason, in one line; None if it can, as by default.
        """
        return None

    @staticmethod
    def to_public(config: Any) -> dict[str, Any]:
        """Return the settings as an exported file has them; raises ConfigError if the format has no such network."""
        raise ConfigError([f"the public format has no networks such as {type(config).__name__}; use format=hub"])

    def is_hidden_matrix(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether `optimizer=muon` optimizes a parameter by Muon, and not by AdamW.

        It should be true of matrices inside the network, and not of embeddings of the input or of the output head. By
        default it is true of every matrix but those of an nn.Embedding, those with a single row or column, and those
        with as many rows as the network has outputs; a run with such a network says at its start how many they are.

        Parameters
        ----------
        name : str
            As in `named_parameters()`.
        parameter : Parameter
            The parameter.

        Returns
        -------
        bool
        """
        if parameter.ndim != 2 or isinstance(self.get_submodule(name.rpartition(".")[0]), nn.Embedding):
            return False
        return min(parameter.shape) > 1 and parameter.shape[0] != self.config.outputs

    @classmethod
    def declares_hidden_matrices(cls) -> bool:
        """Whether the network says itself which of its matrices are hidden."""
        return cls.is_hidden_matrix is not Network.is_hidden_matrix

    def blocks(self) -> Iterator[nn.Module]:
        """Yield the modules that take most of the time, for `trainer.compile`; none unless the family names them."""
        return iter(())

    def products(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the parameters that only matrix products and norms in 16 bits read under autocast.

        Each is a module and the parameter's name in it. In training their 16-bit copies are made once a step, instead
        of by autocast in each product (`casts.py`); none unless the family names them.
        """
        return iter(())

    def named_scalings(self) -> Iterator[tuple[str, Scaling | SSA]]:
        """Yield the attention layers that have a scaling rule, by names for logs; none unless the family has them."""
        return iter(())

    def biases_without_effect(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Yield parts of biases that change no prediction, so that their gradients are nothing but rounding.

        Training takes these gradients as zero. None unless the family names them.
        """
        return iter(())

    def named_attentions(self) -> Iterator[tuple[str, Attention]]:
        """Yield the attention layers in which rows are keys, by names such as icl.0; none unless the family names them.

        They are those whose weights `tabicl_train.prediction.attention_weights` returns.
        """
        return iter(())


def rebuilt(network: Network) -> Network:
    """Build a network like this one from its settings, its weights and its switches, such as `training`."""
    # The random weights, which are replaced, are drawn from a copy of torch's generator.
    with torch.random.fork_rng(devices=[]):
        twin = type(network)(copy.deepcopy(network.config))
    twin.load_state_dict(network.state_dict())
    values = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for name, value in (*twin.named_parameters(), *twin.named_buffers()):
        value.data = values[name].detach().clone()  # with its type and device
    for module, its_twin in zip(network.modules(), twin.modules(), strict=True):
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str):
                setattr(its_twin, name, value)
    return twin


def encodes(cls: type[Network]) -> bool:
    """Whether networks of a class predict by the pair `encode` and `decode` instead of `forward`.

    The pair counts unless a more derived class overrides `forward` alone: what is scored is what was trained.

    Parameters
    ----------
    cls : type
        A subclass of `Network`. Its methods are

        - `encode(context, *, num_classes, tokens)`: keep what predictions need of labeled rows, a Pack;
        - `decode(state, queries, *, temperature, tokens)`: predict the rows of a Pack of query rows.
    """
    for base in cls.__mro__:
        defined = vars(base)
        if "encode" in defined and "decode" in defined:
            return True
        if "forward" in defined:
            return False
    return False


def random_tables(
    config: NetworkConfig, shapes: Iterable[Shape], generator: torch.Generator
) -> list[tuple[Tensor, Tensor, int]]:
    """Draw tables X (N, M), y (N,), n of these shapes, on the CPU, such as a network with these settings takes."""
    tables = []
    for N, n, M in shapes:
        X = torch.randn(N, M, generator=generator)
        if config.is_regression:
            y = torch.randn(N, generator=generator)
        else:
            y = torch.randint(config.max_classes, (N,), generator=generator)
        tables.append((X, y, n))
    return tables
