"""A prior of simple tables that leaves traces, fails, waits or ends its process; actors import it from this file."""

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from priors.prior import Prior
from priors.table import PriorError
from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.model import TabICLConfig
from tabicl_train.stream.steps import StepStream

TABLES = 6


@dataclass
class Recording(Prior):
    """Tables of 60 rows that tell their address.

    folder: gets an empty file PID-STEP for each step that a process draws
    kill: step that ends the first `deaths` processes that draw it
    fail: step whose tables cannot be drawn; wait: step that is never done
    """

    folder: str
    kill: int = -1
    deaths: int = 1
    fail: int = -1
    wait: int = -1

    def plan(self, spec, seed):
        step = seed[1]
        Path(self.folder, f"{os.getpid()}-{step}").touch()
        if step == self.kill and len(list(Path(self.folder).glob(f"*-{step}"))) <= self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.fail:
            raise PriorError("no such luck")
        if step == self.wait:
            threading.Event().wait()
        return seed

    def execute(self, plan):
        return torch.arange(120.0).reshape(60, 2) * (1 + plan[1] + plan[2] / 8), torch.arange(60) % 2, 2


def stream_of(prior: Prior, rank: int = 0, ranks: int = 1) -> StepStream:
    stage = StageConfig(steps=9, rows=[60, 60], features=[5, 5], tables=TABLES, group_size=2)
    return StepStream(prior, CurriculumConfig({"only": stage}), TabICLConfig(), 5, range(9), rank, ranks)


def assert_same(items, expected) -> None:
    """Equal bit for bit."""
    for a, b in zip(items, expected, strict=True):
        assert (a.step, a.stage, a.tables, a.rejections) == (b.step, b.stage, b.tables, b.rejections)
        for p, q in zip(a.packs, b.packs, strict=True):
            assert torch.equal(p.X, q.X)
            assert torch.equal(p.y, q.y)
            assert torch.equal(p.sizes, q.sizes)
            assert p.shapes == q.shapes
