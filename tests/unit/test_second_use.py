"""Second uses of tables: what is permuted, and that they are the same for any workers, ranks and restarts."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from command_line import command

from priors import Table, TableSpec
from priors.finish import is_valid_split, use_again
from priors.prior import Prior
from priors.random import rng_at
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import CurriculumConfig, StageConfig, StreamConfig, configured_prior
from tabicl_train.curriculum import BLOCK, DISTANCE, plan_step
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICLConfig
from tabicl_train.stream import StepItem, StepStream
from tabicl_train.workers import Loader

FIRST = StageConfig(steps=5, rows=[30, 60], features=[2, 5], tables=4, group_size=2)
AGAIN = dataclasses.replace(FIRST, steps=30, uses=2)
CURRICULUM = CurriculumConfig({"first": FIRST, "again": AGAIN})
STEPS = FIRST.steps + AGAIN.steps


@dataclasses.dataclass
class Counted(Prior):
    """Tables of integers that say where they come from; counts how often each address is drawn."""

    def __post_init__(self) -> None:
        self.drawn: Counter[tuple[int, ...]] = Counter()

    def attempt(self, spec: TableSpec, seed: tuple[int, ...]) -> Table:
        self.drawn[seed[1:3]] += 1
        rng = rng_at(seed)
        X = torch.from_numpy(rng.permutation(spec.num_rows * spec.num_features).astype(np.float32))
        y = torch.arange(spec.num_rows) % 3
        return Table(X.view(spec.num_rows, -1), y, spec.train_size, 3)


def stream(start: int = 0, rank: int = 0, ranks: int = 1) -> StepStream:
    return StepStream(Counted(), CURRICULUM, TabICLConfig(), 5, range(start, STEPS), rank, ranks)


def tables_of(item: StepItem) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    return [table for pack in item.packs for table in pack.tables()]


def assert_same(a: StepItem, b: StepItem) -> None:
    assert (a.step, a.stage, a.tables) == (b.step, b.stage, b.tables)
    for p, q in zip(a.packs, b.packs, strict=True):
        assert torch.equal(p.X, q.X)
        assert torch.equal(p.y, q.y)
        assert p.shapes == q.shapes


@pytest.fixture(scope="module")
def undisturbed() -> list[StepItem]:
    return list(stream())


def is_again(step: int) -> bool:
    number = step - FIRST.steps
    return number >= DISTANCE and number % (2 * BLOCK) >= BLOCK


def test_a_second_use_has_the_rows_of_the_first_one_in_another_order_and_split(undisturbed):
    seen = 0
    for item in undisturbed:
        source = plan_step(CURRICULUM, TabICLConfig(), 5, item.step).source
        assert source == (item.step - DISTANCE if is_again(item.step) else item.step)
        if source == item.step:
            continue
        pairs = zip(tables_of(undisturbed[source]), tables_of(item), strict=True)
        for (X, y, n), (other_X, other_y, other_n) in pairs:
            assert (X.shape, n) == (other_X.shape, other_n)
            # Their values are distinct, so that a row is known by its smallest one, and a column too.
            rows = other_X.min(1).values.argsort(), X.min(1).values.argsort()
            columns = other_X.min(0).values.argsort(), X.min(0).values.argsort()
            assert torch.equal(other_X[rows[0]][:, columns[0]], X[rows[1]][:, columns[1]])
            classes = {tuple(pair) for pair in torch.stack([y[rows[1]], other_y[rows[0]]], 1).tolist()}
            assert len(classes) == 3 == len({new for _, new in classes})
            assert set(X[:n].min(1).values.tolist()) != set(other_X[:n].min(1).values.tolist())
            assert is_valid_split(other_y.numpy(), 3, n)
            seen += 1
    assert seen == FIRST.tables * sum(map(is_again, range(STEPS))) > 0


@pytest.mark.parametrize(("workers", "start"), [(0, 0), (5, 0), (2, FIRST.steps + DISTANCE + BLOCK + 1)])
def test_items_are_the_same_for_any_workers_and_start(workers, start, undisturbed, monkeypatch):
    """Five workers do not divide the distance; the start is the second step of a block of second uses."""
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)
    with Loader(stream(start), StreamConfig(num_workers=workers, prefetch=2)) as loader:
        items = list(loader)
    assert [item.step for item in items] == list(range(start, STEPS))
    for a, b in zip(items, undisturbed[start:], strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("workers", [1, 4, 12])
def test_a_worker_draws_each_table_once_and_keeps_few(workers):
    for worker in range(workers):
        own = stream()
        for step in range(worker, STEPS, workers):
            own.draw(step)
            assert len(own.kept) <= FIRST.tables * DISTANCE
        assert set(own.prior.drawn.values()) == {1}
        assert not any(is_again(step) for step, _ in own.prior.drawn)


def test_ranks_divide_the_tables_of_second_uses(undisturbed):
    first = list(stream(rank=0, ranks=2))
    second = list(stream(rank=1, ranks=2))
    for step, item in enumerate(undisturbed):
        tables = tables_of(first[step]) + tables_of(second[step])
        values = sorted(X.flatten().tolist() for X, _, _ in tables)
        assert values == sorted(X.flatten().tolist() for X, _, _ in tables_of(item))


def test_cells_that_hold_the_mean_of_labeled_rows_stay_in_tables_with_these_rows():
    y = torch.tensor([0.5, -1.0, 2.0, 0.25, -0.5, 1.0])
    table = Table(torch.arange(12.0).view(6, 2), y, 4, 0, missing=0.1)
    splits = set()
    for is_missing in (True, False):
        given = dataclasses.replace(table, missing=0.1 * is_missing)
        for seed in range(8):
            other = use_again(given, rng_at(seed))
            of_y = dict(zip(y.tolist(), table.X.sum(1).tolist(), strict=True))
            assert [of_y[value] for value in other.y.tolist()] == other.X.sum(1).tolist()
            splits.add((is_missing, frozenset(other.y[:4].tolist())))
    assert {labeled for is_missing, labeled in splits if is_missing} == {frozenset(y[:4].tolist())}
    assert len(splits) > 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["curriculum.stages.smoke.uses=3"], r"curriculum\.stages\.smoke\.uses is 3; it must lie in 1\.\.2"),
        (
            ["curriculum.stages.smoke.uses=2", "prior=quantifiers", "model=sequence_tiny", "validation.every=0"],
            r"curriculum\.stages\.smoke\.uses is 2, which needs synthetic tables",
        ),
    ],
)
def test_what_has_no_second_use_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        compose(["experiment=smoke", *settings])


def test_a_dump_holds_each_table_once(tmp_path):
    settings = ["experiment=smoke", "curriculum.stages.smoke.uses=2", f"output={tmp_path}/tables"]
    result = command("prior", "dump", *settings)
    assert result.returncode == 2
    assert "uses is 2; set it in the run that reads the tables" in result.stderr


def test_the_numbers_of_a_table_that_is_shown_are_those_of_training():
    settings = ["experiment=smoke", "curriculum.stages.smoke.uses=2", "seed=3"]
    config = compose(settings)
    step = DISTANCE
    shown = command("prior", "show", *settings, f"step={step}", "table=0").stdout
    steps = range(step, step + 1)
    item = StepStream(configured_prior(config.prior), config.curriculum, config.model, 3, steps).draw(step)
    assert plan_step(config.curriculum, config.model, 3, step).source == 0
    rows = {f"{value:8.3f}" for X, _, _ in tables_of(item) for value in X[0].tolist()}
    first = next(line for line in shown.splitlines() if line.startswith("y "))
    assert {f"{float(value):8.3f}" for value in first.split("X")[1].split()} <= rows
