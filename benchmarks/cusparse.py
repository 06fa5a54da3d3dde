"""cuSPARSE's matrix-vector product with 32-bit columns and preprocessing, which torch's interface does not offer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALGORITHMS = {"ALG1": 2, "ALG2": 3}
"""Values of cusparseSpMVAlg_t for CSR: rows shared out as they are, and by equal numbers of weights."""

DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""Values of cudaDataType."""

FLOAT32, NOT_TRANSPOSED, ZERO_BASED, INDEX_32 = 0, 0, 0, 2
"""Values of cudaDataType, cusparseOperation_t, cusparseIndexBase_t and cusparseIndexType_t."""


def loaded_library() -> ctypes.CDLL:
    """Return the cuSPARSE that torch has loaded.

    Raises:
        OSError: there is none.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libcusparse.so" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    raise OSError("no libcusparse.so is loaded: expected a torch with CUDA")


def products(weight: Tensor, x: Tensor, copies: int, algorithm: str) -> tuple[list[Callable[[], Tensor]], int]:
    """Return a function per copy of the weight that computes y = weight @ x, and the bytes of one copy.

    Args:
        weight: [N, K] on a GPU, with zeros.
        x: [K] of the same dtype.
        copies: number of copies.
        algorithm: a key of `ALGORITHMS`.
    """
    library, pointer = loaded_library(), ctypes.c_void_p
    n, k = weight.shape
    data = DATA_TYPES[weight.dtype]
    one, zero = ctypes.c_float(1), ctypes.c_float(0)

    def call(name: str, *arguments: Any) -> None:
        status = getattr(library, f"cusparse{name}")(*arguments)
        if status:
            raise OSError(f"cusparse{name} returned status {status}, expected 0")

    def made(name: str, *arguments: Any) -> ctypes.c_void_p:
        made = pointer()
        call(name, ctypes.byref(made), *arguments)
        return made

    def vector(values: Tensor) -> ctypes.c_void_p:
        return made("CreateDnVec", ctypes.c_int64(len(values)), pointer(values.data_ptr()), data)

    handle, compressed = made("Create"), weight.to_sparse_csr()

    def product() -> Callable[[], Tensor]:
        starts, columns = (t.to(torch.int32) for t in (compressed.crow_indices(), compressed.col_indices()))
        values, y = compressed.values().clone(), torch.empty(n, dtype=weight.dtype, device=weight.device)
        sizes = [ctypes.c_int64(size) for size in (n, k, len(values))]
        addresses = [pointer(tensor.data_ptr()) for tensor in (starts, columns, values)]
        matrix = made("CreateCsr", *sizes, *addresses, INDEX_32, INDEX_32, ZERO_BASED, data)
        operands = (ctypes.byref(one), matrix, vector(x), ctypes.byref(zero), vector(y), FLOAT32, ALGORITHMS[algorithm])
        size = ctypes.c_size_t()
        call("SpMV_bufferSize", handle, NOT_TRANSPOSED, *operands, ctypes.byref(size))
        scratch = torch.empty(max(1, size.value), dtype=torch.uint8, device=weight.device)
        call("SpMV_preprocess", handle, NOT_TRANSPOSED, *operands, pointer(scratch.data_ptr()))
        kept = (starts, columns, values, scratch)  # the library has only their addresses

        def multiply() -> Tensor:
            assert kept
            call("SetStream", handle, pointer(torch.cuda.current_stream().cuda_stream))
            call("SpMV", handle, NOT_TRANSPOSED, *operands, pointer(scratch.data_ptr()))
            return y

        return multiply

    stored = len(compressed.values())
    return [product() for _ in range(copies)], stored * (weight.element_size() + 4) + 4 * (n + 1)
