"""A tiny network with fixed random weights."""

import torch

from tabicl_train.model import TabICL, TabICLConfig

TINY = TabICLConfig(
    embed_dim=16, col_num_blocks=1, col_num_heads=2, col_num_inducing=4,
    row_num_blocks=1, row_num_heads=2, row_num_cls=2, icl_num_blocks=2, icl_num_heads=2,
)  # fmt: skip


def tiny_network() -> TabICL:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TabICL(TINY)
