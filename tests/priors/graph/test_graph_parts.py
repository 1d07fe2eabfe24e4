import math

import numpy as np
import pytest
import torch
from closed_forms import SHARED_FORMS
from scipy.special import expit
from scipy.stats import beta, kstest, norm

from priors.graph.activations import FIXED, KINDS, PLAIN_KINDS, Activation, PlainActivation, normalise, standardise
from priors.graph.functions import Linear
from priors.graph.matrices import KINDS as MATRIX_KINDS
from priors.graph.matrices import Matrix, MixturePoints
from priors.graph.noise import Noise
from priors.graph.points import BASES, Points
from priors.graph.scalars import LOCAL, Scalars, Weights
from priors.random import normals, rng_at


def draw_scalars(seed: int, skewed_choices: bool = False) -> Scalars:
    return Scalars(rng_at("parts", seed), skewed_choices)


# Scalars


def test_the_law_of_a_name_is_uniform_in_t_and_log_uniform_in_s():
    a, b = np.array([draw_scalars(seed).beta("width") for seed in range(2000)]).T
    assert kstest(a / (a + b), "uniform").pvalue > 1e-3
    assert kstest((np.log(a + b) - math.log(0.1)) / math.log(1e5), "uniform").pvalue > 1e-3


def test_draws_of_a_name_follow_its_beta_law():
    for seed in range(8):
        scalars = draw_scalars(seed)
        a, b = scalars.beta("width")
        units = [(scalars.real("width", 3.0, 7.0) - 3) / 4 for _ in range(300)]
        many = (scalars.reals("width", 300, 3.0, 7.0) - 3) / 4
        for sample in (np.array(units), many):
            assert abs(sample.mean() - a / (a + b)) < 5 * beta(a, b).std() / math.sqrt(300) + 1e-6
            assert sample.std() == pytest.approx(beta(a, b).std(), rel=0.5, abs=1e-2)


def test_draws_of_one_name_are_correlated_within_a_table_and_names_are_independent():
    pairs, apart = [], []
    for seed in range(1500):
        scalars = draw_scalars(seed)
        pairs.append((scalars.real("width", 0, 1), scalars.real("width", 0, 1)))
        apart.append((scalars.real("a", 0, 1), scalars.real("b", 0, 1)))
    # Var E[u|t,s] = Var t = 1/12 against E[t(1-t)] E[1/(s+1)] = 1/6 * 0.209 more within: 0.0833 / 0.1181
    s = np.exp(np.linspace(math.log(0.1), math.log(1e4), 10001))
    expected = (1 / 12) / (1 / 12 + (1 / 6) * (1 / (s + 1)).mean())
    assert abs(np.corrcoef(np.array(pairs).T)[0, 1] - expected) < 0.08
    assert abs(np.corrcoef(np.array(apart).T)[0, 1]) < 0.1
    marginal = np.array(pairs)[:, 0]
    assert 0.45 < marginal.mean() < 0.55


def test_local_draws_are_independent_and_uniform():
    scalars = draw_scalars(0)
    assert kstest([scalars.real(LOCAL, 0, 1) for _ in range(2000)], "uniform").pvalue > 1e-3
    log = np.log([scalars.real(LOCAL, 0.1, 10, log=True) for _ in range(2000)])
    assert kstest((log - math.log(0.1)) / math.log(100), "uniform").pvalue > 1e-3


def test_integers_exclude_high_and_edges_have_a_mass():
    scalars = draw_scalars(0)
    drawn = [scalars.integer(LOCAL, 2, 6) for _ in range(4000)]
    assert np.bincount(drawn, minlength=6)[2:] == pytest.approx(np.full(4, 1000), abs=150)
    log = np.array([scalars.integer(LOCAL, 1, 32, log=True) for _ in range(4000)])
    assert log.min() == 1 and log.max() <= 31
    assert (log == 1).mean() == pytest.approx(math.log(2) / math.log(32), abs=0.04)
    edges = np.array([scalars.real(LOCAL, 0, 1, edges=True) for _ in range(6000)])
    assert (edges == 0).mean() == pytest.approx(1 / 12, abs=0.02)
    assert (edges == 1).mean() == pytest.approx(1 / 12, abs=0.02)
    assert all(draw_scalars(seed).integer("k", 2, 3) == 2 for seed in range(100))
    assert max(draw_scalars(seed).integer("k", 0, 4) for seed in range(300)) == 3
    arrays = scalars.reals(LOCAL, 6000, 1, math.e, log=True, edges=True)
    assert (arrays == 1).mean() == pytest.approx(1 / 12, abs=0.02)


def test_choices_are_uniform_in_one_preset_and_share_probabilities_in_the_other():
    scalars = draw_scalars(1)
    released = np.bincount([scalars.choice("function", range(4)) for _ in range(4000)], minlength=4)
    assert released == pytest.approx(np.full(4, 1000), abs=150)
    totals, largest = np.zeros(4), []
    for seed in range(400):
        scalars = draw_scalars(seed, skewed_choices=True)
        counts = np.bincount([scalars.choice("function", range(4)) for _ in range(60)], minlength=4)
        totals += counts
        largest.append(counts.max() / 60)
    assert totals / totals.sum() == pytest.approx(np.full(4, 0.25), abs=0.06)
    assert np.mean(largest) > 0.6 and min(largest) < 0.4


# RandomWeights


@pytest.mark.parametrize("size", [1, 2, 7, 200])
def test_weights_are_positive_with_norm_root_n(size: int):
    w = Weights.draw(draw_scalars(size), size, batch=50).compute(rng_at(size))
    assert w.shape == (50, size) and w.dtype == np.float32
    assert (w >= 0).all() and np.isfinite(w).all()
    np.testing.assert_allclose(np.linalg.norm(w.astype(np.float64), axis=1), math.sqrt(size), rtol=1e-5)


def test_weights_fall_with_the_slope_in_the_logarithm():
    for slope in (0.3, 1.0, 2.5):
        w = np.sort(Weights(50, np.array([slope]), np.array([1e-4])).compute(rng_at(1))[0])[::-1]
        expected = np.arange(1, 51) ** -slope
        np.testing.assert_allclose(w, expected * math.sqrt(50) / np.linalg.norm(expected), rtol=2e-3)


def test_weights_scatter_with_the_spread_and_are_shuffled():
    w = np.log(Weights(2000, np.array([1e-9]), np.array([0.7])).compute(rng_at(1))[0])
    assert kstest((w - w.mean()) / 0.7, "norm").pvalue > 1e-3
    w = Weights(5, np.full(4000, 2.0), np.full(4000, 1e-3)).compute(rng_at(2))
    assert np.bincount(w.argmax(1), minlength=5) == pytest.approx(np.full(5, 800), abs=130)


def test_weights_scalars():
    drawn = [Weights.draw(draw_scalars(seed), 20, batch=3) for seed in range(500)]
    slopes, spreads = (np.concatenate([getattr(w, name) for w in drawn]) for name in ("slope", "spread"))
    low = 0.1 / math.log(21)
    assert slopes.min() == pytest.approx(low) and slopes.max() == pytest.approx(6)
    assert (np.isclose(slopes, 6)).mean() > 0.05 and np.isclose(slopes, low).mean() > 0.05
    assert 1e-4 <= spreads.min() < 1e-3 and 5 < spreads.max() <= 10
    assert np.median(np.log(slopes)) == pytest.approx((math.log(low) + math.log(6)) / 2, abs=0.5)


# Noise


@pytest.mark.parametrize("size", [1000, 20001])
def test_normals_are_standard_normal(size: int):
    x = normals(rng_at(size), size).numpy()
    assert x.shape == (size,) and x.dtype == np.float32 and kstest(x, "norm").pvalue > 1e-3
    half = size // 2
    for a, b in ((x[:half], x[half : 2 * half]), (x[1:], x[:-1])):  # pairs of Box and Muller, neighbours
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(half)
        assert abs(np.corrcoef(a**2, b**2)[0, 1]) < 5 / math.sqrt(half)


def test_normals_have_the_tails_of_the_normal():
    x = normals(rng_at("tails"), 1_000_000).double().numpy()
    for z in (2, 3, 4):
        expected = 1_000_000 * norm.sf(z)
        for count in ((x > z).sum(), (x < -z).sum()):
            assert abs(count - expected) < 5 * math.sqrt(expected)
    assert 4.5 < np.abs(x).max() < 6.8 and x.mean() == pytest.approx(0, abs=4e-3)
    assert np.mean(x**4) == pytest.approx(3, abs=0.05)


def test_normals_differ_from_call_to_call():
    rng = rng_at("calls")
    assert not torch.isin(normals(rng, 500), normals(rng, 500)).any()


def test_distinct_rows_are_distinct():
    noise = Noise(("rows",))
    assert sorted(noise.distinct_rows(50, 50).tolist()) == list(range(50))
    counts = np.zeros((3, 5))
    for _ in range(3000):
        drawn = noise.distinct_rows(5, 3).tolist()
        assert len(set(drawn)) == 3
        counts[range(3), drawn] += 1
    assert abs(counts - 600).max() < 5 * math.sqrt(600 * 0.8)  # every row at every place


# Matrices


def draw_matrix(kind: str, seed: int, n: int, m: int, batch: int) -> Matrix:
    scalars = draw_scalars(seed)
    while True:
        matrix = Matrix.draw(scalars, n, m, batch)
        if matrix.kind == kind:
            return matrix


def raw_matrix(kind: str, seed: int, n: int, m: int, batch: int = 1) -> np.ndarray:
    return draw_matrix(kind, seed, n, m, batch)._raw(rng_at(seed)).astype(np.float64)


@pytest.mark.parametrize("kind", MATRIX_KINDS)
def test_rows_of_matrices_have_norm_one(kind: str):
    for seed, (n, m, batch) in enumerate([(1, 1, 1), (3, 8, 1), (8, 3, 4), (40, 40, 2)]):
        matrix = draw_matrix(kind, seed, n, m, batch)
        computed = matrix.compute(rng_at(seed))
        assert computed.shape == (batch, n, m) and computed.dtype == np.float32
        raw = np.linalg.norm(matrix._raw(rng_at(seed)).astype(np.float64), axis=-1)
        norms = np.linalg.norm(computed.astype(np.float64), axis=-1)
        assert (norms < 1 + 1e-5).all()
        np.testing.assert_allclose(norms[raw > 1e-2], 1, atol=3e-4)
        assert np.array_equal(computed, matrix.compute(rng_at(seed)))
        assert str(matrix)


def test_matrix_kinds_are_drawn_equally_often():
    scalars = draw_scalars(0)
    kinds = [Matrix.draw(scalars, 2, 2).kind for _ in range(2000)]
    assert [kinds.count(kind) for kind in MATRIX_KINDS] == pytest.approx([400] * 5, abs=90)
    drawn = [draw_matrix("activation", seed, 2, 2, 1) for seed in range(200)]
    assert {matrix.inner.kind for matrix in drawn} == set(MATRIX_KINDS) - {"activation"}


def test_gaussian_matrices_are_isotropic():
    entries = draw_matrix("gaussian", 0, 200, 3, 1).compute(rng_at(0))[0]
    assert kstest(entries[:, 0], "uniform", args=(-1, 2)).pvalue > 1e-3  # Archimedes: on the sphere in R^3


def test_weights_matrices_have_sparse_rows():
    matrix = draw_matrix("weights", 0, 6, 5, 3)
    matrix.weights = Weights(5, np.full(18, 6.0), np.full(18, 1e-4))  # one entry a row outweighs the others
    computed = np.sort(np.abs(matrix.compute(rng_at(0)).reshape(18, 5)), axis=1)
    assert np.median(computed[:, -1]) > 0.99
    winners = np.abs(matrix._raw(rng_at(0))).reshape(18, 5).argmax(1)
    assert len(set(winners.tolist())) > 2, "each row has weights of its own"


def test_singular_value_matrices_have_the_rank_of_their_weights():
    matrix = draw_matrix("singular_values", 0, 12, 9, 2)
    assert matrix.weights.size == 9
    matrix.weights = Weights(9, np.full(2, 6.0), np.full(2, 1e-4))
    values = np.linalg.svd(matrix._raw(rng_at(0)), compute_uv=False)
    assert (values[:, 1] < 0.2 * values[:, 0]).all()
    matrix.weights = Weights(9, np.full(2, 1e-6), np.full(2, 1e-4))
    values = np.linalg.svd(matrix._raw(rng_at(0)), compute_uv=False)
    assert (values[:, 1] > 0.3 * values[:, 0]).all()
    assert np.mean(np.square(matrix._raw(rng_at(0)))) == pytest.approx(9, rel=0.5)


def test_kernel_matrices_are_bounded_with_random_signs():
    for seed in range(20):
        raw = raw_matrix("kernel", seed, 30, 20)
        assert (np.abs(raw) <= 1).all()
        nonzero = raw[raw != 0]
        if len(nonzero) > 100:
            assert abs((nonzero > 0).mean() - 0.5) < 0.15


def test_kernel_matrices_are_exponentials_of_distances():
    matrix = draw_matrix("kernel", 0, 5, 6, 2)
    matrix.decay = 0.2  # few underflow
    rng = rng_at(0)
    a = matrix.points[0].compute(rng, 10).T.astype(np.float64).reshape(2, 5, 3)
    b = matrix.points[1].compute(rng, 12).T.astype(np.float64).reshape(2, 6, 3)
    distance = np.linalg.norm(a[:, :, None] - b[:, None], axis=-1)
    expected = np.exp(-matrix.decay * distance)
    np.testing.assert_allclose(np.abs(matrix._raw(rng_at(0))), expected, rtol=1e-3, atol=1e-6)


def test_activation_matrices_are_activations_of_others():
    matrix = draw_matrix("activation", 0, 6, 7, 2)
    matrix.activation = PlainActivation("sign")
    assert (np.abs(matrix._raw(rng_at(0))) == 1).all()
    deviation = np.abs(matrix.compute(rng_at(0))) * math.sqrt(7) - 1
    assert 2e-4 < deviation.std() < 2e-3  # noise of 1e-3
    matrix.activation = PlainActivation("rank")
    assert (np.sort(matrix._raw(rng_at(0)), axis=-1) == np.arange(7)).all(), "along the rows of the matrix"


def test_mixture_points_have_the_moments_of_their_components():
    one = MixturePoints(3, Weights(1, np.ones(1), np.ones(1)), Weights(3, np.full(1, 1e-9), np.full(1, 1e-4)))
    points = np.stack([one.compute(rng_at(seed), 40).T for seed in range(600)]).astype(np.float64)
    centres = points.mean(1)
    # Centre N(0, I); spread e^(g + h eps) with median 1: log of the mean squared deviation a component
    within = points.var(1, ddof=1).sum(1)
    assert np.median(within) == pytest.approx(9, rel=0.35)
    log = np.log(within) / 2
    # Var(g + h eps) = 2, plus that of the Gaussian matrix
    assert 1.2 < log.std() < 1.8
    tight = within < np.quantile(within, 0.25)
    assert centres[tight].std() == pytest.approx(1, abs=0.15)


def test_components_of_mixtures_are_stretched_in_random_directions():
    # Columns of the Gaussian matrix are scaled, not rows: the long axis is a Gaussian vector, not a coordinate axis.
    one = MixturePoints(3, Weights(1, np.ones(1), np.ones(1)), Weights(3, np.full(1, 6.0), np.full(1, 1e-4)))
    axes = [np.linalg.svd(np.cov(one.compute(rng_at(seed), 60)))[0][:, 0] for seed in range(400)]
    assert kstest(np.abs(axes)[:, 0], "uniform").pvalue > 1e-3


def test_components_of_a_mixture_differ_in_size_by_a_shared_factor():
    # log size = g + h eps: given h, its squared distance from g is h^2 plus the scatter of the Gaussian matrix.
    one = MixturePoints(3, Weights(1, np.ones(1), np.ones(1)), Weights(3, np.full(1, 1e-9), np.full(1, 1e-4)))
    h, deviation = [], []
    for seed in range(1000):
        rng = rng_at(seed)
        one.shares.compute(rng), one.shapes.compute(rng)
        g, spread = normals(rng, 2 + 1 + 3 + 9)[:2].tolist()  # then the component's size, centre and matrix
        within = one.compute(rng_at(seed), 40).var(1, ddof=1).sum() / 9
        h.append(spread)
        deviation.append(np.log(within) / 2 - g)
    h, deviation = np.array(h), np.array(deviation)
    assert np.std(deviation[np.abs(h) < 0.3]) < 0.6 and np.std(deviation[np.abs(h) > 0.3]) > 0.9
    assert abs(np.mean(deviation[h > 0.5]) - np.mean(deviation[h < -0.5])) < 0.4  # of either sign: h eps, not h


def test_mixture_points_pick_components_by_share():
    scalars = [MixturePoints.draw(draw_scalars(seed)) for seed in range(300)]
    assert {m.shares.size for m in scalars} >= {1, 2, 14} and max(m.shares.size for m in scalars) <= 15
    mixture = MixturePoints(
        3, Weights(2, np.array([1.0]), np.array([1e-4])), Weights(3, np.full(2, 1e-9), np.full(2, 1e-4))
    )
    shares = np.sort(mixture.shares.compute(rng_at(0))[0])
    assert shares[1] / shares.sum() == pytest.approx(2 / 3, abs=1e-3)
    # Two small components: the one nearest to each point tells which it came from.
    for seed in range(200):
        points = mixture.compute(rng_at(seed), 3000)
        assert points.shape == (3, 3000)
        near = np.linalg.norm(points - points[:, :1], axis=0)
        gaps = np.diff(np.sort(near))
        if gaps.max() > 1 and np.sort(near)[gaps.argmax()] < 0.3:
            share = (gaps.argmax() + 1) / 3000
            assert min(share, 1 - share) == pytest.approx(1 / 3, abs=0.04)
            break
    else:
        raise AssertionError("no mixture with two components apart")


# Points


def base_points(base: str, n: int, size: int, seed: int = 0, **changes) -> np.ndarray:
    points = Points(base, n, function=None, **changes)
    return points.compute_base(size, Noise(("points", seed))).double().numpy()


def test_cube_points_are_uniform():
    x = base_points("cube", 3, 4000)
    assert x.shape == (3, 4000)
    for feature in x:
        assert kstest(feature, "uniform", args=(-1, 2)).pvalue > 1e-3


@pytest.mark.parametrize("n", [1, 2, 5])
def test_ball_points_are_uniform_in_the_ball(n: int):
    x = base_points("ball", n, 4000)
    radius = np.linalg.norm(x, axis=0)
    assert radius.max() <= 1 + 1e-6
    assert kstest(radius**n, "uniform").pvalue > 1e-3
    np.testing.assert_allclose((x / radius).mean(1), 0, atol=0.08)


def test_normal_points_are_standard_normal():
    x = base_points("normal", 3, 4000)
    assert kstest(x.ravel(), "norm").pvalue > 1e-3
    np.testing.assert_allclose(np.cov(x), np.eye(3), atol=0.1)


@pytest.mark.parametrize("gaussian", [True, False])
def test_correlated_points_have_the_covariance_of_a_weighted_gaussian_matrix(gaussian: bool):
    axes = Weights(3, np.array([3.0]), np.array([1e-4]))
    x = base_points("correlated", 3, 20000, gaussian=gaussian, axes=axes)
    noise = Noise(("points", 0))
    _ = noise.normal(3, 20000) if gaussian else noise.uniform(3, 20000)
    A = noise.parameter(3, 3).double().numpy() * axes.compute(noise.rng)[0]  # columns scaled
    expected = A @ A.T * (1 if gaussian else 1 / 3)
    np.testing.assert_allclose(np.cov(x), expected, atol=0.05 * np.abs(expected).max())


def test_points_go_through_a_function():
    drawn = [Points.draw(draw_scalars(seed), 4, 50) for seed in range(100)]
    assert {points.base for points in drawn} == set(BASES)
    assert {points.gaussian for points in drawn if points.base == "correlated"} == {True, False}
    points = next(p for p in drawn if isinstance(p.function, Linear))
    noise = Noise(("points", 1))
    expected = points.function(points.compute_base(50, noise), noise)
    torch.testing.assert_close(points.compute(50, Noise(("points", 1))), expected)
    assert all(p.compute(50, Noise(("points", 1))).shape == (4, 50) and " points -> " in str(p) for p in drawn)


# Activations

CLOSED_FORMS = {  # float64 (features, rows)
    **SHARED_FORMS,
    "heaviside": lambda x: (x > 0).astype(float),
    "gauss": lambda x: np.exp(-(x**2)),
    "box": lambda x: (np.abs(x) <= 1).astype(float),
    "log_abs": lambda x: np.log(np.maximum(np.abs(x), 1e-6)),
    "rank": lambda x: (x[:, None] > x[None]).sum(1),
    "sigmoid": expit,
    "round": np.round,
    "fraction": lambda x: x - np.floor(x),
    "softmax": lambda x: np.exp(x - x.max(0)) / np.exp(x - x.max(0)).sum(0),
    "one_hot_max": lambda x: (x == x.max(0)).astype(float),
    "argsort": lambda x: np.argsort(x, axis=0),
    "logsigmoid": lambda x: -np.logaddexp(-x, 0),
}


def test_there_are_27_fixed_functions():
    assert set(CLOSED_FORMS) == set(FIXED) and len(FIXED) == 27


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_fixed_functions_are_their_closed_forms(name: str):
    x = np.random.default_rng(0).standard_normal((6, 200)) * 4
    expected = CLOSED_FORMS[name](x)
    x = torch.from_numpy(x)
    before = x.clone()
    np.testing.assert_allclose(PlainActivation(name)(x, 0), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(PlainActivation(name)(x.T.contiguous(), 1), expected.T, rtol=1e-9, atol=1e-12)
    assert torch.equal(x, before)


def test_sign_of_zero_is_one():
    assert FIXED["sign"](torch.zeros(1, 1), 0).item() == 1


@pytest.mark.parametrize(
    ("name", "power", "form"),
    [
        ("relu_power", 2.3, lambda x: np.maximum(x, 0) ** 2.3),
        ("signed_power", 0.4, lambda x: np.sign(x) * np.abs(x) ** 0.4),
        ("inverse_power", 1.7, lambda x: (np.abs(x) + 1e-3) ** -1.7),
        ("integer_power", 3, lambda x: x**3),
    ],
)
def test_powers(name: str, power: float, form):
    x = np.random.default_rng(0).standard_normal((3, 100))
    np.testing.assert_allclose(PlainActivation(name, power)(torch.from_numpy(x), 0), form(x), rtol=1e-9)


@pytest.mark.parametrize(("kinds", "shares"), [(KINDS, (4, 1, 1, 0, 0)), (PLAIN_KINDS, (8, 1, 1, 1, 1))])
def test_activation_kinds_and_scalars(kinds, shares):
    drawn = [PlainActivation.draw(draw_scalars(seed), kinds) for seed in range(3000)]
    names = ["fixed" if a.name in FIXED else a.name for a in drawn]
    for name, share in zip(
        ("fixed", "relu_power", "signed_power", "inverse_power", "integer_power"), shares, strict=True
    ):
        assert names.count(name) / 3000 == pytest.approx(share / sum(shares), abs=0.03)
    assert {a.name for a in drawn} >= set(FIXED)
    powers = [a.power for a in drawn if a.name == "signed_power"]
    assert 0.1 <= min(powers) < 0.2 and 5 < max(powers) <= 10
    assert {a.power for a in drawn if a.name == "integer_power"} in (set(), {2, 3, 4, 5})


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e6])
def test_standardise_and_normalise(scale: float):
    x = np.random.default_rng(0).standard_normal((4, 300)) * scale + 2 * scale
    std = x.std(1, keepdims=True)
    expected = (x - x.mean(1, keepdims=True)) / (std + 1e-4)
    given = torch.from_numpy(x.astype(np.float32))
    np.testing.assert_allclose(standardise(given.clone()), expected, atol=2e-4)
    unit, factor = normalise(given)
    np.testing.assert_allclose((unit * factor).numpy(), expected, atol=2e-4)
    np.testing.assert_allclose(factor.numpy(), std / (std + 1e-4), rtol=1e-3)


def test_constant_features_become_zero():
    assert (standardise(torch.full((2, 50), 3.7)).abs() < 1e-3).all()


def test_activation_is_standardise_shift_scale_apply_standardise():
    x = np.random.default_rng(0).standard_normal((5, 200)) * 3 + 1
    given = torch.from_numpy(x.astype(np.float32))
    for scale in (1.0, 7.0):
        got = Activation(PlainActivation("tanh"), scale)(given.clone(), Noise(("a",)))
        rows = Noise(("a",)).rows(200, 5).numpy()
        z = (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-4)
        y = np.tanh((z - z[np.arange(5), rows][:, None]) * scale)
        expected = (y - y.mean(1, keepdims=True)) / (y.std(1, keepdims=True) + 1e-4)
        np.testing.assert_allclose(got, expected, atol=1e-3)
    scales = [Activation.draw(draw_scalars(seed)).scale for seed in range(300)]
    assert 1 <= min(scales) < 1.1 and 9 < max(scales) <= 10
