"""Compiled blocks of a network, `trainer.compile`.

Blocks of a kind share a graph with symbolic sizes, so a curriculum needs few graphs: one for each of the five kinds,
and more for packs of a single table or a single run of equal tables (a size of 1 is not symbolic) and measured gates.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch

from tabicl_train.config.schema import RunConfig, TrainerConfig
from tabicl_train.errors import is_installed
from tabicl_train.model import attention
from tabicl_train.model.family import Network
from tabicl_train.training.precision import uses_cuda

LEAST_PARAMETERS = 5_000_000  # above which a run on a GPU compiles by default, and
LEAST_STEPS = 2_000  # in how many steps
GRAPHS = 64  # limit of each kind, beyond which torch warns and runs eagerly; small stages of TabICLv2 need 47 in total


def is_wanted(config: RunConfig, network: Network) -> bool:
    """Whether a run compiles its network: as `trainer.compile` says, or where it pays and nothing is missing.

    Compiled steps of TabICLv2's first stage took 0.76 s on an H100 instead of 0.97, and the first one 60 s, which
    pays after 285 steps; a small network waits for the host in both. All steps of the run count, not those that are
    left, so that a continued run decides as before.
    """
    settings = config.trainer
    if settings.compile is not None:
        return settings.compile
    return (
        uses_cuda(settings)
        and sum(p.numel() for p in network.parameters()) > LEAST_PARAMETERS
        and config.total_steps > LEAST_STEPS
        and next(network.blocks(), None) is not None
        and not getattr(config.model, "dropout", 0)
        and not compiler_problems(settings)
    )


def compiler_problems(settings: TrainerConfig) -> list[str]:
    """List what compiling lacks on this machine."""
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
    """Compile the blocks in place. Copies of the network, such as those that are validated, run eagerly.

    Compiled code is kept for later starts in the user's cache, which outlives the machine's /tmp. It is not kept beside
    the run: a received run folder could execute anything by it.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(caches / "tabicl_train" / "compiled"))
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
