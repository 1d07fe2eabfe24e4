"""16-bit copies of the weights of matrix products, made once a step; autocast makes them one by one, in each pack.

On a GPU each of autocast's casts is a launch, and so is the cast of each gradient back to float32: 730 of the 2,280
launches of a step of TabICLv2's first stage in one pack. The copies are leaves of the graph, in one buffer: two or
three launches make them, and a few add their gradients. The values are those of autocast, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]  # a module and the name of one of its parameters


def aligned_views(parameters: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Divide a flat tensor into views of the shapes of parameters, each at a multiple of 64 values.

    Kernels over many tensors read several values at a time, which needs alignment.
    """
    pieces = flat[: aligned_size(parameters)].split([multiple_of_64(p.numel()) for p in parameters])
    return [piece[: p.numel()].view_as(p) for p, piece in zip(parameters, pieces, strict=True)]


def aligned_size(parameters: Sequence[Tensor]) -> int:
    """Return the values of a flat tensor for `aligned_views`."""
    return sum(multiple_of_64(p.numel()) for p in parameters)


def multiple_of_64(size: int) -> int:
    return -(-size // 64) * 64


class CastWeights:
    """16-bit copies of parameters that only matrix products and norms in 16 bits read.

    Parameters
    ----------
    places : iterable of (Module, str)
        The parameters, as `Network.products` yields them.
    dtype : torch.dtype
        bfloat16 or float16.
    trained : iterable of Parameter
        Those that need a gradient.

    Attributes
    ----------
    parameters : list of Parameter
        Those in float32, each once, though several modules may share one.
    leaves : list of Tensor
        Their copies, in the same order; those of frozen parameters need no gradient.
    """

    def __init__(self, places: Iterable[Place], dtype: torch.dtype, trained: Iterable[Tensor]) -> None:
        self.dtype = dtype
        found = [(module, name, module.get_parameter(name)) for module, name in places]
        self.parameters: list[Tensor] = list({id(p): p for _, _, p in found}.values())
        flat = self.parameters[0].new_zeros(aligned_size(self.parameters), dtype=dtype)
        self.leaves = [view.detach() for view in aligned_views(self.parameters, flat)]
        leaf_of = {id(p): leaf for p, leaf in zip(self.parameters, self.leaves, strict=True)}
        for parameter in trained:
            if id(parameter) in leaf_of:
                leaf_of[id(parameter)].requires_grad_()
        self.places = [(module, name, p, leaf_of[id(p)]) for module, name, p in found]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights of now."""
        torch._foreach_copy_(self.leaves, self.parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the network read the copies."""
        for module, name, _, leaf in self.places:
            module._parameters[name] = leaf  # type: ignore[assignment]  # a leaf that no optimizer sees
        try:
            yield
        finally:
            for module, name, parameter, _ in self.places:
                module._parameters[name] = parameter  # type: ignore[assignment]
