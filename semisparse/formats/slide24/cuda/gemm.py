"""The kernel ``gemm``, for Hopper: a launch that lifts x (lift.cu), then the 2:4 GEMM (gemm.cu).

With 8-bit values the first launch quantises x, too.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.slide24.cuda import schedule
from semisparse.formats.slide24.cuda.lift import SCALARS, Lift
from semisparse.formats.slide24.storage.disk import lifted_columns, quantised_dtype, value_dtype, window_of
from semisparse.formats.slide24.storage.gpu import layout_of, tile_counts, tiles_refusal
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, offsets_in_workspace
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.operands import bias_as

ELEMENTS = {torch.int8: "INT8", torch.float8_e4m3fn: "FP8", torch.bfloat16: "BF16", torch.float16: "FP16"}
"""The macro for a dtype of stored values."""

HOPPER_SHARED = 227 << 10
"""Bytes of shared memory per CTA, for the variants of `SOURCE` only; `prepare` takes the device's."""


def defines(tile: schedule.CtaTile, dtype: torch.dtype, out: torch.dtype, shared_per_cta: int) -> Defines:
    """Return the macros of gemm.cu for values of ``dtype`` and y in ``out``."""
    return {
        ELEMENTS[dtype]: 1,
        "OUT": SCALARS[out],
        "CTA_M": tile.tokens,
        "WARPGROUPS": tile.warpgroups,
        "CLUSTER": tile.cluster,
        "STAGES": tile.stages(dtype.itemsize, shared_per_cta),
        "STAGGER": schedule.STAGGER,
    }


SOURCE = CudaSource(
    Path(__file__).with_name("gemm.cu"),
    (
        *(defines(tile, torch.int8, torch.bfloat16, HOPPER_SHARED) for tile in schedule.CTA_TILES),
        *(defines(schedule.CTA_TILES[0], dtype, dtype, HOPPER_SHARED) for dtype in SCALARS),
        *(defines(schedule.CTA_TILES[0], torch.float8_e4m3fn, out, HOPPER_SHARED) for out in SCALARS),
    ),
    architectures=("sm_90a",),
)


def refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.dtype not in SCALARS:
        return f"x is float16 or bfloat16, got {problem.dtype}"
    return (
        tiles_refusal(value_dtype(problem.spec), problem.device)
        or operand_refusal(problem, "tiles")
        or lift_of(problem).refusal(problem.device)
    )


def operand_refusal(problem: Problem, layout: str) -> str | None:
    """Return why a kernel that reads ``layout`` cannot take the problem's operands, or None if it can."""
    stored = layout_of(problem.params)
    if stored != layout:
        return f"supports layout '{layout}' only; this weight has layout '{stored}'"
    if quantised_dtype(problem.params) is None and problem.dtype != problem.weight_dtype:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    return None


def pays(problem: Problem) -> bool:
    """Return whether `gemm` is assumed to be faster than `unpack`.

    With 8-bit values it always is. With 16-bit values the lifted K' may exceed K by more than 2:4 gains.
    """
    if quantised_dtype(problem.params) is not None:
        return True
    expansion = lifted_columns(problem.k, window_of(problem.pattern)) / problem.k
    return schedule.H200_GEMM_TO_CUBLAS * expansion <= 1 + schedule.H200_UNPACK_TOKENS / problem.m


def lift_of(problem: Problem) -> Lift:
    """Return how the problem's x is lifted."""
    dtype = quantised_dtype(problem.params)
    return Lift(problem.m, problem.k, window_of(problem.pattern), problem.dtype, dtype)


def prepare(problem: Problem) -> Product:
    """Return the matmul: choose the CTA tile and load both kernels.

    Sums of int8 are exact in int32. They are scaled in float32, and y is rounded to x's dtype.
    """
    (n, _), device, out = problem.spec.shape, problem.device, problem.dtype
    dtype, quantised = value_dtype(problem.spec), quantised_dtype(problem.params) is not None
    k_tiles, row_tiles = tile_counts(problem.spec)
    facts, lift = device_facts(device), lift_of(problem)
    tile = schedule.choose(problem.m, row_tiles, k_tiles, facts.sms).tile
    macros = defines(tile, dtype, out, facts.shared_per_cta)
    shared = tile.shared_bytes(dtype.itemsize, facts.shared_per_cta)
    gemm = SOURCE.build("semisparse_slide24_gemm", macros, shared).load(device)
    launch_lift = lift.prepare(device)

    @lru_cache(maxsize=256)
    def launch_for(m: int) -> tuple[schedule.Launch, tuple[int, ...]]:
        launch = schedule.launch_of(tile, m, row_tiles, k_tiles, facts.sms)
        sizes = (launch.tokens * lift.token_bytes, 4 * m, launch.partial_bytes, 4 * launch.arrivals)
        return launch, offsets_in_workspace(*sizes)

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        m = x.shape[0]
        launch, (*offsets, size) = launch_for(m)
        y = x.new_empty(m, n)
        workspace = x.new_empty(size, dtype=torch.uint8)
        begin = workspace.data_ptr()
        lifted, scales, partials, arrivals = (begin + offset for offset in offsets)
        token_scales = scales if quantised else None
        launch_lift(x, launch.tokens, lifted, token_scales, arrivals, launch.arrivals)
        bias = bias_as(bias, out)
        gemm(
            (launch.ctas, 1, 1), tile.threads, w=packed.tensors["tiles"], x=lifted, token_scales=token_scales,
            row_scales=packed.tensors.get("scale"), bias=bias, y=y, partials=partials, arrivals=arrivals, m=m, n=n,
            k_tiles=k_tiles, row_tiles=row_tiles, whole_tiles=launch.whole_tiles, splits=launch.splits,
        )  # fmt: skip
        return y

    return matmul
