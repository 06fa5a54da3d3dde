"""Damaged tensors are refused by name, before a kernel follows them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats import Packed
from semisparse.formats.bitmask.storage import check
from semisparse.patterns import parse_pattern
from tests.formats.bitmask.weights import BITMASK, in_tiles
from tests.formats.cases import build, random


def damaged(packed: Packed, name: str, at: tuple[int, ...], value: float) -> Packed:
    tensor = packed.tensors[name].clone()
    tensor[at] = value
    return Packed(packed.spec, {**packed.tensors, name: tensor})


@pytest.mark.parametrize(
    ("pattern", "name", "at", "value", "message"),
    [
        ("32:64", "masks", (2, 0), -1, r"masks, at \[2, 0\]: a mask does not have exactly 32 bits"),
        ("32:64", "masks", (2, 1), 0, r"masks, at \[2, 1\]: a mask does not have exactly 32 bits"),
        ("64:64", "values", (1, 127), 1.0, r"values, at \[1, 63\]: a weight past column K = 70"),
        ("64:64", "values", (1, 127), float("nan"), r"values, at \[1, 127\]: the value is not finite"),
        ("70%", "masks", (3, 0), -1, "row_starts, at .3.: a row's length"),
        ("70%", "masks", (3, 1), -(2**63), "row_starts|past column K"),
        ("70%", "row_starts", (0,), 1, "runs from 1"),
        ("70%", "row_starts", (4,), 1, "to 1, expected"),
        ("70%", "row_starts", (2,), -(2**63), "row_starts, at .1.: a row's length"),
        ("70%", "row_starts", (2,), 2**63 - 1, "row_starts, at .1.: a row's length"),
    ],
)
def test_what_is_wrong_is_named(pattern: str, name: str, at: tuple[int, ...], value: float, message: str):
    packed = BITMASK.pack(build(parse_pattern(pattern), random, 4, 70), pattern)
    with pytest.raises(FormatError, match=message):
        BITMASK.validate(damaged(packed, name, at, value))


def test_bits_past_column_k_are_refused_where_no_slot_is_fixed():
    weight = torch.zeros(2, 70)
    weight[:, 69] = 1.0
    packed = BITMASK.pack(weight, "50%")
    with pytest.raises(FormatError, match=r"masks, at \[1\]: the last mask has bits past column K = 70"):
        BITMASK.validate(damaged(packed, "masks", (1, 1), 1 << 6))


@given(st.integers(0, 3), st.integers(0, 2), st.integers(0, 63), st.sampled_from(["32:64", "70%"]))
def test_any_flipped_mask_bit_is_refused(row: int, block: int, bit: int, pattern: str):
    packed = BITMASK.pack(build(parse_pattern(pattern), random, 4, 172), pattern)
    flip = torch.tensor(1).bitwise_left_shift(bit)
    with pytest.raises(FormatError):
        BITMASK.validate(damaged(packed, "masks", (row, block), packed.tensors["masks"][row, block] ^ flip))


def test_a_window_that_keeps_too_many_is_named():
    """32:64 and 4:8 are stored alike; only the second bounds every window of 8."""
    weight = build(parse_pattern("4:8"), random, 3, 128)
    weight[2, 56:64] = 0.0  # the mask is filled up from the left: window 0 has more than 4 bits, and 4 weights
    sound = BITMASK.pack(weight, "32:64")
    weight[1, 64:72] = torch.tensor([1.0, 2, 3, 4, 5, 0, 0, 0])
    weight[1, 72:80] = torch.tensor([1.0, 2, 3, 0, 0, 0, 0, 0])
    fuller = BITMASK.pack(weight, "32:64")
    found = [
        check.violation(Packed(replace(each.spec, pattern=parse_pattern("4:8")), each.tensors))
        for each in (sound, fuller)
    ]
    assert found == [None, "a window of row 1 keeps more than 4"]


@given(st.sampled_from((2, 4, 8, 16, 32)), st.data())
def test_windows_with_more_bits_than_the_pattern_keeps_are_found(window: int, data: st.DataObject):
    keep = data.draw(st.integers(1, window - 1))
    masks = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8))
    fuller = [
        any((mask >> start & 2**window - 1).bit_count() > keep for start in range(0, 64, window)) for mask in masks
    ]
    assert check._has_fuller_window(torch.tensor([masks]), window, keep).tolist() == [fuller]


def flip_mask_bit(tiles: Tensor) -> None:
    tiles[0, 0, -128] ^= 1


def fill_masks(tiles: Tensor) -> None:
    tiles[0, 0, -128:] = -1


def fill_padding(tiles: Tensor) -> None:
    tiles[1, 1, :-128] = 1


def store_a_sixth_value(tiles: Tensor) -> None:
    tiles[0, 0, -129] |= 1 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_mask_bit, "does not have exactly 5 bits"),
        (fill_masks, "padding|bits"),
        (fill_padding, "padding"),
        (store_a_sixth_value, "more than 5 values"),
    ],
)
def test_a_damaged_tile_is_refused(change, message: str):
    packed = in_tiles(20, 300, "5:64")
    BITMASK.validate(packed)
    change(packed.tensors["tiles"])
    with pytest.raises(FormatError, match=message):
        BITMASK.validate(packed)


def test_a_weight_past_column_k_of_a_tile_is_refused():
    packed = in_tiles(16, 258, "32:64")
    packed.tensors["tiles"][0, 1, 2 * 64] = 0x3C003C00  # lane 0's values 4 and 5 of columns 256 to 319
    with pytest.raises(FormatError, match="past column K"):
        BITMASK.validate(packed)


def test_an_unknown_layout_is_refused():
    packed = BITMASK.pack(torch.eye(8), "4:8")
    with pytest.raises(FormatError, match="no layout 'columns'; it has rows, tiles"):
        BITMASK.validate(packed.in_layout({"layout": "columns"}, packed.tensors))
