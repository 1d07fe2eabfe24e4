"""Which layers have kernels, and what a run says of them; results are in model/test_triton_attention.py."""

import pytest
import torch
from networks import small_network
from torch import nn

from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.model import kernels
from tabicl_train.model.attention import Attention, Block
from tabicl_train.model.pack import Pack
from tabicl_train.model.stages import InducedAttention
from tabicl_train.training import state
from tabicl_train.training.distributed.ranks import Ranks

SIZES = {
    "embed_dim": 32, "col_num_heads": 2, "row_num_heads": 2, "col_num_blocks": 1, "row_num_blocks": 2,
    "col_num_inducing": 4, "icl_num_blocks": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "layers", "rules"),
    [
        ({}, 4, 1),  # two in a block of columns, and two blocks of rows; the scaling rule of in-context learning
        ({"col_scaling": "ssa"}, 3, 1),  # in place of softmax
        ({"icl_scaling": "ssmax"}, 4, 0),
        ({"col_num_inducing": 129}, 2, 1),
        ({"row_num_heads": 8}, 2, 1),  # heads of 4 values
        ({"embed_dim": 96}, 0, 1),  # of 48
        ({"dropout": 0.1}, 0, 1),
    ],
)
def test_layers_with_kernels(options, layers, rules):
    network = small_network(**SIZES | options)
    found = kernels.kernels_of(network, torch.bfloat16)
    assert (len(found.attention), len(found.scaling)) == (layers, rules)
    found.use()
    attention = [layer for layer in network.modules() if isinstance(layer, Attention)]
    cuda = torch.device("cuda")
    for dtype, number in ((torch.bfloat16, layers), (torch.float32, 0)):  # which have not proved themselves in fp32
        assert sum(layer.takes_kernels(cuda, dtype) for layer in attention) == number
    network.set_col_attention_fp32("auto")  # PyTorch's attention of columns is inexact in bf16
    for name, layer in network.named_attentions():
        if name.startswith("column"):
            assert layer.fp32 != layer.takes_kernels(cuda, torch.bfloat16)
    assert not kernels.kernels_of(network, torch.float16).attention


def bare(parent):
    """Return a block of a plug-in that has nothing of ours but the class."""

    class Bare(parent):
        def __init__(self):
            nn.Module.__init__(self)

        def forward(self, x, *_, **__):
            return x

    return Bare()


class OwnAttention(nn.Module):
    def forward(self, x, *_):
        return x


def test_blocks_of_a_plug_in_need_no_attributes_of_ours():
    network = small_network(**SIZES)
    network.col_embedder.tf_col["blocks"][0] = bare(InducedAttention)
    network.row_interactor.tf_row["blocks"][0] = bare(Block)
    network.row_interactor.tf_row["blocks"][1].attn = OwnAttention()
    found = kernels.kernels_of(network, torch.bfloat16)
    assert (found.attention, len(found.scaling)) == ([], 1)
    proofs = kernels.proofs(network, found, torch.device("cpu"), torch.bfloat16)
    assert [name for name, _ in proofs] == ["scaling"]
    network(Pack.stack(torch.randn(1, 6, 2), torch.zeros(1, 4, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("problem", "stage", "said"),
    [
        (
            None,
            "auto",
            "kernels of this package in 4 layers of rows and columns, in bf16, which agree with float64; column "
            "attention in bf16, as",
        ),
        (None, "false", "kernels of this package in 4 layers of rows and columns, in bf16, which agree with float64\n"),
        (None, "auto model.col_num_inducing=129", "kernels of this package in 2 layers of rows and columns, in bf16, "),
        ("Triton is not installed", "auto", "PyTorch's, since Triton is not installed; column attention in fp32, as"),
        ("Triton is not installed", "false", "PyTorch's, since Triton is not installed\n"),
    ],
)
def test_a_run_says_which_attention_it_uses_and_why(problem, stage, said, monkeypatch, capsys):
    monkeypatch.setattr(state, "problem_of_kernels", lambda *_: problem)
    words = [*f"curriculum.stages.smoke.col_attention_fp32={stage}".split(), "trainer.accelerator=cpu"]
    config = compose(["experiment=smoke", "run_dir=unused", "trainer.precision=bf16", *words])
    module = state.untrained_module(config)
    state.choose_attention(module, config, Ranks())
    found = capsys.readouterr().err
    assert f"attention {said}" in found
    assert module.uses_kernels == (problem is None)
    module.set_column_precision(config.curriculum.stages["smoke"])
    in_fp32 = {layer.fp32 for name, layer in module.model.named_attentions() if "column" in name}
    assert in_fp32 == {"column attention in fp32" in found}


def test_why_kernels_stay_off(monkeypatch):
    network = small_network(**SIZES)
    given = (torch.device("cuda"), torch.bfloat16)
    assert kernels.problem_of_kernels(network, "torch", *given) == "trainer.attention is torch"
    monkeypatch.setattr(kernels, "is_installed", lambda _: False)
    assert kernels.problem_of_kernels(network, "auto", *given) == "Triton is not installed"
    on_cpu = kernels.problem_of_kernels(network, "auto", torch.device("cpu"), torch.bfloat16)
    assert on_cpu == "kernels do not run on device cpu"


def test_a_resumed_run_says_that_its_attention_has_changed(capsys):
    config = compose(["experiment=smoke", "run_dir=unused", "trainer.accelerator=cpu"])
    module = state.untrained_module(config)
    module.uses_kernels = True
    saved = {"config": {"optimizer": {"name": "muon"}, "trainer": {"precision": "bf16"}}}
    module.on_save_checkpoint(saved)
    module.on_load_checkpoint(saved)
    assert capsys.readouterr().err == ""
    module.uses_kernels = False
    module.on_load_checkpoint(saved)
    line = "changed   attention was computed by the kernels of this package, now by PyTorch\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trainer.attention=flash", "trainer.attention is 'flash'; it must be one of auto, torch"),
        ("trainer.triton=true", "trainer.triton: removed in version 0.3.0; trainer.attention=auto, the default"),
        ("curriculum.stages.smoke.col_attention_fp32=yes", "it must be true, false, auto or null"),
    ],
)
def test_settings_that_are_refused(word, said):
    with pytest.raises(ConfigError) as error:
        compose(["experiment=smoke", "run_dir=unused", word])
    assert said in str(error.value)
