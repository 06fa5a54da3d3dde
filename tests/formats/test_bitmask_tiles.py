"""The layout `tiles`: lossless, checked, and read by an emulation of the kernel's lanes as the weights it came from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semisparse.errors import FormatError
from semisparse.formats.base import get_format, replace_tensors
from semisparse.patterns import parse_pattern

BITMASK = get_format("bitmask")


def random_weight(n, k, pattern, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    return weight * parse_pattern(pattern).mask(torch.rand(n, k, generator=generator))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 40),
    k=st.integers(1, 600),
    keep=st.integers(1, 64),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_tiles_hold_the_same_weight_as_rows(n, k, keep, dtype):
    weight = random_weight(n, k, f"{keep}:64", dtype)
    rows = BITMASK.pack(weight, f"{keep}:64")
    tiles = BITMASK.pack(weight, f"{keep}:64", layout="tiles")
    BITMASK.validate(tiles)
    assert torch.equal(tiles.unpack(), weight)
    back = tiles.to("cpu")
    assert back.params == rows.params
    assert all(torch.equal(back.tensors[name], rows.tensors[name]) for name in rows.tensors)


def test_tiles_take_nine_bits_a_weight_at_32_of_64():
    assert BITMASK.pack(random_weight(32, 512, "32:64"), "32:64", layout="tiles").bits_per_weight == 9.0


class Warp:
    """32 lanes that expand one tile as tiled.cuh does: lane 4 g + t owns block t of the rows g and g + 8."""

    def __init__(self, tile):
        words = tile.numpy().view(np.uint32)
        self.masks = words[:128].reshape(32, 2, 2)  # lane, row half, mask half
        pairs = words[128:].reshape(-1, 2, 32).transpose(2, 1, 0)  # lane, row half, pair
        self.beyond = np.full((32, 2, 1), 0xFFFFFFFF, np.uint32)  # what stands after the last values
        self.words = np.concatenate((np.ascontiguousarray(pairs), self.beyond), axis=-1)
        self.count = np.full((32, 2), 16, np.int64)
        self.last = np.zeros((32, 2), np.uint64)

    def pair_at(self, count):
        """Give the values before and at ``count``, in sixteenths of a shift: one read and a funnel shift."""
        word = np.take_along_axis(self.words, (count // 16 - 1 >> 1)[..., None], -1)[..., 0].astype(np.uint64)
        both = (word << np.uint64(32) | self.last) << (count % 32).astype(np.uint64) >> np.uint64(32)
        self.last = word
        return np.stack((both & np.uint64(0xFFFF), both >> np.uint64(16) & np.uint64(0xFFFF)), -1).astype(np.uint16)

    def take(self, step):
        """Give each lane's and row half's weights in columns 4 * step to 4 * step + 3 as bits: [32, 2, 4]."""

        def shifted(at):
            return (self.masks[..., at // 8 % 2].astype(np.uint64) << np.uint64(at % 8)).astype(np.uint32)

        signs = (shifted(step)[..., None] >> np.array([7, 15, 23, 31], np.uint32)).astype(np.int64) & 1
        after = shifted(step + 1).astype(np.int64) >> 7 & 1
        counted = 16 * signs
        if step == 0:
            counted[..., 0] = 0
        middle = self.count + counted[..., :2].sum(-1)
        self.count = self.count + counted.sum(-1)
        chosen = [self.pair_at(at) for at in (middle, self.count)]
        alive = np.stack((signs[..., 1], signs[..., 2], signs[..., 3], after), axis=-1)
        return np.concatenate(chosen, axis=-1) * alive.astype(np.uint16)


def mma_m16n8k16(a, b):
    """Multiply fragments as the instruction lays them over lanes: a [32, 4, 2], b [32, 2, 2] to sums [32, 4]."""
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for register in range(4):
        for half in range(2):
            left[g + 8 * (register % 2), 2 * t + half + 8 * (register // 2)] = a[:, register, half]
            if register < 2:
                right[2 * t + half + 8 * register, g] = b[:, register, half]
    product = left @ right
    return np.stack([product[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)], axis=-1)


@pytest.mark.parametrize("keep", [1, 7, 16, 31, 32, 48, 64])
def test_lanes_read_tiles_into_the_right_fragments(keep):
    n, k, m = 16, 256, 8
    weight = random_weight(n, k, f"{keep}:64")
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).double().numpy()
    warp = Warp(BITMASK.pack(weight, f"{keep}:64", layout="tiles").tensors["tiles"][0, 0])
    lane = np.arange(32)
    sums = np.zeros((32, 4))
    for step in range(16):
        weights = warp.take(step).view(np.float16).astype(np.float64)  # lane, row half, column
        columns = 64 * (lane % 4)[:, None] + 4 * step + np.arange(4)
        a = weights.reshape(32, 2, 2, 2).transpose(0, 2, 1, 3).reshape(32, 4, 2)
        b = x[(lane // 4)[:, None], columns].reshape(32, 2, 2)
        sums += mma_m16n8k16(a, b)
    y = np.empty((m, n))
    for i in range(4):
        y[lane % 4 * 2 + i % 2, lane // 4 + i // 2 * 8] = sums[:, i]
    expected = x @ weight.double().numpy().T
    assert np.abs(y - expected).max() <= 1e-12 * np.abs(expected).max()


def corrupted(packed, change):
    tiles = packed.tensors["tiles"].clone()
    change(tiles)
    return replace_tensors(packed, {"tiles": tiles})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tiles: tiles[0, 0].__setitem__(0, tiles[0, 0, 0] ^ 1), "has not exactly 5 bits"),
        (lambda tiles: tiles[0, 0].__setitem__(slice(0, 128), -1), "padding|bits"),
        (lambda tiles: tiles[1, 1].__setitem__(slice(128, None), 1), "padding"),
        (lambda tiles: tiles[0, 0].__setitem__(-1, tiles[0, 0, -1] | 1 << 20), "more than 5 values"),
    ],
)
def test_a_damaged_tile_is_refused(change, message):
    packed = BITMASK.pack(random_weight(20, 300, "5:64"), "5:64", layout="tiles")
    BITMASK.validate(packed)
    with pytest.raises(FormatError, match=message):
        BITMASK.validate(corrupted(packed, change))


def test_a_weight_past_column_k_is_refused():
    packed = BITMASK.pack(torch.zeros(16, 258, dtype=torch.float16), "32:64", layout="tiles")
    packed.tensors["tiles"][0, 1, 128 + 2 * 64] = 0x3C003C00  # lane 0's values 4 and 5 of columns 256 to 319
    with pytest.raises(FormatError, match="past column K"):
        BITMASK.validate(packed)


def test_what_tiles_cannot_hold_is_refused_and_stays_in_rows():
    with pytest.raises(FormatError, match="bounds no block"):
        BITMASK.pack(random_weight(8, 64, "50%"), "50%", layout="tiles")
    with pytest.raises(FormatError, match="16 bits"):
        BITMASK.pack(random_weight(8, 64, "4:8", torch.float32), "4:8", layout="tiles")
    with pytest.raises(FormatError, match="no layout 'columns'"):
        BITMASK.pack(random_weight(8, 64, "4:8"), "4:8", layout="columns")
    rows = BITMASK.pack(random_weight(8, 64, "50%"), "50%")
    assert BITMASK.arrange(rows, "cuda").params == rows.params


def test_only_kernels_of_tiles_accept_tiles():
    packed = BITMASK.pack(random_weight(16, 64, "32:64"), "32:64", layout="tiles")
    from semisparse.formats.product import linear, problem_of

    x = torch.randn(2, 64).half()
    problem = problem_of(x, packed)
    assert all(kernel.refusal(problem) for kernel in BITMASK.kernels if kernel.device == "cpu")
    expected = x.float() @ packed.unpack().float().T
    assert torch.allclose(linear(x, packed).float(), expected, rtol=2**-10, atol=1e-3)
