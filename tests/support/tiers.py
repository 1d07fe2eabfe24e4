"""Cases of a parametrization that run in the slow tier only."""

from collections.abc import Collection, Iterable

import pytest


def slow_except(cases: Iterable, default: Collection) -> list:
    """Return all cases in their order, marked as slow unless they are among the default ones."""
    return [pytest.param(case, marks=[] if case in default else [pytest.mark.slow]) for case in cases]
