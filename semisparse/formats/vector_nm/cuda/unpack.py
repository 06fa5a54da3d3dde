"""Kernel `unpack`: unpacks the whole weight for cuBLAS; any vector length, any M."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.cuda.operands import operands_refusal
from semisparse.formats.vector_nm.storage.disk import groups_and_slots, vectors_of
from semisparse.patterns import VectorNM
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.nvrtc import Defines

THREADS = 256
TILE_ROWS, MIN_TILE_COLUMNS = 32, 128
"""Rows and columns of the dense tile of a CTA; a window of more columns makes the tile as wide as the window."""


def defines(pattern: VectorNM, itemsize: int) -> Defines:
    """Return the macros of unpack.cu."""
    return {"BYTES": itemsize, "KEEP": pattern.keep, "WINDOW": pattern.window, "LENGTH": pattern.length}


SOURCE = CudaSource(
    Path(__file__).with_name("unpack.cu"),
    tuple(
        defines(VectorNM(*pattern), itemsize)
        for pattern in ((16, 32, 32), (5, 7, 1), (64, 256, 128))
        for itemsize in (2, 4)
    ),
)

refusal = operands_refusal


def prepare(problem: Problem) -> Product:
    """Return the matmul for ``problem``: unpacks the weight, then calls cuBLAS."""
    unpack = prepare_unpack(problem)
    return lambda x, packed, bias: multiply_dense(x, unpack(packed), bias)


def prepare_unpack(problem: Problem) -> Callable[[Packed], Tensor]:
    """Return the function that unpacks a weight: Packed -> [N, K] in the weight's dtype."""
    (n, k), itemsize, pattern = problem.spec.shape, problem.weight_dtype.itemsize, vectors_of(problem.pattern)
    groups, slots = groups_and_slots(problem.spec)
    tile_columns = max(1, MIN_TILE_COLUMNS // pattern.window) * pattern.window
    group_rows = min(pattern.length, TILE_ROWS)
    row_tiles = -(-groups // (TILE_ROWS // group_rows)) * -(-pattern.length // group_rows)
    grid = (-(-k // tile_columns), row_tiles, 1)
    row_words = -(-tile_columns * itemsize // 4) | 1
    build = SOURCE.build("semisparse_vector_nm_unpack", defines(pattern, itemsize), 4 * row_words * TILE_ROWS)
    kernel = build.load(problem.device)

    def unpack(packed: Packed) -> Tensor:
        values, positions = packed.tensors["values"].contiguous(), packed.tensors["positions"].contiguous()
        weight = values.new_empty(n, k)
        tensors = {"values": values, "positions": positions, "weight": weight}
        kernel(grid, THREADS, pdl=False, **tensors, n=n, k=k, groups=groups, slots=slots)
        return weight

    return unpack
