"""A compiled kernel on as many threads as torch uses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

ENOUGH = 2**18  # queries, keys and values: with fewer, a kernel takes a few milliseconds and threads gain nothing


def flat(x: Tensor) -> np.ndarray:
    """The values of a contiguous tensor, as kernels take them."""
    return x.detach().view(-1).numpy()


def in_threads(kernel: Callable[..., None], arguments: tuple, size: int) -> None:
    """Call kernel(*arguments, thread, threads) for each thread; the kernel releases the GIL and shares out its work.

    size: of the tensors that it reads, in values
    What a thread computes must not depend on their number, so that results do not either.
    """
    threads = torch.get_num_threads() if size >= ENOUGH else 1
    if threads == 1:
        kernel(*arguments, 0, 1)
        return
    with ThreadPoolExecutor(threads) as pool:  # not kept: a forked process would inherit a pool without threads
        for done in [pool.submit(kernel, *arguments, thread, threads) for thread in range(threads)]:
            done.result()
