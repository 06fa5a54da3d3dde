"""`Format.verify`: values that are not finite and weights that break their pattern are refused in every format."""

import dataclasses

import pytest
import torch

from semisparse.errors import FormatError
from semisparse.formats import Packed, get_format, registry
from semisparse.patterns import parse_pattern
from tests.formats.cases import accepted_patterns

LOOSE_AND_STRICT = [
    ("bitmask", "0%", "70%"),
    ("bitmask", "0%/row", "70%/row"),
    ("bitmask", "g16@0%", "g16@50%"),
    ("bitmask", "4:8", "2:4"),
    ("bitmask", "16:32", "1:2"),
    ("dense", "0%", "2:4"),
    ("ec_csr", "0%", "70%"),
    ("gqs", "g16@0%", "g16@50%"),
    ("gqs", "g16@10%/row", "g16@50%/row"),
]


def weight_of(pattern: str, n: int = 40, k: int = 256) -> torch.Tensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(7))
    return weight * parse_pattern(pattern).mask(weight.abs())


@pytest.mark.parametrize("name", registry())
def test_what_is_packed_passes(name: str):
    form = get_format(name)
    for pattern in accepted_patterns(name):
        form.verify(form.pack(weight_of(str(pattern)), pattern))


@pytest.mark.parametrize(("name", "loose", "strict"), LOOSE_AND_STRICT)
def test_a_broken_pattern_is_refused(name: str, loose: str, strict: str):
    form = get_format(name)
    packed = form.pack(weight_of(loose), loose)
    form.verify(packed)
    declared = Packed(dataclasses.replace(packed.spec, pattern=parse_pattern(strict)), packed.tensors)
    form.validate(declared)
    with pytest.raises(FormatError, match="does not obey pattern"):
        form.verify(declared)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", registry())
def test_values_that_are_not_finite_are_refused(name: str, value: float):
    form = get_format(name)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        pattern = accepted_patterns(name)[0]
        packed = form.pack(weight_of(str(pattern)).to(dtype), pattern)
        for tensor, stored in packed.tensors.items():
            if stored.is_floating_point() and stored.itemsize > 1:
                damaged = stored.clone()
                damaged.view(-1)[stored.abs().argmax()] = value
                with pytest.raises(FormatError, match=tensor):
                    form.validate(Packed(packed.spec, {**packed.tensors, tensor: damaged}))
