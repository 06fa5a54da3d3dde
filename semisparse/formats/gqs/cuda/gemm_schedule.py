"""How `gemm.cu` divides a problem over SMs and warps: arithmetic only. Not measured yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from semisparse.formats.gqs.cuda.schedule import ELEMENTS
from semisparse.formats.gqs.cuda.schedule import MAX_TOKENS as DECODE_MAX_TOKENS
from semisparse.formats.gqs.storage.disk import group_size
from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.formats.kernel import Problem
from semisparse.quant.group import KINDS
from semisparse.runtime.device import RESERVED_SHARED, DeviceFacts
from semisparse.runtime.nvrtc import Defines

SIZES = (8, 16, 32, 64, 128)
"""Columns of a group that `gemm.cu` is written for."""

TILES_M = (8, 16, 24, 32, 48, 64, 96, 128)
"""Tokens of a CTA tile that are chosen; any multiple of 8 compiles."""

WARPS = 8
"""Per CTA."""

MAX_SPLIT_K = 16

FEWEST_TILES = 4
"""k-tiles that a warp multiplies at least, where K is split."""

HEADER_BYTES = 2 * 32 * 16
"""Of the masks and starts of two windows of 32 chunks, per warp and row tile."""

PREFETCH_GROUPS = 256
"""Groups that each warp prefetches to L2 before ``griddepcontrol.wait``, and is ahead of itself later."""

DECODE_PAYS_TOKENS = 2
"""Up to so many tokens `decode` multiplies codes as they are."""

GEMM_PAYS_TOKENS = 256
"""Beyond, unpacking the weight once and cuBLAS are taken to be faster."""


@dataclass(frozen=True)
class GemmSchedule:
    """One build of `gemm.cu`, and its launch.

    Args:
        tile_m: tokens of a CTA tile, a multiple of 8.
        warps_n: warps of a CTA along N.
        warps_k: warps that share rows and split K among them.
        row_tiles: row tiles per warp, 16 rows each.
        k_tile: columns of each of four groups that a warp multiplies per iteration, 32 or 64.
        prefetch: slices of the weight in flight to registers; divides the slices of a k-tile (at least 2).
        stages: of x, 2 or more.
        ctas_per_sm: CTAs that share an SM's registers.
        split_k: CTAs that each compute a part of K of an output tile.
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
            dtype: of x and w, float16 or bfloat16.
            bits: of a code.
            size: columns of a group.
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
        """A CTA's dynamic shared memory: x, which partial accumulators reuse, and headers."""
        stages = self.stages * self.warps_k * self.tile_m * (8 * self.k_tile + 64)
        partials = (self.warps_k - 1) * self.warps_n * self.row_tiles * self.tile_m * CHUNK_ROWS * 4
        return max(stages, partials) + HEADER_BYTES * self.row_tiles * self.warps_n * self.warps_k

    def fits(self, facts: DeviceFacts) -> bool:
        """Say whether a CTA may have its shared memory, and an SM that of all its CTAs."""
        whole = self.ctas_per_sm * (self.shared_bytes + RESERVED_SHARED)
        return self.shared_bytes <= facts.shared_per_cta and whole <= facts.shared_per_sm

    def row_ctas(self, n: int) -> int:
        """Return the CTAs along N."""
        return -(-n // (CHUNK_ROWS * self.row_tiles * self.warps_n))

    def k_tiles(self, k: int, size: int) -> int:
        """Return the k-tiles along K; those of a chunk of long groups cover it together."""
        chunks = -(-k // (CHUNK_GROUPS * size))
        return chunks * (size // self.k_tile) if size > self.k_tile else -(-chunks * size // self.k_tile)


def choose_gemm(m: int, n: int, k: int, size: int, facts: DeviceFacts) -> GemmSchedule:
    """Choose the schedule of y[m, n] = x[m, k] @ w[n, k].T: about as many CTAs as are resident at a time.

    Args:
        m: the most tokens.
        n: output features.
        k: input features.
        size: columns of a group.
        facts: of the GPU.
    """
    m_tiles = -(-m // TILES_M[-1])
    tile_m = next(tokens for tokens in TILES_M if -(-m // m_tiles) <= tokens)
    for candidate in _candidates(tile_m, -(-n // CHUNK_ROWS), facts):
        if candidate.fits(facts):
            break
    m_tiles, k_tiles = -(-m // tile_m), candidate.k_tiles(k, size)
    output_tiles = candidate.row_ctas(n) * m_tiles
    wanted = candidate.ctas_per_sm * facts.sms // output_tiles
    most = max(1, min(MAX_SPLIT_K, k_tiles // (FEWEST_TILES * candidate.warps_k)))
    return _with_split(candidate, min(max(1, wanted), most))


def _with_split(schedule: GemmSchedule, split_k: int) -> GemmSchedule:
    fields = {name: getattr(schedule, name) for name in schedule.__dataclass_fields__}
    return GemmSchedule(**{**fields, "split_k": split_k})


def _candidates(tile_m: int, row_tiles: int, facts: DeviceFacts) -> list[GemmSchedule]:
    """Return schedules, the best first; the last fits any GPU since Ampere."""
    few_rows = row_tiles <= 4 * facts.sms
    if tile_m <= 16:  # x is small: its warps share K, so that few partial sums leave the CTA
        warps_k = WARPS if few_rows else WARPS // 2
        shapes = [(WARPS // warps_k, warps_k, 2, 64, 3, 2), (4, 2, 2, 64, 2, 2)]
    elif tile_m <= 32:
        shapes = [(4, 2, 2, 32, 3, 2), (4, 2, 2, 32, 2, 2)]
    elif tile_m <= 64:
        shapes = [(4, 2, 2, 32, 3, 1), (8, 1, 2, 32, 3, 1)]
    else:
        shapes = [(8, 1, 2, 32, 3, 1)]
    shapes.append((4, 1, 1, 32, 2, 1))
    return [
        GemmSchedule(tile_m, warps_n, warps_k, tiles, k_tile, 2, stages, ctas, 1)
        for warps_n, warps_k, tiles, k_tile, stages, ctas in shapes
    ]


def gemm_pays(problem: Problem) -> bool:
    """Say whether `gemm` is taken to be faster than the kernels after it. Not measured yet."""
    return problem.m <= GEMM_PAYS_TOKENS


def decode_pays(problem: Problem) -> bool:
    """Say whether `decode` is taken to be faster than `gemm`: where it multiplies codes, and in all it was measured at.

    `gemm` has not been timed yet, so that `decode` keeps all tokens that it takes.
    """
    return problem.m <= max(DECODE_PAYS_TOKENS, DECODE_MAX_TOKENS)


def shape_refusal(problem: Problem) -> str | None:
    """Say why `gemm.cu` is not written for ``problem``, on whatever GPU, or None if it is."""
    if problem.dtype not in ELEMENTS or problem.weight_dtype != problem.dtype:
        return f"x and w are both float16 or both bfloat16, got {problem.dtype} and {problem.weight_dtype}"
    if group_size(problem.pattern) not in SIZES:
        return f"takes groups of {', '.join(map(str, SIZES))}, this weight has groups of {group_size(problem.pattern)}"
    if str(problem.params["kind"]) not in KINDS:
        return f"takes {', '.join(KINDS)}, this weight is {problem.params['kind']}"
    return None
