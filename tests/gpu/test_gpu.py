"""What training must do on a GPU: the first tests to run when there is one, with `launch/test.sh gpu`.

None of them has run on a card yet. `DEVICE=cpu pytest -m gpu tests/gpu` runs those that CUDA is not essential for.
"""

import dataclasses
import os

import numpy as np
import pytest
import torch
from runs import assert_same_end, run
from short_runs import run as train_here
from small_networks import small_network
from tiny_network import TINY, tiny_network

from tabicl_train import TabICLClassifier
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import TrainerConfig, build_prior
from tabicl_train.debugging.preflight import preflight
from tabicl_train.model import attention
from tabicl_train.model.pack import Pack
from tabicl_train.module import Pretraining, query_losses
from tabicl_train.precision import choose
from tabicl_train.prediction.export import export, load_model
from tabicl_train.stream import StepItem, StepStream

DEVICE = os.environ.get("DEVICE", "cuda")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA itself")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]
SMOKE = ["experiment=smoke", "run_dir=unused"]
ON_DEVICE = [f"trainer.accelerator={DEVICE}", "stream.num_workers=0"]
MIXED = [(20, 12, 3), (20, 12, 3), (33, 7, 5), (64, 40, 2), (130, 128, 9)]  # rows, labeled rows, features


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """Products of fp32 in fp32, unless a test says otherwise, and the attention kernels of training."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def random_pack(shapes=MIXED) -> Pack:
    generator = torch.Generator().manual_seed(0)
    return Pack.of(
        (torch.randn(N, M, generator=generator), torch.randint(0, 4, (N,), generator=generator), n)
        for N, n, M in shapes
    )


def one_step(device: str, precision: str = "fp32", steps: int = 1) -> Pretraining:
    """A module of experiment=smoke after some steps on this device."""
    config = compose(SMOKE)
    stream = StepStream(build_prior(config.prior), config.curriculum, config.model, config.seed, range(steps))
    chosen = choose(TrainerConfig(precision=precision, accelerator=device))
    torch.manual_seed(0)
    module = Pretraining(config.model, config.curriculum, config.optimizer, chosen, config.seed).to(device)
    module.on_fit_start()
    optimizer = module.configure_optimizers()
    for step in range(steps):
        module.training_step(stream.draw(step).to(torch.device(device)), step, 0, optimizer)
    return module


def test_a_step_equals_that_of_the_cpu():
    expected, found = one_step("cpu"), one_step(DEVICE)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-4)
    assert found.grad_norm.item() == pytest.approx(expected.grad_norm.item(), rel=1e-3)
    before = small_weights(compose(SMOKE))
    for name, weight in expected.model.state_dict().items():
        change, other = weight - before[name], found.model.state_dict()[name].cpu() - before[name]
        assert torch.linalg.vector_norm(other - change) <= 0.02 * torch.linalg.vector_norm(change) + 1e-6, name


def small_weights(config) -> dict[str, torch.Tensor]:
    """The weights with which `one_step` begins."""
    torch.manual_seed(0)
    module = Pretraining(config.model, config.curriculum, config.optimizer, choose(config.trainer), config.seed)
    return {name: weight.clone() for name, weight in module.model.state_dict().items()}


def test_the_loss_of_bf16_is_within_one_percent():
    reference, mixed = one_step(DEVICE, steps=5), one_step(DEVICE, "bf16", steps=5)
    assert mixed.loss.item() == pytest.approx(reference.loss.item(), rel=0.01)


@needs_cuda
@pytest.mark.parametrize("scaling", ["none", "ssmax", "qassmax_elementwise", "ssa_trainable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["default", "triton"])
def test_fast_paths_equal_the_plain_one(scaling, dtype, path):
    """Losses and gradients beside float64 on the CPU, with tables of different sizes in one pack."""
    network = small_network(col_scaling=scaling, icl_scaling=scaling)
    expected = losses_and_gradient(network.double(), random_pack().to_dtype(torch.float64))
    with attention.triton_kernels(path == "triton"), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found = losses_and_gradient(network.float().cuda(), random_pack().to(torch.device("cuda")))
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    for values, exact in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(values.cpu().double() - exact) <= limit * torch.linalg.vector_norm(exact)


def losses_and_gradient(network, pack) -> tuple[torch.Tensor, torch.Tensor]:
    losses = query_losses(network, pack)
    weights = [p for p in network.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(losses.sum(), weights, materialize_grads=True)
    return losses.detach(), torch.cat([g.flatten() for g in gradients])


@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_does_not_synchronize(precision):
    module = one_step("cuda", precision, steps=2)  # which compiles and allocates
    optimizer, config = module.configure_optimizers(), compose(SMOKE)
    stream = StepStream(build_prior(config.prior), config.curriculum, config.model, config.seed, range(4))
    items = [stream.draw(step).to(torch.device("cuda")) for step in (2, 3)]
    module.training_step(items[0], 2, 0, optimizer)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.training_step(items[1], 3, 0, optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_a_pack_that_does_not_fit_is_halved(monkeypatch):
    """At a real limit of the allocator: the loss and the gradient are those of the whole pack."""
    config = compose([*SMOKE, "model.checkpoint_rows=0"])
    tables = random_pack([(400, 300, 20)] * 16)
    item = StepItem(0, "smoke", 16, [tables.to(torch.device("cuda"))])
    found = {}
    for limited in (False, True):
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        chosen = choose(TrainerConfig(precision="fp32", accelerator="cuda"))
        module = Pretraining(config.model, config.curriculum, config.optimizer, chosen, 0).cuda()
        module.on_fit_start()
        torch.cuda.reset_peak_memory_stats()
        if limited:
            free = torch.cuda.memory_allocated() + (peak - torch.cuda.memory_allocated()) // 2
            torch.cuda.set_per_process_memory_fraction(free / torch.cuda.get_device_properties(0).total_memory)
        try:
            module.training_step(item, 0, 0, module.configure_optimizers())
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        peak = torch.cuda.max_memory_allocated()
        found[limited] = module
    assert found[True].too_large < np.inf
    assert found[True].loss.item() == pytest.approx(found[False].loss.item(), rel=1e-5)
    assert found[True].grad_norm.item() == pytest.approx(found[False].grad_norm.item(), rel=1e-3)


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path):
    settings = [*ON_DEVICE, "checkpoint.every=4", "trainer.log_every=1"]
    train_here(tmp_path / "whole", *settings, settings=SMOKE[:1])
    train_here(tmp_path / "parts", *settings, "trainer.max_steps=7", settings=SMOKE[:1])
    train_here(tmp_path / "parts", *settings, settings=SMOKE[:1])
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_with_nccl_train_as_one(tmp_path):
    settings = ["trainer.accelerator=cuda", "trainer.log_every=1", "trainer.precision=fp32", "trainer.tf32=false"]
    run(tmp_path / "one", *settings)
    run(tmp_path / "two", *settings, "trainer.devices=2")
    one, two = (np.genfromtxt(tmp_path / name / "metrics.csv", delimiter=",", names=True) for name in ("one", "two"))
    np.testing.assert_allclose(two["loss"], one["loss"], rtol=1e-3)


def test_a_run_on_a_gpu_is_exported(tmp_path):
    train_here(tmp_path / "run", *ON_DEVICE, settings=SMOKE[:1])
    export(str(tmp_path / "run"), str(tmp_path / "weights.ckpt"))
    network, pack = load_model(str(tmp_path / "weights.ckpt")).eval(), random_pack()
    with torch.no_grad():
        expected, found = network(pack), network.to(DEVICE)(pack.to(torch.device(DEVICE))).cpu()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_the_estimator_predicts_what_it_does_on_the_cpu():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(80, 5)), rng.integers(0, 3, 80)
    predicted = {
        device: TabICLClassifier(tiny_network(dataclasses.replace(TINY)), device=device).fit(X[:60], y[:60])
        for device in ("cpu", DEVICE)
    }
    assert predicted[DEVICE].device_.type == DEVICE
    expected = predicted["cpu"].predict_proba(X[60:])
    np.testing.assert_allclose(predicted[DEVICE].predict_proba(X[60:]), expected, atol=1e-3)


def test_the_preflight_finds_bf16_fit(tmp_path, capsys):
    precision = "trainer.precision=bf16"
    preflight(compose([*SMOKE[:1], f"run_dir={tmp_path}", *ON_DEVICE, precision, "preflight_steps=10"]))
    assert "bf16 is fit for this run" in capsys.readouterr().err
