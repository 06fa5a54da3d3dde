"""The GPU kernel for few tokens, straight from the packed groups, by Stream-K within a block."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.gqs.activations import rounded, rounds_activations
from semisparse.formats.gqs.pack import TILE_GROUPS, TILE_ROWS, size_of
from semisparse.formats.kernel import Pass, Problem, Product, fused_cost
from semisparse.quant.group import KINDS
from semisparse.runtime.device import DeviceFacts, device_facts
from semisparse.runtime.launch import CudaKernel, address
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

MOST_SHARED = {"sm_80": 163 << 10, "sm_90a": 227 << 10, "sm_100a": 227 << 10}
"""Bytes of shared memory that a block may have; 99 KiB on other devices."""

BATCH = 4
"""Chunks along K that a warp multiplies at once; a strip."""

STRIP_COLUMNS = TILE_GROUPS * SIZE * BATCH

PIECE, SLOTS = 64, 8
"""Groups that a warp asks for at once, and how many times as many it has room for in shared memory."""

HEADERS_BYTES = 64 * 16
"""Of the masks and starts of chunks that a warp looks ahead to."""

AHEAD = 256
"""Groups that each warp has L2 bring while the kernel before ends. With 512 large weights are slower."""

WARPS = 8
"""Of a block, or twice or half as many."""

OWN_TILES = 2
"""Tiles of rows for each processor up to which a block has one of its own."""

PROCESSOR_WARPS = 16
"""That share a processor; what each may have of its registers. More, of fewer chunks at once, were slower (LOG.md)."""


class Build(NamedTuple):
    """What the kernel is compiled for: how many tokens, whether it rounds them, and the warps of a block.

    ``whole`` says that x has no ragged end; ``own`` that each block has one tile of rows.
    """

    dtype: torch.dtype
    bits: int
    tokens: int
    rounds: bool
    whole: bool
    warps: int
    own: bool

    @property
    def blocks(self) -> int:
        """How many share a processor."""
        return max(1, PROCESSOR_WARPS // self.warps)

    @property
    def defines(self) -> Defines:
        """Macros."""
        return {
            "SCALAR": SCALARS[self.dtype],
            "BITS": self.bits,
            "TOKENS": self.tokens,
            "ROUNDED": int(self.rounds),
            "WARPS": self.warps,
            "BATCH": BATCH // 2 if self.tokens == WEIGHT_TOKENS[-1] and (self.bits == 8 or not self.whole) else BATCH,
            "BLOCKS": self.blocks,
            "PIECE": PIECE,
            "SLOTS": SLOTS,
            "WHOLE": int(self.whole),
            "OWN": int(self.own),
        }

    def shared_bytes(self, k: int) -> int:
        """Give the dynamic shared memory of a block: the warps' streams, and x with the sums of its groups where
        products by codes keep them there."""
        stream = PIECE * SLOTS * (SIZE * self.bits // 8 + 3) + HEADERS_BYTES
        if self.tokens not in CODE_TOKENS:
            return self.warps * stream
        columns = self.tokens * -(-k // STRIP_COLUMNS) * STRIP_COLUMNS
        return self.warps * stream + (STRIP_COLUMNS + columns) * (1 if self.rounds else 2) + columns // SIZE * 4

    def fits(self, k: int, arch: str) -> bool:
        """Say whether a block finds room in a processor."""
        static = self.warps * self.tokens * (2 * TILE_ROWS + 1) * 4
        return self.shared_bytes(k) + static <= MOST_SHARED.get(arch, 99 << 10)


# The extremes of what is compiled.
DECODE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    tuple(
        build.defines
        for build in (
            Build(torch.bfloat16, 4, 2, True, False, 16, False),
            Build(torch.float16, 4, 1, False, True, 16, False),
            Build(torch.float16, 4, 1, True, True, 8, True),
            Build(torch.float16, 4, 2, False, True, 8, True),
            Build(torch.float16, 4, 8, False, True, 8, True),
            Build(torch.bfloat16, 4, 16, False, False, 8, True),
            Build(torch.float16, 8, 16, False, True, 8, True),
            Build(torch.bfloat16, 8, 16, False, False, 8, True),
            Build(torch.bfloat16, 8, 8, False, True, 4, True),
        )
    ),
)

SOURCES = (DECODE,)

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def _unlike_refusal(problem: Problem) -> str | None:
    """Say why `decode` is not written for ``problem``, on whatever GPU, or None if it is."""
    if not 1 <= problem.m <= MAX_DECODE_TOKENS:
        return f"takes 1 to {MAX_DECODE_TOKENS} tokens, got {problem.m}"
    if problem.dtype not in SCALARS or problem.weight_dtype != problem.dtype:
        return f"x and w are both float16 or both bfloat16, got {problem.dtype} and {problem.weight_dtype}"
    if size_of(problem.pattern) != SIZE:
        return f"takes groups of {SIZE}, this weight has groups of {size_of(problem.pattern)}"
    if KINDS.get(str(problem.params.get("kind"))) not in DECODE_BITS:
        return f"takes codes of 4 or 8 bits, this weight is {problem.params.get('kind')}"
    return None


def decode_refusal(problem: Problem) -> str | None:
    """Say why `prepare_decode` cannot compute ``problem`` here, or None if it can."""
    unlike = _unlike_refusal(problem)
    if unlike:
        return unlike
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    return unavailable()


def prepare_decode(problem: Problem) -> Product:
    """Prepare to multiply 1 to 16 tokens.

    One or two are multiplied by 4-bit codes, in int8 where the kind is ``w4a8``; more by the weights that codes stand
    for, rounded to x's dtype.

    Args:
        problem: x and w in float16 or bfloat16.
    """
    m, n, k, dtype, device = problem.m, problem.n, problem.k, problem.dtype, problem.device
    kept = int(problem.params["kept"])
    if not kept:
        return lambda x, packed, bias: x.new_zeros(m, n) if bias is None else bias.to(dtype).repeat(m, 1)
    facts, rounds = device_facts(device), rounds_activations(problem.params)
    tiles, tile_chunks = -(-n // TILE_ROWS), -(-k // (SIZE * TILE_GROUPS))

    @cache
    def launch_of(whole: bool) -> tuple[Build, int, CudaKernel, tuple[int, ...]]:
        build = _build_of(
            m, k, Build(dtype, KINDS[str(problem.params["kind"])], 0, rounds, whole, WARPS, True), tiles, facts
        )
        blocks = tiles if build.own else min(build.blocks * facts.processors, tiles)
        ahead = min(AHEAD, -(-kept // (16 * blocks * build.warps)) * 16) if facts.overlaps_launches else 0
        sizes = (m, n, k, tile_chunks, tiles * tile_chunks, kept, *divmod(tiles, blocks), ahead)
        return build, blocks, _decode_kernel(device, build, build.shared_bytes(k)), sizes

    def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        build, blocks, kernel, sizes = launch_of(x.data_ptr() % 16 == 0 and k % STRIP_COLUMNS == 0)
        if rounds and not build.rounds:
            x = rounded(x, dtype)
        y = x.new_empty(m, n)
        bias = None if bias is None else bias.to(dtype).contiguous()
        stored = [_aligned(packed.tensors[name]) for name in ("masks", "starts", "codes", "scale", "zero")]
        operands = [x, *stored, bias, y]
        threads, pointers = 32 * build.warps, map(address, operands)
        kernel(device, (blocks, 1, 1), threads, *pointers, *sizes, dependent=facts.overlaps_launches)
        return y

    return decode


def _aligned(tensor: Tensor) -> Tensor:
    """Give a tensor whose memory can be copied 16 bytes at a time."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _build_of(m: int, k: int, build: Build, tiles: int, facts: DeviceFacts) -> Build:
    """Choose for how many tokens the kernel is compiled, and a block's warps: for a tile of its own, or for several."""
    few = tiles <= OWN_TILES * facts.processors
    if build.bits == 4 and m <= CODE_TOKENS[-1]:
        by_codes = build._replace(tokens=next(tokens for tokens in CODE_TOKENS if m <= tokens), own=few)
        for warps in (WARPS, WARPS // 2) if few else (2 * WARPS, WARPS):
            if by_codes._replace(warps=warps).fits(k, facts.arch):
                return by_codes._replace(warps=warps)
    tokens = next(tokens for tokens in WEIGHT_TOKENS if m <= tokens)
    return build._replace(tokens=tokens, rounds=False, own=True, warps=WARPS if few else WARPS // 2)


@lru_cache(maxsize=256)
def _decode_kernel(device: torch.device, build: Build, shared: int) -> CudaKernel:
    cubin = compile_cubin(DECODE.path, device_facts(device).arch, build.defines)
    return CudaKernel(cubin, "semisparse_gqs_decode", (*[_POINTER] * 8, *[_INT] * 9), shared)


UNPACKING = {4: (13, 1), 8: (24, 0.5)}
"""By bits, operations that `decode` takes a kept weight, and a kept weight and token, on an H200."""


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Give the passes of a product: rounding x; then one fused pass for few tokens, unpacking first for the rest."""
    m, n, k = problem.m, problem.n, problem.k
    on_gpu = problem.device.type == "cuda"
    fused = _unlike_refusal(problem) is None if on_gpu else m <= MAX_DECODE_TOKENS
    each, each_token = UNPACKING.get(KINDS[str(problem.params["kind"])], (0, 0))
    by_decode = fused_cost(problem, weight_bytes, (each + each_token * m) * n * k * problem.pattern.density)
    passes: list[Pass] = []
    if rounds_activations(problem.params):
        if on_gpu and fused and m <= CODE_TOKENS[-1]:  # `decode` rounds these itself
            return (replace(*by_decode, unit="tensor int8"),)
        passes.append(Pass(m * k * (problem.dtype.itemsize + 1), 0, "tensor int8"))
    if fused:
        return (*passes, *by_decode)
    dense_bytes = n * k * problem.weight_dtype.itemsize
    return (*passes, Pass(weight_bytes + dense_bytes, 0, "fp32"), *fused_cost(problem, dense_bytes))
