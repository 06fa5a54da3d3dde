"""The matmul of host/row_matmul.hpp: a format's C++ unpacks a few rows of w, which are multiplied from a cache."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.runtime import cpp

COLUMN_GRAIN = 64
"""row_matmul.hpp takes K in multiples of this."""

CACHE_LINE = 64
"""Bytes of a cache line."""

MAX_TOKENS = {torch.bfloat16: 1 << 62, torch.float32: 48}
"""Maximum M of row_matmul.hpp by the dtype of x. Above it torch multiplies unpacked rows: 128 tokens at 1536 x 2048
take 8.7 ms instead of 10.3 in float32, but 4.9 instead of 4.2 in bfloat16 (Zen 4, one thread)."""

MAX_BAND_ROWS = 128
"""Maximum rows per band. From 256 tokens on bands grow with M, because x comes from beyond the L2 cache for each band:
4096 tokens take 131 ms instead of 224 with 8 rows."""

UNPACKED_ROWS = 384
"""Maximum rows that torch multiplies at a time. With 256 to 512 its GEMM is as fast as with all, and they stay in a
cache: 128 tokens at 1536 x 2048 take 8.7 ms with 384, 9.1 with 128, 9.6 with all; dense 9.1 (float32, Zen 4, one
thread)."""

ROW_GRAIN = 16
"""The number of rows that torch multiplies at a time is a multiple of this, so that its GEMM has whole tiles."""


def operand_dtype(x: torch.dtype, w: torch.dtype, has_bfloat16: bool = True) -> torch.dtype:
    """Return the dtype in which x and w are multiplied: bfloat16 if both are, and the CPU multiplies it; else float32.

    Args:
        x: the dtype of x.
        w: that of the packed weight.
        has_bfloat16: `RowMatmul.has_bfloat16`.
    """
    return x if x == w == torch.bfloat16 and has_bfloat16 else torch.float32


class _Buffer(threading.local):
    """Memory for unpacked rows, kept per thread from call to call: new memory costs 2 % of a matmul of 128 tokens."""

    memory: Tensor | None = None

    def rows(self, count: int, stride: int) -> Tensor:
        """Return [count, stride] float32, with any contents."""
        if self.memory is None or self.memory.numel() < count * stride:
            with torch.inference_mode(False):
                self.memory = torch.empty(count * stride, dtype=torch.float32)
        return self.memory[: count * stride].view(count, stride)


_buffer = _Buffer()


class MatmulCall(ctypes.Structure):
    """The struct MatmulCall of row_matmul.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "bias", "y", "bands")),
        *(
            (name, ctypes.c_int64)
            for name in ("tokens", "rows", "threads", "band_rows", "columns", "stride", "bfloat16")
        ),
    )


@cache
def load(source: Path, name: str, band_rows: int) -> RowMatmul:
    """Compile and open a format's C++, once per process.

    Args:
        source: includes row_matmul.hpp.
        name: the format's name, with which the names of its functions ``_matmul`` and ``_unpack`` begin.
        band_rows: the number of rows that it unpacks at a time, 8 or 16.
    Raises:
        KernelError: it cannot be compiled.
    """
    library = cpp.load(source)
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    multiply, unpack = (getattr(library, f"{name}_{function}") for function in ("matmul", "unpack"))
    multiply.argtypes = (pointer, pointer)
    unpack.argtypes = (pointer, count, count, count, pointer, number)
    multiply.restype = unpack.restype = None
    return RowMatmul(multiply, unpack, band_rows, bool(library.multiplies_bfloat16()))


@dataclass(frozen=True)
class RowMatmul:
    """The matmul of a format's packed weights on a CPU.

    Args:
        matmul: computes y.
        unpack: writes rows of w.
        band_rows: the number of rows that both unpack at a time, 8 or 16.
        has_bfloat16: whether the CPU multiplies bfloat16.
    """

    matmul: Callable[..., None]
    unpack: Callable[..., None]
    band_rows: int
    has_bfloat16: bool

    def multiply(self, weight: ctypes.Structure, x: Tensor, n: int, grain: int, bias: Tensor | None) -> Tensor:
        """Compute ``y = x @ w.T + bias``, accumulated in float32: [M, N] in x's dtype.

        Args:
            weight: the format's struct Weight.
            x: [M, K], of `operand_dtype`.
            n: rows of w.
            grain: the number of columns that the format unpacks at a time, a power of 2.
            bias: [N] or None.
        """
        (m, k), line = x.shape, CACHE_LINE // x.element_size()
        columns = k + -k % COLUMN_GRAIN
        # Room for whole pieces of `grain` columns; an odd number of lines, because COLUMN_GRAIN is an even one.
        stride = k + -k % max(grain, COLUMN_GRAIN) + line
        bias = None if bias is None else bias.float().contiguous()
        if m > MAX_TOKENS[x.dtype]:
            return self._by_torch(weight, x, stride, n, bias)
        padded = F.pad(x, (0, stride - k)).contiguous()
        band_rows = max(self.band_rows, min(MAX_BAND_ROWS, m // 256 * 16))
        threads = min(cpp.threads_for(m * n * k), -(-n // band_rows))
        y = x.new_empty(m, n)
        bands = x.new_zeros(threads, band_rows, stride)  # columns and rows that do not exist are multiplied, too
        operands = (None if tensor is None else tensor.data_ptr() for tensor in (padded, bias, y, bands))
        call = MatmulCall(*operands, m, n, threads, band_rows, columns, stride, x.dtype == torch.bfloat16)
        self.matmul(ctypes.byref(weight), ctypes.byref(call))
        return y

    def _by_torch(self, weight: ctypes.Structure, x: Tensor, stride: int, n: int, bias: Tensor | None) -> Tensor:
        """Unpack some rows at a time, [rows, stride], and let torch multiply them with x, [M, K] float32."""
        m, k = x.shape
        parts = -(-n // UNPACKED_ROWS)
        most = -(-n // (parts * ROW_GRAIN)) * ROW_GRAIN
        rows, y = _buffer.rows(most, stride), x.new_empty(m, n)
        for first in range(0, n, most):
            count = min(most, n - first)
            threads = cpp.threads_for(count * stride)
            self.unpack(ctypes.byref(weight), first, count, stride, rows.data_ptr(), threads)
            # Straight into y: with a copy of each part, the matmul takes 2 to 4 % longer.
            part, w = y[:, first : first + count], rows[:count, :k].T
            if bias is None:
                torch.mm(x, w, out=part)
            else:
                torch.addmm(bias[first : first + count], x, w, out=part)
        return y
