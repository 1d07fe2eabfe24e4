import dataclasses
import re

import numpy as np
import pytest
import torch

from priors import build_prior
from priors.prior import Prior
from tabicl_train.config import CurriculumConfig, StageConfig, StreamConfig
from tabicl_train.model import TabICLConfig
from tabicl_train.stream import StepStream, load

STAGE = StageConfig(steps=7, rows=[30, 60], features=[1, 5], tables=6, group_size=2)
CURRICULUM = CurriculumConfig({"only": STAGE})


def stream(start: int = 0, rank: int = 0, ranks: int = 1, prior: Prior | None = None) -> StepStream:
    return StepStream(prior or build_prior("graph_scm"), CURRICULUM, TabICLConfig(), 5, range(start, 7), rank, ranks)


def fingerprint(item) -> tuple:
    return item.step, item.stage, item.tables, [(b.X, b.y, b.train_size) for b in item.batches]


def assert_same(a, b) -> None:
    for x, y in zip(fingerprint(a)[:3], fingerprint(b)[:3], strict=True):
        assert x == y
    assert len(a.batches) == len(b.batches)
    for p, q in zip(a.batches, b.batches, strict=True):
        assert torch.equal(p.X, q.X) and torch.equal(p.y, q.y) and p.train_size == q.train_size


@pytest.fixture(scope="module")
def undisturbed():
    return list(stream())


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_items_are_the_same_for_any_number_of_workers(workers, undisturbed):
    items = list(load(stream(), StreamConfig(num_workers=workers, prefetch=2), pin=False))
    assert [item.step for item in items] == list(range(7))
    for a, b in zip(items, undisturbed, strict=True):
        assert_same(a, b)


def test_a_later_start_continues_the_same_stream(undisturbed):
    for a, b in zip(load(stream(start=4), StreamConfig(num_workers=2), pin=False), undisturbed[4:], strict=True):
        assert_same(a, b)


def test_ranks_divide_the_tables_of_one_process(undisturbed):
    def columns(items):
        return sorted(tuple(t.flatten().tolist()) for item in items for b in item.batches for t in b.X)

    both = [item for rank in range(2) for item in stream(rank=rank, ranks=2)]
    assert columns(both) == columns(undisturbed)
    assert all(item.batches and item.tables == STAGE.tables for item in both)


def test_drawing_leaves_thread_count_and_global_random_state_alone():
    np.random.seed(0)
    torch.manual_seed(0)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads()
    stream().draw(0)
    assert before == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads())


@dataclasses.dataclass
class Broken(Prior):
    def plan(self, spec, seed):
        if seed[1] == 3:
            raise ZeroDivisionError("no such luck")

    def execute(self, plan):
        return torch.arange(120.0).reshape(60, 2), torch.arange(60) % 2, 2


def test_an_error_of_the_prior_names_step_and_table():
    stage = dataclasses.replace(STAGE, rows=[60, 60])
    broken = StepStream(Broken(), CurriculumConfig({"only": stage}), TabICLConfig(), 5, range(7))
    with pytest.raises(ZeroDivisionError) as caught:
        list(broken)
    assert re.search(r"table \d of step 3, seed 5", caught.value.__notes__[0])
