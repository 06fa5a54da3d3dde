"""Kernel `cpu` (kernel.cpp): each row of the weight is expanded to a dense row once, then multiplied by every token.

For large M a weight that is not quantised is unpacked for torch's matmul instead.
"""

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

MAX_TOKENS_UNQUANTISED = 32
"""Maximum M of kernel.cpp for a weight that is not quantised. Above it, torch's matmul is faster."""

COLUMN_MULTIPLE = 32
"""K of x is padded with zeros to a multiple of this: the columns per iteration of kernel.cpp (`kLanes`)."""

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
"""The numbers of dtypes of stored values in kernel.cpp."""


class _Weight(ctypes.Structure):
    """The struct `Weight` of kernel.cpp: slots per row, columns per group (window), a number of `TYPES`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "metadata", "fp8_values")),
        *((name, ctypes.c_int64) for name in ("rows", "slots", "window", "type")),
    )


class _Tokens(ctypes.Structure):
    """The struct `Tokens` of kernel.cpp: M tokens (count) of K columns, K padded."""

    _fields_ = (("values", ctypes.c_void_p), ("count", ctypes.c_int64), ("columns", ctypes.c_int64))


def uses_torch_matmul(m: int, spec: WeightSpec) -> bool:
    """Return whether the weight is unpacked and torch multiplies, for M = ``m``."""
    return m > MAX_TOKENS_UNQUANTISED and quantised_dtype(spec.params) is None


def refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot compute ``problem`` here; None if it can."""
    return None if uses_torch_matmul(problem.m, problem.spec) else cpp.refusal()  # torch needs no C++ compiler


def prepare(problem: Problem) -> Product:
    """Return the matmul for ``problem``: y [M, N] in the dtype of x [M, K].

    Compiles and loads kernel.cpp, unless torch multiplies the unpacked weight.

    Raises:
        KernelError: kernel.cpp does not compile.
    """
    if uses_torch_matmul(problem.m, problem.spec):
        return _unpack_and_multiply
    library, dtype = _library(), quantised_dtype(problem.params)

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        if dtype is None:
            y = _multiply(library, x.float(), packed)
        else:
            quantised, x_scale = quantise_rows(x, dtype)
            # kernel.cpp takes int16 or float32. Its sums of quantised numbers are exact, and are scaled in float64.
            widened = quantised.to(torch.int16 if dtype == torch.int8 else torch.float32)
            y = _multiply(library, widened, packed) * x_scale.double()[:, None] * packed.tensors["scale"].double()
        return (y if bias is None else y + bias).to(x.dtype)

    return matmul


def _multiply(library: ctypes.CDLL, x: Tensor, packed: Packed) -> Tensor:
    """Return x @ values.T, unscaled, [M, N] float64.

    Args:
        library: kernel.cpp.
        x: [M, K], int16 for int8 values, else float32.
        packed: the weight, in the layout on disk.
    """
    (m, k), n, window = x.shape, packed.shape[0], window_of(packed.pattern)
    values, metadata = (packed.tensors[name].contiguous() for name in ("values", "metadata"))
    slots = values.shape[1]
    padded_k = slots // (window - 2) * window  # a group of `window` columns has window - 2 slots
    columns = -(-padded_k // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    x = F.pad(x, (0, columns - k)).contiguous()
    threads = cpp.threads_for(m * n * k)
    scratch = x.new_empty(threads, columns)  # a dense row of the weight per thread
    y = x.new_empty(m, n, dtype=torch.float64)
    pointers = values.data_ptr(), metadata.data_ptr(), _fp8_values().data_ptr()
    weight = _Weight(*pointers, n, slots, window, TYPES[values.dtype])
    library.slide24_matmul(weight, _Tokens(x.data_ptr(), *x.shape), scratch.data_ptr(), y.data_ptr(), threads)
    return y


def _unpack_and_multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Return y [M, N] in the dtype of x [M, K], for a weight that is not quantised."""
    weight = unpack_values(packed)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return F.linear(x.to(dtype).contiguous(), weight.to(dtype), None if bias is None else bias.to(dtype)).to(x.dtype)


@cache
def _library() -> ctypes.CDLL:
    library = cpp.load(Path(__file__).with_name("kernel.cpp"))
    pointer = ctypes.c_void_p
    arguments = (ctypes.POINTER(_Weight), ctypes.POINTER(_Tokens), pointer, pointer, ctypes.c_int)
    library.slide24_matmul.argtypes, library.slide24_matmul.restype = arguments, None
    return library


@cache
def _fp8_values() -> Tensor:
    """Return the float8_e4m3fn value of each byte, 0 to 255: [256] float32."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
