"""Untrusted files: faults are named, accepted weights are inside the matrix, and checks take little time."""

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.errors import FormatError, KernelError
from semisparse.formats import Packed
from semisparse.formats.base import Params
from semisparse.formats.ec_csr.cpu import kernel as cpu
from semisparse.runtime import cpp
from tests.formats.ec_csr.weights import EC_CSR, LAYOUTS, READERS, changed, random_weight, uneven_weight

needs_compiler = pytest.mark.skipif(cpp.refusal() is not None, reason=f"C++: {cpp.refusal()}")


@pytest.fixture(params=["compiled", "torch"])
def checker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are checked by kernel.cpp, or by torch where there is no compiler or the lists are on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(cpp, "refusal", lambda: "no compiler")
    elif cpp.refusal():
        pytest.skip(f"C++: {cpp.refusal()}")


@pytest.mark.usefixtures("checker")
@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("panel_loads", (0,), 1, "panel_loads runs from 1"),
        ("panel_loads", (1,), 10**6, "panel_loads, at .1.: a panel begins before"),
        ("bases", (0, 0), -1, "bases, at .0, 0.: the position is not below 64"),
        ("bases", (12, 0), 63, "lane 0 in panel 0 leaves its panel"),
        ("bases", (12, 0), 1, "lane 0 in panel 0 begins a segment below the end of the one before"),
        ("bases", (16, 0), 5, "bases, at .16, 0.: the segment has no loads"),
        ("deltas", (1,), 9, "lane 0 in panel 0"),
    ],
)
def test_what_is_wrong_with_panels_is_named(name: str, at: tuple[int, ...], value: float, message: str):
    packed = EC_CSR.pack(random_weight(40, 50, "50%", torch.float32), "50%", delta_bits=8)
    EC_CSR.validate(packed)
    with pytest.raises(FormatError, match=message):
        EC_CSR.validate(changed(packed, name, at, value))


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("bundles", (0, 0), 3, "granularity is none of"),
        ("bundles", (0, 1), 2, "vector is neither"),
        ("bundles", (0, 2), 0, "not a positive multiple of the vector"),
        ("bundles", (1, 3), 1, "offset is not where"),
        ("slots", (0,), -1, "slots, at .0.: the slot is not in 0"),
        ("slots", (0,), 1, "do not write this slot exactly once"),
        ("row_slots", (1,), 100, "begin before those"),
        ("bases", (0, 0), -1, "bases, at .0, 0.: the column is not below K = 50"),
        ("deltas", (0,), 255, "lane 0 of bundle 0 reaches column"),
    ],
)
def test_what_is_wrong_with_the_papers_layout_is_named(name: str, at: tuple[int, ...], value: float, message: str):
    packed = EC_CSR.pack(random_weight(40, 50, "50%", torch.float32), "50%", layout="paper", delta_bits=8)
    EC_CSR.validate(packed)
    with pytest.raises(FormatError, match=message):
        EC_CSR.validate(changed(packed, name, at, value))


@given(st.sampled_from(LAYOUTS), st.sampled_from((4, 8)), st.integers(0, 10**6), st.integers(0, 255))
def test_any_delta_is_refused_or_keeps_every_weight_inside(layout: str, bits: int, at: int, value: int):
    packed = EC_CSR.pack(random_weight(40, 172, "70%"), "70%", layout=layout, delta_bits=bits)
    spoiled = changed(packed, "deltas", (at % len(packed.tensors["deltas"]),), value)
    accepted = accepts(spoiled)
    if layout == "banks":
        with pytest.MonkeyPatch.context() as without:
            without.setattr(cpp, "refusal", lambda: "no compiler")
            assert accepts(spoiled) == accepted
    if accepted:
        assert READERS[layout](spoiled) == spoiled.unpack().tolist()


def accepts(packed: Packed) -> bool:
    try:
        EC_CSR.validate(packed)
    except FormatError:
        return False
    return True


@pytest.mark.usefixtures("checker")
def test_a_weight_past_column_k_is_refused():
    """Lane 1 of K = 33 has column 1 only; its padding is moved to column 33 and given a value."""
    weight = torch.zeros(1, 33)
    weight[0, 1] = 1.0
    packed = EC_CSR.pack(weight, "90%", delta_bits=8)
    moved = changed(packed, "deltas", (1 * 4 + 1,), 1)
    EC_CSR.validate(moved)
    with pytest.raises(FormatError, match="lane 1 in panel 0 has a weight past K = 33"):
        EC_CSR.validate(changed(moved, "values", (1 * 4 + 1,), 1.0))


@pytest.mark.usefixtures("checker")
@pytest.mark.parametrize(("at", "what"), [(1, "where no kernel tests"), (2, "goes past row N = 1")])
def test_a_step_to_another_row_is_refused_where_kernels_miss_it(at: int, what: str):
    """One column per lane: a delta of 1 is the next row."""
    packed = EC_CSR.pack(torch.ones(1, 1), "0%", delta_bits=8)
    with pytest.raises(FormatError, match=what):
        EC_CSR.validate(changed(packed, "deltas", (at,), 1))


@pytest.mark.usefixtures("checker")
@pytest.mark.parametrize("value", [1.0, 0.0], ids=["weight", "padding"])
def test_a_step_over_a_row_is_refused(value: float):
    packed = EC_CSR.pack(torch.ones(32, 1), "0%", delta_bits=8)
    assert packed.tensors["deltas"].max() == 1
    stepped = changed(changed(packed, "deltas", (2,), 2), "values", (2,), value)
    with pytest.raises(FormatError, match="skips a row"):
        EC_CSR.validate(stepped)


@pytest.mark.usefixtures("checker")
@pytest.mark.parametrize(("base", "delta"), [(2, 18), (3, 17)])
def test_padding_does_not_go_back_below_a_weight(base: int, delta: int):
    """Weights at positions 0 to 3, and 20 in the next row. In `unpack` a segment ends at the next base."""
    weight = torch.zeros(2, 512)
    weight[0, [0, 32, 64, 96]] = weight[1, 128] = 1.0
    packed = EC_CSR.pack(weight, "90%", delta_bits=8)
    assert packed.tensors["panel_loads"].tolist() == [0, 2]
    for name, at, value in (
        ("bases", (15, 0), base),
        *(("values", (32 * 4 + i,), float(i == 2)) for i in range(4)),
        *(("deltas", (32 * 4 + i,), delta * (i == 2)) for i in range(4)),
    ):
        packed = changed(packed, name, at, value)
    packed = packed.in_layout({**packed.params, "span": 2}, packed.tensors)
    if base == 3:
        EC_CSR.validate(packed)
        assert torch.equal(packed.unpack(), weight)
        return
    with pytest.raises(FormatError, match="lane 0 in panel 0 begins a segment below the end of the one before"):
        EC_CSR.validate(packed)


@pytest.mark.usefixtures("checker")
def test_a_weight_stored_twice_is_refused():
    packed = EC_CSR.pack(torch.ones(1, 1), "0%", delta_bits=8)
    twice = changed(packed, "values", (1,), 1.0)  # the padding at the same position
    with pytest.raises(FormatError, match=r"2 weights are stored at 1 positions|lane 0 .* stores a weight twice"):
        EC_CSR.validate(twice)
    paper = EC_CSR.pack(torch.ones(1, 40), "0%", layout="paper", delta_bits=8)
    EC_CSR.validate(paper)
    with pytest.raises(FormatError, match="40 weights are stored at 39 positions"):
        EC_CSR.validate(changed(paper, "deltas", (32,), 0))


@pytest.mark.parametrize("key", ["disk_panel_rows", "span_limit", "paired"])
def test_params_of_a_gpu_are_checked(key: str):
    packed = EC_CSR.pack(random_weight(40, 300, "70%"), "70%")
    for wrong in (-1, 2, 33, 1 << 80, "nonsense"):
        spoiled = packed.in_layout({**packed.params, key: wrong}, packed.tensors)
        with pytest.raises(FormatError, match=key):
            EC_CSR.validate(spoiled)


@pytest.mark.usefixtures("checker")
def test_a_span_beyond_its_limit_is_refused():
    """Kernels size shared memory by the limit."""
    packed = EC_CSR.pack(uneven_weight(64, 1100), "0%", delta_bits=8)
    assert 6 < packed.params["span"] <= 32
    EC_CSR.validate(packed.in_layout({**packed.params, "span_limit": 32}, packed.tensors))
    with pytest.raises(FormatError, match="span_limit is 6, the lists have a span of"):
        EC_CSR.validate(packed.in_layout({**packed.params, "span_limit": 6}, packed.tensors))


# Sizes beyond any machine's memory


def hostile(n: int, k: int, layout: str = "banks") -> Packed:
    """A small file that declares a weight of any size, with no weights in it."""
    packed = EC_CSR.pack(torch.zeros(1, 1 << 16), "99%", layout=layout)
    return Packed(replace(packed.spec, shape=(n, k), params=Params({**packed.params, "n": n, "k": k})), packed.tensors)


@pytest.mark.parametrize(
    ("layout", "n", "k"),
    [
        ("banks", 1, 1 << 37),
        ("paper", 1, 1 << 37),
        ("banks", 1, 1 << 30),
        ("paper", 1, 1 << 80),
        ("banks", 1 << 37, 9),
        ("banks", 1, 1 << 29),
    ],
)
def test_a_small_file_that_declares_a_huge_weight_is_refused_at_once(layout: str, n: int, k: int):
    packed = hostile(n, k, layout)
    assert packed.nbytes < 3700
    start = time.process_time()
    with pytest.raises(FormatError):
        EC_CSR.validate(packed)
    assert time.process_time() - start < 0.05


@pytest.mark.usefixtures("checker")
def test_the_check_takes_no_more_memory_than_the_file():
    """A file of K = 2**29 columns of zeros is valid; if its lists are out of order, each list is walked."""
    packed = hostile(1, 1 << 29)
    EC_CSR.check_content(packed)
    filled = {name: t.repeat(256) for name, t in (("values", torch.ones(1)), ("deltas", torch.tensor([255]).byte()))}
    filled |= {"panel_loads": torch.tensor([0, 2]).int(), "bases": packed.tensors["bases"]}
    params = {**packed.params, "values": 256, "delta_bits": 8}
    spoiled = Packed(replace(packed.spec, params=Params(params)), filled)
    start = time.process_time()
    with pytest.raises(FormatError, match=r"stores a weight twice|stored at"):
        EC_CSR.check_content(changed(spoiled, "deltas", (1,), 0))
    assert time.process_time() - start < 0.1


@needs_compiler
@pytest.mark.parametrize("k", [1 << 30, 1 << 37])
def test_compiled_code_refuses_such_sizes_by_itself(k: int):
    """It returns an error; it neither divides by zero nor throws through its C interface."""
    packed = hostile(1, k)
    with pytest.raises(KernelError, match="its sizes are beyond what the kernel supports"):
        cpu.check_lists(packed)
