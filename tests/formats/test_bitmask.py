"""Format bitmask against a reader of its bytes written from README.md alone, with Python integers and loops."""

import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import semisparse.formats.bitmask
from semisparse.errors import FormatError
from semisparse.formats import Packed, get_format, linear
from semisparse.formats.bitmask import cpu
from semisparse.patterns import parse_pattern
from semisparse.runtime import cpp
from tests.formats.cases import build, random

BITMASK = get_format("bitmask")
EXACT = {"1:4": 16, "2:4": 32, "6:8": 48, "3:16": 12, "8:32v32": 16, "7:64": 7, "64:64": 64, "1:1": 64, "1:2v3": 32}
VARIABLE = ["6:10", "70:128", "g16@50%", "70%", "30%/row", "0%"]


def slow_read(packed: Packed) -> list[list[float]]:
    """Read the bytes as README.md words it."""
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
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@given(patterns, st.integers(1, 9), st.integers(1, 200), dtypes)
def test_bytes_mean_the_weight(pattern: str, n: int, k: int, dtype: torch.dtype):
    weight = build(parse_pattern(pattern), random, n, k).to(dtype)
    packed = BITMASK.pack(weight, pattern)
    assert slow_read(packed) == weight.tolist()
    BITMASK.validate(packed)


@pytest.mark.parametrize("keep", range(1, 65))
def test_every_n_of_64(keep: int):
    weight = build(parse_pattern(f"{keep}:64"), random, 5, 172).bfloat16()
    weight[1, :64] = 0
    weight[2] = 0
    packed = BITMASK.pack(weight, f"{keep}:64")
    assert packed.tensors["values"].shape == (5, 3 * keep)
    assert {mask.bit_count() for mask in unsigned(packed.tensors["masks"])} == {keep}
    assert slow_read(packed) == weight.tolist()
    BITMASK.validate(packed)


@pytest.mark.parametrize(("pattern", "count"), EXACT.items())
def test_patterns_that_bound_64_columns_are_stored_exactly(pattern: str, count: int):
    packed = BITMASK.pack(torch.zeros(3, 130), pattern)
    assert packed.tensors["values"].shape == (3, 3 * count)
    assert packed.params == {}


@pytest.mark.parametrize("pattern", ["32:64", "70%"])
def test_negative_zeros_come_back_as_zeros(pattern: str):
    packed = BITMASK.pack(torch.full((3, 70), -0.0), pattern)
    assert not packed.tensors["values"].signbit().any()
    assert not packed.unpack().signbit().any()


def unsigned(masks: Tensor) -> list[int]:
    return [mask & (2**64 - 1) for mask in masks.flatten().tolist()]


def readme_bytes(pattern: str) -> dict[str, bytes]:
    text = Path(semisparse.formats.bitmask.__file__).with_name("README.md").read_text()
    block = re.search(rf"```bytes {re.escape(pattern)}\n(.*?)```", text, re.DOTALL)[1]
    found: dict[str, str] = {}
    name = ""
    for line in block.splitlines():
        name = line[:12].strip() or name
        found[name] = found.get(name, "") + line[12:]
    return {name: bytes.fromhex(digits) for name, digits in found.items()}


@pytest.mark.parametrize("pattern", ["4:64", "90%"])
def test_the_worked_example_of_the_readme(pattern: str):
    weight = torch.zeros(2, 66, dtype=torch.float16)
    weight[0, [0, 3, 8, 63, 65]] = torch.tensor([1, -2, 0.5, 4, 3], dtype=torch.float16)
    weight[1, 1] = 1.5
    packed = BITMASK.pack(weight, pattern)
    assert {name: t.numpy().tobytes() for name, t in packed.tensors.items()} == readme_bytes(pattern)


def spoiled(packed: Packed, name: str, at: tuple[int, ...], value: float) -> Packed:
    tensor = packed.tensors[name].clone()
    tensor[at] = value
    return replace(packed, tensors={**packed.tensors, name: tensor})


@pytest.mark.parametrize(
    ("pattern", "name", "at", "value", "message"),
    [
        ("32:64", "masks", (2, 0), -1, r"masks, at \[2, 0\]: a mask has not exactly 32 bits"),
        ("32:64", "masks", (2, 1), 0, r"masks, at \[2, 1\]: a mask has not exactly 32 bits"),
        ("64:64", "values", (1, 127), 1.0, r"values, at \[1, 63\]: a weight past column K = 70"),
        ("64:64", "values", (1, 127), float("nan"), "past column K = 70"),
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
        BITMASK.validate(spoiled(packed, name, at, value))


def test_bits_past_column_k_are_refused_where_no_slot_is_fixed():
    weight = torch.zeros(2, 70)
    weight[:, 69] = 1.0
    packed = BITMASK.pack(weight, "50%")
    with pytest.raises(FormatError, match=r"masks, at \[1\]: the last mask has bits past column K = 70"):
        BITMASK.validate(spoiled(packed, "masks", (1, 1), 1 << 6))


@given(st.integers(0, 3), st.integers(0, 2), st.integers(0, 63), st.sampled_from(["32:64", "70%"]))
def test_any_flipped_mask_bit_is_refused(row: int, block: int, bit: int, pattern: str):
    packed = BITMASK.pack(build(parse_pattern(pattern), random, 4, 172), pattern)
    masks = packed.tensors["masks"].clone()
    flip = torch.tensor(1).bitwise_left_shift(bit)
    masks[row, block] ^= flip
    with pytest.raises(FormatError):
        BITMASK.validate(replace(packed, tensors={**packed.tensors, "masks": masks}))


def cpu_kernel(x: Tensor, packed: Packed) -> Tensor:
    if cpp.refusal():
        pytest.skip(cpp.refusal())
    return linear(x, packed, kernel="cpu")


@pytest.mark.parametrize("pattern", ["32:64", "70%"])
@pytest.mark.parametrize("m", [1, 7, 32])
def test_the_cpu_kernel_gives_the_same_for_any_number_of_threads(pattern: str, m: int):
    packed = BITMASK.pack(build(parse_pattern(pattern), random, 301, 1000), pattern)
    x = torch.randn(m, 1000, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(cpu_kernel(x, packed))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], y) for y in results)


@pytest.mark.parametrize("pattern", ["32:64", "70%"])
def test_the_cpu_kernel_expands_more_rows_than_one_band_holds(pattern: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu, "BAND_BYTES", 4 * 172 * 10)
    packed = BITMASK.pack(build(parse_pattern(pattern), random, 33, 172), pattern)
    x = torch.randn(65, 172, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(cpu_kernel(x, packed), linear(x, packed, kernel="reference"))


@pytest.mark.parametrize("pattern", ["32:64", "70%"])
def test_the_cpu_kernel_takes_parts_of_larger_tensors(pattern: str):
    packed = BITMASK.pack(build(parse_pattern(pattern), random, 40, 172), pattern)
    apart = {name: torch.stack((t, t), -1)[..., 0] for name, t in packed.tensors.items()}
    x = torch.randn(3, 172, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cpu_kernel(x, replace(packed, tensors=apart)), cpu_kernel(x, packed))


def every_number(dtype: torch.dtype) -> Tensor:
    """Every finite number of a 16-bit dtype, subnormals among them, [N, 4]."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()].view(-1, 4)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these instruction sets are those of x86-64")
@pytest.mark.parametrize("without", ["-mno-avx512f", "-mno-avx512f -mno-avx2 -mno-f16c"])
def test_the_cpu_kernel_without_the_latest_instructions(without: str, monkeypatch: pytest.MonkeyPatch):
    if cpp.refusal():
        pytest.skip(cpp.refusal())
    monkeypatch.setenv("CXX", f"{cpp.find_compiler().command[0]} {without}")
    monkeypatch.setattr(cpp, "find_compiler", cpp.find_compiler.__wrapped__)
    older = cpu.load.__wrapped__()
    for pattern in ("32:64", "70%"):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            packed = BITMASK.pack(build(parse_pattern(pattern), random, 33, 172).to(dtype), pattern)
            for m in (1, 7, 16, 65):
                x = torch.randn(m, 172, generator=torch.Generator().manual_seed(m))
                torch.testing.assert_close(older(x, packed, None), linear(x, packed, kernel="reference"))
    for dtype in (torch.float16, torch.bfloat16):
        weight = every_number(dtype)
        assert torch.equal(older(torch.eye(4), BITMASK.pack(weight, "0%"), None).T, weight.float())
    # Only a checkpoint can hold these: packing refuses them.
    wild = torch.tensor([float("inf"), float("-inf"), float("nan"), 65504], dtype=torch.float16)
    packed = BITMASK.pack(torch.ones(4, 1, dtype=torch.float16), "0%")
    packed = replace(packed, tensors={**packed.tensors, "values": wild})
    assert torch.equal(older(torch.ones(1, 1), packed, None).nan_to_num(7), wild.float().nan_to_num(7)[None])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [4, 65])
def test_the_cpu_kernel_reads_every_16_bit_number(dtype: torch.dtype, m: int):
    weight = every_number(dtype)
    packed = BITMASK.pack(weight, "0%")
    y = cpu_kernel(torch.eye(m, 4), packed)
    assert torch.equal(y[:4].T, weight.float())
