"""The layout on disk against the paper's algorithm 2, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.errors import FormatError
from semisparse.formats import WeightSpec
from semisparse.formats.slide24.storage import disk
from semisparse.patterns import parse_pattern
from semisparse.quant.symmetric import quantise_rows
from tests.formats.slide24.reference import SLIDE24, algorithm_2, assert_same_bits, packed_weight, random_weight
from tests.formats.worked_example import worked_example


@given(half=st.integers(2, 8), k=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_the_lifted_weight_is_the_papers(half, k, seed):
    pattern, window = f"{2 * half - 2}:{2 * half}", 2 * half
    weight = random_weight(pattern, 5, k, seed)
    packed = SLIDE24.pack(weight, pattern)
    SLIDE24.validate(packed)
    assert torch.equal(packed.unpack(), weight)
    lifted = disk.unpack_lifted(packed)
    assert lifted.shape == (5, disk.lifted_columns(k, window))
    assert lifted.shape[1] % 32 == 0
    parse_pattern("2:4").check(lifted)
    for row, of_row in zip(weight.tolist(), lifted.tolist(), strict=True):
        expected = algorithm_2(row + [0.0] * (-k % window), window)
        assert of_row == expected + [0.0] * (len(of_row) - len(expected))
    assert torch.equal(disk.unlift(lifted, window)[:, :k], weight)


@pytest.mark.parametrize(("kind", "bits"), [(None, 13.5), ("int8", 7.5 + 32 / 4096), ("fp8", 7.5 + 32 / 4096)])
def test_bits_per_weight(kind, bits):
    assert packed_weight("6:8", 4, 4096, kind).bits_per_weight == bits


def test_bands_of_rows_are_packed_alike(monkeypatch):
    whole = packed_weight("6:8", 33, 100, "fp8", torch.float32)
    monkeypatch.setitem(disk.BAND_BYTES, "cpu", 7 * 400)
    for name, tensor in packed_weight("6:8", 33, 100, "fp8", torch.float32).tensors.items():
        assert_same_bits(tensor, whole.tensors[name], name)


def test_what_rounds_to_zero_is_stored_as_positive_zero():
    weight = torch.tensor([[448.0, -1e-6, 1.0, -1e-6, 0.0, 0.0, -1e-6, 2.0]])
    packed = SLIDE24.pack(weight, "6:8", kind="fp8")
    SLIDE24.validate(packed)
    assert packed.tensors["values"].view(torch.uint8).max() < 128
    assert torch.equal(packed.unpack(), torch.tensor([[448.0, 0, 1, 0, 0, 0, 0, 2]]))


@pytest.mark.parametrize("kind", disk.KINDS)
def test_quantised_weights_are_those_of_a_dense_layer(kind):
    weight = random_weight("8:10", 9, 201).half()
    weight[4] = 0
    packed = SLIDE24.pack(weight, "8:10", kind=kind)
    SLIDE24.validate(packed)
    quantised, scale = quantise_rows(weight, disk.KINDS[kind])
    assert torch.equal(disk.unpack_values(packed).float(), quantised.float())
    assert torch.equal(packed.tensors["scale"], scale)
    assert torch.equal(packed.unpack(), (quantised.float() * scale[:, None]).half())


def test_other_patterns_are_refused():
    for pattern in ("1:2", "4:8", "5:6", "7:9", "6:6", "32:64", "70%"):
        with pytest.raises(FormatError, match="keep = window - 2"):
            SLIDE24.pack(torch.zeros(2, 64), pattern)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(FormatError, match="no kind 'fp4'; it has int8, fp8"):
        SLIDE24.pack(torch.zeros(2, 64), "6:8", kind="fp4")


def test_a_window_that_is_mostly_padding_is_refused():
    """A file of 64 columns declared as 67108864:67108866 took 3 GB and minutes to check."""
    for window, k in ((128, 1), (130, 129), (4000, 4000)):
        assert torch.equal(SLIDE24.pack(torch.eye(1, k), f"{window - 2}:{window}").unpack(), torch.eye(1, k))
    for window, k in ((130, 128), (67_108_866, 64), (1 << 62, 4096)):
        pattern = f"{window - 2}:{window}"
        spec = WeightSpec("slide24", 1, parse_pattern(pattern), (1, k), torch.float16)
        with pytest.raises(FormatError, match=rf"pattern {pattern} is too wide for K = {k}"):
            SLIDE24.check_spec(spec)
    with pytest.raises(FormatError, match="too wide"):
        SLIDE24.pack(torch.zeros(1, 64), "198:200")


def test_the_readmes_example():
    weight = torch.tensor([[0, 1, 2, 3, 4, 0, 5, 6], [0, 0, 0, 7, 0, 0, 0, 0]], dtype=torch.float16)
    packed = SLIDE24.pack(weight, "4:6")
    assert {name: tensor.numpy().tobytes() for name, tensor in packed.tensors.items()} == worked_example("slide24")
