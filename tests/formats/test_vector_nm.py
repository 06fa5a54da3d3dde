"""Format vector_nm against a reader of its bytes written from README.md alone, and its refusals."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import semisparse.formats.vector_nm
from semisparse.errors import FormatError
from semisparse.formats import Packed, Pass, get_format, linear
from semisparse.formats.kernel import Problem
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.tiling import choose_tiling
from semisparse.patterns import VectorNM, parse_pattern
from tests.formats.cases import build, random

VECTOR_NM = get_format("vector_nm")


def slow_read(packed: Packed) -> list[list[float]]:
    """Read the bytes as README.md words it."""
    n, k = packed.shape
    keep, window, length = packed.pattern.keep, packed.pattern.window, packed.pattern.length
    values = packed.tensors["values"].flatten().tolist()
    positions = packed.tensors["positions"].numpy().tobytes()
    slots = -(-k // window) * keep
    weight = [[0.0] * k for _ in range(n)]
    for group in range(-(-n // length)):
        for slot in range(slots):
            column = slot // keep * window + positions[group * slots + slot]
            for i in range(length):
                value = values[(group * slots + slot) * length + i]
                row = group * length + i
                if row < n and column < k:
                    weight[row][column] = value
                else:
                    assert value == 0
    return weight


windows = st.integers(1, 20) | st.sampled_from([32, 64, 256])
patterns = windows.flatmap(
    lambda window: st.builds(VectorNM, st.integers(1, window), st.just(window), st.integers(1, 9) | st.just(32))
)
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@settings(max_examples=80, deadline=None)
@given(patterns, st.integers(1, 40), st.integers(1, 90), dtypes)
def test_bytes_mean_the_weight(pattern: VectorNM, n: int, k: int, dtype: torch.dtype):
    weight = build(pattern, random, n, k).to(dtype)
    packed = VECTOR_NM.pack(weight, pattern)
    assert slow_read(packed) == weight.tolist()
    assert packed.unpack().tolist() == weight.tolist()
    VECTOR_NM.validate(packed)


@pytest.mark.parametrize(("pattern", "bits"), [("16:32v32", 8.125), ("8:32v4", 4.5), ("4:32v128", 2.0078125)])
def test_bits_a_weight(pattern: str, bits: float):
    packed = VECTOR_NM.pack(build(parse_pattern(pattern), random, 128, 256).half(), pattern)
    assert packed.bits_per_weight == bits


def test_the_readmes_example():
    text = Path(semisparse.formats.vector_nm.__file__).with_name("README.md").read_text()
    block = re.search(r"```bytes\n(.*?)```", text, re.DOTALL)[1]
    shown = {name: bytes.fromhex(digits) for name, digits in re.findall(r"(values|positions)([0-9a-f\s]*)", block)}
    weight = torch.tensor([[1, 0, 2, 0, 0, 3], [0, 0, 4, 0, 0, 0]], dtype=torch.float16)
    packed = VECTOR_NM.pack(weight, "2:4v2")
    assert {name: tensor.numpy().tobytes() for name, tensor in packed.tensors.items()} == shown


def test_negative_zeros_come_back_as_zeros():
    assert not VECTOR_NM.pack(torch.full((3, 7), -0.0), "2:4v2").unpack().signbit().any()


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("positions", (0, 1), 4, "below the window's 4"),
        ("positions", (1, 2), 255, "below the window's 4"),
        ("positions", (0, 1), 1, r"at \[0, 1\]: not above the one before"),
        ("positions", (1, 3), 3, r"at \[1, 3, 0\]: a weight past column K = 7"),
        ("values", (1, 0, 2), 1.0, r"at \[1, 0, 2\]: a weight past row N = 5"),
    ],
)
def test_damaged_tensors_are_refused(name: str, at: tuple[int, ...], value: float, message: str):
    weight = torch.zeros(5, 7)
    weight[:, [1, 2, 5, 6]] = 1.0
    packed = VECTOR_NM.pack(weight, "2:4v4")
    VECTOR_NM.validate(packed)
    changed = packed.tensors[name].clone()
    changed[at] = value
    with pytest.raises(FormatError, match=message):
        VECTOR_NM.validate(replace(packed, tensors={**packed.tensors, name: changed}))


def test_another_number_of_rows_is_refused():
    packed = VECTOR_NM.pack(torch.zeros(5, 8), "2:4v4")
    for rows in (4, 6, "five", None):
        with pytest.raises(FormatError, match="rows"):
            VECTOR_NM.validate(replace(packed, params={"rows": rows}))
    with pytest.raises(FormatError, match="rows"):
        VECTOR_NM.validate(replace(packed, shape=(6, 8)))


@pytest.mark.parametrize(
    ("pattern", "reason"), [("2:4", "v32"), ("4:300v8", "256"), ("2:4v256", "128"), ("50%", "v32")]
)
def test_patterns_that_do_not_fit_are_refused(pattern: str, reason: str):
    with pytest.raises(FormatError, match=reason):
        VECTOR_NM.pack(torch.zeros(8, 8), pattern)


def test_the_cpu_kernel_leaves_short_vectors_to_others_where_gathering_does_not_pay():
    chosen = {}
    for pattern in ("2:4v4", "2:4v32"):
        packed = VECTOR_NM.pack(torch.zeros(40, 8), pattern)
        for m in (16, 17):
            chosen[pattern, m] = VECTOR_NM.choose(problem_of(torch.zeros(m, 8), packed)).name
    assert chosen == {("2:4v4", 16): "cpu", ("2:4v4", 17): "reference", ("2:4v32", 16): "cpu", ("2:4v32", 17): "cpu"}


def test_a_product_in_several_gathers_is_the_same(monkeypatch):
    pattern = parse_pattern("3:8v4")
    weight, x = build(pattern, random, 45, 70), torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    packed = VECTOR_NM.pack(weight, pattern)
    whole = linear(x, packed)
    monkeypatch.setattr("semisparse.formats.vector_nm.cpu.GATHERED_BYTES", 1)
    assert torch.equal(linear(x, packed), whole)
    exact = x.double() @ weight.double().T
    assert (whole.double() - exact).abs().max() <= 72 * 2**-24 * (x.abs().double() @ weight.abs().double().T).max()


def cost(m: int, n: int, k: int, pattern: str, dtype: torch.dtype):
    problem = Problem(m, n, k, parse_pattern(pattern), {}, dtype, dtype, torch.device("cuda"))
    return VECTOR_NM.cost(problem, 1e6)


def test_costs_by_hand():
    one = cost(1, 4096, 2048, "8:32v32", torch.float16)
    assert one == (Pass(1e6 + 2 * (4096 + 2048), 2 * 4096 * 512, "tensor fp16"),)
    assert cost(16, 4096, 2048, "8:32v32", torch.float16)[0].bytes == 1e6 + 16 * 2 * (4096 + 2048)
    assert cost(16, 4096, 2048, "8:32v8", torch.float16)[0].bytes == 2e6 + 16 * 2 * (4096 + 2048)
    assert cost(16, 4096, 2048, "8:32v8", torch.float16)[0].unit == "fp32"
    moved, product = cost(4096, 8192, 2048, "2:32v32", torch.float32)
    assert (moved.bytes, moved.operations) == (2 * 4096 * 2048 * 4, 0)
    assert (product.operations, product.unit) == (2 * 4096 * 8192 * 128, "fp32")
    assert product.strategy.startswith("packing, ")
    assert cost(4096, 8192, 2048, "8:32v1", torch.float16)[0].strategy == "unpacked"
    assert cost(4096, 8192, 2048, "16:32v32", torch.float16)[0].strategy == "unpacked"
    assert cost(4096, 8192, 2048, "8:32v32", torch.float16)[1].strategy.startswith("non-packing, ")


def test_intensity_is_equation_3():
    """Whole windows read all of A, packed ones what any of the eight groups of a block is expected to keep."""
    tiling = choose_tiling(parse_pattern("16:32v32"), 4096, 4096, 4, 132)
    assert (tiling.shape.tokens, tiling.shape.rows, tiling.packed) == (128, 256, False)
    whole = 2 * 128 * 256 * 2048 / (4 * (128 * 4096 + 2048 * 256 + 128 * 256))
    assert tiling.intensity(parse_pattern("16:32v32"), 4096) == pytest.approx(whole)
    tiling = choose_tiling(parse_pattern("2:32v32"), 4096, 4096, 4, 132)
    assert (tiling.shape.tokens, tiling.shape.rows, tiling.packed) == (128, 256, True)
    columns = (1 - (15 / 16) ** 8) * 4096
    packed = 2 * 128 * 256 * 256 / (4 * (128 * columns + 256 * 256 + 128 * 256))
    assert tiling.intensity(parse_pattern("2:32v32"), 4096) == pytest.approx(packed)


def test_small_products_take_small_tiles():
    """Each of the 132 processors of an H200 is to have work: 4096 x 4096 outputs are 512 tiles of the largest."""
    shapes = [choose_tiling(parse_pattern("16:32v32"), m, 4096, 4, 132).shape for m in (4096, 512, 256, 64)]
    assert [(shape.tokens, shape.rows) for shape in shapes] == [(128, 256), (128, 128), (64, 128), (32, 64)]


@given(
    patterns,
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([2, 4]),
    st.sampled_from([99 << 10, 163 << 10, 227 << 10]),
)
def test_tilings_fit_their_kernels(pattern: VectorNM, m: int, n: int, itemsize: int, shared: int):
    tiling = choose_tiling(pattern, m, n, itemsize, 132, shared)
    if tiling is None:
        assert pattern.length * itemsize < 16 or pattern.length not in (4, 8, 16, 32, 64, 128)
        return
    assert tiling.shared <= shared
    assert tiling.slots % (16 if itemsize == 2 else 4) == 0
    groups = max(1, tiling.shape.rows // pattern.length)
    for first in range(0, 40 * tiling.slots, tiling.slots):
        windows = (first + tiling.slots - 1) // pattern.keep - first // pattern.keep + 1
        assert tiling.columns >= min(groups * tiling.slots, windows * pattern.window)
        if not tiling.packed:
            assert first % pattern.keep == 0
            assert tiling.columns == windows * pattern.window
