"""Compiled blocks of a network, `trainer.compile`.

Blocks of a kind share a graph with symbolic sizes, so a curriculum needs few graphs: one for each of the five kinds,
and more for packs of a single table or a single run of equal tables (a size of 1 is not symbolic) and measured gates.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.errors import is_installed
from tabicl_train.model import attention
from tabicl_train.model.family import Network
from tabicl_train.precision import uses_cuda

GRAPHS = 64  # limit of each kind, beyond which torch warns and runs eagerly; small stages of TabICLv2 need 47 in total


def problems(settings: TrainerConfig) -> list[str]:
    """List what `trainer.compile` lacks on this machine."""
    return compiler_problems(settings) if settings.compile else []


def compiler_problems(settings: TrainerConfig) -> list[str]:
    from torch._inductor import config

    on_cuda = uses_cuda(settings)
    names = ("cc", "gcc", "clang") if on_cuda else config.cpp.cxx
    compilers = [name for name in names if name]
    if on_cuda and not is_installed("triton"):
        missing = "Triton"
    elif not any(shutil.which(name) for name in compilers):
        missing = f"a compiler ({' or '.join(compilers)})"
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing = "Python.h, which a package like python3-dev holds"
    elif not on_cuda and " " in torch.__file__:  # torch does not quote it for the linker
        return [f"trainer.compile is true, which fails in a path with a space ({Path(torch.__file__).parent})"]
    else:
        return []
    return [f"trainer.compile is true, which needs {missing}; install it, or leave the setting out"]


def compile_blocks(network: Network, backend: str | Callable = "inductor") -> None:
    """Compile the blocks in place. Copies of the network, such as those that are validated, run eagerly."""
    import torch.fx.experimental._config as shapes
    from torch._dynamo import config

    # Otherwise sizes that are equal by chance share a symbol, and the graph is compiled again once they differ.
    shapes.use_duck_shape = False
    # It would be compiled for each set of sizes.
    attention.attend_by_run = torch.compiler.disable(attention.attend_by_run)
    attention.attend_in_launches = torch.compiler.disable(attention.attend_in_launches)
    config.recompile_limit = config.accumulated_recompile_limit = GRAPHS
    for block in network.blocks():
        block.compile(dynamic=True, backend=backend)
