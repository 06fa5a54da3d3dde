"""Kinds w8 and w4 against a reader of their bytes written from README.md alone, with Python integers and loops."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.errors import FormatError
from semisparse.formats import Packed, linear
from semisparse.nn.slicing import concatenate_weights, slice_weight
from semisparse.patterns import parse_pattern
from semisparse.quant.group import GroupScales, scales_of
from semisparse.runtime import cpp, row_matmul
from tests.formats.bitmask.test_check import damaged
from tests.formats.bitmask.weights import BITMASK
from tests.formats.cases import build, random
from tests.formats.checking import check_product

BITS = {"w8": 8, "w4": 4}
PATTERNS = ["32:64", "7:64", "2:4", "8:32v32", "64:64", "6:10", "70%", "0%"]


def read(packed: Packed) -> tuple[list[list[float]], list[list[bool]]]:
    """Return weights before they are rounded to their dtype, and which are stored, as README.md words it."""
    (n, k), bits = packed.shape, BITS[packed.params["kind"]]
    masks = packed.tensors["masks"].tolist()
    octets = packed.tensors["codes"].flatten().tolist()
    scale = packed.tensors["scale"].tolist()
    counts = [(mask & (2**64 - 1)).bit_count() for row in masks for mask in row]
    first = [0, *accumulate(-(-count * bits // 8) for count in counts)]
    assert first[-1] == len(octets)
    blocks = -(-k // 64)
    if "row_starts" in packed.tensors:
        assert packed.tensors["row_starts"].tolist() == first[::blocks]
    weight, stored = [[0.0] * k for _ in range(n)], [[False] * k for _ in range(n)]
    for row in range(n):
        for block in range(blocks):
            start, stop = first[row * blocks + block : row * blocks + block + 2]
            number = int.from_bytes(bytes(octets[start:stop]), "little")
            for column in range(64 * block, 64 * block + 64):
                if masks[row][block] >> column % 64 & 1:
                    value = (number % 2**bits - 2 ** (bits - 1)) * scale[row][block]
                    number >>= bits
                    if column < k:
                        weight[row][column], stored[row][column] = value, True
                    else:
                        assert value == 0
            assert number == 0
    return weight, stored


@given(
    st.sampled_from(PATTERNS),
    st.sampled_from(list(BITS)),
    st.integers(1, 9),
    st.integers(1, 200),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_bytes_on_disk_mean_the_weight_within_half_a_code(pattern: str, kind: str, n: int, k: int, dtype: torch.dtype):
    weight = build(parse_pattern(pattern), random, n, k).to(dtype)
    packed = BITMASK.pack(weight, pattern, kind=kind)
    BITMASK.verify(packed)
    values, stored = read(packed)
    unpacked = packed.unpack()
    assert torch.equal(unpacked, torch.tensor(values, dtype=torch.float64).to(dtype))
    assert not (unpacked[~torch.tensor(stored)] != 0).any()
    assert not unpacked[weight == 0].any()
    assert not unpacked.signbit()[unpacked == 0].any()
    largest = torch.nn.functional.pad(weight.double(), (0, -k % 64)).unflatten(1, (-1, 64)).abs().amax(-1)
    # The largest weight has code 0, so a weight of the other sign and equal size is clamped, by up to a code.
    step = (largest / 2 ** (BITS[kind] - 1)).repeat_interleave(64, 1)[:, :k]
    slack = torch.finfo(dtype).eps * weight.double().abs() * 2 + torch.finfo(dtype).tiny
    error = (torch.tensor(values, dtype=torch.float64) - weight.double()).abs()
    assert (error <= step + slack).all()
    assert (error <= step / 2 + slack)[weight.double().abs() < 0.9 * (step * (2 ** (BITS[kind] - 1) - 1))].all()


@pytest.mark.parametrize("kind", BITS)
def test_a_rounded_weight_is_stored_without_loss(kind: str):
    """`compress` stores a weight with the scales that it was quantised with, which tuning has changed."""
    weight = build(parse_pattern("32:64"), random, 20, 200)
    scales = scales_of(weight, BITS[kind], 64, torch.float16, symmetric=True)
    scales = replace(scales, scale=scales.scale * torch.linspace(0.7, 1.2, 4).half())
    rounded = scales.rounded(weight)
    assert torch.equal(BITMASK.pack(rounded, "32:64", kind=kind, scales=scales).unpack(), rounded)


def test_four_bits_take_three_and_a_quarter():
    weight = build(parse_pattern("32:64"), random, 8, 4096).half()
    bits = {kind: BITMASK.pack(weight, "32:64", kind=kind).bits_per_weight for kind in BITS}
    assert bits == {"w8": 5.25, "w4": 3.25}


@pytest.mark.parametrize("dim", [0, 1])
def test_a_variable_layout_is_cut_and_joined_without_rounding_again(dim: int):
    packed = BITMASK.pack(build(parse_pattern("70%"), random, 24, 300), "70%", kind="w4")
    edges = [0, 7, 24] if dim == 0 else [0, 128, 300]
    parts = [slice_weight(packed, dim, *pair) for pair in pairwise(edges)]
    assert torch.equal(torch.cat([part.unpack() for part in parts], dim), packed.unpack())
    whole = concatenate_weights(parts, dim, packed.pattern)
    assert whole.spec == packed.spec
    assert all(torch.equal(whole.tensors[name], packed.tensors[name]) for name in packed.tensors)
    with pytest.raises(FormatError, match="64 columns share a scale"):
        slice_weight(packed, 1, 32, 300)


@pytest.mark.parametrize(
    ("pattern", "name", "at", "value", "message"),
    [
        ("32:64", "masks", (2, 0), -1, r"masks, at \[2, 0\]: a mask does not have exactly 32 bits"),
        ("64:64", "codes", (1, 63), 0, r"codes, at \[1, 62\]: a weight past column K = 70"),
        ("7:64", "codes", (3, 3), 0x18, r"codes, at \[3, 0\]: the four bits after the last code"),
        ("70%", "row_starts", (2,), 2**62, "row_starts, at .1.: a row's length"),
        ("70%", "masks", (3, 0), -1, "row_starts, at .3.: a row's length"),
        ("32:64", "scale", (1, 1), 0.0, r"scale, at \[1, 1\]: the scale is 0"),
        ("32:64", "scale", (1, 1), float("nan"), r"scale, at \[1, 1\]"),
        ("32:64", "scale", (1, 1), -9000.0, "a weight would not be finite"),
    ],
)
def test_what_is_wrong_is_named(pattern: str, name: str, at: tuple[int, ...], value: float, message: str):
    packed = BITMASK.pack(build(parse_pattern(pattern), random, 4, 70).half(), pattern, kind="w4")
    BITMASK.validate(packed)
    with pytest.raises(FormatError, match=message):
        BITMASK.validate(damaged(packed, name, at, value))


def test_an_unknown_kind_and_scales_of_another_weight_are_refused():
    weight = build(parse_pattern("32:64"), random, 4, 70)
    with pytest.raises(FormatError, match="no kind 'w3'; it has none, w8, w4"):
        BITMASK.pack(weight, "32:64", kind="w3")
    for wrong in (scales_of(weight, 4, 64, torch.float32), scales_of(weight, 8, 64, torch.float32, symmetric=True)):
        with pytest.raises(FormatError, match="scales are"):
            BITMASK.pack(weight, "32:64", kind="w4", scales=wrong)
    with pytest.raises(FormatError, match="kind=none"):
        BITMASK.pack(weight, "32:64", scales=scales_of(weight, 4, 64, torch.float32, symmetric=True))


@pytest.mark.skipif(cpp.refusal() is not None, reason=str(cpp.refusal()))
@pytest.mark.parametrize("kind", BITS)
def test_the_cpu_kernel_multiplies_what_the_codes_mean(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_matmul, "UNPACKED_ROWS", 8)  # 16: whole tiles
    for pattern, dtype, m in (
        ("32:64", torch.float16, 1),
        ("7:64", torch.bfloat16, 7),
        ("70%", torch.float32, 16),
        ("99%", torch.float16, 2),
        ("32:64", torch.bfloat16, 65),
        ("70%", torch.float16, 40),
    ):
        packed = BITMASK.pack(build(parse_pattern(pattern), random, 33, 172).to(dtype), pattern, kind=kind)
        x = torch.randn(m, 172, generator=torch.Generator().manual_seed(m))
        check_product(linear(x, packed, kernel="cpu"), x, packed, None)


@pytest.mark.skipif(cpp.refusal() is not None, reason=str(cpp.refusal()))
@pytest.mark.parametrize("kind", BITS)
def test_every_code_is_read(kind: str):
    bits = BITS[kind]
    weight = torch.arange(2**bits).float().roll(5)[None] - 2 ** (bits - 1)
    scale = torch.ones(1, -(-(2**bits) // 64))
    scales = GroupScales(bits, 64, scale, torch.full_like(scale, 128), symmetric=True)
    packed = BITMASK.pack(weight, "0%", kind=kind, scales=scales)
    assert torch.equal(packed.unpack(), weight)
    assert torch.equal(linear(torch.eye(2**bits)[:32], packed, kernel="cpu").T, weight[:, :32])
    assert torch.equal(linear(torch.eye(2**bits), packed, kernel="cpu").T, weight)
