"""What a network has inside: representations of rows and weights of attention, compared with a forward pass."""

import numpy as np
import pytest
import torch
from dense_network import Tiny, TinyConfig
from networks import draw_batch, small_network

from priors.real.preprocessing import Normalizer
from tabicl_train import TabICLClassifier, TabICLRegressor
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL
from tabicl_train.model.pack import Pack
from tabicl_train.prediction.attention_weights import attention_weights


class Doubled(TabICL):
    """Overrides `forward` alone, so its pair does not count."""

    def forward(self, pack, checkpoint_rows=None):
        return 2 * super().forward(pack, checkpoint_rows)


@pytest.mark.parametrize("classes", [3, 0])
def test_embeddings_are_what_in_context_learning_gets_of_query_rows(classes):
    network = small_network(max_classes=classes and 10).eval()
    rng = np.random.default_rng(0)
    X, y, queries = rng.normal(size=(40, 4)), rng.integers(0, max(classes, 7), size=40), rng.normal(size=(150, 4))
    kind = TabICLClassifier if classes else TabICLRegressor
    estimator = kind(network, n_estimators=3, norm_methods="none").fit(X, y)
    found = estimator.embed(queries)
    assert found.shape == (3, 150, network.config.row_dim)
    assert found.dtype == np.float32
    assert np.array_equal(found[:, :20], estimator.embed(queries[:20]))  # no row depends on the others

    seen = []
    estimator.network_.icl_predictor.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    numbers = Normalizer("none").fit(X).transform(np.concatenate([X, queries]))
    for member, of_member in zip(estimator.members_, found, strict=True):
        y = (estimator.y_ + member.shift) % len(estimator.classes_) if classes else estimator.y_
        with torch.no_grad():
            estimator.network_(
                Pack.stack(torch.from_numpy(numbers[None, :, member.features]), torch.from_numpy(y)[None])
            )
        np.testing.assert_allclose(of_member, seen[-1][40:], rtol=1e-4, atol=1e-5)  # labeled rows come first


@pytest.mark.parametrize("rule", ["qassmax_elementwise", "ssa"])
@torch.no_grad()
def test_weights_times_values_are_the_outputs_of_the_layers(rule):
    network = small_network(col_scaling=rule, icl_scaling=rule).eval()
    X, y, _ = draw_batch(1, 20, 5, 12, classes=3)
    inputs, outputs = {}, {}
    for name, layer in network.named_attentions():
        layer.register_forward_pre_hook(lambda _, given, name=name: inputs.setdefault(name, given))
        layer.out_proj.register_forward_pre_hook(lambda _, given, name=name: outputs.setdefault(name, given[0]))
    weights = attention_weights(network, X[0].numpy(), y[0])
    assert list(weights) == ["column.0", "column.1", "icl.0", "icl.1"]
    for name, layer in network.named_attentions():
        v = layer.keys(inputs[name][1])[:, 1].double()  # (keys, H, d)
        w = torch.from_numpy(weights[name])
        if name.startswith("column"):
            assert w.shape == (5, 4, 6, 12)  # columns, heads, inducing points, labeled rows
            expected = torch.einsum("ghin,gnhd->gihd", w, v.unflatten(0, (5, 12))).flatten(0, 1)
        else:
            assert w.shape == (4, 8, 12)  # heads, query rows, labeled rows
            expected = torch.einsum("hqn,nhd->qhd", w, v)
        torch.testing.assert_close(outputs[name][-len(expected) :].double(), expected.flatten(1), rtol=1e-4, atol=1e-5)


def test_networks_without_them_are_refused_in_one_line():
    X, y, _ = draw_batch(1, 20, 4, 12, classes=3)
    estimator = TabICLClassifier(Doubled(small_network().config), n_estimators=1).fit(X[0, :12].numpy(), y[0].numpy())
    with pytest.raises(ConfigError, match="Doubled has no representations of rows: it needs the methods encode, deco"):
        estimator.embed(X[0])
    with pytest.raises(ConfigError, match="TinyModule names no attention layers"):
        attention_weights(Tiny(TinyConfig()), X[0], y[0])
