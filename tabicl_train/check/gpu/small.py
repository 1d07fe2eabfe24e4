"""Small networks and packs with random values."""

from __future__ import annotations

import torch
from torch import nn

from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.pack import Pack, Shape

MIXED = ((20, 12, 3), (20, 12, 3), (33, 7, 5), (64, 40, 2), (130, 128, 9))  # rows, labeled rows, features
SMALL = {
    "embed_dim": 32,
    "col_num_blocks": 2,
    "col_num_heads": 4,
    "col_num_inducing": 6,
    "row_num_blocks": 2,
    "row_num_heads": 4,
    "row_num_cls": 2,
    "icl_num_blocks": 2,
    "icl_num_heads": 4,
}


def random_pack(shapes: tuple[Shape, ...] = MIXED) -> Pack:
    """Draw tables with four classes and these (rows, labeled rows, features)."""
    generator = torch.Generator().manual_seed(0)
    return Pack.of(
        (torch.randn(N, M, generator=generator), torch.randint(0, 4, (N,), generator=generator), n)
        for N, n, M in shapes
    )


def small_network(**options: object) -> TabICL:
    """Build a small network with random values everywhere."""
    torch.manual_seed(0)
    network = TabICL(TabICLConfig(**{**SMALL, **options}))
    randomize(network)
    return network


def randomize(network: nn.Module) -> None:
    """Draw random values for all parameters, since those that start at zero or one would hide errors.

    Matrices have a standard deviation of 1 / sqrt(inputs); with less gain, the gradient of the cells vanishes.
    """
    with torch.no_grad():
        for name, p in network.named_parameters():
            if "freqs" in name:
                continue
            if p.dim() > 1:
                p.normal_(std=p.shape[-1] ** -0.5)
            else:
                is_scale = name.endswith(("weight", "scales"))
                p.normal_(mean=1.0 if is_scale else 0.0, std=0.3)
