"""Compiled blocks of a network, `trainer.compile`.

Blocks of one kind share a graph with symbolic sizes, so a curriculum needs few graphs: one for each of the five kinds,
and further ones for measured gates and for sizes of 1, which are not symbolic (a pack with a single table, or with a
single run of equal tables).
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

# A run on a GPU compiles by default if its network has more parameters than this, and the run more steps.
LEAST_PARAMETERS = 5_000_000
LEAST_STEPS = 2_000
# Graphs of each kind, beyond which torch warns and runs eagerly. Small stages of TabICLv2 need 47 in total.
GRAPHS = 64


def is_wanted(config: RunConfig, network: Network) -> bool:
    """Whether a run compiles its network: as `trainer.compile` says; by default where it pays and nothing is missing.

    On an H100, compiled steps of TabICLv2's first stage took 0.76 s instead of 0.97 s. Compiling took 60 s, which pays
    off after 285 steps. A small network waits for the host either way. All steps of the run count, rather than those
    that are left, so that a resumed run decides as before.
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
    """Return what compiling lacks on this machine, in a list."""
    from torch._inductor import config

    on_cuda = uses_cuda(settings)
    names = ("cc", "gcc", "clang") if on_cuda else config.cpp.cxx
    compilers = [name for name in names if name]
    if on_cuda and not is_installed("triton"):
        missing = "Triton"
    elif not any(shutil.which(name) for name in compilers):
        missing = f"a compiler ({' or '.join(compilers)})"
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing = "Python.h (in a package such as python3-dev)"
    elif not on_cuda and " " in torch.__file__:
        # Torch does not quote its path for the linker.
        return [f"trainer.compile is true, which fails if torch's path has a space ({Path(torch.__file__).parent})"]
    else:
        return []
    return [f"trainer.compile is true, which needs {missing}; install it, or leave the setting out"]


def compile_blocks(network: Network, backend: str | Callable = "inductor") -> None:
    """Compile the blocks in place; copies of the network, such as those that are validated, run eagerly.

    Compiled code is kept for later starts in the user's cache folder, which outlives /tmp. It is not kept in the run
    directory: one from somebody else could then execute anything.

    Parameters
    ----------
    network : Network
        The network.
    backend : str or callable
        The backend of torch.compile.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(caches / "tabicl_train" / "compiled"))
    import torch.fx.experimental._config as shapes
    from torch._dynamo import config

    # Otherwise sizes that are equal by chance share a symbol, and the graph is compiled again once they differ.
    shapes.use_duck_shape = False
    # These two would be compiled again for each set of sizes.
    attention.attend_by_run = torch.compiler.disable(attention.attend_by_run)
    attention.attend_in_launches = torch.compiler.disable(attention.attend_in_launches)
    config.recompile_limit = config.accumulated_recompile_limit = GRAPHS
    for block in network.blocks():
        block.compile(dynamic=True, backend=backend)
