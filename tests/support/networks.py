"""Networks with random weights, the network of the `tabicl` package with the same weights, and what they take."""

import dataclasses

import torch
from torch import Tensor, nn

from tabicl_train.check.gpu.small import SMALL, randomize
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.pack import Pack
from tabicl_train.model.public_config import to_public

TINY = TabICLConfig(
    embed_dim=16, col_num_blocks=1, col_num_heads=2, col_num_inducing=4,
    row_num_blocks=1, row_num_heads=2, row_num_cls=2, icl_num_blocks=2, icl_num_heads=2,
)  # fmt: skip
TINY_REGRESSOR = dataclasses.replace(TINY, max_classes=0)


def tiny_network(config: TabICLConfig = TINY) -> TabICL:
    """The smallest one, with its initial weights of a fixed seed; leaves the generator of torch as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TabICL(config)


def small_network(seed: int = 0, **options) -> TabICL:
    """SMALL with other options; its weights are all random, also those that training starts at zero."""
    torch.manual_seed(seed)
    network = TabICL(TabICLConfig(**{**SMALL, **options}))
    randomize(network)
    return network


def draw_batch(B: int, N: int, M: int, n: int, seed: int = 1, classes: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """X (B, N, M), y_train (B, n), y_query (B, N - n); with classes=0, y are numbers."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(B, N, M, generator=generator)
    if classes == 0:
        y = torch.randn(B, N, generator=generator)
    else:
        y = torch.randint(0, classes, (B, N), generator=generator)
    return X, y[:, :n], y[:, n:]


def package_network(network: TabICL) -> nn.Module:
    """The network of the `tabicl` package with the same weights.

    It is in training mode, in which it accepts the same tables as ours.
    """
    from tabicl._model.tabicl import TabICL as PackageTabICL

    theirs = PackageTabICL(**to_public(network.config))
    theirs.load_state_dict(network.state_dict())
    return theirs.train()


def forward_batch(network: TabICL, X: Tensor, y_train: Tensor) -> Tensor:
    """X (B, N, M), y_train (B, n) -> logits or quantiles (B, N - n, C)."""
    return network(Pack.stack(X, y_train)).unflatten(0, (len(X), -1))
