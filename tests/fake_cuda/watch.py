"""What the host may not do between two logged steps: wait for the device."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import kernel_limits
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES = ("_to_copy", "copy_")
ELEMENTS = 2**31  # of a tensor: kernels of this project index with 32 bits


class Waits(Exception):
    """An operator for which the host waits until the device has done everything before it."""


class TwoDevices(Exception):
    """A kernel is given tensors in host memory, where no kernel reads them."""


class Watch(TorchDispatchMode):
    """Raises Waits, TwoDevices, or KernelLimit for a kernel that could not be launched.

    Values reach the device without waiting as arguments of kernels (Python numbers, and CPU tensors without
    dimensions) or from pinned memory, if `non_blocking` is set. No value may come back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[int, Tensor] = {}  # by storage; kept alive, so that no address is used twice

    def pin(self, tensor: Tensor, *_: object) -> Tensor:
        """In place of Tensor.pin_memory, which fake tensors lack."""
        pinned = tensor.clone()
        self.pinned[address(pinned)] = pinned
        return pinned

    def __torch_dispatch__(self, function: OpOverload, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_of((args, kwargs))
        on_device = any(x.is_cuda for x in inputs)
        if function is torch.ops.aten._local_scalar_dense.default and on_device:
            raise Waits("a value of a tensor is read")
        operator = describe(function)
        if on_device and operator.namespace not in ("aten", "prim") and any(x.numel() >= ELEMENTS for x in inputs):
            raise kernel_limits.KernelLimit(f"{function} on a tensor of 2^31 elements or more")
        arguments = dict(zip(operator.arguments, args, strict=False)) | kwargs
        if operator.namespace != "tabicl_train" and operator.name not in COPIES and lie_apart(inputs):
            raise TwoDevices(str(function))
        if "attention" in operator.name:
            kernel_limits.check_call(operator.name, arguments)
        try:
            result = function(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise Waits(f"{function}: its result depends on values") from error
        if operator.name in COPIES:
            self.check_copy(operator, inputs, tensors_of(result), arguments.get("non_blocking", False))
        if kwargs.get("pin_memory"):
            self.pinned[address(result)] = result
        return result

    def check_copy(self, operator: Operator, inputs: list[Tensor], outputs: list[Tensor], non_blocking: bool) -> None:
        source, target = inputs[-1], outputs[0]
        if source.is_cuda != target.is_cuda and not (non_blocking and address(source) in self.pinned):
            raise Waits(f"{operator.name} from {source.device.type} to {target.device.type}")


class Operator(NamedTuple):
    """What the schema of an operator says; looking it up takes as long as a fake kernel.

    returns_view: whether the result shares the memory of an input that it leaves unchanged
    """

    namespace: str
    name: str
    arguments: tuple[str, ...]
    returns_view: bool


@functools.cache
def describe(function: OpOverload) -> Operator:
    schema = function._schema
    namespace, name = schema.name.split("::")
    returns_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return Operator(namespace, name, tuple(argument.name for argument in schema.arguments), returns_view)


def lie_apart(inputs: list[Tensor]) -> bool:
    """Whether tensors are on two devices; a CPU tensor without dimensions is an argument of a kernel."""
    return len({x.device.type for x in inputs if x.dim() > 0}) > 1


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_of(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
