"""The exchange of gradients between two ranks: that the check notices when something is not as it should be."""

import json
import math
from pathlib import Path
from unittest import mock

import forked
import pytest
import torch
import torch.distributed as dist
from training_runs import SHORT_RUN

from tabicl_train.check.gpu.exchange import check_exchange
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.errors import ConfigError
from tabicl_train.stream import steps
from tabicl_train.stream.steps import StepStream
from tabicl_train.training import rank_process
from tabicl_train.training import state as training_state
from tabicl_train.training.distributed.processes import read_launch
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.module import Gradients

DRAW, EXCHANGE, WEIGHTS = steps.draw_table, Gradients.exchange, training_state.broadcast_weights


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
    "none": (steps, "draw_table", DRAW),
    f"step 1: {ALONE}": (steps, "draw_table", other_tables),
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
    rank_process.set_up_process(config.trainer)
    launch = read_launch()
    ranks, found = Ranks(launch), {}
    rank_process.open_process_groups(config.trainer, launch, ranks)
    prior = configured_prior(config.prior)
    own = StepStream(prior, config.curriculum, config.model, config.seed, range(2), launch.rank, launch.size)
    for fault, patch in FAULTS.items():
        with mock.patch.object(*patch):
            try:
                rounding = check_exchange(
                    *training_state.build_module(config, None, ranks, torch.device("cpu")), own, ranks
                )
                found["none"] = 0 < rounding < 1e-6  # packs of two ranks are cut otherwise, and rounded otherwise
            except ConfigError as error:
                found[fault] = error.problems
    Path(folder, f"{launch.rank}.json").write_text(json.dumps(found))
    rank_process.close_process_group(ranks)


@pytest.mark.slow  # of tabicl-gpu-check; that ranks train as one process is in test_resume.py
def test_faults_of_the_exchange_are_found_and_told_alike_on_all_ranks(tmp_path):
    codes = forked.run_ranks(check_faults, str(tmp_path), folder=tmp_path)
    assert codes == [0, 0], (tmp_path / "stderr.0").read_text()
    found, of_other = (json.loads((tmp_path / f"{number}.json").read_text()) for number in (0, 1))
    assert found == of_other and found.keys() == FAULTS.keys() and found.pop("none")
    for expected, (problem,) in found.items():
        assert problem.startswith(expected), problem
