"""Filters of finished tables: unpredictable ones and trivial ones, both judged by extremely randomised trees."""

from __future__ import annotations

import math

import numpy as np

from priors.finish import Rejected
from priors.table import Table

# Trees grown before each look, the last being the specified number. More trees and more rows only raise the z-score
# of the improvement: of 400 tables none was rejected whose score passed 2 at any look (the largest of the rejected
# was 1.1), none accepted whose score was below -3 after 12 trees.
LOOKS = (1, 3, 6, 12, 25)
CERTAIN = 2.5
HOPELESS, HOPELESS_AFTER = -3.5, 12
FIRST_ROWS = 1024  # of long tables, looked at first
RESAMPLES = 200
MAX_FAILURES = 10  # 5 % of the resamples
# Even y = sign(x0) leaves trees with random cuts 0.06 to 0.15 (400 to 3,000 rows, 1 to 20 features).
TRIVIAL_ERROR = 0.15


def check_predictability(table: Table, rng: np.random.Generator, drop_unpredictable: bool, drop_trivial: bool) -> None:
    """Raise Rejected("unpredictable") or Rejected("trivial").

    25 extremely randomised trees (depth 6, all features tried at a split, bootstrap) predict the one-hot target out
    of bag. Unpredictable: in at least 5 % of 200 bootstrap resamples of the rows, the trees' squared error is not
    below that of the mean. Trivial: the trees' squared error is below 15 % of that of the mean.
    """
    from priors.filters.trees import ExtraTrees

    X, y = table.X.cpu().numpy(), table.y.cpu().numpy()
    if not drop_trivial and len(y) > FIRST_ROWS:
        rows = rng.choice(len(y), FIRST_ROWS, replace=False)
        if ExtraTrees(X[rows], y[rows], rng).grow(LOOKS[1]).z_score() > CERTAIN:
            return
    trees = ExtraTrees(X, y, rng)
    for look in LOOKS[:-1]:
        z = trees.grow(look - trees.size).z_score()
        if z > CERTAIN and not drop_trivial:
            return
        if z < HOPELESS and look >= HOPELESS_AFTER and drop_unpredictable:
            raise Rejected("unpredictable")
    trees.grow(LOOKS[-1] - trees.size)
    if drop_unpredictable:
        # The mean of a resample is close to normal, so the number of resamples whose mean is not positive is
        # binomial: drawn as such instead of resampling.
        failure = 0.5 * math.erfc(trees.z_score() / math.sqrt(2))
        if rng.binomial(RESAMPLES, failure) >= MAX_FAILURES:
            raise Rejected("unpredictable")
    if drop_trivial and trees.relative_error() < TRIVIAL_ERROR:
        raise Rejected("trivial")
