from dataclasses import replace

import averaging_flops  # noqa: F401  # formulas for the counter
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tabicl_train.model import TabICL, TabICLConfig, attention
from tabicl_train.model.pack import Pack

SMALL = TabICLConfig(
    embed_dim=32, col_num_blocks=2, col_num_heads=4, col_num_inducing=16, row_num_blocks=2, row_num_heads=4,
    row_num_cls=2, icl_num_blocks=3, icl_num_heads=4,
)  # fmt: skip
V1_LIKE = replace(
    SMALL, col_grouping="none", col_affine=True, col_target_aware=False, col_scaling="none", icl_scaling="none"
)
SSA = replace(SMALL, col_scaling="ssa", icl_scaling="ssa_trainable")


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        V1_LIKE,
        replace(SMALL, col_grouping="disjoint", icl_scaling="qassmax"),
        replace(SMALL, ff_factor=3),
        SSA,
        replace(SMALL, max_classes=0, num_quantiles=300),
    ],
)
@pytest.mark.parametrize(("rows", "train", "features"), [(64, 10, 25), (300, 290, 2)])
def test_flops_agree_with_a_count_of_the_kernels(config, rows, train, features, monkeypatch):
    monkeypatch.setattr(attention, "SOME_SCORES", 0)  # products alone, since torch does not count its kernel for CPUs
    monkeypatch.setattr(attention, "MANY_SCORES", 2**60)
    monkeypatch.setattr(attention, "LEAST_KEYS", 0)
    X, y = (
        torch.zeros(4, rows, features),
        torch.zeros(4, train, dtype=torch.float32 if config.is_regression else torch.int64),
    )
    model = TabICL(config)
    with FlopCounterMode(display=False) as counter:
        model(Pack.stack(X, y))
    # left out: once a forward pass, the projection and gate of the inducing vectors, and label embeddings of columns
    assert 4 * TabICL.forward_flops(config, rows, train, features) == pytest.approx(counter.get_total_flops(), rel=0.02)
