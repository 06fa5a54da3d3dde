"""Every build of vector_nm's GPU kernels against float64: all tiles and strategies, edges of M, N and K, graphs."""

import pytest
import torch

from semisparse.formats import get_format
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm import cuda, decode_tensor, fours, plan, tiled
from semisparse.formats.vector_nm.tiling import SIMT, TENSOR, Shape, Tiling, tile
from semisparse.patterns import parse_pattern
from tests.formats.cases import build, random
from tests.formats.test_contract import check_product, random_operands

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

VECTOR_NM = get_format("vector_nm")

PATTERNS = (
    "16:32v32",
    "12:32v32",
    "8:32v32",
    "4:32v32",
    "32:32v32",
    "5:7v8",
    "16:32v16",
    "4:32v64",
    "16:32v128",
    "8:32v4",
)
SIZES = ((1, 1, 1), (40, 172, 3), (300, 333, 130), (513, 1000, 257))
"""N, K, M."""


def every_tiling(pattern: str, shapes: tuple[Shape, ...], itemsize: int) -> list[Tiling]:
    parsed = parse_pattern(pattern)
    limit = tiled.shared_limit(torch.device("cuda"))
    found = [tile(parsed, shape, itemsize, packed, limit) for shape in shapes for packed in (False, True)]
    return [tiling for tiling in found if tiling]


def packed_weight(pattern: str, n: int, k: int, dtype: torch.dtype):
    return VECTOR_NM.pack(build(parse_pattern(pattern), random, n, k).to(dtype).cuda(), pattern)


def check_tilings(pattern: str, shapes: tuple[Shape, ...], dtype: torch.dtype) -> None:
    for n, k, m in SIZES:
        packed = packed_weight(pattern, n, k, dtype)
        x, bias = random_operands(packed, m, dtype, "cuda")
        for tiling in every_tiling(pattern, shapes, dtype.itemsize):
            multiply = tiled.prepare_tiled(problem_of(x, packed), tiling)
            y = multiply(x, packed, bias)
            check_product(y, x, packed, bias)
            assert torch.equal(y, multiply(x, packed, bias)), f"two calls differ: {tiling}"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_simt(pattern: str):
    check_tilings(pattern, SIMT, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pattern", PATTERNS[:-1])
def test_tensor(pattern: str, dtype: torch.dtype):
    check_tilings(pattern, TENSOR, dtype)


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU here"
)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pattern", ["16:32v32", "12:32v32", "8:32v32", "4:32v32", "4:32v64", "16:32v128", "1:7v32"])
def test_fours(pattern: str, dtype: torch.dtype):
    for n, k, m in (*SIZES, (1024, 2048, 4500)):
        planned = plan.planned(packed_weight(pattern, n, k, dtype))
        VECTOR_NM.validate(planned)
        x, bias = random_operands(planned, m, dtype, "cuda")
        multiply = fours.prepare(problem_of(x, planned))
        y = multiply(x, planned, bias)
        check_product(y, x, planned, bias)
        assert torch.equal(y, multiply(x, planned, bias)), "two calls differ"


@on_hopper
def test_a_weight_has_a_plan_on_a_gpu_alone():
    packed = packed_weight("8:32v32", 300, 333, torch.bfloat16).to("cpu")
    moved = packed.to("cuda")
    assert moved.params.keys() == {"rows", "blocks"}
    assert all(torch.equal(tensor, packed.tensors[name]) for name, tensor in moved.to("cpu").tensors.items())
    assert packed_weight("8:32v32", 300, 333, torch.float32).to("cpu").to("cuda").params.keys() == {"rows"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pattern", PATTERNS[:-1])
def test_decode(pattern: str, dtype: torch.dtype):
    for n, k in ((1, 1), (40, 172), (513, 1000), (300, 28672)):
        packed = packed_weight(pattern, n, k, dtype)
        for m in (1, 2, 3, 8, 9, 16):
            x, bias = random_operands(packed, m, dtype, "cuda")
            problem = problem_of(x, packed)
            y = cuda.prepare_decode(problem)(x, packed, bias)
            check_product(y, x, packed, bias)
            assert torch.equal(y, cuda.prepare_decode(problem, early=True)(x, packed, bias)), "two calls differ"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pattern", [p for p in PATTERNS if not p.endswith(("v4", "v8"))])
def test_decode_on_tensor_cores(pattern: str, dtype: torch.dtype):
    for n, k in ((1, 1), (40, 172), (513, 1000), (9000, 256), (5000, 28672)):
        packed = packed_weight(pattern, n, k, dtype)
        for m in (1, 2, 8, 9, 16):
            x, bias = random_operands(packed, m, dtype, "cuda")
            problem = problem_of(x, packed)
            y = decode_tensor.prepare(problem)(x, packed, bias)
            check_product(y, x, packed, bias)
            assert torch.equal(y, decode_tensor.prepare(problem, early=True)(x, packed, bias)), "two calls differ"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("pattern", [*PATTERNS, "3:7v1", "2:5v3", "40:200v100"])
def test_unpack(pattern: str, dtype: torch.dtype):
    for n, k, _ in SIZES:
        packed = packed_weight(pattern, n, k, dtype)
        unpack = cuda.prepare_unpack(problem_of(torch.empty(1, k, dtype=dtype, device="cuda"), packed))
        assert torch.equal(unpack(packed), packed.unpack())


@pytest.mark.parametrize(
    ("prepare", "m", "dtype"),
    [
        (cuda.prepare_decode, 5, torch.float16),
        (decode_tensor.prepare, 5, torch.float16),
        (tiled.prepare, 700, torch.bfloat16),
        (tiled.prepare, 700, torch.float32),
    ],
)
def test_products_run_in_a_graph(prepare, m: int, dtype: torch.dtype):
    packed = packed_weight("16:32v32", 1000, 3000, dtype)
    x, bias = random_operands(packed, m, dtype, "cuda")
    product = prepare(problem_of(x, packed))
    first = product(x, packed, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product(x, packed, bias)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, first)
