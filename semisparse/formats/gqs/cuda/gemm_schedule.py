"""Schedules of `gemm.cu`: how it divides a matmul among SMs and warps. Pure arithmetic.

Times below are from an H200 (results/h200/sweeps/gqs-gemm.csv).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

from semisparse.formats.gqs.cuda.schedule import ELEMENTS
from semisparse.formats.gqs.storage.disk import group_size
from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.formats.kernel import Problem
from semisparse.quant.group import KINDS
from semisparse.runtime.device import RESERVED_SHARED, DeviceFacts
from semisparse.runtime.nvrtc import Defines

SIZES = (8, 16, 32, 64, 128)
"""Columns per group that `gemm.cu` supports."""

TILES_M = (8, 16, 24, 32, 48, 64, 96)
"""Tokens per CTA tile. Any multiple of 8 compiles; 128 tokens with two row tiles per warp spill registers."""

SHAPES = ((1, 4), (2, 2), (4, 1), (4, 2), (8, 1))
"""(WARPS_N, WARPS_K): warps of a CTA along N, and warps that share rows and split K."""

WARPS_PER_SM = {32: 12, 96: 8}
"""Resident warps per SM by maximum TILE_M. Registers limit them: kernels use up to 168, and 255 per thread."""

K_TILES = {64: 64, 96: 32}
"""K_TILE by maximum TILE_M: columns of each of four groups that a warp multiplies per iteration. 64 columns take 3 to
30 % less time than 32, but spill registers with larger TILE_M."""

MAX_PREFETCH = {2: 4, 3: 4, 4: 4, 8: 2}
"""Maximum slices of the weight in flight to registers, by bits. For 4 bits and 8 tokens, 2 slices take 17 % longer than
4 (W4S50, 28672 x 8192); for 8 bits, 4 are 1 % faster than 2, and spill."""

MAX_SPLIT_K = 16

HEADER_BYTES = 2 * 32 * 16
"""Bytes of shared memory per warp and row tile for masks and starts: two windows of 32 chunks."""

DECODE_TOKENS = 16
"""Maximum M of `decode`, which is faster than `gemm`: 8 tokens take 51 us instead of 67 (W4S50, 28672 x 8192)."""

GEMM_TOKENS = 96
"""Maximum M of `gemm`. For 128 tokens `unpack` takes 277 us, `gemm` 299 (W4S50, 28672 x 8192)."""


@dataclass(frozen=True)
class GemmSchedule:
    """How `gemm.cu` is compiled and launched.

    Args:
        tile_m: tokens per CTA tile, a multiple of 8.
        warps_n: warps of a CTA along N.
        warps_k: warps that share rows and split K among them.
        row_tiles: row tiles per warp, 16 rows each.
        k_tile: columns of each of four groups that a warp multiplies per iteration, 32 or 64.
        prefetch: slices of the weight in flight to registers; divides the result of `slices`.
        stages: stages of x, 2 or more.
        ctas_per_sm: resident CTAs per SM, as the kernel's registers allow.
        split_k: CTAs per output tile, each with a part of K.
    """

    tile_m: int
    warps_n: int
    warps_k: int
    row_tiles: int
    k_tile: int
    prefetch: int
    stages: int
    ctas_per_sm: int
    split_k: int

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.warps_n * self.warps_k

    def defines(self, dtype: torch.dtype, bits: int, size: int, aligned_k: bool) -> Defines:
        """Return the macros of `gemm.cu`.

        Args:
            dtype: dtype of x and w, float16 or bfloat16.
            bits: bits per code.
            size: columns per group.
            aligned_k: whether K is a multiple of 8.
        """
        return {
            "SCALAR": ELEMENTS[dtype],
            "BITS": bits,
            "GROUP_SIZE": size,
            "TILE_M": self.tile_m,
            "WARPS_N": self.warps_n,
            "WARPS_K": self.warps_k,
            "ROW_TILES": self.row_tiles,
            "K_TILE": self.k_tile,
            "PREFETCH": self.prefetch,
            "STAGES": self.stages,
            "CTAS_PER_SM": self.ctas_per_sm,
            "ALIGNED_K": int(aligned_k),
        }

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory per CTA: x, whose memory partial accumulators reuse, and headers."""
        stages = self.stages * self.warps_k * self.tile_m * (8 * self.k_tile + 64)
        partials = (self.warps_k - 1) * self.warps_n * self.row_tiles * self.tile_m * CHUNK_ROWS * 4
        return max(stages, partials) + HEADER_BYTES * self.row_tiles * self.warps_n * self.warps_k

    def slices(self, bits: int, size: int) -> int:
        """Return the slices per k-tile, 2 or more: kSlices of gemm_tile.cuh."""
        return self.k_tile // _slice(self.k_tile, bits, size)

    def fits(self, facts: DeviceFacts) -> bool:
        """Return whether the shared memory of a CTA, and of all CTAs of an SM, is available."""
        whole = self.ctas_per_sm * (self.shared_bytes + RESERVED_SHARED)
        return self.shared_bytes <= facts.shared_per_cta and whole <= facts.shared_per_sm

    def row_ctas(self, n: int) -> int:
        """Return the number of CTAs along N."""
        return -(-n // (CHUNK_ROWS * self.row_tiles * self.warps_n))

    def k_tiles(self, k: int, size: int) -> int:
        """Return the number of k-tiles along K: several per chunk if groups are longer than a k-tile."""
        chunks = -(-k // (CHUNK_GROUPS * size))
        return chunks * (size // self.k_tile) if size > self.k_tile else -(-chunks * size // self.k_tile)


def _slice(k_tile: int, bits: int, size: int) -> int:
    """Return the columns of a group that a lane loads at once: kSlice of gemm_tile.cuh."""
    return min(size, k_tile // 2, 8 if bits == 8 else 32)


def choose_gemm(m: int, n: int, k: int, bits: int, size: int, facts: DeviceFacts) -> GemmSchedule:
    """Choose the schedule of y[m, n] = x[m, k] @ w[n, k].T: of those that fit, the one with the fewest `_cycles`.

    Args:
        m: maximum tokens.
        n: output features.
        k: input features.
        bits: bits per code.
        size: columns per group.
        facts: the GPU.
    """
    tile_m = min(TILES_M, key=lambda tokens: (-(-m // tokens) * tokens, -tokens))
    most_warps = next(warps for tokens, warps in WARPS_PER_SM.items() if tile_m <= tokens)
    k_tile = next(columns for tokens, columns in K_TILES.items() if tile_m <= tokens)
    prefetch = min(MAX_PREFETCH[bits], k_tile // _slice(k_tile, bits, size))
    candidates = (
        GemmSchedule(tile_m, warps_n, warps_k, row_tiles, k_tile, prefetch, stages, ctas, 1)
        for (warps_n, warps_k), row_tiles, stages in product(SHAPES, (2, 1), (3, 2))
        for ctas in range(1, most_warps // (warps_n * warps_k) + 1)
    )
    fitting = [schedule for schedule in candidates if schedule.fits(facts)]
    most_splits = min(MAX_SPLIT_K, fitting[0].k_tiles(k, size))
    split = [replace(schedule, split_k=split_k) for schedule in fitting for split_k in range(1, most_splits + 1)]
    return min(split, key=lambda schedule: _cycles(schedule, m, n, k, size, facts))


def _cycles(schedule: GemmSchedule, m: int, n: int, k: int, size: int, facts: DeviceFacts) -> float:
    """Estimate cycles, to compare schedules. The constants are assumed, not fitted to times.

    On a quarter of an SM, 16 columns of four groups of a row tile take 100 cycles to dequantise (they are 160 to 250
    instructions, README.md), and mma.sync 3.5 cycles per token (7 per m16n8k16). An SM loads 32 bytes of x per cycle. A
    wave of CTAs adds 4,000 cycles to start and end. With split-K a second kernel adds 3,000 and the time to write and
    read the partial sums.
    """
    warps = schedule.warps_n * schedule.warps_k
    m_tiles = -(-m // schedule.tile_m)
    busiest = -(-schedule.row_ctas(n) * m_tiles * schedule.split_k // facts.sms)
    waves = -(-busiest // schedule.ctas_per_sm)
    iterations = -(-schedule.k_tiles(k, size) // (schedule.split_k * schedule.warps_k))
    # With fewer than 8 warps per SM, latency is not hidden.
    resident = min(busiest, schedule.ctas_per_sm) * warps
    multiplying = warps / 4 * schedule.row_tiles * schedule.k_tile / 16 * (100 + 3.5 * schedule.tile_m)
    copying = schedule.warps_k * schedule.tile_m * 8 * schedule.k_tile / 32
    adding = 3000 + schedule.split_k * m * n * 8 / (32 * facts.sms) if schedule.split_k > 1 else 0.0
    return busiest * iterations * (multiplying * max(1.0, 8 / resident) + copying) + 4000 * waves + adding


def decode_pays(problem: Problem) -> bool:
    """Return whether `decode` is assumed to be faster than `gemm`."""
    return problem.m <= DECODE_TOKENS


def gemm_pays(problem: Problem) -> bool:
    """Return whether `gemm` is assumed to be faster than `unpack`."""
    return problem.m <= GEMM_TOKENS


def shape_refusal(problem: Problem) -> str | None:
    """Return why `gemm.cu` does not support ``problem`` on any GPU, or None if it does."""
    if problem.dtype not in ELEMENTS or problem.weight_dtype != problem.dtype:
        return f"x and w are both float16 or both bfloat16, got {problem.dtype} and {problem.weight_dtype}"
    if group_size(problem.pattern) not in SIZES:
        return f"takes groups of {', '.join(map(str, SIZES))}, this weight has groups of {group_size(problem.pattern)}"
    if str(problem.params["kind"]) not in KINDS:
        return f"takes {', '.join(KINDS)}, this weight is {problem.params['kind']}"
    return None
