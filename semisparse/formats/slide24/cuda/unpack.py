"""The kernel ``unpack``: unpacks the whole weight for cuBLAS, with unpack.cu if its layout is ``tiles``."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.slide24.cuda import schedule
from semisparse.formats.slide24.storage import gpu
from semisparse.formats.slide24.storage.disk import scaled, value_dtype, window_of
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource

SOURCE = CudaSource(
    Path(__file__).with_name("unpack.cu"), tuple({"WIDTH": width} for width in (1, 2)), architectures=("sm_90a",)
)


def refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.dtype != problem.weight_dtype:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    return None


def prepare(problem: Problem) -> Product:
    """Return the matmul. Loads unpack.cu if it can unpack the weight, else torch unpacks it. x is not quantised."""
    if gpu.layout_of(problem.params) != "tiles" or _span_refused(problem):
        return lambda x, packed, bias: multiply_dense(x, gpu.unpack(packed), bias)
    (n, k), window, dtype = problem.spec.shape, window_of(problem.pattern), value_dtype(problem.spec)
    span = schedule.unpack_span(window, dtype.itemsize)
    k_tiles, row_tiles = gpu.tile_counts(problem.spec)
    grid = (-(-k_tiles // span.k_tiles), -(-n // gpu.ROWS), 1)
    build = SOURCE.build("semisparse_slide24_unpack", {"WIDTH": dtype.itemsize}, span.shared_bytes)
    kernel = build.load(problem.device)

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        dense = x.new_empty((n, k), dtype=dtype)
        kernel(
            grid, schedule.UNPACK_THREADS, tiles=packed.tensors["tiles"], dense=dense, n=n, k=k, k_tiles=k_tiles,
            row_tiles=row_tiles, span=span.k_tiles, columns=span.columns, group_pairs=window // 2,
        )  # fmt: skip
        return multiply_dense(x, scaled(dense, packed), bias)

    return matmul


def _span_refused(problem: Problem) -> bool:
    """Return whether a span does not fit in shared memory. The narrowest such window has 116 columns (Hopper)."""
    span = schedule.unpack_span(window_of(problem.pattern), value_dtype(problem.spec).itemsize)
    return span.shared_bytes > device_facts(problem.device).shared_per_cta - schedule.SMALL_STATIC_SHARED
