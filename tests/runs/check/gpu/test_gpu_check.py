"""tabicl-gpu-check without a GPU: its files, and checks that fail, crash or do not fit into the time."""

import json
import os
import signal
import time

import pytest
import torch
from command_line import command

from tabicl_train.check.gpu import kernels, run, stages, steps
from tabicl_train.check.gpu.launches import Kernel, attention_names
from tabicl_train.check.gpu.place import CheckFailed, Place
from tabicl_train.check.gpu.run import Check
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.stream.steps import StepStream


def is_wrong(place) -> None:
    place.add("figures", figure="found before", value=0.5)
    raise CheckFailed("the number is wrong")


def raises(place) -> None:
    raise ValueError("not a number")


def dies(place) -> None:
    os._exit(3)


def hangs(place) -> None:
    signal.pause()


CHECKS = (
    Check("wrong", "a wrong number", is_wrong),
    Check("raises", "an error", raises),
    Check("dies", "a crash of the process", dies),
    Check("hangs", "takes too long", hangs, 0.1),
    Check("no_wait", "needs a GPU", steps.no_wait),
    Check("fp32_columns", "columns in fp32", steps.fp32_columns),
)


@pytest.fixture
def few_checks(monkeypatch):
    """Some checks in the place of those of the command."""
    monkeypatch.setattr(run, "CHECKS", CHECKS)
    monkeypatch.setattr(run, "GRACE", 0.1)


def test_checks_that_fail_are_reported_and_the_others_run(few_checks, tmp_path):
    result = command("gpu-check", f"output={tmp_path}/new")
    assert result.returncode == 1, result.stderr
    content = json.loads((tmp_path / "new/gpu-check.json").read_text())
    checks = {check["name"]: check for check in content["checks"]}
    assert {name: check["result"] for name, check in checks.items()} == {
        "wrong": "failed", "raises": "failed", "dies": "failed",
        "hangs": "failed", "no_wait": "skipped", "fp32_columns": "passed",
    }  # fmt: skip
    assert checks["wrong"]["why"] == "the number is wrong"
    assert checks["wrong"]["rows"][0]["value"] == 0.5
    assert "in raises" in checks["raises"]["trace"]
    assert "exit code 3" in checks["dies"]["why"]
    assert not content["is_gpu"] and checks["fp32_columns"]["rows"]
    page = (tmp_path / "new/gpu-check.md").read_text()
    assert "| dies | a crash of the process | failed |" in page and "| found before | 0.5 |" in page
    assert "ValueError: not a number" in page
    for text in (page, result.stderr, result.stdout):
        assert "no figure here is that of a GPU" in text

    again = command("gpu-check", f"output={tmp_path}/new")
    assert again.returncode == 2 and "overwrite=true" in again.stderr
    unknown = command("gpu-check", f"output={tmp_path}/new", "overwrite=true", "checks=[fp32_column]")
    assert unknown.returncode == 2 and "fp32_columns" in unknown.stderr


def test_without_time_a_check_is_skipped(tmp_path):
    entry = run.run_check(CHECKS[0], tmp_path, tmp_path, time.monotonic())
    assert (entry["result"], entry["why"], entry["rows"]) == ("skipped", "no time left", [])


# as torch's profiler wrote them on an H100, and cuDNN's by its documentation
KERNELS = {
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<32, 128, 128, 4, false, false, cutlass::bfloat16_t>>"
    "(pytorch_flash::Flash_fwd_params)": "flash_fwd_kernel",
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<32>>": "flash_bwd_dot_do_o_kernel",
    "fmha_cutlassB_f32_aligned_64x64_k32_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<cutlass::arch::Sm80>)":
    "fmha_cutlassB_f32_aligned_64x64_k32_sm80",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64_4x1x1_kernel0_0":
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64_4x1x1_kernel0_0",
    "rows_backward": "rows_backward",  # a Triton kernel
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::O>": None,
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>": None,
    "nvjet_sm90_tst_128x288_64x4_1x2_h_bz_coopA_NNT": None,
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_32x6_nt_align4>(cutlass_80_tensorop)": None,
    "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off": None,
    "Memcpy DtoD (Device -> Device)": None,
    "Memset (Device)": None,
}  # fmt: skip


def test_the_kernels_of_attention_are_named():
    assert attention_names(KERNELS) == sorted(name for name in KERNELS.values() if name)


def test_a_kernel_that_nobody_chose_is_wrong_although_its_numbers_are_right(monkeypatch):
    rows = []
    place = Place(torch.device("cpu"), None, rows.append)
    case = next(kernels.cases(10_000))
    for names, problems in (("flash_fwd_kernel", 0), ("cudnn_generated_fort_native_sdpa_sm90", 1)):
        monkeypatch.setattr(
            kernels, "launched_kernels", lambda place, work, name=names: work() and [Kernel(name, 1, 0.1)]
        )
        assert len(kernels.check_case(place, case, torch.float32)) == problems
        assert rows[-1]["result"] == ("WRONG" if problems else "right")


@pytest.mark.parametrize(
    ("fault", "problem"), [("", ""), ("gradients", "the gradient of"), ("updates", "the update of")]
)
def test_a_step_is_compared_by_gradients_and_by_updates_of_equal_gradients(fault, problem, monkeypatch):
    """Here the device is the CPU too; on another one, one value of a bias is wrong by a hundredth."""
    name = "icl_predictor.tf_icl.blocks.0.norm2.bias"
    functions = {"gradients": steps.gradients_of, "updates": steps.updates}
    calls = {"gradients": 0, "updates": 0}

    def wrapped(what, *arguments):
        found = functions[what](*arguments)
        calls[what] += 1
        if what == fault and calls[what] == (2 if what == "gradients" else 1):
            found[name][0] += 0.01 * found[name].norm()
        return found

    monkeypatch.setattr(steps, "gradients_of", lambda *arguments: wrapped("gradients", *arguments))
    monkeypatch.setattr(steps, "updates", lambda *arguments: wrapped("updates", *arguments))
    place = Place(torch.device("cpu"), None)
    if not fault:
        steps.step_beside_cpu(place)
    else:
        with pytest.raises(CheckFailed, match=f"{problem} {name} differs from that on the CPU by 1.0e-02"):
            steps.step_beside_cpu(place)


def test_steps_are_timed_at_the_planned_sizes_and_counted_in_flops():
    """As drawn, although nothing is drawn; `rank_costs` are times and no FLOPs."""
    settings = ["experiment=tabicl_v2", "run_dir=unused", "trainer.accelerator=cpu", *stages.SMALL]
    config = compose([*settings, "prior=dummy"])
    by_flops = compose([*settings, "curriculum.rank_costs=[]"])
    for step in stages.first_steps(config).values():
        for ranks in (1, 2):
            found = stages.planned_share(config, step, ranks)
            stream = StepStream(
                configured_prior(config.prior), config.curriculum, config.model, config.seed, range(step + 1), 0, ranks
            )
            drawn = stream.draw(step)
            assert [pack.shapes for pack in found.item.packs] == [pack.shapes for pack in drawn.packs]
            assert all(pack.layout is not None for pack in found.item.packs)  # as from a worker
            assert (found.item.stage, found.item.tables) == (drawn.stage, drawn.tables)
            assert (found.flops < found.whole) == (ranks > 1)
        assert found.whole == stages.planned_share(by_flops, step).flops


def test_a_step_of_tabicl_v2_has_27_tflop():
    config = compose(["experiment=tabicl_v2", "run_dir=unused", "trainer.accelerator=cpu"])
    assert stages.planned_share(config, 1).flops == pytest.approx(27.2e12, rel=0.01)  # counted by operators
