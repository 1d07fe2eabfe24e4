"""The stream of tables for a training loop of one's own."""

from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader

from priors import Prior, rng_at
from tabicl_train import TableStream, train
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError


def content(item) -> list:
    """The tables of a step as plain lists."""
    return [(pack.X.tolist(), pack.y.tolist(), pack.shapes) for pack in item.packs]


class Keep:
    """Keeps the tables that a run trains on."""

    def __init__(self) -> None:
        self.items = []

    def before_step(self, state, item) -> None:
        self.items.append((item.step, item.tables, content(item)))


def test_the_stream_has_the_tables_of_a_run_for_any_workers_and_from_any_step(tmp_path):
    config = compose(
        [
            *("experiment=smoke", f"run_dir={tmp_path}/run", "trainer.max_steps=5", "stream.num_workers=0"),
            *("curriculum.stages.smoke.group_size=2", "curriculum.stages.smoke.pack_tokens=1500", "seed=7"),
        ]
    )
    trained = Keep()
    train(config, [trained])

    def drawn(workers: int, start: int = 0) -> list:
        stream = TableStream(config.prior, config.curriculum, model=config.model, seed=config.seed, start=start, stop=5)
        loader = DataLoader(stream, batch_size=None, num_workers=workers)
        return [(item.step, item.tables, content(item)) for item in loader]

    assert len(trained.items[0][2]) > 1  # several packs
    assert drawn(workers=0) == trained.items
    assert drawn(workers=2) == trained.items
    assert drawn(workers=2, start=3) == trained.items[3:]


@dataclass
class Shrinking(Prior):
    """A column of some tables is constant, which drops it."""

    def plan(self, spec, seed):
        return seed, (spec.num_rows, spec.num_features)

    def execute(self, plan):
        seed, shape = plan
        rng = rng_at(seed, "numbers")
        columns = torch.from_numpy(rng.standard_normal(shape)).float()
        columns[:, 1] *= int(rng.integers(2))
        return columns, torch.arange(shape[0]) % 2, 2


def test_dense_batches_hold_the_tables_of_a_step_with_zeros_for_dropped_columns():
    sizes = {"rows": (20, 60), "features": 3, "labeled_share": (0.3, 0.6), "tables": 5, "seed": 3, "stop": 4}
    items = list(TableStream(Shrinking(), **sizes))
    batches = list(DataLoader(TableStream(Shrinking(), **sizes, dense=True), batch_size=None))
    assert len({batch.X.shape[1] for batch in batches}) > 1
    assert {2, 3} == {count for batch in batches for count in batch.features.tolist()}
    for item, (stacked, labels, train_size, features) in zip(items, batches, strict=True):
        (pack,) = item.packs
        assert stacked.shape[::2] == (5, int(features.max()))
        for number, (X, y, n) in enumerate(pack.tables()):
            width = X.shape[1]
            assert (n, width) == (train_size, features[number])
            assert torch.equal(stacked[number, :, :width], X)
            assert torch.equal(labels[number], y)
            assert not stacked[number, :, width:].any()


def test_wrong_arguments_are_one_error_with_all_problems():
    curriculum = compose(["experiment=smoke", "curriculum.stages.smoke.group_size=2"]).curriculum
    with pytest.raises(ConfigError) as error:
        TableStream("mlp_scm", curriculum, rows=10, start=8, stop=99, ranks=9, dense=True)
    assert error.value.problems == [
        "rows: the curriculum sets the sizes of tables; leave out one of them",
        "start is 8 and stop is 99; they must satisfy 0 <= start <= stop, and the curriculum ends at 20",
        "a step has 8 tables, but ranks is 9; each rank needs at least one",
        "dense is true, but dense batches are not divided among ranks; give each its own seed",
        "stages.smoke: group_size is 2 and tables 8; a dense batch needs one group in each step",
    ]
