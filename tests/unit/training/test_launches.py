"""What a training step launches on a GPU, counted on fake tensors."""

import pickle
import types
from dataclasses import replace

import pytest
import torch
from launches import launches_of_step, pack_of_zeros, planned_shapes, replays_of_steps
from networks import randomize

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.model.config import family_of
from tabicl_train.stream.steps import StepItem, StepStream, typical_size_of_stage
from tabicl_train.stream.workers import packed, unpacked
from tabicl_train.training import compiling
from tabicl_train.training.cuda_graph import EAGER_CALLS, Captured, Replay, step_problem
from tabicl_train.training.state import untrained_module


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        (["experiment=mini", "curriculum.stages.short.tables=64"], 600),
        # Each takes more than 7 CPU seconds.
        pytest.param(["experiment=base", "curriculum.stages.short.tables=64"], 910, marks=pytest.mark.slow),
        pytest.param(["experiment=tabicl_v2"], 1480, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_one_pack_launches_few_kernels(settings, most):
    config, packs = planned_shapes(settings, 1)
    counter = launches_of_step(config, [tuple(sorted(sum(packs, ())))])
    assert 0 < counter.total() <= most, counter.counted.most_common(20)


@pytest.mark.parametrize("own_kernels", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_packs_of_one_size_launch_the_same(own_kernels):
    """Forward and backward pass, clipping and optimizer: a CUDA graph of one pack is that of the other."""
    settings = ["experiment=mini", "model=tiny", "curriculum.stages.short.tables=16"]
    config, _ = planned_shapes(settings, 0)
    typical = typical_size_of_stage(config.curriculum, config.model, config.seed, 0)
    packs = []
    for step in range(12):
        (shapes,) = planned_shapes(settings, step)[1]
        packs.append(family_of(config.model).padded(config.model, pack_of_zeros(shapes), typical))
    first = packs[0]
    other = next(pack for pack in packs[1:] if pack.layout.key == first.layout.key)
    larger = next(pack for pack in packs if pack.layout.key != first.layout.key)
    found, of_other, of_larger = replays_of_steps(config, [first, other, larger], own_kernels)
    assert first.shapes != other.shapes
    assert len(found.replayed) > 200
    assert found.replayed == of_other.replayed
    assert found.replayed != of_larger.replayed
    assert "_local_scalar_dense" not in {name for name, _ in found.replayed}
    # beside the graph: tables, positions, rates and results are copied
    assert found.total() == of_other.total() <= 9


@pytest.mark.parametrize("grouping", ["circular", "disjoint"])
def test_a_layout_that_was_sent_is_that_of_the_step(grouping):
    config = compose(
        ["experiment=smoke", "prior=dummy", "trainer.accelerator=cpu", f"model.col_grouping={grouping}", "run_dir=x"]
    )
    stream = StepStream(configured_prior(config.prior), config.curriculum, config.model, 0, range(1), prepares=True)
    torch.manual_seed(0)
    network = family_of(config.model)(config.model)
    randomize(network)
    trained = [p for p in network.parameters() if p.requires_grad]
    item = stream.draw(0)
    sent = unpacked(*pickle.loads(pickle.dumps(packed(item))))
    found = []
    for pack in (*sent.packs, *(replace(pack, layout=None) for pack in item.packs)):
        losses = network.losses(network(pack), pack)
        found.append([losses, *torch.autograd.grad(losses.sum(), trained, allow_unused=True)])
    half = len(found) // 2
    assert half and all(pack.layout is not None for pack in sent.packs)
    ends = [span.query_ends for pack in sent.packs for span in (pack.layout.structure.columns.from_inducing,)]
    assert all(piece.first % 4 == 0 for piece in ends)  # as the arrays with which kernels prove themselves
    for prepared, computed in zip(found[:half], found[half:], strict=True):
        for ours, expected in zip(prepared, computed, strict=True):
            assert (ours is None and expected is None) or torch.equal(ours, expected)


def test_a_replay_is_captured_after_eager_calls_and_anew_for_other_tensors(monkeypatch):
    calls = []
    replay = Replay("a sum")
    replay.enabled = True

    def capture(function):
        calls.append("capture")
        results = (torch.zeros(()),)
        return Captured(types.SimpleNamespace(replay=lambda: results[0].add_(1)), results)

    monkeypatch.setattr(replay, "capture", capture)

    def function():
        calls.append("eager")
        return (torch.ones(()),)

    results = [replay(function, ("a",)) for _ in range(EAGER_CALLS + 2)]
    assert calls == ["eager"] * EAGER_CALLS + ["capture"]
    assert [int(x) for (x,) in results[EAGER_CALLS:]] == [1, 2]  # new tensors, which a later replay does not change
    calls.clear()
    for _ in range(EAGER_CALLS + 1):  # another size beside it
        replay(function, ("a",), size=2)
    assert calls == ["eager"] * EAGER_CALLS + ["capture"] and len(replay.captured) == 2
    replay(function, ("b",))
    assert calls[-1] == "eager" and not replay.captured


def test_a_capture_that_fails_is_said_and_the_step_is_taken(monkeypatch, capsys):
    replay = Replay("a sum")
    replay.enabled = True

    def fail(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "capture", fail)
    results = [replay(lambda: (torch.ones(()),), ()) for _ in range(EAGER_CALLS + 1)]
    assert len(results) == EAGER_CALLS + 1
    assert "a sum is not replayed as a CUDA graph: operation not permitted" in capsys.readouterr().err


def captured_by_calls(function):
    """Stand in for a capture: each replay calls the function, and writes its results where the first ones are."""
    results = (torch.zeros(()), torch.zeros(()), torch.zeros((), dtype=torch.bool))

    def replay():
        for result, value in zip(results, function(), strict=True):
            result.copy_(value)

    return Captured(types.SimpleNamespace(replay=replay), results)


def test_replayed_steps_of_padded_packs_train_as_steps_of_their_tables(monkeypatch, capsys):
    config = compose(["experiment=smoke", "prior=dummy", "trainer.accelerator=cpu", "run_dir=x"])
    prior = configured_prior(config.prior)
    losses = []
    for pads in (False, True):
        stream = StepStream(prior, config.curriculum, config.model, config.seed, range(20), pads=pads)
        module = untrained_module(config)
        module.step_replay.enabled = pads
        monkeypatch.setattr(module.step_replay, "capture", captured_by_calls)
        optimizer = module.configure_optimizers()
        losses.append([])
        for step, item in enumerate(stream):
            assert item.packs[0].is_padded == pads
            module.train_on(item, step, 0, optimizer)
            losses[-1].append(module.loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)
    assert 0 < len(module.step_replay.captured) < len(module.kept_packs) < 10
    replays = sum(calls - EAGER_CALLS for calls in module.step_replay.calls.values() if calls > EAGER_CALLS)
    assert replays >= 5

    # Steps that do more, or less, are taken eagerly.
    assert "without a CUDA graph" not in capsys.readouterr().err
    calls = module.step_replay.calls.total()
    hook = module.model.register_forward_hook(lambda *_: None)
    module.train_on(StepItem(19, "smoke", 8, item.packs), 19, 0, optimizer)
    hook.remove()
    module.train_on(StepItem(19, "smoke", 8, item.packs[0].halves()), 19, 0, optimizer)
    assert module.step_replay.calls.total() == calls
    assert len(module.eager_reasons) == 2


def test_a_padded_pack_that_does_not_fit_is_halved(monkeypatch, capsys):
    config = compose(["experiment=smoke", "prior=dummy", "trainer.accelerator=cpu", "run_dir=x"])
    stream = StepStream(configured_prior(config.prior), config.curriculum, config.model, 0, range(1), pads=True)
    losses = []
    for fits in (True, False):
        module = untrained_module(config)
        module.step_replay.enabled = True
        add = module.add_gradients

        def limited(gradients, pack, *more, add=add, fits=fits):
            if pack.is_padded and not fits:
                raise torch.OutOfMemoryError("out of memory")
            return add(gradients, pack, *more)

        monkeypatch.setattr(module, "add_gradients", limited)
        module.train_on(stream.draw(0), 0, 0, module.configure_optimizers())
        losses.append(module.loss)
    torch.testing.assert_close(losses[1], losses[0])
    assert "packs of this size are halved" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        ([], 1, None),
        (["objective=cross_entropy", "objective.label_smoothing=0.1"], 1, None),
        (["trainer.cuda_graphs=never"], 1, "trainer.cuda_graphs is never"),
        (["trainer.accelerator=cpu"], 1, "it does not train on a GPU"),
        ([], 2, "2 ranks exchange gradients"),
        (["trainer.compile=true"], 1, "trainer.compile is true"),
        (["model=tabicl_v2"], 1, "its network has more than 5,000,000 parameters"),
        (["model.dropout=0.1"], 1, "model.dropout is 0.1"),
        (["objective=cross_entropy", "objective.class_weights=balanced"], 1, "objective.class_weights depend"),
        (["model.col_grouping=disjoint"], 1, "its network cannot be padded"),
        (["model.icl_scaling=ssa"], 1, "its network cannot be padded"),
    ],
)
def test_a_run_replays_whole_steps_where_it_can(settings, ranks, expected, monkeypatch):
    monkeypatch.setattr(compiling, "compiler_problems", lambda _: [])
    config = compose(["experiment=mini", "run_dir=x", "trainer.accelerator=cuda", *settings])
    found = step_problem(config, ranks)
    assert found == expected or found.startswith(expected)
