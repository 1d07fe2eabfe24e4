"""Random numbers that depend on nothing but an address."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["STREAM_VERSION", "rng_at"]

Seed = int | tuple[int, ...]
LASTING_ATTEMPTS = 100  # at a table, before its number of classes and whether it lacks values are drawn again

STREAM_VERSION = 4
"""Version of the stream of tables; it is raised with every change that alters the tables of a seed."""


def rng_at(*address: Seed | str) -> np.random.Generator:
    """Return a counter-based generator (Philox) keyed by an address.

    The key is a hash of the address as text, so that equal addresses give equal draws in any process, while (1,),
    (1, 0) and (2**32,) are different addresses (numpy's SeedSequence pads and splits words, which makes some equal).

    Parameters
    ----------
    *address : int, tuple of int, or str
        The address of a table, and the name of what is drawn for it.

    References
    ----------
    J. K. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), section 3 (Philox).
    """
    digest = hashlib.blake2b(repr(address).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(Key(digest)))  # type: ignore[arg-type]  # stubs lack ISeedSequence


class Key(np.random.bit_generator.ISeedSequence):
    """The key of a Philox generator; Philox(key=...) also reads entropy of the system and takes 28 us instead of 10."""

    def __init__(self, digest: bytes):
        self.words = np.frombuffer(digest, dtype="<u8")

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """Return the two words for which Philox asks."""
        return self.words


def lasting_rng(
    address: Seed, name: str, seed: tuple[int, ...], attempts: int = LASTING_ATTEMPTS
) -> np.random.Generator:
    """Return a generator of decisions that stay the same for so many attempts at a table.

    A rejected table is drawn again with the same number of classes and, at first, with the same hyperparameters, as in
    tabicl 2.2.0; otherwise settings that are often rejected would become rare. But some settings never make a valid
    table, so that after a number of attempts they are drawn again.

    Parameters
    ----------
    address : int or tuple of int
        Of the table, or of the group that shares the decisions.
    name : str
        What is drawn.
    seed : tuple of int
        That of `Prior.plan`, whose last entry is the number of the attempt.
    attempts : int
        How many attempts see the same generator.
    """
    attempt = seed[-1]
    return rng_at(address, name, attempt // attempts)


def normals(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Draw a standard normal float32 tensor of this shape; 1 ns per value (rng.standard_normal: 9 ns)."""
    return torch.from_numpy(normal_array(rng, *shape))


def normal_array(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draw `normals` as an array."""
    # Importing numba takes a second, and estimators do not need it.
    from priors.floats import fill_normals

    out = np.empty(shape, np.float32)
    fill_normals(out.reshape(-1), random_key(rng))
    return out


def random_key(rng: np.random.Generator) -> int:
    """Draw a uint64 from which compiled functions make their random numbers."""
    return rng.bit_generator.random_raw()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, since the rounding of sums and decompositions depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def as_seed(seed: int | Iterable[int]) -> tuple[int, ...]:
    """Return the seed as a tuple of Python ints; 7 and (7,) are the same address."""
    if isinstance(seed, Iterable):
        return tuple(map(int, seed))
    return (int(seed),)
