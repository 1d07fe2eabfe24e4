"""What a run says about itself while it trains."""

from types import SimpleNamespace

import pytest

from tabicl_train.callbacks import metrics
from tabicl_train.callbacks.metrics import SECONDS, Feeding, Metrics
from tabicl_train.config.compose import compose
from tabicl_train.distributed.ranks import Ranks


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(metrics, "info", lines.append)
    return lines


def test_tables_drawn_and_taken_are_compared_once_a_stage_without_the_first_steps(said):
    feeding = Feeding()
    feeding.add("stage1", 640, 1000.0, 1000.0, 3)  # while kernels are made
    feeding.add("stage1", 100, SECONDS / 2, 7.5, 3)
    assert not said
    for _ in range(3):
        feeding.add("stage1", 100, SECONDS / 2, 7.5, 3)
    assert said == ["feeding   3 workers draw 40 tables/s, training takes 20 (stage1)"]
    feeding.add("stage2", 1, 500.0, 1.0, 1)
    feeding.add("stage2", 50, 1.0, 4 * SECONDS, 1)  # training waits: its own time is short
    assert said[1] == "feeding   1 worker draws 1.25 tables/s, training takes 50 (stage2)"
    assert said[2].startswith("warning   training waits for tables") and "stream.num_workers" in said[2]
    assert len(said) == 3


def test_a_process_that_draws_its_own_tables_is_not_compared(said):
    feeding = Feeding()
    for _ in range(3):
        feeding.add("stage1", 10, SECONDS, SECONDS, 0)
    assert not said


@pytest.mark.parametrize("compiled", [False, True])
def test_many_graphs_are_told_once(compiled, said, monkeypatch):
    config = compose(["experiment=smoke", f"trainer.compile={str(compiled).lower()}"])
    graphs = iter([100, 124, 125, 130])
    monkeypatch.setattr(metrics, "count_graphs", lambda: next(graphs))
    watching = Metrics(config, None, SimpleNamespace(waited=0.0), Ranks(), lambda values, step: None)
    watching.on_train_start(step=0)  # 100 graphs of other runs of this process
    for _ in range(3):
        watching.watch_graphs()
    assert [line[:19] for line in said] == (["warning   25 graphs"] if compiled else [])
