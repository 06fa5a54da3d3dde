"""A mixture's experts in tiles, stacked along N: decode.cu and gemm.cu with EXPERTS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.cuda.decode import SOURCE
from semisparse.formats.bitmask.cuda.gemm import GEMM, gemm_defines
from semisparse.formats.bitmask.cuda.schedule import choose_experts, fuses_silu, gemm_tiles
from semisparse.formats.bitmask.storage.disk import BLOCK
from semisparse.formats.bitmask.storage.gpu import ROWS, Tiling, tiling
from semisparse.formats.bitmask.storage.layouts import layout_of
from semisparse.formats.kernel import ExpertsProblem, ExpertsProduct
from semisparse.runtime import expert_gemm
from semisparse.runtime.device import device_facts
from semisparse.runtime.elementwise import silu_mul
from semisparse.runtime.expert_gemm import experts_schedule
from semisparse.runtime.experts import MAX_EXPERTS, Routing
from semisparse.runtime.gemm_schedule import Schedule, Shape
from semisparse.runtime.kernel import cuda_refusal, hopper_refusal
from semisparse.runtime.operands import bias_as
from semisparse.runtime.tile_decode import UNFUSED, TileSchedule

GEMM_SHAPES: Mapping[int, Shape] = {
    16: (3, 1, 1),
    32: (3, 1, 1),
    64: (2, 2, 1),
    128: (2, 2, 1),
    160: (2, 2, 1),
    192: (2, 2, 1),
    256: (2, 2, 1),
}
"""By tile_m: warpgroups per CTA, CTAs per cluster and per SM. In 4 bits (3, 1, 1) is 3 % faster for 160, but spills."""

DECODE_PAIRS = 6
"""Average pairs of a token and an expert, per expert, up to which decode.cu is faster than gemm.cu."""


def prepare(problem: ExpertsProblem) -> ExpertsProduct | None:
    """Compile and load the kernels; None if they cannot compute ``problem``."""
    spec = problem.spec
    if layout_of(spec.params) != "tiles" or problem.dtype != spec.dtype:
        return None
    if cuda_refusal(problem.device) is not None:
        return None
    grain = 2 * ROWS if problem.epilogue == "silu_mul" else ROWS
    if spec.shape[0] % (problem.experts * grain) or problem.experts > MAX_EXPERTS:
        return None
    whole = tiling(spec)
    weight = replace(whole, row_tiles=whole.row_tiles // problem.experts)
    if problem.pairs <= DECODE_PAIRS * problem.experts or hopper_refusal(problem.device):
        return prepare_decode(problem, weight)
    return prepare_gemm(problem, weight)


def prepare_decode(problem: ExpertsProblem, weight: Tiling, schedule: TileSchedule | None = None) -> ExpertsProduct:
    """Compile and load decode.cu; return the experts' matmuls.

    Args:
        problem: x and w are both float16 or both bfloat16.
        weight: an expert's tiles.
        schedule: None for the one that should be fastest.
    """
    n, k, device, gated = problem.n, problem.k, problem.device, problem.epilogue == "silu_mul"
    schedule = schedule or choose_experts(problem, weight, device_facts(device))
    fused = fuses_silu(problem, schedule.warps_n)
    fusion = {**UNFUSED, "SILU_MUL": int(fused)}
    own = {"BITS": weight.bits, "KEEP": weight.keep, "EXPERTS": 1}
    defines = {**own, **schedule.defines(problem.dtype, fusion)}
    kernel = SOURCE.build("semisparse_bitmask_experts", defines, schedule.shared).load(device)
    width, by_expert = (n // 2 if fused else n), schedule.tile_m > 1
    pdl = device_facts(device).has_pdl

    def decode(x: Tensor, packed: Packed, bias: Tensor | None, routing: Routing) -> Tensor:
        x = x.contiguous()
        x = x.clone() if fused and x.data_ptr() % 16 else x
        y = x.new_empty(routing.pairs, width)
        kernel(
            (schedule.ctas, problem.experts if by_expert else routing.pairs, 1), 32 * schedule.warps, pdl=pdl,
            x=x, tiles=packed.tensors["tiles"], bias=bias_as(bias, x.dtype), y=y, chosen=routing.chosen,
            pairs=routing.pairs, pairs_per_x=routing.pairs // x.shape[0], experts=problem.experts,
            n=n, k=k, row_tiles=weight.row_tiles, column_tiles=weight.column_tiles,
            x_aligned=k % 8 == 0 and x.data_ptr() % 16 == 0, complete=routing.complete,
        )  # fmt: skip
        routing.complete = True
        return silu_mul(y, (0, n // 2), n // 2) if gated and not fused else y

    return decode


def prepare_gemm(problem: ExpertsProblem, weight: Tiling, schedule: Schedule | None = None) -> ExpertsProduct:
    """Compile and load gemm.cu; return the experts' matmuls.

    Args:
        problem: x and w are both float16 or both bfloat16.
        weight: an expert's tiles.
        schedule: tile sizes and stages; None for the one that should be fastest.
    """
    tiles, facts = gemm_tiles(weight), device_facts(problem.device)
    schedule = schedule or experts_schedule(problem.pairs, problem.experts, tiles, facts, GEMM_SHAPES)
    product = expert_gemm.prepare_experts(
        lambda chosen: GEMM.build(
            "semisparse_bitmask_experts_gemm",
            {**gemm_defines(problem.dtype, weight.keep, chosen, weight.bits), "EXPERTS": 1},
            chosen.shared(tiles),
        ),
        schedule, tiles, BLOCK, (problem.n, problem.k), problem.device,
    )  # fmt: skip

    def gemm(x: Tensor, packed: Packed, bias: Tensor | None, routing: Routing) -> Tensor:
        y = product(x, {"tiles": packed.tensors["tiles"]}, bias, routing)
        return silu_mul(y, (0, problem.n // 2), problem.n // 2) if problem.epilogue == "silu_mul" else y

    return gemm
