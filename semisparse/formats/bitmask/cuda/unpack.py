"""Unpack the whole weight and let cuBLAS multiply: for many tokens, and for weights that cannot be stored in tiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.cuda import operands
from semisparse.formats.bitmask.cuda.schedule import choose_unpack
from semisparse.formats.bitmask.storage import disk
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.formats.bitmask.storage.layouts import layout_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.nvrtc import Defines

SOURCE = CudaSource(
    Path(__file__).with_name("unpack.cu"),
    tuple(
        {"SCALAR": "__half", "BITS": bits, "KEEP": keep, "WARPS": 4, "STAGES": 2}
        for bits, keep in ((0, 31), (0, 64), (8, 32), (4, 31))
    ),
)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if layout_of(problem.params) == "tiles":
        return operands.refusal(problem)
    if problem.dtype != problem.spec.dtype:
        return f"x and w must have one dtype, got {problem.dtype} and {problem.spec.dtype}"
    return None


def prepare(problem: Problem) -> Product:
    """Return the matmul: the weight is unpacked, by unpack.cu from ``tiles`` or by torch from ``rows``, for cuBLAS."""
    unpack = prepare_unpack(problem) if layout_of(problem.params) == "tiles" else disk.unpack
    return lambda x, packed, bias: multiply_dense(x, unpack(packed), bias)


def prepare_unpack(problem: Problem) -> Callable[[Packed], Tensor]:
    """Compile and load unpack.cu; return a function from a weight in tiles to [N, K], rows at multiples of 16 bytes."""
    n, k, device = problem.n, problem.k, problem.device
    pitch = -(-k // 8) * 8
    weight = tiling(problem.spec)
    schedule = choose_unpack(weight, device_facts(device))
    scalar = operands.SCALARS[problem.dtype]
    defines: Defines = {
        "SCALAR": scalar,
        "BITS": weight.bits,
        "KEEP": weight.keep,
        "WARPS": schedule.warps,
        "STAGES": schedule.stages,
    }
    kernel = SOURCE.build("semisparse_bitmask_unpack", defines, schedule.shared).load(device)

    grid, threads, tile_count = (schedule.ctas, 1, 1), 32 * schedule.warps, weight.row_tiles * weight.column_tiles

    def unpack(packed: Packed) -> Tensor:
        tiles = packed.tensors["tiles"]
        w = tiles.new_empty(n, pitch, dtype=packed.dtype)
        kernel(
            grid, threads,
            tiles=tiles, w=w, n=n, pitch=pitch, tile_count=tile_count, column_tiles=weight.column_tiles,
        )  # fmt: skip
        return w if pitch == k else w[:, :k]

    return unpack
