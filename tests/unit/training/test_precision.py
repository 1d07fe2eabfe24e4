import math
import os

import pytest
import torch
import torch.nn.functional as F
from networks import small_network
from training_runs import SHORT_RUN_OF_ANY_FAMILY, last_checkpoint, read_metrics, train_short_run

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import TrainerConfig
from tabicl_train.model.pack import Pack
from tabicl_train.model.stages import exact_linear
from tabicl_train.training.checks import check_machine
from tabicl_train.training.distributed.processes import Launch
from tabicl_train.training.module import Gradients
from tabicl_train.training.precision import (
    ALLOCATOR,
    WORKSPACE,
    LossScale,
    choose_precision,
    compute_capability,
    memory_of_gpu,
    policy,
    set_up_gpu,
)
from tabicl_train.training.rank_process import RankProcess
from tabicl_train.training.state import untrained_module


def test_the_default_is_bf16_on_a_gpu_that_has_it_and_fp32_elsewhere(monkeypatch):
    assert str(choose_precision(TrainerConfig(accelerator="cpu"))) == "fp32 (the default on a CPU)"
    assert (
        str(choose_precision(TrainerConfig(accelerator="cpu", precision="bf16")))
        == "bf16 mixed, fp32 weights (as configured)"
    )
    assert choose_precision(TrainerConfig(accelerator="cuda")).name == "bf16"  # a plan, on this machine without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for supported, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr("tabicl_train.training.precision.compute_capability", lambda s=supported: 8 if s else 7)
        assert choose_precision(TrainerConfig(accelerator="cuda")).name == expected
    assert choose_precision(TrainerConfig(accelerator="cuda", precision="fp16")).name == "fp16"


def started(*arguments):
    raise AssertionError("CUDA has started")


@pytest.mark.parametrize(("accelerator", "refused"), [("cuda", True), ("auto", True), ("cpu", False)])
def test_bf16_is_refused_on_a_gpu_without_it(accelerator, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("tabicl_train.training.precision.compute_capability", lambda: 7)
    monkeypatch.setattr(torch.cuda, "_lazy_init", started)
    config = compose(["experiment=smoke", "trainer.precision=bf16", f"trainer.accelerator={accelerator}"])
    assert any("does not support" in problem for problem in check_machine(config, Launch())) == refused


class Driver:
    """Those functions of libcuda.so.1 that are called, for cards of compute capability 9."""

    def __init__(self, init=0, devices=2):
        self.init, self.devices = init, devices

    def cuInit(self, flags):
        return self.init

    def cuDeviceGet(self, device, number):
        device._obj.value = 7
        return 0 if number < self.devices else 101

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert (attribute, device.value) == (75, 7)
        value._obj.value = 9
        return 0

    def cuDeviceTotalMem_v2(self, size, device):
        size._obj.value = 80 * 10**9
        return 0


@pytest.mark.parametrize(
    ("driver", "expected"),
    [(None, None), (Driver(), 9), (Driver(init=100), None), (Driver(devices=0), None)],
    ids=["no driver", "two cards", "no start", "no visible card"],
)
def test_the_driver_tells_capability_and_memory_of_a_card(driver, expected, monkeypatch):
    def load(name):
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr("ctypes.CDLL", load)
    assert compute_capability() == expected
    assert memory_of_gpu(0) == (math.inf if expected is None else 80e9)


@pytest.fixture
def gpu(monkeypatch):
    """Settings of a process that would train on a GPU; they end with the test."""
    monkeypatch.setattr("tabicl_train.training.precision.compute_capability", lambda: 8)
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")
    yield ["experiment=smoke", "trainer.accelerator=cuda", "optimizer=muon"]
    torch.set_float32_matmul_precision("highest")


def test_a_gpu_has_tf32_products_and_growing_memory_segments_unless_told_otherwise(gpu):
    config = compose(gpu)
    set_up_gpu(config.trainer)
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"  # tables do not depend on it
    assert policy(config.trainer) == [
        "precision bf16 mixed, fp32 weights (the default on a GPU)",
        "          products of fp32 in TF32",
        "          repeatable up to rounding",
        "memory    PYTORCH_ALLOC_CONF=expandable_segments:True",
    ]
    os.environ[ALLOCATOR[0]], os.environ[ALLOCATOR[1]] = "", "max_split_size_mb:64"  # by the user
    config = compose([*gpu, "trainer.tf32=false", "optimizer=adamw"])
    set_up_gpu(config.trainer)
    assert not torch.backends.cuda.matmul.allow_tf32
    assert policy(config.trainer)[1:] == [
        "          products of fp32 in full precision", "          repeatable up to rounding",
        "memory    PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64",
    ]  # fmt: skip
    assert not os.environ[ALLOCATOR[0]]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_gpu_repeats_to_the_bit_if_asked(gpu, monkeypatch):
    monkeypatch.delenv(WORKSPACE[0], raising=False)
    config = compose([*gpu, "trainer.deterministic=true"])
    try:
        set_up_gpu(config.trainer)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ[WORKSPACE[0]] == WORKSPACE[1]
        assert not torch.is_deterministic_algorithms_warn_only_enabled()  # flash attention would ignore it
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        os.environ.pop(WORKSPACE[0], None)
    assert "          repeatable bit for bit" in policy(config.trainer)
    on_cpu = compose(["experiment=smoke", "trainer.accelerator=cpu", "trainer.deterministic=true"])
    assert "no effect on a CPU" in policy(on_cpu.trainer)[-1]


def test_predictions_after_a_run_have_the_settings_from_before(gpu, monkeypatch):
    monkeypatch.setenv(*WORKSPACE)
    with RankProcess.open(compose([*gpu, "trainer.deterministic=true"]).trainer):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "high"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_the_loss_scale_halves_on_overflow_and_doubles_after_2000_good_steps():
    scale = LossScale(True)
    yes, no = torch.tensor(True), torch.tensor(False)
    scale.update(no)
    assert scale.scale == 2**15
    for _ in range(1999):
        scale.update(yes)
    assert scale.scale == 2**15
    scale.update(yes)
    assert scale.scale == 2**16 and scale.good_steps == 0
    unused = LossScale(False)
    unused.update(no)
    assert unused.scale == 1


FEW = "curriculum.stages.smoke.tables=4"  # half precision is slow on a CPU


def test_lower_precision_stays_near_fp32_and_keeps_fp32_weights(tmp_path):
    for name in ("fp32", "bf16", "fp16"):
        # With seed 0, a step overflows at the first loss scale of fp16 and is skipped.
        train_short_run(
            tmp_path / name, f"trainer.precision={name}", "seed=1", "prior=mlp_scm", "trainer.max_steps=4", FEW
        )
    exact = read_metrics(tmp_path / "fp32")
    for name in ("bf16", "fp16"):
        pairs = list(zip(exact, read_metrics(tmp_path / name), strict=True))
        for a, b in pairs:
            assert float(b["loss"]) == pytest.approx(float(a["loss"]), rel=0.03)
            assert float(b["grad_norm"]) == pytest.approx(
                float(a["grad_norm"]), rel=0.15
            )  # the loss scale is taken out
        assert any(a["loss"] != b["loss"] for a, b in pairs)
        assert all(w.dtype == torch.float32 for w in last_checkpoint(tmp_path / name)["state_dict"].values())


@pytest.mark.slow  # 24 steps under autocast on a CPU
def test_fp16_finds_the_scale_of_its_loss_and_keeps_it_over_a_restart(tmp_path, monkeypatch):
    # So large a scale overflows at first; neither the guard nor the weights mind.
    monkeypatch.setattr(LossScale, "__init__", large_scale(LossScale.__init__))
    settings = [*SHORT_RUN_OF_ANY_FAMILY, "trainer.precision=fp16", "curriculum.stages.smoke.steps=12", FEW]
    train_short_run(tmp_path / "whole", settings=settings)
    rows = read_metrics(tmp_path / "whole")
    overflows = int(rows[-1]["skipped"])
    assert 2 <= overflows <= 9 and rows[-1]["skipped"] == rows[-3]["skipped"]
    assert not (tmp_path / "whole/incidents.jsonl").exists()
    content = last_checkpoint(tmp_path / "whole")
    assert content["loss_scale"]["scale"] == 2.0 ** (24 - overflows)
    train_short_run(tmp_path / "torn", "trainer.max_steps=3", settings=settings)
    train_short_run(tmp_path / "torn", settings=settings)
    assert torch.equal(
        last_checkpoint(tmp_path / "torn")["loss_scale"]["good_steps"], content["loss_scale"]["good_steps"]
    )
    of_both = [[(row["loss"], row["skipped"]) for row in some] for some in (read_metrics(tmp_path / "torn"), rows)]
    assert of_both[0] == of_both[1]


def test_a_change_of_precision_on_resume_starts_with_a_new_loss_scale(tmp_path):
    changes = [("fp16", 2.0**16, 2), ("bf16", 1.0, 0), ("fp16", 2.0**16, 2)]
    for number, (precision, scale, good_steps) in enumerate(changes, 1):
        settings = (f"trainer.precision={precision}", f"trainer.max_steps={2 * number}", FEW)
        train_short_run(tmp_path / "run", *settings, settings=SHORT_RUN_OF_ANY_FAMILY)
        content = last_checkpoint(tmp_path / "run")
        assert content["global_step"] == 2 * number
        assert content["loss_scale"] == {"scale": scale, "good_steps": good_steps}


def large_scale(original):
    def init(self, enabled):
        original(self, enabled)
        self.scale = torch.full_like(self.scale, 2.0**24)

    return init


def test_no_backward_pass_runs_under_autocast():
    module = untrained_module(compose(["experiment=smoke", "trainer.precision=bf16", "trainer.accelerator=cpu"]))
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


def test_inputs_are_read_in_fp32_and_tokens_are_in_the_format_of_the_run(monkeypatch):
    """Cells and numeric labels of a network with column attention in fp32, with and without autocast."""
    network = small_network(max_classes=0, col_attention_fp32=True)
    generator = torch.Generator().manual_seed(0)
    pack = Pack.of([(torch.randn(400, 3, generator=generator), torch.randn(400, generator=generator), 300)])
    seen = []
    first = network.col_embedder.tf_col["blocks"][0]
    first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network.icl_predictor.y_encoder.register_forward_hook(lambda module, inputs, output: seen.append(output))
    network.col_embedder.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        network(pack)
        with torch.autocast("cpu", torch.bfloat16):
            network(pack)
    cells, _, labels, low_cells, tokens, low_labels = seen
    assert low_cells.dtype == tokens.dtype == low_labels.dtype == torch.bfloat16
    for exact, low in ((cells, low_cells), (labels, low_labels)):  # another order of sums may round to a neighbor
        assert (exact.bfloat16() == low).float().mean() > 0.99
    # On a GPU the product is without TF32, which comes back after it.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    formats = []
    monkeypatch.setattr(
        F, "linear", lambda *given: formats.append(torch.backends.cuda.matmul.fp32_precision) or given[0]
    )
    torch.set_float32_matmul_precision("high")
    try:
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                exact_linear(torch.zeros(2, 14), torch.zeros(5, 14), None)
        assert formats == ["ieee", "ieee"]
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
