import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from priors import TableSpec, build_prior
from priors.boosting import bin_columns, fit_predict
from priors.scm import Causes, Discretization, LayerNoise
from priors.tree_scm import TreeLayer, TreeNetwork, TreePlan

quick = settings(max_examples=40, deadline=None, derandomize=True)


def slow_tree(X: np.ndarray, residuals: np.ndarray, depth: int) -> np.ndarray:
    """The definition: the split of largest gain among all, leaves sum / (n + 1); float64."""
    n, total = len(X), residuals.sum(0)
    best, left = (total**2).sum() / (n + 1) + 1e-6, None
    for feature in range(X.shape[1] if depth else 0):
        for value in np.unique(X[:, feature])[1:]:
            below = X[:, feature] < value
            score = sum((residuals[side].sum(0) ** 2).sum() / (side.sum() + 1) for side in (below, ~below))
            if score > best * (1 + 1e-9):
                best, left = score, below
    if left is None:
        return np.tile(total / (n + 1), (n, 1))
    out = np.empty_like(residuals)
    for side in (left, ~left):
        out[side] = slow_tree(X[side], residuals[side], depth - 1)
    return out


def slow_boosting(X: np.ndarray, targets: np.ndarray, num_trees: int, depth: int) -> np.ndarray:
    predictions = np.tile(targets.mean(0), (len(X), 1))
    for _ in range(num_trees):
        predictions = predictions + 0.3 * slow_tree(X, targets - predictions, depth)
    return predictions


@quick
@given(
    st.integers(2, 60), st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 999)
)
def test_boosting_agrees_with_its_definition(num_rows, num_columns, num_outputs, num_trees, depth, seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((num_rows, num_columns)).astype(np.float32)
    X[:, 0] = rng.integers(0, 4, num_rows)  # ties
    targets = rng.standard_normal((num_rows, num_outputs)).astype(np.float32)
    before = targets.copy()
    predictions = fit_predict(X, targets, num_trees, depth)
    assert predictions.dtype == np.float32
    assert predictions.shape == targets.shape
    assert (targets == before).all()
    expected = slow_boosting(X.astype(float), targets.astype(float), num_trees, depth)
    np.testing.assert_allclose(predictions, expected, atol=1e-5)


@quick
@given(st.integers(2, 3000), st.integers(1, 400), st.integers(0, 999))
def test_bins_keep_the_order_and_hold_equal_shares(num_rows, num_values, seed):
    rng = np.random.default_rng(seed)
    columns = np.stack([rng.standard_normal(num_rows), rng.integers(0, num_values, num_rows)]).astype(np.float32)
    codes, num_bins = bin_columns(columns, np.sort(columns, axis=1))
    for column, code, count in zip(columns, codes, num_bins, strict=True):
        distinct = len(np.unique(column))
        assert code.max() < count <= 256
        order = column.argsort()
        assert (np.diff(code[order].astype(int)) >= 0).all()
        same = np.diff(column[order]) == 0
        assert (np.diff(code[order].astype(int))[same] == 0).all()
        if distinct <= 256:
            assert len(np.unique(code)) == count == distinct
        else:
            commonest = np.unique(column, return_counts=True)[1].max()
            assert np.bincount(code).max() <= num_rows / 256 + commonest + 1


def plans(spec: TableSpec, number: int) -> list[TreePlan]:
    prior = build_prior("tree_scm")
    return [prior.plan(dataclasses.replace(spec, group_seed=i // 4), (i, 0)) for i in range(number)]


def execute(seed: int, noise_std: float, noise_varies: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and real target of one tree with a single split, before the target is cut into classes."""
    causes = Causes(("normal",) * 5, np.zeros(5), np.ones(5))
    layer = TreeLayer(num_outputs=1, num_trees=1, depth=1, noise=LayerNoise(noise_std, noise_varies))
    plan = TreePlan((seed,), TreeNetwork((seed,), 800, causes, (), (layer,), Discretization("rank", 10, ())), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("priors.scm.discretize", lambda columns, target, *_: (columns, target))
        return build_prior("tree_scm").execute(plan)


def test_features_are_the_causes_and_the_target_steps_with_them():
    columns, target = execute(3, 0.0)
    assert columns.shape == (800, 5)
    assert abs(columns.mean()) < 0.1
    assert abs(columns.std() - 1) < 0.05
    steps = [(target[column.argsort()].diff() != 0).sum().item() for column in columns.T]
    assert len(target.unique()) == 2 and steps.count(1) == 1


def test_noise_is_added_to_the_target():
    noise = torch.stack([execute(seed, 0.5)[1] - execute(seed, 0.0)[1] for seed in range(20)])
    assert noise.std() == pytest.approx(0.5, abs=0.02)
    assert noise.std(1).std() < 0.03
    varied = torch.stack([execute(seed, 0.5, True)[1] - execute(seed, 0.0)[1] for seed in range(200)])
    assert varied.std() == pytest.approx(0.5, abs=0.1)
    assert varied.std(1).min() < 0.05 < 0.8 < varied.std(1).max()
