"""How `decode.cu` divides a problem over SMs and warps: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from semisparse.formats.gqs.storage.disk import code_bits, quantises_x
from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.formats.kernel import Problem
from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.nvrtc import Defines

ELEMENTS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""Types of x, scale, bias and y."""

GROUP_SIZE = 16
"""Columns of a group that `decode.cu` is written for."""

CODE_TOKENS = (1, 2)
"""Tokens that a build takes which multiplies 4-bit codes."""

DEQUANTISED_TOKENS = (8, 16)
"""Tokens that a build takes which dequantises first."""

MAX_TOKENS = DEQUANTISED_TOKENS[-1]

K_TILE_CHUNKS = 4
"""Chunks that a warp multiplies in one iteration of its main loop."""

K_TILE = K_TILE_CHUNKS * CHUNK_GROUPS * GROUP_SIZE
"""Columns of x are padded to multiples of it in shared memory."""

STAGE_GROUPS, STAGES = 64, 8
"""Groups that a warp copies at once, and stages of its ring."""

HEADER_BYTES = 2 * 32 * 16
"""Of the masks and starts of two windows of 32 chunks, per warp."""

# What follows was measured on an H200 (README.md, "Designs rejected").

WARPS = 8
"""Per CTA; twice or half as many in some schedules."""

WARPS_PER_SM = 16
"""Registers are allotted for so many. More warps, with fewer chunks each, were slower."""

TILES_PER_SM = 2
"""Row tiles per SM up to which each has a CTA of its own."""

PREFETCH_GROUPS = 256
"""Groups that each warp prefetches to L2 before ``griddepcontrol.wait``. With 512 large weights are slower."""


@dataclass(frozen=True)
class Schedule:
    """One build of `decode.cu`, and its launch.

    Args:
        dtype: of x and y, float16 or bfloat16.
        bits: of a code, 4 or 8.
        tokens: that the build computes at most.
        int8_x: whether it quantises x to int8.
        aligned_k: whether K is a multiple of `K_TILE`, so that no bounds are checked along K.
        stream_k: whether CTAs have several row tiles (Stream-K inside of a CTA), or one each.
        warps: per CTA.
        fusion: fusion.cuh's RMS_NORM, ADD_RESIDUAL and SILU_MUL. The last needs Stream-K.
    """

    dtype: torch.dtype
    bits: int
    tokens: int
    int8_x: bool
    aligned_k: bool
    stream_k: bool
    warps: int
    fusion: tuple[int, int, int] = (0, 0, 0)

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.warps

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that share an SM's registers."""
        return max(1, WARPS_PER_SM // self.warps)

    @property
    def defines(self) -> Defines:
        """Macros of `decode.cu`."""
        many = self.tokens == MAX_TOKENS and (self.bits == 8 or not self.aligned_k)  # would need over 128 registers
        return {
            "SCALAR": ELEMENTS[self.dtype],
            "BITS": self.bits,
            "TOKENS": self.tokens,
            "INT8_X": int(self.int8_x),
            "WARPS": self.warps,
            "CHUNKS_PER_K_TILE": K_TILE_CHUNKS // 2 if many else K_TILE_CHUNKS,
            "CTAS_PER_SM": self.ctas_per_sm,
            "STAGE_GROUPS": STAGE_GROUPS,
            "STAGES": STAGES,
            "ALIGNED_K": int(self.aligned_k),
            "STREAM_K": int(self.stream_k),
            **dict(zip(("RMS_NORM", "ADD_RESIDUAL", "SILU_MUL"), self.fusion, strict=True)),
        }

    def shared_bytes(self, k: int) -> int:
        """Return a CTA's dynamic shared memory: a stream per warp and, where codes are multiplied, x."""
        stream = STAGE_GROUPS * STAGES * (GROUP_SIZE * self.bits // 8 + 3) + HEADER_BYTES
        if self.tokens not in CODE_TOKENS:
            return self.warps * stream
        columns = self.tokens * -(-k // K_TILE) * K_TILE
        return self.warps * stream + (K_TILE + columns) * (1 if self.int8_x else 2) + columns // GROUP_SIZE * 4

    def fits(self, k: int, facts: DeviceFacts) -> bool:
        """Say whether a CTA may have its dynamic shared memory beside partial accumulators and, in int8, maxima."""
        cells = (2 if self.stream_k else 1) * CHUNK_ROWS * self.tokens
        static = 4 * self.warps * (cells + (self.tokens if self.int8_x else 0))
        return self.shared_bytes(k) + static <= facts.shared_per_cta

    def ctas(self, row_tiles: int, facts: DeviceFacts) -> int:
        """Return the grid's size."""
        return min(self.ctas_per_sm * facts.sms, row_tiles) if self.stream_k else row_tiles

    def prefetched_groups(self, kept: int, ctas: int) -> int:
        """Return how many groups each warp prefetches, a multiple of 16: not many more than it has on average."""
        return min(PREFETCH_GROUPS, -(-kept // (16 * ctas * self.warps)) * 16)


def choose(m: int, n: int, k: int, dtype: torch.dtype, bits: int, int8_x: bool, facts: DeviceFacts) -> Schedule:
    """Choose the schedule of y[m, n] = x[m, k] @ w[n, k].T.

    Args:
        m: the most tokens, up to `MAX_TOKENS`.
        n: output features.
        k: input features.
        dtype: of x, w and y.
        bits: of a code.
        int8_x: whether x is to be quantised; a schedule for more than two tokens leaves that to another kernel.
        facts: of the GPU.
    """
    few_tiles = -(-n // CHUNK_ROWS) <= TILES_PER_SM * facts.sms
    schedule = Schedule(dtype, bits, 0, int8_x, k % K_TILE == 0, not few_tiles, WARPS)
    if bits == 4 and m <= CODE_TOKENS[-1]:
        by_codes = replace(schedule, tokens=m)
        for warps in (WARPS, WARPS // 2) if few_tiles else (2 * WARPS, WARPS):
            if replace(by_codes, warps=warps).fits(k, facts):
                return replace(by_codes, warps=warps)
    tokens = next(tokens for tokens in DEQUANTISED_TOKENS if m <= tokens)
    warps = WARPS if few_tiles else WARPS // 2
    return replace(schedule, tokens=tokens, int8_x=False, stream_k=False, warps=warps)


def choose_fused(problem: Problem, facts: DeviceFacts) -> Schedule | None:
    """Choose the schedule of a product with a prologue and an epilogue, or None where it has none.

    Only a build that multiplies codes has them, as it keeps x in shared memory; one that quantises x has not.
    """
    bits, int8_x = code_bits(problem.params, GROUP_SIZE), quantises_x(problem.params)
    schedule = choose(problem.m, problem.n, problem.k, problem.dtype, bits, int8_x, facts)
    norm, add, gated = (bool(value) for value in problem.fusion_defines.values())
    if int8_x or schedule.tokens not in CODE_TOKENS or (gated and problem.n % (2 * CHUNK_ROWS)):
        return None
    schedule = replace(schedule, fusion=(int(norm), int(add), int(gated)), stream_k=schedule.stream_k or gated)
    return schedule if schedule.fits(problem.k, facts) else None
