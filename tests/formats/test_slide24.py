"""Format slide24 against the paper's formulas written as loops."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import semisparse
import semisparse.formats.slide24
from semisparse.api import read_recipe
from semisparse.errors import FormatError, RecipeError
from semisparse.formats import get_format, linear
from semisparse.formats.slide24.layout import lifted_columns
from semisparse.formats.slide24.lift import lift, quantise_and_lift
from semisparse.formats.slide24.pack import unpack_lifted, unpack_stored
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
