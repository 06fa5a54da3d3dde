"""Both layouts against readers of their bytes written from README.md alone, with Python integers and loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semisparse.errors import FormatError
from semisparse.formats import Packed
from semisparse.patterns import parse_pattern
from tests.formats.bitmask.weights import BITMASK, check_tiles, in_tiles, random_weight
from tests.formats.cases import build, random
from tests.formats.worked_example import worked_example

EXACT = {"1:4": 16, "2:4": 32, "6:8": 48, "3:16": 12, "8:32v32": 16, "7:64": 7, "64:64": 64, "1:1": 64, "1:2v3": 32}
VARIABLE = ["6:10", "70:128", "g16@50%", "70%", "30%/row", "0%"]


def read_rows(packed: Packed) -> list[list[float]]:
    """Read the layout on disk as README.md words it."""
    n, k = packed.shape
    masks = packed.tensors["masks"].numpy().tobytes()
    values = packed.tensors["values"].flatten().tolist()
    starts = packed.tensors["row_starts"].numpy().tobytes() if "row_starts" in packed.tensors else None
    blocks = -(-k // 64)
    weight = [[0.0] * k for _ in range(n)]
    for row in range(n):
        slot = int.from_bytes(starts[8 * row : 8 * row + 8], "little") if starts else row * len(values) // n
        for block in range(blocks):
            at = 8 * (row * blocks + block)
            mask = int.from_bytes(masks[at : at + 8], "little")
            for bit in range(64):
                if mask >> bit & 1:
                    column = 64 * block + bit
                    if column < k:
                        weight[row][column] = values[slot]
                    else:
                        assert values[slot] == 0
                    slot += 1
    return weight


patterns = st.one_of(
    st.sampled_from([*EXACT, *VARIABLE]),
    st.integers(1, 64).map(lambda keep: f"{keep}:64"),
)


@given(
    patterns, st.integers(1, 9), st.integers(1, 200), st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
)
def test_bytes_on_disk_mean_the_weight(pattern: str, n: int, k: int, dtype: torch.dtype):
    weight = build(parse_pattern(pattern), random, n, k).to(dtype)
    packed = BITMASK.pack(weight, pattern)
    BITMASK.validate(packed)
    assert read_rows(packed) == weight.tolist()


def test_every_keep_is_stored_in_exactly_so_many_slots():
    for keep in range(1, 65):
        weight = build(parse_pattern(f"{keep}:64"), random, 5, 172).bfloat16()
        weight[1, :64] = 0
        weight[2] = 0
        packed = BITMASK.pack(weight, f"{keep}:64")
        assert packed.tensors["values"].shape == (5, 3 * keep)
        assert {(mask & (2**64 - 1)).bit_count() for mask in packed.tensors["masks"].flatten().tolist()} == {keep}
        assert torch.equal(packed.unpack(), weight)


def test_patterns_that_bound_64_columns_are_stored_exactly():
    for pattern, count in EXACT.items():
        packed = BITMASK.pack(torch.zeros(3, 130), pattern)
        assert packed.tensors["values"].shape == (3, 3 * count)
        assert packed.params == {}
    for pattern in VARIABLE:
        assert BITMASK.pack(torch.zeros(3, 130), pattern).params == {"kept": 0}


@pytest.mark.parametrize("pattern", ["32:64", "70%"])
def test_negative_zeros_come_back_as_zeros(pattern: str):
    packed = BITMASK.pack(torch.full((3, 70), -0.0), pattern)
    assert not packed.tensors["values"].signbit().any()
    assert not packed.unpack().signbit().any()


@pytest.mark.parametrize(("pattern", "kind"), [("4:64", "none"), ("90%", "none"), ("4:64", "w4")])
def test_the_worked_example_of_the_readme(pattern: str, kind: str):
    weight = torch.zeros(2, 66, dtype=torch.float16)
    weight[0, [0, 3, 8, 63, 65]] = torch.tensor([1, -2, 0.5, 4, 3], dtype=torch.float16)
    weight[1, 1] = 1.5
    packed = BITMASK.pack(weight, pattern, kind=kind)
    title = pattern if kind == "none" else f"{pattern} {kind}"
    assert {name: t.numpy().tobytes() for name, t in packed.tensors.items()} == worked_example("bitmask", title)


# The layout on a GPU


def read_tiles(packed: Packed, keep: int) -> list[list[float]]:
    """Read the layout `tiles` as README.md words it."""
    n, k = packed.shape
    tiles = packed.tensors["tiles"]
    weight = [[0.0] * k for _ in range(n)]
    for row_tile, column_tile in torch.cartesian_prod(*map(torch.arange, tiles.shape[:2])).tolist():
        masks = [word & 0xFFFFFFFF for word in tiles[row_tile, column_tile, -128:].tolist()]
        values = tiles[row_tile, column_tile, :-128].clone().view(packed.dtype).tolist()
        for lane in range(32):
            g, t = divmod(lane, 4)
            for half in (0, 1):
                row, block = 16 * row_tile + g + 8 * half, 4 * column_tile + t
                stored = 0
                for column in range(64):
                    if bit_of(column, masks[4 * lane + 2 * half : 4 * lane + 2 * half + 2]):
                        pair = 64 * (stored // 2) + 32 * half + lane
                        value = values[2 * pair + stored % 2]
                        stored += 1
                        if row < n and 64 * block + column < k:
                            weight[row][64 * block + column] = value
                        else:
                            assert value == 0
                assert stored == keep
    return weight


def bit_of(column: int, words: list[int]) -> int:
    """Bit 8 b + 7 - s of a half's word is that of its column 4 s + b - 1; 31 is in the second word, 63 in the first."""
    word, within = (0, 0) if column == 63 else ((column + 1) // 32, (column + 1) % 32)
    s, b = divmod(within, 4)
    return words[word] >> (8 * b + 7 - s) & 1


@pytest.mark.parametrize(("n", "k", "keep"), [(16, 256, 32), (20, 300, 7), (1, 1, 64), (33, 513, 1), (15, 260, 31)])
def test_bytes_on_a_gpu_mean_the_weight(n: int, k: int, keep: int):
    packed = in_tiles(n, k, f"{keep}:64")
    assert read_tiles(packed, keep) == random_weight(n, k, f"{keep}:64").tolist()


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 600), st.integers(1, 64), st.sampled_from([torch.float16, torch.bfloat16]))
def test_tiles_hold_the_same_weight_as_rows(n: int, k: int, keep: int, dtype: torch.dtype):
    check_tiles(BITMASK.pack(random_weight(n, k, f"{keep}:64", dtype), f"{keep}:64"))


def test_tiles_take_nine_bits_per_weight_at_32_of_64():
    assert in_tiles(32, 512, "32:64").bits_per_weight == 9.0


@pytest.mark.parametrize(
    ("pattern", "dtype"), [("50%", torch.float16), ("6:10", torch.bfloat16), ("4:8", torch.float32)]
)
def test_what_tiles_cannot_hold_stays_in_rows(pattern: str, dtype: torch.dtype):
    packed = BITMASK.pack(random_weight(8, 64, pattern, dtype), pattern)
    assert BITMASK.arrange(packed, "cuda") is packed
    claimed = packed.in_layout({"layout": "tiles"}, {"tiles": torch.zeros(1, 1, 640, dtype=torch.int32)})
    with pytest.raises(FormatError, match=r"does not bound|16-bit"):
        BITMASK.validate(claimed)
