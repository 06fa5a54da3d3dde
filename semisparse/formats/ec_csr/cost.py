"""Passes of a matmul for the roofline model, and the bytes of a weight on a GPU."""

from __future__ import annotations

import math

from semisparse.formats.base import WeightSpec
from semisparse.formats.ec_csr.storage.deltas import BOTH, TILES, layout_of
from semisparse.formats.ec_csr.storage.tiles import BLOCK, COLUMNS, LONGEST, ROWS, tile_shape
from semisparse.formats.kernel import Pass, Problem, one_pass_cost

MAX_DECODE_TOKENS = 16

FEW_TOKENS = 2
"""Tokens up to which lists are read where the weight has mask tiles, too."""

UNPACKING = 14
"""Operations on fp32 units per kept weight and token. Measured on an H200 for `decode_mma` at 8 and 16 tokens: 10 to
18."""

EXPANDING = 15
"""The same per weight, zeros included, for mask tiles. Measured on an H200 at 28672 x 8192 and 8 to 32 tokens, where it
is what takes the time: 74 to 79 us."""


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Return the passes of a matmul."""
    layout = layout_of(problem.params)
    if layout == TILES:
        return one_pass_cost(problem, weight_bytes, EXPANDING * problem.n * problem.k)
    if layout == BOTH:
        tiles = min(weight_bytes, _tile_bytes(problem.spec))
        if problem.m > FEW_TOKENS:
            return one_pass_cost(problem, tiles, EXPANDING * problem.n * problem.k)
        weight_bytes -= tiles
    if problem.m <= MAX_DECODE_TOKENS:
        kept = problem.n * problem.k * problem.pattern.density
        return one_pass_cost(problem, weight_bytes, UNPACKING * problem.m * kept)
    dense_bytes = problem.n * problem.k * problem.weight_dtype.itemsize
    return (Pass(weight_bytes + dense_bytes, 0, "fp32"), *one_pass_cost(problem, dense_bytes))


def gpu_bytes(spec: WeightSpec, stored: float) -> float:
    """Return about the bytes of a weight in the layout of ``spec``: lists, mask tiles, or both.

    Args:
        spec: as `spec_on_gpu` gives it. Mask tiles are taken to be those of a random mask; lists are exact. With masks
            by magnitude two small models took 0.97 to 1.02 of the bytes predicted, single layers up to 1.21.
        stored: bytes of the lists.
    """
    layout = layout_of(spec.params)
    return (0 if layout == TILES else stored) + (_tile_bytes(spec) if layout in (TILES, BOTH) else 0)


def _tile_bytes(spec: WeightSpec) -> float:
    """Return the bytes of a random weight's mask tiles, whose lanes are as long as their longest."""
    kept = 2 * BLOCK * spec.pattern.density
    longest = kept + LONGEST * math.sqrt(kept * (1 - spec.pattern.density))
    weights = math.prod(tile_shape(*spec.shape)) * ROWS * COLUMNS  # tiles at the edges are padded
    return weights * (1 + 8 * spec.dtype.itemsize * min(1, longest / (2 * BLOCK))) / 8
