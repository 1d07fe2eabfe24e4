"""The preflight: what it says when all is well, and that it notices when something is not."""

import json
import math
import os
import shutil
from pathlib import Path
from unittest import mock

import forked
import pytest
import torch
import torch.distributed as dist
from training_runs import SHORT_RUN, read_metrics, train_short_run

from tabicl_train import module, process, stream
from tabicl_train import state as training_state
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.debugging import preflight as checks
from tabicl_train.distributed.processes import read_launch
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.errors import ConfigError
from tabicl_train.module import Gradients
from tabicl_train.stream import StepStream

BF16 = [*SHORT_RUN, "trainer.precision=bf16", "preflight_steps=3"]
QUERY_LOSSES = module.query_losses
DRAW, EXCHANGE, WEIGHTS = stream.draw_table, Gradients.exchange, training_state.broadcast_weights


def test_fp32_has_nothing_to_compare(capsys):
    checks.preflight(compose([*SHORT_RUN]))
    assert "nothing to compare" in capsys.readouterr().err


def test_a_preflight_takes_the_steps_of_a_run_in_both_precisions_and_writes_nothing(tmp_path, monkeypatch, capsys):
    """In fp32 to the bit, although both begin with the momenta of the same checkpoint."""
    for steps in (4, 7):
        train_short_run(tmp_path / "whole", f"trainer.max_steps={steps}")
        if steps == 4:
            shutil.copytree(tmp_path / "whole", tmp_path / "run")
    rows, conclude = [], checks.conclude
    monkeypatch.setattr(checks, "conclude", lambda *arguments: rows.append(arguments[:2]) or conclude(*arguments))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    capsys.readouterr()
    checks.preflight(compose([*BF16, f"run_dir={tmp_path}/run"]))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    ((exact, mixed),) = rows
    whole = [(float(row["loss"]), float(row["grad_norm"])) for row in read_metrics(tmp_path / "whole")]
    assert [row[:2] for row in exact] == whole[4:]
    for a, b in zip(exact, mixed, strict=True):
        assert b == pytest.approx(a, rel=0.05) and b[:2] != a[:2]
    changed, *lines = capsys.readouterr().err.splitlines()
    assert changed == "changed   trainer.precision was auto, is bf16"
    assert lines[0] == "preflight fp32 and bf16 mixed, fp32 weights (as configured), steps 4..6"
    assert [line.split()[0] for line in lines[2:-1]] == ["4", "5", "6"]
    assert lines[-1] == "preflight bf16 is fit for this run"
    with pytest.raises(ConfigError, match="the run is finished, no steps are left"):
        checks.preflight(compose([*BF16, f"run_dir={tmp_path}/whole", "trainer.max_steps=7"]))
    with pytest.raises(ConfigError, match=r"is another run: model\.embed_dim was 16, is 8"):
        checks.preflight(compose([*BF16, f"run_dir={tmp_path}/run", "model.embed_dim=8"]))


@pytest.mark.parametrize(("factor", "words"), [(1.2, "the loss of bf16 is"), (math.nan, "bf16 gives loss nan")])
def test_deviations_from_fp32_are_refused(factor, words, monkeypatch):
    def worse_in_bf16(*arguments):
        return QUERY_LOSSES(*arguments) * (factor if torch.is_autocast_enabled("cpu") else 1.0)

    monkeypatch.setattr(module, "query_losses", worse_in_bf16)
    with pytest.raises(ConfigError, match=words):
        checks.preflight(compose(BF16))


def test_each_difference_has_its_limit():
    reference = [checks.Measured(2.0, 1.0, 5.0)] * 10
    assert checks.differences(reference, [checks.Measured(2.03, 1.2, 5.5)] * 10, "bf16") == []
    for mixed, words in (
        ([checks.Measured(2.0, 1.0, 5.0)] * 9 + [checks.Measured(2.0, 1.0, 7.0)], "largest multiplier of bf16 is 7"),
        ([checks.Measured(2.0, 0.7, 5.0)] * 10, "gradient norm of bf16 is 0.7"),
        ([checks.Measured(2.06, 1.0, 5.0)] * 10, "the loss of bf16 is 2.0600"),
    ):
        (problem,) = checks.differences(reference, mixed, "bf16")
        assert words in problem
    overflow = [checks.Measured(2.0, math.inf, 5.0)] * 2 + reference[2:]
    assert checks.differences(reference, overflow, "fp16") == []
    assert "gradient norm inf in step 0 of the preflight" in checks.differences(reference, overflow, "bf16")[0]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def other_tables(prior, batch, seed, step, *rest):
    """Rank 1 draws other tables from the second step on."""
    return DRAW(prior, batch, seed + (rank() == 1 and step > 0), step, *rest)


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


ALONE = "the gradients of 2 ranks differ from those of one process, most in "
FAULTS = {
    "none": (stream, "draw_table", DRAW),
    f"step 1: {ALONE}": (stream, "draw_table", other_tables),
    f"step 0: {ALONE}the loss, by 5.0e-01 of their norm": (Gradients, "exchange", averaged),
    "step 0: the weights differ from those of rank 0 in model.icl_predictor.decoder.0.weight (rank 1)": (
        training_state,
        "broadcast_weights",
        other_weights,
    ),
}


def check_faults(folder: str) -> None:
    """The check of the exchange with each fault; writes what it reports on this rank."""
    config = compose([*SHORT_RUN, "curriculum.stages.smoke.clip=inf"])
    process.set_up_process(config.trainer)
    launch = read_launch()
    ranks, found = Ranks(launch), {}
    fabric = process.open_fabric(config.trainer, launch, ranks)
    prior = configured_prior(config.prior)
    own = StepStream(prior, config.curriculum, config.model, config.seed, range(2), launch.rank, launch.size)
    for fault, patch in FAULTS.items():
        with mock.patch.object(*patch):
            try:
                checks.check_exchange(*training_state.build_module(config, None, ranks, fabric), own, ranks)
            except ConfigError as error:
                found[fault] = error.problems
    Path(folder, f"{launch.rank}.json").write_text(json.dumps(found))
    process.close_process_group(ranks)


def test_faults_of_the_exchange_are_found_and_told_alike_on_all_ranks(tmp_path):
    codes = forked.run_ranks(check_faults, str(tmp_path), folder=tmp_path)
    assert codes == [0, 0], (tmp_path / "stderr.0").read_text()
    found, of_other = (json.loads((tmp_path / f"{number}.json").read_text()) for number in (0, 1))
    assert found == of_other and found.keys() == FAULTS.keys() - {"none"}
    for expected, (problem,) in found.items():
        assert problem.startswith(f"preflight, {expected}"), problem
    (line,) = (tmp_path / "stderr.0").read_text().splitlines()
    start = "preflight 2 ranks hold the same weights and gradients, and the gradients match those of one process to "
    # The ranks' packs are cut otherwise than those of one process, so their sums are rounded otherwise.
    assert line.startswith(start)
    assert line.endswith(", in steps 0..1")
    assert 0 < float(line.split()[-4][:-1]) < 1e-6


def test_a_preflight_of_two_ranks_checks_the_exchange_and_then_the_precision(tmp_path):
    settings = [*BF16, "preflight=true", f"run_dir={tmp_path}/run"]
    assert forked.run_ranks(forked.train_command, *settings, folder=tmp_path) == [0, 0]
    lines = (tmp_path / "stderr.0").read_text().splitlines()
    assert lines[0].startswith("preflight 2 ranks hold the same")
    assert lines[-1] == "preflight bf16 is fit for this run"
    assert (tmp_path / "stderr.1").read_text() == ""
    assert not os.path.exists(tmp_path / "run")
