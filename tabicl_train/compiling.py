"""Compiled blocks of a network, `trainer.compile`, and its Triton kernel, `trainer.triton`.

Blocks of a kind share a graph with symbolic sizes, so a curriculum needs few: one for each of five kinds, and others
where a table or a run of equal tables is on its own, as 1 is no symbolic size, and while gates are measured.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.errors import is_installed
from tabicl_train.model import attention
from tabicl_train.model.family import Network
from tabicl_train.model.scaling import QASSMax
from tabicl_train.precision import uses_cuda

GRAPHS = 64  # that a run should need; a shrunk curriculum of TabICLv2 takes 47 on a CPU


def problems(settings: TrainerConfig) -> list[str]:
    """What is missing on this machine for `trainer.compile` and `trainer.triton`, if anything."""
    problems = []
    if settings.triton and not uses_cuda(settings):
        problems.append("trainer.triton is true, which needs a GPU")
    elif settings.triton and not is_installed("triton"):
        problems.append("trainer.triton is true, which needs Triton; install it, or leave the setting out")
    return problems + (compiler_problems(settings) if settings.compile else [])


def compiler_problems(settings: TrainerConfig) -> list[str]:
    import torch
    from torch._inductor import config

    names = ("cc", "gcc", "clang") if uses_cuda(settings) else config.cpp.cxx
    if uses_cuda(settings) and not is_installed("triton"):
        missing = "Triton"
    elif not any(shutil.which(name) for name in names if name):
        missing = f"a compiler ({' or '.join(name for name in names if name)})"
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing = "Python.h, which a package like python3-dev holds"
    elif not uses_cuda(settings) and " " in torch.__file__:  # torch does not quote it for the linker
        return [f"trainer.compile is true, which fails in a path with a space ({Path(torch.__file__).parent})"]
    else:
        return []
    return [f"trainer.compile is true, which needs {missing}; install it, or leave the setting out"]


def compile_blocks(network: Network, backend: str | Callable = "inductor") -> None:
    """Compile the blocks in place. Copies of the network, such as those that are validated, run as they are."""
    import torch
    import torch.fx.experimental._config as shapes
    from torch._dynamo import config

    # Two sizes that are equal by chance would be taken for one, and the graph be compiled anew when they differ.
    shapes.use_duck_shape = False
    # A graph would be compiled for each set of sizes.
    attention.attend_by_run = torch.compiler.disable(attention.attend_by_run)
    # At a limit, blocks would run as they are without a word; `too_many_graphs` speaks of them.
    config.recompile_limit = config.accumulated_recompile_limit = sys.maxsize
    for block in network.blocks():
        block.compile(dynamic=True, backend=backend)


def use_triton(network: Network) -> bool:
    """Let the layers with a kernel use it; returns whether there are any."""
    layers = [layer for _, layer in network.named_scalings() if isinstance(layer, QASSMax)]
    for layer in layers:
        layer.triton = True
    return bool(layers)


def count_graphs() -> int:
    """Graphs that this process has compiled so far."""
    utils = sys.modules.get("torch._dynamo.utils")  # takes seconds to import, and without it there are none
    return utils.counters["stats"]["unique_graphs"] if utils else 0


def too_many_graphs(graphs: int) -> str | None:
    """A line about too many graphs in a run."""
    if graphs <= GRAPHS:
        return None
    return (
        f"warning   {graphs} graphs have been compiled, more than the {GRAPHS} that a run should need; if it goes on, "
        "end the run and continue it with trainer.compile=false"
    )
