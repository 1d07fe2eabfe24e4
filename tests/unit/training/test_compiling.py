"""Compiled blocks. Most tests trace only: code generation takes a minute on one core.

torch._dynamo is imported in the tests, when its name is used: whoever collects them would spend 1.3 CPU seconds.
"""

import copy
import dataclasses
import sysconfig

import pytest
import torch
from networks import randomize
from training_runs import SHORT_RUN_OF_ANY_FAMILY, read_metrics, train_by_command, train_short_run

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import TrainerConfig
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL, TabICLConfig, attention
from tabicl_train.model.kernels import kernels_of
from tabicl_train.model.pack import Pack
from tabicl_train.stream.curriculum import plan_step
from tabicl_train.training import checks, compiling

SMALL = TabICLConfig(
    embed_dim=16, col_num_blocks=1, col_num_heads=2, col_num_inducing=4, row_num_blocks=2, row_num_heads=2,
    row_num_cls=2, icl_num_blocks=2, icl_num_heads=2, checkpoint_rows=500,
)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], True),
        (["trainer.compile=false"], False),
        (["trainer.max_steps=2000"], False),
        (["model.dropout=0.1"], False),
        (["model=tiny"], False),
        (["model=tiny", "trainer.compile=true"], True),
        (["trainer.accelerator=cpu"], False),
    ],
)
def test_a_run_compiles_by_default_where_it_pays(settings, expected, monkeypatch):
    monkeypatch.setattr(compiling, "compiler_problems", lambda _: [])
    config = compose(["experiment=tabicl_v2", "run_dir=unused", "trainer.accelerator=cuda", *settings])
    with torch.device("meta"):
        network = TabICL(config.model)
    assert compiling.is_wanted(config, network) == expected


@pytest.fixture
def tracing():
    """Two equal networks, the first one with blocks that are traced."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    plain = TabICL(SMALL)
    randomize(plain)
    traced = copy.deepcopy(plain)
    compiling.compile_blocks(traced, backend="aot_eager")
    yield traced, plain
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def pack_of(shapes: list[tuple[int, int, int]]) -> Pack:
    generator = torch.Generator().manual_seed(0)
    return Pack.of(
        (torch.randn(N, M, generator=generator), torch.randint(0, 10, (N,), generator=generator), n)
        for N, n, M in shapes
    )


def gradients(network: TabICL, pack: Pack) -> list[torch.Tensor]:
    loss = network.losses(network(pack), pack).mean()
    return [
        loss, *torch.autograd.grad(loss, [p for p in network.parameters() if p.requires_grad], materialize_grads=True)
    ]  # fmt: skip


def shapes_of(curriculum, step: int, most: int) -> list[tuple[int, int, int]]:
    """The tables of a step's first pack, at most so many."""
    groups = plan_step(curriculum, SMALL, 0, step).packs(0, 1)[0]
    specs = [group.spec for group in groups for _ in group.tables]
    return [(spec.num_rows, spec.train_size, spec.num_features) for spec in specs][:most]


@pytest.mark.slow
def test_few_graphs_serve_all_stages_and_compute_the_same(tracing):
    """The stages of TabICLv2 with a sixteenth of the rows; the last one has single tables, and recomputes some."""
    traced, plain = tracing
    curriculum = compose(["experiment=tabicl_v2", "trainer.accelerator=cpu"]).curriculum
    for stage in curriculum.stages.values():
        stage.steps, stage.rows = 2, [max(12, rows // 16) for rows in stage.rows]
    curriculum.stages["stage3"].rows = [100, 1000]
    found = []
    for step in range(6):
        pack = pack_of(shapes_of(curriculum, step, most=8 if step < 4 else 1 + step % 2))
        scalings = [layer for _, layer in traced.named_scalings()]
        for layer in scalings if step % 2 == 1 else []:  # as at a logged step
            layer.gate_sums = torch.zeros(3)
        for ours, theirs in zip(gradients(traced, pack), gradients(plain, pack), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        for layer in scalings if step % 2 == 1 else []:
            assert layer.gate_sums[2] == (2 if max(N for N, _, _ in pack.shapes) > SMALL.checkpoint_rows else 1)
            layer.gate_sums = None
        found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert found[1] == found[3], found  # other sizes alone do not compile anew
    assert 5 <= found[-1] <= compiling.GRAPHS, found


def test_weights_keep_their_names_and_copies_run_as_they_are(tracing):
    traced, plain = tracing
    assert traced.state_dict().keys() == plain.state_dict().keys()
    assert all(block._compiled_call_impl is not None for block in traced.blocks())
    other = copy.deepcopy(traced).eval()
    with torch.no_grad():
        other(pack_of([(20, 12, 3)]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_what_is_missing_for_compiling_is_one_clear_line(monkeypatch, tmp_path):
    wanted = TrainerConfig(compile=True, accelerator="cpu")
    problems_of = compiling.compiler_problems
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/" + name)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(compiling, "is_installed", lambda _: False)
    monkeypatch.setattr(torch, "__file__", "/my folder/torch/__init__.py")
    assert "fails in a path with a space (/my folder/torch)" in problems_of(wanted)[0]
    monkeypatch.setattr(torch, "__file__", "/folder/torch/__init__.py")
    assert problems_of(wanted) == []
    assert "needs Triton;" in problems_of(dataclasses.replace(wanted, accelerator="cuda"))[0]
    monkeypatch.setattr(compiling, "is_installed", lambda _: True)
    assert problems_of(dataclasses.replace(wanted, accelerator="cuda")) == []
    (tmp_path / "Python.h").unlink()
    assert "needs Python.h" in problems_of(wanted)[0]
    monkeypatch.setattr("shutil.which", lambda name: None)
    for accelerator in ("cpu", "cuda"):
        assert "needs a compiler (" in problems_of(dataclasses.replace(wanted, accelerator=accelerator))[0]


def test_dropout_and_compiling_exclude_each_other():
    with pytest.raises(ConfigError) as error:
        compose(["experiment=smoke", "trainer.compile=true", "model.dropout=0.1"])
    assert "trainer.compile is true, which needs model.dropout=0; it is 0.1" in str(error.value)


def test_settings_without_effect_are_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(checks, "compiler_problems", lambda _: [])
    settings = ("model=sequence_tiny", "prior=quantifiers", "curriculum.stages.smoke.features=[1,1]")
    settings += ("trainer.compile=true", "trainer.max_steps=1")
    train_short_run(tmp_path / "run", *settings, settings=SHORT_RUN_OF_ANY_FAMILY)
    said = capsys.readouterr().err
    assert "warning   trainer.compile has no effect" in said
    assert "compiled blocks" not in said


@pytest.mark.slow  # 22 CPU seconds of tracing
def test_own_kernels_stay_in_the_graphs_of_blocks(tracing, monkeypatch):
    """Traced with fake kernels, whose shapes alone count."""
    triton_attention = pytest.importorskip("tabicl_train.model.triton_attention")
    traced, _ = tracing
    launched: set[str] = set()
    monkeypatch.setattr(attention, "KERNEL_DEVICES", ["cpu"])
    for kernel in ("rows", "tokens_read_points", "points_read_tokens"):
        for way in ("forward", "backward"):
            monkeypatch.setattr(triton_attention, f"{kernel}_{way}", Launched(launched, f"{kernel} {way}"))
    kernels_of(traced, torch.float32).use()
    for layer in (block.attn for block in traced.icl_predictor.tf_icl["blocks"]):
        assert not layer.own_kernels
    for shapes in ([(20, 12, 3), (20, 12, 3), (30, 21, 7)], [(25, 13, 4), (18, 12, 9), (33, 20, 11)]):
        gradients(traced, pack_of(shapes))
        found = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gradients(traced, pack_of([(40, 30, 5), (19, 12, 2), (33, 20, 40)]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == found  # other sizes alone do not compile anew
    assert len(launched) == 6


class Launched:
    """A kernel that is noted and does nothing."""

    def __init__(self, names: set[str], name: str) -> None:
        self.names, self.name = names, name

    def __getitem__(self, grid):
        return lambda *arrays, **constants: self.names.add(self.name)


@pytest.mark.campaign  # generates code for minutes
def test_a_compiled_run_learns_the_same_and_goes_on(tmp_path):
    if missing := compiling.compiler_problems(TrainerConfig(compile=True, accelerator="cpu")):
        pytest.skip(missing[0])
    settings = ("prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu", "trainer.log_every=1")
    train_by_command(tmp_path / "plain", *settings, "trainer.max_steps=4")
    said = train_by_command(
        tmp_path / "compiled", *settings, "trainer.compile=true", "trainer.max_steps=2", "validation.every=2"
    )
    assert "compiled blocks" in said
    assert "validation step 2" in said
    assert "graphs" not in said
    train_by_command(tmp_path / "compiled", *settings, "trainer.compile=true", "trainer.max_steps=4")
    pairs = list(zip(read_metrics(tmp_path / "plain"), read_metrics(tmp_path / "compiled"), strict=True))
    assert len(pairs) == 4
    for a, b in pairs:
        assert float(b["loss"]) == pytest.approx(float(a["loss"]), rel=1e-4)
        assert float(b["grad_norm"]) == pytest.approx(float(a["grad_norm"]), rel=1e-3)
