"""One layer of experts, shapes of Qwen3-30B-A3B, beside torch's grouped_mm in bfloat16.

    python benchmarks/experts.py results/h200/experts.csv
    python benchmarks/experts.py results/h200/sweeps/experts.csv --sweep

Needs a GPU. Random weights: 128 experts, gate and up joined [1536, 2048], down [2048, 768], top 8 of uniformly drawn
scores. A layer is everything from x and the router's choice to the weighted sum: sorting or finding the pairs, both
matmuls, SiLU. `grouped_mm` is transformers' own layer around torch's grouped_mm; `grouped_mm, matmuls alone` is both
calls of grouped_mm on tokens that are sorted already. CUDA graphs on all sides; each call of a graph has other tokens
and other experts, so that their weights come from memory. Every output is compared with the layer of unpacked weights
before it is timed. The floor is the bytes of the chosen experts at 4.28 TB/s, or the operations at 780 TFLOP/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rows import write_rows
from torch import Tensor

from semisparse.bench.timing import time_calls
from semisparse.errors import KernelError
from semisparse.formats import Packed, get_format
from semisparse.formats.bitmask.cuda import experts as bitmask_experts
from semisparse.formats.bitmask.cuda import schedule as bitmask_schedule
from semisparse.formats.bitmask.storage.gpu import Tiling, tiling
from semisparse.formats.experts import experts_product
from semisparse.formats.gqs.cuda import experts as gqs_experts
from semisparse.formats.gqs.cuda import schedule as gqs_schedule
from semisparse.formats.gqs.cuda.wgmma_schedule import tiles_of
from semisparse.formats.kernel import ExpertsProblem, ExpertsProduct, bucket_of
from semisparse.formats.product import in_parallel, structure_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts
from semisparse.runtime.expand_gemm import fit
from semisparse.runtime.experts import Routing

GPU, DTYPE = torch.device("cuda"), torch.bfloat16
EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
TOKENS = (1, 8, 64, 2048)
WAYS = {"bitmask 32:64": ("bitmask", "32:64", {}), "gqs W4S50": ("gqs", "g16@50%", {"kind": "w4"}),
        "gqs W4": ("gqs", "g16@0%", {"kind": "w4"})}  # fmt: skip
COLUMNS = ("tokens", "way", "part", "us", "low_us", "high_us", "floor_us", "speedup", "error", "schedule", "machine")
BANDWIDTH, RATE = 4.28e12, 780e12

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Step:
    """The tokens of a step, x [tokens, HIDDEN], and the router's choice."""

    x: Tensor
    chosen: Tensor
    weights: Tensor


def steps(tokens: int) -> list[Step]:
    """Draw as many steps as read a few gigabytes; of one token each has other experts than those before it."""
    generator = torch.Generator(GPU).manual_seed(tokens)
    drawn = []
    for number in range({1: 48, 8: 24, 64: 8}.get(tokens, 4)):
        scores = torch.rand(tokens, EXPERTS, generator=generator, device=GPU)
        if tokens == 1:
            scores[:, (torch.arange(TOP_K, device=GPU) + TOP_K * number) % EXPERTS] += 1
        weights, chosen = scores.topk(TOP_K, dim=-1)
        x = torch.randn(tokens, HIDDEN, generator=generator, device=GPU).to(DTYPE)
        drawn.append(Step(x, chosen, (weights / weights.sum(-1, keepdim=True)).to(DTYPE)))
    return drawn


def stacks(way: str) -> tuple[Packed, Packed]:
    """Draw and pack the weights of all experts: gate and up, and down."""
    form, pattern, options = WAYS[way]
    packed = []
    for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        weight = torch.randn(EXPERTS * n, k, generator=torch.Generator(GPU).manual_seed(n), device=GPU)
        weight = (weight * parse_pattern(pattern).mask(weight.abs()) / k**0.5).to(DTYPE)
        packed.append(get_format(form).pack(weight, pattern, **options).to(GPU))
    return packed[0], packed[1]


def products_of(packed: tuple[Packed, Packed], tokens: int) -> tuple[ExpertsProduct, ExpertsProduct]:
    """Prepare both matmuls of a step of so many tokens."""
    gate_up = experts_product(packed[0], EXPERTS, tokens * TOP_K, DTYPE, "silu_mul")
    down = experts_product(packed[1], EXPERTS, tokens * TOP_K, DTYPE)
    if gate_up is None or down is None:
        raise KernelError("no kernel takes these experts")
    return gate_up, down


def layer(products: tuple[ExpertsProduct, ExpertsProduct], packed: tuple[Packed, Packed], step: Step) -> Tensor:
    """Compute the layer as `SparseExperts` does."""
    routing = Routing(step.chosen, EXPERTS)
    hidden = products[0](step.x, packed[0], None, routing)
    return routing.combine(products[1](hidden, packed[1], None, routing), step.weights)


class Grouped:
    """The layer with dense weights, as transformers computes it with torch's grouped_mm.

    Args:
        gate_up: [EXPERTS, 2 * INNER, HIDDEN].
        down: [EXPERTS, HIDDEN, INNER].
    """

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            num_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=HIDDEN, moe_intermediate_size=INNER
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            self._module = Qwen3MoeExperts(config)
        self._module.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        self._module.down_proj = torch.nn.Parameter(down, requires_grad=False)
        self._weights = gate_up, down

    @torch.no_grad()
    def layer(self, step: Step) -> Tensor:
        """Compute the layer."""
        return self._module(step.x, step.chosen, step.weights)

    def matmuls(self, step: Step) -> Call:
        """Return the two calls of grouped_mm alone, on sorted tokens."""
        experts, order = step.chosen.flatten().sort()
        ends = experts.bincount(minlength=EXPERTS).cumsum(0).int()
        x, hidden = step.x[order // TOP_K], torch.randn(len(order), INNER, device=GPU).to(DTYPE)
        gate_up, down = (weight.transpose(1, 2) for weight in self._weights)

        def both() -> Tensor:
            torch._grouped_mm(x, gate_up, ends)
            return torch._grouped_mm(hidden, down, ends)

        return both


def floor_us(step: Step, bits: float) -> float:
    """Return the larger of the time of the chosen experts' bytes and that of the operations."""
    weights = 3 * INNER * HIDDEN
    read = step.chosen.unique().numel() * weights * bits / 8 / BANDWIDTH
    return 1e6 * max(read, 2 * step.chosen.numel() * weights / RATE)


def error_of(y: Tensor, expected: Tensor) -> float:
    """Return the relative error."""
    return ((y.double() - expected.double()).norm() / expected.double().norm()).item()


def row(tokens: int, way: str, part: str, calls: Sequence[Call], **more: object) -> dict[str, str]:
    """Time calls, and return a row of the CSV."""
    for call in calls:
        call()
    timing = time_calls(calls, GPU)
    times = {"us": timing.us, "low_us": timing.low_us, "high_us": timing.high_us}
    print(f"{tokens:5} {way:28} {part:10} {timing.us:9.2f}  {more.get('schedule', '')}", flush=True)
    values = {"tokens": tokens, "way": way, "part": part, **{k: f"{v:.2f}" for k, v in times.items()}, **more}
    return dict.fromkeys(COLUMNS, "") | {k: str(v) for k, v in values.items()} | {"machine": device_facts(GPU).name}


def measure(ways: Sequence[str]) -> Iterator[dict[str, str]]:
    """Time the layer in every way."""
    rows, drawn = [], {tokens: steps(tokens) for tokens in TOKENS}
    generator = torch.Generator(GPU).manual_seed(1)
    shapes = ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    gate_up, down = (torch.randn(s, generator=generator, device=GPU, dtype=DTYPE) / s[2] ** 0.5 for s in shapes)
    dense, dense_us = Grouped(gate_up, down), {}
    for tokens, chosen in drawn.items():
        rows.append(row(tokens, "grouped_mm", "layer", [partial(dense.layer, s) for s in chosen]))
        dense_us[tokens] = float(rows[-1]["us"])
        rows[-1] |= {"speedup": "1.00", "floor_us": f"{floor_us(chosen[0], 16):.2f}"}
        yield rows[-1]
        yield row(tokens, "grouped_mm, matmuls alone", "matmuls", [dense.matmuls(s) for s in chosen])
    del dense, gate_up, down
    for way in ways:
        packed = stacks(way)
        in_parallel(partial(products_of, packed, tokens) for tokens in TOKENS)
        n = (2 * INNER, HIDDEN)
        unpacked = Grouped(*(p.unpack().view(EXPERTS, rows_, -1) for p, rows_ in zip(packed, n, strict=True)))
        bits = sum(p.nbytes for p in packed) * 8 / sum(p.shape[0] * p.shape[1] for p in packed)
        for tokens, chosen in drawn.items():
            products = products_of(packed, tokens)
            error = error_of(layer(products, packed, chosen[0]), unpacked.layer(chosen[0]))
            if not error < 1e-2:
                raise KernelError(f"{way} is wrong at {tokens} tokens: relative error {error:.3g}; it was not timed")
            measured = row(tokens, way, "layer", [partial(layer, products, packed, s) for s in chosen])
            speedup = dense_us[tokens] / float(measured["us"])
            yield measured | {
                "speedup": f"{speedup:.2f}", "floor_us": f"{floor_us(chosen[0], bits):.2f}", "error": f"{error:.1e}"
            }  # fmt: skip


def variants(packed: Packed, tokens: int, epilogue: str) -> Iterator[tuple[str, Callable[[], ExpertsProduct]]]:
    """Give each schedule worth trying for a stack: its name, and what prepares it."""
    pairs = bucket_of(tokens * TOP_K)
    problem = ExpertsProblem(pairs, EXPERTS, structure_of(packed.spec), DTYPE, GPU, epilogue)
    if tokens <= 64:
        for waves in (1, 2, 4):
            for shape in DECODE_SHAPES[problem.spec.format]:
                if epilogue == "silu_mul" and shape == (1, 8, 2):
                    continue
                yield f"decode {shape} waves {waves}", _decode(problem, waves, shape)
    if tokens >= 8:
        for tile_m in GEMM_TILES[tokens]:
            for shape in GEMM_SHAPES:
                prepare = _gemm(problem, tile_m, shape)
                if prepare is not None:
                    yield f"gemm {tile_m} {shape}", prepare


DECODE_SHAPES = {"gqs": (16, 8, 4), "bitmask": ((2, 4, 2), (2, 8, 2), (2, 2, 2), (4, 2, 2), (1, 8, 2), (2, 4, 1))}
GEMM_TILES = {8: (16,), 64: (16,), 2048: (128, 160, 192)}
GEMM_SHAPES = ((2, 1, 1), (2, 2, 1), (3, 1, 1), (1, 1, 2))


def _decode(problem: ExpertsProblem, waves: int, shape: object) -> Callable[[], ExpertsProduct]:
    facts = device_facts(GPU)
    if problem.spec.format == "gqs":
        gqs_schedule.EXPERT_WARPS = dict.fromkeys((1, 2, 8), shape)
        gqs_schedule.EXPERT_WAVES = dict.fromkeys((1, 2, 8), waves)
        return partial(gqs_experts.prepare_decode, problem, gqs_schedule.choose_experts(problem, facts))
    bitmask_schedule.EXPERT_SHAPES = bitmask_schedule.EXPERT_SHAPES_GATED = {1: (shape,), 8: (shape,)}
    bitmask_schedule.EXPERT_WAVES = dict.fromkeys((1, 8), waves)
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


def sweep(ways: Sequence[str]) -> Iterator[dict[str, str]]:
    """Time each matmul of the layer, with its SiLU, in every schedule worth trying."""
    for way in ways:
        for part, packed, epilogue in zip(("gate_up", "down"), stacks(way), ("silu_mul", "none"), strict=True):
            for tokens in TOKENS:
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


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--sweep", action="store_true", help="every schedule instead")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    options = parser.parse_args()
    rows: list[dict[str, str]] = []
    for measured in (sweep if options.sweep else measure)(options.ways.split(",")):
        rows.append(measured)
        write_rows(options.csv, rows, COLUMNS)


if __name__ == "__main__":
    main()
