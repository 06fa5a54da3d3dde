"""lift.cu and unpack.cu on a CPU: every column in its place, for rows of any length; fp8 is rounded by a GPU alone."""

import pytest
import torch

from semisparse.formats.slide24 import cuda_lift, cuda_unpack
from semisparse.formats.slide24.lift import lift, quantise_and_lift
from semisparse.formats.slide24.pack import compress_stored
from semisparse.formats.slide24.tiles import tiles_of
from semisparse.patterns import parse_pattern
from tests.formats import emulated
from tests.formats.lifted_tiles import lifted, rows_in

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no g++ to compile the emulation")


@pytest.fixture(autouse=True)
def emulated_kernels(monkeypatch: pytest.MonkeyPatch):
    emulated.stand_in(monkeypatch, cuda_lift, cuda_unpack)
    for module in (cuda_lift, cuda_unpack):
        module._kernel.cache_clear()
    yield
    for module in (cuda_lift, cuda_unpack):
        module._kernel.cache_clear()


@pytest.mark.parametrize("window", [4, 6, 8, 10, 34])
@pytest.mark.parametrize(("of_x", "dtype"), [(torch.float16, None), (torch.bfloat16, torch.int8)])
def test_lifted_tiles_hold_the_lifted_rows(of_x, dtype, window):
    for m, k in ((1, 1), (3, 173), (9, 130), (1, 700)):
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(of_x)
        x[m // 2] *= m == 1
        counters = torch.full((3,), 7, dtype=torch.int32)
        for emulated.adverse[0] in (False, True):
            found, scales = lifted(x, dtype, window, m + 7, counters)
            expected, expected_scales = (
                (lift(x, window), None) if dtype is None else quantise_and_lift(x, dtype, window)
            )
            rows = rows_in(found, m)
            assert torch.equal(rows[:, : expected.shape[1]], expected)
            assert not rows[:, expected.shape[1] :].any()
            assert scales is None or torch.equal(scales, expected_scales)
            assert not counters.any()


def test_a_row_longer_than_registers_hold_is_read_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_lift, "MOST_THREADS", 64)
    cuda_lift.row_of.cache_clear()
    x = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1)).bfloat16()
    row = cuda_lift.row_of(2, 5000, 8, 1)
    assert row.threads * row.keep * cuda_lift.LOAD < 5000
    found, scales = lifted(x, torch.int8, 8, 2)
    cuda_lift.row_of.cache_clear()
    expected, expected_scales = quantise_and_lift(x, torch.int8, 8)
    assert torch.equal(rows_in(found, 2)[:, : expected.shape[1]], expected)
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_a_scale_that_is_not(bad):
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(1)).half()
    x[1, 69] = bad
    _, scales = lifted(x, torch.int8, 8, 3)
    assert scales.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8", "14:16", "32:34"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_tiles_unpack_to_the_dense_weight(pattern, dtype):
    for n, k in ((1, 1), (65, 173), (70, 264), (200, 520)):
        generator = torch.Generator().manual_seed(k)
        weight = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8).to(dtype)
        weight[parse_pattern(pattern).mask(weight.abs().float()) == 0] = 0
        window = int(pattern.split(":")[1])
        tiles = tiles_of(*compress_stored(weight, window).values())
        for emulated.adverse[0] in (False, True):
            assert torch.equal(cuda_unpack.unpack(tiles, n, k, window, dtype), weight)
