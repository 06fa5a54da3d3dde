"""The CPU's way with the layout `banks`: products from the packed bytes, and the check of a file's lists."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.layout import BACK, INDEX_DTYPES, LANES, delta_bits_of, panel_rows_of
from semisparse.formats.kernel import Problem
from semisparse.runtime import cpp

PASS_TOKENS = 8
"""Tokens of one walk over the lists."""

MAX_TOKENS = 16
"""For more, giving the weight back once for all tokens is faster."""

STORED = ("values", "deltas", "bases", "panel_loads")

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

FAULTS = (
    "",
    "leaves its panel",
    "ends a row where no kernel looks for it",
    "passes over a row",
    "has a weight past K = {k}",
    "goes past row N = {n}",
    "stores a weight twice",
    BACK,
)
"""As ec_csr.cpp numbers them."""


class _Weight(ctypes.Structure):
    """What ec_csr.cpp reads; keeps the tensors alive that it points into."""

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
    layout = problem.params.get("layout", "banks")
    if layout != "banks":
        return f"reads the layout banks, this weight is stored in {layout}"
    if problem.dtype not in TYPES:
        return f"x is {problem.dtype}; it takes float32, float16 and bfloat16"
    return cpp.refusal()


def product(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Compute ``x @ w.T + bias``, a few tokens at a time from the lists, many with the weight given back.

    Args:
        x: [M, K].
        packed: in the layout ``banks``.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype.
    Raises:
        KernelError: ec_csr.cpp cannot be compiled.
    """
    if len(x) > MAX_TOKENS:
        wide = torch.promote_types(x.dtype, packed.dtype)
        return F.linear(x.to(wide), unpack(packed).to(wide), None if bias is None else bias.to(wide)).to(x.dtype)
    (m, k), n, weight = x.shape, packed.shape[0], _Weight(packed)
    together = 1 if m == 1 else PASS_TOKENS
    padded = F.pad(x.float(), (0, -k % LANES, 0, -m % together)).view(-1, together, -(-k // LANES), LANES)
    panels = padded.permute(0, 3, 2, 1).contiguous()  # a lane's columns are neighbours
    y = torch.empty(len(panels) * together, n)
    for first, panel in enumerate(panels):
        to = y[first * together :]
        _library().ec_csr_product(weight, panel.data_ptr(), to.data_ptr(), together, cpp.threads_for(together * n * k))
    y = y[:m]
    return (y if bias is None else y + bias).to(x.dtype)


def unpack(packed: Packed) -> Tensor:
    """Give a weight in the layout ``banks`` back, [N, K] in its dtype.

    Raises:
        KernelError: ec_csr.cpp cannot be compiled.
    """
    weight = torch.zeros(packed.shape, dtype=packed.dtype)
    _library().ec_csr_unpack(_Weight(packed), weight.data_ptr(), cpp.threads_for(weight.numel()))
    return weight


def check_lists(packed: Packed) -> None:
    """Check every step of every list, given ``panel_loads`` that rise to the number of loads stored.

    Raises:
        FormatError: names the lane and the panel, and what is wrong.
        KernelError: ec_csr.cpp cannot be compiled.
    """
    found = (ctypes.c_int64 * 4)()
    _library().ec_csr_check(_Weight(packed), found, cpp.threads_for(packed.tensors["values"].numel()))
    fault, panel, lane, span = found
    n, k = packed.shape
    if fault:
        raise FormatError(f"tensor deltas: the list of lane {lane} in panel {panel} {FAULTS[fault].format(n=n, k=k)}")
    if packed.params.get("span") != span:
        raise FormatError(f"params: span is {packed.params.get('span')!r}, the lists have {span}")


@cache
def _library() -> ctypes.CDLL:
    library = cpp.load(Path(__file__).with_name("ec_csr.cpp"))
    weight, pointer = ctypes.POINTER(_Weight), ctypes.c_void_p
    library.ec_csr_product.argtypes = (weight, pointer, pointer, ctypes.c_int, ctypes.c_int)
    library.ec_csr_unpack.argtypes = (weight, pointer, ctypes.c_int)
    library.ec_csr_check.argtypes = (weight, pointer, ctypes.c_int)
    for call in (library.ec_csr_product, library.ec_csr_unpack, library.ec_csr_check):
        call.restype = None
    return library
