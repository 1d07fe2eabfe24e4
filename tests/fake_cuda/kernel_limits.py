"""What CUDA's attention kernels can compute: dtypes, strides, head dimensions, and the sizes of a launch.

B sequences, H heads, L queries of the longest sequence, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = 65_535  # the most blocks of a launch along y and z, where attention kernels put sequences and heads
INDEX = 2**31  # the backward pass of flash attention finds a sequence's queries by a product of 32-bit integers


class KernelLimit(Exception):
    """A kernel would not start, would compute nonsense, or a slow one would take its place."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **_: object
) -> Tensor:
    """In place of scaled_dot_product_attention: the kernel that a GPU takes, cuDNN's switched off.

    q (B, H, L, D), k and v (B, H, K, D) -> (B, H, L, D). Half precision goes to flash attention, which takes no mask.
    A build without CUDA decomposes attention into matrix products, so it cannot be asked.
    """
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    if q.dtype in (torch.float16, torch.bfloat16) and attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, dropout_p)[0]


def launch(sequences: int, heads: int, queries: int, head_dim: int, lengths_vary: bool = False) -> None:
    """Raise KernelLimit for sizes beyond a launch. `queries`: of the longest sequence."""
    shape = f"{sequences} sequences, {heads} heads, {queries} queries, head dimension {head_dim}"
    if max(sequences, heads) > GRID:
        raise KernelLimit(f"more than {GRID} blocks along one side: {shape}")
    padded, width = -(-queries // 128) * 128, -(-head_dim // 32) * 32
    # With lengths that vary, all sequences before the last one count as 128 queries in the product.
    rows = 128 * (sequences - 1) + padded if lengths_vary else sequences * padded
    if rows * heads * width > INDEX:
        raise KernelLimit(f"the backward pass counts beyond 2^31: {shape}")


def check_call(name: str, arguments: dict) -> None:
    """Raise KernelLimit if a call of an attention operator is beyond its kernel.

    name: without its namespace; arguments: by the names of the operator's schema
    """
    if name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"):
        q, k, v = (arguments[key] for key in ("query", "key", "value"))
        launch(q.shape[0], q.shape[1], q.shape[2], q.shape[3])
    elif name == "_flash_attention_forward":
        q, k, v = (arguments[key] for key in ("query", "key", "value"))
        ends = arguments["cum_seq_q"]  # (B + 1,) or None
        sequences = q.shape[0] if ends is None else len(ends) - 1
        launch(sequences, q.shape[-2], arguments["max_q"], q.shape[-1], ends is not None)
    elif name == "_efficient_attention_forward":
        q, k, v = (arguments[key] for key in ("query", "key", "value"))
        ends = arguments["cu_seqlens_q"]
        sequences, queries = (q.shape[0], q.shape[1]) if ends is None else (len(ends) - 1, arguments["max_seqlen_q"])
        launch(sequences, q.shape[-2], queries, q.shape[-1], ends is not None)
    else:
        return
    for x in (q, k, v):
        check_layout(name, x)


def check_layout(name: str, x: Tensor) -> None:
    """Raise KernelLimit for a dtype, head dimension or stride that a kernel refuses."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    if "flash" in name and not half:
        raise KernelLimit(f"flash attention in {x.dtype}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise KernelLimit(f"attention in {x.dtype}")
    step = 8 if half else 4  # 16 bytes are read at once
    if x.stride(-1) != 1:
        raise KernelLimit(f"the last dimension has stride {x.stride(-1)}")
    if x.shape[-1] % step or x.shape[-1] > 256:
        raise KernelLimit(f"head dimension {x.shape[-1]}")
    if any(n % step for n in (*x.stride()[:-1], x.storage_offset())):
        raise KernelLimit(f"strides {x.stride()} from {x.storage_offset()} are not aligned to 16 bytes")
