"""Format slide24 against the paper's formulas written as loops, and its theory against plain enumeration."""

import re
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, combinations_with_replacement
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import semisparse
import semisparse.formats.slide24
from semisparse.api import read_recipe
from semisparse.errors import FormatError, PatternError, RecipeError
from semisparse.formats import Packed, get_format, linear
from semisparse.formats.base import replace_tensors
from semisparse.formats.slide24 import check
from semisparse.formats.slide24.layout import lifted_columns
from semisparse.formats.slide24.lift import lift, quantise_and_lift
from semisparse.formats.slide24.pack import unpack_lifted, unpack_stored
from semisparse.formats.slide24.theory import Decomposition
from semisparse.integrations.transformers import sparse_layers
from semisparse.patterns import parse_pattern
from semisparse.quant.symmetric import quantise_rows
from tests.models import byte_tokenizer, random_model

SLIDE24 = get_format("slide24")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

patterns = st.integers(2, 8).map(lambda half: f"{2 * half - 2}:{2 * half}")
columns = st.integers(1, 300)
seeds = st.integers(0, 2**32)


def random_weight(pattern: str, n: int, k: int, seed: int) -> Tensor:
    """A weight that obeys the pattern, from row to row with fewer of the non-zeros that it allows."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    weight *= torch.rand(n, k, generator=generator) < torch.linspace(1, 0.2, n)[:, None]
    return weight * parse_pattern(pattern).mask(weight.abs())


# Theory


def covers(starts, length: int, capacity: int, nonzeros) -> bool:
    """Whether windows of ``length`` columns can hold the non-zeros: a matching by augmenting paths."""
    held: dict[tuple[int, int], int] = {}

    def place(column: int, seen: set) -> bool:
        for window, start in enumerate(starts):
            for slot in range(capacity if start <= column < start + length else 0):
                if (window, slot) not in seen:
                    seen.add((window, slot))
                    if (window, slot) not in held or place(held[window, slot], seen):
                        held[window, slot] = column
                        return True
        return False

    return all(place(column, set()) for column in nonzeros)


def every_pattern(longest: int):
    for hardware_window in range(2, 6):
        for hardware_keep in range(1, hardware_window):
            for window in range(hardware_window, longest + 1):
                for keep in range(1, window + 1):
                    yield Decomposition(keep, window, hardware_keep, hardware_window)


def test_a_decomposition_exists_where_enumeration_finds_one_for_every_block():
    for found in every_pattern(8):
        starts = [found.stride * i for i in range(found.windows)]
        blocks = combinations(range(found.window), found.keep)
        assert found.exists == all(covers(starts, found.hardware_window, found.hardware_keep, b) for b in blocks), found


def test_the_bound_is_reached_where_some_placement_of_windows_reaches_it():
    for found in every_pattern(6):
        count, odd = divmod(found.keep, found.hardware_keep)
        places = range(found.window - found.hardware_window + 1)
        reached = not odd and any(
            all(
                covers(starts, found.hardware_window, found.hardware_keep, block)
                for block in combinations(range(found.window), found.keep)
            )
            for starts in combinations_with_replacement(places, count)
        )
        assert found.tight == reached, found


def test_the_papers_table():
    for half in (2, 3, 4, 5, 6, 8, 40):
        found = Decomposition(2 * half - 2, 2 * half)
        assert found.exists
        assert found.tight
        assert (found.stride, found.windows, found.capacity) == (2, half - 1, 2 * half - 2)
        assert found.expansion == 2 - Fraction(2, half)
        assert found.speedup_bound == Fraction(half, half - 1) == Fraction(found.window, found.keep)


def test_what_the_paper_says_wrongly():
    assert Decomposition(8, 10).expansion == Fraction(8, 5)  # section D.3: 1.67
    onto_one_of_four = Decomposition(6, 8, 1, 4)  # section C.1.7: six windows
    assert (onto_one_of_four.windows, onto_one_of_four.capacity, onto_one_of_four.exists) == (2, 2, False)
    assert onto_one_of_four.tight  # but with six windows a column apart
    assert not Decomposition(2, 8, 1, 4).tight  # "any Z:L"
    theorem_2 = Decomposition(2, 7, 1, 4)
    assert theorem_2.capacity >= theorem_2.keep
    assert not theorem_2.exists


def test_impossible_patterns_are_refused():
    for numbers in ((3, 2, 2, 4), (0, 8, 2, 4), (2, 3, 2, 4), (6, 8, 4, 4), (6, 8, 0, 4)):
        with pytest.raises(PatternError, match="the hardware keeps fewer"):
            Decomposition(*numbers)


# Packing


def algorithm_2(row: list[float], window: int) -> list[float]:
    """The paper's greedy loop, on a row of whole groups."""
    half = window // 2
    lifted = []
    for group in range(0, len(row), window):
        used = set()
        for start in range(group, group + 2 * (half - 1), 2):
            taken = [c for c in range(start, start + 4) if row[c] != 0 and c not in used][:2]
            used |= set(taken)
            lifted += [row[c] if c in taken else 0.0 for c in range(start, start + 4)]
    return lifted


@given(pattern=patterns, k=columns, seed=seeds)
def test_the_lifted_weight_is_the_papers(pattern, k, seed):
    weight = random_weight(pattern, 5, k, seed)
    window = parse_pattern(pattern).window
    packed = SLIDE24.pack(weight, pattern)
    SLIDE24.validate(packed)
    assert torch.equal(packed.unpack(), weight)
    found = unpack_lifted(packed)
    assert found.shape == (5, lifted_columns(k, window))
    assert found.shape[1] % 32 == 0
    parse_pattern("2:4").check(found)
    for row, lifted in zip(weight.tolist(), found.tolist(), strict=True):
        expected = algorithm_2(row + [0.0] * (-k % window), window)
        assert lifted == expected + [0.0] * (len(lifted) - len(expected))


@pytest.mark.parametrize(("kind", "bits"), [(None, 13.5), ("int8", 7.5 + 32 / 4096), ("fp8", 7.5 + 32 / 4096)])
def test_bits_a_weight(kind, bits):
    weight = random_weight("6:8", 4, 4096, 0).bfloat16()
    options = {} if kind is None else {"kind": kind}
    assert SLIDE24.pack(weight, "6:8", **options).bits_per_weight == bits


def test_bands_of_rows_are_packed_alike(monkeypatch):
    weight = random_weight("6:8", 33, 100, 0)
    whole = SLIDE24.pack(weight, "6:8", kind="fp8").tensors
    monkeypatch.setitem(semisparse.formats.slide24.pack.BAND_BYTES, "cpu", 7 * 400)
    for name, tensor in SLIDE24.pack(weight, "6:8", kind="fp8").tensors.items():
        assert torch.equal(tensor.view(torch.uint8), whole[name].view(torch.uint8)), name


def test_what_rounds_to_zero_is_stored_as_positive_zero():
    weight = torch.tensor([[448.0, -1e-6, 1.0, -1e-6, 0.0, 0.0, -1e-6, 2.0]])
    packed = SLIDE24.pack(weight, "6:8", kind="fp8")
    SLIDE24.validate(packed)
    assert packed.tensors["values"].view(torch.uint8).max() < 128
    assert torch.equal(packed.unpack(), torch.tensor([[448.0, 0, 1, 0, 0, 0, 0, 2]]))


@pytest.mark.parametrize("kind", DTYPES)
def test_rounded_weights_are_those_of_a_dense_layer(kind):
    weight = random_weight("8:10", 9, 201, 0).half()
    weight[4] = 0
    packed = SLIDE24.pack(weight, "8:10", kind=kind)
    SLIDE24.validate(packed)
    rounded, scale = quantise_rows(weight, DTYPES[kind])
    assert torch.equal(unpack_stored(packed).float(), rounded.float())
    assert torch.equal(packed.tensors["scale"], scale)
    assert torch.equal(packed.unpack(), (rounded.float() * scale[:, None]).half())


@pytest.mark.parametrize("pattern", ["1:2", "4:8", "5:6", "7:9", "6:6", "32:64", "70%"])
def test_other_patterns_are_refused(pattern):
    with pytest.raises(FormatError, match="keep = window - 2"):
        SLIDE24.pack(torch.zeros(2, 64), pattern)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(FormatError, match="no kind 'fp4'; it has int8, fp8"):
        SLIDE24.pack(torch.zeros(2, 64), "6:8", kind="fp4")


# Lifting and products


@given(k=columns, half=st.integers(2, 8))
def test_lifting_is_equation_4(k, half):
    x = torch.arange(1.0, k + 1)[None]
    padded = x[0].tolist() + [0.0] * (20 * 16 * half)
    expected = []
    for j in range(lifted_columns(k, 2 * half) // 4):
        group, window = divmod(j, half - 1)
        expected += padded[2 * half * group + 2 * window :][:4]
    assert lift(x, 2 * half)[0].tolist() == expected


def test_activations_saturate_and_zero_tokens_have_scale_1():
    x = torch.zeros(3, 12)
    x[0, 3], x[0, 4] = -8.0, 4.0
    x[2] = torch.finfo(torch.float16).max
    for dtype, largest in ((torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)):
        rounded, scale = quantise_and_lift(x.half(), dtype, 6)
        assert scale[1] == 1
        assert not rounded[1].float().any()
        assert rounded.float().abs().max() == largest
        assert rounded[0].float().min() == -largest
        assert (rounded[2].float()[: 4 * 4] == largest).all()


@settings(max_examples=100)
@given(pattern=patterns, k=columns, seed=seeds)
def test_the_lifted_integer_product_is_the_original(pattern, k, seed):
    weight = random_weight(pattern, 5, k, seed)
    packed = SLIDE24.pack(weight, pattern, kind="int8")
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(seed))
    original_x, _ = quantise_rows(x, torch.int8)
    original_weight, _ = quantise_rows(weight, torch.int8)
    lifted_x, _ = quantise_and_lift(x, torch.int8, packed.pattern.window)
    found = lifted_x.long() @ unpack_lifted(packed).long().T
    assert torch.equal(found, original_x.long() @ original_weight.long().T)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("m", [0, 1, 7])
@pytest.mark.parametrize("pattern", ["2:4", "6:8", "14:16"])
def test_products_of_rounded_weights(pattern, m, kind):
    weight = random_weight(pattern, 33, 172, 0).bfloat16()
    packed = SLIDE24.pack(weight, pattern, kind=kind)
    x = torch.randn(m, 172, generator=torch.Generator().manual_seed(m)).half()
    bias = torch.linspace(-1, 1, 33).half()
    wide_x, wide_w = (
        q.double() * s.double()[:, None] for q, s in (quantise_rows(t, DTYPES[kind]) for t in (x, weight))
    )
    for given_bias in (None, bias):
        exact = wide_x @ wide_w.T + (0 if given_bias is None else bias.double())
        y = linear(x, packed, given_bias, "dense")
        # Sums of 172 float64 values, then one rounding to float16.
        torch.testing.assert_close(y.double(), exact, rtol=2**-11, atol=1e-10)
        assert torch.equal(linear(x, packed, given_bias, "lifted"), y)
        assert torch.equal(linear(x, packed, given_bias, "cpu"), y)


# Files from strangers


def corrupted(packed: Packed, tensor: str, row: int, column: int, value) -> Packed:
    changed = packed.tensors[tensor].clone()
    changed[(row, column) if changed.dim() == 2 else row] = value
    return replace_tensors(packed, {**packed.tensors, tensor: changed})


def test_corrupted_content_is_refused_and_located():
    packed = SLIDE24.pack(random_weight("6:8", 4, 100, 0), "6:8", kind="int8")
    # Slots 0 to 3 of group 0: a pair that does not increase, a position its slot cannot have, a window that goes back.
    for byte, what in ((0b1110_0101, "above"), (0b1110_0100 ^ 0b11, "position"), (0b0100_1110, "above")):
        with pytest.raises(FormatError, match=rf"metadata, at row 2, group 0, slot \d: .*{what}"):
            SLIDE24.validate(corrupted(packed, "metadata", 2, 0, byte))
    with pytest.raises(FormatError, match="scale, at row 3: it is not finite"):
        SLIDE24.validate(corrupted(packed, "scale", 3, 0, torch.inf))
    rounded = SLIDE24.pack(random_weight("6:8", 4, 100, 0), "6:8", kind="fp8")
    plain = [SLIDE24.pack(random_weight("6:8", 4, 100, 0).to(dtype), "6:8") for dtype in (torch.half, torch.float32)]
    for sound, value in ((rounded, torch.nan), (plain[0], -torch.inf), (plain[1], torch.inf)):
        with pytest.raises(FormatError, match="values, at row 0, group 0, slot 0: it is not finite"):
            SLIDE24.validate(corrupted(sound, "values", 0, 0, value))
    weight = random_weight("6:8", 4, 99, 0)
    weight[:, 96:98] = 0  # left out, so that slot 1 of the last group stands for column 99, the first that is not there
    with pytest.raises(FormatError, match="values, at row 1, group 12, slot 1: a weight past column K = 99"):
        SLIDE24.validate(corrupted(SLIDE24.pack(weight, "6:8"), "values", 1, 6 * 12 + 1, 3))
    for params in ({"kind": "int9"}, {"kind": 8}, {}):
        with pytest.raises(FormatError):
            SLIDE24.validate(replace(packed, params=params, declaration=""))


def columns_increase(row: Tensor, slots: int) -> bool:
    """Say whether the positions in a row's metadata, [octets] uint8, are those of increasing columns in every group."""
    positions = [octet >> 2 * place & 3 for octet in row.tolist() for place in range(4)]
    groups = [positions[start : start + slots] for start in range(0, len(positions), slots)]
    skipped = [[position - slot % 2 for slot, position in enumerate(group)] for group in groups]
    return all(found == sorted(found) and set(found) <= {0, 1, 2} for found in skipped)


@pytest.mark.parametrize("half", range(2, 9))
def test_the_compiled_check_knows_every_byte_at_every_place(half):
    slots = 2 * half - 2
    packed = SLIDE24.pack(random_weight(f"{slots}:{2 * half}", 1, 4 * half, 0), f"{slots}:{2 * half}")
    for place in range(packed.tensors["metadata"].shape[1]):
        for octet in range(256):
            damaged = corrupted(packed, "metadata", 0, place, octet)
            assert check._sound(damaged) == columns_increase(damaged.tensors["metadata"][0], slots), (place, octet)


@given(half=st.integers(2, 8), data=st.data())
def test_metadata_are_refused_unless_columns_increase(half: int, data):
    """Groups begin inside bytes, and go on in the next."""
    slots = 2 * half - 2
    packed = SLIDE24.pack(random_weight(f"{slots}:{2 * half}", 2, 20 * half, 0), f"{slots}:{2 * half}")
    damaged = packed.tensors["metadata"].clone()
    byte = data.draw(st.integers(0, damaged.shape[1] - 1))
    windows = st.sampled_from([0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110])  # each of them right alone
    damaged[1, byte] = data.draw(st.integers(0, 255) | st.builds(lambda low, high: low | high << 4, windows, windows))
    right = columns_increase(damaged[1], slots)
    for compiled in (check._sound, lambda packed: False):  # what finds nothing wrong, and what says where it is
        verdict = nullcontext() if right else pytest.raises(FormatError, match="metadata, at row 1, group")
        with mock.patch.object(check, "_sound", compiled), verdict:
            SLIDE24.validate(corrupted(packed, "metadata", 1, byte, damaged[1, byte]))


def test_metadata_that_validate_accepts_mean_one_weight():
    """Of a 4:6 group's 256 bytes, 15 leave out two of six columns; the others are refused."""
    packed = SLIDE24.pack(random_weight("4:6", 1, 24, 0), "4:6")
    x, accepted = torch.eye(24), 0
    for byte in range(256):
        changed = corrupted(packed, "metadata", 0, 1, byte)
        try:
            SLIDE24.validate(changed)
        except FormatError:
            continue
        accepted += 1
        assert torch.equal(linear(x, changed, kernel="lifted"), linear(x, changed, kernel="dense"))
    assert accepted == 15


# Triton, in its interpreter where there is no GPU


@pytest.mark.parametrize("half", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 173), (2, 5000)])
def test_the_triton_forms_give_the_same(half, m, k):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")
    from semisparse.formats.slide24 import triton_lift
    from semisparse.quant import triton_symmetric

    window = 2 * half
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(DEVICE)
    x[m // 2] = 0
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(triton_lift.lift(x.to(dtype), window), lift(x.to(dtype), window))
    for dtype in DTYPES.values():
        found, scale = triton_lift.quantise_and_lift(x.bfloat16(), dtype, window)
        # The interpreter's cast to fp8 rounds otherwise than hardware; plain rounding in Triton has the same cast.
        rounded, _ = triton_symmetric.quantise_rows(x.bfloat16(), dtype)
        assert torch.equal(found.float(), lift(rounded, window).float())
        expected, expected_scale = quantise_and_lift(x.bfloat16(), dtype, window)
        assert torch.equal(scale, expected_scale)
        if dtype == torch.int8 or DEVICE == "cuda":
            assert torch.equal(found.float(), expected.float())


# The recipe


@pytest.mark.parametrize("quant", ["none", "int8", "fp8"])
def test_the_recipe_rounds_saves_and_loads(quant, tmp_path):
    model = random_model("llama")
    documents = [f"document {i}: some words to read" for i in range(8)]
    report = semisparse.compress(
        model, byte_tokenizer(), "slidesparse", documents, tmp_path / "out",
        settings=(f"quant={quant}",), samples=4, seqlen=16,
    )  # fmt: skip
    assert {layer["format"] for layer in report.layers} == {"slide24"}
    for layer in sparse_layers(model).values():
        assert layer.packed.params == ({} if quant == "none" else {"kind": quant})
        parse_pattern("6:8").check(layer.weight)
    ids = torch.arange(40).view(2, 20)
    loaded = semisparse.load(tmp_path / "out", device="cpu", dtype=torch.bfloat16)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_recipe_that_no_format_can_store_is_refused():
    with pytest.raises(
        RecipeError, match="bitmask does not store quant=int8; set another one, or format=dense or slide24"
    ):
        read_recipe("rheosparse", ("format=bitmask", "quant=int8"))
    with pytest.raises(RecipeError, match="format auto does not store quant=fp8"):
        read_recipe("slidesparse", ("quant=fp8", "format=auto"))
    with pytest.raises(RecipeError, match="'quant' is 'fp4'; it is one of: none, int8, fp8"):
        read_recipe("slidesparse", ("quant=fp4",))


def test_the_readmes_example():
    text = Path(semisparse.formats.slide24.__file__).with_name("README.md").read_text()
    block = re.search(r"```bytes\n(.*?)```", text, re.DOTALL)[1]
    shown = {name: bytes.fromhex(digits) for name, digits in re.findall(r"(values|metadata)([0-9a-f\s]*)", block)}
    weight = torch.tensor([[0, 1, 2, 3, 4, 0, 5, 6], [0, 0, 0, 7, 0, 0, 0, 0]], dtype=torch.float16)
    packed = SLIDE24.pack(weight, "4:6")
    assert {name: tensor.numpy().tobytes() for name, tensor in packed.tensors.items()} == shown
