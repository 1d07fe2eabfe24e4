"""One of the ranks that `runs.exchange` starts. It exchanges gradients of tensors on a device.

    python -m tabicl_train.training.distributed.loopback --rdzv-backend loopback --nproc-per-node 2 \
        -m tabicl_train.check.gpu.exchange gloo cuda:0
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tabicl_train.check.gpu.place import set_up
from tabicl_train.check.gpu.steps import SMOKE, module_of, stream_of
from tabicl_train.config.compose import compose
from tabicl_train.console import print_line
from tabicl_train.errors import ConfigError
from tabicl_train.stream.curriculum import stage_at
from tabicl_train.stream.steps import StepItem, StepStream
from tabicl_train.training.distributed.processes import read_launch
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.module import Gradients, TrainedNetwork

TIMEOUT = 60.0  # seconds that a rank waits for the others
# Norm of the difference of a parameter's gradient over the norm of all gradients. Another order of sums gives 1e-7 to
# 1e-6, and a missing or repeated table among 512 gives 2e-3 or more.
TOLERANCE = 1e-4


def main(backend: str, name: str) -> None:
    """Compare the gradients of all ranks with those of one process; exits with 1 and a line if they differ.

    Parameters
    ----------
    backend : str
        gloo or nccl.
    name : str
        The device: cpu, cuda:N for all ranks, or cuda for the GPU with the number of the rank.
    """
    # Groups of the backend, and next to them those of gloo for messages.
    launch = read_launch()
    device = torch.device(name if ":" in name or name == "cpu" else f"cuda:{launch.local_rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, timeout=timedelta(seconds=TIMEOUT), device_id=device if backend == "nccl" else None
    )
    ranks = Ranks(launch)
    ranks.connect(TIMEOUT)
    set_up()

    # The smoke experiment in fp32, without clipping since raw gradients are compared.
    config = compose([*SMOKE, f"trainer.accelerator={device.type}", "trainer.precision=fp32"])
    stages = {stage: replace(value, clip=float("inf")) for stage, value in config.curriculum.stages.items()}
    config = replace(config, curriculum=replace(config.curriculum, stages=stages))
    module = module_of(config, device)
    stream = replace(stream_of(config, 3), rank=launch.rank, ranks=launch.size)
    try:
        check_exchange(module, module.configure_optimizers(), stream, ranks)
    except ConfigError as error:
        print_line(f"error: {error}")
        os._exit(1)

    # A sum of as many values as TabICLv2 has weights, 28 million.
    values = torch.ones(28_000_000 if device.type == "cuda" else 1_000, device=device)
    dist.all_reduce(values)
    if values[-1].item() != launch.size:
        print_line(f"error: the sum of ones over {launch.size} ranks is {values[-1].item()}")
        os._exit(1)
    ranks.barrier()
    dist.destroy_process_group()


def check_exchange(module: TrainedNetwork, optimizer: torch.optim.Optimizer, stream: StepStream, ranks: Ranks) -> float:
    """Take the steps of a stream, and compare ranks with each other and with a single process.

    Parameters
    ----------
    module : TrainedNetwork
        The network on this rank.
    optimizer : Optimizer
        Its optimizer.
    stream : StepStream
        The stream of this rank.
    ranks : Ranks
        The ranks.

    Returns
    -------
    float
        Largest difference between the gradients of the ranks and those that rank 0 computes as a single process,
        relative to their norm.

    Raises
    ------
    ConfigError
        On all ranks, if weights or gradients differ between ranks, or if gradients differ from a single process.
    """
    whole_stream = replace(stream, rank=0, ranks=1)
    rounding = 0.0
    for step in stream.steps:
        where = f"step {step}"

        # The weights: each rank compares its own with those of rank 0, tensor by tensor.
        problems = []
        for name, value in module.state_dict().items():
            if not torch.equal(value, copy_of_rank_0(value)) and not problems:
                problems.append(f"{where}: the weights differ from those of rank 0 in {name}")
        ranks.raise_on_all_ranks(problems)

        # The gradients: first those that rank 0 computes as a single process, then those of all ranks.
        _, stage, _ = stage_at(stream.curriculum, step)
        gradients = module.gradients_of(stage)
        if ranks.rank == 0:
            add_all(module, gradients, whole_stream.draw(step).to(module.device))
        alone = copy_of_rank_0(gradients.flat)
        module.train_on(stream.draw(step).to(module.device), step, ranks.rank, optimizer)
        names = {parameter: name for name, parameter in module.named_parameters()}
        labels = [names[parameter] for parameter in gradients.parameters]
        labels.append("the loss")  # the last value of the flat gradients

        problems = []
        reference = copy_of_rank_0(gradients.flat)
        if not torch.equal(gradients.flat, reference):
            size, label = largest_difference(gradients, labels, gradients.flat - reference, reference)
            what = f"the exchanged gradients differ from those of rank 0, most in {label}, by {size:.1e} of their norm"
            problems.append(f"{where}: {what}")
        ranks.raise_on_all_ranks(problems)
        size, label = largest_difference(gradients, labels, gradients.flat - alone, alone)
        rounding = max(rounding, size)
        if not size <= TOLERANCE:
            what = f"the gradients of {ranks.size} ranks differ from those of one process, most in {label}"
            raise ConfigError([f"{where}: {what}, by {size:.1e} of their norm; {TOLERANCE:.0e} is allowed"])
    return rounding


def add_all(module: TrainedNetwork, gradients: Gradients, item: StepItem) -> None:
    """Add up the gradients of all packs of an item."""
    _, stage, _ = stage_at(module.curriculum, item.step)
    gradients.start()
    for number in range(len(item.packs)):
        module.accumulate(gradients, item, number, stage.checkpoint_rows)


def copy_of_rank_0(tensor: Tensor) -> Tensor:
    """Return a copy of rank 0's tensor; all ranks call this."""
    copied = tensor.detach().clone()
    dist.broadcast(copied, 0)
    return copied


def largest_difference(
    gradients: Gradients, labels: list[str], difference: Tensor, reference: Tensor
) -> tuple[float, str]:
    """Return the size and the label of the largest difference of flat gradients.

    Parameters
    ----------
    gradients : Gradients
        The flat gradients with their views.
    labels : list of str
        The names of the parameters and, at the end, of the loss.
    difference, reference : Tensor
        Flat gradients with the loss as last value, (values,).

    Returns
    -------
    (float, str)
        The size is relative to the norm of all gradients, for the loss to the loss.
    """
    pieces = []
    for view in gradients.views:  # of each parameter
        start = view.storage_offset()
        pieces.append(difference[start : start + view.numel()])
    sizes = torch.stack([*torch._foreach_norm(pieces), difference[-1].abs()])
    sizes[:-1] /= torch.linalg.vector_norm(reference[:-1])
    sizes[-1] /= reference[-1].abs()
    number = int(sizes.argmax())
    return sizes[number].item(), labels[number]


if __name__ == "__main__":
    main(*sys.argv[1:])
