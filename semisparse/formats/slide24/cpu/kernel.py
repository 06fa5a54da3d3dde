"""The CPU kernel: a row of the weight is spread over its columns once and multiplied with every token (kernel.cpp)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, WeightSpec
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.slide24.storage.disk import quantised_dtype, unpack_values, window_of
from semisparse.quant.symmetric import quantise_rows
from semisparse.runtime import cpp

MAX_TOKENS = 32
"""Of a weight that is not quantised: for more, unpacking it for torch's matmul is faster."""

LANES = 32
"""The columns of x are padded to a multiple of it."""

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "metadata", "fp8_values")),
        *((name, ctypes.c_int64) for name in ("rows", "slots", "window", "type")),
    )


class _Tokens(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("count", ctypes.c_int64), ("columns", ctypes.c_int64))


def unpacks(m: int, spec: WeightSpec) -> bool:
    """Say whether torch multiplies with the unpacked weight."""
    return m > MAX_TOKENS and quantised_dtype(spec.params) is None


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    return None if unpacks(problem.m, problem.spec) else cpp.refusal()


def prepare(problem: Problem) -> Product:
    """Compile and open kernel.cpp, where the weight is not unpacked.

    Raises:
        KernelError: it cannot be compiled.
    """
    if unpacks(problem.m, problem.spec):
        return _unpack_and_multiply
    library, dtype = _library(), quantised_dtype(problem.params)

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        if dtype is None:
            y = _multiply(library, x.float(), packed)
        else:
            quantised, x_scale = quantise_rows(x, dtype)
            wide = quantised.to(torch.int16 if dtype == torch.int8 else torch.float32)
            y = _multiply(library, wide, packed) * x_scale.double()[:, None] * packed.tensors["scale"].double()
        return (y if bias is None else y + bias).to(x.dtype)

    return matmul


def _multiply(library: ctypes.CDLL, x: Tensor, packed: Packed) -> Tensor:
    """Multiply x, [M, K] in float32 or int16, with the stored values, unscaled: [M, N] float64."""
    (m, k), n, window = x.shape, packed.shape[0], window_of(packed.pattern)
    values, metadata = (packed.tensors[name].contiguous() for name in ("values", "metadata"))
    slots = values.shape[1]
    padded = slots // (window - 2) * window
    x = F.pad(x, (0, padded + -padded % LANES - k)).contiguous()
    threads = cpp.threads_for(m * n * k)
    scratch = torch.empty(threads, x.shape[1], dtype=x.dtype)
    y = torch.empty(m, n, dtype=torch.float64)
    pointers = values.data_ptr(), metadata.data_ptr(), _fp8_values().data_ptr()
    weight = _Weight(*pointers, n, slots, window, TYPES[values.dtype])
    library.slide24_matmul(weight, _Tokens(x.data_ptr(), *x.shape), scratch.data_ptr(), y.data_ptr(), threads)
    return y


def _unpack_and_multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    weight = unpack_values(packed)
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.linear(x.to(wide).contiguous(), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


@cache
def _library() -> ctypes.CDLL:
    library = cpp.load(Path(__file__).with_name("kernel.cpp"))
    pointer = ctypes.c_void_p
    arguments = (ctypes.POINTER(_Weight), ctypes.POINTER(_Tokens), pointer, pointer, ctypes.c_int)
    library.slide24_matmul.argtypes, library.slide24_matmul.restype = arguments, None
    return library


@cache
def _fp8_values() -> Tensor:
    """Return the value of every byte as fp8: [256] float32."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
