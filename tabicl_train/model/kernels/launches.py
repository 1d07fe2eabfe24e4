"""What a launch of torch's attention kernels on CUDA can take, and attention in as many launches as that needs."""

import torch
import torch.nn.functional as F
from torch import Tensor

CUDA_GRID = 65_535  # launch limit of a kernel's batch dimension, which counts sequences
FLASH_BACKWARD = 2**31  # flash attention's backward pass counts the elements of all queries in 32 bits


def attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, dropout: float, limit: int | None = None) -> Tensor:
    """scaled_dot_product_attention of (sequences, H, ., head_dim), on CUDA at most `limit` sequences at a time.

    limit: by default what CUDA kernels take
    """
    if limit is None:
        limit = batch_limit(*q.shape[1:]) if q.is_cuda else None
    if limit is None or len(q) <= limit:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    chunks = zip(q.split(limit), k.split(limit), v.split(limit), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*chunk, dropout_p=dropout) for chunk in chunks])


def batch_limit(num_heads: int, num_queries: int, head_dim: int) -> int:
    """The largest batch that CUDA attention kernels can process at once, forward and backward."""
    queries = -(-num_queries // 128) * 128
    return max(1, min(CUDA_GRID, FLASH_BACKWARD // (num_heads * queries * max(head_dim, 32))))
