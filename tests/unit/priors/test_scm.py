from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import expon, kstest, norm

from priors import build_prior
from priors.finish import Rejected
from priors.random import rng_at
from priors.scm import (
    GROUP_ATTEMPTS,
    Category,
    Discretization,
    choice_weights,
    choose,
    discretize,
    group_rng,
    plan_causes,
    sample_causes,
    scaled_normal,
)
from priors.table import TableSpec

SPEC = TableSpec(num_rows=100, train_size=50, num_features=5)
RNG = np.random.Generator


@pytest.fixture
def rng() -> RNG:
    return rng_at("test scm")


def test_scaled_normal_has_the_moments_of_its_definition(rng):
    draws = np.array([scaled_normal(rng, 10, 0.1) for _ in range(20000)])

    def over_std(moment):  # mean over the relative standard deviation r, log-uniform in 0.01..1, for a mean of one
        return quad(lambda log_r: moment(np.exp(log_r)), np.log(0.01), 0)[0] / np.log(100)

    def hazard(r):
        return norm.pdf(1 / r) / norm.cdf(1 / r)

    first = (10 - 0.1) / np.log(100) * over_std(lambda r: 1 + r * hazard(r))
    second = (10**2 - 0.1**2) / (2 * np.log(100)) * over_std(lambda r: 1 + r**2 + r * hazard(r))
    assert draws.min() > 0
    assert draws.mean() == pytest.approx(first, rel=0.03)
    assert (draws**2).mean() == pytest.approx(second, rel=0.06)


@pytest.mark.parametrize("num_options", [2, 3])
def test_choices_have_the_probabilities_of_their_definition(rng, num_options):
    grid = np.exp(np.linspace(-3, 5, 2001)[:-1] + 0.002)
    others = grid if num_options == 2 else np.add.outer(grid, grid)
    first = (np.e / (np.e + others)).mean()  # a half for two options
    counts = Counter(choose(rng, "abc"[:num_options]) for _ in range(10000))
    assert counts["a"] / 10000 == pytest.approx(first, abs=0.015)
    assert counts["b"] / 10000 == pytest.approx((1 - first) / (num_options - 1), abs=0.015)
    weights = np.array([choice_weights(rng, num_options) for _ in range(2000)])
    assert np.allclose(weights.sum(1), 1)
    assert np.log(weights[:, 1] / weights[:, 0]).min() > -4
    assert np.log(weights[:, 1] / weights[:, 0]).max() < 4


def test_a_group_shares_its_hyper_parameters_over_tables_and_attempts():
    def value(group, seed):
        return group_rng(TableSpec(100, 50, 5, group_seed=group), seed).random()

    assert value(3, (0, 0)) == value((3,), (8, 0)) == value(3, (9, GROUP_ATTEMPTS - 1))
    assert value(3, (0, 0)) != value(4, (0, 0))
    assert value(3, (0, GROUP_ATTEMPTS)) != value(3, (0, 0))  # a dead group is left
    assert value(None, (0, 0)) == value(None, (0, 1)) != value(None, (1, 0))


def test_normal_causes_have_the_moments_that_are_planned(rng):
    plain = plan_causes(rng, 300, "normal", random_moments=False)
    assert not plain.means.any() and (plain.stds == 1).all()
    causes = plan_causes(rng, 3000, "normal", random_moments=True)
    assert kstest(causes.means, "norm").pvalue > 0.01
    assert kstest(causes.stds / np.abs(causes.means), "halfnorm").pvalue > 0.01
    columns = sample_causes(causes, 400, rng).numpy()
    scores = (columns.mean(0) - causes.means) / causes.stds * 20
    assert scores.std() == pytest.approx(1, abs=0.05)
    assert np.median(columns.std(0) / causes.stds) == pytest.approx(1, abs=0.01)
    assert kstest(((columns - causes.means) / causes.stds).ravel()[::100], "norm").pvalue > 0.01


def class_shares(target: torch.Tensor, boundaries: str, num_classes: int, tables: int) -> np.ndarray:
    """Share of the first class in many tables with num_classes classes; 0 and 1 where a class is missing."""
    shares = []
    for seed in range(tables):
        try:
            plan = Discretization(boundaries, num_classes, ())
            _, labels, num_present = discretize(torch.zeros(len(target), 1), target, plan, (seed,))
        except Rejected:
            continue
        assert labels.unique().tolist() == list(range(num_present))
        assert (labels[target.argsort()].diff() >= 0).all()
        shares.append((labels == 0).float().mean().item())
    return np.array(shares)


def test_boundaries_are_values_of_random_rows_or_normal_draws():
    target = torch.from_numpy(5 + 3 * expon.ppf((np.arange(2000) + 0.5) / 2000)).float()
    shares = class_shares(target, "rank", 2, 1500)
    assert kstest(shares, "uniform").pvalue > 0.01
    assert class_shares(target, "rank", 5, 1500).mean() == pytest.approx(1 / 5, abs=0.015)
    # N(0, 1) lies above -1, the minimum of the standardized target, and then at the share 1 - exp(-(1 + z));
    # the clamped outliers shift the scale by a few per cent
    z = norm.ppf(np.linspace(norm.cdf(-1), 1, 20002)[1:-1])
    expected = 1 - np.exp(-(1 + z))
    shares = class_shares(target, "value", 2, 1500)
    assert len(shares) / 1500 == pytest.approx(norm.sf(-1), abs=0.03)
    assert np.allclose(np.quantile(shares, [0.1, 0.5, 0.9]), np.quantile(expected, [0.1, 0.5, 0.9]), atol=0.03)


def test_classes_without_rows_do_not_count():
    columns, target = torch.zeros(100, 1), torch.tensor([0.0, 1.0]).repeat(50)
    plan = Discretization("value", 10, ())
    assert discretize(columns, target, plan, (0,))[2] == 2
    with pytest.raises(Rejected, match="one_class"):
        discretize(columns, torch.zeros(100), plan, (0,))
    with pytest.raises(Rejected, match="nan"):
        discretize(columns, torch.full((100,), torch.inf), plan, (0,))


@pytest.mark.parametrize(("name", "options"), [("mlp_scm", {}), ("mlp_scm", {"causal": True}), ("tree_scm", {})])
def test_a_numeric_target_is_the_one_that_is_cut_into_classes(name, options):
    prior = build_prior(name, **options)
    cut_columns = 0
    for seed in range(12):
        plans = [prior.plan(replace(SPEC, max_classes=most), (seed, 0)) for most in (10, 0)]
        try:
            (columns, labels, num_classes), (same, target, none) = map(prior.execute, plans)
        except Rejected:
            continue
        assert torch.equal(columns, same)
        assert num_classes >= 2
        assert none == 0
        assert target.dtype == torch.float32
        assert len(target.unique()) > SPEC.num_rows / 2
        assert (labels[target.argsort()].diff() >= 0).all()
        text = str(plans[1]).splitlines()[-1]
        assert text.startswith("numeric target") and "classes" not in text
        cut_columns += "columns cut into categories" in text
    assert cut_columns > 0


def test_categories_cut_a_column_by_rank(rng):
    before = torch.from_numpy(rng.standard_normal((300, 4), dtype=np.float32))
    categories = (Category(0, 12, "ascending"), Category(1, 12, "descending"), Category(2, 12, "shuffled"))
    columns, _, _ = discretize(before, before[:, 3], Discretization("rank", 2, categories), (0,))
    assert torch.equal(columns[:, 3], before[:, 3])
    ordered = [codes[values.argsort()] for codes, values in zip(columns.T[:3], before.T[:3], strict=True)]
    assert (ordered[0].diff() >= 0).all() and (ordered[1].diff() <= 0).all()
    changes = ordered[2].diff()
    assert (changes < 0).any()
    assert (changes > 0).any()
    assert (changes != 0).sum() == len(ordered[2].unique()) - 1
    assert ordered[2].max() == len(ordered[2].unique()) - 1
    for codes in ordered:
        assert 8 <= len(codes.unique()) <= 12
        assert 0 <= codes.min()
        assert codes.max() <= 11
