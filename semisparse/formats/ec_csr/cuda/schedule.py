"""How the kernels that read row panels are compiled and launched: arithmetic on a problem and the sizes of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from semisparse.formats.ec_csr.storage.deltas import LANES, delta_bits_of, index_bits_for
from semisparse.formats.ec_csr.storage.gpu import span_limit_of
from semisparse.formats.ec_csr.storage.panels import (
    LOAD_BYTES,
    SEGMENTS,
    is_paired,
    lane_columns_of,
    panel_rows_of,
    vector_of,
)
from semisparse.formats.kernel import Problem
from semisparse.runtime.device import RESERVED_SHARED, DeviceFacts
from semisparse.runtime.nvrtc import Defines

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}

UNSIGNED_TYPES = {2: "unsigned short", 4: "unsigned int"}
"""CUDA's unsigned integers, by their bytes."""

DECODE_TOKENS = (1, 2, 4, 8)
"""Tokens per pass of `decode`."""

SHARED_STAGE_TOKENS = 2
"""Maximum tokens per pass with which the stages of `decode` are in shared memory; for more they are in registers.
Measured at 4096 x 4096, in shared memory (registers): 2 tokens 8.0 us (8.7), 4 tokens 10.2 (9.5), 8 tokens 16.2
(14.4)."""

REGISTER_STAGES = 2

SHARED_STAGES = {2: 4, 3: 2}
"""Stages in shared memory by the CTAs per SM that they leave room for."""

MMA_TOKENS = (8, 16)
"""Tokens per pass of `decode_mma`."""

MMA_WARPS = 16

MMA_LANES = ((8, 2), (4, 2), (8, 1), (4, 1), (2, 2), (2, 1))
"""Lanes per CTA and CTAs per SM of `decode_mma`, the fastest first."""

STRIP = 64
"""Bytes of a row that a warp of `decode_mma` multiplies at a time."""

UNPACK_WARPS = 16

UNPACK_CTAS = 2
"""CTAs per SM of `unpack`."""

UNPACK_FLAG_BYTES = LANES * 4
"""Bytes of the flags that mark which segments reach into a tile; there are as many flags as lanes."""

UNPACK_PARTS = 4
"""Parts of a segment, a warp for each. Measured at 28672 x 8192: 270 us; with 2 parts 304, with 8 parts 310."""

UNPACK_TILE_BYTES = 112 << 10
"""Maximum bytes of a CTA's tile of the dense weight. Measured at 28672 x 8192: 270 us; with 96 KB 289, with 64 KB 355,
with 32 KB 553."""


@dataclass(frozen=True)
class Lists:
    """The lists that a kernel reads, as lists.cuh is compiled for them.

    Args:
        dtype: of the weight.
        delta_bits: 4 or 8.
        k: columns of the weight.
        panel_rows: rows per panel.
        paired: whether panels have rows of both halves of the weight.
    """

    dtype: torch.dtype
    delta_bits: int
    k: int
    panel_rows: int
    paired: bool

    @property
    def lane_columns(self) -> int:
        """Columns per lane."""
        return lane_columns_of(self.k)

    def _defines(self, scalar: str, **own: int) -> Defines:
        index = UNSIGNED_TYPES[index_bits_for(self.k) // 8]
        panels = {"PANEL_ROWS": self.panel_rows, "PAIRED": int(self.paired)}
        return {"SCALAR": scalar, "DELTA_BITS": self.delta_bits, "INDEX": index, **panels, **own}


def _lists_of(problem: Problem) -> tuple[torch.dtype, int, int, int, bool]:
    params = problem.params
    return problem.weight_dtype, delta_bits_of(params), problem.k, panel_rows_of(params), is_paired(params)


@dataclass(frozen=True)
class DecodeSchedule(Lists):
    """How decode.cu is compiled.

    Args:
        tokens: per pass.
        ctas: CTAs per SM that registers and shared memory leave room for, if stages are in shared memory.
        normed: whether x is normalised.
    """

    tokens: int
    ctas: int = 2
    normed: bool = False

    @property
    def stages_in_shared(self) -> bool:
        """Whether loads in flight are in shared memory, not in registers."""
        return self.tokens <= SHARED_STAGE_TOKENS

    @property
    def stages(self) -> int:
        """Loads in flight per lane."""
        return SHARED_STAGES[self.ctas] if self.stages_in_shared else REGISTER_STAGES

    @property
    def defines(self) -> Defines:
        """The macros."""
        ctas = self.ctas if self.stages_in_shared else 1
        return self._defines(SCALARS[self.dtype], TOKENS=self.tokens, STAGES=self.stages, CTAS_PER_SM=ctas)

    def shared_bytes(self, span: int) -> int:
        """Return the dynamic shared memory: x, and each lane's partial sums, first rows and loads in flight.

        Args:
            span: upper bound of the rows that one segment of a list covers.
        """
        feature = 4 if self.tokens == 1 else self.tokens * self.dtype.itemsize  # one token is widened to float32
        load = LOAD_BYTES + max(4, vector_of(self.dtype) * self.delta_bits // 8)
        segment = span * self.tokens * 4 + 4 + (self.stages * load if self.stages_in_shared else 0)
        squares = SEGMENTS * self.tokens * 4 if self.normed else 0
        return LANES * (self.lane_columns * feature + SEGMENTS * segment) + squares


def decode_schedule(problem: Problem, facts: DeviceFacts) -> DecodeSchedule:
    """Choose tokens per pass and CTAs per SM. If not even one token fits, the result needs more than the GPU has.

    An SM has two CTAs, or three if the last wave is fuller then. Measured: 11008 x 4096 has three CTAs for each SM and
    takes 14.0 us in one wave, 15.2 in two; 28672 x 8192 has four for each SM and takes 55.7 us in two waves of two,
    60.6 in waves of three and one. With 8-bit deltas, two tokens, and norm and SiLU fused, three would spill registers
    before Hopper.
    """
    span, normed = span_limit_of(problem.params), problem.prologue == "rms_norm"
    schedules = [DecodeSchedule(*_lists_of(problem), tokens, normed=normed) for tokens in DECODE_TOKENS]
    fitting = [s for s in schedules if s.shared_bytes(span) <= facts.shared_per_cta] or schedules[:1]
    two = next((s for s in fitting if s.tokens >= problem.m), fitting[-1])
    ctas = -(-problem.n // two.panel_rows) * -(-problem.m // two.tokens)
    per_sm = -(-ctas // facts.sms)
    spills = normed and problem.epilogue == "silu_mul" and two.tokens == 2 and two.delta_bits == 8
    if not two.stages_in_shared or two.dtype == torch.float32 or spills or -per_sm % 3 >= -per_sm % 2:
        return two
    three = replace(two, ctas=3)
    return three if 3 * (three.shared_bytes(span) + RESERVED_SHARED) <= facts.shared_per_sm else two


@dataclass(frozen=True)
class MmaSchedule(Lists):
    """How decode_mma.cu is compiled.

    Args:
        tokens: per pass.
        lanes: per CTA. Each split of K has so many.
        ctas: CTAs per SM that registers and shared memory leave room for.
    """

    tokens: int
    lanes: int
    ctas: int

    @property
    def defines(self) -> Defines:
        """The macros."""
        own = {"TOKENS": self.tokens, "CTA_LANES": self.lanes, "WARPS": MMA_WARPS, "CTAS_PER_SM": self.ctas}
        return self._defines(SCALARS[self.dtype], **own)

    @property
    def splits(self) -> int:
        """Splits of split-K."""
        return LANES // self.lanes

    @property
    def stride(self) -> int:
        """Bytes from a row of a tile to the next, an odd number of strips."""
        return STRIP * (-(-self.lane_columns * self.lanes * 2 // STRIP) | 1)

    @property
    def shared_bytes(self) -> int:
        """The dynamic shared memory: the tiles of w and x, then the warps' accumulators in their place."""
        rows = -(-self.panel_rows // 16) * 16
        return max((rows + self.tokens) * self.stride, MMA_WARPS * self.tokens * (rows + 4) * 4)


def mma_schedule(problem: Problem, facts: DeviceFacts) -> MmaSchedule:
    """Choose lanes per CTA and CTAs per SM. If no tile fits, the result needs more shared memory than the GPU has."""
    lists, tokens = _lists_of(problem), next(tokens for tokens in MMA_TOKENS if tokens >= problem.m)
    # Panels of more than 32 rows take too many registers for two CTAs.
    most = 2 if panel_rows_of(problem.params) <= 32 else 1
    choices = [MmaSchedule(*lists, tokens, lanes, min(ctas, most)) for lanes, ctas in MMA_LANES]
    fitting = (s for s in choices if s.ctas * (s.shared_bytes + RESERVED_SHARED) <= facts.shared_per_sm)
    return next(fitting, choices[-1])


@dataclass(frozen=True)
class UnpackSchedule(Lists):
    """How unpack.cu is compiled and launched.

    Args:
        tile_bytes: maximum bytes of a CTA's tile of the dense weight.
    """

    tile_bytes: int = UNPACK_TILE_BYTES

    @property
    def defines(self) -> Defines:
        """The macros."""
        own = {"PARTS": UNPACK_PARTS, "WARPS": UNPACK_WARPS, "CTAS_PER_SM": UNPACK_CTAS}
        return self._defines(UNSIGNED_TYPES[self.dtype.itemsize], **own)

    @property
    def tiles(self) -> int:
        """Tiles per panel."""
        return -(-self.panel_rows * self.lane_columns * LANES * self.dtype.itemsize // self.tile_bytes)

    @property
    def tile_positions(self) -> int:
        """Positions per tile, each 32 columns of a row."""
        return -(-self.panel_rows * self.lane_columns // self.tiles)

    @property
    def shared_bytes(self) -> int:
        """The dynamic shared memory: a tile, and the segments' flags."""
        return self.tile_positions * LANES * self.dtype.itemsize + UNPACK_FLAG_BYTES


def unpack_schedule(problem: Problem, facts: DeviceFacts) -> UnpackSchedule:
    """Choose the largest tile of which `UNPACK_CTAS` fit an SM, up to `UNPACK_TILE_BYTES`."""
    room = facts.shared_per_sm // UNPACK_CTAS - RESERVED_SHARED - UNPACK_FLAG_BYTES
    return UnpackSchedule(*_lists_of(problem), min(UNPACK_TILE_BYTES, room))
