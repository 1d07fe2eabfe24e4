"""Scores that go on after a stop, and claims on invented scores."""

import contextlib
import itertools
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from tiers import slow_except

from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.lab import curriculum, linear, long_rows, needle, quantifiers, sequences
from tabicl_train.lab import folder as lab_folder
from tabicl_train.lab import scores as scores_experiment
from tabicl_train.lab.classes import nodes
from tabicl_train.lab.experiments import Preempted
from tabicl_train.lab.folder import Folder, score_all
from tabicl_train.lab.sequence_config import SequenceConfig
from tabicl_train.lab.sequence_model import SequenceModel
from tabicl_train.training.planning import expected_work


@dataclass
class Options:
    folder: str


def test_scores_go_on_where_they_were_stopped(tmp_path, monkeypatch):
    stop, made = SimpleNamespace(asked=False), []
    monkeypatch.setattr(lab_folder, "watch_signals", lambda: contextlib.nullcontext(stop))
    monkeypatch.setattr(lab_folder, "load_network", lambda path: path)
    folder, runs = Folder("scores", Options(str(tmp_path))), {name: ({"rule": f"R{name}"}, name * 3) for name in "ab"}

    def score(network, known, table):
        made.append((network, known["rule"], table))
        stop.asked = len(made) == 3
        return [{"value": len(made), "part": part} for part in (1, 2)]

    with pytest.raises(Preempted):
        score_all(folder, runs, ["table"], [(0,), (1,)], score)
    assert made == [("aaa", "Ra", 0), ("aaa", "Ra", 1), ("bbb", "Rb", 0)]
    assert len(pd.read_csv(tmp_path / "scores.csv")) == 6
    stop.asked = False
    found = score_all(folder, runs, ["table"], [(0,), (1,)], score)
    assert made[3:] == [("bbb", "Rb", 1)]
    assert found["value"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert list(found) == ["run", "table", "rule", "value", "part"]
    fewer = score_all(folder, {"b": runs["b"]}, ["table"], [(0,), (1,)], score)  # others stay in the file
    assert fewer["value"].tolist() == [3, 3, 4, 4]
    assert len(pd.read_csv(tmp_path / "scores.csv")) == 8


def needle_scores(gain: float, noise: float) -> pd.DataFrame:
    """Accuracy 0.5 of softmax, and of QASSMax by `gain` more, by more or less in each run."""
    rng, rows = np.random.default_rng(0), []
    for seed, negatives, table in itertools.product(range(3), (100, 15_000), range(6)):
        for rule, accuracy in (("softmax", 0.5), ("QASSMax", 0.5 + gain + noise * (seed - 1))):
            accuracy += rng.uniform(0, 0.01)
            rows.append({"rule": rule, "seed": seed, "negatives": negatives, "table": table, "accuracy": accuracy})
    return pd.DataFrame(rows).assign(entropy=0.5)


def test_needle_claims_only_what_the_interval_supports():
    clear = needle.findings(needle_scores(gain=0.3, noise=0.1))
    assert "Among 15,000 negatives:" in clear
    assert "- QASSMax is right in 80.5% of the cases, softmax in 50.5%: a difference whose interval excludes" in clear
    assert "which decides nothing" in needle.findings(needle_scores(gain=0.1, noise=0.2))
    assert "which decides nothing" not in clear
    gaps = needle.leads_over_first(needle_scores(gain=0.3, noise=0.0))
    assert list(gaps.index) == ["QASSMax"]
    assert gaps.loc["QASSMax", 15_000].mean == pytest.approx(0.3, abs=0.01)


def test_shorter_tables_have_the_same_query_rows_and_the_labeled_rows_before_them(monkeypatch):
    rows = 40 + curriculum.QUERIES
    table = curriculum.TestTable(torch.arange(rows, dtype=torch.float32)[:, None], torch.arange(rows) % 3)

    def predict_logits(network, pack, classes):
        assert pack.X.tolist() == list(range(30, rows))
        assert pack.shapes[0][:2] == (rows - 30, 10)
        return 2.0 * F.one_hot(table.y[40:], classes)

    monkeypatch.setattr(curriculum, "predict_logits", predict_logits)
    found = curriculum.score_rows(SimpleNamespace(config=SimpleNamespace(max_classes=5)), table, 10)
    assert found == pytest.approx({"accuracy": 1.0, "log_loss": np.log(np.exp(2) + 4) - 2}, rel=1e-5)


def test_query_rows_of_a_class_that_no_labeled_row_has_do_not_count(monkeypatch):
    y = np.array(["a", "c"] * 4 + ["a", "b", "c", "c"] * (curriculum.QUERIES // 4))
    p = np.tile([[0.75, 0.25]], (curriculum.QUERIES, 1))
    classifier = SimpleNamespace(classes_=np.array(["a", "c"]), predict_proba=lambda X: p)
    monkeypatch.setattr(curriculum, "plain_classifier", lambda *_: classifier)
    found = curriculum.score_rows(None, curriculum.TestTable(pd.DataFrame({"x": range(len(y))}), y), 8)
    assert found == pytest.approx({"accuracy": 1 / 3, "log_loss": -(np.log(0.75) + 2 * np.log(0.25)) / 3})


def curriculum_scores(change: dict[str, float]) -> pd.DataFrame:
    """Log loss 1 of every rule, changed by growing rows as told."""
    rng, rows = np.random.default_rng(0), []
    for seed, n, table, rule in itertools.product(range(3), (256, 4096), range(8), curriculum.RULES):
        for name in (curriculum.FIXED, curriculum.GROWING):
            loss = 1 + table / 10 + (change[rule] if name == curriculum.GROWING else 0) + rng.uniform(0, 0.01)
            rows.append({"curriculum": name, "rule": rule, "seed": seed, "n": n, "table": table, "log_loss": loss})
    return pd.DataFrame(rows).assign(data="synthetic")


def test_curriculum_answers_in_two_sentences():
    found = curriculum.effects(curriculum_scores({"softmax": 0.0, "SSMax": 0.1, "QASSMax": -0.2}))
    assert found.means.loc[("growing_rows", "QASSMax"), 4096].mean == pytest.approx(1.155, abs=0.003)
    assert [found.growing.loc[rule, 4096].mean for rule in curriculum.RULES] == pytest.approx([0, 0.1, -0.2], abs=0.003)
    text = curriculum.verdict(found, 16)
    assert text.startswith("On tables 16 times as long")
    assert text.endswith("so the curriculum favors QASSMax.")
    worse = curriculum.effects(curriculum_scores({"softmax": 0.0, "SSMax": -0.1, "QASSMax": 0.2}))
    assert curriculum.verdict(worse, 16).endswith("so the curriculum favors SSMax.")
    same = curriculum.effects(curriculum_scores(dict.fromkeys(curriculum.RULES, 0.1)))
    assert "which does not show" in curriculum.verdict(same, 16)


# Counting the FLOPs of a rule takes half a CPU second.
@pytest.mark.parametrize("rule", slow_except(("none", "ssmax", "qassmax_elementwise"), ("none",)))
def test_both_curricula_take_the_same_flops_in_each_stage(rule):
    flops = []
    for name in (curriculum.FIXED, curriculum.GROWING):
        settings = ["model=small", "prior=mlp_scm_causal", f"curriculum={name}"]
        config = compose([*settings, f"model.col_scaling={rule}", f"model.icl_scaling={rule}"])
        flops.append(
            [
                expected_work(stage, config.model, config.seed, sample=200).flops
                for stage in config.curriculum.stages.values()
            ]
        )
    assert np.divide(*flops) == pytest.approx(1, abs=0.04)


def test_the_tree_of_classes_has_a_node_for_each_prediction():
    assert [nodes(classes, 10) for classes in (2, 10, 11, 57, 100, 101, 1000)] == [1, 1, 3, 7, 11, 13, 111]


def sequence_scores(experiment: ModuleType, share: float, noise: float, inside: float = 1e-4) -> pd.DataFrame:
    """Errors scale^2 of softmax, and of SSA a share of them, by more or less in each run; `inside` as in training."""
    rng, rows = np.random.default_rng(0), []
    tests = [*experiment.PLACES.values(), experiment.NORMAL | {"sigma": 10}]
    for seed, test, block in itertools.product(range(3), tests, range(6)):
        scale = max(test["sigma"], test["deviant"], test.get("input_sigma", 1))
        for rule, factor in (("softmax", 1.0), ("SSA", share + noise * (seed - 1))):
            error = (scale**2 * factor if scale > 1 else inside) * rng.uniform(0.99, 1.01)
            errors = {"error": error, "drawn": error / 1000, "undecided": error / 400, "least": 0.0, "largest": scale}
            errors |= {"weight_drawn": 0.5, "weight_undecided": 0.5}
            rows.append({"rule": rule, "seed": seed, "block": block} | test | errors)
    return pd.DataFrame(rows).assign(variation="with MLP")


@pytest.mark.slow
def test_the_claim_about_linear_functions_is_judged_by_its_intervals():
    for share, noise, words in (
        (0.3, 0.01, "reproduced: its interval is below one half at each sigma"),
        (0.8, 0.01, "contradicted: at sigma 5, 10 it is above one half"),
        (0.49, 0.2, "not decided: its interval is below one half at 0 of 2 sigmas"),
    ):
        scores = sequence_scores(linear, share, noise)
        page = linear.findings(scores)
        assert f"- with MLP: {words}" in page
        assert "| softmax, with MLP, paper | 8e-05 | 1.62 | 45.35 |  |" in page
        assert "| SSA, with MLP, largest output | 1 [1, 1] | 5 [5, 5] | 5 [5, 5] | 100 [100, 100] |" in page
    assert "No claim is made" in linear.verdict(scores[scores["seed"] < 2])


def rule_scores(share: float, inside: float) -> pd.DataFrame:
    """Errors of softmax, of SSA a share of them, and of no attention; `inside`: of softmax where all is of sigma 1.

    The networks of no attention have no weights of queries and keys, and no network has a bound.
    """
    rng, rows = np.random.default_rng(0), []
    for seed, block, (test, values) in itertools.product(range(3), range(6), scores_experiment.TESTS.items()):
        error = (inside if test == "all 1" else 7.0) * rng.uniform(0.99, 1.01)
        for rule, own in (("softmax", error), ("SSA", share * error), ("no attention", 7.0)):
            row = {"variation": "as in linear", "rule": rule, "seed": seed, "block": block, "error": own}
            row |= dict(zip(scores_experiment.KEYS, values, strict=True))
            row |= {"within": own, "least": 0.0, "largest": 5.0, "largest_value": 9.0, "bound": np.inf}
            rows.append(row | {"weights": np.nan if rule == "no attention" else 0.2 + 0.1 * seed})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("share", "inside", "words"),
    [
        (0.4, 1e-4, "is reproduced: SSA's minus half of softmax's is -0.7 "),
        (0.9, 1e-4, "is contradicted: SSA's minus half of softmax's is +2.8"),
        (0.9, 1e-3, "is not decided at this size"),
    ],
)
def test_far_coefficients_are_judged_once_both_rules_have_learned_the_task(share, inside, words):
    scores = rule_scores(share, inside)
    assert words in scores_experiment.verdict(scores)
    assert scores_experiment.verdict(scores[scores["rule"] != "softmax"]) is None
    assert scores_experiment.verdict(scores[scores["seed"] < 2]) is None


@pytest.mark.slow  # 2 CPU seconds, for an experiment that is seldom changed
@pytest.mark.filterwarnings("error")
def test_networks_without_a_bound_or_without_attention_have_no_numbers_for_these():
    scores = rule_scores(0.9, 1e-4)
    page = scores_experiment.findings(pd.concat([scores, scores.assign(variation=scores_experiment.WIDE)]))
    assert "| no attention | 9 [9, 9] | 5 [5, 5] | none | 0 [0, 0] | 7 [7, 7] | 7 [7, 7] | none |" in page
    assert "| 0.3 [0.0516, 0.548] |" in page  # weights 0.2, 0.3 and 0.4 of softmax
    assert page.count("is contradicted") == 1  # of the variation that is trained as in the paper
    (line,) = [line for line in page.splitlines() if line.startswith("| no attention: points of sigma 10 minus")]
    assert line.endswith("| none |")


def test_the_claim_about_quantifiers_is_judged_by_its_intervals():
    lines = quantifiers.verdict(sequence_scores(quantifiers, 0.3, 0.01)).splitlines()
    assert "(sigma 5, 200 numbers and one number times 100)" in lines[0]
    assert lines[2].startswith("- with MLP, as drawn, sigma 5, 200 numbers: reproduced by -0.01")
    assert lines[3].startswith("- with MLP, as drawn, one number times 100: reproduced by -7")
    assert "numbers: contradicted by +0.0" in quantifiers.verdict(sequence_scores(quantifiers, 2.0, 0.01))
    same = quantifiers.verdict(sequence_scores(quantifiers, 1.0, 0.2))
    assert "numbers: not decided at this size by " in same
    assert "where softmax has an error of 0.025." in same


@pytest.mark.parametrize("share", [0.3, 2.0])
def test_networks_that_have_not_learned_the_task_decide_nothing(share):
    text = linear.verdict(sequence_scores(linear, share, 0.01, inside=0.004))
    assert "- with MLP: not decided at this size" in text
    assert "of at most 0.0002 would" in text
    assert "the error is 0.004 [0.004, 0.004] with softmax and 0.004 [0.004, 0.004] with SSA" in text
    lines = quantifiers.verdict(sequence_scores(quantifiers, share, 0.01, inside=20)).splitlines()[2:]
    assert len(lines) == 4
    assert all(": not decided at this size: in the trained range" in line for line in lines)


def test_test_sequences_are_the_same_for_all_networks_and_differ_between_blocks():
    test = {"input_sigma": 2, "sigma": 2, "deviant": 10}
    pack, again = (sequences.draw(3, 0, test, "linear_functions", 0) for _ in range(2))
    assert torch.equal(pack.X, again.X) and pack.shapes == ((40, 20, 1),) * 3
    normal = sequences.draw(3, 0, dict.fromkeys(test, 1), "linear_functions", 0)
    scales = (pack.X / normal.X).view(3, 40)
    assert torch.allclose(scales[:, 1:], torch.tensor(2.0))
    assert torch.allclose(scales[:, 0], torch.tensor(20.0))
    assert not torch.equal(pack.X, sequences.draw(3, 1, test, "linear_functions", 0).X)  # another block
    with pytest.raises(ConfigError, match="each value must be one of every, some"):
        quantifiers.run(quantifiers.QuantifiersOptions(folder="x", quantifiers=["evry"]))


def test_no_output_of_a_network_exceeds_its_bound():
    torch.manual_seed(0)
    network = SequenceModel(SequenceConfig(max_classes=0, num_blocks=1, num_heads=2, width=16))
    norm, layer = network.head
    with torch.no_grad():
        for parameter in network.head.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        weights = layer.weight[0] * norm.weight
        farthest = (weights - weights.mean()) * layer(norm.bias).sign()  # the vector with the largest output
        outputs = network.head(torch.cat([farthest[None], 100 * torch.randn(1000, 16)]))
    assert outputs.abs().max().item() == outputs[0].abs().item() == pytest.approx(linear.bound(network), rel=1e-4)


def test_long_rows_compares_growing_with_fixed_rows_and_with_a_guess():
    """Losses are made up: 1 after fixed rows, 0.9 after growing ones, and 0.01 more at each length for QASSMax."""
    rows = []
    kinds = itertools.product(("fixed_long", "growing_long"), ("softmax", "QASSMax"), range(3), range(2))
    for rows_of_training, rule, seed, table in kinds:
        for place, n in enumerate((16, 32)):
            noise = 0.1 * table + 0.02 * seed
            loss = 1 + noise - 0.1 * (rows_of_training == "growing_long") + 0.01 * place * (rule == "QASSMax")
            row = {"curriculum": rows_of_training, "rule": rule, "seed": seed, "table": table}
            rows.append({**row, "n": n, "log_loss": loss, "entropy": 0.5 + 0.1 * place})
    guesses = pd.DataFrame({16: [1.5, 1.6], 32: [1.5, 1.6]})
    page = long_rows.findings(pd.DataFrame(rows), guesses)
    levels, leads, slopes, changes, more_than_others, entropies = page.split("\n\n| rule")[1:]
    assert "| class frequencies |  | 1.550" in levels
    for text, starts in (
        (levels, ("| softmax | fixed_long | 1.070", "| softmax | growing_long | 0.970")),
        (leads, ("| softmax | fixed_long | -0.480", "| softmax | growing_long | -0.580")),
        (slopes, ("| softmax | growing_long | +0.000 ", "| QASSMax | growing_long | +0.010 ")),
        (changes, ("| softmax | fixed_long | -0.100 ", "| QASSMax | fixed_long | -0.100 ")),
        (more_than_others, ("| softmax | fixed_long | +0.000 ",)),
        (entropies, ("| QASSMax | growing_long | 0.500 ",)),
    ):
        for start in starts:
            assert start in text
    assert "+0.100 [+0.100, +0.100]" in entropies
    alone = pd.DataFrame(rows).query("curriculum == 'growing_long' and rule == 'softmax'")
    assert "minus another" not in long_rows.findings(alone, guesses)
