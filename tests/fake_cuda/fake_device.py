"""CUDA tensors without a GPU: shapes, dtypes and devices are real, the values are not there.

`load_guard` must run before torch is imported, in a process of its own. Within `fake_cuda` the code under test sees a
GPU: its tensors are FakeTensors, autocast follows CUDA's rules, and attention goes to the kernels of a CUDA build.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

SOURCE = Path(__file__).with_name("guard.cpp")


class CannotBuild(Exception):
    """There is no compiler, or the guard does not fit this version of torch; the message says which."""


def build_guard(folder: Path) -> Path:
    """The compiled guard, in a folder that may hold it already. Takes 4 s. Raises CannotBuild."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = folder / f"guard-{importlib.metadata.version('torch')}-{digest}.so"
    if library.exists():
        return library
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    part = library.with_suffix(f".{os.getpid()}")
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", SOURCE, f"-L{torch}/lib", "-lc10"]
    command += ["-ltorch_cpu", f"-Wl,-rpath,{torch}/lib", "-o", part]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise CannotBuild(f"no compiler: {error}") from None
    except subprocess.CalledProcessError as error:
        raise CannotBuild(f"the guard does not compile: {error.stderr[-400:]}") from None
    part.replace(library)
    return library


def load_guard(library: Path) -> None:
    """Give torch, which this imports, one CUDA device without memory. Raises CannotBuild."""
    guard = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401  # finds the functions of the guard before its own

    guard.install_guard.restype = ctypes.c_bool
    if not guard.install_guard():
        raise CannotBuild("this torch has CUDA of its own")


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """All tensors made within are fake, on whichever device."""
    import kernel_limits
    from torch._subclasses.fake_tensor import FakeTensorMode

    answers = {
        "torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT": 100_000,  # small tensors of the host keep their values
        "torch.cuda.is_bf16_supported": lambda including_emulation=True: True,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.nn.init.trunc_normal_": lambda tensor, **_: tensor,  # reads values
        "torch.nn.functional.scaled_dot_product_attention": kernel_limits.attention,
    }
    answers |= {f"{name}.HAS_TRITON": True for name, module in sys.modules.items() if hasattr(module, "HAS_TRITON")}
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=False))
        yield
