"""GPU kernels: decode straight from the packed bytes for few tokens, unpack and cuBLAS for many."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, Params, Pass, Problem, fused_cost
from semisparse.formats.ec_csr.layout import GRANULARITIES, PANEL_ROWS, delta_bits_of, index_bits_for, layout_of
from semisparse.formats.ec_csr.read import rows_of_slots
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin, unavailable

MAX_DECODE_TOKENS = 16

TOKENS = (1, 2, 4, 8, 16)
"""Tokens that a build has registers for."""

SUMS = 32
"""Of a lane, rows times tokens: more would not fit its registers."""

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}

BITS = {2: "unsigned short", 4: "unsigned int"}

INDICES = {16: "unsigned short", 32: "unsigned int"}

PANEL_WARPS = 16
PAPER_WARPS = 4
UNPACK_WARPS = 4
ADD_THREADS = 256

AHEAD = 4
"""Loads under way in each lane while one is used."""

BLOCKS = 1

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def _decode_defines(dtype: torch.dtype, tokens: int, params: Params) -> dict[str, str | int]:
    paper = layout_of(params) == "paper"
    defines: dict[str, str | int] = {
        "SCALAR": SCALARS[dtype],
        "TOKENS": tokens,
        "DELTA_BITS": delta_bits_of(params),
        "AHEAD": AHEAD,
        "COARSEST": int(params["granularity"]),
        "INDEX": INDICES[index_bits_for(int(params["k"]))],
        "WARPS": PAPER_WARPS if paper else PANEL_WARPS,
    }
    return defines if paper else {**defines, "BLOCKS": BLOCKS}


def _unpack_defines(dtype: torch.dtype, params: Params) -> Defines:
    return {
        "SCALAR": BITS[dtype.itemsize],
        "DELTA_BITS": delta_bits_of(params),
        "INDEX": INDICES[index_bits_for(int(params["k"]))],
        "SHARED": int(layout_of(params) == "paper"),
    }


def _examples(layout: str) -> list[Params]:
    """Give params of weights that a build is made for, the extremes among them."""
    coarsest = GRANULARITIES[layout][-1]
    return [
        {"layout": layout, "delta_bits": bits, "granularity": rows, "k": k}
        for bits, rows, k in ((4, 1, 4096), (8, 1, 4096), (8, 2, 4096), (4, coarsest, 1 << 20))
    ]


def _decode_source(file: str, layout: str) -> CudaSource:
    """Declare what tests compile: each dtype, each width, one token and as many as a build may take."""
    variants = [
        _decode_defines(dtype, tokens, params)
        for params in _examples(layout)
        for dtype, tokens in zip(SCALARS, (1, 16 // int(params["granularity"]), 2), strict=True)
    ]
    return CudaSource(Path(__file__).with_name(file), tuple(variants))


PANELS = _decode_source("panels.cu", "panels")
PAPER = _decode_source("paper.cu", "paper")
UNPACK = CudaSource(
    Path(__file__).with_name("unpack.cu"),
    tuple(
        _unpack_defines(dtype, params)
        for dtype, layout in ((torch.float16, "panels"), (torch.float32, "paper"))
        for params in _examples(layout)[1:]
    ),
)

SOURCES = (PANELS, PAPER, UNPACK)


def panels_refusal(problem: Problem) -> str | None:
    """Say why `decode_panels` cannot compute ``problem`` here, or None if it can."""
    reason = _refusal(problem, "panels")
    if reason is None and not _tokens_of_build(problem.params, problem.dtype, problem.device, problem.m):
        needed = _shared_bytes(problem.params, problem.dtype, 1)
        return f"one token needs {needed} bytes of shared memory, the device has {_shared_limit(problem.device)}"
    return reason


def paper_refusal(problem: Problem) -> str | None:
    """Say why `decode_paper` cannot compute ``problem`` here, or None if it can."""
    return _refusal(problem, "paper")


def _refusal(problem: Problem, layout: str) -> str | None:
    if layout_of(problem.params) != layout:
        return f"reads the layout {layout}, this weight is stored in {layout_of(problem.params)}"
    if not 1 <= problem.m <= MAX_DECODE_TOKENS:
        return f"takes 1 to {MAX_DECODE_TOKENS} tokens, got {problem.m}"
    return unpack_refusal(problem)


def unpack_refusal(problem: Problem) -> str | None:
    """Say why `unpack_and_multiply` cannot compute ``problem`` here, or None if it can."""
    if problem.dtype not in SCALARS or problem.dtype != problem.weight_dtype:
        return f"x and w have one dtype, got {problem.dtype} and {problem.weight_dtype}"
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    return unavailable()


def _shared_bytes(params: Params, dtype: torch.dtype, tokens: int) -> int:
    """Give what a thread block of `decode_panels` needs: x, one token of it widened, and a partial sum for each slot."""
    feature = 4 if tokens == 1 else tokens * dtype.itemsize
    return -(-int(params["k"]) * feature // 16) * 16 + int(params["panel_slots"]) * tokens * 4


@cache
def _shared_limit(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def _tokens_of_build(params: Params, dtype: torch.dtype, device: torch.device, m: int) -> int:
    """Give the tokens of a pass over the weight: all if registers and shared memory hold them; 0 if not even one."""
    fitting = [
        tokens
        for tokens in _tokens_in_registers(params)
        if _shared_bytes(params, dtype, tokens) <= _shared_limit(device)
    ]
    return min((tokens for tokens in fitting if tokens >= m), default=max(fitting, default=0))


def _tokens_in_registers(params: Params) -> tuple[int, ...]:
    return tuple(tokens for tokens in TOKENS if tokens * int(params["granularity"]) <= SUMS)


def decode_panels(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply 1 to 16 tokens with a weight in the layout ``panels``.

    Args:
        x: [M, K] float16, bfloat16 or float32.
        packed: in x's dtype.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype, accumulated in float32.
    """
    x, bias, y = _operands(x, packed, bias)
    (m, k), n = x.shape, packed.shape[0]
    kernel, tokens = _panels_kernel(tuple(packed.params.items()), x.dtype, x.device, m)
    names = ("values", "deltas", "bases", "bundles", "slots", "row_slots")
    operands = [x, *_stored(packed, names), bias, y]
    grid = (-(-n // PANEL_ROWS), -(-m // tokens), 1)
    kernel(x.device, grid, 32 * PANEL_WARPS, *_addresses(operands), m, n, k, packed.params["panel_bundles"])
    return y


def decode_paper(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply 1 to 16 tokens with a weight in the layout ``paper``.

    Args:
        x: [M, K] float16, bfloat16 or float32.
        packed: in x's dtype.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype, accumulated in float32.
    """
    x, bias, y = _operands(x, packed, bias)
    (m, k), n = x.shape, packed.shape[0]
    compute, add, tokens = _paper_kernels(tuple(packed.params.items()), x.dtype, x.device, m)
    bundles, slots = len(packed.tensors["bundles"]), len(packed.tensors["slots"])
    groups = -(-m // tokens)
    partial = torch.empty((groups, slots, tokens), dtype=torch.float32, device=x.device)
    operands = [x, *_stored(packed, ("values", "deltas", "bases", "bundles", "slots")), partial]
    if bundles:
        grid = (-(-bundles // PAPER_WARPS), groups, 1)
        compute(x.device, grid, 32 * PAPER_WARPS, *_addresses(operands), bundles, m, k, slots)
    operands = [partial, *_stored(packed, ("row_slots",)), bias, y]
    add(x.device, (-(-n // ADD_THREADS), m, 1), ADD_THREADS, *_addresses(operands), m, n, slots)
    return y


def unpack(packed: Packed) -> Tensor:
    """Give the weight back, [N, K], on its GPU."""
    n, k = packed.shape
    bundles = len(packed.tensors["bundles"])
    weight = torch.zeros((n, k), dtype=packed.dtype, device=packed.tensors["values"].device)
    if bundles:
        operands = [
            *_stored(packed, ("values", "deltas", "bases", "bundles")),
            rows_of_slots(packed).int(),
            weight,
        ]
        kernel = _unpack_kernel(tuple(packed.params.items()), packed.dtype, weight.device)
        grid = (-(-bundles // UNPACK_WARPS), 1, 1)
        kernel(weight.device, grid, 32 * UNPACK_WARPS, *_addresses(operands), bundles, k)
    return weight


def unpack_and_multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Unpack the whole weight and let cuBLAS multiply.

    Args:
        x: [M, K] float16, bfloat16 or float32.
        packed: in x's dtype.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype.
    """
    return F.linear(x, unpack(packed), None if bias is None else bias.to(x.dtype))


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Give the passes of a product: fused for few tokens, an unpacking pass first for many."""
    if problem.m <= MAX_DECODE_TOKENS:
        return fused_cost(problem, weight_bytes)
    dense_bytes = problem.n * problem.k * problem.weight_dtype.itemsize
    return (Pass(weight_bytes + dense_bytes, 0, "fp32"), *fused_cost(problem, dense_bytes))


def _operands(x: Tensor, packed: Packed, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    y = torch.empty((x.shape[0], packed.shape[0]), dtype=x.dtype, device=x.device)
    return x.contiguous(), None if bias is None else bias.to(x.dtype).contiguous(), y


def _stored(packed: Packed, names: tuple[str, ...]) -> list[Tensor]:
    return [packed.tensors[name].contiguous() for name in names]


def _addresses(operands: list[Tensor | None]) -> list[int | None]:
    return [None if operand is None else operand.data_ptr() for operand in operands]


@lru_cache(maxsize=1024)
def _panels_kernel(
    params: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: torch.device, m: int
) -> tuple[CudaKernel, int]:
    known = dict(params)
    tokens = _tokens_of_build(known, dtype, device, m)
    cubin = compile_cubin(PANELS.path, device_facts(device).arch, _decode_defines(dtype, tokens, known))
    shared = _shared_bytes(known, dtype, tokens)
    return CudaKernel(cubin, "semisparse_ec_csr_panels", (*[_POINTER] * 9, *[_INT] * 4), shared), tokens


@lru_cache(maxsize=1024)
def _paper_kernels(
    params: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: torch.device, m: int
) -> tuple[CudaKernel, CudaKernel, int]:
    known = dict(params)
    fitting = _tokens_in_registers(known)
    tokens = min((tokens for tokens in fitting if tokens >= m), default=max(fitting))
    cubin = compile_cubin(PAPER.path, device_facts(device).arch, _decode_defines(dtype, tokens, known))
    compute = CudaKernel(cubin, "semisparse_ec_csr_paper", (*[_POINTER] * 7, *[_INT] * 4))
    return compute, CudaKernel(cubin, "semisparse_ec_csr_add", (*[_POINTER] * 4, *[_INT] * 3)), tokens


@lru_cache(maxsize=1024)
def _unpack_kernel(params: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: torch.device) -> CudaKernel:
    cubin = compile_cubin(UNPACK.path, device_facts(device).arch, _unpack_defines(dtype, dict(params)))
    return CudaKernel(cubin, "semisparse_ec_csr_unpack", (*[_POINTER] * 6, *[_INT] * 2))
