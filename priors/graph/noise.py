"""Where the executor's random numbers come from."""

from __future__ import annotations

import numpy as np
import torch

from priors.random import normals, random_key, rng_at


class Noise:
    """Random numbers of one table's execution, a pure function of the address.

    Parameters (matrices, weights, frequencies) are small and come from Philox on the CPU through `rng`, whatever the
    device. Arrays as long as the table come from `rng` on the CPU and from a torch.Generator on CUDA: tables of the two
    devices agree in distribution, not in value.
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
        if self.generator is None:
            return normals(self.rng, *shape)
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        if self.generator is None:
            return torch.from_numpy(self.rng.random(shape, dtype=np.float32))
        return torch.rand(shape, generator=self.generator, device=self.device)

    def rows(self, num_rows: int, size: int) -> torch.Tensor:
        """Indices of `size` random rows, with replacement."""
        return self.tensor(self.rng.integers(num_rows, size=size))

    def distinct_rows(self, num_rows: int, size: int) -> torch.Tensor:
        """Indices of `size` different random rows."""
        from priors.graph.draws import distinct_integers

        return torch.from_numpy(distinct_integers(num_rows, size, random_key(self.rng))).to(self.device)
