"""Norms and activations that are written in the order in which the GEMM behind them reads x."""

import pytest
import torch
from torch import nn

import semisparse
from semisparse.bench.roofline import random_weight
from semisparse.engine import ops
from semisparse.engine.ops import Columns
from semisparse.engine.projection import Projection
from semisparse.formats.base import Packed, get_format
from semisparse.formats.product import problem_of
from semisparse.nn import SparseLinear
from semisparse.nn.fused_linear import ADDED
from semisparse.patterns import parse_pattern
from semisparse.runtime.expand_gemm import PERMUTE_X, Matmul, Permutation, PermutedX
from semisparse.runtime.gemm_schedule import Schedule, Tiles
from tests.choosing import mostly_slow
from tests.cuda_emulator import needs_compiler

HALF, BF16 = torch.float16, torch.bfloat16
EPSILON = 1e-5

on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)

ORDERS = [  # tokens, columns, dtype, tile_m, block
    (3, 264, BF16, 16, 64),
    (17, 512, HALF, 32, 16),
    (40, 1000, BF16, 160, 2),
    (65, 256, HALF, 64, 128),
]


def permutation_of(columns: int, tile_m: int, block: int) -> Permutation:
    return Permutation(Schedule(tile_m, 1, 1, 2, 2, 1, 1), Tiles(5, -(-columns // 256), 1000), block, 132)


def by_permute_x(x: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """Return the bytes that permute_x.cu writes: x, and the counters."""
    defines = {"TILE_M": permutation.schedule.tile_m, "BLOCK": permutation.block}
    kernel = PERMUTE_X.build("semisparse_permute_x", defines).load(x.device)
    return written(Matmul(permutation, (1, x.shape[1]), kernel, kernel).permuted(x))


def written(x: PermutedX) -> torch.Tensor:
    counters = x.launch.offsets[1]
    used = 512 * x.permutation.weight.column_tiles * x.launch.tokens
    parts = x.workspace[:used], x.workspace[counters : counters + 4 * x.launch.counters]
    assert not parts[1].any()
    return torch.cat(parts)


def check_orders(device: str, m: int, columns: int, dtype: torch.dtype, tile_m: int, block: int) -> None:
    permutation = permutation_of(columns, tile_m, block)
    x, delta, weight = (torch.randn(shape).to(device, dtype) for shape in ((m, columns), (m, columns), (columns,)))
    for added in (delta, None):
        total, hidden = ops.rms_norm(x, weight, EPSILON, added)
        total_too, permuted = ops.rms_norm(x, weight, EPSILON, added, permutation)
        assert torch.equal(total, total_too)
        assert torch.equal(written(permuted), by_permute_x(hidden, permutation))
    at = Columns((2, columns + 6), 2 * columns + 8)
    both = 4 * torch.randn(m, at.width).to(device, dtype)
    found = ops.silu_mul(both, at, columns, permutation)
    assert torch.equal(written(found), by_permute_x(ops.silu_mul(both, at, columns), permutation))


@needs_compiler
@pytest.mark.parametrize(("m", "columns", "dtype", "tile_m", "block"), mostly_slow(ORDERS, 0, 2))
def test_kernels_write_what_permute_x_writes(emulated, m, columns, dtype, tile_m, block):
    check_orders("cpu", m, columns, dtype, tile_m, block)


@on_gpu
@pytest.mark.parametrize(
    ("m", "columns", "dtype", "tile_m", "block"), [*ORDERS, (512, 4096, BF16, 256, 64), (300, 11008, HALF, 128, 16)]
)
def test_kernels_write_what_permute_x_writes_on_a_gpu(nan_filled_memory, m, columns, dtype, tile_m, block):
    check_orders("cuda", m, columns, dtype, tile_m, block)


def test_rows_that_are_not_aligned_are_not_permuted(emulated):
    permutation = permutation_of(12, 16, 64)
    hidden = ops.rms_norm(torch.ones(2, 12, dtype=HALF), torch.ones(12, dtype=HALF), EPSILON, None, permutation)[1]
    assert torch.equal(hidden, torch.ones(2, 12, dtype=HALF))
    both = torch.ones(2, 25, dtype=HALF)
    assert isinstance(ops.silu_mul(both, Columns((0, 13), 25), 12, permutation), torch.Tensor)


GEMMS = {"bitmask": "gemm", "gqs": "gemm_wgmma", "vector_nm": "gemm_wgmma", "ec_csr": "gemm"}
FORMATS = [
    ("bitmask", "32:64", {}),
    ("gqs", "g16@50%", {"kind": "w4"}),
    ("vector_nm", "16:32v32", {}),
    ("ec_csr", "70%", {}),
]


def packed_weight(name: str, pattern: str, options: dict, n: int, k: int) -> Packed:
    weight = random_weight(parse_pattern(pattern), n, k, HALF, torch.device("cpu"))
    return get_format(name).arrange(semisparse.pack(weight, format=name, pattern=pattern, **options), "cuda")


def check_product(product, permutation: Permutation, device: str, k: int, m: int) -> None:
    x, norm = torch.randn(m, k).to(device, HALF), torch.randn(k).to(device, HALF)
    hidden, permuted = (ops.rms_norm(x, norm, EPSILON, None, order)[1] for order in (None, permutation))
    assert isinstance(permuted, PermutedX)
    assert torch.equal(product(permuted), product(hidden))
    both, at = torch.randn(m, 2 * k).to(device, HALF), Columns((0, k), 2 * k)
    assert torch.equal(product(ops.silu_mul(both, at, k, permutation)), product(ops.silu_mul(both, at, k)))


@needs_compiler
@pytest.mark.parametrize(("name", "pattern", "options"), mostly_slow(FORMATS, 0))
def test_gemms_take_it(emulated, name, pattern, options):
    packed = packed_weight(name, pattern, options, 64, 512)
    kernel = next(k for k in get_format(name).kernels if k.name == GEMMS[name])
    product = kernel.prepare(problem_of(torch.empty(70, 512, dtype=HALF), packed))
    check_product(lambda x: product(x, packed, torch.ones(64, dtype=HALF)), product.permutation, "cpu", 512, 70)


@on_gpu
@pytest.mark.parametrize(("name", "pattern", "options"), FORMATS)
@pytest.mark.parametrize("m", [70, 512])
def test_projections_take_it_on_a_gpu(name, pattern, options, m):
    packed = packed_weight(name, pattern, options, 2100, 2048).to("cuda")
    projection = Projection([SparseLinear(packed, torch.randn(2100).to("cuda", HALF))], nn.Module(), ADDED)
    permutation = projection.permutation(m, HALF)
    assert permutation is not None
    x = torch.randn(m, 2048).to("cuda", HALF)
    assert torch.equal(projection(x), semisparse.linear(x, packed, projection._whole.bias))
    check_product(projection, permutation, "cuda", 2048, m)
