"""The kernel `unpack`, for any number of tokens, kind and group size: unpacks the weight, then calls cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.gqs.cuda import quantise_x
from semisparse.formats.gqs.cuda.quantise_x import ELEMENTS
from semisparse.formats.gqs.storage.disk import TENSORS, code_bits, group_size, quantises_x
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.nvrtc import Defines

WARPS = 8
"""Warps per CTA; each has a chunk."""

ROW_ALIGNMENT = 8
"""Rows of the dense weight begin at multiples of 8 elements, because a lane stores 8 at once."""


def _defines(dtype: torch.dtype, bits: int, size: int) -> Defines:
    return {"SCALAR": ELEMENTS[dtype], "BITS": bits, "GROUP_SIZE": size, "WARPS": WARPS}


# The variants are the extremes of what is compiled.
SOURCE = CudaSource(
    Path(__file__).with_name("unpack.cu"),
    (
        _defines(torch.float16, 4, 16),
        _defines(torch.bfloat16, 2, 4),
        _defines(torch.bfloat16, 3, 128),
        _defines(torch.float32, 8, 128),
    ),
)


def refusal(problem: Problem) -> str | None:
    """Return why `prepare` cannot compute ``problem`` here, or None if it can."""
    if problem.weight_dtype != problem.dtype:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    return cuda_refusal(problem.device)


def prepare(problem: Problem) -> Product:
    """Return the matmul that unpacks the whole weight and calls cuBLAS."""
    unpack = prepare_unpack(problem)
    if not quantises_x(problem.params):
        return lambda x, packed, bias: multiply_dense(x, unpack(packed), bias)
    quantise = quantise_x.prepare(problem.device, problem.dtype)
    return lambda x, packed, bias: multiply_dense(quantise(x), unpack(packed), bias)


def prepare_unpack(problem: Problem) -> Callable[[Packed], Tensor]:
    """Return a function that unpacks a weight as `Packed.unpack` does, with a row pitch of a multiple of 8 elements."""
    n, k, dtype = problem.n, problem.k, problem.weight_dtype
    pitch, size = -(-k // ROW_ALIGNMENT) * ROW_ALIGNMENT, group_size(problem.pattern)
    defines = _defines(dtype, code_bits(problem.params, size), size)
    kernel = SOURCE.build("semisparse_gqs_unpack", defines).load(problem.device)

    def unpack(packed: Packed) -> Tensor:
        stored = {name: packed.tensors[name].contiguous() for name in TENSORS}
        w = stored["masks"].new_empty(n, pitch, dtype=dtype)
        row_tiles, column_tiles = stored["masks"].shape
        chunks = row_tiles * column_tiles
        grid = (-(-chunks // WARPS), 1, 1)
        kernel(grid, 32 * WARPS, pdl=False, **stored, w=w, n=n, pitch=pitch, chunks=chunks, column_tiles=column_tiles)
        return w if pitch == k else w[:, :k]

    return unpack
