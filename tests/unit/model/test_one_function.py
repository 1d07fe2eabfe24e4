"""What is scored is what was trained: predictions come from `forward`, or from a pair that agrees with it."""

import pytest
import torch
from networks import draw_batch, small_network
from training_runs import train_short_run

from tabicl_train import register
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model import config as family
from tabicl_train.model.family import encodes
from tabicl_train.model.pack import Pack
from tabicl_train.model.predict import decode, encode, forward_differs, pack_of_queries, predict
from tabicl_train.prediction.classifier import TabICLClassifier
from tabicl_train.weights.export import export_weights
from tabicl_train.weights.pretrained import Pretrained


class Doubled(TabICL):
    """Overrides `forward` alone."""

    def forward(self, pack, checkpoint_rows=None):
        return 2 * super().forward(pack, checkpoint_rows)


class Wrong(TabICL):
    """Its pair predicts something else than `forward`."""

    def forward(self, pack, checkpoint_rows=None):
        return 2 * super().forward(pack, checkpoint_rows)

    def encode(self, context, *, num_classes, tokens):
        return super().encode(context, num_classes=num_classes, tokens=tokens)

    def decode(self, state, queries, *, temperature, tokens):
        return super().decode(state, queries, temperature=temperature, tokens=tokens)


def of_class(cls):
    network = small_network()
    other = cls(network.config)
    other.load_state_dict(network.state_dict())
    return other.eval()


def test_the_pair_counts_unless_a_more_derived_class_overrides_forward_alone():
    class Further(Wrong):
        pass

    assert encodes(TabICL)
    assert encodes(Wrong)
    assert encodes(Further)
    assert not encodes(Doubled)


def test_a_subclass_that_overrides_forward_is_scored_by_it_everywhere():
    network = of_class(Doubled)
    X, y, _ = draw_batch(2, 30, 4, 20, classes=3)
    pack = Pack.stack(X, y)
    with torch.no_grad():
        trained = network(pack)
    assert torch.equal(predict(network, pack), trained)
    state = encode(network, Pack.of((rows[:20], labels, 20) for rows, labels in zip(X, y, strict=True)), 3)
    apart = torch.cat([decode(network, state, pack_of_queries(X[:, start : start + 5].unbind())) for start in (20, 25)])
    expected = trained.unflatten(0, (2, 2, 5)).transpose(0, 1).flatten(0, 2)[:, :3]
    assert torch.allclose(apart, expected, atol=1e-5)

    estimator = TabICLClassifier(network, n_estimators=1, norm_methods=("none",), random_state=None)
    with torch.no_grad():
        halved = TabICLClassifier(of_class(TabICL), n_estimators=1, norm_methods=("none",), random_state=None)
    rows, labels = X[0].numpy(), y[0].numpy()
    twice = estimator.fit(rows[:20], labels).predict_proba(rows[20:])
    once = halved.fit(rows[:20], labels).predict_proba(rows[20:])
    assert abs(twice - once).max() > 1e-3  # logits twice as large are other probabilities
    ratios = torch.log(torch.tensor(twice[:, 0] / twice[:, 1])) / torch.log(torch.tensor(once[:, 0] / once[:, 1]))
    assert torch.allclose(ratios, torch.full_like(ratios, 2.0), atol=1e-3)


def test_a_pair_that_predicts_something_else_is_named():
    assert forward_differs(of_class(TabICL)) is None
    assert forward_differs(of_class(TabICL), perturbed=True) is None
    assert forward_differs(of_class(Doubled)) is None  # only one way
    assert "Wrong.encode and decode predict something else" in forward_differs(of_class(Wrong))


def test_a_network_with_a_pair_that_predicts_otherwise_is_not_trained_or_exported(tmp_path, monkeypatch):
    monkeypatch.setattr(register.network, "_entries", dict(register.network._entries))
    register.network._entries["tabicl"] = family.Family(Wrong, TabICLConfig)
    with pytest.raises(ConfigError, match=r"Wrong\.encode and decode predict something else"):
        train_short_run(tmp_path / "run", "trainer.max_steps=1")
    network = small_network()
    weights = {name: value.detach() for name, value in network.state_dict().items()}
    with pytest.raises(ConfigError, match=r"is not written: Wrong\.encode"):
        export_weights(Pretrained(network.config, weights), str(tmp_path / "hub"), "hub")


def test_the_comparison_changes_no_weights_and_no_random_state():
    network = of_class(Wrong)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.random.get_rng_state()
    forward_differs(network, perturbed=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_weights_that_start_at_zero_hide_no_difference_at_the_start():
    class Silent(TabICL):
        """Differs from its pair only by a layer that starts at zero."""

        def __init__(self, config):
            super().__init__(config)
            self.extra = torch.nn.Parameter(torch.zeros(()))

        def forward(self, pack, checkpoint_rows=None):
            return super().forward(pack, checkpoint_rows) + 50 * self.extra

        encode, decode = TabICL.encode, TabICL.decode

    network = Silent(small_network().config).eval()
    assert forward_differs(network) is None
    assert "Silent.encode" in forward_differs(network, perturbed=True)


def test_more_classes_than_a_network_without_the_pair_has_are_refused_in_one_line():
    X, y = torch.randn(20, 3), torch.arange(20)
    with pytest.raises(ConfigError, match="12 classes, and the network predicts at most 10"):
        encode(of_class(Doubled), Pack.of([(X, y % 12, 20)]), 12)
    assert encode(of_class(Doubled), Pack.of([(X, y % 10, 20)]), 10).num_classes == 10
