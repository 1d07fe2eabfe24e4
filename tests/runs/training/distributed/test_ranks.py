"""What ranks decide together, with real process groups; each of the processes checks what it gets."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from forked import run_ranks

from tabicl_train.errors import ConfigError
from tabicl_train.training.distributed.processes import read_launch
from tabicl_train.training.distributed.ranks import Ranks


def decide(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks = Ranks(read_launch())
    ranks.connect(0.2)
    assert (ranks.rank, ranks.size) == (int(os.environ["RANK"]), 3)

    assert ranks.any(ranks.rank == 2) and not ranks.any(False)
    assert ranks.gather(ranks.rank**2) == [0, 1, 4]
    assert ranks.from_first(lambda: f"rank {ranks.rank}") == "rank 0"
    for error in (ConfigError(["no such file", "seed is -1"]), ZeroDivisionError("no such luck")):
        with pytest.raises(type(error)) as raised:
            ranks.from_first(lambda error=error: fail(error))
        assert str(raised.value) == str(error)

    ranks.raise_on_all_ranks([])
    for problems, expected in (
        (["no GPU"], ["no GPU"]),
        (["no GPU"] if ranks.rank > 0 else [], ["no GPU (ranks 1, 2)"]),
        ([f"seed is {ranks.rank // 2}"], ["seed is 0 (ranks 0, 1)", "seed is 1 (rank 2)"]),
    ):
        with pytest.raises(ConfigError) as refused:
            ranks.raise_on_all_ranks(problems)
        assert refused.value.problems == expected

    if ranks.rank > 0:  # rank 0 works longer than the timeout of 0.2 s, and learns that rank 2 was asked to stop
        assert ranks.wait_for_first(lambda: ranks.rank == 2)
    else:
        import time

        time.sleep(1.0)  # what is tested is that nobody gives up meanwhile
        assert ranks.still_working(False)
        assert ranks.finish(True)
    ranks.barrier()
    (folder / f"passed.{ranks.rank}").touch()
    dist.destroy_process_group()


def fail(error: Exception) -> None:
    raise error


def test_ranks_get_what_rank_0_has_and_name_those_with_problems(tmp_path):
    codes = run_ranks(decide, tmp_path, folder=tmp_path, size=3)
    assert codes == [0, 0, 0], [(tmp_path / f"stderr.{rank}").read_text() for rank in range(3)]
    assert len(list(tmp_path.glob("passed.*"))) == 3


def test_a_single_process_needs_no_group():
    ranks = Ranks()
    ranks.connect(60.0)
    ranks.barrier()
    assert ranks.any(True)
    assert ranks.gather(1) == [1]
    assert ranks.from_first(lambda: 2) == 2
    with pytest.raises(ConfigError, match=r"^no GPU$"):
        ranks.raise_on_all_ranks(["no GPU"])
