"""Row panels on a CPU, through kernel.cpp: matmul from the lists, unpacking, and the check of a file's lists."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError, KernelError
from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.storage.deltas import INDEX_DTYPES, LANES, PANELS, delta_bits_of, layout_of
from semisparse.formats.ec_csr.storage.panels import STORED, is_paired, panel_rows_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime import cpp

PASS_TOKENS = 8
"""Tokens per pass over the lists."""

MAX_TOKENS = 16
"""Maximum tokens of the kernel. For more, unpacking the weight once for all tokens is faster."""

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

LEAVES_PANEL = "leaves its panel"
ENDS_ROW = "ends a row where no kernel tests for it"
SKIPS_ROW = "skips a row"
PAST_K = "has a weight past K = {k}"
PAST_N = "goes past row N = {n}"
TWICE = "stores a weight twice"
GOES_BACK = "begins a segment below the end of the one before"
FAULTS = ("", LEAVES_PANEL, ENDS_ROW, SKIPS_ROW, PAST_K, PAST_N, TWICE, GOES_BACK)
"""Messages by the number of the fault in kernel.cpp's enum Fault."""

ERRORS = {1: "its sizes are beyond what the kernel supports", 2: "there is not enough memory"}
"""Messages by the number in kernel.cpp's enum Status; 0 is success."""


class _Weight(ctypes.Structure):
    """What kernel.cpp reads. It keeps the tensors alive that it points into."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in STORED),
        *((name, ctypes.c_int64) for name in ("n", "k", "panel_rows", "panels", "bits", "wide", "type")),
    )

    def __init__(self, packed: Packed):
        self.tensors = [packed.tensors[name].contiguous() for name in STORED]
        super().__init__(
            *(tensor.data_ptr() for tensor in self.tensors),
            *packed.shape,
            panel_rows_of(packed.params),
            len(packed.tensors["panel_loads"]) - 1,
            delta_bits_of(packed.params),
            packed.tensors["bases"].dtype == INDEX_DTYPES[32],
            TYPES[packed.dtype],
        )


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if layout_of(problem.params) != PANELS:
        return f"reads row panels, this weight is stored in {layout_of(problem.params)}"
    if is_paired(problem.params):
        return "reads panels of consecutive rows, this weight is in a GPU's layout"
    if problem.dtype not in TYPES:
        return f"x is {problem.dtype}; it takes float32, float16 and bfloat16"
    return cpp.refusal()


def prepare(problem: Problem) -> Product:
    """Compile kernel.cpp, and return the matmul: from the lists for up to 16 tokens, else with the weight unpacked.

    Raises:
        KernelError: kernel.cpp cannot be compiled.
    """
    _library()
    return _from_lists if problem.m <= MAX_TOKENS else _unpacked


def _unpacked(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, packed.dtype)
    return F.linear(x.to(wide), unpack(packed).to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


def _from_lists(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    (m, k), n = x.shape, packed.shape[0]
    together = 1 if m == 1 else PASS_TOKENS
    padded = F.pad(x.float(), (0, -k % LANES, 0, -m % together)).view(-1, together, -(-k // LANES), LANES)
    passes = padded.permute(0, 3, 2, 1).contiguous()  # a lane's columns are adjacent
    y, weight = passes.new_empty(len(passes) * together, n), _Weight(packed)
    for first, tokens in enumerate(passes):
        to = y[first * together :]
        _call("matmul", weight, tokens.data_ptr(), to.data_ptr(), together, cpp.threads_for(together * n * k))
    y = y[:m]
    return (y if bias is None else y + bias).to(x.dtype)


def unpack(packed: Packed) -> Tensor:
    """Return a weight of row panels, [N, K] in its dtype.

    Raises:
        KernelError: kernel.cpp cannot be compiled.
    """
    weight = packed.tensors["values"].new_zeros(packed.shape, dtype=packed.dtype)
    _call("unpack", _Weight(packed), weight.data_ptr(), cpp.threads_for(weight.numel()))
    return weight


def check_lists(packed: Packed) -> int:
    """Check every entry of every list, given ``panel_loads`` and ``bases`` that stay inside the values and the panels.

    Returns:
        The span: the most rows that one segment of a list covers.
    Raises:
        FormatError: names the lane and the panel, and what is wrong.
        KernelError: kernel.cpp cannot be compiled, or memory runs out.
    """
    result = (ctypes.c_int64 * 4)()
    _call("check", _Weight(packed), result, cpp.threads_for(packed.tensors["values"].numel()))
    fault, panel, lane, span = result
    if fault:
        (n, k), what = packed.shape, FAULTS[fault]
        raise FormatError(f"tensor deltas: the list of lane {lane} in panel {panel} {what.format(n=n, k=k)}")
    return span


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), f"ec_csr_{name}")(*arguments)
    if status:
        raise KernelError(f"ec_csr_{name} of kernel.cpp refuses the weight: {ERRORS[status]}")


@cache
def _library() -> ctypes.CDLL:
    library = cpp.load(Path(__file__).with_name("kernel.cpp"))
    weight, pointer = ctypes.POINTER(_Weight), ctypes.c_void_p
    library.ec_csr_matmul.argtypes = (weight, pointer, pointer, ctypes.c_int, ctypes.c_int)
    library.ec_csr_unpack.argtypes = (weight, pointer, ctypes.c_int)
    library.ec_csr_check.argtypes = (weight, pointer, ctypes.c_int)
    return library
