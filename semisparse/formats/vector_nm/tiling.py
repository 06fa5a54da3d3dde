"""How a product for many tokens is cut: tiles of y, stages along K, and whether x's columns are packed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from semisparse.patterns import VectorNM

MODERATE = 0.3
"""Density from which on some group keeps most columns of a window, so that whole windows are staged (section III-A)."""

WHOLE_COLUMNS = 128
"""The widest stage of whole windows."""

SHARED_LIMIT = 99 << 10
"""Bytes a block: what an Ada card gives to one, and half of what a Hopper processor has."""

WARP_ROWS = 32

MAX_TURNS = 8
"""Columns that a thread of a packed stage copies: it holds their numbers in registers, and spills from 16 on."""


@dataclass(frozen=True)
class Shape:
    """A block's tile of y.

    Args:
        tokens: of a block.
        rows: output features of a block.
        per_thread: tokens of a thread (float32), or mma tiles of 16 tokens of a warp (16 bits).
    """

    tokens: int
    rows: int
    per_thread: int

    def threads(self, bits16: bool) -> int:
        """Count the threads of a block."""
        of_warp = self.per_thread * (16 if bits16 else 8)
        return 32 * (self.tokens // of_warp) * (self.rows // WARP_ROWS)


SIMT = (Shape(128, 128, 8), Shape(64, 64, 8), Shape(32, 32, 4))
TENSOR = (Shape(128, 256, 8), Shape(128, 128, 8), Shape(64, 64, 4))
"""Largest first. Nothing of this is measured yet: the shapes are those of the paper's table I, doubled for 16 bits."""


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
        return max(1, self.shape.rows // self.length)

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


def expected_columns(pattern: VectorNM, tiling: Tiling) -> float:
    """Give the columns that a stage takes on average where groups choose theirs independently."""
    used = 1 - (1 - pattern.density) ** tiling.groups
    return min(tiling.columns, used * tiling.slots / pattern.density)


def tilings(pattern: VectorNM, shape: Shape, itemsize: int, packed: bool) -> list[Tiling]:
    """List the ways to stage a tile that shared memory holds, the longest stages and most buffers first."""
    step = 16 if itemsize == 2 else 4
    found = []
    for slots, columns in _packed_stages(pattern, shape, step) if packed else _whole_stages(pattern, step):
        of_stage = [Tiling(shape, pattern.length, slots, columns, stages, packed, itemsize) for stages in (3, 2)]
        found += [t for t in of_stage if t.shared <= SHARED_LIMIT and (t.turns <= MAX_TURNS or not packed)]
    return found


def _whole_stages(pattern: VectorNM, step: int) -> list[tuple[int, int]]:
    """Give slots and columns of as few windows as make whole steps of slots, and of twice as many."""
    windows = next(count for count in range(1, step + 1) if count * pattern.keep % step == 0)
    both = [(count * pattern.keep, count * pattern.window) for count in (windows, 2 * windows)]
    fitting = [(slots, columns) for slots, columns in both if columns <= WHOLE_COLUMNS]
    # From 16 slots on a stage is long enough to hide the next one's copies.
    return sorted(fitting, key=lambda stage: stage[0] < 16)


def _packed_stages(pattern: VectorNM, shape: Shape, step: int) -> list[tuple[int, int]]:
    groups = max(1, shape.rows // pattern.length)
    found = []
    for slots in (32, 16, 8, 4):
        if slots % step:
            continue
        aligned = slots % pattern.keep == 0 or pattern.keep % slots == 0
        windows = -(-slots // pattern.keep) if aligned else (slots - 1) // pattern.keep + 2
        found.append((slots, min(groups * slots, windows * pattern.window)))
    return found


def lengths_of(itemsize: int) -> tuple[int, ...]:
    """Give the lengths of vectors that tiles take: powers of two, 16 bytes or more."""
    return tuple(length for length in (4, 8, 16, 32, 64, 128) if length * itemsize >= 16)


@cache
def choose_tiling(pattern: VectorNM, m: int, n: int, itemsize: int, processors: int) -> Tiling | None:
    """Choose a tiling: the largest tile that gives every processor a block, else the smallest; None if none fits."""
    if pattern.length not in lengths_of(itemsize):
        return None
    fitting = []
    for shape in TENSOR if itemsize == 2 else SIMT:
        whole = tilings(pattern, shape, itemsize, packed=False)
        packed = tilings(pattern, shape, itemsize, packed=True)
        ways = whole + packed if pattern.density >= MODERATE else packed + whole
        fitting += ways[:1]
    for tiling in fitting:
        if -(-m // tiling.shape.tokens) * -(-n // tiling.shape.rows) >= processors:
            return tiling
    return fitting[-1] if fitting else None
