"""What a run measures about itself while it trains."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm
from training_runs import read_rows

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.model.config import family_of
from tabicl_train.model.pack import Pack
from tabicl_train.model.quantiles import guess_loss
from tabicl_train.run.records import Records
from tabicl_train.stream.steps import StepItem, StepStream
from tabicl_train.training import loop
from tabicl_train.training.callbacks import metrics
from tabicl_train.training.callbacks.callback import LoggedSteps
from tabicl_train.training.callbacks.metrics import Metrics, Progress
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.weights.reader import load_model


@pytest.fixture
def printed(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(metrics, "info", lines.append)
    return lines


def watch(config, folder, ranks: Ranks | None = None) -> Metrics:
    """Metrics of steps of which the even ones are logged."""
    watching = Metrics()
    watching.progress = SimpleNamespace(show=lambda row: None, start=lambda step: 0)
    watching.context = SimpleNamespace(
        config=config, logged=LoggedSteps(2, 100), records=Records(folder), loader=SimpleNamespace(waited=0.0),
        ranks=ranks or Ranks(),
    )  # fmt: skip
    return watching


class TwoRanks(Ranks):
    """Two ranks, of which the other one reports these values."""

    def __init__(self, other: list[float]) -> None:
        super().__init__()
        self.size, self.other = 2, other

    def sum(self, values):
        return values + torch.tensor(self.other, dtype=values.dtype)


def tables(*shapes: tuple[int, int, int]) -> Pack:
    return Pack.of((torch.zeros(rows, features), torch.arange(rows) % 2, n) for rows, n, features in shapes)


def after_a_step(config) -> SimpleNamespace:
    """What is read of a module."""
    return SimpleNamespace(
        device=torch.device("cpu"), precision=SimpleNamespace(name="fp32"), loss=torch.tensor(1.0),
        grad_norm=torch.tensor(2.0), skipped=torch.tensor(0),
        model=SimpleNamespace(config=config.model, guess_loss=family_of(config.model).guess_loss),
    )  # fmt: skip


def test_rates_are_those_of_all_ranks_over_the_time_since_the_previous_row(tmp_path, monkeypatch):
    """Two steps of 8 tables each in 4 seconds; this rank computes 3 of them, the other one 5 larger ones."""
    clock = iter([10.0, 14.0, 14.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(metrics, "peak_flops", lambda device, precision, tf32: 1e12 if tf32 else 5e12)
    config = compose(["experiment=smoke"])
    packs = [tables((40, 20, 3), (40, 20, 3)), tables((60, 30, 5))]
    own_cells = 2 * (2 * 40 * 3 + 60 * 5)
    forward = family_of(config.model).forward_flops
    own_flops = 2 * 3 * (2 * forward(config.model, 40, 20, 3) + forward(config.model, 60, 30, 5))
    other_cells, other_flops, other_guess = 10_000, 5e12, 3.5  # the sum of five losses
    watching = watch(config, tmp_path, TwoRanks([other_cells, other_flops, 10, 14, other_guess]))
    watching.start(SimpleNamespace(step=0))
    module = after_a_step(config)
    for step in (0, 1):
        item = StepItem(step, "smoke", 8, packs)
        item.rejections["split"] = 1
        watching.after_step(SimpleNamespace(step=step + 1, module=module), item)
    (row,) = Records(tmp_path).rows("metrics.csv")
    assert float(row["tables_per_s"]) == 2 * 8 / 4
    assert float(row["cells_per_s"]) == (own_cells + other_cells) / 4
    assert float(row["tflops_per_s"]) == pytest.approx((own_flops + other_flops) / 4 / 1e12)
    assert float(row["peak_share"]) == pytest.approx((own_flops + other_flops) / 4 / 1e12 / 2)
    assert float(row["accept_rate"]) == 16 / (16 + 16)
    guesses = [module.model.guess_loss(y, n) for pack in packs for _, y, n in pack.tables()]
    assert float(row["guess_loss"]) == pytest.approx((sum(guesses) + other_guess) / 8)


def test_guessing_the_frequencies_of_the_labels():
    y = torch.tensor([0, 0, 1, 0, 1, 2, 0])  # four labeled rows; class 2 is not among them
    assert guess_loss(y, 4) == pytest.approx(-(math.log(2 / 7) + math.log(1 / 7) + math.log(4 / 7)) / 3)
    assert guess_loss(torch.tensor([1, 1, 1, 0, 1, 1, 1]), 4) == pytest.approx(-math.log(4 / 6))
    assert guess_loss(torch.tensor([3, 3, 1, 3]), 3) == pytest.approx(-math.log(3 / 5))  # of two classes


def test_guessing_the_quantiles_of_numbers():
    y = torch.randn(60, generator=torch.Generator().manual_seed(0))
    a = torch.arange(1, 1000).double() / 1000
    error = y[40:, None].double() - y[:40].double().quantile(a)
    assert guess_loss(y, 40) == pytest.approx(torch.maximum(a * error, (a - 1) * error).mean().item(), rel=1e-6)
    assert guess_loss(torch.tensor([2.0, 2.0, 5.0, 2.0]), 2) == pytest.approx(3 / 4)  # half of 3, and 0


def test_time_left_counts_the_work_of_later_stages(monkeypatch):
    curriculum = compose(["experiment=demo", "curriculum=tabicl_v2"]).curriculum
    work = {id(stage): float(number) for number, stage in enumerate(curriculum.stages.values(), 1)}
    total = sum(stage.steps for stage in curriculum.stages.values())
    line = Progress(curriculum, total, lambda stage: work[id(stage)])
    line.start(0)
    line.started, passed = 0.0, 600.5  # half a second beyond what is shown, so that no rounding matters
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: passed)
    half = next(iter(curriculum.stages.values())).steps // 2
    seconds = passed * (0.5 + 2 + 3) / 0.5
    assert line.time_left({"step": half, "stage": "stage1"}) == (
        f"{tqdm.format_interval(seconds)} left (10:00 of stage1)"
    )
    assert line.time_left({"step": total, "stage": "stage3"}) == "00:00 left"


def test_progress_forgets_a_loss_that_is_not_finite(printed):
    line = Progress(compose(["experiment=smoke"]).curriculum, 20, lambda stage: 1.0)
    line.start(0)
    row = {"stage": "smoke", "tables_per_s": 1.0, "data_wait": 0.0, "memory_gb": 1.0, "skipped": 0}
    for step, loss in enumerate((math.inf, math.nan, 2.0, math.nan, -math.inf, 1.0), 1):
        line.last_line = -math.inf  # so that there is a line
        line.show(row | {"step": step, "loss": loss})
    losses = [text.split("loss ")[1].split(",")[0] for text in printed]
    assert losses == ["inf", "nan", "2.000", "2.000", "2.000", "1.900"]


def scaling_rows(run_dir: Path, *overrides: str) -> list[dict]:
    """The rows of scaling.csv of a short run, of whose steps the even ones are logged."""
    loop.train(compose([
        "experiment=smoke", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu", f"run_dir={run_dir}",
        "trainer.max_steps=4", "trainer.log_every=2", "curriculum.stages.smoke.learning_rate=0.03", *overrides,
    ]))  # fmt: skip
    return read_rows(run_dir / "scaling.csv")


def test_rows_hold_multiplier_and_gate_of_every_layer(tmp_path):
    rows = scaling_rows(tmp_path)
    layers = ["column.0", "icl.0", "icl.1"]
    assert [row["step"] for row in rows] == ["2"] * 3 + ["4"] * 3
    assert [row["layer"] for row in rows] == layers * 2

    config = compose(["experiment=smoke", "prior=dummy"])
    stream = StepStream(configured_prior(config.prior), config.curriculum, config.model, config.seed, [1, 3])
    for item, of_step in zip(stream, (rows[:3], rows[3:]), strict=True):
        labeled = [n for pack in item.packs for _, n, _ in pack.shapes]
        for row in of_step:
            assert int(row["n_smallest"]) == min(labeled)
            assert int(row["n_largest"]) == max(labeled)

    network = load_model(str(tmp_path))
    for row, (name, layer) in zip(rows[3:], network.named_scalings(), strict=True):
        assert row["layer"] == name
        assert float(row["gate_std"]) > 0  # the gate starts at 1, and then learns
        multiplier = layer.multipliers(int(row["n_largest"])).abs().max().item()
        assert float(row["at_largest"]) == pytest.approx(multiplier)


def test_a_layer_without_a_gate_has_empty_cells(tmp_path):
    rows = scaling_rows(tmp_path, "model.icl_scaling=ssmax")
    gates = {row["layer"]: (row["gate_mean"], row["gate_std"]) for row in rows}
    assert gates["icl.0"] == gates["icl.1"] == ("", "")
    assert float(gates["column.0"][1]) > 0
