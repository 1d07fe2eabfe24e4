"""What a training step launches on a GPU, counted on fake tensors."""

import pickle
import types
from dataclasses import replace

import pytest
import torch
from launches import launches_of_step, planned_shapes
from networks import randomize

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.cuda_graph import EAGER_CALLS, Replay
from tabicl_train.model.config import family_of
from tabicl_train.stream import StepStream
from tabicl_train.workers import packed, unpacked


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        (["experiment=mini", "curriculum.stages.short.tables=64"], 600),
        (["experiment=base", "curriculum.stages.short.tables=64"], 910),
        (["experiment=tabicl_v2"], 1480),
    ],
)
def test_a_step_of_one_pack_launches_few_kernels(settings, most):
    config, packs = planned_shapes(settings, 1)
    counter = launches_of_step(config, [tuple(sorted(sum(packs, ())))])
    assert 0 < counter.total() <= most, counter.counted.most_common(20)


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
    replay = Replay()
    replay.enabled = True

    def capture(function):
        calls.append("capture")
        replay.results = (torch.zeros(()),)
        return types.SimpleNamespace(replay=lambda: replay.results[0].add_(1))

    monkeypatch.setattr(replay, "capture", capture)

    def function():
        calls.append("eager")
        return (torch.ones(()),)

    results = [replay(function, ("a",)) for _ in range(EAGER_CALLS + 2)]
    assert calls == ["eager"] * EAGER_CALLS + ["capture"]
    assert [int(x) for (x,) in results[EAGER_CALLS:]] == [1, 2]  # new tensors, which a later replay does not change
    replay(function, ("b",))
    assert calls[-1] == "eager"


def test_a_capture_that_fails_is_said_and_the_step_is_taken(monkeypatch, capsys):
    replay = Replay()
    replay.enabled = True

    def fail(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "capture", fail)
    results = [replay(lambda: (torch.ones(()),), ()) for _ in range(EAGER_CALLS + 1)]
    assert len(results) == EAGER_CALLS + 1
    assert "not replayed as a CUDA graph: operation not permitted" in capsys.readouterr().err
