import numpy as np
import torch

from priors import TableSpec, build_prior

SPEC = TableSpec(num_rows=4000, train_size=2500, num_features=12, max_classes=3)


def test_features_and_labels_are_independent_noise():
    table = build_prior("dummy").sample(SPEC, 3)
    assert table.X.shape == (4000, 12) and table.X.dtype == torch.float32
    assert table.y.shape == (4000,) and table.y.dtype == torch.int64
    assert set(table.y.tolist()) == set(range(table.num_classes))
    one_hot = torch.nn.functional.one_hot(table.y).numpy()
    together = np.corrcoef(np.hstack([table.X.numpy(), one_hot[:, 1:]]).T)
    np.fill_diagonal(together[:12, :12], 0)
    assert np.abs(together[:12]).max() < 5 / np.sqrt(4000)  # five standard errors


def test_the_number_of_classes_is_uniform():
    drawn = [build_prior("dummy").sample(TableSpec(200, 100, 1, max_classes=4), i).num_classes for i in range(300)]
    counts = np.bincount(drawn, minlength=5)[2:]
    assert counts.sum() == 300 and counts.min() > 70


def test_numeric_targets_are_independent_noise():
    table = build_prior("dummy").sample(TableSpec(4000, 2500, 12, max_classes=0), 3)
    together = np.corrcoef(np.column_stack([table.X, table.y]).T)
    assert np.abs(together[-1, :-1]).max() < 5 / np.sqrt(4000)
    assert abs((table.y**4).mean() - 3) < 0.4  # as of a normal distribution
    assert str(table.plan) == "dummy (3, 0): 4000 rows, 12 features, numeric target"


def test_the_plan_reads_as_text():
    table = build_prior("dummy").sample(SPEC, (1, 2))
    assert str(table.plan) == f"dummy (1, 2, 0): 4000 rows, 12 features, {table.num_classes} classes"
