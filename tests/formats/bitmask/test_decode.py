"""decode.cu: every TILE_M, and both ways of dividing a CTA's warps, on ragged shapes and several tiles per warp."""

import os
from dataclasses import replace

import pytest
import torch

from semisparse.formats import get_format
from semisparse.formats.bitmask.cuda import decode
from semisparse.formats.product import problem_of
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.bitmask.weights import SMALL_CASES, check, check_on_gpu, in_tiles, needs_gpu, operands
from tests.formats.fusion import check_fused

HALF, BF16 = torch.float16, torch.bfloat16
KERNELS = {kernel.name: kernel for kernel in get_format("bitmask").kernels}

CASES = [  # n, k, keep, dtype, m, SMs, warps_n x warps_k that the schedule has
    (37, 700, 32, HALF, 1, 132, (1, 3)),
    (50, 4200, 31, BF16, 5, 132, (1, 12)),
    (80, 4200, 5, HALF, 13, 2, (2, 4)),
    (80, 1100, 64, BF16, 20, 132, (2, 4)),
    (80, 700, 1, HALF, 50, 1, (8, 1)),
]


@needs_compiler
@pytest.mark.parametrize(("n", "k", "keep", "dtype", "m", "sms", "warps"), mostly_slow(CASES, 1, 2))
def test_emulated(emulated, monkeypatch: pytest.MonkeyPatch, n, k, keep, dtype, m, sms, warps):
    emulate(monkeypatch, sms)
    built = []
    build = type(decode.SOURCE).build
    monkeypatch.setattr(type(decode.SOURCE), "build", lambda *args: built.append(args[2]) or build(*args))
    check(decode.prepare, in_tiles(n, k, f"{keep}:64", dtype), m)
    assert (built[0]["WARPS_N"], built[0]["WARPS_K"]) == warps


@needs_compiler
def test_emulated_unaligned(emulated):
    check(decode.prepare, in_tiles(37, 700, "32:64"), 1, aligned=False)


@needs_compiler
@pytest.mark.parametrize(
    ("n", "k", "keep", "dtype", "m", "prologue", "epilogue", "sms"),
    mostly_slow(
        [
            (64, 2056, 32, BF16, 1, "rms_norm", "silu_mul", 1),
            (37, 1096, 31, HALF, 1, "rms_norm", "none", 132),
            (50, 4200, 32, BF16, 1, "none", "add", 2),
            (96, 520, 48, HALF, 2, "rms_norm", "silu_mul", 1),
            (40, 4200, 32, HALF, 2, "none", "add", 2),
        ],
        0,
        4,
    ),
)
def test_fused(emulated, monkeypatch: pytest.MonkeyPatch, n, k, keep, dtype, m, prologue, epilogue, sms):
    emulate(monkeypatch, sms)
    packed = in_tiles(n, k, f"{keep}:64", dtype)
    check_fused(KERNELS["decode"], packed, packed.unpack(), m, prologue, epilogue, bias=m % 2 == 1)


def test_what_is_not_fused(monkeypatch: pytest.MonkeyPatch):
    emulate(monkeypatch)
    problem = problem_of(torch.zeros(1, 520).half(), in_tiles(40, 520, "32:64"))
    assert decode.fuse(replace(problem, epilogue="silu_mul")) is None  # 20 rows of a gate
    assert (
        decode.fuse(replace(problem_of(torch.zeros(1, 516).half(), in_tiles(32, 516, "32:64")), epilogue="add")) is None
    )


@needs_gpu
@pytest.mark.parametrize(
    ("n", "k", "keep", "dtype", "m"),
    [
        *SMALL_CASES,
        (2200, 8200, 16, HALF, 7),
        (2200, 8200, 32, BF16, 64),
        (4096, 4096, 48, HALF, 20),
    ],
)
def test_on_a_gpu(n: int, k: int, keep: int, dtype: torch.dtype, m: int, nan_filled_memory):
    check_on_gpu("decode", in_tiles(n, k, f"{keep}:64", dtype), m)


@needs_gpu
@pytest.mark.skipif("PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="torch captures no graph without its cache")
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="PDL is Hopper's")
def test_a_chain_of_overlapped_launches_returns_the_same_bits():
    packed = in_tiles(2048, 2048, "32:64", BF16).to("cuda")  # its range holds 32 ** 20
    x, _ = operands(packed, 3)
    product = decode.prepare(problem_of(x, packed))

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for _ in range(20):
            y = product(y, packed, None)
            if wait:
                torch.cuda.synchronize()
        return y

    expected = chain(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(wait=False)
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, expected)
