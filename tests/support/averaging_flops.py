"""What torch's FLOP counter counts for signed averaging; it imports Triton, 0.2 s that nobody else needs."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import tabicl_train.model.averaging  # noqa: F401  # defines the operator


@register_flop_formula(torch.ops.tabicl_train.attend_averaging, get_raw=True)
def flops(q: Tensor, kv: Tensor, exponents: Tensor, runs: Tensor, queries: int, **_: Any) -> int:
    count, length, keys = runs[:, :3].unbind(1)
    return 4 * q.shape[-2] * q.shape[-1] * int((count * length * keys).sum())
