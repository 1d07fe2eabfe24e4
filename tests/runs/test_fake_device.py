"""A training step on a device that computes nothing: its tensors have shapes and no values."""

import json
from pathlib import Path

import pytest
import torch
from forked import start_process, wait_for_exit_code
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.model.pack import Pack
from tabicl_train.stream.steps import StepItem, StepStream
from tabicl_train.training.state import untrained_module


class Launches(TorchDispatchMode):
    """Counts the operators that would start a kernel: all but views."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        return function(*args, **(kwargs or {}))


def step(output: Path) -> None:
    """Take a step and read a value; write what was found. In a process of its own, as torch keeps the device."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("fake")
    torch.get_device_module("fake").get_amp_supported_dtype = lambda: [torch.bfloat16]
    fake_tensor.CONSTANT_NUMEL_LIMIT = 100_000  # the sizes of tables stay known, on the host
    config = compose(["experiment=smoke", "trainer.accelerator=cpu", "run_dir=unused"])
    item = StepStream(configured_prior(config.prior), config.curriculum, config.model, 0, range(1)).draw(0)
    module, device = untrained_module(config), torch.device("fake", 0)

    def moved(x: Tensor) -> Tensor:  # `to` cannot: a fake tensor is not made from a real one of another device
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=False):
        for part in module.modules():
            for name, p in part._parameters.items():
                part._parameters[name] = p if p is None else nn.Parameter(moved(p), requires_grad=p.requires_grad)
            for name, x in part._buffers.items():
                part._buffers[name] = x if x is None else moved(x)
        module._device, module.skipped, module.loss_scale.scale = device, moved(module.skipped), moved(torch.ones(()))
        packs = [Pack(moved(p.X), moved(p.y), moved(p.sizes), p.shapes) for p in item.packs]
        optimizer = module.configure_optimizers()
        with Launches() as launches:
            module.train_on(StepItem(0, item.stage, item.tables, packs), 0, 0, optimizer)
        try:
            module.loss.item()
            reads_values = True
        except fake_tensor.DataDependentOutputException:
            reads_values = False
    left = [name for name, p in module.named_parameters() if p.device != device]
    left += [name for state in optimizer.state.values() for name, x in state.items() if x.device != device]
    output.write_text(json.dumps({"launches": launches.count, "left": left, "reads_values": reads_values}))


@pytest.mark.slow  # in tests/unit/training are the waits of a step, and its launches on fake tensors
def test_a_step_reads_no_value_mixes_no_devices_and_launches_bounded_kernels(tmp_path):
    assert wait_for_exit_code(start_process(step, tmp_path / "found")) == 0
    found = json.loads((tmp_path / "found").read_text())
    assert found["left"] == []
    assert 1000 < found["launches"] < 10_000  # 7,544 with torch 2.13, most of them of attention, run by run
    assert not found["reads_values"]  # so the step, which has come to its end, has read none
