"""The GPU kernels of the layout `tiles` against float64, with their outputs' memory poisoned."""

import os

import pytest
import torch

from semisparse.formats.base import get_format
from semisparse.formats.bitmask import gemm, tiled
from semisparse.formats.kernel import Problem
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from tests.formats.test_bitmask_gemm import columns_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

needs_graphs = pytest.mark.skipif(
    "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="torch captures no graph without its caching allocator"
)

BITMASK = get_format("bitmask")
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24}
"""Relative error of one rounding to the output's dtype."""


def sums_error(k: int) -> float:
    """Give the relative error of a sum of exact products, 16 columns at a time: tensor cores cut off."""
    return k / 16 * 2**-24


def packed_and_x(n, k, keep, m, dtype):
    generator = torch.Generator().manual_seed(n * k + keep)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    weight = weight * parse_pattern(f"{keep}:64").mask(torch.rand(n, k, generator=generator))
    x = torch.randn(m, k, generator=generator).to(dtype)
    rows = BITMASK.pack(weight, f"{keep}:64")
    return rows.to("cuda"), weight, x.cuda()


def decode(x, packed, bias, **options):
    return tiled.prepare_decode(problem_of(x, packed), **options)(x, packed, bias)


def multiply(x, packed, bias, grid=None):
    return gemm.prepare(problem_of(x, packed), grid)(x, packed, bias)


def poisoned(product, x, packed, bias, **options):
    out = options.get("out_dtype", x.dtype)
    poison = torch.full((x.shape[0], packed.shape[0]), torch.nan, dtype=out, device="cuda")
    del poison
    return product(x, packed, bias, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 7, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize(
    ("n", "k", "keep"), [(64, 512, 32), (33, 701, 31), (1, 1, 64), (257, 4100, 5), (2200, 8200, 16)]
)
def test_decode_agrees_with_float64(n, k, keep, m, dtype):
    packed, weight, x = packed_and_x(n, k, keep, m, dtype)
    assert packed.params == {"layout": "tiles"}
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = x.cpu().double() @ weight.double().T + bias.double()
    for out in (dtype, torch.float32):
        y = poisoned(decode, x, packed, bias.cuda(), out_dtype=out).cpu().double()
        assert (y - expected).norm() <= (2 * ROUNDING[out] + sums_error(k)) * expected.norm()


needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="wgmma is Hopper's"
)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 17, 33, 65, 129, 200, 300])
@pytest.mark.parametrize(
    ("n", "k", "keep"), [(64, 512, 32), (33, 701, 31), (1, 1, 64), (257, 4100, 5), (2200, 8200, 16), (130, 520, 64)]
)
def test_gemm_agrees_with_float64(n, k, keep, m, dtype):
    packed, weight, x = packed_and_x(n, k, keep, m, dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = x.cpu().double() @ weight.double().T + bias.double()
    y = poisoned(multiply, x, packed, bias.cuda())
    assert (y.cpu().double() - expected).norm() <= (2 * ROUNDING[dtype] + sums_error(k)) * expected.norm()
    for _ in range(5):
        assert torch.equal(multiply(x, packed, bias.cuda()), y)


@needs_hopper
@pytest.mark.parametrize("splits", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("tokens", "warpgroups", "cluster", "blocks"),
    [(32, 1, 1, 3), (64, 2, 1, 2), (64, 2, 2, 1), (128, 2, 2, 1), (192, 2, 1, 1), (256, 2, 2, 1)],
)
@pytest.mark.parametrize(("n", "k"), [(300, 2500), (9001, 1100)])
def test_every_division_of_gemm_gives_the_same_sums(n, k, tokens, warpgroups, cluster, blocks, splits):
    """Of few tiles that many shares have a part of, and of more tiles than shares."""
    packed, weight, x = packed_and_x(n, k, 32, 270, torch.float16)
    (grid,) = gemm.fitting(
        tokens, warpgroups, cluster, min(splits, -(-k // 256)), blocks, 32, tiled.processor(x.device)
    )
    expected = x.cpu().double() @ weight.double().T
    y = multiply(x, packed, None, grid=grid)
    assert (y.cpu().double() - expected).norm() <= (2 * ROUNDING[x.dtype] + sums_error(k)) * expected.norm()
    assert torch.equal(multiply(x, packed, None, grid=grid), y)


@needs_hopper
@needs_graphs
def test_gemm_runs_in_a_graph_and_before_a_kernel_that_needs_it():
    packed, _, x = packed_and_x(2048, 2048, 32, 40, torch.bfloat16)

    def chain():
        y = x
        for _ in range(10):
            y = multiply(y, packed, None)
        return y

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(3):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("m", "k", "tokens"), [(1, 1, 32), (40, 701, 32), (300, 4096, 256), (70, 1030, 64)])
def test_columns_of_x_come_in_the_order_of_the_fragments(m, k, tokens):
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).half()
    column_tiles = -(-k // 256)
    problem = Problem(m, 16, k, parse_pattern("32:64"), {}, x.dtype, x.dtype, torch.device("cuda"))
    shape, launch = gemm.prepare_columns(problem, tokens, 1000)
    columns = torch.empty(shape, dtype=x.dtype, device="cuda")
    counters = torch.ones(1000, dtype=torch.int32, device="cuda")
    launch(x.cuda(), columns.data_ptr(), counters.data_ptr())
    assert torch.equal(columns.cpu(), columns_of(x, tokens, column_tiles))
    assert not counters.any()


@pytest.mark.parametrize(("n", "k", "keep"), [(64, 512, 32), (33, 701, 31), (1, 1, 64), (257, 4100, 5)])
def test_unpack_gives_the_weight_bit_for_bit(n, k, keep):
    packed, weight, x = packed_and_x(n, k, keep, 1, torch.float16)
    assert torch.equal(tiled.prepare_unpack(problem_of(x, packed))(packed).cpu(), weight + 0.0)


@needs_graphs
def test_decode_repeats_its_bits_and_runs_in_a_graph():
    packed, _, x = packed_and_x(1000, 3000, 32, 5, torch.float16)
    first = decode(x, packed, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(x, packed, None)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, first)


@needs_graphs
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="begins early from Hopper on"
)
def test_a_chain_of_early_launches_gives_the_same_bits():
    packed, _, x = packed_and_x(2048, 2048, 32, 3, torch.bfloat16)  # its range holds 32 ** 20
    torch.cuda.synchronize()  # the weights are there before a launch that does not wait for them

    def chain(early):
        y = x
        for _ in range(20):
            y = decode(y, packed, None, early=early)
        return y

    expected = chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(3):
        graph.replay()
        assert torch.equal(found, expected)
