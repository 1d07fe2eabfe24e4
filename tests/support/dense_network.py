"""A network with the interface of nanoTabPFN's model: dense batches, features and rows attend in turn."""

from dataclasses import dataclass

import torch
from torch import nn

from tabicl_train.model.config import NetworkSettings
from tabicl_train.model.dense import dense


@dataclass
class TinyConfig(NetworkSettings):
    """Settings of Tiny."""

    family: str = "tiny_dense"
    """Its name."""
    width: int = 8
    """Width of a cell."""


class TinyModule(nn.Module):
    """Embeds cells and labels, and lets query rows attend to labeled rows."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.cell = nn.Linear(1, config.width)
        self.label = nn.Embedding(max(config.max_classes, 1), config.width)
        self.attention = nn.MultiheadAttention(config.width, 2, batch_first=True)
        self.head = nn.Linear(config.width, config.outputs)
        self.sizes: list[int] = []  # tables of each batch

    def forward(self, X, y):
        self.sizes.append(len(X))
        n = y.shape[1]
        rows = torch.tanh(self.cell(X[..., None])).mean(2)  # (B, N, E)
        labeled = rows[:, :n] + self.label(y)
        attended, _ = self.attention(rows[:, n:], labeled, labeled, need_weights=False)
        return self.head(rows[:, n:] + attended)  # (B, N - n, C)


Tiny = dense(TinyModule)
