"""2:4 products by cuSPARSELt, through nvmath-python's bindings: plans are kept, algorithms searched once.

The library multiplies D[N, M] = W[N, K] @ X[K, M]. With X and D column-major, those are x and y as they lie in memory.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from semisparse.errors import KernelError
from semisparse.runtime.cache import cached
from semisparse.runtime.device import device_facts

TOKENS = 16
"""M comes in multiples of it, whatever the dtype."""

ROWS = 32
"""N does, as K does already (`layout.ALIGN`)."""

ALIGNMENT = 16
"""Bytes, of every operand's address."""

SEARCH = 1
"""Raise it when what is searched changes: remembered choices of another number are searched anew."""

ITERATIONS = 5
"""Times that a search runs each algorithm."""

LARGEST_SEARCH = 4096
"""Tokens; more take the algorithm of so many, which spares searches of seconds."""

NAMES = {
    torch.int8: "CUDA_R_8I",
    torch.int32: "CUDA_R_32I",
    torch.float8_e4m3fn: "CUDA_R_8F_E4M3",
    torch.float16: "CUDA_R_16F",
    torch.bfloat16: "CUDA_R_16BF",
    torch.float32: "CUDA_R_32F",
}
"""Of the dtypes, as CUDA writes them."""


@dataclass(frozen=True)
class Shape:
    """What a plan is for.

    Args:
        device: index of the GPU.
        m: tokens, a multiple of `TOKENS`.
        n: rows of the weight, a multiple of `ROWS`.
        k: its columns, a multiple of `ROWS`.
        dtype: of x and the weight.
        out: of the product.
    """

    device: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    out: torch.dtype


Settings = Mapping[str, int]
"""What to compute a product with: the library's attributes of an algorithm, where they are not its defaults."""

SEARCHED = ("CONFIG_ID", "SPLIT_K", "SPLIT_K_MODE", "SPLIT_K_BUFFERS")

ROW_MAJOR, COLUMN_MAJOR = 2, 1
"""The library's numbers of orders."""

AS_IS = 0
"""Its number for an operand that is not transposed."""


def unavailable(device: torch.device) -> str | None:
    """Say why the library cannot be used on a GPU, or None if it can."""
    if importlib.util.find_spec("nvmath") is None:
        return "nvmath-python is not installed: pip install 'semisparse[cuda]'"
    return _unusable(_index(device))


@cache
def _unusable(device: int) -> str | None:
    try:
        _handle(device)
    except Exception as error:  # the bindings have no class of their own for a library that is not there
        return f"cuSPARSELt does not start ({error}): pip install 'semisparse[cuda]'"
    return None


def compress(weight: Tensor) -> Tensor:
    """Bring a 2:4 weight into the library's own layout on this GPU.

    Args:
        weight: [N, K] int8, float8_e4m3fn, float16 or bfloat16, at most two non-zeros in every four columns; N and K
            multiples of `ROWS`.
    Returns:
        [bytes] uint8; what they mean is the library's affair, and another version or GPU may read them differently.
    """
    library, handle = _library(), _handle(_index(weight.device))
    described = _describe_weight(handle, weight.shape[0], weight.shape[1], weight.dtype)
    size, scratch_size = library.sp_mma_compressed_size2(handle, described)
    compressed, scratch = (
        torch.empty(count, dtype=torch.uint8, device=weight.device) for count in (size, scratch_size)
    )
    stream = torch.cuda.current_stream(weight.device).cuda_stream
    pointers = [operand.data_ptr() for operand in (weight.contiguous(), compressed, scratch)]
    with torch.cuda.device(weight.device):
        library.sp_mma_compress2(handle, described, 1, AS_IS, *pointers, stream)
    library.mat_descriptor_destroy(described)
    return compressed


def decompress(compressed: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Give back the weight [N, K] that was compressed: its product with the identity, which is exact."""
    out = torch.int32 if dtype == torch.int8 else torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    weight = torch.empty((n, k), dtype=dtype, device=compressed.device)
    for start in range(0, k, LARGEST_SEARCH):
        stop = min(k, start + LARGEST_SEARCH)
        places = torch.arange(stop - start, device=compressed.device)
        one = torch.zeros((stop - start, k), dtype=torch.float32, device=compressed.device)
        one[places, start + places] = 1
        plan = Plan(Shape(_index(compressed.device), stop - start, n, k, dtype, out), {})
        weight[:, start:stop] = plan.multiply(one.to(dtype), compressed).T.to(dtype)
    return weight


def multiply(x: Tensor, compressed: Tensor, n: int, out: torch.dtype) -> Tensor:
    """Compute ``x @ w.T`` on the current stream.

    Args:
        x: [M, K] contiguous, M a multiple of `TOKENS`.
        compressed: of a weight [n, K] in x's dtype.
        n: its rows.
        out: dtype of the product; int8 gives int32 or bfloat16, float8_e4m3fn bfloat16 or float32, others their own.
    Returns:
        [M, n], one alpha for all: scales are the caller's.
    Raises:
        KernelError: it is the first product of this shape and a CUDA graph is being captured.
    """
    return plan_for(Shape(_index(x.device), x.shape[0], n, x.shape[1], x.dtype, out)).multiply(x, compressed)


_plans: dict[Shape, Plan] = {}


def plan_for(shape: Shape) -> Plan:
    """Give the plan of a shape, made at its first use.

    Raises:
        KernelError: there is none yet and a CUDA graph is being captured, where nothing can be searched.
    """
    found = _plans.get(shape)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            raise KernelError(
                f"cuSPARSELt has no plan yet for M, N, K = {shape.m}, {shape.n}, {shape.k} in {shape.dtype}, and none "
                "can be made while a CUDA graph is captured: call the layer once with as many tokens before"
            )
        found = _plans[shape] = Plan(shape, settings_for(shape))
    return found


def settings_for(shape: Shape) -> Settings:
    """Give the fastest settings for the next power of two tokens: searched once on a kind of GPU, then remembered."""
    return _searched(replace(shape, m=min(LARGEST_SEARCH, 1 << (shape.m - 1).bit_length())))


@cache
def _searched(shape: Shape) -> Settings:
    facts = device_facts(torch.device("cuda", shape.device))
    product = {"m": shape.m, "n": shape.n, "k": shape.k, "dtype": str(shape.dtype), "out": str(shape.out)}
    version = _library().get_version(_handle(shape.device))
    key = {"search": SEARCH, "version": version, "gpu": facts.name, **product}
    stored = cached("cusparselt", json.dumps(key).encode(), lambda: json.dumps(_search(shape)).encode())
    found: Settings = json.loads(stored)
    return found


def _search(shape: Shape) -> Settings:
    """Time every algorithm on random operands: zeros run faster than real ones."""
    device = torch.device("cuda", shape.device)
    x, weight = (torch.randint(-64, 64, (rows, shape.k), device=device).to(shape.dtype) for rows in (shape.m, shape.n))
    weight.view(-1, 4)[:, 2:] = 0
    return Plan(shape, {"SEARCH_ITERATIONS": ITERATIONS}).search(x, compress(weight))


class Plan:
    """One product, described to the library. It is never freed: what it takes are some kilobytes of host memory.

    Args:
        shape: of the product.
        settings: how to compute it, where not as the library does by default.
    """

    def __init__(self, shape: Shape, settings: Settings) -> None:
        library = self._library = _library()
        handle = self._handle = _handle(shape.device)
        self.shape = shape
        weight = _describe_weight(handle, shape.n, shape.k, shape.dtype)
        x = _describe_columns(handle, shape.k, shape.m, shape.dtype)
        y = _describe_columns(handle, shape.n, shape.m, shape.out)
        kind = library.ComputeType.COMPUTE_32I if shape.dtype == torch.int8 else library.ComputeType.COMPUTE_32F
        product = library.matmul_descriptor_init(handle, AS_IS, AS_IS, weight, x, y, y, kind)
        self._selection = library.matmul_alg_selection_init(handle, product, library.MatmulAlg.DEFAULT)
        for name, value in settings.items():
            self._set(name, value)
        self._plan = library.matmul_plan_init(handle, product, self._selection)
        self._workspace = library.matmul_get_workspace(handle, self._plan)
        self._one, self._zero = numpy.ones(1, numpy.float32), numpy.zeros(1, numpy.float32)
        self._stream = numpy.zeros(1, numpy.uint64)
        self._fixed = self._one.ctypes.data, self._zero.ctypes.data, self._stream.ctypes.data

    def multiply(self, x: Tensor, compressed: Tensor) -> Tensor:
        """Compute ``x @ w.T``: [M, N] in the shape's ``out``."""
        y = torch.empty((self.shape.m, self.shape.n), dtype=self.shape.out, device=x.device)
        self._call(self._library.matmul, x, compressed, y)
        return y

    def search(self, x: Tensor, compressed: Tensor) -> Settings:
        """Time every algorithm of the library and give the fastest."""
        before = {name: self._get(name) for name in SEARCHED}
        y = torch.empty((self.shape.m, self.shape.n), dtype=self.shape.out, device=x.device)
        self._call(self._library.matmul_search, x, compressed, y)
        return {name: found for name, default in before.items() if (found := self._get(name)) != default}

    def _call(self, function: Any, x: Tensor, compressed: Tensor, y: Tensor) -> None:
        index = self.shape.device
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self._call(function, x, compressed, y)
        self._stream[0] = torch._C._cuda_getCurrentRawStream(index)
        one, zero, streams = self._fixed
        scratch = torch.empty(self._workspace, dtype=torch.uint8, device=x.device) if self._workspace else None
        where = 0 if scratch is None else scratch.data_ptr()
        place = y.data_ptr()
        operands = (one, compressed.data_ptr(), x.data_ptr(), zero, place, place)
        function(self._handle, self._plan, *operands, where, streams, 1)

    def _set(self, name: str, value: int) -> None:
        number = numpy.array([value], numpy.int32)
        attribute = self._library.MatmulAlgAttribute[name]
        self._library.matmul_alg_set_attribute(
            self._handle, self._selection, attribute, number.ctypes.data, number.nbytes
        )

    def _get(self, name: str) -> int:
        number = numpy.zeros(1, numpy.int32)
        attribute = self._library.MatmulAlgAttribute[name]
        self._library.matmul_alg_get_attribute(
            self._handle, self._selection, attribute, number.ctypes.data, number.nbytes
        )
        return int(number[0])


def _describe_weight(handle: int, n: int, k: int, dtype: torch.dtype) -> int:
    half = _library().Sparsity.SPARSITY_50_PERCENT
    return int(_library().structured_descriptor_init(handle, n, k, k, ALIGNMENT, _type(dtype), ROW_MAJOR, half))


def _describe_columns(handle: int, rows: int, columns: int, dtype: torch.dtype) -> int:
    return int(_library().dense_descriptor_init(handle, rows, columns, rows, ALIGNMENT, _type(dtype), COLUMN_MAJOR))


def _type(dtype: torch.dtype) -> int:
    from nvmath import CudaDataType

    return int(CudaDataType[NAMES[dtype]])


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _handle(device: int) -> int:
    with torch.cuda.device(device):
        return int(_library().init())


@cache
def _library() -> ModuleType:
    from nvmath.bindings import cusparseLt

    return cusparseLt
