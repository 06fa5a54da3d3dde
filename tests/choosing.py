"""Which cases of a parametrised test ``make test`` runs, and which ``make test-slow`` alone."""

from collections.abc import Iterable

import pytest


def mostly_slow(cases: Iterable, *usual: int) -> list:
    """Return the cases; all except those at the indices ``usual`` get the marker ``slow``."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if i in usual else pytest.mark.slow) for i, case in enumerate(tuples)]
