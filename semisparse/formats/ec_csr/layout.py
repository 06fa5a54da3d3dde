"""What is stored in the two layouts: tensors, their sizes, and the numbers that `params` hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Params, TensorSpec
from semisparse.patterns import Pattern

LAYOUTS = ("panels", "paper")

DELTA_BITS = (4, 8)

LANES = 32
"""Of a warp; each walks its own list of columns."""

PANEL_ROWS = 32
"""Rows that one thread block computes, and inside which `panels` looks for blocks.

Random masks, 70 %, multiple 32: 0.605 column indices a weight; panels of 512 rows 0.573, and 80 times the matching.
"""

GRANULARITIES = {"panels": (1, 2, 4), "paper": (1, 2, 4, 8)}
"""Rows of a block. On random masks of 50 % and multiples of 32, 38 % of the weights reach 4 rows, next to none 8."""

VECTOR_BYTES = 16
"""Of values that a lane of `panels` loads at a time."""

FIELDS = ("granularity", "vector", "columns", "first_delta", "first_value", "first_slot")
"""A bundle's: rows of its blocks, columns a load, columns a lane, and where its deltas, values and slots begin."""

FIRST_OFFSET = FIELDS.index("first_delta")

NO_SLOT = (1 << 16) - 1
"""Stands for the slots of a lane of `panels` that has no block."""

SIZES = ("deltas", "values", "slots")
"""The counts that depend on the weights, besides the bundles of a panel."""

INDEX_DTYPES = {16: torch.int16, 32: torch.int32}


def layout_of(params: Params) -> str:
    """Give the layout that ``params`` name.

    Raises:
        FormatError: there is no such layout.
    """
    return str(_known(params, "layout", LAYOUTS))


def delta_bits_of(params: Params) -> int:
    """Give the width of a delta, 4 or 8.

    Raises:
        FormatError: it is another.
    """
    return int(_known(params, "delta_bits", DELTA_BITS))


def panel_rows_of(n: int, params: Params) -> int:
    """Give the rows inside which blocks stay: 32, or all in the layout `paper`."""
    return n if layout_of(params) == "paper" else PANEL_ROWS


def owners_of(params: Params) -> int:
    """Give how many lists of rows a bundle has: one a lane, or one for all lanes in the layout `paper`."""
    return 1 if layout_of(params) == "paper" else LANES


def _known(params: Params, key: str, values: tuple[int, ...] | tuple[str, ...]) -> int | str:
    found = params.get(key)
    for value in values:
        if found == value and type(found) is type(value):
            return value
    raise FormatError(f"format ec_csr: {key} is {found!r}, expected {' or '.join(map(str, values))}")


def index_bits_for(k: int) -> int:
    """Give the narrowest width that holds every column below ``k``."""
    return 16 if k <= 1 << 16 else 32


def vector_of(granularity: int, dtype: torch.dtype) -> int:
    """Give the columns that a lane of `panels` loads at a time, `VECTOR_BYTES` of values; one at the least."""
    return max(1, VECTOR_BYTES // (granularity * dtype.itemsize))


def specs(pattern: Pattern, params: Params) -> tuple[TensorSpec, ...]:
    """Give the stored tensors."""
    tensors = (
        TensorSpec("values", None, ("values",)),
        TensorSpec("deltas", torch.uint8, ("delta_bytes",)),
        TensorSpec("bases", INDEX_DTYPES[index_bits_for(int(params["k"]))], ("bundles", "lanes")),
        TensorSpec("bundles", torch.int32, ("bundles", "fields")),
        TensorSpec("row_slots", torch.int32, ("N+1",)),
    )
    slots = torch.int32 if layout_of(params) == "paper" else torch.int16
    return (*tensors, TensorSpec("slots", slots, ("slots",)))


def counts(n: int, k: int, pattern: Pattern, params: Params) -> Mapping[str, int]:
    """Give the named dimensions of the stored tensors."""
    if params["k"] != k:
        raise ValueError(f"the weight was packed with K = {params['k']!r}")
    found = {name: int(params[name]) for name in SIZES}
    return {
        **found,
        "delta_bytes": found["deltas"] * delta_bits_of(params) // 8,
        "bundles": int(params["panel_bundles"]) * -(-n // panel_rows_of(n, params)),
        "lanes": LANES,
        "fields": len(FIELDS),
    }


def narrowed(numbers: Tensor, bits: int) -> Tensor:
    """Store non-negative int64 numbers below 2**``bits`` in a signed dtype of that width."""
    dtype = INDEX_DTYPES[bits]
    return torch.where(numbers >= 1 << bits - 1, numbers - (1 << bits), numbers).to(dtype)


def widened(stored: Tensor) -> Tensor:
    """Read what `narrowed` stored, as int64."""
    return stored.long() & ((1 << 8 * stored.dtype.itemsize) - 1)


def most_slots(row_slots: Tensor) -> int:
    """Give the slots of the panel of `panels` that has most, from the rows' starts, [N + 1]."""
    starts = torch.cat((row_slots[:-1:PANEL_ROWS], row_slots[-1:]))
    return int(starts.diff().max())


def sizes_of(table: Tensor, owners: int) -> Tensor:
    """Give the deltas, values and slots of each bundle, [bundles, 3], from granularity, vector and columns."""
    granularity, _, columns = table.T
    steps = LANES * columns
    return torch.stack((steps, steps * granularity, owners * granularity * (columns > 0)), 1)
