"""The TabICL with thinking rows and a retrieval decoder: against a TabICL, a closed form, and its own other ways."""

import math

import pytest
import torch
import torch.nn.functional as F
from networks import SMALL, draw_batch, randomize
from torch.utils.flop_counter import FlopCounterMode

from tabicl_train import TabICLClassifier
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.lab.retrieval import SMALLEST, Retrieval, RetrievalConfig
from tabicl_train.model import TabICL, TabICLConfig, attention
from tabicl_train.model.costs import kept_by_part
from tabicl_train.model.encoding import class_probabilities, class_tree, represent_labeled, represent_queries
from tabicl_train.model.pack import Pack, context_layout, log_counts
from tabicl_train.model.predict import forward_differs, pack_of_queries, predict
from tabicl_train.prediction.attention_weights import attention_weights
from tabicl_train.weights.export import save_public

OFF = {"thinking_rows": 0, "retrieval": False}
SIZES = ((30, 20, 4), (30, 20, 4), (9, 1, 2), (50, 30, 4), (12, 11, 7))  # rows, labeled rows, features


def network(random: bool = True, **options) -> Retrieval:
    torch.manual_seed(0)
    built = Retrieval(RetrievalConfig(**{**SMALL, **options}))
    if random:
        randomize(built)
    return built.eval()


def tables(classes: int = 10) -> list:
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for N, n, M in SIZES:
        y = torch.randint(classes, (N,), generator=generator) if classes else torch.randn(N, generator=generator)
        drawn.append((torch.randn(N, M, generator=generator), y, n))
    return drawn


@torch.no_grad()
def test_without_both_it_is_a_tabicl_to_the_bit():
    torch.manual_seed(0)
    expected = TabICL(TabICLConfig(**SMALL)).eval()
    found = network(random=False, **OFF)
    assert found.state_dict().keys() == expected.state_dict().keys()
    pack = Pack.of(tables())
    assert torch.equal(found(pack), expected(pack))  # the weights of a seed are equal too
    assert torch.equal(predict(found, pack), predict(expected, pack))


@torch.no_grad()
def test_it_starts_as_the_network_without_retrieval():
    pack = Pack.of(tables())
    with_it, without = network(random=False), network(random=False, retrieval=False)
    torch.testing.assert_close(with_it(pack), without(pack), rtol=0, atol=1e-5)
    assert not torch.equal(without(pack), network(random=False, **OFF)(pack))  # thinking rows matter at once
    assert with_it.icl_predictor.retrieval.log_scale.exp().item() == pytest.approx(10)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"retrieval": False, "max_classes": 0, "num_quantiles": 20},
        {"thinking_rows": 0},
        {"icl_num_blocks": 1, "icl_scaling": "ssa", "thinking_rows": 3},
    ],
)
@torch.no_grad()
def test_a_pack_is_each_table_alone_and_both_ways_of_predicting_agree(options):
    built = network(**options)
    drawn = tables(built.config.max_classes)
    together = built(Pack.of(drawn))
    alone = torch.cat([built(Pack.of([table])) for table in drawn])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert forward_differs(built) is None
    torch.testing.assert_close(predict(built, Pack.of(drawn)), together, rtol=0, atol=1e-5)


@torch.no_grad()
def test_retrieval_is_its_closed_form_and_the_scaling_rule_sees_the_true_n():
    built = network(icl_scaling="ssmax")
    learner, decoder = built.icl_predictor, built.icl_predictor.retrieval
    final, seen = [], []
    learner.ln.register_forward_hook(lambda _, inputs, output: final.append(output))
    for block in learner.tf_icl["blocks"]:
        block.attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[3]))
    (X, y, n), T = tables()[0], 16
    logits = built(Pack.of([(X, y, n)]))
    (rows,) = final  # thinking rows, labeled rows, query rows
    assert len(rows) == T + len(X)
    q = F.normalize(decoder.query(rows[T + n :]), dim=1)
    k = F.normalize(decoder.key(rows[T : T + n]), dim=1)
    weights = (decoder.log_scale.exp() * q @ k.T).softmax(1)
    p = torch.stack([weights[:, y[:n] == c].sum(1) for c in range(10)], 1)
    expected = learner.decoder(rows[T + n :]) + decoder.weight * (p + SMALLEST).log()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    predict(built, Pack.of([(X, y, n)]))  # by what is kept of the labeled rows
    assert len(seen) == 6
    assert all(value.tolist() == pytest.approx([math.log(n)]) for value in seen)


def test_gradients_reach_all_weights_and_muon_takes_the_projections():
    built = network().train()
    pack = Pack.of(tables())
    built.losses(built(pack), pack).sum().backward()
    gradients = {name: p.grad.clone() for name, p in built.named_parameters() if p.requires_grad}
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    built.zero_grad()
    built.losses(built(pack, checkpoint_rows=10), pack).sum().backward()  # with recomputation
    for name, p in built.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, gradients[name])
    own = {name: built.is_hidden_matrix(name, p) for name, p in built.named_parameters()}
    prefix = "icl_predictor."
    assert own[f"{prefix}retrieval.query.weight"]
    assert own[f"{prefix}tf_icl.blocks.0.linear1.weight"]
    assert not own[f"{prefix}thinking_rows"]
    assert not own[f"{prefix}decoder.0.weight"]


@torch.no_grad()
def test_an_estimator_predicts_what_was_trained():
    built = network()
    X, y, _ = draw_batch(1, 40, 4, 30)
    X, y = X[0], y[0]
    X = (X - X[:30].mean(0)) / X[:30].std(0, correction=0)  # as the estimator does
    estimator = TabICLClassifier(built, n_estimators=1, norm_methods="none").fit(X[:30].numpy(), y.numpy())
    logits = built(Pack.stack(X[None], torch.from_numpy(estimator.y_)[None]))
    expected = (logits / estimator.softmax_temperature).softmax(1)
    assert abs(estimator.predict_proba(X[30:].numpy()) - expected.numpy()).max() < 1e-5


@torch.no_grad()
def test_many_classes_are_a_tree_of_the_same_learner():
    built = network(max_classes=3)
    X, y, n = torch.randn(40, 4), torch.arange(40) % 7, 30  # groups of 3, 2 and 2 classes
    labeled, columns = represent_labeled(built, Pack.of([(X[:n], y[:n], n)]), 7, 10**6)
    queries = represent_queries(built, pack_of_queries([X[n:]]), columns, 10**6)
    learner = built.icl_predictor

    def forward(rows, labels, classes):
        shapes = [(len(rows) + len(queries), len(rows), 1)]
        sizes = torch.tensor(shapes)
        context, log_n = context_layout(sizes, shapes), log_counts(sizes)
        return learner(torch.cat([rows, queries]), labels, context, log_n)[:, :classes].softmax(1)

    group = torch.tensor([0, 0, 0, 1, 1, 2, 2])[y[:n]]
    above = forward(labeled, group, 3)
    expected = []
    for number, (start, classes) in enumerate([(0, 3), (3, 2), (5, 2)]):
        inside = group == number
        expected.append(above[:, number, None] * forward(labeled[inside], y[:n][inside] - start, classes))
    found = class_probabilities(learner, class_tree(learner, labeled, y[:n], 7), queries, 1.0)
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"retrieval": False}, {"thinking_rows": 0}])
@pytest.mark.parametrize(("rows", "train"), [(64, 10), (200, 190)])
def test_flops_and_kept_values_are_those_of_the_kernels(options, rows, train, monkeypatch):
    monkeypatch.setattr(attention, "MIN_SCORES", 0)  # products alone, since torch does not count its kernel for CPUs
    monkeypatch.setattr(attention, "MAX_SCORES", 2**60)
    monkeypatch.setattr(attention, "MIN_KEYS", 0)
    built = network(**{"icl_num_blocks": 3, "embed_dim": 64, **options}).train()
    config = built.config
    pack = Pack.stack(torch.zeros(2, rows, 6), torch.zeros(2, train, dtype=torch.int64))
    with FlopCounterMode(display=False) as counter:
        built(pack)
    assert 2 * Retrieval.forward_flops(config, rows, train, 6) == pytest.approx(counter.get_total_flops(), rel=0.02)

    monkeypatch.setattr(attention, "MAX_SCORES", 0)  # torch's kernel, which keeps no scores
    kept, held = {p.untyped_storage().data_ptr(): 0 for p in built.parameters()}, []

    def keep(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes() / 4)
        held.append(tensor)  # so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        built(pack)
    held.clear()
    more = Retrieval.kept_values(config, rows, train, 6) - TabICL.kept_values(config, rows, train, 6)
    expected = 2 * (sum(kept_by_part(config, rows, train, 6).values()) + more)
    assert 0.85 < expected / sum(kept.values()) < 1.15


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"thinking_rows": -1}, "thinking_rows is -1; it must be at least 0"),
        ({"max_classes": 0}, "regression needs retrieval=false"),
        ({"embed_dim": 4, "row_num_cls": 2, "row_num_heads": 2}, r"\(2 \* 4\) is below max_classes \(10\)"),
    ],
)
def test_wrong_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        network(**settings)


def test_the_preset_is_that_of_demo():
    demo = compose(["experiment=demo_long"]).model
    assert compose(["experiment=demo_long", "model=retrieval"]).model == RetrievalConfig(**vars(demo))


def test_layers_whose_keys_are_more_than_the_labeled_rows_are_not_named():
    X, y, _ = draw_batch(1, 20, 5, 12)
    assert [name for name in attention_weights(network(), X[0], y[0]) if name.startswith("icl")] == []
    assert attention_weights(network(thinking_rows=0), X[0], y[0])["icl.1"].shape == (4, 8, 12)


def test_the_format_of_the_package_refuses_it_and_names_others(tmp_path):
    built = network()
    words = "the public format has no model.family=retrieval; format=hub and format=onnx can express it"
    with pytest.raises(ConfigError, match=words):
        save_public(built.config, dict(built.state_dict()), tmp_path / "m.ckpt")
