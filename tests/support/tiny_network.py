"""Tiny networks with fixed random weights."""

import dataclasses

import torch

from tabicl_train.model import TabICL, TabICLConfig

TINY = TabICLConfig(
    embed_dim=16, col_num_blocks=1, col_num_heads=2, col_num_inducing=4,
    row_num_blocks=1, row_num_heads=2, row_num_cls=2, icl_num_blocks=2, icl_num_heads=2,
)  # fmt: skip
TINY_REGRESSOR = dataclasses.replace(TINY, max_classes=0)


def tiny_network(config: TabICLConfig = TINY) -> TabICL:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TabICL(config)
