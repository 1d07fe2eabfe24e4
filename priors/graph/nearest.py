"""Distances in the p-"norm" sum |x - c|^p, for p down to 0.5; numba on the CPU, torch elsewhere."""

from __future__ import annotations

import numpy as np
import torch

CHUNK = 2**22  # distances held at once on a CUDA device


def p_distances(x: torch.Tensor, centres: torch.Tensor, p: float, outer: float) -> torch.Tensor:
    """x (n, N), centres (n, k) -> (k, N): (sum over features of |x - c|^p)^outer."""
    if x.is_cuda:
        return p_distances_torch(x, centres, p, outer)
    from priors.graph import kernels

    centres = centres.T.contiguous().numpy()
    return torch.from_numpy(kernels.p_distances(x.numpy(), centres, np.float32(p), np.float32(outer)))


def nearest_centres(x: torch.Tensor, centres: torch.Tensor, p: float) -> torch.Tensor:
    """x (n, N), centres (n, k) -> int64 (N,): index of the centre of least sum |x - c|^p."""
    if x.is_cuda:
        return nearest_centres_torch(x, centres, p)
    from priors.graph import kernels

    n, k = centres.shape
    wide = n > 16 or (n > 8 and k >= 32)
    nearest = kernels.nearest_centres_wide if wide else kernels.nearest_centres
    return torch.from_numpy(nearest(x.numpy(), centres.T.contiguous().numpy(), np.float32(p)))


def p_distances_torch(x: torch.Tensor, centres: torch.Tensor, p: float, outer: float) -> torch.Tensor:
    return torch.cdist(centres.T, x.T, p=p).pow_(p * outer)


def nearest_centres_torch(x: torch.Tensor, centres: torch.Tensor, p: float) -> torch.Tensor:
    chunks = x.split(max(1, CHUNK // centres.shape[1]), dim=1)
    return torch.cat([torch.cdist(centres.T, chunk.T, p=p).argmin(0) for chunk in chunks])
