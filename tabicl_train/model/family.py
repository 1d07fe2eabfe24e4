"""What the rest of the program asks of a family of networks; TabICL is the first.

A family is two classes: a dataclass of settings (`NetworkConfig`), which checkpoints keep, and the network (`Network`).
A second family would hook in where TabICL is named:

- `FAMILIES` in model/families.py;
- config/schema.py, whose field `model` has the type of the settings, and configs/model/ with their values;
- `network_config` in prediction/origin.py, which builds the settings again from the values in a checkpoint or a hub
  folder, and `load_public` in prediction/public_format.py, which reads exported files;
- prediction/onnx_format.py, which runs TabICL's three stages with symbolic shapes;
- prediction/predict.py, which runs TabICL's three stages in bounded memory, with more classes than it was trained for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from tabicl_train.model.pack import Pack
from tabicl_train.model.scaling import Scaling
from tabicl_train.model.ssa import SSA


class NetworkConfig(Protocol):
    """The settings of a network: all that is needed to build it and to know its cost.

    max_classes: the most classes of a table in training; 0 for regression, whose targets are numbers
    checkpoint_rows: recompute activations in the backward pass of packs with a longer table; 0 = never
    """

    max_classes: int
    checkpoint_rows: int

    def problems(self) -> list[str]:
        """Every contradiction among the settings, one sentence each."""
        ...


class Network(nn.Module, ABC):
    """A network that predicts the query rows of tables from their labelled rows, built from its settings alone.

    B tables, N rows of which the first n are labelled, M features.

    parts: the parts that a stage can freeze, each with the name of its module
    """

    parts: Mapping[str, str]

    @abstractmethod
    def __init__(self, config: Any) -> None:
        """Fresh random weights; raises ValueError with every problem of the settings."""
        super().__init__()

    @abstractmethod
    def forward(self, pack: Pack, checkpoint_rows: int | None = None) -> Tensor:
        """Predictions of the query rows of all tables, one table after the other, (query rows, outputs).

        checkpoint_rows: the limit for this call; by default the settings'
        """

    @abstractmethod
    def losses(self, predictions: Tensor, pack: Pack) -> Tensor:
        """predictions (query rows, outputs) -> loss of each table (B,) float32, mean over its query rows.

        Targets arrive as the prior drew them: int64 classes or, if the settings' max_classes is 0, float32 numbers.
        """

    @staticmethod
    @abstractmethod
    def forward_flops(config: Any, num_rows: int, train_size: int, num_features: int) -> float:
        """FLOPs of one table's forward pass; the backward pass takes twice as many. Ranks are balanced by it."""

    @staticmethod
    @abstractmethod
    def kept_values(config: Any, num_rows: int, train_size: int, num_features: int, recomputed: bool = False) -> float:
        """Numbers of one table that are in memory at the peak of the backward pass.

        recomputed: whether that pass computes activations again
        """

    @staticmethod
    @abstractmethod
    def pack_tokens(config: Any, num_rows: int, num_features: int) -> int:
        """What one table counts against the token budget of a pack."""

    @staticmethod
    @abstractmethod
    def to_public(config: Any) -> dict[str, Any]:
        """The settings as an exported file holds them; raises ConfigError if the format has no such network."""

    def blocks(self) -> Iterator[nn.Module]:
        """The modules that take most of the time, for `trainer.compile`; none unless the family names them."""
        return iter(())

    def named_scalings(self) -> Iterator[tuple[str, Scaling | SSA]]:
        """The attention layers with a scalable softmax or signed averaging, by names for logs; none unless the family
        has such layers."""
        return iter(())
