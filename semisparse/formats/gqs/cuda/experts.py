"""A mixture's experts in groups, stacked along N: decode.cu and gemm_wgmma.cu with EXPERTS."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.gqs.cuda.decode import SOURCE
from semisparse.formats.gqs.cuda.gemm_wgmma import SOURCE as GEMM
from semisparse.formats.gqs.cuda.gemm_wgmma import gemm_defines
from semisparse.formats.gqs.cuda.schedule import ELEMENTS, EXPERT_PAIRS, GROUP_SIZE, Schedule, choose_experts
from semisparse.formats.gqs.cuda.wgmma_schedule import tiles_of
from semisparse.formats.gqs.storage.disk import TENSORS, code_bits, group_size, quantises_x
from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.formats.kernel import ExpertsProblem, ExpertsProduct
from semisparse.runtime import expert_gemm
from semisparse.runtime.device import device_facts
from semisparse.runtime.elementwise import silu_mul
from semisparse.runtime.expert_gemm import experts_schedule
from semisparse.runtime.experts import MAX_EXPERTS, Routing
from semisparse.runtime.gemm_schedule import Schedule as GemmSchedule
from semisparse.runtime.gemm_schedule import Shape
from semisparse.runtime.kernel import cuda_refusal, hopper_refusal
from semisparse.runtime.operands import aligned, bias_as

GEMM_SHAPES: Mapping[int, Shape] = {
    16: (3, 1, 1),
    32: (3, 1, 1),
    64: (3, 1, 1),
    128: (2, 2, 1),
    160: (2, 2, 1),
    256: (2, 2, 1),
}
"""By tile_m: warpgroups per CTA, CTAs per cluster and per SM. Not 192: that kernel spills 32 bytes per thread."""

WGMMA_SIZES = (8, 16, 32, 64, 128)
"""Columns per group that gemm_wgmma.cu takes."""

DECODE_PAIRS = 6
"""Average pairs of a token and an expert, per expert, up to which decode.cu is faster than gemm_wgmma.cu."""


def prepare(problem: ExpertsProblem) -> ExpertsProduct | None:
    """Compile and load the kernels; None if they cannot compute ``problem``."""
    spec = problem.spec
    size = group_size(spec.pattern)
    if problem.dtype not in ELEMENTS or problem.dtype != spec.dtype or quantises_x(spec.params):
        return None
    grain = 2 * CHUNK_ROWS if problem.epilogue == "silu_mul" else CHUNK_ROWS
    if spec.shape[0] % (problem.experts * grain) or problem.experts > MAX_EXPERTS:
        return None
    decodes = size == GROUP_SIZE and code_bits(spec.params, size) == 4 and cuda_refusal(problem.device) is None
    gemms = size in WGMMA_SIZES and hopper_refusal(problem.device) is None
    if decodes and (problem.pairs <= max(EXPERT_PAIRS, DECODE_PAIRS * problem.experts) or not gemms):
        return prepare_decode(problem)
    return prepare_gemm(problem) if gemms else None


def prepare_decode(problem: ExpertsProblem, chosen: tuple[Schedule, int] | None = None) -> ExpertsProduct:
    """Compile and load decode.cu; return the experts' matmuls.

    Args:
        problem: x and w are both float16 or both bfloat16.
        chosen: the schedule and the CTAs per expert, or per pair; None for those that should be fastest.
    """
    n, k, device, experts, gated = problem.n, problem.k, problem.device, problem.experts, problem.epilogue == "silu_mul"
    facts = device_facts(device)
    schedule, ctas = chosen or choose_experts(problem, facts)
    row_tiles, chunks_per_tile = n // CHUNK_ROWS, -(-k // (CHUNK_GROUPS * GROUP_SIZE))
    tiles = row_tiles // 2 if gated else row_tiles
    tiles_per_cta, ctas_with_extra = divmod(tiles, ctas)
    whole_at = schedule.shared_bytes(k)
    shared = whole_at + (schedule.whole_bytes(tiles_per_cta + 1) if gated else 0)
    kernel = SOURCE.build("semisparse_gqs_experts", {**schedule.defines, "EXPERTS": 1}, shared).load(device)
    width, by_expert = (n // 2 if gated else n), schedule.tokens > 1

    def decode(x: Tensor, packed: Packed, bias: Tensor | None, routing: Routing) -> Tensor:
        x = aligned(x) if schedule.aligned_k else x.contiguous()
        y = x.new_empty(routing.pairs, width)
        kernel(
            (ctas, experts if by_expert else routing.pairs, 1), schedule.threads, pdl=facts.has_pdl,
            x=x, **{name: aligned(packed.tensors[name]) for name in TENSORS},
            bias=bias_as(bias, x.dtype), y=y, chosen=routing.chosen,
            pairs=routing.pairs, pairs_per_x=routing.pairs // x.shape[0], experts=experts,
            n=n, k=k, chunks_per_tile=chunks_per_tile, chunks=row_tiles * chunks_per_tile,
            kept=int(packed.params["kept"]), tiles_per_cta=tiles_per_cta, ctas_with_extra=ctas_with_extra,
            whole_at=whole_at,
        )  # fmt: skip
        routing.complete = True
        return y

    return decode


def prepare_gemm(problem: ExpertsProblem, schedule: GemmSchedule | None = None) -> ExpertsProduct:
    """Compile and load gemm_wgmma.cu; return the experts' matmuls.

    Args:
        problem: x and w are both float16 or both bfloat16.
        schedule: tile sizes and stages; None for the one that should be fastest.
    """
    n, k, spec = problem.n, problem.k, problem.spec
    size = group_size(spec.pattern)
    bits = code_bits(spec.params, size)
    tiles, facts = tiles_of(n, k, bits, size), device_facts(problem.device)
    schedule = schedule or experts_schedule(problem.pairs, problem.experts, tiles, facts, GEMM_SHAPES)
    product = expert_gemm.prepare_experts(
        lambda chosen: GEMM.build(
            "semisparse_gqs_experts_gemm",
            {**gemm_defines(problem.dtype, bits, size, chosen), "EXPERTS": 1},
            chosen.shared(tiles),
        ),
        schedule, tiles, size, (n, k), problem.device,
    )  # fmt: skip
    chunks = -(-k // (CHUNK_GROUPS * size))
    counts = {"chunks": chunks, "all_chunks": problem.experts * (n // CHUNK_ROWS) * chunks}

    def gemm(x: Tensor, packed: Packed, bias: Tensor | None, routing: Routing) -> Tensor:
        tensors = {name: aligned(packed.tensors[name]) for name in TENSORS}
        y = product(x, {**tensors, **counts}, bias, routing)
        return silu_mul(y, (0, n // 2), n // 2) if problem.epilogue == "silu_mul" else y

    return gemm
