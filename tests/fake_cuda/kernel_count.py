"""What a step costs a GPU in eager mode, counted on fake tensors: operators, kernel launches, FLOPs and bytes.

An operator reads each of its inputs once and writes its outputs once; what lies in an expanded dimension counts once.
It launches one kernel, unless it makes a view, or is listed here.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from watch import address, describe, tensors_of

from tabicl_train.model import attention
from tabicl_train.model.layout import Spans

PARTS = ("column", "row", "icl", "loss", "gradients", "optimizer")
KERNELS = {  # of operators that launch several
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 3,
    "_flash_attention_backward": 3,
    "_efficient_attention_backward": 3,
    "native_layer_norm_backward": 3,
    "attend_rows": 5,  # at most: one for rows of up to 16, 32, 64, 96 and 128 tokens
    "attend_rows_backward": 5,
    "scale_queries": 2,
    "scale_queries_backward": 7,
}
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
# Kernels over lists of tensors take so many tensors, and so many pieces of 65,536 values, at a time.
LIST_TENSORS, LIST_PIECES, PIECE = 48, 320, 65_536


@dataclass
class Cost:
    """operators: calls through the dispatcher, which cost the host time; launches: kernels"""

    operators: int = 0
    launches: int = 0
    flops: float = 0.0
    bytes: float = 0.0

    def add(self, other: Cost) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


Ends = tuple[int, ...]  # addresses of the tensors that say where sequences of queries and of keys end


class Count(TorchDispatchMode):
    """Costs by part of the step and operator.

    pairs: of queries and keys that attention within sequences multiplies, by the ends of the sequences
    """

    def __init__(self) -> None:
        super().__init__()
        self.part = "gradients"
        self.pairs: dict[Ends, int] = {}
        self.operators: dict[tuple[str, str], Cost] = defaultdict(Cost)

    def __torch_dispatch__(self, function: OpOverload, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        on_device = any(x.is_cuda for x in tensors_of((args, kwargs, result)))
        if describe(function).namespace != "prim" and on_device:
            self.operators[self.part, str(function)].add(cost_of(function, args, kwargs, result, self.pairs))
        return result


def cost_of(function: OpOverload, args: tuple, kwargs: dict, result: Any, pairs: dict[Ends, int]) -> Cost:
    """pairs: see Count"""
    operator = describe(function)
    name = operator.name
    inputs, outputs = tensors_of((args, kwargs)), tensors_of(result)
    if operator.returns_view or name in NO_KERNEL:
        return Cost(operators=1)
    moved = sum(map(size, inputs)) + sum(map(size, outputs))
    if name in ("zero_", "fill_", "copy_"):  # writes what it is given as an input
        moved -= size(inputs[0])
    launches = KERNELS.get(name, 1)
    if name.startswith("_foreach"):
        first = tensors_of(args[0])
        pieces = sum(-(-x.numel() // PIECE) for x in first)
        launches = max(-(-len(first) // LIST_TENSORS), -(-pieces // LIST_PIECES))
        if name.endswith("_"):  # returns nothing, but writes
            moved += sum(map(size, first))
    return Cost(1, launches, flops_of(function, args, kwargs, result, pairs), moved)


def flops_of(function: OpOverload, args: tuple, kwargs: dict, result: Any, pairs: dict[Ends, int]) -> float:
    operator = describe(function)
    arguments = dict(zip(operator.arguments, args, strict=False)) | kwargs
    ends = [arguments.get(f"{kind}_{side}") for kind in ("cum_seq", "cu_seqlens") for side in "qk"]
    ends = [x for x in ends if x is not None]
    if ends:  # attention within sequences whose lengths are on the device
        heads, width = arguments["query"].shape[-2:]
        products = 5 if "backward" in operator.name else 2  # the backward pass computes the probabilities once more
        return 2 * products * heads * width * pairs[tuple(map(address, ends))]
    formula = flop_registry.get(function.overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def size(tensor: Tensor) -> int:
    """Bytes in memory."""
    lengths = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(lengths) * tensor.element_size()


@contextlib.contextmanager
def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Count]:
    """Counts what happens within the context; the model's parts are told apart in both passes."""
    count = Count()

    def enter(part: str) -> Callable[..., None]:
        return lambda *_: setattr(count, "part", part)

    def leave(part: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            count.part = "loss"
            if output.requires_grad:
                output.register_hook(enter(part))  # its gradient is there: the part's backward pass begins

        return hook

    def around(function: Callable, before: str, after: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            count.part = before
            result = function(*args, **kwargs)
            count.part = after
            return result

        return call

    at_once = attention.attend_at_once

    def attend_at_once(q: Tensor, kv: Tensor, spans: Spans, dropout: float) -> Tensor:
        runs = spans.runs.tolist()
        pairs = sum(sequences * queries * keys for sequences, queries, keys, *_ in runs)
        count.pairs[address(spans.query_ends), address(spans.key_ends)] = pairs
        return at_once(q, kv, spans, dropout)

    hooks = []
    for part, name in (("column", "col_embedder"), ("row", "row_interactor"), ("icl", "icl_predictor")):
        module = getattr(model, name)
        hooks += [module.register_forward_pre_hook(enter(part)), module.register_forward_hook(leave(part))]
    with (
        mock.patch.object(attention, "attend_at_once", attend_at_once),
        mock.patch("torch.autograd.grad", around(torch.autograd.grad, "loss", "gradients")),
        mock.patch.object(optimizer, "step", around(optimizer.step, "optimizer", "gradients")),
        count,
    ):
        yield count
    for hook in hooks:
        hook.remove()
