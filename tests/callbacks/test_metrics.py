"""What a run says about itself while it trains."""

from types import SimpleNamespace

import pytest
import torch

from tabicl_train.callbacks import metrics
from tabicl_train.callbacks.metrics import SECONDS, Feeding, Metrics
from tabicl_train.config.compose import compose
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.model.families import family_of
from tabicl_train.model.pack import Pack
from tabicl_train.run_dir.records import Records
from tabicl_train.stream import StepItem


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


class TwoRanks(Ranks):
    """Two ranks, of which the other one reports the values of `others`, in the order of its calls."""

    def __init__(self, others: list[list[float]]) -> None:
        super().__init__()
        self.size, self.others = 2, iter(others)

    def sum(self, values):
        return values + torch.tensor(next(self.others), dtype=values.dtype)


def tables(*shapes: tuple[int, int, int]) -> Pack:
    return Pack.of((torch.zeros(rows, features), torch.arange(rows) % 2, n) for rows, n, features in shapes)


def test_rates_are_those_of_all_ranks_over_the_time_since_the_previous_row(tmp_path, monkeypatch):
    """Two steps of 8 tables each in 4 seconds; this rank computes 3 of them, the other one 5 larger ones."""
    clock = iter([0.0, 10.0, 14.0, 14.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    config = compose(["experiment=smoke", "trainer.log_every=2"])
    packs = [tables((40, 20, 3), (40, 20, 3)), tables((60, 30, 5))]
    own_cells = 2 * (2 * 40 * 3 + 60 * 5)
    forward = family_of(config.model).forward_flops
    own_flops = 2 * 3 * (2 * forward(config.model, 40, 20, 3) + forward(config.model, 60, 30, 5))
    other_cells, other_flops = 10_000, 5e12
    ranks = TwoRanks([[other_cells, other_flops]])
    loader = SimpleNamespace(waited=0.0, drawers=0)
    watching = Metrics(config, Records(tmp_path), loader, ranks, lambda values, step: None)
    watching.progress = SimpleNamespace(show=lambda row: None)
    watching.start_window()
    monkeypatch.setattr(metrics, "peak_flops", lambda *_: 1e12)
    module = SimpleNamespace(
        device=torch.device("cpu"), precision=SimpleNamespace(name="fp32"), loss=torch.tensor(1.0),
        grad_norm=torch.tensor(2.0), skipped=torch.tensor(0),
    )  # fmt: skip
    for step in (0, 1):
        watching.on_train_batch_end(step=step + 1, item=StepItem(step, "smoke", 8, packs), module=module)
    (row,) = Records(tmp_path).rows("metrics.csv")
    assert float(row["tables_per_s"]) == 2 * 8 / 4
    assert float(row["cells_per_s"]) == (own_cells + other_cells) / 4
    assert float(row["tflops_per_s"]) == pytest.approx((own_flops + other_flops) / 4 / 1e12)
    assert float(row["peak_share"]) == pytest.approx((own_flops + other_flops) / 4 / 1e12 / 2)
