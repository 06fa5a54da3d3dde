"""Stack weights along N: the row panels of each follow those of the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semisparse.formats.base import Packed, Scalar
from semisparse.formats.ec_csr.storage.deltas import GPU, PANELS, layout_of

SAME = ("layout", "delta_bits", "panel_rows", GPU)


def stack(weights: Sequence[Packed], rows: int) -> Mapping[str, Scalar] | None:
    """Return the params of weights that are stacked along N.

    Args:
        weights: in the layout on disk.
        rows: rows of the stack, including the rows of zeros that fill the last panel of each weight.
    Returns:
        The params; None unless all weights are row panels of the same height and bits per delta.
    """
    first = weights[0].params
    if layout_of(first) != PANELS or any(w.params.get(name) != first.get(name) for w in weights for name in SAME):
        return None
    values = sum(int(weight.params["values"]) for weight in weights)
    span = max(int(weight.params["span"]) for weight in weights)
    return {**first, "n": rows, "values": values, "span": span}
