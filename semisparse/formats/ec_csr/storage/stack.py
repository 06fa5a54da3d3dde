"""Weights above one another as one: the row panels of each follow those of the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semisparse.formats.base import Packed, Scalar
from semisparse.formats.ec_csr.storage.deltas import PANELS, layout_of

SAME = ("layout", "delta_bits", "panel_rows")


def stack(weights: Sequence[Packed], rows: int) -> Mapping[str, Scalar] | None:
    """Return the params of weights above one another.

    Args:
        weights: in the layout on disk.
        rows: of all of them, with those of zeros that fill panels in between.
    Returns:
        None unless all are row panels of one height and one width of deltas.
    """
    first = weights[0].params
    if layout_of(first) != PANELS or any(w.params[name] != first[name] for w in weights for name in SAME):
        return None
    values = sum(int(weight.params["values"]) for weight in weights)
    span = max(int(weight.params["span"]) for weight in weights)
    return {**first, "n": rows, "values": values, "span": span}
