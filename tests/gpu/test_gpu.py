"""What training must do on a GPU: the first tests to run when there is one, with `launch/test.sh gpu`.

None of them has run on a card yet. `DEVICE=cpu pytest -m gpu tests/gpu` runs those that CUDA is not essential for.
"""

import os

import numpy as np
import pytest
import torch
from runs import assert_same_end, metrics, run
from short_runs import module_of
from short_runs import run as train_here
from small_networks import small_network
from tiny_network import tiny_network

from tabicl_train import TabICLClassifier
from tabicl_train.compiling import use_triton
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import build_prior
from tabicl_train.debugging.preflight import preflight
from tabicl_train.model.pack import Pack
from tabicl_train.module import Pretraining, query_losses
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
def exact_products():
    """Products of fp32 in fp32, unless a test says otherwise, and the attention kernels of training."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_cudnn_sdp(False)


def random_pack(shapes=MIXED) -> Pack:
    generator = torch.Generator().manual_seed(0)
    return Pack.of(
        (torch.randn(N, M, generator=generator), torch.randint(0, 4, (N,), generator=generator), n)
        for N, n, M in shapes
    )


def steps_on(device: str, precision: str = "fp32", steps: int = 1) -> Pretraining:
    """A module of experiment=smoke after some steps on this device."""
    config = compose([*SMOKE, f"trainer.precision={precision}", f"trainer.accelerator={device}"])
    stream = stream_of(config, steps)
    torch.manual_seed(0)
    module = module_of(config).to(device)
    module.on_fit_start()
    optimizer = module.configure_optimizers()
    for step in range(steps):
        module.training_step(stream.draw(step).to(torch.device(device)), step, 0, optimizer)
    return module


def stream_of(config, steps: int) -> StepStream:
    return StepStream(build_prior(config.prior), config.curriculum, config.model, config.seed, range(steps))


def test_a_step_equals_that_of_the_cpu():
    torch.manual_seed(0)
    before = module_of(compose(SMOKE)).model.state_dict()
    expected, found = steps_on("cpu"), steps_on(DEVICE)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-4)
    assert found.grad_norm.item() == pytest.approx(expected.grad_norm.item(), rel=1e-3)
    for name, weight in expected.model.state_dict().items():
        change, other = weight - before[name], found.model.state_dict()[name].cpu() - before[name]
        assert torch.linalg.vector_norm(other - change) <= 0.02 * torch.linalg.vector_norm(change) + 1e-6, name


def test_the_loss_of_bf16_is_within_one_percent():
    reference, mixed = steps_on(DEVICE, steps=5), steps_on(DEVICE, "bf16", steps=5)
    assert mixed.loss.item() == pytest.approx(reference.loss.item(), rel=0.01)


@pytest.mark.parametrize("scaling", ["none", "ssmax", "qassmax_elementwise", "ssa_trainable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("triton", [False, True])
def test_losses_and_gradients_equal_those_of_the_plain_path(scaling, dtype, triton):
    """Sequences of various lengths in one launch, and Triton kernels, beside fp32 on the CPU."""
    network = small_network(col_scaling=scaling, icl_scaling=scaling)
    pack = random_pack()
    expected = losses_and_gradient(network, pack)
    network = network.to(DEVICE)
    if triton and not (use_triton(network) and torch.cuda.is_available()):
        pytest.skip("the rule has no Triton kernel")
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        found = losses_and_gradient(network, pack.to(torch.device(DEVICE)))
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    for values, exact in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(values.cpu() - exact) <= limit * torch.linalg.vector_norm(exact)


def losses_and_gradient(network, pack) -> tuple[torch.Tensor, torch.Tensor]:
    losses = query_losses(network, pack)
    weights = [p for p in network.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(losses.sum(), weights, materialize_grads=True)
    return losses.detach(), torch.cat([g.flatten() for g in gradients])


@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_does_not_synchronize(precision):
    module = steps_on("cuda", precision, steps=2)  # which compiles kernels and allocates
    optimizer, stream = module.configure_optimizers(), stream_of(compose(SMOKE), 4)
    items = [stream.draw(step).to(torch.device("cuda")) for step in (2, 3)]
    module.training_step(items[0], 2, 0, optimizer)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.training_step(items[1], 3, 0, optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_a_pack_that_does_not_fit_is_halved():
    """At a real limit of the allocator: loss and gradient norm are those of the whole pack."""
    config = compose([*SMOKE, "trainer.precision=fp32", "model.checkpoint_rows=0"])
    item = StepItem(0, "smoke", 16, [random_pack([(400, 300, 20)] * 16).to(torch.device("cuda"))])
    total, modules, peak = torch.cuda.get_device_properties(0).total_memory, [], 0
    for limited in (False, True):
        torch.manual_seed(0)
        module = module_of(config).cuda()
        module.on_fit_start()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if limited:
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + peak) / 2 / total)
        try:
            module.training_step(item, 0, 0, module.configure_optimizers())
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        peak = torch.cuda.max_memory_reserved()
        modules.append(module)
    whole, halved = modules
    assert halved.too_large < np.inf == whole.too_large
    assert halved.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
    assert halved.grad_norm.item() == pytest.approx(whole.grad_norm.item(), rel=1e-3)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_resumed_run_equals_an_undisturbed_one(deterministic, tmp_path):
    settings = [*ON_DEVICE, "checkpoint.every=4", "trainer.log_every=1", f"trainer.deterministic={deterministic}"]
    train_here(tmp_path / "whole", *settings, settings=SMOKE[:1])
    train_here(tmp_path / "parts", *settings, "trainer.max_steps=7", settings=SMOKE[:1])
    train_here(tmp_path / "parts", *settings, settings=SMOKE[:1])
    torch.use_deterministic_algorithms(False)
    if deterministic or DEVICE == "cpu":
        assert_same_end(tmp_path / "whole", tmp_path / "parts")
        return
    # Flash attention adds the gradients of queries in another order each time.
    losses = [[float(row["loss"]) for row in metrics(tmp_path / name)] for name in ("whole", "parts")]
    np.testing.assert_allclose(*losses, rtol=1e-2)


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
        device: TabICLClassifier(tiny_network(), device=device).fit(X[:60], y[:60]) for device in ("cpu", DEVICE)
    }
    assert predicted[DEVICE].device_.type == DEVICE
    expected = predicted["cpu"].predict_proba(X[60:])
    np.testing.assert_allclose(predicted[DEVICE].predict_proba(X[60:]), expected, atol=1e-3)


def test_the_preflight_finds_bf16_fit(tmp_path, capsys):
    precision = "trainer.precision=bf16"
    preflight(compose([*SMOKE[:1], f"run_dir={tmp_path}", *ON_DEVICE, precision, "preflight_steps=10"]))
    assert "bf16 is fit for this run" in capsys.readouterr().err
