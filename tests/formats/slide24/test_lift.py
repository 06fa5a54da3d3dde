"""lift.cu, emulated, and its Triton form against equation 4 and algorithm 1."""

import pytest
import torch

from semisparse.formats.slide24.cuda import schedule
from tests.cuda_emulator import needs_compiler
from tests.formats.slide24.lifting import lift_into_tiles, rows_of
from tests.formats.slide24.reference import DEVICE, assert_same_bits, lift, quantise_and_lift


def check_lift(x: torch.Tensor, dtype: torch.dtype | None, window: int) -> None:
    m, arrivals = len(x), torch.full((3,), 7, dtype=torch.int32)
    tiles, scales = lift_into_tiles(x, dtype, window, m + 7, arrivals)
    expected, expected_scales = (lift(x, window), None) if dtype is None else quantise_and_lift(x, dtype, window)
    rows = rows_of(tiles, m)
    assert_same_bits(rows[:, : expected.shape[1]], expected)
    assert not rows[:, expected.shape[1] :].float().any()
    assert scales is None or torch.equal(scales, expected_scales)
    assert not arrivals.any()


@needs_compiler
@pytest.mark.parametrize(
    ("x_dtype", "dtype", "windows"),
    [
        (torch.float16, None, (4, 8, 34)),
        (torch.bfloat16, torch.int8, (4, 6, 8, 34)),
        (torch.bfloat16, torch.float8_e4m3fn, (8, 10)),
    ],
    ids=["float16", "int8", "fp8"],
)
def test_lifted_tiles_hold_the_lifted_tokens(x_dtype, dtype, windows, emulated):
    for window in windows:
        for m, k in ((1, 1), (3, 173), (9, 130), (1, 700)):
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(x_dtype)
            x[m // 2] *= m == 1
            check_lift(x, dtype, window)


@needs_compiler
def test_a_token_longer_than_registers_hold_is_read_again(emulated, monkeypatch):
    monkeypatch.setattr(schedule, "choose_lift", lambda m, k: schedule.LiftSchedule(2, 64))
    check_lift(torch.randn(2, 5000, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.int8, 8)


@needs_compiler
def test_strided_and_unaligned_tokens_are_lifted(emulated):
    x = torch.randn(3, 176, generator=torch.Generator().manual_seed(2)).bfloat16()
    unaligned = torch.cat((x[:1, :1], x.flatten()[None]), 1)[0, 1:].view(3, 176)
    for given in (unaligned, x.T.contiguous().T):
        check_lift(given, torch.int8, 8)


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_has_a_scale_that_is_not(bad, emulated):
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[1, 69] = bad
    _, scales = lift_into_tiles(x, torch.int8, 8, 3, torch.zeros(0, dtype=torch.int32))
    assert scales.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("window", [4, 6, 8, 16])
def test_the_triton_form_gives_the_same(window):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")
    from semisparse.formats.slide24.cuda import lift_triton
    from semisparse.quant import triton_symmetric

    for m, k in ((1, 1), (3, 173), (2, 5000)):
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(DEVICE)
        x[m // 2] = 0
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(lift_triton.lift(x.to(dtype), window, m), lift(x.to(dtype), window))
        for dtype in (torch.int8, torch.float8_e4m3fn):
            lifted, scale = lift_triton.quantise_and_lift(x.bfloat16(), dtype, window, m)
            # The interpreter's cast to fp8 rounds otherwise than hardware; quantise_rows in Triton has the same cast.
            quantised, _ = triton_symmetric.quantise_rows(x.bfloat16(), dtype)
            assert torch.equal(lifted.float(), lift(quantised, window).float())
            expected, expected_scale = quantise_and_lift(x.bfloat16(), dtype, window)
            assert torch.equal(scale, expected_scale)
            if dtype == torch.int8 or DEVICE == "cuda":
                assert torch.equal(lifted.float(), expected.float())
