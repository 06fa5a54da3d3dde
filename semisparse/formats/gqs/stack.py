"""Weights one above the other as one: tiles of rows follow one another, and groups are stored in their order."""

from __future__ import annotations

from collections.abc import Sequence

from semisparse.formats.base import Packed, Params

MOST_GROUPS = 2**31 - 1
"""That offsets of 32 bits count."""


def stack(weights: Sequence[Packed], rows: int) -> Params | None:
    """Give the params of weights above one another, ``rows`` in all; None if they are of several kinds or too many."""
    kept = sum(int(weight.params["kept"]) for weight in weights)
    if len({weight.params["kind"] for weight in weights}) > 1 or kept > MOST_GROUPS:
        return None
    return {**weights[0].params, "rows": rows, "kept": kept}
