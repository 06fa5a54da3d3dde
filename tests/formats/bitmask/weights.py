"""Weights, operands and comparisons for the tests of this folder."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from semisparse.formats import Packed, get_format, linear
from semisparse.formats.kernel import Product
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from tests.formats.checking import check_product

BITMASK = get_format("bitmask")

SMALL_CASES = [
    (64, 512, 32, torch.float16, 1),
    (33, 701, 31, torch.bfloat16, 2),
    (1, 1, 64, torch.float16, 16),
    (257, 4100, 5, torch.bfloat16, 33),
]
"""N, K, kept of 64, dtype and M of matmuls that the decode kernels compute on a GPU: multiples of a tile and others."""


def check_tiles(rows: Packed) -> None:
    """Check that the layout of a GPU holds the same weight as that on disk, and moves back to its bytes."""
    tiles = BITMASK.arrange(rows, "cuda")
    BITMASK.validate(tiles)
    assert torch.equal(tiles.unpack(), rows.unpack())
    back = tiles.to("cpu")
    assert back.spec == rows.spec
    assert all(torch.equal(back.tensors[name], rows.tensors[name]) for name in rows.tensors)


def random_weight(n: int, k: int, pattern: str, dtype: torch.dtype = torch.float16) -> Tensor:
    """Draw a weight [N, K] that obeys a pattern, with some rows and blocks of zeros."""
    generator = torch.Generator().manual_seed(n * 1000 + k)
    weight = torch.randn(n, k, generator=generator)
    weight *= parse_pattern(pattern).mask(torch.rand(n, k, generator=generator))
    weight[3::7] = 0
    weight[1::4, 64:128] = 0
    return weight.to(dtype)


def in_tiles(n: int, k: int, pattern: str, dtype: torch.dtype = torch.float16) -> Packed:
    """Return a random weight in the layout `tiles`, on the CPU."""
    packed = BITMASK.arrange(BITMASK.pack(random_weight(n, k, pattern, dtype), pattern), "cuda")
    assert packed.params == {"layout": "tiles"}
    return packed


def operands(packed: Packed, m: int, aligned: bool = True) -> tuple[Tensor, Tensor]:
    """Draw x [m, K] in the weight's dtype, unaligned if asked and NaN behind its end, and a bias [N] in float32."""
    n, k = packed.shape
    generator = torch.Generator().manual_seed(m)
    memory = torch.full((m * k + 65,), torch.nan, dtype=packed.dtype, device=packed.device)
    x = memory[: m * k] if aligned else memory[1 : m * k + 1]
    x.copy_(torch.randn(m * k, generator=generator))
    return x.view(m, k), torch.randn(n, generator=generator).to(packed.device)


def check(prepare: Callable[..., Product], packed: Packed, m: int, aligned: bool = True, **options: Any) -> None:
    """Compare a kernel with float64: without bias, and with one in float32 and x in columns."""
    x, bias = operands(packed, m, aligned)
    product = prepare(problem_of(x, packed), **options)
    check_product(product(x, packed, None), x, packed, None)
    check_product(product(x.T.contiguous().T, packed, bias), x, packed, bias.to(x.dtype))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def check_on_gpu(kernel: str, packed: Packed, m: int) -> None:
    """Compare a kernel, asked for by name, with float64 on a GPU; its output's memory was NaN before."""
    packed = packed.to("cuda")
    x, bias = operands(packed, m)
    for given in (None, bias.to(x.dtype)):
        y = linear(x, packed, given, kernel)
        check_product(y, x, packed, given)
        assert torch.equal(linear(x, packed, given, kernel), y), "two calls differ"
