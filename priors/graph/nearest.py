"""Distances sum |x - c|^p for p down to 0.5, and nearest centers; compiled by numba on the CPU, torch on CUDA."""

from __future__ import annotations

import numpy as np
import torch

CHUNK = 2**22  # distances in memory at once on a CUDA device


def p_distances(x: torch.Tensor, centers: torch.Tensor, p: float, outer: float) -> torch.Tensor:
    """(sum over features of |x - c|^p)^outer, float32 (k, N), for x (n, N) and centers (n, k)."""
    if x.is_cuda:
        return p_distances_torch(x, centers, p, outer)
    from priors.graph.kernels import p_distances as compiled

    centers = centers.T.contiguous().numpy()
    return torch.from_numpy(compiled(x.numpy(), centers, np.float32(p), np.float32(outer)))


def nearest_centers(x: torch.Tensor, centers: torch.Tensor, p: float) -> torch.Tensor:
    """Index of the center with the smallest sum |x - c|^p, int64 (N,), for x (n, N) and centers (n, k)."""
    if x.is_cuda:
        return nearest_centers_torch(x, centers, p)
    from priors.graph.kernels import HEAD, nearest_centers_narrow, nearest_centers_wide

    n, k = centers.shape
    wide = n > 16 or (n > HEAD and k >= 32)
    nearest = nearest_centers_wide if wide else nearest_centers_narrow
    return torch.from_numpy(nearest(x.numpy(), centers.T.contiguous().numpy(), np.float32(p)))


def p_distances_torch(x: torch.Tensor, centers: torch.Tensor, p: float, outer: float) -> torch.Tensor:
    return torch.cdist(centers.T, x.T, p=p).pow_(p * outer)


def nearest_centers_torch(x: torch.Tensor, centers: torch.Tensor, p: float) -> torch.Tensor:
    chunks = x.split(max(1, CHUNK // centers.shape[1]), dim=1)
    return torch.cat([torch.cdist(centers.T, chunk.T, p=p).argmin(0) for chunk in chunks])


def take_columns(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table[:, index], float32 (m, N), for table (m, k) and index int64 (N,)."""
    if table.is_cuda:
        return table[:, index]
    from priors.graph.kernels import take_columns as compiled

    return torch.from_numpy(compiled(table.numpy(), index.numpy()))
