"""Weights one above the other as one: in the layout `banks`, panels of equally many rows follow one another."""

from __future__ import annotations

from collections.abc import Sequence

from semisparse.formats.base import Packed, Params
from semisparse.formats.ec_csr.layout import layout_of, panel_rows_of
from semisparse.patterns import Pattern

SAME = ("layout", "delta_bits", "panel_rows")


def grain(pattern: Pattern, params: Params) -> tuple[int, int]:
    """Give the rows of a panel; of the layout `paper`, and along K, nothing may be cut."""
    return (panel_rows_of(params) if layout_of(params) == "banks" else int(params["n"])), int(params["k"])


def stack(weights: Sequence[Packed], rows: int) -> Params | None:
    """Give the params of weights above one another, ``rows`` in all; None unless all have panels of one kind."""
    first = weights[0].params
    if layout_of(first) != "banks" or any(w.params[name] != first[name] for w in weights for name in SAME):
        return None
    values = sum(int(weight.params["values"]) for weight in weights)
    span = max(int(weight.params["span"]) for weight in weights)
    return {**first, "n": rows, "values": values, "span": span}
