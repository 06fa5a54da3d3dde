"""GPU products for many tokens: x transposed and the columns of each stage found, then one tiled product."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.errors import KernelError
from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.layout import vectors_of
from semisparse.formats.vector_nm.tiling import SIMT, TENSOR, Tiling, choose_tiling, lengths_of, tile
from semisparse.patterns import VectorNM, parse_pattern
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel, address
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin, unavailable

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}

MOST_DENSITY = 0.3
"""Of a 16-bit product that tensor cores are to compute without unpacking.

With an earlier build of tensor.cu 156 us at 16:32v32, 130 at 12:32, 102 at 8:32 and 69 at 4:32 (bfloat16, M = 2,048,
4096 x 4096, H200), where cuBLAS takes 88 and unpacking moves bytes for 9 to 12.
"""

PREPARE_THREADS = 256
TRANSPOSED_TILE = 64
TRANSPOSED_TOKENS = 64
"""Of a tile in transpose.cu."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def tiled_defines(tiling: Tiling, dtype: torch.dtype) -> Defines:
    """Give what simt.cu or tensor.cu is compiled for."""
    shape = tiling.shape
    return {
        "SCALAR": SCALARS[dtype],
        "TOKENS": shape.tokens,
        "ROWS": shape.rows,
        "THREADS": tiling.threads,
        "PER_WARP" if tiling.itemsize == 2 else "PER_THREAD": shape.per_thread,
        "LENGTH": tiling.length,
        "SLOTS": tiling.slots,
        "COLUMNS": tiling.columns,
        "STAGES": tiling.stages,
        "PACKED": int(tiling.packed),
    }


def _common_tilings(dtype: torch.dtype) -> tuple[Defines, ...]:
    """What is compiled depends on pattern and shape: here is each tile and strategy, and the shortest vectors."""
    shapes, shortest = (TENSOR, "16:32v8") if dtype.itemsize == 2 else (SIMT, "16:32v4")
    wanted = [(pattern, shape, pattern == "4:32v32") for shape in shapes for pattern in ("16:32v32", "4:32v32")]
    wanted.append((shortest, shapes[1], False))
    patterns = [(parse_pattern(pattern), shape, packed) for pattern, shape, packed in wanted]
    found = [
        tile(pattern, shape, dtype.itemsize, packed)
        for pattern, shape, packed in patterns
        if isinstance(pattern, VectorNM)
    ]
    return tuple(tiled_defines(tiling, dtype) for tiling in found if tiling)


PREPARE_SOURCE = CudaSource(Path(__file__).with_name("prepare.cu"), ({"BYTES": 2}, {"BYTES": 4}))

TRANSPOSE_SOURCE = CudaSource(Path(__file__).with_name("transpose.cu"), ({"TOKENS": TRANSPOSED_TOKENS},))

SIMT_SOURCE = CudaSource(Path(__file__).with_name("simt.cu"), _common_tilings(torch.float32))

TENSOR_SOURCE = CudaSource(
    Path(__file__).with_name("tensor.cu"), (*_common_tilings(torch.float16), _common_tilings(torch.bfloat16)[0])
)

SOURCES = (PREPARE_SOURCE, TRANSPOSE_SOURCE, SIMT_SOURCE, TENSOR_SOURCE)


def simt_refusal(problem: Problem) -> str | None:
    """Say why `prepare` cannot compute ``problem`` on CUDA cores here, or None if it can."""
    if problem.dtype != torch.float32:
        return f"computes float32, got {problem.dtype}"
    return _tiled_refusal(problem)


def tensor_refusal(problem: Problem) -> str | None:
    """Say why `prepare` cannot compute ``problem`` on tensor cores here, or None if it can."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16, got {problem.dtype}"
    return _tiled_refusal(problem)


def tensor_pays(problem: Problem) -> bool:
    """Say whether so few weights are kept that the product on tensor cores is faster than unpacking for cuBLAS."""
    return vectors_of(problem.pattern).density <= MOST_DENSITY


def _tiled_refusal(problem: Problem) -> str | None:
    if problem.m < 1:
        return "takes 1 token or more, got none"
    reason = machine_refusal(problem)
    if reason:
        return reason
    if _tiling(vectors_of(problem.pattern), problem.m, problem.n, problem.dtype, problem.device) is None:
        lengths = ", ".join(str(length) for length in lengths_of(problem.dtype.itemsize))
        return f"takes vectors of {lengths} rows whose stages fit shared memory, not {problem.pattern}"
    return None


def machine_refusal(problem: Problem) -> str | None:
    """Say why no kernel that is compiled here can compute ``problem``, or None if one may."""
    if problem.weight_dtype != problem.dtype:
        return f"x and w have one dtype, got {problem.dtype} and {problem.weight_dtype}"
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    return unavailable()


def _tiling(pattern: VectorNM, m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tiling | None:
    return choose_tiling(pattern, m, n, dtype.itemsize, device_facts(device).processors, shared_limit(device))


@cache
def shared_limit(device: torch.device) -> int:
    """Give the bytes of shared memory that a block may have on a GPU.

    Raises:
        KernelError: the driver does not say.
    """
    from cuda.bindings import driver

    index = device.index if device.index is not None else torch.cuda.current_device()
    wanted = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    status, limit = driver.cuDeviceGetAttribute(wanted, index)
    if status:
        raise KernelError(f"the driver does not tell the shared memory of GPU {index}: {status.name}")
    return int(limit)


def prepare(problem: Problem) -> Product:
    """Prepare to multiply many tokens, with the tiling whose estimated time is least.

    Args:
        problem: x and w float32 (CUDA cores), float16 or bfloat16 (tensor cores); sums are float32.
    Raises:
        KernelError: no tiling fits shared memory.
    """
    pattern = vectors_of(problem.pattern)
    tiling = _tiling(pattern, problem.m, problem.n, problem.dtype, problem.device)
    if tiling is None:
        raise KernelError(f"no tile of {pattern} fits shared memory")
    return prepare_tiled(problem, tiling)


def prepare_tiled(problem: Problem, tiling: Tiling) -> Product:
    """Prepare to multiply with a given tiling, as `prepare` does."""
    (m, n), (groups, total) = (problem.m, problem.n), stored_slots(problem)
    stage, kernel = _prepare_stages(problem, tiling), _tiled_kernel(problem.device, tiling, problem.dtype)
    row_blocks, stages = stages_of(problem, tiling)
    pitch = -(-m // tiling.shape.tokens) * tiling.shape.tokens
    grid = (pitch // tiling.shape.tokens, row_blocks, 1)
    sizes = (m, n, pitch, groups, total, stages, int(n * problem.dtype.itemsize % 16 == 0))

    def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x, values = aligned(x), aligned(packed.tensors["values"])
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        by_column, columns, slots = stage(x, packed.tensors["positions"].contiguous())
        y = x.new_empty(m, n)
        pointers = map(address, (by_column, values, columns, slots, bias, y))
        kernel(problem.device, grid, tiling.threads, *pointers, *sizes)
        return y

    return multiply


def stored_slots(problem: Problem) -> tuple[int, int]:
    """Count the weight's groups of rows, and the slots of each."""
    pattern = vectors_of(problem.pattern)
    return -(-problem.n // pattern.length), -(-problem.k // pattern.window) * pattern.keep


def stages_of(problem: Problem, tiling: Tiling) -> tuple[int, int]:
    """Count the tiles of rows of a product, and the stages along K."""
    return -(-problem.n // tiling.shape.rows), -(-stored_slots(problem)[1] // tiling.slots)


def _prepare_stages(
    problem: Problem, tiling: Tiling
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None, Tensor]]:
    """Prepare to transpose x and find each slot's column in its stage.

    Returns:
        (x, positions) -> by_column: [columns, tokens] of x, zeros filled up to whole windows or stages and whole tiles
        of tokens; columns: [row_blocks, stages, columns] int32 of a packed tiling, else None; slots: [row_blocks,
        stages, groups, slots] int32, as prepare.cu describes them.
    """
    (m, k), pattern, (groups, total) = (problem.m, problem.k), vectors_of(problem.pattern), stored_slots(problem)
    row_blocks, stages = stages_of(problem, tiling)
    width = -(-k // pattern.window) * pattern.window if tiling.packed else stages * tiling.columns
    pitch = -(-m // tiling.shape.tokens) * tiling.shape.tokens
    tiles = -(-width // TRANSPOSED_TILE) * -(-pitch // TRANSPOSED_TILE)
    parts = row_blocks * stages * (1 if tiling.packed else tiling.groups)
    grid = (tiles + -(-parts // (PREPARE_THREADS // 32)), 1, 1)
    kernel = _prepare_kernel(problem.device, problem.dtype.itemsize, pattern, tiling.slots)
    slot_sizes = (pattern.keep, pattern.window, groups, total, pattern.length, tiling.shape.rows, tiling.slots, stages)
    stage_sizes = (tiling.columns, tiling.column_bytes, tiles, parts)

    def stage(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        by_column = x.new_empty(width, pitch)
        slots = positions.new_empty(row_blocks, stages, tiling.groups, tiling.slots, dtype=torch.int32)
        columns = positions.new_empty(row_blocks, stages, tiling.columns, dtype=torch.int32) if tiling.packed else None
        pointers = (x.data_ptr(), by_column.data_ptr(), m, k, width, pitch, *map(address, (positions, columns, slots)))
        kernel(problem.device, grid, PREPARE_THREADS, *pointers, *slot_sizes, *stage_sizes)
        return by_column, columns, slots

    return stage


def prepare_by_column(problem: Problem, pitch: int) -> Callable[[Tensor], Tensor]:
    """Prepare to transpose x [M, K], 16 bits, to [whole windows, pitch]: zeros past K and M."""
    (m, k), pattern, device = (problem.m, problem.k), vectors_of(problem.pattern), problem.device
    width = -(-k // pattern.window) * pattern.window
    if k % 8 == 0:
        kernel = _transpose_kernel(device)
        rest: tuple[int | None, ...] = ()
        grid = (-(-width // TRANSPOSED_TILE), -(-pitch // TRANSPOSED_TOKENS), 1)
    else:
        kernel = _prepare_kernel(device, 2, pattern, pattern.keep)
        grid = (-(-width // TRANSPOSED_TILE) * -(-pitch // TRANSPOSED_TILE), 1, 1)
        rest = (None, None, None, *[0] * 10, grid[0], 0)

    def by_column(x: Tensor) -> Tensor:
        found = x.new_empty(width, pitch)
        kernel(device, grid, PREPARE_THREADS, x.data_ptr(), found.data_ptr(), m, k, width, pitch, *rest)
        return found

    return by_column


def aligned(tensor: Tensor) -> Tensor:
    """Give the tensor at a multiple of 16 bytes, as kernels read it; a part of another one may stand anywhere."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@lru_cache(maxsize=256)
def _tiled_kernel(device: torch.device, tiling: Tiling, dtype: torch.dtype) -> CudaKernel:
    source, name = (SIMT_SOURCE, "simt") if dtype == torch.float32 else (TENSOR_SOURCE, "tensor")
    cubin = compile_cubin(source.path, device_facts(device).arch, tiled_defines(tiling, dtype))
    return CudaKernel(cubin, f"semisparse_vector_nm_{name}", (*[_POINTER] * 6, *[_INT] * 7), tiling.shared)


@cache
def _prepare_kernel(device: torch.device, itemsize: int, pattern: VectorNM, slots: int) -> CudaKernel:
    cubin = compile_cubin(PREPARE_SOURCE.path, device_facts(device).arch, {"BYTES": itemsize})
    # A tile of x, or a bit mask of a stage's columns for each warp.
    mask_words = -(-((slots - 1) // pattern.keep + 2) * pattern.window // 32)
    shared = max(TRANSPOSED_TILE * (TRANSPOSED_TILE + 4 // itemsize) * itemsize, PREPARE_THREADS // 32 * 4 * mask_words)
    parameters = (*[_POINTER] * 2, *[_INT] * 4, *[_POINTER] * 3, *[_INT] * 12)
    return CudaKernel(cubin, "semisparse_vector_nm_prepare", parameters, shared)


@cache
def _transpose_kernel(device: torch.device) -> CudaKernel:
    (defines,) = TRANSPOSE_SOURCE.variants
    cubin = compile_cubin(TRANSPOSE_SOURCE.path, device_facts(device).arch, defines)
    shared = TRANSPOSED_TOKENS * TRANSPOSED_TILE * 2
    return CudaKernel(cubin, "semisparse_vector_nm_transpose", (*[_POINTER] * 2, *[_INT] * 4), shared)
