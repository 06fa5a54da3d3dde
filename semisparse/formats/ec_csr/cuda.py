"""GPU kernels: decode straight from the packed bytes for few tokens, unpack and cuBLAS for many."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Params
from semisparse.formats.ec_csr.layout import (
    LANES,
    SEGMENTS,
    VECTOR_BYTES,
    delta_bits_of,
    index_bits_for,
    layout_of,
    panel_rows_of,
    vector_of,
)
from semisparse.formats.kernel import Pass, Problem, Product, fused_cost
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel, address
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin, unavailable

MAX_DECODE_TOKENS = 16

TOKENS = (1, 2, 4, 8)
"""Tokens of a pass that there are builds for."""

SUMS = 16
"""Of a lane of `paper`, rows times tokens: more would not fit its registers."""

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}

INDICES = {16: "unsigned short", 32: "unsigned int"}

RING_TOKENS = 2
"""Up to so many, loads come through shared memory."""

HELD_AHEAD = 2
"""Loads under way in registers, in each lane of `banks`, while one is used."""

RING_AHEAD = {2: 4, 3: 2}
"""Likewise through shared memory, for so many thread blocks that shall fit a processor."""

RESERVED = 1024
"""Bytes of shared memory that each block takes for the system."""

PAPER_WARPS = 4
ADD_THREADS = 256

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def _banks_defines(dtype: torch.dtype, tokens: int, params: Params, blocks: int = 2) -> Defines:
    return {
        "SCALAR": SCALARS[dtype],
        "TOKENS": tokens,
        "DELTA_BITS": delta_bits_of(params),
        "INDEX": index_of(params),
        "PANEL_ROWS": panel_rows_of(params),
        "AHEAD": _ahead(tokens, blocks),
        "BLOCKS": blocks if tokens <= RING_TOKENS else 1,
    }


def _ahead(tokens: int, blocks: int) -> int:
    return RING_AHEAD[blocks] if tokens <= RING_TOKENS else HELD_AHEAD


def _paper_defines(dtype: torch.dtype, tokens: int, params: Params) -> Defines:
    return {
        "SCALAR": SCALARS[dtype],
        "TOKENS": tokens,
        "DELTA_BITS": delta_bits_of(params),
        "INDEX": index_of(params),
        "COARSEST": int(params["granularity"]),
        "WARPS": PAPER_WARPS,
    }


def index_of(params: Params) -> str:
    """Give the C type of bases."""
    return INDICES[index_bits_for(int(params["k"]))]


# What tests compile: each dtype, width and number of tokens, not all combinations.
_EXAMPLES: tuple[tuple[torch.dtype, int, Params], ...] = (
    (torch.float16, 1, {"delta_bits": 4, "granularity": 1, "k": 4096, "panel_rows": 32}),
    (torch.float32, 1, {"delta_bits": 8, "granularity": 1, "k": 4096, "panel_rows": 64}),
    (torch.bfloat16, 8, {"delta_bits": 8, "granularity": 2, "k": 4096, "panel_rows": 64}),
    (torch.float32, 2, {"delta_bits": 8, "granularity": 8, "k": 1 << 20, "panel_rows": 64}),
    (torch.float16, 4, {"delta_bits": 4, "granularity": 4, "k": 4096, "panel_rows": 32}),
)

BANKS = CudaSource(
    Path(__file__).with_name("banks.cu"),
    (
        *(_banks_defines(*example) for example in _EXAMPLES),
        *(_banks_defines(torch.bfloat16, tokens, _EXAMPLES[0][2], 3) for tokens in (1, RING_TOKENS)),
    ),
)
PAPER = CudaSource(Path(__file__).with_name("paper.cu"), tuple(_paper_defines(*example) for example in _EXAMPLES))
SOURCES = (BANKS, PAPER)


def banks_refusal(problem: Problem) -> str | None:
    """Say why `decode_banks` cannot compute ``problem`` here, or None if it can."""
    reason = _decode_refusal(problem, "banks")
    if reason is None and not _tokens_that_fit(problem.params, problem.dtype, problem.device):
        needed = _shared_bytes(problem.params, problem.dtype, 1)
        return f"one token needs {needed} bytes of shared memory, the device has {shared_limit(problem.device)}"
    return reason


def paper_refusal(problem: Problem) -> str | None:
    """Say why `decode_paper` cannot compute ``problem`` here, or None if it can."""
    return _decode_refusal(problem, "paper")


def _decode_refusal(problem: Problem, layout: str) -> str | None:
    if layout_of(problem.params) != layout:
        return f"reads the layout {layout}, this weight is stored in {layout_of(problem.params)}"
    if not 1 <= problem.m <= MAX_DECODE_TOKENS:
        return f"takes 1 to {MAX_DECODE_TOKENS} tokens, got {problem.m}"
    return refusal(problem)


def refusal(problem: Problem) -> str | None:
    """Say why no kernel for GPUs can compute ``problem`` here, or None if one may."""
    if problem.dtype not in SCALARS or problem.dtype != problem.weight_dtype:
        return f"x and w have one dtype, got {problem.dtype} and {problem.weight_dtype}"
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    return unavailable()


def _shared_bytes(params: Params, dtype: torch.dtype, tokens: int, blocks: int = 2) -> int:
    """Give what a thread block of `decode_banks` needs: x (one token is widened), each segment's sums and rows, and the
    loads under way."""
    feature = 4 if tokens == 1 else tokens * dtype.itemsize
    load = VECTOR_BYTES + max(4, vector_of(dtype) * delta_bits_of(params) // 8)
    ahead = RING_AHEAD[blocks] if tokens <= RING_TOKENS else 0
    height = -(-int(params["k"]) // LANES)
    return LANES * (height * feature + SEGMENTS * (int(params["span"]) * tokens * 4 + 4 + ahead * load))


@cache
def shared_limit(device: torch.device) -> int:
    """Give the bytes of shared memory that a thread block may have."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _tokens_that_fit(params: Params, dtype: torch.dtype, device: torch.device) -> list[int]:
    return [tokens for tokens in TOKENS if _shared_bytes(params, dtype, tokens) <= shared_limit(device)]


def _tokens_of_pass(m: int, fitting: list[int]) -> int:
    """Give the fewest that are enough for ``m``, or the most there are."""
    return min((tokens for tokens in fitting if tokens >= m), default=max(fitting))


def _resident_blocks(each: int, params: Params, dtype: torch.dtype, tokens: int, device: torch.device) -> int:
    """Give how many of its ``each`` blocks a processor shall have at once.

    Two; three if that leaves fewer places empty at the end, and registers and shared memory suffice. 11008x4096, three
    blocks: 14.0 us in one wave, 15.2 as two and one. 28672x8192, four: 60.6 us as three and one, 55.7 as twice two.
    """
    if tokens > RING_TOKENS or dtype == torch.float32:
        return 2
    room = 3 * (_shared_bytes(params, dtype, tokens, 3) + RESERVED) <= shared_limit(device) + RESERVED
    return 3 if room and -each % 3 < -each % 2 else 2


def prepare_banks(problem: Problem) -> Product:
    """Prepare to multiply 1 to 16 tokens with a weight in the layout ``banks``, in x's dtype.

    Above 8, or with large K, in several passes; accumulated in float32.

    Args:
        problem: x and w in one dtype.
    """
    m, n, k, device, params = problem.m, problem.n, problem.k, problem.device, problem.params
    facts = device_facts(device)
    tokens = _tokens_of_pass(m, _tokens_that_fit(params, problem.dtype, device))
    grid, sizes = (-(-n // panel_rows_of(params)), -(-m // tokens), 1), (m, n, k, int(params["span"]))
    resident = _resident_blocks(-(-grid[0] * grid[1] // facts.processors), params, problem.dtype, tokens, device)
    kernel = _banks_kernel(tuple(params.items()), problem.dtype, device, tokens, resident)

    def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x, bias, y = _operands(x, packed, bias)
        operands = [x, *_stored(packed, ("values", "deltas", "bases", "panel_loads")), bias, y]
        kernel(device, grid, LANES * SEGMENTS, *map(address, operands), *sizes, dependent=facts.overlaps_launches)
        return y

    return decode


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
    passes = -(-m // tokens)
    partial = torch.empty((passes, slots, tokens), dtype=torch.float32, device=x.device)
    if bundles:
        operands = [x, *_stored(packed, ("values", "deltas", "bases", "bundles", "slots")), partial]
        grid = (-(-bundles // PAPER_WARPS), passes, 1)
        compute(x.device, grid, LANES * PAPER_WARPS, *map(address, operands), bundles, m, k, slots)
    sums = [partial, packed.tensors["row_slots"].contiguous(), bias, y]
    add(x.device, (-(-n // ADD_THREADS), m, 1), ADD_THREADS, *map(address, sums), m, n, slots)
    return y


GATHERING = 14
"""Operations a kept weight and token, as the times of `decode_tiles` at 8 and 16 tokens are on an H200 (10 to 18)."""


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Give the passes of a product: fused for few tokens, an unpacking pass first for many."""
    if problem.m <= MAX_DECODE_TOKENS:
        kept = problem.n * problem.k * problem.pattern.density
        return fused_cost(problem, weight_bytes, GATHERING * problem.m * kept)
    dense_bytes = problem.n * problem.k * problem.weight_dtype.itemsize
    return (Pass(weight_bytes + dense_bytes, 0, "fp32"), *fused_cost(problem, dense_bytes))


def _operands(x: Tensor, packed: Packed, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    y = x.new_empty(x.shape[0], packed.shape[0])
    return x.contiguous(), None if bias is None else bias.to(x.dtype).contiguous(), y


def _stored(packed: Packed, names: tuple[str, ...]) -> list[Tensor]:
    return [packed.tensors[name].contiguous() for name in names]


Items = tuple[tuple[str, Any], ...]
"""Params that a cache can hold."""


@lru_cache(maxsize=1024)
def _banks_kernel(params: Items, dtype: torch.dtype, device: torch.device, tokens: int, resident: int) -> CudaKernel:
    known = dict(params)
    cubin = compile_cubin(BANKS.path, device_facts(device).arch, _banks_defines(dtype, tokens, known, resident))
    shared = _shared_bytes(known, dtype, tokens, resident)
    return CudaKernel(cubin, "semisparse_ec_csr_banks", (*[_POINTER] * 7, *[_INT] * 4), shared)


@lru_cache(maxsize=1024)
def _paper_kernels(
    params: Items, dtype: torch.dtype, device: torch.device, m: int
) -> tuple[CudaKernel, CudaKernel, int]:
    known = dict(params)
    tokens = _tokens_of_pass(m, [tokens for tokens in TOKENS if tokens * int(known["granularity"]) <= SUMS])
    cubin = compile_cubin(PAPER.path, device_facts(device).arch, _paper_defines(dtype, tokens, known))
    compute = CudaKernel(cubin, "semisparse_ec_csr_paper", (*[_POINTER] * 7, *[_INT] * 4))
    return compute, CudaKernel(cubin, "semisparse_ec_csr_add", (*[_POINTER] * 4, *[_INT] * 3)), tokens
