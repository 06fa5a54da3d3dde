"""The GPU kernel for few tokens, straight from the packed groups, by Stream-K."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Pass, Problem, fused_cost
from semisparse.formats.gqs.activations import quantise_tokens, rounded, rounds_activations
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

CODE_TOKENS = (1, 2)
"""How many the builds take that multiply by 4-bit codes."""

WEIGHT_TOKENS = (8, 16)
"""How many those take that make weights of the codes first."""

MOST_SUM_BYTES = 32 << 10
"""Of shared memory, for the sums of x by groups that a product by codes needs."""

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


def _defines(dtype: torch.dtype, bits: int, tokens: int, rounds: bool, whole: bool, build: Build) -> Defines:
    return {
        "SCALAR": SCALARS[dtype],
        "BITS": bits,
        "TOKENS": tokens,
        "ROUNDED": int(rounds),
        "WARPS": build.warps,
        "BATCH": BATCH,
        "BLOCKS": build.blocks,
        "WHOLE": int(whole),
    }


# The extremes of what is compiled.
DECODE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    (
        _defines(torch.bfloat16, 4, 16, False, False, LARGE),
        _defines(torch.float16, 8, 16, False, False, LARGE),
        _defines(torch.bfloat16, 8, 8, False, True, SMALL),
        _defines(torch.float16, 4, 1, False, True, SMALL),
        _defines(torch.bfloat16, 4, 1, False, False, SMALL),
        _defines(torch.float16, 4, 4, False, False, LARGE),
        _defines(torch.float16, 4, 1, True, True, SMALL),
        _defines(torch.bfloat16, 4, 4, True, False, LARGE),
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
    if rounds_activations(problem.params) and importlib.util.find_spec("triton") is None:
        return "triton, which rounds the activations, is not installed: pip install 'semisparse[cuda]'"
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    return unavailable()


def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply 1 to 16 tokens.

    One or two are multiplied by 4-bit codes, in int8 where the kind is ``w4a8``; more by the weights that codes stand for,
    rounded to x's dtype.

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
    bits, dtype = KINDS[str(packed.params["kind"])], x.dtype
    tokens, sum_bytes = _tokens_of(m, k, bits)
    x_scale, rounds = None, rounds_activations(packed.params) and tokens in CODE_TOKENS
    if rounds:
        x, x_scale = quantise_tokens(x)
    elif rounds_activations(packed.params):
        x = rounded(x, dtype)
    tiles, tile_chunks = packed.tensors["masks"].shape
    strips = tiles * -(-tile_chunks // BATCH)
    build, blocks = _divide(tiles, tokens, device_facts(x.device).processors)
    blocks = min(blocks, strips)
    y = torch.empty((m, n), dtype=dtype, device=x.device)
    parts = torch.empty((blocks, 2, TILE_ROWS * max(tokens, 8)), dtype=torch.float32, device=x.device)
    stored = [packed.tensors[name] for name in ("masks", "starts", "codes", "scale", "zero")]
    bias = None if bias is None else bias.to(dtype)
    operands = [x, x_scale, *stored, bias, y, parts, _arrivals(x.device, tiles)]
    operands = [None if operand is None else operand.contiguous() for operand in operands]
    pointers = [None if operand is None else operand.data_ptr() for operand in operands]
    whole = k % (TILE_GROUPS * SIZE * BATCH) == 0 and pointers[0] % 16 == 0
    kernel = _decode_kernel(x.device, dtype, bits, tokens, rounds, whole, build, sum_bytes)
    sizes = (m, n, k, tile_chunks, kept - 1, *divmod(strips, blocks))
    kernel(x.device, (blocks, 1, 1), 32 * build.warps, *pointers, *sizes)
    return y


def _tokens_of(m: int, k: int, bits: int) -> tuple[int, int]:
    """Choose for how many tokens the kernel is compiled, and give the bytes that it needs for their sums."""
    for tokens in CODE_TOKENS:
        strip_columns = TILE_GROUPS * SIZE * BATCH
        sum_bytes = -(-k // strip_columns) * strip_columns // SIZE * tokens * 4
        if bits == 4 and m <= tokens and sum_bytes <= MOST_SUM_BYTES:
            return tokens, sum_bytes
    return next(tokens for tokens in WEIGHT_TOKENS if m <= tokens), 0


def _divide(tiles: int, tokens: int, processors: int) -> tuple[Build, int]:
    """Choose the build, and how many blocks share the work of some tiles, as was fastest on an H200.

    Where there is a block for each tile, none waits for another: 7.0 us for 8.3 at 4096 x 4096.
    """
    if tiles <= LARGE.blocks * processors:
        return LARGE, tiles
    build = SMALL if tokens <= 2 else LARGE
    return build, build.blocks * processors


@lru_cache(maxsize=256)
def _decode_kernel(
    device: torch.device,
    dtype: torch.dtype,
    bits: int,
    tokens: int,
    rounds: bool,
    whole: bool,
    build: Build,
    sum_bytes: int,
) -> CudaKernel:
    defines = _defines(dtype, bits, tokens, rounds, whole, build)
    cubin = compile_cubin(DECODE.path, device_facts(device).arch, defines)
    return CudaKernel(cubin, "semisparse_gqs_decode", (*[_POINTER] * 11, *[_INT] * 7), sum_bytes)


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
