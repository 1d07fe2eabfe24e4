"""Copies of weights in 16 bits, instead of autocast's own casts."""

from dataclasses import replace

import pytest
import torch
from networks import TINY, randomize
from tiers import slow_except
from torch import nn

from tabicl_train.config.schema import CurriculumConfig, OptimizerConfig, StageConfig
from tabicl_train.model import TabICL
from tabicl_train.model.pack import Pack
from tabicl_train.stream.steps import StepItem
from tabicl_train.training import compiling
from tabicl_train.training.module import TrainedNetwork
from tabicl_train.training.precision import Precision


def penalty(predictions, pack, network):
    """An objective that reads a weight, of which the network reads a copy."""
    return network.losses(predictions, pack) + 0.1 * network.icl_predictor.decoder[0].weight.square().sum()


def share(network):
    blocks = network.icl_predictor.tf_icl["blocks"]
    for block in blocks[1:]:
        block.linear1.weight = blocks[0].linear1.weight


def replace_head(network):
    width, outputs = network.config.row_dim, network.config.outputs
    network.icl_predictor.decoder = nn.Sequential(
        nn.Linear(width, 8), nn.Dropout(0.0), nn.ReLU(), nn.Linear(8, outputs)
    )


def normalize_weights(network):
    nn.utils.parametrizations.weight_norm(network.icl_predictor.tf_icl["blocks"][0].linear1)


class OwnStage(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, *arguments):
        return self.stage(*arguments)


def own_stage(network):
    network.row_interactor = OwnStage(network.row_interactor)


CHANGES = {
    "weights that blocks share": share,
    "another head": replace_head,
    "weights of another parametrization": normalize_weights,
    "a stage of another class": own_stage,
}
CASES = {
    "plain": {},
    "norms without bias": {"bias_free_ln": True},
    "no affine output, disjoint groups": {"col_affine": False, "col_grouping": "disjoint"},
    "columns in fp32": {"col_attention_fp32": True},
    "ssa": {"icl_scaling": "ssa", "ff_factor": 2},
    "recomputed": {"checkpoint_rows": 10},
    "dropout": {"dropout": 0.2},
    "frozen": {},
    "objective": {},
    "fp16": {},
    "compiled": {},
    **{name: {} for name in CHANGES},
}


# Tracing the compiled case takes a minute; the others take half a second to two.
SLOW = {"compiled", "objective", "dropout", "columns in fp32"}


@pytest.mark.parametrize("case", slow_except(CASES, CASES.keys() - SLOW))
def test_steps_are_those_of_autocast_to_the_bit(case, monkeypatch):
    def train() -> list[torch.Tensor]:
        stages = {"a": StageConfig(frozen=["column"] if case == "frozen" else []), "b": StageConfig()}
        precision = Precision("fp16" if case == "fp16" else "bf16", "")
        torch.manual_seed(0)
        module = TrainedNetwork(
            replace(TINY, **CASES[case]), CurriculumConfig(stages), OptimizerConfig("muon"), precision, seed=0,
            objective=penalty if case == "objective" else None,
        )  # fmt: skip
        CHANGES.get(case, lambda network: None)(module.model)  # as a plug-in does
        randomize(module.model)
        if case == "compiled":
            torch._dynamo.reset()
            compiling.compile_blocks(module.model, backend="aot_eager")
        optimizer = module.configure_optimizers()
        losses = []
        generator = torch.Generator().manual_seed(0)
        for step in (0, 1, stages["a"].steps, stages["a"].steps + 1):
            packs = []
            for sizes in ([(30, 20, 4), (25, 7, 3)], [(41, 11, 2)]):
                tables = [(torch.randn(N, M, generator=generator), n) for N, n, M in sizes]
                packs.append(Pack.of((X, (X[:, 0] > 0).long(), n) for X, n in tables))
            module.train_on(StepItem(step, "", 3, packs), step, 0, optimizer)
            losses.append(module.loss)
        assert not any(p.dtype != torch.float32 for p in module.model.parameters())
        return [*losses, *module.gradients.flat, *module.model.state_dict().values()]

    copied = train()
    monkeypatch.setattr(TabICL, "products", lambda self: iter(()))
    for ours, autocasts in zip(copied, train(), strict=True):
        if case == "objective":  # gradients of the copy and of the weight are added in another order
            torch.testing.assert_close(ours, autocasts, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(ours, autocasts)
