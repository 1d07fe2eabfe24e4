"""One step of training: what it waits for, and its gradients."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from networks import TINY, randomize, small_network, tiny_network
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import THREE_STAGES, last_checkpoint, train_short_run

from tabicl_train import register
from tabicl_train.check.gpu.small import random_pack
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import CurriculumConfig, OptimizerConfig, StageConfig
from tabicl_train.model import TabICL
from tabicl_train.model.pack import Pack
from tabicl_train.stream.steps import StepItem
from tabicl_train.training.module import RETRY, Gradients, TrainedNetwork, query_losses
from tabicl_train.training.objectives import Objective
from tabicl_train.training.precision import Precision
from tabicl_train.training.state import untrained_module


class Waits(TorchDispatchMode):
    """Counts the operations that read a value of a tensor, for which the host waits for the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return function(*args, **(kwargs or {}))


class CountWaits:
    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def start(self, state) -> None:
        self.context.callbacks.append(EndCount(self))  # called after all others

    def before_step(self, state, item) -> None:
        self.mode = Waits()
        self.mode.__enter__()


class EndCount:
    def __init__(self, counting: CountWaits) -> None:
        self.counting = counting

    def after_step(self, state, item) -> None:
        self.counting.mode.__exit__(None, None, None)
        self.counting.counts[state.step] = self.counting.mode.count


class Training:
    """Steps of a tiny network without the loop around them. The packs of all steps are the same table."""

    def __init__(self, *stages: StageConfig, dropout: float = 0.0, optimizer: str = "muon", packs: int = 1) -> None:
        curriculum = CurriculumConfig({str(number): stage for number, stage in enumerate(stages)})
        settings = replace(TINY, dropout=dropout), curriculum, OptimizerConfig(optimizer), Precision("fp32", "")
        torch.manual_seed(0)
        self.module = TrainedNetwork(*settings, seed=0)
        randomize(self.module.model)
        self.optimizer = self.module.configure_optimizers()
        X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
        self.packs, self.step = [Pack.of([(X, (X[:, 0] > 0).long(), 20)]) for _ in range(packs)], 0

    def take_step(self, rank: int = 0) -> None:
        item = StepItem(self.step, "", len(self.packs), self.packs)
        self.module.train_on(item, self.step, rank, self.optimizer)
        self.step += 1

    def weights(self) -> dict[str, torch.Tensor]:
        named = self.module.model.named_parameters()
        return {name: p.detach().clone() for name, p in named if p.requires_grad}


@pytest.mark.parametrize("optimizer", ["muon", "muon_all", "adamw"])
def test_a_step_decays_matrices_as_its_stage_says_and_vectors_never(optimizer):
    one = StageConfig(steps=1, warmup=0.0, learning_rate=0.1, weight_decay=0.5)
    two = StageConfig(steps=2, warmup=0.0, learning_rate=0.02, final_learning_rate=0.01, weight_decay=2.0)
    decayed = Training(one, two, optimizer=optimizer)
    plain = Training(replace(one, weight_decay=0.0), replace(two, weight_decay=0.0), optimizer=optimizer)
    for factor in (0.1 * 0.5, 0.02 * 2.0, 0.01 * 2.0):  # learning rate times decay
        decayed.module.load_state_dict(plain.module.state_dict())
        before = plain.weights()
        plain.take_step()
        decayed.take_step()
        for (name, a), b in zip(plain.weights().items(), decayed.weights().values(), strict=True):
            expected = a if a.ndim < 2 else a - factor * before[name]
            torch.testing.assert_close(b, expected, rtol=0, atol=0 if a.ndim < 2 else 1e-6)


def test_adamw_beside_muon_has_a_fraction_of_the_learning_rate():
    moved = []
    for factor in (1.0, 0.125):
        training = Training(StageConfig(steps=1, warmup=0.0, learning_rate=0.1, weight_decay=0.5))
        training.optimizer.adamw_factor = factor
        before = training.weights()
        training.take_step()
        moved.append({name: weight - before[name] for name, weight in training.weights().items()})
    kinds = set()
    for name, parameter in training.module.model.named_parameters():
        if parameter.requires_grad:
            is_hidden = training.module.model.is_hidden_matrix(name, parameter)
            kinds.add(is_hidden)
            torch.testing.assert_close(moved[1][name], moved[0][name] * (1 if is_hidden else 0.125))
    assert kinds == {True, False}


def test_a_stage_decides_whether_column_attention_is_in_fp32():
    stages = [StageConfig(steps=1, col_attention_fp32=fp32) for fp32 in (True, None, True, False, "auto", "auto")]
    training = Training(*stages)
    network = training.module.model
    seen = []
    for number in range(6):
        for block in network.col_embedder.tf_col["blocks"]:
            for layer in (block.multihead_attn1.attn, block.multihead_attn2.attn):
                layer.own_kernels = torch.bfloat16 if number == 5 else None
        network.config = replace(TINY, col_attention_fp32=number == 1)  # what null takes
        training.take_step()
        seen.append({layer.fp32 for name, layer in network.named_attentions() if name.startswith("column")})
        assert not any(layer.fp32 for name, layer in network.named_attentions() if name.startswith("icl"))
    assert seen == [{True}, {True}, {True}, {False}, {True}, {False}]


def test_a_column_stage_of_its_own_trains_unless_a_stage_asks_it_for_fp32():
    class OwnColumns(torch.nn.Module):
        def __init__(self, columns) -> None:
            super().__init__()
            self.tf_col = columns.tf_col
            self.columns = columns

        def forward(self, *inputs):
            return self.columns(*inputs)

    training = Training(StageConfig(steps=1), StageConfig(steps=1, col_attention_fp32=True))
    training.module.model.col_embedder = OwnColumns(training.module.model.col_embedder)
    training.take_step()
    with pytest.raises(ValueError, match="the column stage OwnColumns has no such setting"):
        training.take_step()


def test_a_step_has_the_learning_rate_of_the_schedule_at_its_number():
    stage = StageConfig(steps=4, warmup=0.0, learning_rate=0.4, final_learning_rate=0.1, schedule="linear")
    training = Training(stage, stage)
    rates = []
    for _ in range(8):
        training.take_step()
        rates.append({group["lr"] for group in training.optimizer.param_groups})
    assert [rate for (rate,) in rates] == pytest.approx([0.4, 0.3, 0.2, 0.1] * 2)


def test_frozen_parts_keep_their_weights_and_have_no_gradient():
    training = Training(StageConfig(frozen=["column", "row"]))
    before = training.weights()
    training.take_step()
    for name, after in training.weights().items():
        assert torch.equal(after, before[name]) == (not name.startswith("icl_predictor")), name
    parameters = dict(training.module.model.named_parameters())
    assert all((p.grad is None) == (not name.startswith("icl_predictor")) for name, p in parameters.items())


def test_gradients_are_flat_and_aligned():
    a, b, c = (torch.nn.Parameter(torch.zeros(n)) for n in (3, 70, 5))
    gradients = Gradients([a, b], [c])
    gradients.add((torch.ones(3), torch.full((70,), 2.0)), torch.tensor(4.0))
    gradients.add((torch.ones(3), torch.zeros(70)), torch.tensor(1.0))
    assert gradients.flat.sum() == 6 + 140 + 5 and gradients.loss == 5
    assert torch.equal(a.grad, torch.full((3,), 2.0))
    assert b.grad.sum() == 140
    assert c.grad is None
    assert all(view.storage_offset() % 64 == 0 for view in gradients.views)


def test_gradients_are_scaled_down_to_the_clip_and_never_up():
    exact = Training(StageConfig(clip=math.inf))
    exact.take_step()
    views, norm = exact.module.gradients.views, exact.module.grad_norm.item()
    assert norm == pytest.approx(math.sqrt(sum(view.double().square().sum().item() for view in views)), rel=1e-5)
    for clip in (norm / 7, 2 * norm):
        training = Training(StageConfig(clip=clip))
        training.take_step()
        assert training.module.grad_norm.item() == norm  # before clipping
        for view, unclipped in zip(training.module.gradients.views, views, strict=True):
            torch.testing.assert_close(view, unclipped * min(1.0, clip / norm), rtol=1e-4, atol=1e-7)


def noisy(predictions, pack, network):
    """An objective that draws from torch's generator."""
    return network.means(network.row_losses(predictions, pack), pack) + torch.rand(len(pack))


@pytest.mark.parametrize("source", ["dropout", "layer", "objective"])
def test_random_numbers_are_a_function_of_step_rank_and_pack(source):
    def losses(rank: int, steps: int = 2, source: str = source) -> list[float]:
        """Of two equal packs in each step, with the same weights."""
        dropout = 0.3 if source == "dropout" else 0.0
        training = Training(StageConfig(learning_rate=0.0, final_learning_rate=0.0), dropout=dropout, packs=2)
        if source == "layer":  # of a plug-in's network, whose settings do not say so
            training.module.model.row_interactor.register_forward_hook(lambda *a: F.dropout(a[-1], 0.3))
        elif source == "objective":
            training.module.objective = noisy
        torch.manual_seed(steps)  # the global state has no effect
        add_gradients, found = training.module.add_gradients, []
        training.module.add_gradients = lambda *a: found.extend(add_gradients(*a).tolist())
        for _ in range(steps):
            training.take_step(rank)
        return found

    first = losses(0)
    assert len({*first, *losses(1)}) == 8
    assert losses(0) == first and losses(0, steps=1) == first[:2]
    assert len(set(losses(0, source="none"))) == 1


def test_random_numbers_of_an_optimizer_are_those_of_all_ranks_and_new_in_each_step():
    drawn = []
    for rank in (0, 1):
        training = Training(StageConfig(), packs=2)
        training.module.objective = noisy
        training.optimizer.register_step_pre_hook(lambda *_: drawn.append(torch.rand(()).item()))
        training.take_step(rank)
        training.take_step(rank)
    assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1]


class Draws:
    """Keeps a random number of torch from before each step."""

    def __init__(self):
        self.drawn = []

    def before_step(self, state, item):
        self.drawn.append(torch.rand(()).item())


def test_a_callback_draws_the_same_random_numbers_after_a_stop(tmp_path):
    whole, parts = Draws(), Draws()
    train_short_run(tmp_path / "whole", "trainer.max_steps=2", callbacks=(whole,))
    for steps in (1, 2):
        train_short_run(tmp_path / "parts", f"trainer.max_steps={steps}", callbacks=(parts,))
    assert parts.drawn == whole.drawn and len({*whole.drawn}) == 2


def test_the_host_waits_for_the_device_at_logged_steps_and_saves_only(tmp_path, monkeypatch):
    monkeypatch.setattr(TabICL, "_check", lambda *_: None)  # reads labels where they are on the CPU
    counting = CountWaits()
    train_short_run(
        tmp_path / "run", "trainer.log_every=5", "checkpoint.every=8", "trainer.precision=fp16",
        "model.dropout=0.1", callbacks=(counting,),
    )  # fmt: skip
    assert sorted(counting.counts) == list(range(1, 17))
    waited = [step for step, count in counting.counts.items() if count]
    assert waited
    assert set(waited) <= {5, 8, 10, 15, 16}
    assert 5 in waited


def test_losses_are_cross_entropies_of_the_query_rows_of_each_table(monkeypatch):
    network = tiny_network()
    generator = torch.Generator().manual_seed(0)
    shapes = [(20, 14), (9, 2), (30, 29)]
    tables = [(torch.zeros(N, 2), torch.randint(4, (N,), generator=generator), n) for N, n in shapes]
    logits = [torch.randn(N - n, 4, generator=generator).half() for N, n in shapes]
    monkeypatch.setattr(network, "forward", lambda pack, _: torch.cat(logits))
    losses = query_losses(network, Pack.of(tables))
    expected = []
    for (_, y, n), own in zip(tables, logits, strict=True):
        p = own.double().softmax(-1)
        expected.append(-sum(math.log(p[i, label]) for i, label in enumerate(y[n:])) / len(p))
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)


def test_gradients_in_pieces_are_those_of_the_whole():
    config = compose(["experiment=smoke", "trainer.accelerator=cpu"])
    module = untrained_module(config)
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(N, M, generator=generator) for N, M in [(30, 4), (22, 1), (30, 4), (41, 3), (25, 6)]]
    pack = Pack.of((X, (X[:, 0] > 0).long(), 20) for X in tables)
    parameters = [p for p in module.model.parameters() if p.requires_grad]
    whole, pieces = Gradients(parameters, []), Gradients(parameters, [])
    module.add_gradients(whole, pack, 5 / 8)
    one, other = pack.halves()
    assert torch.equal(torch.cat([one.X, other.X]), pack.X)
    assert (len(one), len(other)) == (3, 2)
    for piece in (one, *other.halves()):
        module.add_gradients(pieces, piece, len(piece) / 8)
    torch.testing.assert_close(pieces.flat, whole.flat, rtol=1e-4, atol=1e-6)
    assert whole.flat.abs().max() > 0.01
    expected = torch.autograd.grad(query_losses(module.model, pack).mean() * 5 / 8, parameters)
    for view, gradient in zip(whole.views, expected, strict=True):
        torch.testing.assert_close(view, gradient)


def test_packs_of_more_tokens_than_did_not_fit_are_halved(monkeypatch, capsys):
    """Memory for 215 tokens: packs of more are halved, at once where as many have not fitted before."""
    module = untrained_module(compose(["experiment=smoke", "trainer.accelerator=cpu"]))
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(N, M, generator=generator) for N, M in [(10, 1), (12, 2), (20, 3), (30, 4), (20, 1)]]
    first, second = (Pack.of((X, (X[:, 0] > 0).long(), 5) for X in some) for some in (tables, tables[:4]))
    item = StepItem(0, "smoke", 9, [first, second])
    parameters = [p for p in module.model.parameters() if p.requires_grad]
    whole, pieces = Gradients(parameters, []), Gradients(parameters, [])

    def losses_after_each_pack(gradients: Gradients) -> list[float]:
        losses = []
        for number in (0, 1):
            module.accumulate(gradients, item, number, None)
            losses.append(gradients.loss.item())
        return losses

    expected = losses_after_each_pack(whole)
    assert module.too_large == math.inf
    assert 0 < expected[0] < expected[1]
    assert whole.flat[:-1].abs().max() > 0.01

    tried = []

    def limited(model, pack, *settings):
        tried.append(tokens := module.tokens_of(pack))
        if tokens > 215:
            raise torch.OutOfMemoryError("no memory")
        return query_losses(model, pack, *settings)

    sizes = [module.tokens_of(Pack.of([(X, X[:, 0].long(), 5)])) for X in tables]
    assert sizes == [40, 60, 120, 210, 80]
    monkeypatch.setattr("tabicl_train.training.module.query_losses", limited)
    losses = losses_after_each_pack(pieces)
    assert tried == [510, 220, 100, 120, 210, 80, 100, 120, 210]  # neither 290 nor 430 or 330, as 220 did not fit
    assert capsys.readouterr().err.count("did not fit") == 2
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(pieces.flat, whole.flat, rtol=1e-4, atol=1e-6)
    tried.clear()
    for step in (RETRY - 1, RETRY):
        module.accumulate(pieces, replace(item, step=step), 0, None)
    assert tried[:2] == [100, 120] and 510 in tried  # whole again only after a while


def test_each_stage_recomputes_as_it_says_also_after_a_resume(tmp_path, monkeypatch):
    recomputed = []

    class Count:
        def before_step(self, state, item) -> None:
            recomputed.append((item.step, 0))

    def counting(block, *args, **kwargs):
        step, count = recomputed.pop()
        recomputed.append((step, count + 1))
        return torch.utils.checkpoint.checkpoint(block, *args, **kwargs)

    monkeypatch.setattr("tabicl_train.model.attention.checkpoint", counting)
    rows = [f"curriculum.stages.{text}" for text in ("stage1.checkpoint_rows=1", "stage3.checkpoint_rows=1")]
    for stop in (8, 13):
        train_short_run(
            tmp_path / "run", *rows, f"trainer.max_steps={stop}", callbacks=(Count(),), settings=THREE_STAGES
        )
    assert [step for step, _ in recomputed] == list(range(13))
    assert [step for step, count in recomputed if count] == [*range(6), 12]
    assert last_checkpoint(tmp_path / "run")["config"]["model"]["checkpoint_rows"] == 20_000


class Shrinking(Objective):
    """An objective of a plug-in, which depends on the weights themselves."""

    def __call__(self, predictions, pack, network):
        biases = [p.square().sum() for name, p in network.named_parameters() if name.endswith("in_proj_bias")]
        return network.losses(predictions, pack) + sum(biases)


class Variant(TabICL):
    """A network of a plug-in, whose stages may use keys otherwise."""


def step_on_biases(network, objective=None):
    """The gradients of the biases of attention by autograd, those that a step takes, and the changes of the biases."""
    curriculum = CurriculumConfig({"one": StageConfig(steps=1, warmup=0.0, clip=math.inf)})
    module = TrainedNetwork(network.config, curriculum, OptimizerConfig("adamw"), Precision("fp32", ""), 0, objective)
    module.model = network
    biases = {name: p for name, p in network.named_parameters() if name.endswith("in_proj_bias")}
    pack = random_pack()
    exact = torch.autograd.grad(query_losses(network, pack, None, objective).mean(), list(biases.values()))
    before = {name: p.detach().clone() for name, p in biases.items()}
    module.train_on(StepItem(0, "", len(pack), [pack]), 0, 0, module.configure_optimizers())
    for gradient, (name, p) in zip(exact, biases.items(), strict=True):
        yield name, gradient.chunk(3), p.grad.chunk(3), (p.detach() - before[name]).chunk(3)


@pytest.mark.parametrize("rule", register.scaling)
def test_biases_that_softmax_does_not_see_stay_as_they_are(rule):
    """AdamW would make steps of the full rate of the rounding of their gradients. Signed averaging sees them."""
    for name, exact, taken, change in step_on_biases(small_network(col_scaling=rule, icl_scaling=rule)):
        in_rows = name.startswith("row")
        averages = register.scaling[rule].averages and "multihead_attn2" not in name
        if in_rows or averages:
            assert exact[1].norm() > 1e-2 * exact[0].norm(), name
            torch.testing.assert_close(taken, exact)
            assert change[1].all(), name
        else:
            assert exact[1].norm() < 1e-3 * exact[0].norm(), name  # rounding
            assert not taken[1].any() and not change[1].any(), name
            assert change[0].all() and change[2].all(), name


@pytest.mark.parametrize("objective", [None, Shrinking()])
def test_biases_that_a_plug_in_may_see_are_trained(objective):
    network = small_network() if objective else Variant(small_network().config)
    randomize(network)
    for name, exact, taken, change in step_on_biases(network, objective):
        torch.testing.assert_close(taken, exact)
        assert change[1].any(), name


def test_frozen_biases_stay_without_gradient():
    training = Training(StageConfig(steps=1, warmup=0.0, frozen=["column"]), StageConfig(steps=1, warmup=0.0))
    for parts in (1, 3):
        before = training.weights()
        training.take_step()
        changed = {name for name, weight in training.weights().items() if not torch.equal(weight, before[name])}
        assert len({name.partition(".")[0] for name in changed}) == (2 if parts == 1 else 3)
        assert len(training.module.gradients.rounding) == (2 if parts == 1 else 4)
