"""The GPU kernels: up to 16 tokens straight from the packed groups, by Stream-K; more by unpacking first."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Pass, Problem, fused_cost
from semisparse.formats.gqs.pack import TILE_GROUPS, TILE_ROWS, size_of
from semisparse.quant.group import KINDS
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin, unavailable

MAX_DECODE_TOKENS = 16

SIZE = 16
"""Weights of a group that `decode` is written for."""

DECODE_BITS = (4, 8)

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

TOKENS_A_SET = 8

BATCH = 4
"""Chunks along K that a warp loads at once; a strip."""


@dataclass(frozen=True)
class Build:
    """What a decode kernel is compiled for.

    Args:
        warps: of a block.
        blocks: of a processor, which registers are left for, and which share the work.
    """

    warps: int
    blocks: int


LARGE, SMALL = Build(8, 2), Build(4, 5)
"""Blocks of eight warps for few rows or many tokens, of four else."""


def _defines(dtype: torch.dtype, bits: int, sets: int, whole: bool, build: Build) -> Defines:
    return {
        "SCALAR": SCALARS[dtype],
        "BITS": bits,
        "SETS": sets,
        "WARPS": build.warps,
        "BATCH": BATCH,
        "BLOCKS": build.blocks,
        "WHOLE": int(whole),
    }


# The extremes of what is compiled.
DECODE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    (
        _defines(torch.float16, 4, 1, True, LARGE),
        _defines(torch.bfloat16, 4, 2, False, LARGE),
        _defines(torch.float16, 8, 2, False, LARGE),
        _defines(torch.bfloat16, 8, 2, True, LARGE),
        _defines(torch.float16, 4, 1, False, SMALL),
        _defines(torch.bfloat16, 8, 1, True, SMALL),
    ),
    spills_allowed="8 bytes of stack where K is no multiple of 256 and x is read value by value, 9 tokens or more",
)

SOURCES = (DECODE,)

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def decode_refusal(problem: Problem) -> str | None:
    """Say why `decode` cannot compute ``problem`` here, or None if it can."""
    if not 1 <= problem.m <= MAX_DECODE_TOKENS:
        return f"takes 1 to {MAX_DECODE_TOKENS} tokens, got {problem.m}"
    if problem.dtype not in SCALARS or problem.weight_dtype != problem.dtype:
        return f"x and w are both float16 or both bfloat16, got {problem.dtype} and {problem.weight_dtype}"
    if size_of(problem.pattern) != SIZE:
        return f"takes groups of {SIZE}, this weight has groups of {size_of(problem.pattern)}"
    if KINDS.get(str(problem.params.get("kind"))) not in DECODE_BITS:
        return f"takes codes of 4 or 8 bits, this weight is {problem.params.get('kind')}"
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    return unavailable()


def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply 1 to 16 tokens.

    Args:
        x: [M, K] float16 or bfloat16.
        packed: in x's dtype.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype.
    """
    (m, k), n = x.shape, packed.shape[0]
    kept = len(packed.tensors["zero"])
    if not kept:
        return x.new_zeros(m, n) if bias is None else bias.to(x.dtype).repeat(m, 1)
    tiles, tile_chunks = packed.tensors["masks"].shape
    strips = tiles * -(-tile_chunks // BATCH)
    sets, bits = -(-m // TOKENS_A_SET), KINDS[str(packed.params["kind"])]
    whole = k % (TILE_GROUPS * SIZE * BATCH) == 0 and x.data_ptr() % 16 == 0
    tried = x.dtype == torch.float16 and bits == 4 and sets == 1 and whole
    build, blocks = _divide(tiles, tried, device_facts(x.device).processors)
    blocks = min(blocks, strips)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    parts = torch.empty((blocks, 2, TILE_ROWS * TOKENS_A_SET * sets), dtype=torch.float32, device=x.device)
    stored = [packed.tensors[name] for name in ("masks", "starts", "codes", "scale", "zero")]
    operands = [x, *stored, None if bias is None else bias.to(x.dtype), y, parts, _arrivals(x.device, tiles)]
    operands = [None if operand is None else operand.contiguous() for operand in operands]
    pointers = [None if operand is None else operand.data_ptr() for operand in operands]
    kernel = _decode_kernel(x.device, x.dtype, bits, sets, whole, build)
    kernel(
        x.device, (blocks, 1, 1), 32 * build.warps, *pointers, m, n, k, tile_chunks, kept - 1, *divmod(strips, blocks)
    )
    return y


def _divide(tiles: int, tried: bool, processors: int) -> tuple[Build, int]:
    """Choose the build, and how many blocks share the work of some tiles, as was fastest on an H200.

    Where there is a block for each tile, none waits for another: 7.0 us for 8.3 at 4096 x 4096. Small blocks are taken
    where they have been ``tried`` on a GPU: for up to 8 tokens in float16, W4, and a K of whole strips.
    """
    most = LARGE.blocks * processors
    if tiles <= most:
        return LARGE, tiles
    return (SMALL, SMALL.blocks * processors) if tried else (LARGE, most)


@cache
def _decode_kernel(
    device: torch.device, dtype: torch.dtype, bits: int, sets: int, whole: bool, build: Build
) -> CudaKernel:
    cubin = compile_cubin(DECODE.path, device_facts(device).arch, _defines(dtype, bits, sets, whole, build))
    return CudaKernel(cubin, "semisparse_gqs_decode", (*[_POINTER] * 10, *[_INT] * 7))


def _arrivals(device: torch.device, tiles: int) -> Tensor:
    """Give the counters of a stream's kernels, zero between them.

    As cuBLAS's workspaces are, they are one stream's: graphs captured on one stream must not run at the same time.
    """
    rounded = 1 << (tiles - 1).bit_length()
    return _zeroed(device, torch.cuda.current_stream(device).cuda_stream, max(rounded, 4096))


@cache
def _zeroed(device: torch.device, stream: int, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Give the passes of a product: fused for few tokens, an unpacking pass first for many."""
    if problem.m <= MAX_DECODE_TOKENS:
        return fused_cost(problem, weight_bytes)
    dense_bytes = problem.n * problem.k * problem.weight_dtype.itemsize
    return (Pass(weight_bytes + dense_bytes, 0, "fp32"), *fused_cost(problem, dense_bytes))
