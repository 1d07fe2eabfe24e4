"""Distances sum |x - c|^p for p down to 0.5, and nearest centres; compiled by numba on the CPU, torch on CUDA."""

from __future__ import annotations

import numpy as np
import torch

CHUNK = 2**22  # distances in memory at once on a CUDA device


def p_distances(x: torch.Tensor, centres: torch.Tensor, p: float, outer: float) -> torch.Tensor:
    """(sum over features of |x - c|^p)^outer, float32 (k, N), for x (n, N) and centres (n, k)."""
    if x.is_cuda:
        return p_distances_torch(x, centres, p, outer)
    from priors.graph.kernels import p_distances as compiled

    centres = centres.T.contiguous().numpy()
    return torch.from_numpy(compiled(x.numpy(), centres, np.float32(p), np.float32(outer)))


def nearest_centres(x: torch.Tensor, centres: torch.Tensor, p: float) -> torch.Tensor:
    """Index of the centre with the smallest sum |x - c|^p, int64 (N,), for x (n, N) and centres (n, k)."""
    if x.is_cuda:
        return nearest_centres_torch(x, centres, p)
    from priors.graph.kernels import HEAD, nearest_centres_narrow, nearest_centres_wide

    n, k = centres.shape
    wide = n > 16 or (n > HEAD and k >= 32)
    nearest = nearest_centres_wide if wide else nearest_centres_narrow
    return torch.from_numpy(nearest(x.numpy(), centres.T.contiguous().numpy(), np.float32(p)))


def p_distances_torch(x: torch.Tensor, centres: torch.Tensor, p: float, outer: float) -> torch.Tensor:
    return torch.cdist(centres.T, x.T, p=p).pow_(p * outer)


def nearest_centres_torch(x: torch.Tensor, centres: torch.Tensor, p: float) -> torch.Tensor:
    chunks = x.split(max(1, CHUNK // centres.shape[1]), dim=1)
    return torch.cat([torch.cdist(centres.T, chunk.T, p=p).argmin(0) for chunk in chunks])


def take_columns(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table[:, index], float32 (m, N), for table (m, k) and index int64 (N,)."""
    if table.is_cuda:
        return table[:, index]
    from priors.graph.kernels import take_columns as compiled

    return torch.from_numpy(compiled(table.numpy(), index.numpy()))
