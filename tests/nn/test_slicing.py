"""Slicing, concatenating and stacking packed weights of every format, against the same on dense weights."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.errors import FormatError
from semisparse.formats import Format, get_format, registry
from semisparse.nn.slicing import check_slice, concatenate_weights, slice_weight
from semisparse.nn.stacking import stack_neighbours
from semisparse.patterns import parse_pattern
from tests.formats.cases import PATTERNS, accepted_patterns, build, random

FORMATS = [pytest.param(form, id=name) for name, form in registry().items()]


def weight_of(pattern: str, n: int, k: int) -> torch.Tensor:
    return build(parse_pattern(pattern), random, n, k).to(torch.bfloat16)


@pytest.mark.parametrize("ways", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("dim", [0, 1], ids=["N", "K"])
@pytest.mark.parametrize("form", FORMATS)
def test_slices_are_those_of_the_weight_and_concatenate_to_the_same_bytes(form: Format, dim: int, ways: int):
    for pattern in accepted_patterns(form.name):
        for option in form.variants:
            packed = form.pack(weight_of(pattern, 128, 512), pattern, **option)
            size = packed.shape[dim] // ways
            if size % parse_pattern(pattern).step and dim == 1:
                continue
            try:
                parts = [slice_weight(packed, dim, i * size, (i + 1) * size) for i in range(ways)]
            except FormatError as error:
                if option and form.regroup is None and "a second time" in str(error):
                    continue
                raise
            for part in parts:
                form.validate(part)
            assert torch.equal(torch.cat([part.unpack() for part in parts], dim), packed.unpack())
            whole = concatenate_weights(parts, dim, packed.pattern)
            assert whole.spec == packed.spec
            for name, tensor in packed.tensors.items():
                assert torch.equal(whole.tensors[name], tensor), (pattern, name)


@pytest.mark.parametrize("dim", [0, 1], ids=["N", "K"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_slice_off_every_boundary_is_right_or_refused(form: Format, dim: int):
    for pattern in accepted_patterns(form.name):
        packed = form.pack(weight_of(pattern, 100, 300), pattern)
        for start, stop in ((0, 17), (16, 48), (5, 100), (63, 65)):
            try:
                part = slice_weight(packed, dim, start, stop)
            except FormatError as error:
                if form.lossless and form.accepts(parse_pattern("0%")) is None:
                    raise AssertionError(f"{form.name} takes any weight") from error
                continue
            form.validate(part)
            assert torch.equal(part.unpack(), packed.unpack().narrow(dim, start, stop - start))


@given(data=st.data())
def test_any_slice_of_a_lossless_weight_is_right_or_refused(data: st.DataObject):
    pattern = data.draw(st.sampled_from(PATTERNS))
    form = registry()[data.draw(st.sampled_from([f for f in sorted(registry()) if pattern in accepted_patterns(f)]))]
    n, k = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 300))
    dim = data.draw(st.integers(0, 1))
    start = data.draw(st.integers(0, (n, k)[dim] - 1))
    stop = data.draw(st.integers(start + 1, (n, k)[dim]))
    packed = form.pack(weight_of(pattern, n, k), pattern)
    exact = torch.equal(packed.unpack(), weight_of(pattern, n, k))
    try:
        part = slice_weight(packed, dim, start, stop)
    except FormatError as error:
        if exact and "none of the patterns" not in str(error):
            raise
        return
    form.validate(part)
    assert torch.equal(part.unpack(), packed.unpack().narrow(dim, start, stop - start))


def refusal(call: Callable[..., object], *arguments: object) -> str:
    """What a call raises FormatError with; empty if it does not."""
    try:
        call(*arguments)
    except FormatError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("form", FORMATS)
def test_what_the_check_without_tensors_refuses_cannot_be_sliced(form: Format):
    """And what it takes of a quantised weight is never quantised again."""
    for pattern, option in product(accepted_patterns(form.name), form.variants):
        columns = 384 if option.get("kind") == "int4" else 300  # int4 takes multiples of 128
        packed = form.pack(weight_of(pattern, 24, columns), pattern, **option)
        for start, stop in ((0, 150), (150, columns), (100, 200), (192, columns)):
            checked = refusal(check_slice, packed.spec, 1, start, stop)
            sliced = refusal(slice_weight, packed, 1, start, stop)
            if checked:
                assert f"cannot slice columns {start} to {stop}" in sliced
            elif option.get("kind") not in ("fp8_tensor", "int4"):  # these may keep their scales
                assert "a second time" not in sliced


@pytest.mark.parametrize(
    ("name", "pattern", "kind", "columns"),
    [("bitmask", "32:64", "w4", 64), ("slide24", "6:8", "int8", 512), ("slide24", "6:8", "fp8", 512)],
)
def test_a_cut_between_columns_that_share_a_scale_is_refused_without_tensors(name, pattern, kind, columns):
    spec = get_format(name).pack(weight_of(pattern, 8, 512), pattern, kind=kind).spec
    check_slice(spec, 1, 64, 192)
    for start, stop in ((0, 72), (72, 512)):
        with pytest.raises(FormatError, match=rf"columns {start} to {stop} .*: {columns} columns share a scale"):
            check_slice(spec, 1, start, stop)


def test_a_cut_through_a_window_is_refused_without_tensors():
    spec = get_format("slide24").pack(weight_of("4:6", 8, 300), "4:6").spec
    check_slice(spec, 1, 150, 300)
    with pytest.raises(FormatError, match=r"columns 128 to 300 .*begins inside a window of 6 columns.*multiples of"):
        check_slice(spec, 1, 128, 300)


def test_a_quantised_weight_is_sliced_on_its_grain_and_refused_off_it():
    packed = get_format("slide24").pack(weight_of("6:8", 16, 256), "6:8", kind="int8")
    part = slice_weight(packed, 1, 64, 192)
    assert torch.equal(part.unpack(), packed.unpack()[:, 64:192])
    assert torch.equal(part.tensors["scale"], packed.tensors["scale"])
    with pytest.raises(FormatError, match=r"columns 8 to 192 .* a second time.*multiples of 64 columns"):
        slice_weight(packed, 1, 8, 192)


def test_a_slice_that_breaks_the_pattern_gets_one_that_it_obeys():
    packed = get_format("bitmask").pack(weight_of("32:64", 4, 128), "32:64")
    part = slice_weight(packed, 1, 1, 128)
    assert str(part.pattern) in ("32:64", "0%")
    assert torch.equal(part.unpack(), packed.unpack()[:, 1:])
    full = torch.ones(3, 8)
    full[:, 4:] = 0
    whole = get_format("bitmask").pack(full.roll(2, 1), "4:8")
    assert str(slice_weight(whole, 1, 1, 8).pattern) == "4:8"


def test_a_slice_does_not_keep_the_whole_in_memory():
    for dim in (0, 1):
        packed = get_format("bitmask").pack(weight_of("32:64", 4, 128), "32:64")
        part = slice_weight(packed, dim, 0, (2, 64)[dim])
        assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in part.tensors.values())


def test_there_is_no_slice_outside_the_weight():
    packed = get_format("bitmask").pack(weight_of("32:64", 4, 128), "32:64")
    for start, stop in ((-1, 64), (64, 64), (64, 129)):
        with pytest.raises(FormatError, match=f"no slice {start} to {stop}"):
            slice_weight(packed, 1, start, stop)


def test_weights_stack_where_their_tensors_concatenate():
    form = get_format("bitmask")
    q, k, v = (form.pack(weight_of("32:64", n, 128), "32:64") for n in (24, 8, 8))
    other = form.pack(weight_of("16:64", 8, 128), "16:64")
    (whole,) = stack_neighbours([q, k, v])
    assert torch.equal(whole.unpack(), torch.cat([w.unpack() for w in (q, k, v)]))
    assert [w.shape[0] for w in stack_neighbours([q, other, k, v])] == [24, 8, 16]
    variable = [form.pack(weight_of("70%", 8, 128), "70%") for _ in range(2)]
    assert stack_neighbours(variable) == variable


@pytest.mark.parametrize(("name", "pattern", "grain"), [("gqs", "g16@50%", 16), ("ec_csr", "70%", 32)])
def test_gqs_and_ec_csr_stack_where_a_weight_fills_its_tiles(name, pattern, grain):
    form = get_format(name)
    q, k, v = (form.pack(weight_of(pattern, n, 128), pattern) for n in (2 * grain, grain, 7))
    (whole,) = stack_neighbours([q, k, v])
    form.validate(whole)
    assert torch.equal(whole.unpack(), torch.cat([w.unpack() for w in (q, k, v)]))
    assert [w.shape[0] for w in stack_neighbours([v, q, k])] == [7, 3 * grain]


@pytest.mark.parametrize(
    ("name", "pattern", "options"),
    [("gqs", "g16@50%", {"kind": "w2"}), ("ec_csr", "70%", {"delta_bits": 4}), ("ec_csr", "70%", {"layout": "paper"})],
)
def test_gqs_and_ec_csr_of_different_params_stay_apart(name, pattern, options):
    form, weight = get_format(name), weight_of(pattern, 64, 128)
    one, other = form.pack(weight, pattern), form.pack(weight, pattern, **options)
    counts = [len(stack_neighbours(pair)) for pair in ([one, other], [other, one])]
    assert one.params == other.params or counts == [2, 2]


def test_a_scale_of_the_whole_weight_keeps_weights_apart():
    weights = [get_format("dense").pack(weight_of("0%", 8, 64) * scale, "0%", kind="fp8_tensor") for scale in (1, 2)]
    assert len(stack_neighbours(weights)) == 2


def test_a_slice_has_a_spec_of_its_own():
    packed = get_format("bitmask").pack(weight_of("32:64", 4, 128), "32:64")
    assert slice_weight(packed, 0, 0, 2).spec == replace(packed.spec, shape=(2, 128))
