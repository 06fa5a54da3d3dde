"""How the decode kernel's work is dealt out: every choice fits the GPU and covers the whole weight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats.bitmask.division import Processor, divide

H200 = Processor(count=132, shared=228 << 10)
A100 = Processor(count=108, shared=164 << 10)
ADA = Processor(count=128, shared=100 << 10)


@given(
    m=st.integers(1, 64),
    row_tiles=st.integers(1, 4000),
    column_tiles=st.integers(1, 500),
    keep=st.integers(1, 64),
    gpu=st.sampled_from((H200, A100, ADA)),
)
def test_every_division_fits_and_covers(m, row_tiles, column_tiles, keep, gpu):
    found = divide(m, row_tiles, column_tiles, keep, gpu)
    tile, x, sums = 512 + -(-keep // 2) * 256, m * 512, found.tokens * 16 * 4
    places = found.stages * (found.warps * tile + found.splits * x)
    assert places + 2 * found.warps * sums <= found.shared
    assert -(-found.blocks // gpu.count) * (found.shared + 1024) <= gpu.shared
    assert m <= found.tokens
    assert 1 <= found.splits <= column_tiles
    assert 1 <= found.warps <= 16
    assert found.teams == 1 or found.splits <= 15  # barriers
    assert 1 <= found.blocks <= -(-row_tiles // found.teams)


@pytest.mark.parametrize(
    ("n", "k", "m", "expected"),
    [
        (4096, 4096, 1, (4, 1, 2, 256)),
        (11008, 4096, 1, (8, 1, 2, 264)),
        (4096, 11008, 1, (6, 2, 2, 128)),
        (28672, 8192, 1, (16, 1, 2, 132)),
        (8960, 1536, 8, (6, 1, 2, 264)),
        (28672, 8192, 8, (8, 2, 2, 132)),
        (4096, 11008, 16, (4, 2, 2, 128)),
        (28672, 8192, 32, (2, 4, 2, 132)),
        (4096, 4096, 64, (2, 2, 1, 128)),
        (1536, 8960, 1, (12, 1, 2, 96)),
    ],
)
def test_what_was_fastest_on_an_h200_is_chosen(n, k, m, expected):
    found = divide(m, n // 16, k // 256, 32, H200)
    assert (found.splits, found.teams, found.stages, found.blocks) == expected
