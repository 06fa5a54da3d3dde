"""One layer of experts, shapes of Qwen3-30B-A3B, beside torch's grouped_mm in bfloat16 and humming's kernel in int4.

    python benchmarks/experts.py results/h200/experts.csv
    python benchmarks/experts.py results/h200/sweeps/experts.csv --sweep

Needs a GPU, and for humming the package humming-kernels. Random weights: 128 experts, gate and up joined [1536, 2048],
down [2048, 768], top 8 of uniformly drawn scores, or drawn in proportion to 1 / rank (``zipf``). A layer is everything
from x and the router's choice to the weighted sum: sorting or finding the pairs, both matmuls, SiLU. `grouped_mm` is
transformers' own layer around torch's grouped_mm. The part `matmuls` is both calls alone: of grouped_mm and humming on
tokens that are sorted already, without SiLU; of semisparse with sorting and SiLU. humming's layer begins with sorted
tokens. CUDA graphs on all sides; each call of a graph has other tokens and other experts, so that their weights come
from memory. Every output is compared with the layer of unpacked weights before it is timed. The floor is the bytes of
the chosen experts at 4.28 TB/s, or the operations at 780 TFLOP/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from experts_layer import (
    COLUMNS,
    DTYPE,
    EXPERTS,
    GPU,
    SHAPES,
    TOKENS,
    TOP_K,
    WAYS,
    Call,
    Step,
    error_of,
    floor_us,
    row,
    stacks,
    steps,
)
from experts_rivals import Grouped, Humming
from experts_sweep import sweep
from rows import write_rows
from torch import Tensor

from semisparse.errors import KernelError
from semisparse.formats import Packed
from semisparse.formats.kernel import ExpertsProduct, in_parallel
from semisparse.nn.experts_product import experts_product
from semisparse.runtime.experts import Routing

ROUTED = [*((tokens, "uniform") for tokens in TOKENS), *((tokens, "zipf") for tokens in TOKENS[1:])]
"""Tokens and routing of each measurement."""


def products_of(packed: tuple[Packed, Packed], tokens: int) -> tuple[ExpertsProduct, ExpertsProduct]:
    """Prepare both matmuls of a step of so many tokens."""
    gate_up = experts_product(packed[0], EXPERTS, tokens * TOP_K, DTYPE, "silu_mul")
    down = experts_product(packed[1], EXPERTS, tokens * TOP_K, DTYPE)
    if gate_up is None or down is None:
        raise KernelError("no kernel takes these experts")
    return gate_up, down


def matmuls(products: tuple[ExpertsProduct, ExpertsProduct], packed: tuple[Packed, Packed], step: Step) -> Tensor:
    """Compute both matmuls, with SiLU."""
    return _pairs(products, packed, step, Routing(step.chosen, EXPERTS))


def layer(products: tuple[ExpertsProduct, ExpertsProduct], packed: tuple[Packed, Packed], step: Step) -> Tensor:
    """Compute the layer as `SparseExperts` does."""
    routing = Routing(step.chosen, EXPERTS)
    return routing.combine(_pairs(products, packed, step, routing), step.weights)


def _pairs(
    products: tuple[ExpertsProduct, ExpertsProduct], packed: tuple[Packed, Packed], step: Step, routing: Routing
) -> Tensor:
    hidden = products[0](step.x, packed[0], None, routing)
    return products[1](hidden, packed[1], None, routing)


class Dense:
    """Times of the layer around grouped_mm, and of the two calls alone."""

    def __init__(self, drawn: dict[tuple[int, str], list[Step]]) -> None:
        generator, self._drawn = torch.Generator(GPU).manual_seed(1), drawn
        weights = [torch.randn(EXPERTS, *s, generator=generator, device=GPU, dtype=DTYPE) / s[1] ** 0.5 for s in SHAPES]
        self._layer = Grouped(*weights)
        self.us: dict[tuple[int, str], float] = {}

    def measure(self) -> Iterator[dict[str, str]]:
        """Time both at each number of tokens and routing."""
        for (tokens, routing), chosen in self._drawn.items():
            measured = row(
                tokens, "grouped_mm", "layer", [partial(self._layer.layer, s) for s in chosen], routing=routing
            )
            self.us[tokens, routing] = float(measured["us"])
            yield measured | {"speedup": "1.00", "floor_us": f"{floor_us(chosen[0], 16):.2f}"}
            yield row(tokens, "grouped_mm", "matmuls", [self._layer.matmuls(s) for s in chosen], routing=routing)


def measure(ways: Sequence[str]) -> Iterator[dict[str, str]]:
    """Time the layer in every way."""
    drawn = {key: steps(*key) for key in ROUTED}
    dense = Dense(drawn)
    yield from dense.measure()
    us = dense.us
    del dense
    for way in ways:
        for (tokens, routing), calls, expected, bits in (humming if way == HUMMING else packed_in)(way, drawn):
            if not (error := error_of(calls["layer"][0](), expected)) < 1e-2:
                raise KernelError(f"{way} is wrong at {tokens} tokens: relative error {error:.3g}; it was not timed")
            for part, timed in calls.items():
                measured = row(tokens, way, part, timed, routing=routing, error=f"{error:.1e}")
                if part == "layer":
                    measured |= {
                        "speedup": f"{us[tokens, routing] / float(measured['us']):.2f}",
                        "floor_us": f"{floor_us(drawn[tokens, routing][0], bits):.2f}",
                    }
                yield measured


HUMMING = "humming int4 g128"

Timed = tuple[tuple[int, str], dict[str, list[Call]], Tensor, float]
"""Tokens and routing, the calls to time of each part, the first layer's expected output, bits per weight."""


def packed_in(way: str, drawn: dict[tuple[int, str], list[Step]]) -> Iterator[Timed]:
    """Give the calls of semisparse's layer."""
    packed = stacks(way)
    in_parallel(partial(products_of, packed, tokens) for tokens in TOKENS)
    unpacked = Grouped(*(p.unpack().view(EXPERTS, *shape) for p, shape in zip(packed, SHAPES, strict=True)))
    bits = sum(p.nbytes for p in packed) * 8 / sum(p.shape[0] * p.shape[1] for p in packed)
    for (tokens, routing), chosen in drawn.items():
        products = products_of(packed, tokens)
        calls = {
            "layer": [partial(layer, products, packed, step) for step in chosen],
            "matmuls": [partial(matmuls, products, packed, step) for step in chosen],
        }
        yield (tokens, routing), calls, unpacked.layer(chosen[0]), bits


def humming(way: str, drawn: dict[tuple[int, str], list[Step]]) -> Iterator[Timed]:
    """Give the calls of humming's layer."""
    experts = Humming()
    unpacked = Grouped(*experts.weights)
    for (tokens, routing), chosen in drawn.items():
        prepared = [experts.prepared(step) for step in chosen]
        calls = {"layer": [step.layer for step in prepared], "matmuls": [step.matmuls for step in prepared]}
        yield (tokens, routing), calls, unpacked.layer(chosen[0]), 4 + 16 / 128


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--sweep", action="store_true", help="every schedule instead")
    parser.add_argument("--ways", default=",".join((*WAYS, HUMMING)), help="comma-separated")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="of a sweep, comma-separated")
    options = parser.parse_args()
    rows: list[dict[str, str]] = []
    ways, tokens = options.ways.split(","), tuple(map(int, options.tokens.split(",")))
    for measured in sweep(ways, tokens) if options.sweep else measure(ways):
        rows.append(measured)
        write_rows(options.csv, rows, COLUMNS)


if __name__ == "__main__":
    main()
