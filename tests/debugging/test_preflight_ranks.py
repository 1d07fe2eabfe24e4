"""The preflight of several ranks: what it says when all is well, and that it notices when something is not."""

import json
import math
import os
import re
import signal
from pathlib import Path
from unittest import mock

import forked
import pytest
import torch
import torch.distributed as dist

from tabicl_train import module, stream
from tabicl_train import train as training
from tabicl_train.config.compose import compose
from tabicl_train.debugging import exchange_check
from tabicl_train.debugging.preflight import preflight
from tabicl_train.errors import ConfigError
from tabicl_train.gradients import Gradients

SETTINGS = ["experiment=smoke", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu", "preflight_steps=3"]
DRAW, EXCHANGE, ADD, WEIGHTS = stream.draw_table, Gradients.exchange, Gradients.add, training.broadcast_weights


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def other_tables(prior, batch, seed, step, index):
    """Rank 1 draws other tables from the second step on."""
    return DRAW(prior, batch, seed + (rank() == 1 and step > 0), step, index)


def scaled(self, gradients, loss):
    """Rank 1 forgets to divide by something."""
    ADD(self, tuple(2 * g for g in gradients) if rank() == 1 else gradients, loss)


def without_a_parameter(self):
    """The exchange leaves out one parameter: each rank keeps its own gradient."""
    own = self.views[3].clone()
    EXCHANGE(self)
    self.views[3].copy_(own)


def averaged(self):
    """The exchange takes the mean over the ranks instead of the sum."""
    EXCHANGE(self)
    self.flat.div_(dist.get_world_size())


def other_weights(module):
    """Rank 1 has a last bit of one weight of its own."""
    WEIGHTS(module)
    if rank() == 1:
        with torch.no_grad():
            weight = module.model.icl_predictor.decoder[0].weight
            weight[0, 0] = weight[0, 0].nextafter(torch.tensor(math.inf))


FAULTS = {
    "none": (stream, "draw_table", DRAW),
    "other tables": (stream, "draw_table", other_tables),
    "scaled": (Gradients, "add", scaled),
    "without a parameter": (Gradients, "exchange", without_a_parameter),
    "averaged": (Gradients, "exchange", averaged),
    "other weights": (training, "broadcast_weights", other_weights),
}


def check(folder: str, fault: str) -> None:
    """A preflight with a fault; writes what it reports on this rank."""
    found = []
    with mock.patch.object(*FAULTS[fault]):
        try:
            preflight(compose([*SETTINGS, f"run_dir={folder}/run"]))
        except ConfigError as error:
            found = error.problems
    Path(folder, f"{fault}.{os.environ['RANK']}").write_text(json.dumps(found))


@pytest.mark.multi_process
def test_faults_are_found_and_told_alike_on_all_ranks(tmp_path):
    found = {}
    for fault in FAULTS:
        codes = forked.run_ranks(check, str(tmp_path), fault, folder=tmp_path)
        assert codes == [0, 0], (tmp_path / "stderr.0").read_text()
        found[fault], of_other = (json.loads((tmp_path / f"{fault}.{number}").read_text()) for number in (0, 1))
        assert found[fault] == of_other
    told = (tmp_path / "stderr.0").read_text()
    assert found.pop("none") == []
    patterns = {
        "other tables": r"step 1: the gradients of rank 1 differ from those that rank 0 computes for it, most in \S+, ",
        "scaled": r"step 0: the gradients of rank 1 differ from those that rank 0 computes for it, most in \S+, by",
        "without a parameter": r"step 0: rank 1 holds other gradients than rank 0 after the exchange, most different ",
        "averaged": r"step 0: after the exchange all ranks hold gradients that differ from those of one process, most ",
        "other weights": r"step 0: rank 1 has other weights than rank 0 in model\.icl_predictor\.decoder\.0\.weight$",
    }
    assert found.keys() == patterns.keys()
    for name, pattern in patterns.items():
        (problem,) = found[name]
        assert re.match(f"preflight, {pattern}", problem), problem
    model = compose(SETTINGS).model
    names = [f"model.{name}" for name, _ in module.family_of(model)(model).named_parameters()]
    assert f" {names[3]}, by " in found["without a parameter"][0]
    # The ranks' packs are cut otherwise than those of one process, so their sums are rounded otherwise.
    lines = [line for line in told.splitlines() if line.startswith("preflight 2 ranks")]
    (rounding,) = [
        re.search(r"and the gradients match those of one process to (\S+), in steps 0\.\.2$", line)[1] for line in lines
    ]
    assert 0 < float(rounding) < 1e-6
    assert (tmp_path / "stderr.1").read_text() == ""
    assert not (tmp_path / "run").exists()


def preflight_with_scaled_gradients(*settings: str) -> None:
    Gradients.add = scaled
    forked.train(*settings)


def preflight_that_loses_rank_1(*settings: str) -> None:
    def end(self, **_):
        if rank() == 1:
            signal.raise_signal(signal.SIGKILL)

    exchange_check.ExchangeCheck.on_train_batch_end = end
    forked.train(*settings)


@pytest.mark.multi_process
def test_a_mismatch_ends_all_ranks_with_code_2_and_one_line(tmp_path):
    settings = [*SETTINGS, f"run_dir={tmp_path}/run", "preflight=true"]
    assert forked.run_ranks(preflight_with_scaled_gradients, *settings, folder=tmp_path) == [2, 2]
    (line,) = (tmp_path / "stderr.0").read_text().splitlines()
    assert line.startswith("error: preflight, step 0: the gradients of rank 1 differ")
    assert (tmp_path / "stderr.1").read_text() == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.multi_process
def test_a_lost_rank_ends_the_preflight(tmp_path):
    settings = [*SETTINGS, f"run_dir={tmp_path}/run", "preflight=true"]
    with forked.ranks(preflight_that_loses_rank_1, *settings, folder=tmp_path) as processes:
        assert forked.exit_code(processes[1]) == -signal.SIGKILL
        assert forked.exit_code(processes[0]) == 1
    told = (tmp_path / "stderr.0").read_text()
    assert "error: rank 0 failed: RuntimeError: " in told, told  # torchrun names the rank that was killed
    assert not (tmp_path / "run").exists()


@pytest.mark.multi_process
def test_precisions_are_compared_on_all_ranks_from_the_newest_checkpoint(tmp_path):
    settings = [*SETTINGS, f"run_dir={tmp_path}/run"]
    alone = forked.start(forked.train, *settings, "trainer.max_steps=4", "checkpoint.every=4")
    assert forked.exit_code(alone) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    settings += ["preflight=true", "trainer.precision=bf16"]
    assert forked.run_ranks(forked.train, *settings, folder=tmp_path) == [0, 0]
    lines = (tmp_path / "stderr.0").read_text().splitlines()
    assert re.match(r"preflight 2 ranks hold the same weights and gradients.* in steps 4\.\.6$", lines[0])
    assert "steps 4..6" in lines[1] and lines[-1] == "preflight bf16 is fit for this run"
    assert [line.split()[0] for line in lines[3:-1]] == ["4", "5", "6"]
    assert (tmp_path / "stderr.1").read_text() == ""
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_difference_is_told_by_parameter_and_relative_to_all_gradients():
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 50))]
    gradients = Gradients(parameters, [])
    gradients.views[0].copy_(torch.tensor([3.0, 0.0, 4.0]))
    gradients.loss.fill_(2.0)
    other = gradients.flat.clone()
    gradients.views[1][1, 49] += 0.5
    labels = ["a", "b", "the loss"]
    assert exchange_check.largest(gradients, labels, gradients.flat - other, other) == pytest.approx((0.1, "b"))
    gradients.loss.fill_(3.0)
    assert exchange_check.largest(gradients, labels, gradients.flat - other, other) == (0.5, "the loss")
    gradients.views[0][0] = math.nan
    size, label = exchange_check.largest(gradients, labels, gradients.flat - other, other)
    assert math.isnan(size) and label == "a"
