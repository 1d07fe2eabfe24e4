"""More classes than the network has logits: digits, the tree, and the network of the `tabicl` package beside ours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import draw_batch, forward_batch, package_network, small_network

from tabicl_train.model.encoding import label_digits, split_classes
from tabicl_train.model.pack import Pack
from tabicl_train.model.predict import predict_logits
from tabicl_train.model.stages import ColumnEmbedding

quick = settings(deadline=None, derandomize=True, max_examples=50)
TEMPERATURE = 0.9  # of every node in the `tabicl` package, whatever it is told


def draw_many(C: int, n: int, queries: int, M: int = 5, seed: int = 0):
    """X (1, n + queries, M) and y_train (1, n) that hold every class, the last one once."""
    X, _, _ = draw_batch(1, n + queries, M, n, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rest = torch.randint(0, C - 1, (n - C,), generator=generator)
    y = torch.cat([torch.arange(C), rest])[torch.randperm(n, generator=generator)]
    return X, y[None]


@quick
@given(st.integers(2, 3000), st.integers(2, 10))
def test_digits_are_few_small_and_tell_classes_apart(C, most):
    digits = torch.stack(label_digits(torch.arange(C), C, most))  # (places, C)
    assert digits.max() < most
    assert len(set(map(tuple, digits.T.tolist()))) == C
    places, radix = len(digits), int(digits.max()) + 1
    assert most**places >= C and (places == 1 or most ** (places - 1) < C)
    assert (radix - 1) ** places < C <= radix**places


@quick
@given(st.integers(11, 5000))
def test_groups_are_nearly_equal(C):
    sizes = split_classes(C, 10)
    assert sum(sizes) == C and 2 <= len(sizes) == min(-(-C // 10), 10)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def predicted(network, X, y, num_classes, *settings):
    """(B, N - n, C)"""
    return predict_logits(network, Pack.stack(X, y), num_classes, *settings).unflatten(0, (len(X), -1))


@pytest.mark.parametrize(
    ("C", "options"), [(11, {}), (101, {}), (57, dict(col_target_aware=False)), (25, dict(max_classes=3))]
)
def test_agreement_with_the_package(C, options):
    from tabicl._model.inference_config import InferenceConfig

    network = small_network(**options).eval()
    inference = InferenceConfig()
    for part in (inference.COL_CONFIG, inference.ROW_CONFIG, inference.ICL_CONFIG):
        part.use_amp, part.device = False, "cpu"
    X, y = draw_many(C, 3 * C, 40)
    with torch.no_grad():
        expected = package_network(network).eval()(X, y.float(), inference_config=inference) / TEMPERATURE
    logits = predicted(network, X, y, C, TEMPERATURE)
    assert (logits.exp() - expected.exp()).abs().max() < 1e-4 * expected.exp().max()
    assert (logits - expected).abs().max() < 1e-3
    assert expected.std() > 0.1  # the classes are told apart at all


@pytest.mark.parametrize(
    "options",
    [
        # Each takes more than a CPU second.
        pytest.param(dict(col_grouping="disjoint"), marks=pytest.mark.slow),
        pytest.param(dict(col_grouping="none", col_affine=True, col_target_aware=False), marks=pytest.mark.slow),
        dict(col_scaling="ssa", icl_scaling="qassmax_elementwise"),
    ],
)
def test_few_classes_are_the_networks_own_logits_in_any_parts(options):
    network = small_network(**options).eval()
    X, y, _ = draw_batch(3, 60, 7, 20, classes=6)
    with torch.no_grad():
        expected = forward_batch(network, X, y)[..., :6]
    for tokens in (1, 150, 1000, 10**9):
        assert torch.allclose(predicted(network, X, y, 6, 2.0, tokens), expected / 2, atol=1e-5)


@pytest.mark.parametrize("rule", ["qassmax_elementwise", "ssa"])
def test_many_classes_in_parts(rule):
    network = small_network(col_scaling=rule, icl_scaling=rule).eval()
    X, y = draw_many(30, 50, 120)
    whole = predicted(network, X, y, 30)
    assert torch.allclose(predicted(network, X, y, 30, 1.0, 60), whole, atol=1e-4)
    assert torch.allclose(whole.exp().sum(-1), torch.ones(1), atol=1e-4)


def test_tables_of_a_batch_do_not_see_each_other():
    network = small_network().eval()
    tables = [draw_many(13, 40, 9, seed=seed) for seed in (0, 1)]
    X, y = (torch.cat(parts) for parts in zip(*tables, strict=True))
    both = predicted(network, X, y, 13)
    for i, table in enumerate(tables):
        assert torch.allclose(both[i], predicted(network, *table, 13)[0], atol=1e-4)


def test_hundreds_of_classes_in_bounded_parts(monkeypatch):
    seen = []
    embed = ColumnEmbedding.embed_known

    def watched(self, cells, columns, *rest):
        seen.append((len(columns.table), len(cells) // len(columns.table)))
        return embed(self, cells, columns, *rest)

    monkeypatch.setattr(ColumnEmbedding, "embed_known", watched)
    network = small_network(embed_dim=16, col_num_blocks=1, row_num_blocks=1, icl_num_blocks=1).eval()
    X, y = draw_many(300, 500, 1000, M=4)
    p = predicted(network, X, y, 300, 1.0, 2000).exp()
    assert p.shape == (1, 1000, 300)
    assert torch.allclose(p.sum(-1), torch.ones(1), atol=2e-3)
    assert max(columns * rows for columns, rows in seen) <= 2000
    assert max(rows for _, rows in seen) <= 2 * 500  # labeled ones, and as many queries
