"""cuSPARSELt's 2:4 matmul through nvmath-python's bindings. Plans are cached; the fastest algorithm is searched once.

The library computes D[N, M] = W[N, K] @ X[K, M]. Row-major x [M, K] and y [M, N] are X and D in column-major order. K
is that of the lifted weight.
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
"""M is padded to a multiple of this, for every dtype."""

ROWS = 32
"""N is padded to a multiple of this. The lifted K already is a multiple (`LIFTED_ALIGNMENT` in storage/disk.py)."""

ALIGNMENT = 16
"""Alignment of every operand's address, in bytes."""

SEARCH = 1
"""Version of the search, part of the cache's key: raise it when the search changes."""

ITERATIONS = 5
"""Runs of each algorithm in a search."""

LARGEST_SEARCH = 4096
"""Maximum M of a search, because a search takes seconds above it. A larger M uses the algorithm found for this one."""

IDENTITY_ROWS = 4096
"""Rows of the identity that `decompress` multiplies at a time."""

NAMES = {
    torch.int8: "CUDA_R_8I",
    torch.int32: "CUDA_R_32I",
    torch.float8_e4m3fn: "CUDA_R_8F_E4M3",
    torch.float16: "CUDA_R_16F",
    torch.bfloat16: "CUDA_R_16BF",
    torch.float32: "CUDA_R_32F",
}
"""CUDA's names of the dtypes."""


@dataclass(frozen=True)
class Shape:
    """The matmul that a plan is made for: y[M, N] = x[M, K] @ w[N, K].T.

    Args:
        device: index of the GPU.
        m: a multiple of `TOKENS`.
        n: a multiple of `ROWS`.
        k: a multiple of `ROWS`.
        dtype: dtype of x and w.
        out: dtype of y: int32 or bfloat16 for int8, bfloat16 or float32 for float8_e4m3fn, else ``dtype``.
    """

    device: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    out: torch.dtype


Settings = Mapping[str, int]
"""Values of cusparseLtMatmulAlgAttribute_t by name, for the attributes that differ from the library's defaults."""

SEARCHED = ("CONFIG_ID", "SPLIT_K", "SPLIT_K_MODE", "SPLIT_K_BUFFERS")
"""The attributes that a search sets."""

ROW_MAJOR, COLUMN_MAJOR = 2, 1
"""Values of cusparseOrder_t."""

NON_TRANSPOSE = 0
"""A value of cusparseOperation_t."""


def unavailable(device: torch.device) -> str | None:
    """Return why the library cannot be used on a GPU, or None if it can."""
    if importlib.util.find_spec("nvmath") is None:
        return "nvmath-python is not installed: pip install 'semisparse[cuda]'"
    return _unusable(index_of(device))


@cache
def _unusable(device: int) -> str | None:
    try:
        _handle(device)
    except Exception as error:  # DynamicLibNotFoundError of cuda.pathfinder, or private ones of nvmath
        return f"cuSPARSELt does not start ({error}): pip install 'semisparse[cuda]'"
    return None


def padded_rows(n: int) -> int:
    """Return N rounded up to a multiple of `ROWS`."""
    return n + -n % ROWS


def compress(weight: Tensor) -> Tensor:
    """Compress a 2:4 weight into the library's own layout.

    Args:
        weight: [N, K] int8, float8_e4m3fn, float16 or bfloat16, at most two non-zeros in every four columns; N and K
            multiples of `ROWS`.
    Returns:
        [bytes] uint8, valid for this version of the library and this kind of GPU.
    """
    library, handle = _library(), _handle(index_of(weight.device))
    described = _describe_weight(handle, weight.shape[0], weight.shape[1], weight.dtype)
    sizes = library.sp_mma_compressed_size2(handle, described)
    compressed, scratch = (torch.empty(size, dtype=torch.uint8, device=weight.device) for size in sizes)
    stream = torch._C._cuda_getCurrentRawStream(index_of(weight.device))
    weight = weight.contiguous()
    pointers = [operand.data_ptr() for operand in (weight, compressed, scratch)]
    with torch.cuda.device(weight.device):
        library.sp_mma_compress2(handle, described, 1, NON_TRANSPOSE, *pointers, stream)
    library.mat_descriptor_destroy(described)
    return compressed


def decompress(compressed: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] of a compressed one: its product with the identity, exact if all values are finite."""
    out = torch.int32 if dtype == torch.int8 else torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    weight = torch.empty((n, k), dtype=dtype, device=compressed.device)
    for start in range(0, k, IDENTITY_ROWS):
        stop = min(k, start + IDENTITY_ROWS)
        identity = torch.zeros((stop - start, k), dtype=torch.float32, device=compressed.device)
        identity[:, start:stop].fill_diagonal_(1)
        plan = _default_plan(Shape(index_of(compressed.device), stop - start, n, k, dtype, out))
        weight[:, start:stop] = plan.multiply(identity.to(dtype), compressed).T.to(dtype)
    return weight


@cache
def _default_plan(shape: Shape) -> Plan:
    """Return the plan of a shape with the library's default algorithm."""
    return Plan(shape, {})


_plans: dict[Shape, Plan] = {}


def plan_for(shape: Shape) -> Plan:
    """Return the plan of a shape, made at its first use with the fastest algorithm for M.

    M is rounded up to a power of two, at most `LARGEST_SEARCH`, for the choice.

    Raises:
        KernelError: there is no plan yet, and a CUDA graph is being captured, in which no algorithm can be timed.
    """
    plan = _plans.get(shape)
    if plan is None:
        if torch.cuda.is_current_stream_capturing():
            raise KernelError(
                f"cuSPARSELt has no plan yet for M, N, K = {shape.m}, {shape.n}, {shape.k} in {shape.dtype}, and none "
                "can be made while a CUDA graph is captured: call the layer once with as many tokens before"
            )
        searched = replace(shape, m=min(LARGEST_SEARCH, 1 << (shape.m - 1).bit_length()))
        plan = _plans[shape] = Plan(shape, _searched(searched))
    return plan


@cache
def _searched(shape: Shape) -> Settings:
    """Return a shape's fastest settings: searched once per GPU model and library version, then cached on disk."""
    facts = device_facts(torch.device("cuda", shape.device))
    matmul = {"m": shape.m, "n": shape.n, "k": shape.k, "dtype": str(shape.dtype), "out": str(shape.out)}
    version = _library().get_version(_handle(shape.device))
    key = {"search": SEARCH, "version": version, "gpu": facts.name, **matmul}
    stored = cached("cusparselt", json.dumps(key).encode(), lambda: json.dumps(_search(shape)).encode())
    settings: Settings = json.loads(stored)
    return settings


def _search(shape: Shape) -> Settings:
    """Return the fastest settings, timed on random operands: zeros would run faster than real ones."""
    device = torch.device("cuda", shape.device)
    x, weight = (torch.randint(-64, 64, (rows, shape.k), device=device).to(shape.dtype) for rows in (shape.m, shape.n))
    weight.view(-1, 4)[:, 2:] = 0
    return Plan(shape, {"SEARCH_ITERATIONS": ITERATIONS}).search(x, compress(weight))


class Plan:
    """The library's descriptors of one matmul, never freed: about 3 KB of host memory per plan.

    `plan_for` caches plans; that of a search is used once.

    Args:
        shape: the matmul.
        settings: the algorithm.
    """

    def __init__(self, shape: Shape, settings: Settings) -> None:
        library = self._library = _library()
        handle = self._handle = _handle(shape.device)
        self.shape = shape
        weight = _describe_weight(handle, shape.n, shape.k, shape.dtype)
        x = _describe_columns(handle, shape.k, shape.m, shape.dtype)
        y = _describe_columns(handle, shape.n, shape.m, shape.out)
        kind = library.ComputeType.COMPUTE_32I if shape.dtype == torch.int8 else library.ComputeType.COMPUTE_32F
        matmul = library.matmul_descriptor_init(handle, NON_TRANSPOSE, NON_TRANSPOSE, weight, x, y, y, kind)
        self._selection = library.matmul_alg_selection_init(handle, matmul, library.MatmulAlg.DEFAULT)
        for name, value in settings.items():
            self._set(name, value)
        self._plan = library.matmul_plan_init(handle, matmul, self._selection)
        self._workspace = library.matmul_get_workspace(handle, self._plan)
        self._one, self._zero = numpy.ones(1, numpy.float32), numpy.zeros(1, numpy.float32)
        self._stream = numpy.zeros(1, numpy.uint64)
        self._fixed = self._one.ctypes.data, self._zero.ctypes.data, self._stream.ctypes.data

    def multiply(self, x: Tensor, compressed: Tensor) -> Tensor:
        """Return ``x @ w.T``, [M, N] in the shape's ``out``, for x [M, K] contiguous; runs on the current stream."""
        y = torch.empty((self.shape.m, self.shape.n), dtype=self.shape.out, device=x.device)
        self._call(self._library.matmul, x, compressed, y)
        return y

    def search(self, x: Tensor, compressed: Tensor) -> Settings:
        """Time every algorithm of the library and return the settings of the fastest."""
        before = {name: self._get(name) for name in SEARCHED}
        y = torch.empty((self.shape.m, self.shape.n), dtype=self.shape.out, device=x.device)
        self._call(self._library.matmul_search, x, compressed, y)
        return {name: value for name, default in before.items() if (value := self._get(name)) != default}

    def _call(self, function: Any, x: Tensor, compressed: Tensor, y: Tensor) -> None:
        index = self.shape.device
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self._call(function, x, compressed, y)
        self._stream[0] = torch._C._cuda_getCurrentRawStream(index)
        one, zero, streams = self._fixed
        scratch = torch.empty(self._workspace, dtype=torch.uint8, device=x.device) if self._workspace else None
        workspace, to = 0 if scratch is None else scratch.data_ptr(), y.data_ptr()
        operands = (one, compressed.data_ptr(), x.data_ptr(), zero, to, to)
        function(self._handle, self._plan, *operands, workspace, streams, 1)

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


def index_of(device: torch.device) -> int:
    """Return a GPU's index."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _handle(device: int) -> int:
    with torch.cuda.device(device):
        return int(_library().init())


@cache
def _library() -> ModuleType:
    from nvmath.bindings import cusparseLt

    return cusparseLt
