"""Schedules of `decode.cu`: how it divides a matmul among SMs and warps. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from semisparse.formats.gqs.storage.disk import code_bits, quantises_x
from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.formats.kernel import ExpertsProblem, Problem
from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.nvrtc import Defines

ELEMENTS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""The C++ types of x, scale, bias and y."""

GROUP_SIZE = 16
"""Columns per group that `decode.cu` supports."""

CODE_TOKENS = (1, 2)
"""Values of TOKENS, the maximum M, for kernels that multiply 4-bit codes."""

DEQUANTISED_TOKENS = (8, 16)
"""Values of TOKENS for kernels that dequantise first."""

MAX_TOKENS = DEQUANTISED_TOKENS[-1]

K_TILE_CHUNKS = 4
"""Chunks that a warp multiplies in one iteration of its main loop."""

K_TILE = K_TILE_CHUNKS * CHUNK_GROUPS * GROUP_SIZE
"""Columns per k-tile. In shared memory x is padded to a multiple of it."""

STAGE_GROUPS, STAGES = 64, 8
"""Groups per stage, and stages of a warp's ring."""

HEADER_BYTES = 2 * 32 * 16
"""Bytes of shared memory per warp for masks and starts: two windows of 32 chunks."""

# What follows was measured on an H200 (docs/kernels/gqs.md).

WARPS = 8
"""Warps per CTA; some schedules have twice or half as many."""

WARPS_PER_SM = 16
"""Resident warps per SM, which limits registers per thread. More warps, with fewer chunks each, were slower."""

TILES_PER_SM = 2
"""Maximum row tiles per SM for which each row tile has a CTA of its own."""

PREFETCH_GROUPS = 256
"""Groups that each warp prefetches to L2 before ``griddepcontrol.wait``. With 512, large weights are slower."""


@dataclass(frozen=True)
class Schedule:
    """How `decode.cu` is compiled and launched.

    Args:
        dtype: dtype of x and y, float16 or bfloat16.
        bits: bits per code, 4 or 8.
        tokens: maximum tokens.
        int8_x: whether the kernel quantises x to int8.
        aligned_k: whether K is a multiple of `K_TILE`, so that no bounds are checked along K.
        stream_k: whether a CTA has several row tiles (Stream-K among its warps), or one.
        warps: warps per CTA.
        fusion: fusion.cuh's RMS_NORM, ADD_RESIDUAL and SILU_MUL. The last needs ``stream_k``.
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
        """Resident CTAs per SM, as the kernel's registers allow."""
        return max(1, WARPS_PER_SM // self.warps)

    @property
    def defines(self) -> Defines:
        """Macros of `decode.cu`."""
        # These kernels would need over 128 registers per thread with four chunks per k-tile.
        many = self.tokens == MAX_TOKENS and (self.bits == 8 or not self.aligned_k)
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
        """Return the bytes of dynamic shared memory per CTA: a stream per warp (stream.cuh) and, where codes are
        multiplied, zeros, x and the sums of x over groups (block_diagonal.cuh)."""
        stream = STAGE_GROUPS * STAGES * (GROUP_SIZE * self.bits // 8 + 3) + HEADER_BYTES
        if self.tokens not in CODE_TOKENS:
            return self.warps * stream
        columns = self.tokens * -(-k // K_TILE) * K_TILE
        return self.warps * stream + (K_TILE + columns) * (1 if self.int8_x else 2) + columns // GROUP_SIZE * 4

    def gated_bytes(self, n: int, facts: DeviceFacts) -> int:
        """Return the bytes, after `shared_bytes`, of both halves' accumulators for SILU_MUL (schedule.cuh)."""
        tiles = -(-n // CHUNK_ROWS) // 2
        return self.whole_bytes(tiles // self.ctas(tiles, facts) + 1) if self.fusion[2] else 0

    def whole_bytes(self, tiles: int) -> int:
        """Return the bytes of both halves' accumulators if a CTA has ``tiles`` row tiles of each half."""
        return 2 * tiles * CHUNK_ROWS * self.tokens * 4

    def fits(self, n: int, k: int, facts: DeviceFacts) -> bool:
        """Return whether a CTA's shared memory is available.

        Static shared memory holds partial accumulators and, for int8 or RMSNorm, a value per warp and token.
        """
        cells = (2 if self.stream_k else 1) * CHUNK_ROWS * self.tokens
        static = 4 * self.warps * (cells + (self.tokens if self.int8_x or self.fusion[0] else 0))
        return self.shared_bytes(k) + self.gated_bytes(n, facts) + static <= facts.shared_per_cta

    def ctas(self, row_tiles: int, facts: DeviceFacts) -> int:
        """Return the number of CTAs."""
        return min(self.ctas_per_sm * facts.sms, row_tiles) if self.stream_k else row_tiles

    def prefetched_groups(self, kept: int, ctas: int) -> int:
        """Return how many groups each warp prefetches, a multiple of 16: at most the average per warp, rounded up."""
        return min(PREFETCH_GROUPS, -(-kept // (16 * ctas * self.warps)) * 16)


def choose(m: int, n: int, k: int, dtype: torch.dtype, bits: int, int8_x: bool, facts: DeviceFacts) -> Schedule:
    """Choose the schedule of y[m, n] = x[m, k] @ w[n, k].T.

    Args:
        m: maximum tokens, up to `MAX_TOKENS`.
        n: output features.
        k: input features.
        dtype: dtype of x, w and y.
        bits: bits per code.
        int8_x: whether x is to be quantised. For more than two tokens quantise_x.cu does it, not `decode.cu`.
        facts: the GPU.
    """
    few_tiles = -(-n // CHUNK_ROWS) <= TILES_PER_SM * facts.sms
    schedule = Schedule(dtype, bits, 0, int8_x, k % K_TILE == 0, not few_tiles, WARPS)
    if bits == 4 and m <= CODE_TOKENS[-1]:
        schedule_of_codes = replace(schedule, tokens=m)
        for warps in (WARPS, WARPS // 2) if few_tiles else (2 * WARPS, WARPS):
            if replace(schedule_of_codes, warps=warps).fits(n, k, facts):
                return replace(schedule_of_codes, warps=warps)
    tokens = next(tokens for tokens in DEQUANTISED_TOKENS if m <= tokens)
    warps = WARPS if few_tiles else WARPS // 2
    return replace(schedule, tokens=tokens, int8_x=False, stream_k=False, warps=warps)


def choose_fused(problem: Problem, facts: DeviceFacts) -> Schedule | None:
    """Choose the schedule of a matmul with a prologue and an epilogue; None if `decode.cu` cannot fuse them.

    Only kernels that multiply codes fuse them, because they keep x in shared memory, and not those that quantise x.
    """
    bits, int8_x = code_bits(problem.params, GROUP_SIZE), quantises_x(problem.params)
    schedule = choose(problem.m, problem.n, problem.k, problem.dtype, bits, int8_x, facts)
    norm, add, gated = (bool(value) for value in problem.fusion_defines.values())
    if int8_x or schedule.tokens not in CODE_TOKENS or (gated and problem.n % (2 * CHUNK_ROWS)):
        return None
    schedule = replace(schedule, fusion=(int(norm), int(add), int(gated)), stream_k=schedule.stream_k or gated)
    return schedule if schedule.fits(problem.n, problem.k, facts) else None


EXPERT_PAIRS = 16
"""Maximum pairs of a token and an expert for which each pair has CTAs of its own, not each expert."""

EXPERT_WARPS = {1: 16, 2: 8, 8: 4}
"""By TOKENS: warps per CTA for a stack of experts (H200, results/h200/sweeps/experts.csv)."""

EXPERT_WAVES = {1: 1, 2: 2, 8: 2}
"""By TOKENS: waves of CTAs. Two where a CTA has an expert's pairs (2 and 8): some experts have more than others."""


def choose_experts(problem: ExpertsProblem, facts: DeviceFacts) -> tuple[Schedule, int]:
    """Choose the schedule for a stack of experts in 4 bits, and the CTAs per expert, or per pair if ``tokens`` is 1."""
    gated, k, pairs = problem.epilogue == "silu_mul", problem.k, problem.pairs
    few = CODE_TOKENS[-1] if pairs <= problem.experts else DEQUANTISED_TOKENS[0]  # one pair per expert on average
    tokens = 1 if pairs <= EXPERT_PAIRS else few
    slots = pairs if tokens == 1 else min(pairs, problem.experts)
    tiles = problem.n // CHUNK_ROWS // (2 if gated else 1)
    for warps in (EXPERT_WARPS[tokens], 8, 4):
        schedule = Schedule(problem.dtype, 4, tokens, False, k % K_TILE == 0, True, warps, (0, 0, int(gated)))
        ctas = max(1, min(tiles, EXPERT_WAVES[tokens] * schedule.ctas_per_sm * facts.sms // slots))
        static = 4 * warps * 2 * CHUNK_ROWS * tokens + 8 * tokens + 4
        if schedule.shared_bytes(k) + schedule.whole_bytes(tiles // ctas + 1) + static <= facts.shared_per_cta:
            break
    return schedule, ctas
