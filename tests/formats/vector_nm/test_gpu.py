"""vector_nm's kernels on a GPU against float64: schedules, edges of M, N and K, CUDA graphs, the column order."""

import pytest
import torch

from semisparse.formats import Packed, linear
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cuda import decode_tensor, gemm, gemm_fp32, unpack
from semisparse.formats.vector_nm.cuda.schedule import TILES, gemm_schedule
from semisparse.formats.vector_nm.storage import gpu
from semisparse.runtime.device import device_facts
from tests.formats.vector_nm.reference import VECTOR_NM, check, check_kernel, operands, pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or device_facts("cuda").capability != (9, 0), reason="no Hopper GPU here"
)

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SIZES = ((1, 1), (300, 333), (513, 1000))
"""N, K."""


def on_gpu(pattern: str, n: int, k: int, dtype: torch.dtype) -> Packed:
    return pack(pattern, n, k, dtype).to("cuda")


def check_named(kernel: str, packed: Packed, *tokens: int) -> None:
    """Compare a kernel, by its name, with the reference."""
    for m in tokens:
        x, bias = operands(packed, m)
        check(linear(x, packed, bias, kernel), x, packed, bias)


@pytest.mark.parametrize(
    ("pattern", "dtype", "chosen"),
    [
        ("16:32v32", FP16, {1: "decode_tensor", 16: "decode_tensor", 17: "gemm_wgmma", 3000: "unpack"}),
        ("16:32v8", FP16, {1: "decode", 16: "decode", 17: "unpack"}),
        ("4:32v16", BF16, {16: "decode_tensor", 17: "gemm_wgmma", 3000: "gemm"}),
        ("16:32v4", FP32, {1: "gemm_fp32", 3000: "gemm_fp32"}),
        ("3:7v1", BF16, {1: "unpack", 3000: "unpack"}),
    ],
)
def test_auto(pattern: str, dtype: torch.dtype, chosen: dict[int, str]):
    packed = on_gpu(pattern, 300, 333, dtype)
    for m, kernel in chosen.items():
        x, bias = operands(packed, m)
        assert VECTOR_NM.choose(problem_of(x, packed)).name == kernel
        check(linear(x, packed, bias), x, packed, bias)


@pytest.mark.parametrize("pattern", ["16:32v32", "4:32v32", "5:7v8", "16:32v16", "4:32v64", "16:32v128", "8:32v4"])
def test_every_gemm_schedule(pattern: str):
    limit = device_facts("cuda").shared_per_cta
    for dtype, kernel in ((FP32, gemm_fp32), (FP16, gemm), (BF16, gemm)):
        packed = on_gpu(pattern, 300, 333, dtype)
        for tile in TILES[dtype.itemsize] if packed.pattern.length * dtype.itemsize >= 16 else ():
            for whole in (True, False):
                schedule = gemm_schedule(packed.pattern, tile, dtype, not whole, limit)
                if schedule:
                    check_kernel(lambda problem, s=schedule, k=kernel: k.prepare(problem, s), packed, 130)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_edges(n: int, k: int):
    for kernel, pattern, dtype in (("gemm_fp32", "16:32v32", FP32), ("gemm", "4:32v32", FP16), ("gemm", "5:7v8", BF16)):
        check_named(kernel, on_gpu(pattern, n, k, dtype), 1, 3, 130, 257)
    for kernel, pattern, dtype in (("decode", "5:7v8", FP16), ("decode_tensor", "5:7v16", BF16)):
        check_named(kernel, on_gpu(pattern, n, k, dtype), 1, 2, 3, 8, 9, 16)


@pytest.mark.parametrize("pattern", ["16:32v32", "32:32v32", "4:32v64", "16:32v128", "16:32v16"])
def test_decode(pattern: str):
    for n, k, dtype in ((9000, 256, FP16), (5000, 28672, BF16)):
        packed = on_gpu(pattern, n, k, dtype)
        check_named("decode_tensor", packed, 1, 8, 16)
        check_named("decode", packed, 1, 16)


@on_hopper
@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [("8:32v32", FP16), ("4:32v32", BF16), ("4:32v64", BF16), ("9:32v128", FP16), ("1:7v32", FP16)],
)
def test_gemm_sparse(pattern: str, dtype: torch.dtype):
    for n, k, m in ((1, 1, 1), (40, 172, 3), (300, 333, 130), (1024, 2048, 4500)):
        on_disk = pack(pattern, n, k, dtype)
        packed = on_disk.to("cuda")
        assert gpu.layout_of(packed.spec) == gpu.SPARSE_MMA
        VECTOR_NM.validate(packed)
        check_named("gemm_sparse", packed, m)
        assert all(torch.equal(tensor, on_disk.tensors[name]) for name, tensor in packed.to("cpu").tensors.items())
    x, _ = operands(packed, 1024)
    assert VECTOR_NM.choose(problem_of(x, packed)).name == "gemm_sparse"
    assert VECTOR_NM.choose(problem_of(x[:768], packed)).name != "gemm_sparse"


@pytest.mark.parametrize("pattern", ["16:32v32", "32:32v32", "5:7v8", "8:32v4", "3:7v1", "2:5v3", "40:200v100"])
def test_unpack(pattern: str):
    for dtype in (FP16, FP32):
        for n, k in SIZES:
            packed = on_gpu(pattern, n, k, dtype)
            problem = problem_of(torch.empty(1, k, dtype=dtype, device="cuda"), packed)
            assert torch.equal(unpack.prepare_unpack(problem)(packed), packed.unpack())


@pytest.mark.parametrize(
    ("kernel", "m", "dtype"),
    [
        ("decode", 5, FP16),
        ("decode_tensor", 5, FP16),
        ("gemm", 700, BF16),
        ("gemm_fp32", 700, FP32),
        ("unpack", 40, FP16),
    ],
)
def test_products_run_in_a_graph(kernel: str, m: int, dtype: torch.dtype):
    packed = on_gpu("16:32v32", 1000, 3000, dtype)
    x, bias = operands(packed, m)
    first = linear(x, packed, bias, kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear(x, packed, bias, kernel)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, first)


def test_panels_back_and_forth():
    """16 tokens of K = 28672 are several panels of x, and each CTA computes several row tiles."""
    packed = on_gpu("16:32v32", 5000, 28672, FP16)
    check_kernel(decode_tensor.prepare, packed, 16)
