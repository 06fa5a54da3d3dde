"""`decode_tiles`: 1 to 16 tokens with mma.m16n8k16 from mask tiles, expanded into its registers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.cuda.tile_schedule import (
    TILE_MAX_TOKENS,
    choose_fused_tiles,
    choose_tiles,
    tiles_in,
)
from semisparse.formats.ec_csr.storage.deltas import has_tiles, layout_of
from semisparse.formats.ec_csr.storage.tiles import DTYPES, tiles_of
from semisparse.formats.kernel import NOTHING_FUSED, FusedOperands, FusedProduct, Problem, Product
from semisparse.runtime import tile_decode
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.tile_decode import UNFUSED, TileSchedule, tile_defines

FEW_ROWS = 8192
"""N up to which `pays` prefers this kernel to `gemm` for 9 to 16 tokens; nothing between 4,096 and 11,008 was timed."""


def decode_defines(
    dtype: torch.dtype, words: int, tile_m: int, warps_n: int, warps_k: int, stages: int, fusion: Defines = UNFUSED
) -> Defines:
    """Return the macros of decode_tiles.cu."""
    return {"WORDS": words, **tile_defines(dtype, tile_m, warps_n, warps_k, stages, fusion)}


SOURCE = CudaSource(
    Path(__file__).with_name("decode_tiles.cu"),
    (
        decode_defines(torch.float16, 36, 1, 1, 16, 2),
        decode_defines(torch.bfloat16, 64, 8, 2, 8, 2),
        decode_defines(torch.float16, 32, 16, 2, 4, 2),
        decode_defines(torch.bfloat16, 36, 1, 1, 8, 2, {**UNFUSED, "RMS_NORM": 1}),
        decode_defines(torch.float16, 36, 1, 2, 8, 2, {**UNFUSED, "RMS_NORM": 1, "SILU_MUL": 1}),
        decode_defines(torch.bfloat16, 36, 8, 1, 8, 2, {**UNFUSED, "ADD_RESIDUAL": 1}),
    ),
)


def tiles_refusal(problem: Problem) -> str | None:
    """Say why no kernel on mask tiles can compute ``problem`` on its GPU, or None if one may."""
    if not has_tiles(problem.params):
        return f"reads mask tiles, this weight is stored in {layout_of(problem.params)}"
    if problem.dtype not in DTYPES or problem.dtype != problem.weight_dtype:
        return f"x and w are both float16 or both bfloat16, got {problem.dtype} and {problem.weight_dtype}"
    return cuda_refusal(problem.device)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.m > TILE_MAX_TOKENS:
        return f"takes 1 to {TILE_MAX_TOKENS} tokens, got {problem.m}"
    return tiles_refusal(problem)


def pays(problem: Problem) -> bool:
    """Say whether the kernel is at least about as fast as `gemm` (results/h200/sweeps/ec_csr-tiles.csv).

    Microseconds of this kernel (`gemm`) at 8 and 16 tokens: 8.9 (11.9) and 10.5 (11.9) at 4096 x 4096, 17.9 (21.5) and
    20.9 (21.4) at 4096 x 11008, 20.4 (21.5) and 23.0 (21.8) at 11008 x 4096, 74.9 (74.0) and 99.6 (75.3) at 28672 x
    8192.
    """
    return problem.m <= 8 or problem.n <= FEW_ROWS


def prepare(problem: Problem, schedule: TileSchedule | None = None) -> Product:
    """Load the kernel; return the matmul for a bucket of M: x float16 or bfloat16, as w is."""
    return _prepared(problem, schedule or choose_tiles(problem, device_facts(problem.device)))


def fuse(problem: Problem) -> FusedProduct | None:
    """As `prepare`, for a problem with a prologue or an epilogue; None if no schedule can fuse them."""
    schedule = choose_fused_tiles(problem, device_facts(problem.device))
    return None if schedule is None else _prepared(problem, schedule)


def _prepared(problem: Problem, schedule: TileSchedule) -> FusedProduct:
    n, pdl = problem.n, problem.is_fused and device_facts(problem.device).has_pdl
    words = int(problem.params["words_limit"])
    defines = {"WORDS": words, **schedule.defines(problem.dtype, problem.fusion_defines)}
    kernel = SOURCE.build("semisparse_ec_csr_decode_tiles", defines, schedule.shared).load(problem.device)
    width = n // 2 if problem.epilogue == "silu_mul" else n
    weight = tiles_in(problem.spec)
    product = tile_decode.prepare(kernel, schedule, weight, (n, problem.k), problem.is_fused, width, pdl)

    def decode(x: Tensor, packed: Packed, bias: Tensor | None, fused: FusedOperands = NOTHING_FUSED) -> Tensor:
        return product(x, tiles_of(packed), bias, fused.arguments)

    return decode
