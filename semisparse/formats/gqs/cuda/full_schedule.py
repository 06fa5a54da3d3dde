"""Schedules of `full.cu`: how it divides a matmul among SMs and warps. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

from semisparse.formats.gqs.cuda.schedule import ELEMENTS
from semisparse.formats.gqs.storage.disk import code_bits, group_size, quantises_x
from semisparse.formats.gqs.storage.masks import CHUNK_ROWS
from semisparse.formats.kernel import MAX_FUSED_TOKENS, Problem
from semisparse.quant.group import KINDS
from semisparse.runtime.device import RESERVED_SHARED, DeviceFacts
from semisparse.runtime.nvrtc import Defines

SIZES = (16, 32, 64, 128)
"""Columns per group that `full.cu` supports."""

K_TILE = 128
"""Columns of a k-tile."""

MAX_TOKENS = 64
"""Maximum M."""

FULL_TOKENS = 8
"""Maximum M for which `full` pays: 16 tokens take 60.5 us, 54.7 with `gemm_wgmma` (w4, groups of 128, 28672 x 8192)."""

TILES_M = (8, 16, 32, 64)
"""Tokens per CTA tile."""

MAX_CODE_TOKENS = {64: 8, 128: 16}
"""Maximum tile_m for which codes are multiplied as they are, by columns per group. A larger tile spills registers."""

MAX_WHOLE_TOKENS = 8
"""Maximum M for which all of x may be in shared memory."""

WHOLE_BITS = 450
"""Maximum of (rows per CTA) * (bits per code) for which `choose_full` puts all of x in shared memory.

With all of x there, 1 and 8 tokens take 10.1 and 11.2 us at 11008 x 4096 in 4 bits (rows * bits: 384), with x in stages
11.1 and 14.0; at 28672 x 8192 in 2 bits (448) 37.8 and 42.6, with stages 43.2 and 43.2. In 4 bits (896) stages are
faster there: 44.5 and 43.6, with all of x 46.7 and 52.3. Fused kernels always have all of x there.
"""

MIN_WHOLE_STAGES = 3
"""Minimum stages of the weight for which `choose_full` puts all of x in shared memory."""

MAX_WARPS = {32: 16, 64: 8}
"""Maximum warps per CTA, of which an SM then has one, by maximum tile_m. Registers limit them: with 16 warps a thread
has 128; a tile_m of 64 uses up to 197."""

WARPS_K = (1, 2, 4, 8)
"""Numbers of warps that share rows and split K."""

STAGES_AND_SPANS = ((3, 1), (3, 4), (2, 1))
"""What `_best` tries: (stages, iterations per barrier, which is ``x_span``)."""

STATIC_SHARED = 128
"""Bytes of static shared memory, rounded up: RMSNorm's sums per warp."""


@dataclass(frozen=True)
class FullSchedule:
    """How `full.cu` is compiled and launched.

    Args:
        tile_m: tokens per CTA tile, a multiple of 8.
        warps_n: warps of a CTA along N.
        warps_k: warps that share rows and split K among them.
        row_tiles: row tiles per warp, 16 rows each.
        stages: pipeline stages of the weight, 2 or more.
        ctas_per_sm: resident CTAs per SM: the second argument of ``__launch_bounds__``, which limits registers; `fits`
            checks that shared memory has room for them.
        codes: whether codes are multiplied as they are, else dequantised.
        x_tokens: maximum M if all of x is in shared memory; 0 if it is in stages.
        x_span: iterations per CTA-wide barrier, if x is in stages: a power of two.
        fusion: RMS_NORM, ADD_RESIDUAL and SILU_MUL of fusion.cuh, 0 or 1 each.
    """

    tile_m: int
    warps_n: int
    warps_k: int
    row_tiles: int
    stages: int
    ctas_per_sm: int
    codes: bool
    x_tokens: int = 0
    x_span: int = 1
    fusion: tuple[int, int, int] = (0, 0, 0)

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.warps_n * self.warps_k

    def defines(self, dtype: torch.dtype, bits: int, size: int) -> Defines:
        """Return the macros of `full.cu`.

        Args:
            dtype: dtype of x and w, float16 or bfloat16.
            bits: bits per code.
            size: columns per group.
        """
        return {
            "SCALAR": ELEMENTS[dtype],
            "BITS": bits,
            "GROUP_SIZE": size,
            "MULTIPLY_CODES": int(self.codes),
            "TILE_M": self.tile_m,
            "WARPS_N": self.warps_n,
            "WARPS_K": self.warps_k,
            "ROW_TILES": self.row_tiles,
            "STAGES": self.stages,
            "CTAS_PER_SM": self.ctas_per_sm,
            "X_TOKENS": self.x_tokens,
            "X_SPAN": self.x_span,
            **dict(zip(("RMS_NORM", "ADD_RESIDUAL", "SILU_MUL"), self.fusion, strict=True)),
        }

    def shared_bytes(self, k: int, bits: int, size: int) -> int:
        """Return the bytes of dynamic shared memory per CTA.

        They hold the stages of the weight, and x: its stages, or all of it and 256 bytes of zeros. After the main loop,
        accumulators reuse that memory; if they take more, return their bytes.
        """
        if self.x_tokens:
            x = (self.x_tokens * -(-k // K_TILE) + 1) * 2 * K_TILE
        else:
            x = (2 * self.x_span + self.stages - 2) * self.warps_k * self.tile_m * 2 * K_TILE
        weight = self.warps_n * self.warps_k * self.row_tiles * row_tile_bytes(bits, size)
        sums = (self.warps_k - 1) * self.warps_n * self.row_tiles * self.tile_m * CHUNK_ROWS * 4
        return max(self.stages * weight + x, sums)

    def fits(self, k: int, bits: int, size: int, facts: DeviceFacts) -> bool:
        """Return whether the shared memory of a CTA, and of all CTAs of an SM, is available."""
        shared = self.shared_bytes(k, bits, size) + STATIC_SHARED
        return shared <= facts.shared_per_cta and self.ctas_per_sm * (shared + RESERVED_SHARED) <= facts.shared_per_sm

    def row_ctas(self, n: int) -> int:
        """Return the number of CTAs along N."""
        return -(-n // (CHUNK_ROWS * self.row_tiles * self.warps_n))


def row_tile_bytes(bits: int, size: int) -> int:
    """Return the bytes of shared memory of a k-tile of a row tile: kRowTileBytes of full_tile.cuh."""
    groups = K_TILE // size
    return CHUNK_ROWS * (K_TILE * bits // 8 + 4 * max(1, groups // 2) + 4 * max(1, groups // 4))


def can_multiply_codes(bits: int, size: int) -> bool:
    """Return whether `full.cu` can multiply codes as they are.

    It can for groups of 128 in 2 to 4 bits, and of 64 in 2 or 4: a lane's 16 codes of 3 bits do not fill 32-bit words.
    """
    return bits < 8 and (size == 128 or (size == 64 and bits != 3))


def shape_refusal(problem: Problem) -> str | None:
    """Return why `full.cu` does not support ``problem`` on any GPU, or None if it does."""
    (n, k), size = problem.spec.shape, group_size(problem.pattern)
    if problem.m > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} tokens, got {problem.m}"
    if problem.dtype not in ELEMENTS or problem.weight_dtype != problem.dtype:
        return f"x and w are both float16 or both bfloat16, got {problem.dtype} and {problem.weight_dtype}"
    if str(problem.params["kind"]) not in KINDS:
        return f"takes {', '.join(KINDS)}, this weight is {problem.params['kind']}"
    bits = code_bits(problem.params, size) if size in SIZES else 0
    if not bits or (bits, size) == (3, 16):
        return f"takes groups of {', '.join(map(str, SIZES))} (3 bits: from 32 on), this weight has groups of {size}"
    if not problem.params.get("full"):
        return "takes weights of which no group is dropped; this weight drops some, or has some that are all zero"
    if n % CHUNK_ROWS or k % 8 or (size < K_TILE and -(-k // size) * size % K_TILE):
        return (
            f"takes N in multiples of {CHUNK_ROWS} and K in multiples of 8; groups of fewer than {K_TILE} columns must "
            f"fill whole tiles of {K_TILE} columns in each row; got N, K = {n}, {k} in groups of {size}"
        )
    return None


def pays(problem: Problem) -> bool:
    """Return whether `full` is assumed to be faster than `gemm_wgmma`, `gemm` and `unpack`."""
    return problem.m <= FULL_TOKENS


def choose_full(m: int, n: int, k: int, bits: int, size: int, facts: DeviceFacts) -> FullSchedule:
    """Choose the schedule of y[m, n] = x[m, k] @ w[n, k].T.

    Args:
        m: maximum tokens.
        n: output features.
        k: input features.
        bits: bits per code.
        size: columns per group.
        facts: the GPU.
    """
    tile_m = next((tokens for tokens in TILES_M if m <= tokens), TILES_M[-1])
    codes = tile_m <= MAX_CODE_TOKENS.get(size, 0) and can_multiply_codes(bits, size)
    staged = _best(FullSchedule(tile_m, 1, 1, 1, 2, 1, codes), n, k, bits, size, facts)
    if m > MAX_WHOLE_TOKENS:
        return staged
    whole = _best(replace(staged, x_tokens=m, x_span=1), n, k, bits, size, facts)
    few_rows = CHUNK_ROWS * whole.warps_n * whole.row_tiles * bits <= WHOLE_BITS
    return whole if few_rows and whole.stages >= MIN_WHOLE_STAGES and whole.fits(k, bits, size, facts) else staged


def choose_fused(problem: Problem, facts: DeviceFacts) -> FullSchedule | None:
    """Choose the schedule of a matmul with a prologue and an epilogue; None if `full.cu` cannot fuse them."""
    n, k, size = problem.n, problem.k, group_size(problem.pattern)
    bits, (norm, add, gated) = code_bits(problem.params, size), problem.fusion_defines.values()
    if quantises_x(problem.params) or problem.m > MAX_FUSED_TOKENS or (gated and n % (2 * CHUNK_ROWS)):
        return None
    fusion = (int(norm), int(add), int(gated))
    base = FullSchedule(8, 1, 1, 2 if gated else 1, 2, 1, can_multiply_codes(bits, size), problem.m, 1, fusion)
    return _best(base, n, k, bits, size, facts) if base.fits(k, bits, size, facts) else None


def _best(base: FullSchedule, n: int, k: int, bits: int, size: int, facts: DeviceFacts) -> FullSchedule:
    """Return ``base`` with the warps, row tiles, stages and span that keep the SMs busiest; ``base`` if nothing fits.

    The score is a rule of thumb, not fitted to times: the row tiles of the weight over those that all waves could
    compute, times the fourth root of a CTA's warps * row tiles over their maximum (at most 1), times 0.95 per wave
    after the first.
    """
    tiles, k_tiles = -(-n // CHUNK_ROWS), -(-k // K_TILE)
    most_warps = next(warps for tokens, warps in MAX_WARPS.items() if base.tile_m <= tokens)
    candidates = [
        replace(base, warps_n=warps_n, warps_k=warps_k, row_tiles=row_tiles, stages=stages, x_span=span)
        for row_tiles in sorted({base.row_tiles, 2})
        for warps_n, warps_k in product(range(1, most_warps + 1), WARPS_K)
        for stages, span in STAGES_AND_SPANS
        if warps_n * warps_k <= most_warps and (warps_k == 1 or warps_k <= k_tiles)
        if not base.x_tokens or span == 1
    ]

    def score(schedule: FullSchedule) -> tuple[float, int, int, int]:
        waves = -(-schedule.row_ctas(n) // facts.sms)
        even = tiles / (waves * facts.sms * schedule.warps_n * schedule.row_tiles)
        warps = schedule.warps_n * schedule.warps_k
        busy = min(1.0, warps * schedule.row_tiles / (2 * most_warps)) ** 0.25
        return even * busy * 0.95 ** (waves - 1), schedule.stages, -schedule.x_span, schedule.row_tiles

    fitting = [schedule for schedule in candidates if schedule.fits(k, bits, size, facts)]
    return max(fitting or [base], key=score)
