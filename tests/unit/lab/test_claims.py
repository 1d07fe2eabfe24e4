"""The page's table of claims, the example of four tokens, and the ranking of keys under the network's own rules."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tabicl_train import register
from tabicl_train.lab.codes import code_words
from tabicl_train.lab.fading import EXPONENT, ssa_score
from tabicl_train.lab.four_tokens import compute_steps
from tabicl_train.lab.ranking import crossing, multipliers_by_rule, weights_of_keys
from tabicl_train.model import TabICLConfig
from tabicl_train.model.encoding import label_digits, split_classes
from tabicl_train.model.scaling import SSMax, SSMaxMLP

PAGE = Path(__file__).parents[3] / "tabicl_train/lab/README.md"
VERDICTS = ("reproduced", "contradicted", "not decided", "out of scope")


def rows(title: str) -> list[list[str]]:
    """The cells of each row of the tables of a section, without those of their heads."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    assert cells
    return [row for row in cells if not row[0].startswith(("claim", "experiment"))]


def test_each_claim_has_a_verdict_or_what_would_decide_it_and_names_what_exists():
    claims = rows("Claims of the sources")
    assert len(claims) > 40
    for claim, verdict, _, repeat in claims:
        assert verdict.startswith(VERDICTS), claim
        if verdict.startswith(("not decided", "out of scope")):
            assert ":" in verdict, claim
        for name in re.findall(r"`([^`]+)`", repeat):
            if name.endswith(".py"):
                assert (PAGE.parents[2] / "tests/unit" / name).exists(), claim
            elif not name.startswith("tabicl-train"):
                assert name.split()[0] in register.experiment, claim


def test_the_page_lists_every_experiment():
    assert sorted(row[0].strip("`") for row in rows("Experiments")) == sorted(register.experiment)


def softmax(a, axis=-1):
    """As the example has it."""
    a = a - np.max(a, axis=axis, keepdims=True)
    exp = np.exp(a)
    return exp / exp.sum(axis=axis, keepdims=True)


def test_four_tokens_are_those_of_the_numpy_example():
    """The example of the source, line by line, against the causal attention of the laboratory."""
    rng = np.random.default_rng(7)
    X = rng.normal(size=(4, 6))
    Wq = rng.normal(size=(6, 4)) / np.sqrt(6)
    Wk = rng.normal(size=(6, 4)) / np.sqrt(6)
    Wv = rng.normal(size=(6, 4)) / np.sqrt(6)
    scores = (X @ Wq) @ (X @ Wk).T / np.sqrt(4)
    mask = np.tril(np.ones((4, 4), dtype=bool))
    expected = softmax(np.where(mask, scores, -1e9))
    steps = compute_steps()
    np.testing.assert_allclose(steps.divided, scores, rtol=1e-12)
    np.testing.assert_allclose(steps.weights, expected, atol=1e-12)
    np.testing.assert_allclose(steps.context, expected @ (X @ Wv), atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("rule", ["SSMax", "element-wise"])
def test_the_ranking_is_that_of_the_networks_rules(rule):
    """The closed form against the layers that scale queries, with the multipliers of the page."""
    settings = TabICLConfig()
    n = np.array([10.0, 80.0, 100.0, 1e6])
    if rule == "SSMax":
        layer = SSMax(1, 2, settings).double()
        layer.scales.fill_(0.43)
    else:
        layer = SSMaxMLP(1, 2, settings, elementwise=True).double()
        first, _, last = layer.mlp
        for parameter in layer.parameters():
            parameter.zero_()
        # Far to the right of 0, GELU is the identity: the first hidden unit holds log n + 50.
        first.weight[0], first.bias[0] = 1.0, 50.0
        last.weight[:, 0] = torch.tensor([0.1, 0.43])
        last.bias[:] = torch.tensor([1 - 0.1 * 50, -0.43 * 50])
    for count, expected in zip(n, weights_of_keys(n, multipliers_by_rule(n)[rule]), strict=True):
        query = layer(torch.tensor([[[4.0, 3.0]]], dtype=torch.float64), torch.tensor([math.log(count)]).double())
        odds = torch.exp(query.flatten())
        np.testing.assert_allclose((odds / (odds.sum() + count - 2)).numpy(), expected, rtol=1e-5)
        keeps_its_rank = rule == "SSMax" or count < crossing()
        assert (expected[0] > expected[1]) == keeps_its_rank


@pytest.mark.parametrize(("classes", "passes"), [(20, 3), (57, 7), (300, 41)])
def test_words_tell_classes_apart_from_the_first_digits_on_and_use_all_symbols_alike(classes, passes):
    words = code_words(classes, passes, 10, seed=1)
    digits = len(label_digits(torch.arange(classes), classes, 10))
    assert words.shape == (classes, passes) and words.max() < 10
    for start in range(0, passes - digits + 1, digits):
        assert len({tuple(word) for word in words[:, start : start + digits]}) == classes
    assert not (words[:, :digits] == words[:, digits : 2 * digits]).all()


@torch.no_grad()
def test_a_learned_base_may_be_negative():
    """Unlike the gate: with a negated last layer, QASSMax rescales queries by the negated base."""
    torch.manual_seed(0)
    layer = register.scaling["qassmax_elementwise"].entry(2, 4, TabICLConfig())
    before = layer.multipliers(512)
    for parameter in layer.base_mlp[-1].parameters():
        parameter.neg_()
    torch.testing.assert_close(layer.multipliers(512), -before)
    assert (torch.stack([before, -before]) < 0).any()


def test_class_numbers_moved_by_one_give_other_groups():
    """Groups are runs of neighboring class numbers."""
    group = np.repeat(np.arange(6), split_classes(57, 10))
    assert np.bincount(group).tolist() == [10, 10, 10, 9, 9, 9]
    together = group[:, None] == group
    moved = np.roll(group, 1)
    assert not np.array_equal(together, moved[:, None] == moved)


def test_the_example_of_softmax_with_a_temperature_has_other_probabilities():
    """Of the text about the architecture of TabICL, whose five shown classes leave room for further ones."""
    logits = np.array([-1.2, 0.5, 3.2, -0.8, 0.1])
    printed = np.array([0.02, 0.09, 0.78, 0.03, 0.05])
    odds = np.exp((logits - logits[2]) / 0.9)  # whatever the other classes have
    assert odds[1] == pytest.approx(0.05, abs=0.001)
    assert ((printed - 0.005) / 0.785 > odds).tolist() == [True, True, False, True, True]  # beyond rounding


def test_signed_averaging_grows_faster_than_softmax_for_small_scores_and_more_slowly_for_large_ones():
    assert EXPONENT == 1.5
    for z in (0.1, 1.0, 1.14):
        assert ssa_score(z, EXPONENT, 1.0) > math.exp(z)
        assert ssa_score(-z, EXPONENT, 1.0) < math.exp(-z)
    for z in (1.15, 2.0, 10.0):
        assert ssa_score(z, EXPONENT, 1.0) < math.exp(z)
        assert ssa_score(-z, EXPONENT, 1.0) > math.exp(-z)
