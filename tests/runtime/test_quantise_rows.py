"""Rows quantised to 8 bits by the CUDA kernel, emulated or on a GPU, against torch."""

import pytest
import torch

from semisparse.quant.symmetric import LARGEST
from semisparse.quant.symmetric import quantise_rows as expected_of
from semisparse.runtime import quantise_rows
from tests.cuda_emulator import emulate, needs_compiler

RUNS = [
    pytest.param("cpu", marks=needs_compiler),
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")),
]


@pytest.fixture(params=RUNS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernel runs; on a CPU it is emulated."""
    if request.param == "cpu":
        emulate(monkeypatch)
    return torch.device(request.param)


def rows_of(count: int, columns: int, x_dtype: torch.dtype) -> torch.Tensor:
    """Return rows of magnitudes from 1e-3 to 1e3, one of them zeros."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(count, columns, generator=generator) * 10.0 ** torch.linspace(-3, 3, count)[:, None]
    x[count // 2] = 0
    return x.to(x_dtype)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize(
    ("x_dtype", "columns"),
    [(torch.bfloat16, 1), (torch.bfloat16, 4104), (torch.float16, 173), (torch.float32, 300), (torch.float16, 9008)],
    ids=str,
)
def test_codes_and_scales_are_torchs(device, x_dtype, columns, dtype):
    x = rows_of(5, columns, x_dtype)
    expected, expected_scales = expected_of(x, dtype)
    codes, scales = quantise_rows.prepare(device, x_dtype, dtype, columns)(x.to(device))
    assert codes.dtype == dtype
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(codes.cpu().float(), expected.float())


def test_an_unaligned_x_is_read_value_by_value(device):
    x = rows_of(3, 64, torch.bfloat16)
    unaligned = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[1:].view_as(x).copy_(x)
    assert unaligned.data_ptr() % 16 == 2
    quantise = quantise_rows.prepare(device, x.dtype, torch.int8, 64)
    for one in (x.to(device), unaligned):
        codes, scales = quantise(one)
        expected, expected_scales = expected_of(x, torch.int8)
        assert torch.equal(codes.cpu(), expected)
        assert torch.equal(scales.cpu(), expected_scales)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_scale_of_a_row_that_is_not_finite_is_not_finite(device, bad):
    x = rows_of(3, 173, torch.bfloat16)
    x[1, 7] = bad
    scales = quantise_rows.prepare(device, x.dtype, torch.int8, 173)(x.to(device))[1]
    assert scales.isfinite().tolist() == [True, False, True]
