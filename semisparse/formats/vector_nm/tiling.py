"""How a product for many tokens is cut: tiles of y, stages along K, and whether x's columns are packed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from semisparse.patterns import VectorNM

PACKING = 0.5
"""Share of a window's columns, kept by some group of a tile, below which only those are staged (section III-A).

At 4:32v32 231 us packed and 240 whole with four groups, 236 and 223 with eight (float32, M = 2,048, 4096 x 4096, H200).
"""

WHOLE_COLUMNS = 128
"""The widest stage of whole windows."""

SHARED_LIMIT = 99 << 10
"""Bytes that every card from Ampere on gives to a block."""

RESERVED = 1 << 10
"""Bytes of shared memory that each block takes besides."""

WARP_ROWS = 32

MAX_TURNS = {2: 16, 4: 8}
"""Columns of a packed stage that a thread copies, by bytes of an element: it holds their numbers in registers."""

ENOUGH_WARPS = 4
"""On a processor; with fewer, nobody works while they wait."""


@dataclass(frozen=True)
class Shape:
    """A block's tile of y.

    Args:
        tokens: of a block.
        rows: output features of a block.
        per_thread: tokens of a thread (float32), or mma tiles of 16 tokens of a warp (16 bits).
        resident: blocks that a processor is to hold at once.
        cost: time of an output, measured on an H200, over that of the largest shape.
        slots: at most, of a stage: in 16 bits a warp holds their weights in registers.
    """

    tokens: int
    rows: int
    per_thread: int
    resident: int
    cost: float
    slots: int

    def threads(self, bits16: bool) -> int:
        """Count the threads of a block."""
        of_warp = self.per_thread * (16 if bits16 else 8)
        return 32 * (self.tokens // of_warp) * (self.rows // WARP_ROWS)

    def time(self, m: int, n: int, bits16: bool, processors: int) -> float:
        """Estimate a product's time, in outputs of the largest shape that a processor works through."""
        blocks = -(-(-(-m // self.tokens) * -(-n // self.rows)) // processors)
        warps = min(blocks, self.resident) * self.threads(bits16) // 32
        return blocks * self.tokens * self.rows * self.cost * max(1.0, ENOUGH_WARPS / warps)


SIMT = (
    Shape(128, 256, 16, 1, 1.0, 32),
    Shape(128, 128, 16, 2, 1.03, 32),
    Shape(64, 128, 8, 4, 1.13, 32),
    Shape(32, 64, 4, 8, 1.21, 32),
)
TENSOR = (Shape(128, 128, 8, 2, 1.0, 48), Shape(64, 128, 4, 3, 1.25, 64), Shape(64, 64, 4, 6, 1.4, 64))
"""Largest first; 16 bits take 16 slots a step, and two steps a stage at least where they fit."""


@dataclass(frozen=True)
class Tiling:
    """What a kernel is compiled for, and what it takes.

    Args:
        shape: the block's tile.
        length: rows of a vector.
        slots: of each group in a stage.
        columns: of x that a stage may hold.
        stages: buffers; 1 copies and computes in turn.
        packed: whether only the columns that some group of the tile keeps are staged.
        itemsize: bytes of an element.
    """

    shape: Shape
    length: int
    slots: int
    columns: int
    stages: int
    packed: bool
    itemsize: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.shape.threads(self.itemsize == 2)

    @property
    def groups(self) -> int:
        """Groups of rows that a block works on."""
        return groups_of(self.shape, self.length)

    @property
    def pad(self) -> int:
        """Elements after each column in shared memory: four consecutive ones then lie in banks of their own."""
        return 16 if self.itemsize == 2 else 0

    @property
    def column_bytes(self) -> int:
        """Of a column of x in shared memory."""
        return (self.shape.tokens + self.pad) * self.itemsize

    @property
    def turns(self) -> int:
        """Columns of a stage that each thread copies a part of."""
        at_once = self.threads * 16 // (self.shape.tokens * self.itemsize)
        return -(-self.columns // at_once)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: as staging.cuh and values.cuh lay them out."""
        stage = self.columns * self.column_bytes
        if self.itemsize == 4:
            span = min(self.length, self.shape.rows)
            group = self.slots * span + (span if span < WARP_ROWS else 0)
            stage += self.groups * 4 * (group + self.slots)
        return self.stages * stage

    def intensity(self, pattern: VectorNM, k: int) -> float:
        """Operations for each byte that a block moves: equation 3 over all of K, y written once."""
        tokens, rows = self.shape.tokens, self.shape.rows
        total = -(-k // pattern.window) * pattern.keep
        columns = expected_columns(pattern, self) if self.packed else self.columns
        moved = total / self.slots * tokens * columns + total * rows + tokens * rows
        return 2 * tokens * rows * total / (self.itemsize * moved)


def groups_of(shape: Shape, length: int) -> int:
    """Count the groups of rows that a tile works on."""
    return max(1, shape.rows // length)


def used_share(pattern: VectorNM, shape: Shape) -> float:
    """Give the share of a window that some group of a tile keeps, where groups choose theirs independently."""
    return float(1 - (1 - pattern.density) ** groups_of(shape, pattern.length))


def expected_columns(pattern: VectorNM, tiling: Tiling) -> float:
    """Give the columns that a packed stage takes on average."""
    return min(tiling.columns, used_share(pattern, tiling.shape) * tiling.slots / pattern.density)


def tile(pattern: VectorNM, shape: Shape, itemsize: int, packed: bool, shared: int = SHARED_LIMIT) -> Tiling | None:
    """Give the longest stages of a tile, and up to three buffers of them, that ``shared`` bytes hold; None if none do.

    Args:
        shared: bytes that a block may have; where several are to be resident, they share them.
    """
    step = 16 if itemsize == 2 else 4
    # Each group of a warp's rows has slots of its own.
    most = max(step, shape.slots * min(pattern.length, WARP_ROWS) // WARP_ROWS) if itemsize == 2 else shape.slots
    stages = _packed_stages(pattern, shape) if packed else _whole_stages(pattern)
    found = [
        Tiling(shape, pattern.length, slots, columns, buffers, packed, itemsize)
        for slots, columns in stages
        for buffers in (3, 2)
        if slots % step == 0 and slots <= most
    ]
    fitting = [t for t in found if t.shared <= shared]
    budget = (shared + RESERVED) // shape.resident - RESERVED

    def faults(tiling: Tiling) -> tuple[bool, bool]:
        return packed and tiling.turns > MAX_TURNS[itemsize], tiling.shared > budget

    return min(fitting, key=faults, default=None)


def _whole_stages(pattern: VectorNM) -> list[tuple[int, int]]:
    """Give slots and columns of stages of whole windows, the longest first."""
    counts = range(WHOLE_COLUMNS // pattern.window, 0, -1)
    return [(count * pattern.keep, count * pattern.window) for count in counts]


def _packed_stages(pattern: VectorNM, shape: Shape) -> list[tuple[int, int]]:
    """Give slots, and columns at most, of packed stages, the longest first."""
    found = []
    for slots in (32, 16, 8, 4):
        aligned = slots % pattern.keep == 0 or pattern.keep % slots == 0
        windows = -(-slots // pattern.keep) if aligned else (slots - 1) // pattern.keep + 2
        found.append((slots, min(groups_of(shape, pattern.length) * slots, windows * pattern.window)))
    return found


def lengths_of(itemsize: int) -> tuple[int, ...]:
    """Give the lengths of vectors that tiles take: powers of two, 16 bytes or more."""
    return tuple(length for length in (4, 8, 16, 32, 64, 128) if length * itemsize >= 16)


@cache
def choose_tiling(
    pattern: VectorNM, m: int, n: int, itemsize: int, processors: int, shared: int = SHARED_LIMIT
) -> Tiling | None:
    """Choose the tiling whose estimated time is least; None if there is none for the pattern."""
    if pattern.length not in lengths_of(itemsize):
        return None
    bits16 = itemsize == 2
    for shape in sorted(TENSOR if bits16 else SIMT, key=lambda s: s.time(m, n, bits16, processors)):
        first = used_share(pattern, shape) < PACKING
        chosen = tile(pattern, shape, itemsize, first, shared) or tile(pattern, shape, itemsize, not first, shared)
        if chosen:
            return chosen
    return None
