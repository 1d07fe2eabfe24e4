from pathlib import Path

import pytest
import torch
from runs import last, metrics
from short_runs import Poison, run

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import TrainerConfig
from tabicl_train.gradients import Gradients
from tabicl_train.model.pack import Pack
from tabicl_train.module import Pretraining
from tabicl_train.precision import LossScale, choose


def test_the_default_is_bf16_on_a_gpu_that_has_it_and_fp32_elsewhere(monkeypatch):
    assert str(choose(TrainerConfig(accelerator="cpu"))) == "fp32 (the default on a CPU)"
    assert str(choose(TrainerConfig(accelerator="cpu", precision="bf16"))) == "bf16 mixed, fp32 weights (as configured)"
    for supported, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s)
        assert choose(TrainerConfig(accelerator="cuda")).name == expected
    assert choose(TrainerConfig(accelerator="cuda", precision="fp16")).name == "fp16"


def test_the_loss_scale_halves_on_overflow_and_doubles_after_2000_good_steps():
    scale = LossScale(True, torch.device("cpu"))
    yes, no = torch.tensor(True), torch.tensor(False)
    scale.update(no)
    assert scale.scale == 2**15
    for _ in range(1999):
        scale.update(yes)
    assert scale.scale == 2**15
    scale.update(yes)
    assert scale.scale == 2**16 and scale.good_steps == 0
    unused = LossScale(False, torch.device("cpu"))
    unused.update(no)
    assert unused.scale == 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_stays_near_fp32_and_keeps_fp32_weights(precision, tmp_path):
    for name in ("fp32", precision):
        run(tmp_path / name, f"trainer.precision={name}", "prior=mlp_scm", "trainer.max_steps=6")
    pairs = list(zip(metrics(tmp_path / "fp32"), metrics(tmp_path / precision), strict=True))
    for a, b in pairs:
        assert float(b["loss"]) == pytest.approx(float(a["loss"]), rel=0.03)
        assert float(b["grad_norm"]) == pytest.approx(float(a["grad_norm"]), rel=0.15)  # the loss scale is taken out
    assert any(a["loss"] != b["loss"] for a, b in pairs)
    weights = last(tmp_path / precision)["state_dict"].values()
    assert all(w.dtype == torch.float32 for w in weights)


FEW = "curriculum.stages.smoke.tables=4"  # half precision is slow on a CPU


@pytest.mark.slow
def test_fp16_finds_the_scale_of_its_loss_and_keeps_it_over_a_restart(tmp_path, monkeypatch):
    # So large a scale overflows at first; neither the guard nor the weights mind.
    monkeypatch.setattr(LossScale, "__init__", large_scale(LossScale.__init__))
    settings = ("trainer.precision=fp16", "curriculum.stages.smoke.steps=12", FEW)
    run(tmp_path / "whole", *settings)
    rows = metrics(tmp_path / "whole")
    overflows = int(rows[-1]["skipped"])
    assert 2 <= overflows <= 9 and rows[-1]["skipped"] == rows[-3]["skipped"]
    assert not (tmp_path / "whole/incidents.jsonl").exists()
    content = last(tmp_path / "whole")
    assert content["loss_scale"]["scale"] == 2.0 ** (24 - overflows)
    run(tmp_path / "torn", *settings, "trainer.max_steps=3")
    run(tmp_path / "torn", *settings)
    assert torch.equal(last(tmp_path / "torn")["loss_scale"]["good_steps"], content["loss_scale"]["good_steps"])
    assert [row["loss"] for row in metrics(tmp_path / "torn")] == [row["loss"] for row in rows]


@pytest.mark.slow
def test_a_change_of_precision_on_resume_starts_with_a_new_loss_scale(tmp_path):
    changes = [("fp32", 1.0, 0), ("fp16", 2.0**16, 2), ("fp16", 2.0**16, 4), ("bf16", 1.0, 0), ("fp16", 2.0**16, 2)]
    for number, (precision, scale, good_steps) in enumerate(changes, 1):
        run(tmp_path / "run", f"trainer.precision={precision}", f"trainer.max_steps={2 * number}", FEW)
        content = last(tmp_path / "run")
        assert content["global_step"] == 2 * number
        assert content["loss_scale"] == {"scale": scale, "good_steps": good_steps}


def large_scale(original):
    def init(self, precision, device):
        original(self, precision, device)
        self.scale = torch.full_like(self.scale, 2.0**24)

    return init


def test_no_backward_pass_runs_under_autocast():
    module = Pretraining(compose(["experiment=smoke", "trainer.precision=bf16", "trainer.accelerator=cpu"]))
    seen = {}

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen["forward"] = torch.is_autocast_enabled("cpu")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen["backward"] = torch.is_autocast_enabled("cpu")
            return gradient

    decoder = module.model.icl_predictor.decoder
    decoder.register_forward_hook(lambda m, inputs, output: Spy.apply(output))
    X = torch.randn(2, 20, 3)
    pack = Pack.of((table, (table[:, 0] > 0).long(), 10) for table in X)
    parameters = [p for p in module.model.parameters() if p.requires_grad]
    with module.precision.autocast("cpu"):
        module.add_gradients(Gradients(parameters, []), pack, 1.0)
    assert seen == {"forward": True, "backward": False}


@pytest.mark.slow
def test_gradients_are_flat_and_gradients_of_frozen_parts_are_none(tmp_path: Path):
    a, b, c = (torch.nn.Parameter(torch.zeros(n)) for n in (3, 70, 5))
    gradients = Gradients([a, b], [c])
    gradients.add((torch.ones(3), torch.full((70,), 2.0)), torch.tensor(4.0))
    gradients.add((torch.ones(3), torch.zeros(70)), torch.tensor(1.0))
    assert gradients.flat.sum() == 6 + 140 + 5 and gradients.loss == 5
    assert torch.equal(a.grad, torch.full((3,), 2.0)) and b.grad.sum() == 140 and c.grad is None
    assert all(view.storage_offset() % 64 == 0 for view in gradients.views)
    watch = Poison(set())
    run(tmp_path / "run", "curriculum.stages.smoke.frozen=[column,row]", "trainer.max_steps=2", callbacks=(watch,))
    assert any(not torch.equal(x, y) for x, y in zip(*watch.states, strict=True))
