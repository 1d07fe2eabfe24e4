"""Rejects finished tables whose target extremely randomized trees cannot predict, or predict too well.

The first filter is that of TabICLv2 (arXiv 2602.11139, appendix on the prior), the second is our own.
"""

from __future__ import annotations

import numpy as np

from priors.finish import Rejected
from priors.table import Table

# Numbers of trees after which a table may be decided; the last is that of the paper. More trees and more rows only
# raise the z-score of the improvement: of 400 tables, none was rejected whose score exceeded 2 at any stage (the
# highest among the rejected was 1.1), and none accepted whose score was below -3 after 12 trees.
STAGES = (1, 3, 6, 12, 25)
CERTAIN = 2.5  # z-score above which a table is accepted early
HOPELESS, HOPELESS_AFTER = -3.5, 12  # z-score below which a table is rejected early, from this number of trees on
FIRST_ROWS = 1024  # random rows of a longer table on which it may be accepted even earlier
RESAMPLES = 200
MAX_FAILURES = 10  # 5 % of the resamples
# Relative squared error. Even for y = sign(x0), trees with random cuts are left with 0.06 to 0.15 (400 to 3,000 rows,
# 1 to 20 features).
TRIVIAL_ERROR = 0.15


def check_predictability(table: Table, rng: np.random.Generator, drop_unpredictable: bool, drop_trivial: bool) -> None:
    """Raise Rejected("unpredictable") or Rejected("trivial") if the table is to be dropped.

    25 extremely randomized trees (depth 6, all features tried at each split, bootstrap samples) predict the target
    (the one-hot classes, or the number) out of bag. A table is unpredictable if in at least 5 % of 200 bootstrap
    resamples of its rows the trees' squared error is not below that of the mean; it is trivial if the trees' squared
    error is below 15 % of that of the mean.
    """
    if table.num_classes:
        from priors.filters.trees import ExtraTrees
    else:
        from priors.filters.numeric_trees import NumericExtraTrees as ExtraTrees

    X, y = table.X.cpu().numpy(), table.y.cpu().numpy()
    if not drop_trivial and len(y) > FIRST_ROWS:
        rows = rng.choice(len(y), FIRST_ROWS, replace=False)
        if ExtraTrees(X[rows], y[rows], rng).grow(STAGES[1]).z_score() > CERTAIN:
            return
    trees = ExtraTrees(X, y, rng)
    for num_trees in STAGES[:-1]:
        z = trees.grow(num_trees - trees.size).z_score()
        if z > CERTAIN and not drop_trivial:
            return
        if z < HOPELESS and num_trees >= HOPELESS_AFTER and drop_unpredictable:
            raise Rejected("unpredictable")
    trees.grow(STAGES[-1] - trees.size)
    if drop_unpredictable and trees.failures(RESAMPLES) >= MAX_FAILURES:
        raise Rejected("unpredictable")
    if drop_trivial and trees.relative_error() < TRIVIAL_ERROR:
        raise Rejected("trivial")
