"""Unpack the whole weight and let cuBLAS multiply: for many tokens, and for weights that cannot be stored in tiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.cuda import operands
from semisparse.formats.bitmask.storage import disk
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.formats.bitmask.storage.layouts import layout_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime import tile_unpack
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.tile_unpack import choose_unpack

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
    weight = tiling(problem.spec)
    schedule = choose_unpack(weight, device_facts(problem.device))
    defines: Defines = {"BITS": weight.bits, "KEEP": weight.keep, **schedule.defines(problem.dtype)}
    kernel = SOURCE.build("semisparse_bitmask_unpack", defines, schedule.shared).load(problem.device)
    unpack = tile_unpack.prepare(kernel, schedule, weight, problem.spec.shape)
    return lambda packed: unpack({"tiles": packed.tensors["tiles"]}, packed.dtype, packed.device)
