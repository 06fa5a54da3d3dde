"""Slide24's layouts of a GPU at work, as far as a CPU can tell: what the bytes mean, and that they come back."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats import get_format
from semisparse.formats.base import replace_tensors
from semisparse.formats.kernel import Problem
from semisparse.formats.slide24 import cuda_lift, gpu, hopper, layouts, tiles
from semisparse.formats.slide24.layout import lifted_columns
from semisparse.formats.slide24.pack import unpack_lifted, unpack_stored
from semisparse.patterns import parse_pattern
from tests.formats.test_slide24 import DTYPES, SLIDE24, patterns, random_weight

KINDS = (None, *DTYPES)


def packed_weight(pattern: str, n: int, k: int, kind: str | None, seed: int = 0):
    options = {} if kind is None else {"kind": kind}
    return SLIDE24.pack(random_weight(pattern, n, k, seed).bfloat16(), pattern, **options)


@pytest.mark.parametrize("kind", KINDS)
@given(pattern=patterns, n=st.integers(1, 200), k=st.integers(1, 300), seed=st.integers(0, 99))
def test_tiles_come_back_as_the_same_rows(kind, pattern, n, k, seed):
    packed = packed_weight(pattern, n, k, kind, seed)
    arranged = layouts.in_tiles(packed)
    SLIDE24.validate(arranged)
    assert arranged.params["layout"] == "tiles"
    assert torch.equal(arranged.unpack(), packed.unpack())
    back = arranged.to("cpu")
    assert back.declaration == packed.declaration
    for name, tensor in packed.tensors.items():
        assert torch.equal(back.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


def what_wgmma_multiplies(block: Tensor, itemsize: int) -> Tensor:
    """Read a tile of 64 rows as the PTX manual describes the operands of wgmma.sp: [64, 128 / itemsize] as integers."""
    integer = {1: torch.int8, 2: torch.int16}[itemsize]
    values, words = block[:4096], block[4096:].view(torch.int32).tolist()
    steps = 64 // itemsize  # columns of a step
    dense = torch.zeros(64, 2 * steps, dtype=integer)
    for step in range(2):
        # No swizzling: core matrices of 8 rows of 16 bytes, 1,024 bytes from one to the next along K, 128 along N.
        of_step = values[2048 * step : 2048 * (step + 1)].view(2, 8, 8, 16)
        stored = of_step.permute(1, 2, 0, 3).reshape(64, 32).contiguous().view(integer)
        for row in range(64):
            warp, place = divmod(row, 16)
            upper, group = divmod(place, 8)
            for slot in range(steps // 2):
                half, within = divmod(slot, steps // 4)
                if itemsize == 1:  # a word a thread and step: 16 slots of one row
                    word = words[128 * step + 32 * warp + 4 * group + 2 * half + upper]
                    position = word >> 2 * within & 3
                else:  # a word a thread: 8 slots of a row and of the one 8 below; the selector is the step
                    word = words[32 * warp + 4 * group + 2 * step + half]
                    position = word >> (2 * within + 16 * upper) & 3
                dense[row, steps * step + slot // 2 * 4 + position] += stored[row, slot]
    return dense


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_mean_the_lifted_weight_to_the_hardware(kind):
    packed = packed_weight("6:8", 70, 172, kind)
    lifted = unpack_lifted(packed)
    itemsize = lifted.element_size()
    blocks, count, _ = layouts.in_tiles(packed).tensors["tiles"].shape
    across = 128 // itemsize
    integer = {1: torch.int8, 2: torch.int16}[itemsize]
    expected = torch.zeros(64 * count, across * blocks, dtype=integer)
    expected[:70, : lifted.shape[1]] = lifted.view(integer)
    for block, tile in torch.cartesian_prod(torch.arange(blocks), torch.arange(count)).tolist():
        found = what_wgmma_multiplies(layouts.in_tiles(packed).tensors["tiles"][block, tile], itemsize)
        assert torch.equal(found, expected[64 * tile : 64 * (tile + 1), across * block : across * (block + 1)])


def test_what_a_file_must_not_say_is_refused():
    packed = layouts.in_tiles(packed_weight("6:8", 5, 40, "int8"))
    filled = packed.tensors["tiles"].clone()
    filled[0, 1, 7] = 1  # row 64 of 5
    for wrong, message in (
        (replace_tensors(packed, {**packed.tensors, "tiles": filled}), "where nothing belongs"),
        (replace(packed, params={**packed.params, "layout": "heaps"}, declaration=""), "no layout 'heaps'"),
        (
            replace(packed, params={**packed.params, "layout": "compressed"}, declaration=""),
            "do not give every dimension",
        ),
    ):
        with pytest.raises(FormatError, match=message):
            SLIDE24.validate(wrong)
    opaque = {"compressed": torch.zeros(9, dtype=torch.uint8), "scale": packed.tensors["scale"]}
    params = {"kind": "int8", "layout": "compressed", "bytes": 9}
    with pytest.raises(FormatError, match="on disk and on a CPU the layout is rows"):
        SLIDE24.validate(replace(packed, params=params, tensors=opaque, declaration=""))


def test_a_weight_without_a_gpu_stays_in_rows():
    packed = packed_weight("6:8", 5, 40, "int8")
    assert SLIDE24.arrange(packed, "cuda") is packed
    assert SLIDE24.arrange(packed, "cpu") is packed


@given(m=st.integers(1, 70000), rows=st.integers(1, 600), blocks=st.integers(1, 300))
def test_a_division_is_the_fastest_by_its_estimate(m, rows, blocks):
    rows = max(rows, tiles.FEWEST)
    problem = (m, rows, blocks, 132)
    chosen = hopper.choose_division(*problem)
    assert chosen.parts <= blocks
    possible = [d for d in hopper.DIVISIONS if d.parts <= blocks and d.fits(m, rows, 132)]
    assert chosen.us(*problem) == min(d.us(*problem) for d in possible)
    tiling = chosen.tiling
    assert tiling.clusters(m, rows) * tiling.tokens * tiling.groups * tiling.cluster * 64 >= m * rows * 64
    whole, at_once = chosen.whole(m, rows, 132), 132 // tiling.cluster
    cut = tiling.clusters(m, rows) - whole
    assert whole % at_once == 0 or not cut
    assert cut * chosen.parts <= at_once, "what is cut is one wave at most"
    assert hopper.count_counters(rows, m, chosen, 132) == cut * tiling.cluster * tiling.groups


def test_few_tiles_of_many_columns_are_cut_into_parts():
    few, many = hopper.choose_division(64, 56, 222, 132), hopper.choose_division(4096, 56, 222, 132)
    assert few.parts > 1
    assert few.whole(64, 56, 132) == 0
    assert many.parts > 1, "3.4 waves"
    assert many.whole(4096, 56, 132) == 3 * 66
    assert hopper.choose_division(4096, 592, 42, 132).parts == 1, "35.9 waves"


@given(st.integers(1, 4096), st.integers(1, 60_000), st.sampled_from((4, 6, 8, 10, 34)), st.sampled_from((1, 2)))
def test_a_lifted_row_has_room_for_every_window(m, k, window, itemsize):
    row, gap = cuda_lift.row_of(m, k, window, itemsize), window // 2
    assert row.bytes >= lifted_columns(k, window) * itemsize
    assert row.bytes % 128 == row.threads % 32 == 0
    for pair in (gap - 1, gap, row.bytes // itemsize - 1):
        assert pair * cuda_lift.inverse_of(gap) >> 32 == pair // gap, "a division, as lift.cu computes it"


def test_every_tiling_fits_into_shared_memory_and_registers():
    for tiling in hopper.TILINGS:
        for itemsize in (1, 2):
            assert tiling.stages(itemsize) >= 3
            taken = tiling.stages(itemsize) * tiling.stage_bytes(itemsize) + tiling.desk_bytes
            assert taken <= hopper.SHARED_BYTES
            assert tiling.stages(itemsize) > hopper.SKEW, "a warp group waits for another that has stages to go on"
        assert tiling.tokens * 128 // tiling.cluster % 1024 == 0, "a share is whole swizzled units of eight tokens"
        assert tiling.groups <= tiles.FEWEST


def test_the_stored_weight_is_what_every_layout_unpacks_to():
    packed = packed_weight("8:10", 9, 101, "fp8")
    assert torch.equal(unpack_stored(layouts.in_rows(layouts.in_tiles(packed))).float(), unpack_stored(packed).float())
    assert get_format("slide24").unpack(layouts.in_tiles(packed)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("pattern", "params", "unpacked_from"),
    [("2:4", {}, None), ("4:6", {}, None), ("6:8", {}, 4096), ("6:8", {"kind": "int8"}, None), ("8:10", {}, 2048)],
)
def test_tiles_are_left_where_lifting_costs_more_than_they_gain(pattern: str, params: dict, unpacked_from: int | None):
    for m in (1, 64, 1024, 2048, 4096, 8192, 65536):
        problem = Problem(m, 4096, 4096, parse_pattern(pattern), params, *[torch.bfloat16] * 2, torch.device("cuda"))
        assert gpu.tiles_pay(problem) == (unpacked_from is None or m < unpacked_from)


@pytest.mark.parametrize(
    ("m", "k", "keep", "threads"), [(4096, 3584, 8, 64), (1024, 3584, 4, 128), (64, 3584, 2, 224), (64, 18944, 4, 608)]
)
def test_a_lift_keeps_as_many_loads_as_leave_the_device_full(m: int, k: int, keep: int, threads: int):
    row = cuda_lift.row_of(m, k, 8, 1)
    assert (row.keep, row.threads) == (keep, threads)
