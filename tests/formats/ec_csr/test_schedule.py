"""Which kernel computes which problem, and how it is compiled, for GPUs described by their facts."""

import itertools

import pytest
import torch

from semisparse.errors import KernelError
from semisparse.formats import Problem, WeightSpec
from semisparse.formats.ec_csr.cuda import schedule
from semisparse.patterns import parse_pattern
from semisparse.runtime import device as runtime_device
from semisparse.runtime import nvrtc
from tests.cuda_emulator import gpu
from tests.formats.ec_csr.weights import EC_CSR


def problem(m: int, n: int, k: int, layout: str = "banks", dtype: torch.dtype = torch.float16) -> Problem:
    params = {"layout": layout, "delta_bits": 4, "n": n, "k": k}
    params |= {"panel_rows": 56 if n == 28672 else 32, "span_limit": 6} if layout == "banks" else {"granularity": 1}
    spec = WeightSpec("ec_csr", 1, parse_pattern("70%"), (n, k), dtype, params)
    return Problem(m, spec, dtype, torch.device("cuda", 0))


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"NVRTC: {nvrtc.unavailable()}")
@pytest.mark.parametrize(
    ("m", "n", "k", "layout", "dtype", "expected"),
    [
        (1, 4096, 4096, "banks", torch.float16, "decode"),
        (8, 4096, 11008, "banks", torch.bfloat16, "decode"),
        (16, 4096, 4096, "banks", torch.float16, "decode_mma"),
        (16, 4096, 4096, "banks", torch.float32, "decode"),
        (16, 4096, 11008, "banks", torch.float16, "decode_mma"),
        (16, 28672, 8192, "banks", torch.float16, "decode"),
        (24, 4096, 4096, "banks", torch.float16, "unpack"),
        (1, 64, 1 << 20, "banks", torch.float16, "unpack"),
        (1, 64, 1 << 24, "banks", torch.float16, "reference"),
        (1, 4096, 4096, "paper", torch.float16, "paper"),
        (24, 4096, 4096, "paper", torch.float16, "reference"),
    ],
)
def test_the_kernel_that_auto_takes(monkeypatch: pytest.MonkeyPatch, m, n, k, layout, dtype, expected):
    monkeypatch.setattr(runtime_device, "_cuda_facts", lambda index: gpu())
    assert EC_CSR.choose(problem(m, n, k, layout, dtype)).name == expected


def test_kernels_say_why_they_refuse(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime_device, "_cuda_facts", lambda index: gpu(capability=(7, 5)))
    for kernel, asked, why in (
        ("decode", problem(1, 64, 64), "compute capability 8.0"),
        ("decode", problem(24, 64, 64), "takes 1 to 16 tokens, got 24"),
        ("decode", problem(1, 64, 64, "paper"), "reads row panels, this weight is stored in paper"),
        ("paper", problem(1, 64, 64), "needs the layout paper, the weight is in the layout banks"),
        ("decode_mma", problem(16, 64, 64, dtype=torch.float32), "it takes float16 and bfloat16"),
        ("cpu", problem(1, 64, 64), "runs on cpu"),
    ):
        with pytest.raises(KernelError, match=why):
            EC_CSR.choose(asked, kernel)


@pytest.mark.parametrize("shared", [100 << 10, 164 << 10, 228 << 10], ids=["Ada", "Ampere", "Hopper"])
def test_schedules_fit_the_gpu(shared: int):
    facts = runtime_device.DeviceFacts("", "cuda", "", 100, 0, 0, "", (8, 0), shared, shared - 1024)
    for k, m, dtype in itertools.product((64, 4096, 11008, 28672), (1, 2, 4, 8, 16), (torch.float16, torch.float32)):
        decode = schedule.decode_schedule(problem(m, 8192, k, dtype=dtype), facts)
        if decode.tokens > 1:
            assert decode.shared_bytes(6) <= facts.shared_per_cta
        if decode.ctas == 3:
            assert 3 * (decode.shared_bytes(6) + 1024) <= shared
        mma = schedule.mma_schedule(problem(m, 8192, k), facts)
        assert mma.tokens >= m
        assert mma.ctas == 1 or 2 * (mma.shared_bytes + 1024) <= shared
        assert mma.stride % 128 == 64
        assert mma.stride >= 2 * mma.lanes * mma.lane_columns
        unpack = schedule.unpack_schedule(problem(24, 8192, k, dtype=dtype), facts)
        assert 2 * (unpack.shared_bytes + 1024) <= shared
        positions = 32 * unpack.lane_columns
        assert (unpack.tiles - 1) * unpack.tile_positions < positions <= unpack.tiles * unpack.tile_positions
