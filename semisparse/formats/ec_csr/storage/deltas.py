"""Params, and deltas of 4 or 8 bits: what the two layouts, row panels and the paper's EC-CSR, have in common."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Params, choice_of

PANELS, PAPER = LAYOUTS = ("banks", "paper")
"""Values of ``params["layout"]`` in files. Row panels are called `banks` there: they avoid bank conflicts."""

TILES, BOTH = "tiles", "both"
"""Further values for weights on a GPU: mask tiles, and row panels and mask tiles side by side."""

GPU, LISTS = "on_gpu", "lists"
"""The param that says what a weight has on a GPU: `BOTH`, if params lack it, `LISTS` (row panels) or `TILES`."""

DELTA_BITS = (4, 8)

LANES = 32
"""Lanes per warp. In both layouts each lane decodes deltas of its own, from a base of its own."""

MAX_COLUMNS = 1 << 29
"""Maximum K. A position in a panel of up to 64 rows and K / 32 columns per lane stays below 2**30, within int32."""

INDEX_DTYPES = {16: torch.int16, 32: torch.int32}


def layout_of(params: Params) -> str:
    """Return the layout that ``params`` name.

    Raises:
        FormatError: there is no such layout.
    """
    return choice_of("ec_csr", params, "layout", (*LAYOUTS, TILES, BOTH))


def gpu_layout_of(params: Params) -> str:
    """Return what the weight is to have on a GPU that supports mask tiles: `BOTH`, `LISTS` or `TILES`.

    Raises:
        FormatError: it is none of them.
    """
    return choice_of("ec_csr", params, GPU, (BOTH, LISTS, TILES), default=BOTH)


def has_lists(params: Params) -> bool:
    """Return whether the weight is stored in row panels, perhaps beside mask tiles."""
    return layout_of(params) in (PANELS, BOTH)


def has_tiles(params: Params) -> bool:
    """Return whether the weight is stored in mask tiles, perhaps beside row panels."""
    return layout_of(params) in (TILES, BOTH)


def delta_bits_of(params: Params) -> int:
    """Return the bits per delta, 4 or 8.

    Raises:
        FormatError: it is another number.
    """
    return choice_of("ec_csr", params, "delta_bits", DELTA_BITS)


def index_bits_for(k: int) -> int:
    """Return the bits per element of ``bases`` for a weight with ``k`` columns.

    An element is a position in a row panel, below 64 * ceil(K / 32), or a column in EC-CSR.
    """
    return 16 if k <= 1 << 15 else 32


def refuse_columns(k: int) -> None:
    """Refuse a weight of more than `MAX_COLUMNS` columns.

    Raises:
        FormatError: K is larger.
    """
    if k > MAX_COLUMNS:
        raise FormatError(f"format ec_csr stores up to {MAX_COLUMNS} columns, got K = {k}")


def narrowed(numbers: Tensor, bits: int) -> Tensor:
    """Store int64 numbers from 0 to 2**``bits`` - 1 in a signed dtype of that width."""
    return torch.where(numbers >= 1 << bits - 1, numbers - (1 << bits), numbers).to(INDEX_DTYPES[bits])


def widened(stored: Tensor) -> Tensor:
    """Read what `narrowed` stored, as int64."""
    return stored.long() & ((1 << 8 * stored.dtype.itemsize) - 1)


def packed_deltas(deltas: Tensor, bits: int) -> Tensor:
    """Pack uint8 deltas in ``bits`` each: two 4-bit deltas per byte, the first in the low half."""
    return deltas if bits == 8 else deltas[::2] | deltas[1::2] << 4


def deltas_at(stored: Tensor, index: Tensor, bits: int) -> Tensor:
    """Read the deltas numbered ``index``, as int64."""
    if bits == 8:
        return stored[index].long()
    return (stored[index // 2].long() >> index % 2 * 4) & 15


def rank_in_group(groups: Tensor, counts: Tensor) -> Tensor:
    """Number the members of each group from 0.

    Args:
        groups: the group of each member, ascending, int64.
        counts: the number of members of each group.
    """
    return torch.arange(len(groups), device=groups.device) - (counts.cumsum(0) - counts)[groups]


def bridged(groups: Tensor, numbers: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Insert numbers between the ascending ``numbers`` of each group, so that no gap exceeds ``limit``.

    Args:
        groups: [entries] int64, ascending.
        numbers: [entries] int64, strictly ascending within a group.
        limit: maximum gap.
    Returns:
        Groups and numbers, the inserted ones included, and a bool for each: False if it was inserted.
    """
    gap = numbers.diff(prepend=numbers[:1])
    gap = torch.where(groups.diff(prepend=groups[:1] - 1) == 0, gap, 1)
    repeats = 1 + (gap - 1) // limit
    source = torch.arange(len(numbers), device=numbers.device).repeat_interleave(repeats)
    rank = rank_in_group(source, repeats)
    given = rank == repeats[source] - 1
    return groups[source], torch.where(given, numbers[source], (numbers - gap)[source] + limit * (rank + 1)), given


def refuse_repeats(positions: Iterable[Tensor]) -> None:
    """Refuse to store two weights at the same row and column.

    Args:
        positions: row * K + column of the stored weights, int64.
    Raises:
        FormatError: two are equal.
    """
    parts = list(positions)
    stored = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float32)
    distinct = len(stored.unique())
    if distinct != len(stored):
        raise FormatError(f"{len(stored)} weights are stored at {distinct} positions, expected each once")
