"""The source of random numbers while a plan is executed."""

from __future__ import annotations

import numpy as np
import torch

from priors.random import normals, random_key, rng_at


class Noise:
    """Random numbers for the execution of one table, a pure function of its address.

    Parameters (matrices, weights, frequencies) are small and always come from `rng`, Philox on the CPU. Arrays as long
    as the table come from `rng` on the CPU and from a torch.Generator on CUDA, so that tables of the two devices agree
    in distribution, not in value.
    """

    def __init__(self, address: tuple, device: str = "cpu"):
        self.device = torch.device(device)
        self.rng = rng_at(*address)
        self.generator = None
        if self.device.type != "cpu":
            self.generator = torch.Generator(self.device).manual_seed(int(self.rng.integers(2**63)))

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """A parameter on the table's device, float32 or int64."""
        kind = np.float32 if array.dtype.kind == "f" else np.int64
        return torch.from_numpy(np.ascontiguousarray(array, dtype=kind)).to(self.device)

    def parameter(self, *shape: int) -> torch.Tensor:
        """A standard normal parameter on the table's device."""
        return normals(self.rng, *shape).to(self.device)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal float32 values, as many as the table has rows or more."""
        if self.generator is None:
            return normals(self.rng, *shape)
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Uniform float32 values in [0, 1), as many as the table has rows or more."""
        if self.generator is None:
            return torch.from_numpy(self.rng.random(shape, dtype=np.float32))
        return torch.rand(shape, generator=self.generator, device=self.device)

    def rows(self, num_rows: int, size: int) -> torch.Tensor:
        """Indices int64 (size,) of random rows, with replacement."""
        return self.tensor(self.rng.integers(num_rows, size=size))

    def distinct_rows(self, num_rows: int, size: int) -> torch.Tensor:
        """Indices int64 (size,) of distinct random rows."""
        from priors.graph.draws import distinct_integers

        return torch.from_numpy(distinct_integers(num_rows, size, random_key(self.rng))).to(self.device)
