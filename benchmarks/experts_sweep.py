"""Each matmul of a layer of experts in every schedule worth trying: which one formats/*/cuda should choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from experts_layer import DTYPE, EXPERTS, GPU, INNER, TOP_K, error_of, row, stacks, steps
from torch import Tensor

from semisparse.errors import KernelError
from semisparse.formats import Packed
from semisparse.formats.bitmask.cuda import experts as bitmask_experts
from semisparse.formats.bitmask.cuda import schedule as bitmask_schedule
from semisparse.formats.bitmask.storage.gpu import Tiling, tiling
from semisparse.formats.gqs.cuda import experts as gqs_experts
from semisparse.formats.gqs.cuda import schedule as gqs_schedule
from semisparse.formats.gqs.cuda.wgmma_schedule import tiles_of
from semisparse.formats.kernel import ExpertsProblem, ExpertsProduct, bucket_of, in_parallel
from semisparse.formats.product import structure_of
from semisparse.runtime.device import device_facts
from semisparse.runtime.experts import Routing
from semisparse.runtime.gemm_schedule import fit


def variants(packed: Packed, tokens: int, epilogue: str) -> Iterator[tuple[str, Callable[[], ExpertsProduct]]]:
    """Give each schedule worth trying for a stack: its name, and what prepares it."""
    pairs = bucket_of(tokens * TOP_K)
    problem = ExpertsProblem(pairs, EXPERTS, structure_of(packed.spec), DTYPE, GPU, epilogue)
    if tokens <= 64:
        for waves in WAVES[tokens]:
            for shape in DECODE_SHAPES[problem.spec.format]:
                yield f"decode {shape} waves {waves}", _decode(problem, waves, shape)
    if tokens >= 8:
        for tile_m in GEMM_TILES[tokens]:
            for shape in GEMM_SHAPES:
                prepare = _gemm(problem, tile_m, shape)
                if prepare is not None:
                    yield f"gemm {tile_m} {shape}", prepare


DECODE_SHAPES = {
    "gqs": (16, 8, 4),
    "bitmask": ((2, 4, 1), (2, 4, 2), (2, 8, 2), (2, 2, 2), (2, 4, 4), (2, 2, 4), (1, 8, 2)),
}
"""By format: warps per CTA, or WARPS_N, WARPS_K and STAGES."""

WAVES = {1: (1, 2, 4), 8: (2, 4), 64: (2, 4)}
"""By tokens: CTAs per resident one."""

GEMM_TILES = {8: (16,), 64: (16,), 2048: (128, 160, 192)}
GEMM_SHAPES = ((2, 1, 1), (2, 2, 1), (3, 1, 1))


def _decode(problem: ExpertsProblem, waves: int, shape: object) -> Callable[[], ExpertsProduct]:
    facts = device_facts(GPU)
    if problem.spec.format == "gqs":
        gqs_schedule.EXPERT_WARPS = dict.fromkeys((1, 2, 8), shape)
        gqs_schedule.EXPERT_WAVES = dict.fromkeys((1, 2, 8), waves)
        return partial(gqs_experts.prepare_decode, problem, gqs_schedule.choose_experts(problem, facts))
    bitmask_schedule.EXPERT_SHAPES = bitmask_schedule.EXPERT_SHAPES_GATED = dict.fromkeys((1, 8), (shape,))
    bitmask_schedule.EXPERT_WAVES = waves
    tiles = _tiling(problem)
    chosen = bitmask_schedule.choose_experts(problem, tiles, facts)
    return partial(bitmask_experts.prepare_decode, problem, tiles, chosen)


def _gemm(problem: ExpertsProblem, tile_m: int, shape: tuple[int, int, int]) -> Callable[[], ExpertsProduct] | None:
    facts, bitmask = device_facts(GPU), problem.spec.format == "bitmask"
    tiles = bitmask_schedule.gemm_tiles(_tiling(problem)) if bitmask else tiles_of(problem.n, problem.k, 4, 16)
    warpgroups, cluster, ctas = shape
    schedule = fit(tiles, facts, tile_m, warpgroups, cluster, 0, ctas)
    if schedule is None:
        return None
    if bitmask:
        return partial(bitmask_experts.prepare_gemm, problem, _tiling(problem), schedule)
    return partial(gqs_experts.prepare_gemm, problem, schedule)


def _tiling(problem: ExpertsProblem) -> Tiling:
    whole = tiling(problem.spec)
    return replace(whole, row_tiles=whole.row_tiles // EXPERTS)


def sweep(ways: Sequence[str], tokens_of_steps: Sequence[int]) -> Iterator[dict[str, str]]:
    """Time each matmul of the layer, with its SiLU, in every schedule worth trying."""
    for way in ways:
        for part, packed, epilogue in zip(("gate_up", "down"), stacks(way), ("silu_mul", "none"), strict=True):
            for tokens in tokens_of_steps:
                candidates = list(variants(packed, tokens, epilogue))
                in_parallel(partial(_quietly, prepare) for _, prepare in candidates)
                made = [(name, product) for name, prepare in candidates if (product := _quietly(prepare))]
                drawn = steps(tokens)
                wide = torch.randn(tokens * TOP_K, INNER, device=GPU).to(DTYPE)
                inputs = [s.x if part == "gate_up" else wide.clone() for s in drawn]
                expected: Tensor | None = None
                for name, product in made:
                    calls = [
                        partial(_one, product, packed, x, Routing(s.chosen, EXPERTS))
                        for x, s in zip(inputs, drawn, strict=True)
                    ]
                    try:
                        y = calls[0]()
                        torch.cuda.synchronize()
                        expected = y if expected is None else expected
                        if not (error := error_of(y, expected)) < 1e-2:
                            raise KernelError(f"relative error {error:.3g}")
                        yield row(tokens, way, part, calls, schedule=name, error=f"{error:.1e}")
                    except KernelError as error:
                        print(name, "not timed:", str(error)[:120], flush=True)


def _quietly(prepare: Callable[[], ExpertsProduct]) -> ExpertsProduct | None:
    """Return the product, or None if its kernel does not compile or does not fit."""
    try:
        return prepare()
    except KernelError as error:
        print("not run:", str(error)[:200], flush=True)
        return None


def _one(product: ExpertsProduct, packed: Packed, x: Tensor, routing: Routing) -> Tensor:
    return product(x, packed, None, routing)
