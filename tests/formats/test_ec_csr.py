"""Format ec_csr against a reader of its bytes written from README.md alone, with Python integers and loops."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import semisparse.formats.ec_csr
from semisparse.bench.roofline import random_weight
from semisparse.errors import FormatError
from semisparse.formats import Packed, get_format
from semisparse.formats.ec_csr import cpu, cuda, layout
from semisparse.formats.ec_csr.extract import count_overlaps, extract, match_rows
from semisparse.patterns import parse_pattern
from semisparse.runtime import cpp, nvrtc
from semisparse.runtime.nvrtc import compile_cubin
from tests.formats.cases import build, random

EC_CSR = get_format("ec_csr")
LAYOUTS = ("banks", "paper")


def delta(packed: Packed, number: int) -> int:
    stored = packed.tensors["deltas"]
    if packed.params["delta_bits"] == 8:
        return int(stored[number])
    return int(stored[number // 2]) >> 4 * (number % 2) & 15


def unsigned(stored: Tensor) -> list[list[int]]:
    return [[number % 2 ** (8 * stored.dtype.itemsize) for number in row] for row in stored.tolist()]


def slow_read_banks(packed: Packed) -> list[list[float]]:
    n, k = packed.shape
    rows = packed.params["panel_rows"]
    height, vector = -(-k // 32), 16 // packed.dtype.itemsize
    weight = [[0.0] * k for _ in range(n)]
    bases, values = unsigned(packed.tensors["bases"]), packed.tensors["values"].tolist()
    starts = packed.tensors["panel_loads"].tolist()
    for panel, (start, end) in enumerate(pairwise(starts)):
        loads = end - start
        for segment in range(16):
            for lane in range(32):
                place = bases[panel * 16 + segment][lane]
                for load in range(segment * loads // 16, (segment + 1) * loads // 16):
                    for step in range(vector):
                        number = ((start + load) * 32 + lane) * vector + step
                        place += delta(packed, number)
                        if values[number]:
                            assert weight[panel * rows + place // height][place % height * 32 + lane] == 0
                            weight[panel * rows + place // height][place % height * 32 + lane] = values[number]
    return weight


def slow_read_paper(packed: Packed) -> list[list[float]]:
    n, k = packed.shape
    weight = [[0.0] * k for _ in range(n)]
    bases, values = unsigned(packed.tensors["bases"]), packed.tensors["values"].tolist()
    slots, starts = packed.tensors["slots"].tolist(), packed.tensors["row_slots"].tolist()
    row_of = [row for row in range(n) for _ in range(starts[row], starts[row + 1])]
    for number, fields in enumerate(packed.tensors["bundles"].tolist()):
        granularity, vector, columns, first_delta, first_value, first_slot = fields
        for lane in range(32):
            column = bases[number][lane]
            for step in range(columns):
                inside = (step // vector * 32 + lane) * vector + step % vector
                column += delta(packed, first_delta + inside)
                for member in range(granularity):
                    value = values[first_value + inside * granularity + member]
                    if value:
                        weight[row_of[slots[first_slot + member]]][column] = value
    return weight


SLOW_READ = {"banks": slow_read_banks, "paper": slow_read_paper}


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from((4, 8)),
    st.sampled_from(("0%", "50%", "70%", "90%/row", "99%")),
    st.integers(1, 40),
    st.integers(1, 300),
    st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
)
def test_bytes_mean_the_weight(layout: str, bits: int, pattern: str, n: int, k: int, dtype: torch.dtype):
    weight = build(parse_pattern(pattern), random, n, k).to(dtype)
    packed = EC_CSR.pack(weight, pattern, layout=layout, delta_bits=bits, multiple=32)
    EC_CSR.validate(packed)
    assert SLOW_READ[layout](packed) == weight.tolist()
    assert torch.equal(packed.unpack(), weight + 0.0)


def test_the_worked_example_of_the_readme():
    text = Path(semisparse.formats.ec_csr.__file__).with_name("README.md").read_text()
    block = re.search(r"```bytes banks\n(.*?)```", text, re.DOTALL)[1]
    shown: dict[str, str] = {}
    name = ""
    for line in block.splitlines():
        name = line[:12].strip() or name
        shown[name] = shown.get(name, "") + line[12:]
    weight = torch.zeros(2, 70)
    weight[0, [0, 64, 33]] = torch.tensor([1.0, 2.0, 3.0])
    weight[1, 0] = 4.0
    packed = EC_CSR.pack(weight, "90%", delta_bits=4)
    for name, digits in shown.items():
        expected = bytes.fromhex(digits)
        found = packed.tensors[name].numpy().tobytes()
        assert found[: len(expected)] == expected, name
        assert not any(found[len(expected) :])
    bases = packed.tensors["bases"].clone()
    assert bases[15, 1] == 1
    bases[15, 1] = 0
    assert not bases.any()


def test_the_narrower_delta_is_taken_where_it_is_smaller():
    for pattern, bits in (("70%", 4), ("97%", 8)):
        weight = random_weight(parse_pattern(pattern), 64, 4096, torch.float16, "cpu")
        packed = EC_CSR.pack(weight, pattern)
        both = [EC_CSR.pack(weight, pattern, delta_bits=width).nbytes for width in (4, 8)]
        assert packed.params["delta_bits"] == bits
        assert packed.nbytes == min(both)


def test_a_wide_layer_is_less_than_45_percent_of_csr():
    """At 70 % and float16; CSR has 32 bits a column and a row."""
    weight = random_weight(parse_pattern("70%"), 256, 8192, torch.float16, "cpu")
    csr = 6 * int(weight.count_nonzero()) + 4 * 257
    assert EC_CSR.pack(weight, "70%").nbytes <= 0.45 * csr


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "csr"},
        {"delta_bits": 5},
        {"delta_bits": "narrow"},
        {"granularity": 3},
        {"multiple": 33},
        {"clip": -1},
    ],
    ids=str,
)
def test_unknown_options_are_refused(options: dict):
    with pytest.raises(FormatError, match=next(iter(options))):
        EC_CSR.pack(torch.zeros(2, 64), "50%", **options)


# Extraction


@given(
    st.integers(1, 24),
    st.integers(1, 200),
    st.integers(0, 99),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 8, 32)),
)
def test_blocks_cover_each_weight_once(n: int, k: int, zeros: int, granularity: int, multiple: int):
    stored = torch.rand(n, k, generator=torch.Generator().manual_seed(n * k)) * 100 >= zeros
    covered = torch.zeros(n, k, dtype=torch.int64)
    for blocks in extract(stored, multiple, granularity):
        assert blocks.granularity <= granularity
        assert blocks.granularity == 1 or not (blocks.columns.sum(1) % multiple).any()
        assert all(len(set(rows)) == len(rows) for rows in blocks.rows.tolist())
        for rows, columns in zip(blocks.rows, blocks.columns, strict=True):
            covered[rows] += columns
    assert torch.equal(covered, stored.long())


def test_rows_that_are_alike_become_one_block():
    """Rows 0, 2, 4, 6 share 64 columns, 1, 3, 5, 7 the other 64: two blocks of four rows, and nothing else."""
    stored = torch.zeros(8, 128, dtype=torch.bool)
    stored[::2, :64] = True
    stored[1::2, 64:] = True
    left = {blocks.granularity: blocks for blocks in extract(stored, 32, 8)}
    assert sorted(left[4].rows.sort(1).values.tolist()) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert all(not len(blocks.rows) for granularity, blocks in left.items() if granularity != 4)


def test_a_second_round_finds_what_the_first_left():
    """As in the paper's figure 3: row 2 shares half of its columns with row 0, the other half with row 1."""
    stored = torch.zeros(3, 64, dtype=torch.bool)
    stored[0, :33] = stored[1, 32:] = stored[2, :] = True
    blocks = extract(stored, 1, 2)[1]
    assert blocks.rows.tolist() == [[0, 2], [1, 2]]
    assert blocks.columns.sum(1).tolist() == [33, 31]


def slow_match(overlaps: list[list[int]], least: int) -> list[tuple[int, int]]:
    free, pairs = list(range(len(overlaps))), []
    while free:
        row = free.pop(0)
        best = max(free, key=lambda other: overlaps[row][other], default=None)  # the first of equals
        if best is not None and overlaps[row][best] >= least:
            pairs.append((row, best))
            free.remove(best)
    return pairs


@given(st.integers(1, 30), st.integers(0, 12), st.integers(0, 1000))
def test_matching_is_the_papers_greedy_one(n: int, least: int, seed: int):
    stored = torch.rand(n, 20, generator=torch.Generator().manual_seed(seed)) > 0.4
    overlaps = count_overlaps(stored)
    assert overlaps.tolist() == [[int((a & b).sum()) for b in stored] for a in stored]
    # A row without a good enough partner leaves the free rows, as in Algorithm 2: it can be nobody's partner then.
    expected = slow_match(overlaps.tolist(), max(least, 1))
    first, second = match_rows(overlaps.clone(), max(least, 1))
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == expected


def test_extraction_tells_its_progress():
    weight = random_weight(parse_pattern("50%"), 64, 1024, torch.float16, "cpu")
    told: list[tuple[int, int]] = []
    EC_CSR.pack(weight, "50%", layout="paper", progress=lambda done, total: told.append((done, total)))
    assert len(told) > 2
    assert told[-1][0] == told[-1][1] == weight.count_nonzero()
    assert all(0 <= done <= total for done, total in told)


def test_clipped_blocks_are_not_longer_than_asked():
    weight = random_weight(parse_pattern("50%"), 16, 4096, torch.float16, "cpu")
    columns = {}
    for clip in (1, 4, 1000):
        packed = EC_CSR.pack(weight, "50%", layout="paper", clip=clip, granularity=1)
        assert torch.equal(packed.unpack(), weight)
        columns[clip] = int(packed.tensors["bundles"][:, 2].max())
    assert columns[1] == 4
    assert columns[4] == 16
    assert columns[1000] > 16


# Files from strangers


@pytest.fixture(params=["compiled", "torch"])
def walker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are checked by compiled code, or by torch where there is no compiler or the lists are on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(cpp, "refusal", lambda: "no compiler")


def spoiled(packed: Packed, name: str, at: tuple[int, ...], value: float) -> Packed:
    tensor = packed.tensors[name].clone()
    tensor[at] = value
    return replace(packed, tensors={**packed.tensors, name: tensor})


@pytest.mark.usefixtures("walker")
@pytest.mark.parametrize(
    ("layout", "name", "at", "value", "message"),
    [
        ("banks", "panel_loads", (0,), 1, "panel_loads runs from 1"),
        ("banks", "panel_loads", (1,), 10**6, "panel_loads, at .1.: a panel begins before"),
        ("banks", "bases", (0, 0), -1, "bases, at .0, 0.: the place is not below 64"),
        ("banks", "bases", (12, 0), 63, "lane 0 in panel 0 leaves its panel"),
        ("banks", "bases", (12, 0), 1, "lane 0 in panel 0 begins a segment below the end of the one before"),
        ("banks", "bases", (16, 0), 5, "bases, at .16, 0.: the segment has no loads"),
        ("banks", "deltas", (1,), 9, "lane 0 in panel 0"),
        ("paper", "bundles", (0, 0), 3, "granularity is none of"),
        ("paper", "bundles", (0, 1), 2, "vector is neither"),
        ("paper", "bundles", (0, 2), 0, "no multiple of the vector"),
        ("paper", "bundles", (1, 3), 1, "offset is not where"),
        ("paper", "slots", (0,), -1, "slots, at .0.: the slot is none"),
        ("paper", "slots", (0,), 1, "not one sum"),
        ("paper", "row_slots", (1,), 100, "begin before those"),
        ("paper", "bases", (0, 0), -1, "bases, at .0, 0.: the column is not below K = 50"),
        ("paper", "deltas", (0,), 255, "lane 0 of bundle 0 walks to column"),
    ],
)
def test_what_is_wrong_is_named(layout: str, name: str, at: tuple[int, ...], value: float, message: str):
    weight = build(parse_pattern("50%"), random, 40, 50)
    packed = EC_CSR.pack(weight, "50%", layout=layout, delta_bits=8)
    with pytest.raises(FormatError, match=message):
        EC_CSR.validate(spoiled(packed, name, at, value))


@given(st.sampled_from(LAYOUTS), st.sampled_from((4, 8)), st.integers(0, 10**6), st.integers(0, 255))
def test_any_delta_is_refused_or_keeps_every_weight_inside(layout: str, bits: int, at: int, value: int):
    weight = build(parse_pattern("70%"), random, 40, 172).half()
    packed = EC_CSR.pack(weight, "70%", layout=layout, delta_bits=bits)
    changed = spoiled(packed, "deltas", (at % len(packed.tensors["deltas"]),), value)
    accepted = accepts(changed)
    if layout == "banks":
        with pytest.MonkeyPatch.context() as without:
            without.setattr(cpp, "refusal", lambda: "no compiler")
            assert accepts(changed) == accepted
    if accepted:
        assert SLOW_READ[layout](changed) == changed.unpack().tolist()


def accepts(packed: Packed) -> bool:
    try:
        EC_CSR.validate(packed)
    except FormatError:
        return False
    return True


@pytest.mark.skipif(cpp.refusal() is not None, reason=f"C++: {cpp.refusal()}")
@given(
    st.sampled_from((4, 8)),
    st.sampled_from(("0%", "50%", "70%", "99%")),
    st.integers(1, 80),
    st.integers(1, 300),
    st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
)
def test_compiled_code_gives_the_weight_back(bits: int, pattern: str, n: int, k: int, dtype: torch.dtype):
    packed = EC_CSR.pack(build(parse_pattern(pattern), random, n, k).to(dtype), pattern, delta_bits=bits)
    assert torch.equal(cpu.unpack(packed), packed.unpack())


@pytest.mark.usefixtures("walker")
def test_a_weight_past_column_k_is_refused():
    """Lane 1 of K = 33 has column 1 only; its padding step is moved to column 33 and given a value."""
    weight = torch.zeros(1, 33)
    weight[0, 1] = 1.0
    packed = EC_CSR.pack(weight, "90%", delta_bits=8)
    moved = spoiled(packed, "deltas", (1 * 4 + 1,), 1)
    EC_CSR.validate(moved)
    with pytest.raises(FormatError, match="lane 1 in panel 0 has a weight past K = 33"):
        EC_CSR.validate(spoiled(moved, "values", (1 * 4 + 1,), 1.0))


@pytest.mark.usefixtures("walker")
@pytest.mark.parametrize(("bits", "steps", "what"), [(8, 1, "where no kernel looks"), (8, 2, "goes past row N = 1")])
def test_a_step_to_another_row_is_refused_where_kernels_miss_it(bits: int, steps: int, what: str):
    """H = 1: a delta of 1 is the next row."""
    packed = EC_CSR.pack(torch.ones(1, 1), "0%", delta_bits=bits)
    with pytest.raises(FormatError, match=what):
        EC_CSR.validate(spoiled(packed, "deltas", (steps,), 1))


@pytest.mark.usefixtures("walker")
@pytest.mark.parametrize("value", [1.0, 0.0])  # a weight, or padding
def test_a_step_over_a_row_is_refused(value: float):
    packed = EC_CSR.pack(torch.ones(32, 1), "0%", delta_bits=8)
    assert packed.tensors["deltas"].max() == 1
    stepped = spoiled(spoiled(packed, "deltas", (2,), 2), "values", (2,), value)
    with pytest.raises(FormatError, match="passes over a row"):
        EC_CSR.validate(stepped)


def test_panels_give_all_processors_as_many_rows(monkeypatch: pytest.MonkeyPatch):
    for n, rows in ((1, 32), (4096, 32), (5120, 40), (8192, 32), (11008, 28), (14336, 56), (28672, 56)):
        assert layout.panel_rows_for(n) == rows
    monkeypatch.setattr(layout, "PROCESSORS", 2)
    for n, rows in ((64, 32), (100, 52), (110, 56)):
        weight = random_weight(parse_pattern("70%"), n, 300, torch.float16, "cpu")
        packed = EC_CSR.pack(weight, "70%")
        assert packed.params["panel_rows"] == rows
        EC_CSR.validate(packed)
        assert slow_read_banks(packed) == weight.tolist()


@pytest.mark.usefixtures("walker")
def test_a_weight_stored_twice_is_refused():
    packed = EC_CSR.pack(torch.ones(1, 1), "0%", delta_bits=8)
    values = packed.tensors["values"].clone()
    values[1] = 1.0  # the padding step of the same place
    with pytest.raises(FormatError, match=r"2 weights are stored at 1 places|lane 0 in panel 0 stores a weight twice"):
        EC_CSR.validate(replace(packed, tensors={**packed.tensors, "values": values}))


# GPU kernels, as far as can be seen without one


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"NVRTC: {nvrtc.unavailable()}")
def test_all_shared_memory_is_asked_for_at_launch():
    """Static shared memory beside it would escape the limit above which a launch needs permission."""
    for variant in cuda.BANKS.variants[:2]:
        for used in compile_cubin(cuda.BANKS.path, "sm_90a", variant).resources.values():
            assert used.shared == 0


def test_a_build_takes_the_tokens_that_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "shared_limit", lambda device: 227 << 10)

    def fitting(k: int) -> list[int]:
        return cuda._tokens_that_fit({"k": k, "span": 4, "delta_bits": 4}, torch.float16, torch.device("cpu"))

    assert fitting(4096) == [1, 2, 4, 8]
    assert fitting(11008) == [1, 2, 4]
    assert fitting(28672) == [1, 2]
    assert fitting(1 << 17) == []
    assert [cuda._tokens_of_pass(m, [1, 2, 4]) for m in (1, 2, 3, 4, 9)] == [1, 2, 4, 4, 4]
