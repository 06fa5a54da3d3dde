"""Codes in tiles: the bytes against a reader written from README.md alone, and the kernels that expand them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semisparse.errors import FormatError
from semisparse.formats import Packed
from semisparse.formats.bitmask.cuda import decode, gemm, unpack
from semisparse.formats.product import problem_of
from semisparse.quant.group import GroupScales
from semisparse.runtime.gemm_schedule import Schedule
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.bitmask.test_check import damaged
from tests.formats.bitmask.test_gemm import needs_hopper
from tests.formats.bitmask.weights import (
    BITMASK,
    SMALL_CASES,
    check,
    check_on_gpu,
    check_tiles,
    needs_gpu,
    operands,
    random_weight,
)
from tests.formats.fusion import check_fused

HALF, BF16 = torch.float16, torch.bfloat16
BITS = {"w8": 8, "w4": 4}


def coded(n: int, k: int, keep: int, kind: str, dtype: torch.dtype = HALF) -> Packed:
    """Return a weight of codes in the layout of a GPU, where it is."""
    rows = BITMASK.pack(random_weight(n, k, f"{keep}:64", dtype), f"{keep}:64", kind=kind)
    packed = BITMASK.arrange(rows, "cuda")
    assert packed.params == {"kind": kind, "layout": "tiles"}
    return packed


def code_at(words: list[int], kind: str, lane: int, half: int, stored: int, column: int) -> int | None:
    """Return the code of a column of row g + 8 * half, of which ``stored`` were in front, or None if it has none."""
    if kind == "w4":
        word = words[32 + 128 * (2 * half + column // 32) + 4 * lane + column % 32 // 8]
        return word >> 4 * (0, 2, 4, 6, 1, 3, 5, 7).index(column % 8) & 15
    four, place = divmod(column % 32, 4)
    bit = four // 4 * 16 + 4 * (0, 2, 1, 3).index(place) + four % 4
    if not words[len(words) - 160 + 4 * lane + 2 * half + column // 32] >> bit & 1:
        return None
    return words[64 * (stored // 4) + 32 * half + lane] >> 8 * (stored % 4) & 255


def read(packed: Packed, keep: int) -> list[list[float]]:
    """Read tiles of codes as README.md words it: weights before they are rounded to their dtype."""
    (n, k), kind = packed.shape, packed.params["kind"]
    tiles, scale_at = packed.tensors["tiles"], {"w8": packed.tensors["tiles"].shape[-1] - 32, "w4": 0}[kind]
    weight = [[0.0] * k for _ in range(n)]
    for row_tile, column_tile in torch.cartesian_prod(*map(torch.arange, tiles.shape[:2])).tolist():
        words = [word & 0xFFFFFFFF for word in tiles[row_tile, column_tile].tolist()]
        scales = tiles[row_tile, column_tile, scale_at : scale_at + 32].clone().view(packed.dtype).tolist()
        for lane in range(32):
            g, t = divmod(lane, 4)
            for half in (0, 1):
                row, block = 16 * row_tile + g + 8 * half, 4 * column_tile + t
                stored = 0
                for column in [first + c for first in range(0, 64, 4) for c in (0, 2, 1, 3)]:
                    code = code_at(words, kind, lane, half, stored, column)
                    if code is not None:
                        stored += 1
                        value = (code - 2 ** (BITS[kind] - 1)) * scales[2 * lane + half]
                        if row < n and 64 * block + column < k:
                            weight[row][64 * block + column] = value
                        else:
                            assert value == 0
                assert stored == {"w8": keep, "w4": 64}[kind]
    return weight


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize(("n", "k", "keep"), [(16, 256, 32), (20, 300, 7), (1, 1, 64), (33, 513, 1), (15, 260, 31)])
def test_bytes_on_a_gpu_mean_the_weight(n: int, k: int, keep: int, kind: str):
    packed = coded(n, k, keep, kind)
    values = torch.tensor(read(packed, keep), dtype=torch.float64).to(HALF)
    rows = BITMASK.pack(random_weight(n, k, f"{keep}:64"), f"{keep}:64", kind=kind)
    assert torch.equal(values, rows.unpack())


@settings(max_examples=30)
@given(
    st.integers(1, 40),
    st.integers(1, 600),
    st.integers(1, 64),
    st.sampled_from([HALF, BF16]),
    st.sampled_from(list(BITS)),
)
def test_tiles_hold_the_same_codes_as_rows(n: int, k: int, keep: int, dtype: torch.dtype, kind: str):
    check_tiles(BITMASK.pack(random_weight(n, k, f"{keep}:64", dtype), f"{keep}:64", kind=kind))


@pytest.mark.parametrize(("kind", "bits"), [("w8", 5.25), ("w4", 4.25)])
def test_bits_per_weight_at_32_of_64(kind: str, bits: float):
    assert coded(32, 512, 32, kind).bits_per_weight == bits


@pytest.mark.parametrize(
    ("kind", "at", "value", "message"),
    [
        ("w8", 4, 0x01, r"at row, block \[1, 0\] is not empty"),  # row 1's first code
        ("w8", -32 + 4, 0x3C00, r"at row, block \[9, 0\] is not empty"),  # row 9's scale
        ("w8", 0, 0x180, "a lane holds more than 1"),
        ("w4", 32 + 16, 0x88888889, r"at row, block \[1, 0\] is not empty"),
        ("w4", 4, 0x3C00, r"at row, block \[9, 0\] is not empty"),
        ("w4", 32, 0x88888877, "more than 1 weights in 64 columns"),
        ("w4", 0, 0x3C000000, r"scale, at \[0, 0\]: the scale is 0"),
    ],
)
def test_what_is_wrong_is_named(kind: str, at: int, value: int, message: str):
    packed = coded(1, 60, 1, kind)
    with pytest.raises(FormatError, match=message):
        BITMASK.validate(damaged(packed, "tiles", (0, 0, at), value - (value >> 31 << 32)))


DECODED = [  # n, k, keep, kind, dtype, m, SMs
    (37, 700, 32, "w8", HALF, 1, 132),
    (50, 1100, 31, "w4", BF16, 5, 132),
    (80, 700, 5, "w8", BF16, 13, 2),
    (80, 1100, 64, "w4", HALF, 20, 132),
    (37, 4200, 33, "w4", HALF, 2, 1),
]


@needs_compiler
@pytest.mark.parametrize(("n", "k", "keep", "kind", "dtype", "m", "sms"), mostly_slow(DECODED, 0, 1))
def test_decode_emulated(emulated, monkeypatch: pytest.MonkeyPatch, n, k, keep, kind, dtype, m, sms):
    emulate(monkeypatch, sms)
    check(decode.prepare, coded(n, k, keep, kind, dtype), m)


@needs_compiler
@pytest.mark.parametrize(("kind", "dtype"), [(kind, dtype) for kind in BITS for dtype in (HALF, BF16)])
def test_every_code_in_every_column_is_unpacked(emulated, kind: str, dtype: torch.dtype):
    """Bit for bit, with scales of both signs, one of which makes weights subnormal."""
    bits = BITS[kind]
    weight = (torch.arange(64 * 2**bits).view(-1, 64) + 7 * torch.arange(64)) % 2**bits - 2.0 ** (bits - 1)
    sizes = torch.tensor([1.0, -0.37, 3e-7, -200.0]).to(dtype)
    scale = sizes.repeat(len(weight) // 4)[:, None]
    scales = GroupScales(bits, 64, scale, torch.full_like(scale, 128, dtype=torch.float32), symmetric=True)
    rows = BITMASK.pack((weight * scale.float()).to(dtype), "64:64", kind=kind, scales=scales)
    packed = BITMASK.arrange(rows, "cuda")
    x, _ = operands(packed, 1)
    w = unpack.prepare_unpack(problem_of(x, packed))(packed)
    assert torch.equal(w, rows.unpack())


MULTIPLIED = [  # n, k, keep, kind, dtype, m, SMs, schedule as in test_gemm.py
    (80, 701, 31, "w4", BF16, 20, 132, Schedule(32, 1, 1, 3, 3, 1, 3)),
    (80, 701, 32, "w8", HALF, 40, 1, Schedule(64, 1, 1, 0, 1, 1, 1)),
    (130, 700, 32, "w4", HALF, 100, 6, Schedule(64, 2, 2, 0, 3, 2, 1)),
    (37, 300, 64, "w8", BF16, 20, 132, Schedule(256, 1, 1, 2, 1, 1, 1)),
]


@needs_compiler
@pytest.mark.parametrize(("n", "k", "keep", "kind", "dtype", "m", "sms", "schedule"), mostly_slow(MULTIPLIED, 0, 1))
def test_gemm_emulated(emulated, monkeypatch: pytest.MonkeyPatch, n, k, keep, kind, dtype, m, sms, schedule):
    emulate(monkeypatch, sms)
    check(gemm.prepare, coded(n, k, keep, kind, dtype), m, schedule=schedule)


@needs_compiler
@pytest.mark.parametrize("kind", BITS)
def test_fused(emulated, monkeypatch: pytest.MonkeyPatch, kind: str):
    emulate(monkeypatch, 1)
    packed = coded(64, 1096, 32, kind, BF16)
    kernel = next(kernel for kernel in BITMASK.kernels if kernel.name == "decode")
    check_fused(kernel, packed, packed.unpack(), 1, "rms_norm", "silu_mul", bias=False)


@needs_gpu
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize(
    ("n", "k", "keep", "dtype", "m"),
    [
        *SMALL_CASES,
        (2200, 8200, 32, HALF, 7),
        (2200, 8200, 32, BF16, 64),
    ],
)
def test_decode_on_a_gpu(n: int, k: int, keep: int, dtype: torch.dtype, m: int, kind: str, nan_filled_memory):
    check_on_gpu("decode", coded(n, k, keep, kind, dtype), m)


@needs_gpu
@needs_hopper
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize(
    ("n", "k", "keep", "dtype", "m"),
    [(64, 512, 32, HALF, 1), (33, 701, 31, BF16, 17), (257, 4100, 5, BF16, 65), (2200, 8200, 32, HALF, 129)],
)
def test_gemm_on_a_gpu(n: int, k: int, keep: int, dtype: torch.dtype, m: int, kind: str, nan_filled_memory):
    check_on_gpu("gemm", coded(n, k, keep, kind, dtype), m)


@needs_gpu
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_unpacked_on_a_gpu_bit_for_bit(kind: str, dtype: torch.dtype, nan_filled_memory):
    packed = coded(257, 4100, 31, kind, dtype)
    there = packed.to("cuda")
    x, _ = operands(there, 1)
    assert torch.equal(unpack.prepare_unpack(problem_of(x, there))(there).cpu(), packed.unpack())
