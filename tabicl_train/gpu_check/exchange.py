"""One of the ranks that `runs.exchange` starts: exchanges gradients of tensors on a device.

    python -m tabicl_train.distributed.loopback --rdzv-backend loopback --nproc-per-node 2 \
        -m tabicl_train.gpu_check.exchange gloo cuda:0
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from tabicl_train.config.compose import compose
from tabicl_train.debugging.preflight import check_exchange
from tabicl_train.distributed.processes import read_launch
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.errors import ConfigError
from tabicl_train.gpu_check.place import set_up
from tabicl_train.gpu_check.steps import SMOKE, module_of, stream_of

TIMEOUT = 60.0  # seconds that a rank waits for the others


def main(backend: str, name: str) -> None:
    """Compare the gradients of all ranks with those of one process; exits with 1 and a line if they differ."""
    launch = read_launch()
    device = torch.device(name if ":" in name or name == "cpu" else f"cuda:{launch.local_rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, timeout=timedelta(seconds=TIMEOUT), device_id=device if backend == "nccl" else None
    )
    ranks = Ranks(launch)
    ranks.connect(TIMEOUT)  # groups of gloo beside it
    set_up()
    # no clipping, since raw gradients are compared
    config = compose([*SMOKE, f"trainer.accelerator={device.type}", "trainer.precision=fp32"])
    stages = {stage: replace(value, clip=float("inf")) for stage, value in config.curriculum.stages.items()}
    config = replace(config, curriculum=replace(config.curriculum, stages=stages))
    module = module_of(config, device)
    stream = replace(stream_of(config, 3), rank=launch.rank, ranks=launch.size)
    try:
        check_exchange(module, module.configure_optimizers(), stream, ranks)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    # 28 million values, as in TabICLv2
    values = torch.ones(28_000_000 if device.type == "cuda" else 1_000, device=device)
    dist.all_reduce(values)
    if values[-1].item() != launch.size:
        print(f"error: the sum of ones over {launch.size} ranks is {values[-1].item()}", file=sys.stderr, flush=True)
        os._exit(1)
    ranks.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
