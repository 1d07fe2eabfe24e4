"""Tables of sums of effects: the effects, the noise, and the classes."""

import dataclasses

import numpy as np
import pytest

from priors import TableSpec, build_prior
from priors.additive import AdditivePlan

SPEC = TableSpec(400, 300, 4)


def execute(**changes) -> tuple[np.ndarray, np.ndarray, int]:
    """Columns and target of four normal columns, of which the second has a linear effect, changed by `changes`."""
    weights = np.array([[0.0, -1.0, 0.0, 0.0]])
    plan = AdditivePlan((5,), 4000, 2, 0.0, ("normal",) * 4, ("linear",) * 4, weights, (), 0.0, 0)
    columns, target, num_classes = build_prior("additive").execute(dataclasses.replace(plan, **changes))
    return columns.numpy(), target.numpy(), num_classes


def correlations(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Rank correlation of each column with a numeric target, which may be stretched."""
    ranks = np.column_stack([*columns.T, target]).argsort(0).argsort(0)
    return np.corrcoef(ranks.T)[-1, :-1]


def test_only_columns_with_a_weight_have_an_effect_and_noise_hides_it():
    assert np.allclose(correlations(*execute()[:2]), [0, -1, 0, 0], atol=0.06)
    # The correlation of normal numbers is the root of 1 - noise, that of their ranks a little less.
    assert np.allclose(correlations(*execute(noise=0.75)[:2]), [0, -0.48, 0, 0], atol=0.06)


def test_classes_of_one_score_are_its_intervals_and_those_of_several_scores_are_not():
    columns, labels, num_classes = execute(num_classes=4)
    assert num_classes == 4 and (np.diff(labels[columns[:, 1].argsort()]) <= 0).all()
    weights = np.array([[2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 2.0, 0]])
    columns, labels, num_classes = execute(num_classes=3, weights=weights)
    means = [columns[labels == c, :3].mean(0) for c in range(3)]
    assert num_classes == 3 and (np.argmax(means, axis=1) == range(3)).all()


def test_factors_correlate_columns():
    independent, related = execute()[0], execute(num_factors=1, common=0.64)[0]
    assert np.abs(np.corrcoef(independent.T) - np.eye(4)).max() < 0.06
    assert np.allclose(np.abs(np.corrcoef(related.T)), 0.64 + 0.36 * np.eye(4), atol=0.06)


@pytest.mark.parametrize("kind, most", [("binary", 2), ("ordered", 7), ("count", 13), ("categories", 12)])
def test_columns_of_few_values_have_few_values(kind, most):
    columns, _, _ = execute(kinds=(kind,) * 4, effects=("levels" if kind == "categories" else "linear",) * 4)
    assert all(2 <= len(np.unique(column)) <= most for column in columns.T)


def test_half_of_the_tables_have_two_classes_and_the_others_up_to_the_limit():
    drawn = [build_prior("additive").plan(SPEC, (seed, 0)) for seed in range(300)]
    classes = np.array([plan.num_classes for plan in drawn])
    assert 0.4 < (classes == 2).mean() < 0.6 and classes.max() <= SPEC.max_classes
    assert {len(plan.weights) for plan in drawn if plan.num_classes == 3} == {1, 3}
    assert {
        plan.num_classes for plan in (build_prior("additive").plan(TableSpec(40, 20, 3, 2), (s, 0)) for s in range(20))
    } == {2}
