"""matplotlib, which only plots need."""

from __future__ import annotations

from typing import Any

from semisparse.errors import SemisparseError


def load_pyplot() -> Any:
    """Return matplotlib's pyplot, drawing to files.

    Raises:
        SemisparseError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SemisparseError("plots need matplotlib: pip install 'semisparse[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
