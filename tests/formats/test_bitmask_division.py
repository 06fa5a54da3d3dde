"""How the decode kernel's work is dealt out: every choice fits the GPU and covers the whole weight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats.bitmask.division import MOST_WARPS, Processor, divide

H200 = Processor(count=132, shared=228 << 10)
A100 = Processor(count=108, shared=164 << 10)
ADA = Processor(count=128, shared=100 << 10)


@given(
    m=st.integers(1, 16),
    row_tiles=st.integers(1, 4000),
    column_tiles=st.integers(1, 500),
    keep=st.integers(1, 64),
    gpu=st.sampled_from((H200, A100, ADA)),
)
def test_every_division_fits_and_covers(m, row_tiles, column_tiles, keep, gpu):
    found = divide(m, row_tiles, column_tiles, keep, gpu)
    stage = found.splits * found.rows * 2 * (keep + 1) * 128
    x = m * 36 * found.panel * 16
    assert stage + x <= found.shared <= gpu.shared - 1024
    assert 1 <= found.splits * found.rows <= MOST_WARPS
    assert found.panel == column_tiles or (found.panel < column_tiles and found.panel % found.splits == 0)
    assert 1 <= found.blocks <= -(-row_tiles // found.rows)


@pytest.mark.parametrize(
    ("n", "k", "m", "expected"),
    [
        (4096, 4096, 1, (6, 2, 16, 128)),
        (11008, 4096, 1, (8, 1, 16, 264)),
        (28672, 8192, 1, (8, 1, 32, 264)),
        (8960, 1536, 1, (3, 1, 6, 560)),
        (1536, 1536, 1, (6, 1, 6, 96)),
        (4096, 11008, 8, (6, 2, 24, 128)),
        (4096, 11008, 16, (3, 2, 18, 128)),
    ],
)
def test_what_was_fastest_on_an_h200_is_chosen(n, k, m, expected):
    found = divide(m, n // 16, k // 256, 32, H200)
    assert (found.splits, found.rows, found.panel, found.blocks) == expected
