"""How the decode kernel's work is dealt out: every choice fits the GPU and covers the whole weight."""

from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats.bitmask.division import Processor, divide

H200 = Processor(count=132, shared=228 << 10, overlaps=True)
A100 = Processor(count=108, shared=164 << 10, overlaps=False)
ADA = Processor(count=128, shared=100 << 10, overlaps=False)


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
    assert found.teams == 1 or found.teams + found.splits <= 15  # barriers
    assert 1 <= found.blocks <= -(-row_tiles // found.teams)
