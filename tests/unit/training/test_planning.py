import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import command
from hypothesis import given, settings
from hypothesis import strategies as st

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.config import family_of
from tabicl_train.model.costs import kept_by_part
from tabicl_train.model.pack import Pack
from tabicl_train.stream.curriculum import plan_step
from tabicl_train.training.checks import check_machine
from tabicl_train.training.distributed.processes import Launch
from tabicl_train.training.planning import count_parameters, expected_work, peak_bytes, run_plan, stage_peak
from tabicl_train.training.precision import peak_flops

ROOT = Path(__file__).parents[3]
SMALL = {
    "embed_dim": 32, "col_num_heads": 4, "col_num_inducing": 16, "row_num_heads": 4, "row_num_cls": 2,
    "icl_num_heads": 4,
}  # fmt: skip
V1_LIKE = {"col_affine": True, "col_grouping": "none", "col_target_aware": False, "icl_scaling": "none"}
MIXED = [(100, 30, 1), (100, 30, 1), (260, 200, 7), (400, 50, 40)]  # rows, labeled rows, features


def kept_values(model: TabICL, pack: Pack) -> dict[str, float]:
    """What autograd keeps of each part in a forward pass, in float32 values; each piece of memory counts once."""
    seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, held, part = Counter(), [], []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if part and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.append(tensor)  # so that no other tensor gets its address
            kept[part[-1]] += storage.nbytes() / 4
        return tensor

    for name, module in model.parts.items():
        getattr(model, module).register_forward_pre_hook(lambda *_, name=name: part.append(name))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.losses(model(pack), pack)
    held.clear()  # else autograd's graph and these tensors would hold each other: 0.1 to 0.2 GB a test
    return kept


ONE = [(500, 300, 20)]


@pytest.mark.parametrize(
    ("options", "tables"),
    [
        ({}, MIXED),
        (V1_LIKE, MIXED),
        ({"icl_scaling": "qassmax", "col_grouping": "disjoint"}, ONE),
        ({"icl_scaling": "ssmax_mlp_elementwise", "ff_factor": 3}, ONE),
        ({"col_num_blocks": 1, "row_num_blocks": 1, "icl_num_blocks": 1}, ONE),
        ({"col_scaling": "ssa_trainable", "icl_scaling": "ssa"}, ONE),
        ({"checkpoint_rows": 299}, MIXED),  # all packs have a longer table
        ({"max_classes": 0, "num_quantiles": 2000, "bias_free_ln": True}, ONE),
    ],
)
def test_the_estimate_of_each_part_is_what_autograd_keeps(options, tables, monkeypatch):
    config = TabICLConfig(**(SMALL | options))
    kind = torch.float32 if config.is_regression else torch.int64
    pack = Pack.of((torch.randn(N, M), torch.zeros(N, dtype=kind), n) for N, n, M in tables)
    monkeypatch.setattr("tabicl_train.model.attention.MAX_SCORES", 0)  # torch's kernel, as on a GPU, not products
    estimated = Counter()
    for table in tables:
        estimated.update(kept_by_part(config, *table, recomputed="checkpoint_rows" in options))
    kept = kept_values(TabICL(config), pack)
    assert kept.keys() == estimated.keys() == {"column", "row", "icl"}
    # CUDA kernels keep up to 12 % more in these shapes, see block_values; on a CPU, outputs of runs are kept twice.
    assert all(0.85 < estimated[part] / kept[part] < 1.2 for part in kept), (kept, estimated)


@pytest.mark.parametrize(
    ("tables", "fp32_columns", "gigabytes"),
    [
        ([(10_240, 8192, 100)] * 2, False, 46.4),
        ([(10_240, 8192, 100)] * 2, True, 55.0),
        ([(1024, 614, 60)] * 34, False, 54.2),
        ([(1024, 614, 60)] * 34, True, 63.3),
    ],
)
def test_the_plan_of_bf16_is_what_operators_of_a_gpu_allocate(tables, fp32_columns, gigabytes):
    """Simulated on tensors without values."""
    config = TabICLConfig(col_attention_fp32=fp32_columns)
    assert peak_bytes(config, 27_552_258, tables, "bf16") / 1e9 == pytest.approx(gigabytes, rel=0.1)


@pytest.mark.parametrize(
    ("tables", "fp32_columns", "gigabytes"),
    [
        ([(1024, 922, 26)] * 64, True, 69.2),
        ([(3004, 2433, 1)] * 64, False, 74.9),
        ([(10_240, 8294, 1)] * 18, False, 71.8),
        ([(60_000, 47_400, 20)], False, 16.8),  # recomputed
    ],
)
def test_the_plan_of_bf16_is_what_was_measured(tables, fp32_columns, gigabytes):
    """On an H100 80GB, torch 2.11, 2026-11-27."""
    config = TabICLConfig(col_attention_fp32=fp32_columns)
    assert peak_bytes(config, 27_552_258, tables, "bf16") / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_the_peak_of_a_stage_is_that_of_its_fullest_pack():
    config = TabICLConfig()
    stage = StageConfig(rows=[100, 2000], features=[1, 100], train_share=[0.3, 0.9], tables=4)
    widest = (2000, 1800, 100)  # four of them have 896,000 tokens
    assert stage_peak(config, 10, stage, "fp32") == pytest.approx(peak_bytes(config, 10, [widest] * 4))
    # Of 1,116 rows four fit: 112 tokens each.
    budget = stage_peak(config, 10, replace(stage, pack_tokens=4 * 1116 * 112), "fp32")
    assert budget == pytest.approx(peak_bytes(config, 10, [(1116, 1004, 100)] * 4))
    assert budget > peak_bytes(config, 10, [widest] * 2)
    # A table over the budget is a pack of its own.
    alone = stage_peak(config, 10, replace(stage, pack_tokens=1000), "fp32")
    assert alone == peak_bytes(config, 10, [widest])
    # Above 60,000 rows a table has at most 15 features, and above 20,000 most activations are computed again.
    long = stage_peak(config, 10, replace(stage, rows=[15_000, 60_001], pack_tokens=1000), "fp32")
    assert long == peak_bytes(config, 10, [(20_000, 18_000, 80)])
    forced = stage_peak(config, 10, replace(stage, checkpoint_rows=500), "fp32")
    assert forced < 0.8 * stage_peak(config, 10, stage, "fp32")


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.integers(10, 3000), st.floats(1, 20), st.integers(1, 100), st.integers(1, 100), st.integers(1, 40),
    st.floats(3.5, 6.5), st.sampled_from([0, 800, 20_000]), st.integers(0, 2**40),
)  # fmt: skip
def test_no_pack_of_a_stage_exceeds_its_peak(low, factor, few, more, tables, budget, checkpoint_rows, seed):
    config = TabICLConfig()
    stage = StageConfig(
        steps=5, rows=[low, int(low * factor)], features=[few, min(few + more, 100)], tables=tables, group_size=1,
        pack_tokens=int(10**budget), checkpoint_rows=checkpoint_rows,
    )  # fmt: skip
    peak = stage_peak(config, 10, stage, "fp32")
    config = replace(config, checkpoint_rows=checkpoint_rows)
    for step in range(5):
        for groups in plan_step(CurriculumConfig({"s": stage}), config, seed, step).packs(0, 1):
            specs = [g.spec for g in groups for _ in g.tables]
            shapes = [(spec.num_rows, spec.train_size, spec.num_features) for spec in specs]
            assert peak_bytes(config, 10, shapes) <= 1.001 * peak


def test_the_plan_of_a_run_is_printed_before_anything_starts(tmp_path):
    result = command("train", "curriculum=tabicl_v2", f"run_dir={tmp_path}/run", "--cfg", "job")
    assert result.returncode == 0 and "embed_dim: 128" in result.stdout
    for words in (
        ("27,552,258 parameters",),
        ("stage2", "40,000", "2,560,000", "400..10,240", "2,500,000", "GB"),
        ("stage3",),
    ):
        assert any(all(word in line for word in words) for line in result.stderr.splitlines())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("page", "sentence", "experiment"),
    [
        ("configs/experiment/tabicl_v1.yaml", r"stages 1 and 2 are estimated at (\d+) GB in bf16", "tabicl_v1"),
        ("configs/experiment/tabicl_v2.yaml", r"stages 2 and 3 are estimated at (\d+) GB in bf16", "tabicl_v2"),
        (
            "configs/experiment/tabicl_v2_regression.yaml",
            r"stages 2 and 3 are estimated at (\d+) GB in bf16",
            "tabicl_v2_regression",
        ),
    ],
    ids=["tabicl_v1", "tabicl_v2", "tabicl_v2_regression"],
)
def test_pages_have_the_memory_of_the_plan(page, sentence, experiment):
    (figure,) = re.findall(sentence, (ROOT / page).read_text())
    config = compose([f"experiment={experiment}"])
    parameters = count_parameters(config.model)
    stages = config.curriculum.stages.values()
    peak = max(stage_peak(config.model, parameters, stage, "bf16") for stage in stages)
    assert f"{peak / 1e9:.0f}" == figure


def test_the_plan_of_a_run_cut_short_is_that_of_its_steps():
    stages = ["experiment=smoke", "+curriculum.stages.a_long_name.steps=7", "+curriculum.stages.never.steps=9"]
    lines = run_plan(compose([*stages, "trainer.max_steps=24"]))
    cut, never = (next(line.split() for line in lines if line.split()[0] == name) for name in ("a_long_name", "never"))
    assert cut[1:5] == ["4", "of", "7", "256"]
    assert never[1:] == ["not", "run", "1,024..1,024"]
    whole = run_plan(compose([*stages, "trainer.max_steps=27"]))
    (flops,) = (float(line.split()[5]) for line in whole if line.split()[0] == "a_long_name")
    assert float(cut[7]) == pytest.approx(flops * 4 / 7, rel=0.1)


def test_the_plan_names_the_caps_of_features_in_long_tables():
    def caps(*settings: str) -> list[str]:
        stage = "curriculum.stages.smoke"
        lines = run_plan(compose(["experiment=smoke", *(f"{stage}.{each}" for each in settings)]))
        return [line for line in lines if line.startswith("features")]

    long = "features  stage smoke: at most 80 with more than 10,240 rows, 60 with more than 20,000 rows"
    assert caps("features=[2,100]", "rows=[60,25000]") == [long]
    assert caps("features=[2,70]", "rows=[60,25000]") == [
        "features  stage smoke: at most 60 with more than 20,000 rows"
    ]
    assert caps("features=[2,100]", "rows=[60001,60001]") == [
        "features  stage smoke: at most 15 with more than 60,000 rows"
    ]
    assert caps("features=[2,60]", "rows=[60,20000]") == caps("features=[2,100]") == []


def test_a_limit_of_steps_after_the_end_of_the_curriculum_is_a_warning():
    def warnings(steps: int) -> list[str]:
        return [line for line in run_plan(compose(["experiment=smoke", f"trainer.max_steps={steps}"])) if "max" in line]

    said = "warning   trainer.max_steps is 21, but the curriculum ends the run after 20 steps"
    assert warnings(21) == [said] and warnings(20) == []


STAGE = "curriculum.stages.smoke."
CONSTANT = f"{STAGE}schedule=constant"


@pytest.mark.parametrize(
    ("settings", "remark"),
    [
        ([CONSTANT, f"{STAGE}final_learning_rate=0"], f"{STAGE}final_learning_rate has no effect, since schedule is"),
        ([CONSTANT, f"{STAGE}final_learning_rate=1e-3"], None),  # its learning rate
        ([CONSTANT, "curriculum.scale_rates=2"], None),
        ([f"{STAGE}final_learning_rate=0"], None),
        ([f"{STAGE}decay=0.5"], f"{STAGE}decay has no effect, since schedule is cosine"),
        ([f"{STAGE}decay=0.5", f"{STAGE}schedule=wsd"], None),
    ],
)
def test_settings_without_effect_are_told(settings, remark):
    lines = [line for line in run_plan(compose(["experiment=smoke", *settings])) if line.startswith("warning")]
    words = "" if remark is None else f"warning   {remark}"
    assert [line[: len(words)] for line in lines] == ([] if remark is None else [words])


def test_memory_that_this_machine_lacks_is_told_before_anything_is_allocated(tmp_path):
    """What only the fullest pack would need is a warning."""
    result = command("train", "experiment=smoke", f"run_dir={tmp_path}/run", "model.embed_dim=1000000")
    assert result.returncode == 2
    assert result.stderr.startswith("error: model: its 104,000,832,750,586 parameters need 2")
    assert result.stderr.count("\n") == 1
    smoke = ["experiment=smoke", "trainer.accelerator=cpu", "curriculum.stages.smoke.rows=[60,100000000]"]
    warnings = [line for line in run_plan(compose(smoke)) if line.startswith("warning")]
    assert len(warnings) == 1 and "stage smoke may need " in warnings[0]
    assert not any(line.startswith("warning") for line in run_plan(compose(smoke[:2])))


def test_a_run_on_a_gpu_is_planned_on_a_machine_without_one_but_not_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = ["experiment=tabicl_v2", "trainer.accelerator=cuda"]
    config = compose(settings)
    lines = run_plan(config)
    assert lines[1].startswith("device    a GPU of 80 GB (trainer.plan_memory_gb), bf16; ")
    assert not any(line.startswith("warning") for line in lines)
    assert "trainer.accelerator is 'cuda'; torch finds no GPU on this machine" in check_machine(config, Launch())
    small = run_plan(compose([*settings, "trainer.plan_memory_gb=24"]))
    assert "stage stage1 may need" in small[-3] and "has 24.0 GB" in small[-3]


def test_the_plan_tells_how_many_passes_a_step_takes():
    config = compose(
        ["experiment=smoke", "curriculum.stages.smoke.rows=[50,50]", "curriculum.stages.smoke.features=[4,4]"]
    )
    tokens = family_of(config.model).pack_tokens(config.model, 50, 4)
    for budget, ranks, expected in ((8 * tokens, 1, 1.0), (3 * tokens, 1, 3.0), (3 * tokens, 2, 2.0), (1, 1, 8.0)):
        stage = replace(config.curriculum.stages["smoke"], pack_tokens=budget)
        assert expected_work(stage, config.model, config.seed, ranks).passes == expected


def test_peaks_are_those_of_the_device_and_format(monkeypatch):
    """Products of fp32 are in TF32 unless trainer.tf32 is false."""
    assert peak_flops(torch.device("cpu"), "fp32", True) is None
    gpu = torch.device("cuda")
    peaks_of = {
        "NVIDIA H200": (989e12, 494.5e12, 67e12),
        "NVIDIA H100 80GB HBM3": (989e12, 494.5e12, 67e12),
        "NVIDIA H100 PCIe": (756e12, 378e12, 51e12),
        "NVIDIA H200 NVL": (835.5e12, 417.5e12, 60e12),
        "Some Other GPU": (None, None, None),
    }
    for name, peaks in peaks_of.items():
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, name=name: name)
        of_fp32 = peak_flops(gpu, "fp32", True), peak_flops(gpu, "fp32", False)
        assert (peak_flops(gpu, "bf16", True), *of_fp32) == peaks
