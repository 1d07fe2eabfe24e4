"""Objectives against their formulas, in packs and alone."""

import math

import pytest
import torch
from networks import small_network
from training_runs import read_metrics, train_short_run

from tabicl_train import register
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL
from tabicl_train.model.pack import Pack
from tabicl_train.training.objectives import (
    CrossEntropy,
    Objective,
    Pinball,
    build_objective,
    losses_of,
    mixing_problem,
)


def tables():
    generator = torch.Generator().manual_seed(0)
    labels = [torch.tensor([0, 1, 2, 0, 0, 0, 1, 2]), torch.tensor([1, 0, 1, 1, 1, 1, 0])]
    return [(torch.randn(len(y), 2, generator=generator), y, 3) for y in labels]


def test_balanced_classes_count_equally_within_each_table():
    network = small_network().eval()
    pack = Pack.of(tables())
    losses = losses_of(network, pack, None, CrossEntropy(class_weights="balanced"))

    log_probabilities = network(pack).double().log_softmax(1)
    expected = []
    start = 0
    for _, y, n in tables():
        queries = y[n:]
        of_rows = -log_probabilities[start : start + len(queries)][range(len(queries)), queries]
        start += len(queries)
        of_classes = [of_rows[queries == label].mean().item() for label in queries.unique()]
        expected.append(sum(of_classes) / len(of_classes))
    assert losses.tolist() == pytest.approx(expected, rel=1e-4)


def test_label_smoothing_mixes_in_the_mean_over_all_outputs():
    network = small_network().eval()
    pack = Pack.of(tables())
    plain, smooth = (losses_of(network, pack, None, CrossEntropy(label_smoothing=share)) for share in (0.0, 0.2))
    logits = network(pack).log_softmax(1)
    even = network.means(-logits.mean(1), pack)
    torch.testing.assert_close(smooth, 0.8 * plain + 0.2 * even, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain, losses_of(network, pack))  # the network's own loss


def test_label_smoothing_counts_with_balanced_classes_as_well():
    network = small_network().eval()
    X = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    pack = Pack.of([(X, torch.arange(9) % 3, 3)])  # as many query rows of each class
    losses = [losses_of(network, pack, None, CrossEntropy(0.2, weights)) for weights in ("none", "balanced")]
    torch.testing.assert_close(*losses)


def test_an_objective_takes_the_targets_that_a_network_declares():
    class Reversed(TabICL):
        def targets(self, pack):
            return 9 - pack.queries()

    network, pack = Reversed(small_network().config).eval(), Pack.of(tables())
    torch.testing.assert_close(losses_of(network, pack, None, CrossEntropy()), losses_of(network, pack))


class Extra(TabICL):
    """Returns auxiliary losses beside its predictions."""

    def forward(self, pack, checkpoint_rows=None):
        return super().forward(pack, checkpoint_rows), {"size": torch.tensor([float(N) for N, _, _ in pack.shapes])}


def test_auxiliary_losses_count_by_their_weights_and_are_left_out_of_predictions():
    from tabicl_train.model.predict import predict

    network = Extra(small_network().config).eval()
    pack = Pack.of(tables())
    both = losses_of(network, pack, None, None, {"size": 0.5})
    torch.testing.assert_close(both - losses_of(network, pack), torch.tensor([4.0, 3.5]))
    assert predict(network, pack).shape == (9, 10)
    with pytest.raises(ConfigError, match=r"auxiliary_losses\.sise: the network returns no such loss; it has size"):
        losses_of(network, pack, None, None, {"sise": 0.5})


class OverThePack(Objective):
    """Is not normalized within a table."""

    def __call__(self, predictions, pack, network):
        losses = network.row_losses(predictions, pack)
        return network.means(losses / losses.mean(), pack)


class OneNumber(Objective):
    """Returns a mean over tables."""

    def __call__(self, predictions, pack, network):
        return network.losses(predictions, pack).mean()


def test_an_objective_that_depends_on_the_other_tables_of_a_pack_is_refused():
    network = small_network()
    for objective in (None, CrossEntropy(0.1, "balanced")):
        assert mixing_problem(network, objective, {}) is None
        assert network.training
    assert "OverThePack of two tables differs" in mixing_problem(network, OverThePack(), {})
    assert "OneNumber returns the shape ()" in mixing_problem(network, OneNumber(), {})
    assert mixing_problem(small_network(max_classes=0, num_quantiles=9), Pinball(), {}) is None


def over_the_pack(losses):
    return losses / losses.mean()


def changing(pack, change):
    change(pack)
    return 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda p, k, n: n.losses(p, k).tolist(), "returns a list; it must return a tensor of shape (2,)"),
        (lambda p, k, n: (n.losses(p, k), {}), "returns a tuple"),
        (lambda p, k, n: None, "returns None"),
        (lambda p, k, n: list(n.losses(p, k)) if n.training else n.losses(p, k), "returns a list"),
        (lambda p, k, n: n.losses(p, k)[:, None], "returns the shape (2, 1) for a pack of 2 tables"),
        (lambda p, k, n: n.losses(p, k).detach(), "returns losses that are detached"),
        (lambda p, k, n: torch.tensor(n.losses(p.data, k).tolist()), "returns losses that are detached"),
        (lambda p, k, n: over_the_pack(n.losses(p, k)) if n.training else n.losses(p, k), " in training mode between"),
        (lambda p, k, n: n.losses(p, k) / (len(k) if torch.is_grad_enabled() else 1), " in training mode between"),
        (lambda p, k, n: torch.rand(()) * over_the_pack(n.losses(p, k)), "of two tables differs"),
        (lambda p, k, n: n.losses(p, k) * changing(k, lambda pack: pack.y.zero_()), "changes y of the pack"),
        (lambda p, k, n: n.losses(p, k) * changing(k, lambda pack: pack.y.data.fill_(1)), "changes y of the pack"),
        (lambda p, k, n: n.losses(p, k) * changing(k, lambda pack: setattr(pack, "X", -k.X)), "changes X of the pack"),
        (lambda p, k, n: torch.rand(()) * n.losses(p, k), None),
        (lambda p, k, n: n.means(torch.rand(len(p)) * n.row_losses(p, k), k), None),
        (lambda p, k, n: n.losses(p, k) + n.losses(n(k), k), None),
    ],
)
def test_functions_that_are_no_objectives_are_refused_by_their_name_at_the_start(function, words, monkeypatch):
    network = small_network(dropout=0.1)
    state = torch.get_rng_state()
    problem = mixing_problem(network, function, {})
    assert network.training and torch.equal(torch.get_rng_state(), state)
    if words is None:
        assert problem is None
        return
    assert words in problem and problem.startswith("<lambda> ")
    monkeypatch.setattr(register.objective, "_entries", register.objective._entries | {"mine": function})
    assert mixing_problem(network, function, {}).startswith("objective=mine ")


def test_a_run_minimizes_its_objective_and_resumes_with_it_only(tmp_path):
    settings = ["objective=cross_entropy", "objective.label_smoothing=0.9", "trainer.log_every=1"]
    for steps in (2, 4):
        train_short_run(tmp_path / "run", *settings, f"trainer.max_steps={steps}")
    train_short_run(tmp_path / "plain", "trainer.log_every=1", "trainer.max_steps=1")
    smooth, plain = (float(read_metrics(tmp_path / name)[0]["loss"]) for name in ("run", "plain"))
    assert smooth != pytest.approx(plain, rel=1e-3) and math.isfinite(smooth)
    with pytest.raises(ConfigError, match=r"objective.label_smoothing was 0.9, is 0.0"):
        train_short_run(tmp_path / "run", "objective=cross_entropy")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["objective=cross_entropy", "objective.label_smoothing=2"], "objective.label_smoothing is 2.0; it must lie"),
        (["objective=cross_entropy", "objective.class_weights=even"], "objective.class_weights is 'even'"),
        (["objective=cross_entropy", "objective.smoothing=0.1"], "objective.smoothing: no such setting"),
        (["objective=pinball"], "objective is pinball, but the network predicts classes"),
    ],
)
def test_wrong_objectives_are_reported(settings, words):
    with pytest.raises(ConfigError) as error:
        compose(["experiment=smoke", *settings])
    assert words in error.value.problems[0]


def test_a_function_is_an_objective_without_options(monkeypatch):
    def half(predictions, pack, network):
        return network.losses(predictions, pack) / 2

    monkeypatch.setattr(register.objective, "_entries", dict(register.objective._entries))
    register.objective("half", half)
    assert build_objective({"name": "half"}) is half
    with pytest.raises(ConfigError, match="gamma: no such setting; there are none"):
        build_objective({"name": "half", "gamma": 1.0})
