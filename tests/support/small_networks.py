"""Small networks with random weights, and the network of the released client with the same weights."""

import torch
from torch import Tensor, nn

from tabicl_train.gpu_check.small import SMALL, randomize
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.pack import Pack
from tabicl_train.model.public_config import to_public


def small_network(seed: int = 0, **options) -> TabICL:
    torch.manual_seed(seed)
    network = TabICL(TabICLConfig(**{**SMALL, **options}))
    randomize(network)
    return network


def draw(B: int, N: int, M: int, n: int, seed: int = 1, classes: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """X (B, N, M), y_train (B, n), y_query (B, N - n); with classes=0, y are numbers."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(B, N, M, generator=generator)
    numbers = classes == 0
    y = torch.randn(B, N, generator=generator) if numbers else torch.randint(0, classes, (B, N), generator=generator)
    return X, y[:, :n], y[:, n:]


def peer_of(network: TabICL) -> nn.Module:
    """The client's network with the same weights, in training mode, in which it accepts the same tables as ours."""
    from tabicl._model.tabicl import TabICL as Peer

    peer = Peer(**to_public(network.config))
    peer.load_state_dict(network.state_dict())
    return peer.train()


def logits_of(network: TabICL, X: Tensor, y_train: Tensor) -> Tensor:
    """X (B, N, M), y_train (B, n) -> logits or quantiles (B, N - n, C)."""
    return network(Pack.stack(X, y_train)).unflatten(0, (len(X), -1))
