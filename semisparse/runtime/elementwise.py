"""Element-wise CUDA kernels that several parts of the project launch, and how wide their loads are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from semisparse.runtime.device import device_facts
from semisparse.runtime.expand_gemm import Permutation, PermutedX
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.nvrtc import HEADERS, Defines

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
"""By dtype, the macro SCALAR."""

VECTORS: tuple[Defines, ...] = (
    {"SCALAR": "__half", "VECTOR": 8, "PERMUTED": 0},
    {"SCALAR": "__nv_bfloat16", "VECTOR": 1, "PERMUTED": 0},
    {"SCALAR": "float", "VECTOR": 4, "PERMUTED": 0},
)
"""Variants that tests compile."""

SILU_MUL = CudaSource(
    HEADERS / "elementwise" / "silu_mul.cu", (*VECTORS, {"SCALAR": "__nv_bfloat16", "VECTOR": 2, "PERMUTED": 1})
)

THREADS = 256
"""Threads per CTA of silu_mul.cu and combine.cu."""

PERMUTED_TILES = THREADS // 32
"""Column tiles per CTA of silu_mul.cu with PERMUTED: one per warp."""


def vector_of(dtype: torch.dtype, counts: Sequence[int], tensors: Sequence[Tensor | None]) -> int:
    """Return how many values a thread loads at once: 16 bytes, or one value where a count or an address forbids it."""
    values = 16 // dtype.itemsize
    aligned = all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)
    return values if aligned and not any(count % values for count in counts) else 1


def silu_mul(gate_up: Tensor, starts: Sequence[int], columns: int) -> Tensor:
    """Return ``silu(gate) * up`` on a GPU; ``silu(gate)`` is rounded to the dtype before it is multiplied.

    Args:
        gate_up: [M, stride], contiguous.
        starts: the first columns of gate and up.
        columns: number of columns of gate, and of up.
    Returns:
        [M, columns] in the same dtype.
    """
    out, stride = gate_up.new_empty(len(gate_up), columns), gate_up.shape[1]
    vector = vector_of(out.dtype, [columns, stride, *starts], [gate_up])
    defines: Defines = {"SCALAR": SCALARS[out.dtype], "VECTOR": vector, "PERMUTED": 0}
    SILU_MUL.build("semisparse_silu_mul", defines).load(out.device)(
        (len(out), -(-columns // (THREADS * vector)), 1), THREADS, pdl=device_facts(out.device).has_pdl,
        gate_up=gate_up, out=out, columns=columns, stride=stride, gate_start=starts[0], up_start=starts[1],
    )  # fmt: skip
    return out


def has_aligned_pairs(gate_up: Tensor, starts: Sequence[int], columns: int) -> bool:
    """Return whether two consecutive values of gate, and of up, can be loaded at once."""
    counts = (columns, gate_up.shape[1], *starts)
    return not any(count % 2 for count in counts) and gate_up.data_ptr() % 4 == 0


def silu_mul_permuted(gate_up: Tensor, starts: Sequence[int], columns: int, permutation: Permutation) -> PermutedX:
    """Compute `silu_mul` of 16-bit values, in the order in which a GEMM on Hopper reads it.

    Args:
        gate_up: [M, stride], contiguous; `has_aligned_pairs`.
        starts: the first columns of gate and up.
        columns: number of columns of gate, and of up.
        permutation: the order.
    """
    stride = gate_up.shape[1]
    out = permutation.allocate(len(gate_up), gate_up.dtype, gate_up.device)
    build = SILU_MUL.build("semisparse_silu_mul_permuted", {"SCALAR": SCALARS[out.dtype], "VECTOR": 2, "PERMUTED": 1})
    replace(build, shares_sm=True).load(gate_up.device)(
        (out.launch.tokens, -(-permutation.weight.column_tiles // PERMUTED_TILES), 1), THREADS, pdl=True,
        gate_up=gate_up, columns=columns, stride=stride, gate_start=starts[0], up_start=starts[1], **out.arguments,
    )  # fmt: skip
    return out
