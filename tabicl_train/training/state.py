"""The state of training: weights, optimizer, and how many steps are done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tabicl_train.config.schema import RunConfig
from tabicl_train.console import counted, first_line, info
from tabicl_train.errors import ConfigError, wrong_records
from tabicl_train.model.attention import KERNEL_DEVICES
from tabicl_train.model.family import Network
from tabicl_train.model.kernels import kernels_of, problem_of_kernels
from tabicl_train.model.stages import InducedAttention
from tabicl_train.stream.steps import StepItem
from tabicl_train.training import compiling
from tabicl_train.training.cuda_graph import step_problem
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.module import TrainedNetwork
from tabicl_train.training.objectives import build_objective
from tabicl_train.training.precision import DTYPES, choose_precision
from tabicl_train.training.resume import initial_weights
from tabicl_train.weights.pretrained import is_of_kind

__all__ = ["TrainState"]


@dataclass
class TrainState:
    """What a step changes, equal on all ranks.

    Parameters
    ----------
    module : TrainedNetwork
        The network, with the loss and the gradient norm of the last step, and whether it was skipped.
    optimizer : torch.optim.Optimizer
        The optimizer.
    step : int
        Optimizer steps done.
    last : int
        Optimizer steps after which the run ends.
    rank : int
        The rank of this process.
    """

    module: TrainedNetwork
    optimizer: torch.optim.Optimizer
    step: int
    last: int
    rank: int = 0

    @property
    def network(self) -> Network:
        """The network that is trained."""
        return self.module.model

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.module.device

    def take_step(self, item: StepItem) -> None:
        """Take one optimizer step with this rank's tables."""
        self.module.train_on(item, self.step, self.rank, self.optimizer)
        self.step += 1


def untrained_module(config: RunConfig) -> TrainedNetwork:
    """Build the module of a run, with the random weights of its seed."""
    torch.manual_seed(config.seed)
    return TrainedNetwork(**module_arguments(config))


def module_arguments(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of the module of a run."""
    return {
        "model": config.model,
        "curriculum": config.curriculum,
        "optimizer": config.optimizer,
        "precision": choose_precision(config.trainer),
        "seed": config.seed,
        "objective": build_objective(config.objective),
        "auxiliary": config.auxiliary_losses,
    }


def build_module(
    config: RunConfig, content: dict | None, ranks: Ranks, device: torch.device
) -> tuple[TrainedNetwork, torch.optim.Optimizer]:
    """Build module and optimizer, equal on all ranks: from a checkpoint, from initial weights or from random ones.

    Parameters
    ----------
    config : RunConfig
        The run.
    content : dict or None
        The content of the checkpoint that the run continues from; None at its start.
    ranks : Ranks
        All ranks of the run.
    device : torch.device
        Where this rank computes.

    Returns
    -------
    TrainedNetwork, torch.optim.Optimizer
        On the device.
    """
    module = untrained_module(config)
    set_up_module(module, config, ranks, device)
    optimizer = module.configure_optimizers()
    if content is not None:
        load_training(content, module, optimizer)
    else:
        load_initial_weights(module, config, ranks)
    broadcast_weights(module)
    return module, optimizer


def set_up_module(module: TrainedNetwork, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
    """Move the module of a run to its device, and choose how it computes there: compiler, kernels and CUDA graphs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    module.to(device)
    module.move_state()
    module.compiled = ranks.from_first(lambda: compiling.is_wanted(config, module.model))
    if module.compiled:
        compiling.compile_blocks(module.model)
    if module.device.type in KERNEL_DEVICES:
        choose_attention(module, config, ranks)
    if module.device.type == "cuda":
        choose_graphs(module, config, ranks)


def load_initial_weights(module: TrainedNetwork, config: RunConfig, ranks: Ranks) -> None:
    """Load the weights of `init_weights`, if any."""
    source = config.init_weights
    if source is None:
        return
    start = ranks.from_first(lambda: initial_weights(source, config.model))
    module.model.load_state_dict(start.tensors)
    if start.trained_range is not None:
        module.inherited_range = start.trained_range.recorded(config.model.max_classes)


def choose_attention(module: TrainedNetwork, config: RunConfig, ranks: Ranks) -> None:
    """Use this package's attention kernels if they agree with float64 on rank 0, and print which attention runs."""
    # Rank 0 tries the kernels, so that all ranks use the same ones.
    dtype = DTYPES[module.precision.name]
    network = module.model
    problem = ranks.from_first(lambda: problem_of_kernels(network, config.trainer.attention, module.device, dtype))
    kernels = kernels_of(network, dtype)
    kernels.use(problem is None)
    module.uses_kernels = problem is None and bool(kernels.attention)

    # With col_attention_fp32=auto, the kernels decide in which format column attention is computed.
    name = module.precision.name
    columns = ""
    if any(stage.col_attention_fp32 == "auto" for stage in config.curriculum.stages.values()):
        blocks = [block for block in network.modules() if isinstance(block, InducedAttention)]
        layers = [attention.attn for block in blocks for attention in (block.multihead_attn1, block.multihead_attn2)]
        formats = sorted({"fp32" if layer.own_kernels is None else name for layer in layers})
        columns = f"; column attention in {' and '.join(formats)}, as col_attention_fp32 is auto"

    if module.uses_kernels:
        where = f"in {counted(len(kernels.attention), 'layer')} of rows and columns, in {name}"
        info(f"attention kernels of this package {where}, which agree with float64{columns}")
    elif kernels.attention or kernels.scaling:
        info(f"attention PyTorch's{'' if problem is None else f', since {problem}'}{columns}")


def choose_graphs(module: TrainedNetwork, config: RunConfig, ranks: Ranks) -> None:
    """Choose what is replayed as CUDA graphs, according to `trainer.cuda_graphs`, and print it."""
    if config.trainer.cuda_graphs == "never":
        module.replay.enabled = False
        return
    problem = step_problem(config, ranks.size)
    module.step_replay.enabled = problem is None
    if problem is None:
        info("graphs    whole steps are replayed as CUDA graphs, with packs padded to a few sizes")
    else:
        info(f"graphs    only the optimizer's steps are replayed as CUDA graphs, since {problem}")


def load_training(content: dict, module: TrainedNetwork, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer from the content of a checkpoint.

    Raises
    ------
    ConfigError
        If they do not fit, in shape or type.
    """
    # The weights. load_state_dict would cast another type in silence.
    with wrong_records("the checkpoint"):
        module.on_load_checkpoint(content)
        for name, weight in module.state_dict().items():
            saved = content["state_dict"][name]
            if saved.shape != weight.shape:
                shapes = f"{tuple(saved.shape)}, not {tuple(weight.shape)}"
                raise ConfigError([f"{name} in the checkpoint has shape {shapes}"])
            if not is_of_kind(saved, weight.dtype):
                raise ConfigError([f"{name} in the checkpoint is of type {saved.dtype}, not {weight.dtype}"])
        module.load_state_dict(content["state_dict"])

    # The state of the optimizer, unless the run now has another one, see `on_load_checkpoint`.
    # An optimizer of a plug-in may have changed since.
    for state in content["optimizer_states"]:
        try:
            optimizer.load_state_dict(state)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            what = f"the checkpoint's state of optimizer={content['config']['optimizer']['name']} does not fit"
            raise ConfigError([f"{what}: {first_line(error)}; choose a new run_dir"]) from None


def broadcast_weights(module: TrainedNetwork) -> None:
    """Give all ranks the weights of rank 0."""
    if dist.is_initialized():
        for value in module.state_dict().values():
            dist.broadcast(value, 0)
