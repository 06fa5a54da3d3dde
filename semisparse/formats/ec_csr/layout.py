"""What is stored in the two layouts: tensors, their sizes, and the numbers that `params` hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Params, TensorSpec
from semisparse.formats.params import choice_of
from semisparse.patterns import Pattern

LAYOUTS = ("banks", "paper")

DELTA_BITS = (4, 8)

LANES = 32
"""Of a warp, and banks of a processor's shared memory."""

PANEL_ROWS = tuple(range(28, 65, 4))
"""Rows of a panel of `banks`: what one thread block computes."""

USUAL_ROWS = 32

PROCESSORS = 132
"""Of an H200, for which panels are cut."""

SLACK = 1.03
"""Of the rows that the busiest processor gets: for less than that, panels are rather large."""

SEGMENTS = 16
"""Parts of equal length that each lane's list of a panel is cut into, one for each warp of a thread block."""

RUN = 2
"""A row's steps in a lane of `banks` are a multiple of this, so that a kernel looks for the row's end so much less."""

VECTOR_BYTES = 16
"""Of values that a lane of `banks` loads at a time."""

GRANULARITIES = (1, 2, 4, 8)
"""Rows of a block of `paper`. On random masks of 50 % and multiples of 32, 38 % of the weights reach 4, few 8."""

FIELDS = ("granularity", "vector", "columns", "first_delta", "first_value", "first_slot")
"""Of a bundle of `paper`: rows of its block, columns a load, columns a lane, where deltas, values and slots begin."""

FIRST_OFFSET = FIELDS.index("first_delta")

BACK = "begins a segment below the end of the one before"
"""What a list may not do: a kernel that gives rows back takes the bases for the ends of segments."""

INDEX_DTYPES = {16: torch.int16, 32: torch.int32}


def layout_of(params: Params) -> str:
    """Give the layout that ``params`` name.

    Raises:
        FormatError: there is no such layout.
    """
    return choice_of("ec_csr", params, "layout", LAYOUTS)


def delta_bits_of(params: Params) -> int:
    """Give the width of a delta, 4 or 8.

    Raises:
        FormatError: it is another.
    """
    return choice_of("ec_csr", params, "delta_bits", DELTA_BITS)


def panel_rows_of(params: Params) -> int:
    """Give the rows of a panel of `banks`, a multiple of 4 from 28 to 64.

    Raises:
        FormatError: it is another number.
    """
    return choice_of("ec_csr", params, "panel_rows", PANEL_ROWS)


def panel_rows_for(n: int) -> int:
    """Give the rows that a panel of a weight with ``n`` rows has, so that all processors have about as many.

    11,008 rows in panels of 32 give some processors three and others two: 17.2 us for 15.0 in panels of 28.
    """
    if n <= PROCESSORS * USUAL_ROWS:
        return USUAL_ROWS
    panels = {rows: -(-n // rows) for rows in PANEL_ROWS}
    most = {rows: -(-count // PROCESSORS) * rows for rows, count in panels.items()}
    even = [rows for rows in PANEL_ROWS if most[rows] <= SLACK * min(most.values())]
    return max((rows for rows in even if panels[rows] >= 2 * (PROCESSORS - 4)), default=even[0])


def index_bits_for(k: int) -> int:
    """Give the narrowest width that holds every base of a weight with K = ``k``: a place in 64 rows, or a column."""
    return 16 if k <= 1 << 15 else 32


def vector_of(dtype: torch.dtype) -> int:
    """Give the columns that a lane of `banks` loads at a time, `VECTOR_BYTES` of values."""
    return VECTOR_BYTES // dtype.itemsize


def specs(pattern: Pattern, params: Params) -> tuple[TensorSpec, ...]:
    """Give the stored tensors."""
    shared = (
        TensorSpec("values", None, ("values",)),
        TensorSpec("deltas", torch.uint8, ("delta_bytes",)),
        TensorSpec("bases", INDEX_DTYPES[index_bits_for(int(params["k"]))], ("lists", "lanes")),
    )
    if layout_of(params) == "banks":
        return (*shared, TensorSpec("panel_loads", torch.int32, ("panels+1",)))
    return (
        *shared,
        TensorSpec("bundles", torch.int32, ("lists", "fields")),
        TensorSpec("slots", torch.int32, ("slots",)),
        TensorSpec("row_slots", torch.int32, ("N+1",)),
    )


def counts(n: int, k: int, pattern: Pattern, params: Params) -> Mapping[str, int]:
    """Give the named dimensions of the stored tensors."""
    if (params["n"], params["k"]) != (n, k):
        raise ValueError(f"the weight was packed with N, K = {params['n']!r}, {params['k']!r}")
    sizes = {"values": int(params["values"]), "lanes": LANES}
    if layout_of(params) == "banks":
        panels = -(-n // panel_rows_of(params))
        sizes |= {"panels": panels, "lists": panels * SEGMENTS}
        return {**sizes, "delta_bytes": sizes["values"] * delta_bits_of(params) // 8}
    sizes |= {"fields": len(FIELDS), "lists": int(params["bundles"]), "slots": int(params["slots"])}
    return {**sizes, "delta_bytes": int(params["deltas"]) * delta_bits_of(params) // 8}


def narrowed(numbers: Tensor, bits: int) -> Tensor:
    """Store non-negative int64 numbers below 2**``bits`` in a signed dtype of that width."""
    dtype = INDEX_DTYPES[bits]
    return torch.where(numbers >= 1 << bits - 1, numbers - (1 << bits), numbers).to(dtype)


def widened(stored: Tensor) -> Tensor:
    """Read what `narrowed` stored, as int64."""
    return stored.long() & ((1 << 8 * stored.dtype.itemsize) - 1)


def packed_deltas(deltas: Tensor, bits: int) -> Tensor:
    """Store deltas, a byte each, in ``bits``; of two to a byte, the first takes the low half."""
    return deltas if bits == 8 else deltas[::2] | deltas[1::2] << 4


def deltas_at(stored: Tensor, places: Tensor, bits: int) -> Tensor:
    """Read the deltas that stand at ``places``, as int64."""
    if bits == 8:
        return stored[places].long()
    return (stored[places // 2].long() >> places % 2 * 4) & 15


def rank_in_group(groups: Tensor, counts: Tensor) -> Tensor:
    """Number the members of each group, given sorted groups and how many each has."""
    return torch.arange(len(groups), device=groups.device) - (counts.cumsum(0) - counts)[groups]


def refuse_repeats(shape: tuple[int, int], stored: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Raise `FormatError` if two of the weights that `stored_weights` gives have one place."""
    seen: Tensor | None = None
    weights = 0
    for places, _ in stored:
        if seen is None:
            seen = torch.zeros(math.prod(shape), dtype=torch.bool, device=places.device)
        seen[places] = True
        weights += len(places)
    found = 0 if seen is None else int(seen.count_nonzero())
    if found != weights:
        raise FormatError(f"{weights} weights are stored at {found} places, expected each once")
