"""The priors of the SSA paper against brute force and least squares."""

import itertools

import numpy as np
import pytest
import torch

from priors import PriorError, TableSpec, build_prior

SPECS = [TableSpec(rows, rows // 2, features, 2) for rows in (10, 40) for features in (1, 3)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("quantifier", "holds"), [("every", all), ("some", any)])
@pytest.mark.parametrize("undecided", [False, True])
@pytest.mark.parametrize("deviant", [1.0, 50.0])
def test_a_row_tells_the_truth_about_all_numbers_so_far(spec, quantifier, holds, undecided, deviant):
    options = {"quantifier": quantifier, "undecided": undecided}
    prior = build_prior("quantifiers", deviant=deviant, **options)
    without_deviant = build_prior("quantifiers", **options)
    last = set()
    for seed in range(20):
        table = prior.sample(spec, seed)
        assert table.X.shape == (spec.num_rows, spec.num_features)
        assert table.train_size == spec.train_size
        factors = table.X / without_deviant.sample(spec, seed).X
        assert torch.allclose(factors[0 if undecided else -1], torch.tensor(deviant))

        is_positive = (table.X > 0).tolist()
        expected = []
        for row in range(spec.num_rows):
            so_far = itertools.chain.from_iterable(is_positive[: row + 1])
            expected.append(holds(so_far))
        assert table.y.tolist() == expected
        assert table.y.dtype == torch.int64
        assert table.num_classes == 2
        if undecided:
            assert set(expected[:-1]) == {quantifier == "every"}
            last.add(expected[-1])
    assert last == ({True, False} if undecided else set())


def test_numbers_and_coefficients_have_the_standard_deviations_of_the_options():
    spec = TableSpec(500, 250, 4, 2)
    assert build_prior("quantifiers", sigma=7.0).sample(spec, 0).X.std() == pytest.approx(7, rel=0.05)
    prior = build_prior("linear_functions", sigma=3.0, input_sigma=0.5)
    tables = [prior.sample(TableSpec(40, 20, 4, 0), seed) for seed in range(300)]
    assert torch.cat([table.X for table in tables]).std() == pytest.approx(0.5, rel=0.05)
    coefficients = np.array([[*table.plan.a, table.plan.b] for table in tables])
    assert coefficients.std(0) == pytest.approx(3, rel=0.15)


@pytest.mark.parametrize("features", [1, 3])
def test_least_squares_finds_the_function_of_a_table(features):
    for seed in range(5):
        table = build_prior("linear_functions", sigma=10.0, deviant=9.0).sample(TableSpec(30, 5, features, 0), seed)
        points = np.column_stack([table.X.double(), np.ones(30)])
        found, residual, _, _ = np.linalg.lstsq(points, table.y.double(), rcond=None)
        assert found == pytest.approx([*table.plan.a, table.plan.b], abs=1e-4)
        assert residual < 1e-6
        assert table.y.dtype == torch.float32
        assert table.num_classes == 0
        assert table.train_size == 5


def test_wrong_options_and_targets_are_refused():
    with pytest.raises(
        PriorError, match=r"quantifier is 'most'; it must be one of .*; sigma is 0.0; it must be positive"
    ):
        build_prior("quantifiers", sigma=0.0, quantifier="most")
    with pytest.raises(PriorError, match=r"input_sigma is -1.0; it must be positive"):
        build_prior("linear_functions", input_sigma=-1.0)
    with pytest.raises(PriorError, match="this prior draws numeric targets only, but max_classes is 2, not 0"):
        build_prior("linear_functions").sample(TableSpec(20, 10, 1, 2), 0)
