"""Products on a GPU: lifted activations on sparse tensor cores, our own or cuSPARSELt's; or unpacked, by cuBLAS."""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.slide24 import cuda_lift, cuda_unpack, cusparselt, hopper, layouts, tiles
from semisparse.formats.slide24.layout import lifted_columns
from semisparse.formats.slide24.pack import stored_dtype, window_of
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import address, places_of

TILES_PACE = 0.74
"""A product in 16 bits from tiles over cuBLAS's, for each column after lifting: .72 to .77 on an H200 (2:4, 6:8, 8:10
of Qwen2.5-7B's layers, 2,048 to 8,192 tokens)."""

UNPACK_TOKENS = 250
"""Which cuBLAS multiplies in the time that a weight of 16 bits is unpacked in: 70 to 330 there."""


def tiles_refusal(problem: Problem) -> str | None:
    """Say why `prepare_tiles` cannot compute ``problem`` here, or None if it can."""
    if problem.dtype not in hopper.SCALARS:
        return f"x is float16 or bfloat16, got {problem.dtype}"
    dtype = stored_dtype(problem.params) or problem.weight_dtype
    return (
        layouts.tiles_refusal(dtype, problem.device)
        or _operand_refusal(problem, "tiles")
        or cuda_lift.refusal(problem.k, window_of(problem.pattern), dtype.itemsize)
    )


def tiles_pay(problem: Problem) -> bool:
    """Say whether unpacking is slower: always in 8 bits; in 16, lifting costs more than sparse tensor cores gain."""
    if stored_dtype(problem.params) is not None:
        return True
    lifted = lifted_columns(problem.k, window_of(problem.pattern))
    return TILES_PACE * lifted / problem.k <= 1 + UNPACK_TOKENS / problem.m


def compressed_refusal(problem: Problem) -> str | None:
    """Say why `multiply_compressed` cannot compute ``problem`` here, or None if it can."""
    dtype = stored_dtype(problem.params) or problem.weight_dtype
    if importlib.util.find_spec("triton") is None:
        return "triton, which lifts the activations, is not installed: pip install 'semisparse[cuda]'"
    return layouts.compressed_refusal(dtype, problem.device) or _operand_refusal(problem, "compressed")


def _operand_refusal(problem: Problem, layout: str) -> str | None:
    stored = layouts.layout_of(problem.params)
    if stored != layout:
        return f"reads the layout {layout}, this weight is stored in {stored}"
    if "kind" not in problem.params and problem.dtype != problem.weight_dtype:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    return None if problem.m else "takes at least one token"


def prepare_tiles(problem: Problem) -> Product:
    """Prepare to lift x, rounded by tokens where the weight is, and multiply with scales and bias: a launch each.

    Sums of int8 are exact in int32 and rounded once.

    Args:
        problem: x float16 or bfloat16, in the weight's dtype where that is stored as it is; in the layout ``tiles``.
    """
    m, n, k, device, out = problem.m, problem.n, problem.k, problem.device, problem.dtype
    window, rounded = window_of(problem.pattern), stored_dtype(problem.params)
    dtype = rounded or problem.weight_dtype
    blocks, count = tiles.tile_counts(n, lifted_columns(k, window), dtype.itemsize)
    processors = device_facts(device).processors
    division = hopper.choose_division(m, count, blocks, processors)
    tokens, counters = m + -m % division.tiling.tokens, hopper.count_counters(count, m, division, processors)
    shape, lift = cuda_lift.prepare(m, k, out, rounded, window, tokens, counters)
    sums, multiply = hopper.prepare((m, n, blocks, count), dtype, out, division, device)
    *places, size = places_of(math.prod(shape) * dtype.itemsize, 4 * m, sums, 4 * counters)

    def product(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(out).contiguous()
        y = x.new_empty(m, n)
        room = x.new_empty(size, dtype=torch.uint8)
        begin = room.data_ptr()
        lifted, scales, kept, zeros = [begin + place for place in places]
        lift(x, lifted, scales if rounded else 0, zeros)
        stored = packed.tensors
        scaled = (scales, stored["scale"].data_ptr()) if rounded else (0, 0)
        multiply(stored["tiles"].data_ptr(), lifted, *scaled, address(bias), y.data_ptr(), kept, zeros)
        return y

    return product


def multiply_compressed(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Lift x, rounded by tokens where the weight is rounded, multiply, then scale and add the bias in one pass.

    Args:
        x: [M, K] float16, bfloat16 or float32; in the weight's dtype where that is stored as it is.
        packed: in the layout ``compressed``.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype. Sums of int8 are exact in int32; a bfloat16 x has them rounded once more, to bfloat16.
    """
    from semisparse.formats.slide24 import triton_lift
    from semisparse.formats.slide24.triton_scale import scale_product

    (m, _), (n, _) = x.shape, packed.shape
    window, dtype = window_of(packed.pattern), stored_dtype(packed.params)
    tokens, rows = m + -m % cusparselt.TOKENS, layouts.padded_rows(n)
    compressed = packed.tensors["compressed"]
    if dtype is None:
        product = cusparselt.multiply(triton_lift.lift(x, window, tokens), compressed, rows, x.dtype)
        if bias is None and rows == n:
            return product[:m]
        return scale_product(product, None, bias, m, n, x.dtype)
    lifted, token_scales = triton_lift.quantise_and_lift(x, dtype, window, tokens)
    product = cusparselt.multiply(lifted, compressed, rows, product_dtype(dtype, x.dtype))
    return scale_product(product, (token_scales, packed.tensors["scale"]), bias, m, n, x.dtype)


def product_dtype(dtype: torch.dtype, of_x: torch.dtype) -> torch.dtype:
    """Give the dtype in which unscaled sums are kept: two bytes where the result has no more digits, else four."""
    if of_x == torch.bfloat16:
        return torch.bfloat16
    return torch.int32 if dtype == torch.int8 else torch.float32


def unpack_refusal(problem: Problem) -> str | None:
    """Say why `unpack_and_multiply` cannot compute ``problem`` here, or None if it can."""
    if problem.dtype != problem.weight_dtype:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    return None


def unpack_and_multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Unpack the whole weight, dequantised, and let cuBLAS multiply; x is not rounded."""
    return multiply_dense(x, _unpacked(packed), bias)


def _unpacked(packed: Packed) -> Tensor:
    window, rounded = window_of(packed.pattern), stored_dtype(packed.params)
    dtype = rounded or packed.dtype
    if layouts.layout_of(packed.params) != "tiles" or cuda_unpack.refusal(window, dtype.itemsize):
        return layouts.unpack(packed)
    stored = cuda_unpack.unpack(packed.tensors["tiles"], *packed.shape, window, dtype)
    return stored if rounded is None else (stored.float() * packed.tensors["scale"][:, None]).to(packed.dtype)
