"""decode.cu: y for 1 to 64 tokens with mma.m16n8k16, expanding the tiles into its registers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.cuda import operands
from semisparse.formats.bitmask.cuda.schedule import DECODE_MAX_TOKENS, choose_decode, choose_fused
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.formats.kernel import NOTHING_FUSED, FusedOperands, FusedProduct, Problem, Product
from semisparse.runtime import tile_decode
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.tile_decode import UNFUSED, TileSchedule, tile_defines


def decode_defines(
    dtype: torch.dtype,
    keep: int,
    tile_m: int,
    warps_n: int,
    warps_k: int,
    stages: int,
    fusion: Defines = UNFUSED,
    bits: int = 0,
) -> Defines:
    """Return the macros of decode.cu; ``bits`` is 0 for values."""
    return {"BITS": bits, "KEEP": keep, **tile_defines(dtype, tile_m, warps_n, warps_k, stages, fusion)}


# The macros depend on the pattern and the shape. The variants that tests compile are the common cases and the extremes.
SOURCE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    (
        decode_defines(torch.float16, keep=1, tile_m=8, warps_n=1, warps_k=8, stages=2),
        decode_defines(torch.float16, keep=32, tile_m=1, warps_n=1, warps_k=6, stages=2),
        decode_defines(torch.float16, keep=64, tile_m=16, warps_n=2, warps_k=4, stages=2),
        decode_defines(torch.float16, keep=32, tile_m=32, warps_n=4, warps_k=2, stages=2),
        decode_defines(torch.bfloat16, keep=32, tile_m=64, warps_n=8, warps_k=1, stages=2),
        decode_defines(torch.bfloat16, 32, 1, 1, 8, 2, {**UNFUSED, "RMS_NORM": 1}),
        decode_defines(torch.float16, 32, 1, 2, 8, 2, {**UNFUSED, "RMS_NORM": 1, "SILU_MUL": 1}),
        decode_defines(torch.bfloat16, 32, 1, 1, 8, 2, {**UNFUSED, "ADD_RESIDUAL": 1}),
        decode_defines(torch.float16, 32, 8, 2, 8, 2, {**UNFUSED, "RMS_NORM": 1, "SILU_MUL": 1}),
        {**decode_defines(torch.bfloat16, 32, 8, 2, 4, 2, {**UNFUSED, "SILU_MUL": 1}), "EXPERTS": 1},
        {**decode_defines(torch.float16, 31, 1, 2, 3, 2), "EXPERTS": 1},
        decode_defines(torch.float16, 32, 1, 1, 16, 2, bits=8),
        decode_defines(torch.bfloat16, 32, 8, 1, 8, 2, bits=8),
        decode_defines(torch.float16, 31, 16, 2, 4, 2, bits=4),
        decode_defines(torch.bfloat16, 32, 1, 1, 8, 2, {**UNFUSED, "RMS_NORM": 1}, 4),
    ),
)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.m > DECODE_MAX_TOKENS:
        return f"takes 1 to {DECODE_MAX_TOKENS} tokens, got {problem.m}"
    return operands.refusal(problem)


def prepare(problem: Problem) -> Product:
    """Compile and load the kernel for one problem.

    Args:
        problem: x and w are both float16 or both bfloat16.
    Returns:
        The matmul, accumulated in float32.
    """
    facts = device_facts(problem.device)
    return _prepared(problem, choose_decode(problem.m, tiling(problem.spec), facts))


def fuse(problem: Problem) -> FusedProduct | None:
    """As `prepare`, for a problem with a prologue or an epilogue; None if no schedule can fuse them."""
    schedule = choose_fused(problem, tiling(problem.spec), device_facts(problem.device))
    return None if schedule is None else _prepared(problem, schedule)


def _prepared(problem: Problem, schedule: TileSchedule) -> FusedProduct:
    weight, n, pdl = tiling(problem.spec), problem.n, False
    if (
        problem.is_fused
    ):  # PDL without fusion is slower: a decode step of llama2-7b took 2.96 ms with it, 2.75 without (H200)
        pdl = device_facts(problem.device).has_pdl
    defines = {"BITS": weight.bits, "KEEP": weight.keep, **schedule.defines(problem.dtype, problem.fusion_defines)}
    kernel = SOURCE.build("semisparse_bitmask_decode", defines, schedule.shared).load(problem.device)
    width = n // 2 if problem.epilogue == "silu_mul" else n
    product = tile_decode.prepare(kernel, schedule, weight, (n, problem.k), problem.is_fused, width, pdl)

    def decode(x: Tensor, packed: Packed, bias: Tensor | None, fused: FusedOperands = NOTHING_FUSED) -> Tensor:
        return product(x, {"tiles": packed.tensors["tiles"]}, bias, fused.arguments)

    return decode
