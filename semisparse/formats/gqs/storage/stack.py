"""Stacking weights along N: the stack's tensors are the weights' tensors, concatenated."""

from __future__ import annotations

from collections.abc import Sequence

from semisparse.formats.base import Packed, Params
from semisparse.formats.gqs.storage.disk import MAX_KEPT


def stack(weights: Sequence[Packed], rows: int) -> Params | None:
    """Return the params of weights stacked to ``rows`` rows; None if kinds differ or they keep too many groups."""
    kept = sum(int(weight.params["kept"]) for weight in weights)
    if len({weight.params["kind"] for weight in weights}) > 1 or kept > MAX_KEPT:
        return None
    return Params(weights[0].params, rows=rows, kept=kept)
