"""The GEMMs on the emulator: stages with and without column packing, ragged shapes, several tiles, x transposed."""

import pytest
import torch

from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cuda import gemm, gemm_fp32, gemm_sparse, transpose
from semisparse.formats.vector_nm.cuda.schedule import TILES, GemmSchedule, gemm_schedule
from semisparse.patterns import parse_pattern
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulated, gpu, needs_compiler
from tests.formats.vector_nm.reference import VECTOR_NM, check, check_kernel, emulate_gpu, operands, pack

__all__ = ["emulated"]
pytestmark = needs_compiler


@pytest.mark.parametrize(
    ("pattern", "tile", "packed", "n", "k", "m"),
    mostly_slow(
        [
            ("16:32v32", -1, False, 70, 100, 40),
            ("5:7v4", 1, True, 129, 51, 130),
        ],
        1,
    ),
)
def test_gemm_fp32(emulated, pattern: str, tile: int, packed: bool, n: int, k: int, m: int):
    schedule = gemm_schedule(parse_pattern(pattern), TILES[4][tile], torch.float32, packed, gpu().shared_per_cta)
    weight = pack(pattern, n, k, torch.float32)
    check_kernel(lambda problem: gemm_fp32.prepare(problem, schedule), weight, m)


def test_one_stage(emulated):
    """One stage with packing (NM-SpMM's V2): no overlap of copy and compute."""
    schedule = GemmSchedule(TILES[4][0], 64, 8, 32, 1, True, torch.float32)
    weight = pack("8:32v64", 260, 172, torch.float32)
    check_kernel(lambda problem: gemm_fp32.prepare(problem, schedule), weight, 5)


@pytest.mark.parametrize(
    ("pattern", "tile", "packed", "n", "k", "m", "dtype"),
    mostly_slow(
        [
            ("4:32v32", 0, True, 150, 172, 130, torch.float16),
            ("4:32v16", 1, False, 65, 101, 65, torch.bfloat16),
            ("8:16v8", -1, False, 33, 33, 1, torch.bfloat16),
            ("7:32v128", -1, True, 140, 172, 17, torch.float16),
        ],
        1,
        3,
    ),
)
def test_gemm(emulated, pattern: str, tile: int, packed: bool, n: int, k: int, m: int, dtype: torch.dtype):
    schedule = gemm_schedule(parse_pattern(pattern), TILES[2][tile], dtype, packed, gpu().shared_per_cta)
    check_kernel(lambda problem: gemm.prepare(problem, schedule), pack(pattern, n, k, dtype), m)


@pytest.mark.parametrize(
    ("pattern", "n", "k", "m", "dtype"),
    mostly_slow(
        [
            ("8:32v32", 270, 300, 130, torch.float16),  # 28 K steps of all tiles, more than SPARSE_STAGES
            ("4:32v32", 60, 200, 3, torch.float16),
            ("3:12v128", 130, 51, 9, torch.bfloat16),
        ],
        1,
    ),
)
def test_gemm_sparse(emulated, monkeypatch, pattern: str, n: int, k: int, m: int, dtype: torch.dtype):
    """One CTA computes all tiles; the pipeline continues across tiles without draining."""
    emulate_gpu(monkeypatch, sms=1)
    ordered = VECTOR_NM.arrange(pack(pattern, n, k, dtype), "cuda")
    x, _ = operands(ordered, m)
    assert gemm_sparse.refusal(problem_of(x, ordered)) is None
    check_kernel(gemm_sparse.prepare, ordered, m)


@pytest.mark.parametrize(("m", "k"), [(70, 200), (129, 64), (5, 51)])
def test_transpose(emulated, m: int, k: int):
    x = torch.randn(m, k).half()
    x_t = transpose.prepare(problem_of(x, pack("16:32v32", 1, k)), 128)(x)
    assert x_t.shape == (k + -k % 32, m + -m % 128)
    assert torch.equal(x_t[:k, :m], x.T)
    assert not x_t[k:].any()
    assert not x_t[:, m:].any()


@pytest.mark.parametrize(
    ("kernel", "pattern", "m", "bucket", "dtype"),
    [(gemm, "4:32v16", 65, 96, torch.bfloat16), (gemm_fp32, "16:32v32", 33, 48, torch.float32)],
)
def test_a_product_computes_every_m_of_its_bucket(emulated, kernel, pattern: str, m: int, bucket: int, dtype):
    """The schedule is chosen for the bucket's M, the grid for the actual M. An infinite row of x affects no other row
    of y."""
    packed = pack(pattern, 65, 101, dtype)
    x, bias = operands(packed, m)
    problem = problem_of(x, packed)
    assert problem.m == bucket
    x[1] = torch.inf
    y = kernel.prepare(problem)(x, packed, bias)
    others = torch.arange(m) != 1
    assert not y[1].isfinite().any()
    check(y[others], x[others], packed, bias)
