"""Packing, unpacking and products do not depend on torch's default dtype and device, which programs change."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from semisparse.formats import Format, Kernel, Packed, linear, registry
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from tests.formats.cases import accepted_patterns

N, K, TOKENS = 72, 256, (1, 5, 300)

CPU_KERNELS = [
    pytest.param(form, kernel, id=f"{name}-{kernel.name}")
    for name, form in registry().items()
    for kernel in form.all_kernels
    if kernel.device in (None, "cpu")
]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS = [
    pytest.param(lambda: default_dtype(torch.bfloat16), id="bfloat16"),
    pytest.param(lambda: default_dtype(torch.float64), id="float64"),
    pytest.param(lambda: torch.device("meta"), id="meta"),
]


@pytest.mark.parametrize("changed", DEFAULTS)
@pytest.mark.parametrize(("form", "kernel"), CPU_KERNELS)
def test_a_product_is_the_same(form: Format, kernel: Kernel, changed):
    """With bfloat16 as the default, a float32 result of half the bytes was once written past its end."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(N, K, generator=generator)
    for text in accepted_patterns(form.name):
        pattern = parse_pattern(text)
        for dtype in (torch.float32, torch.bfloat16):
            weight = (scores * pattern.mask(scores.abs())).to(dtype)
            packed = form.pack(weight, pattern)
            with changed():
                again = form.pack(weight, pattern)
                unpacked = packed.unpack()
                form.validate(packed)
            assert same_tensors(again, packed), f"packed, {text}"
            assert torch.equal(unpacked, packed.unpack()), f"unpacked, {text}"
            for m in TOKENS:
                x = torch.randn(m, K, generator=generator).to(dtype)
                if kernel.refusal(problem_of(x, packed)) is None:
                    expected = linear(x, packed, None, kernel.name)
                    with changed():
                        found = linear(x, packed, None, kernel.name)
                    assert torch.equal(found, expected), f"{text}, {m} tokens"


def same_tensors(one: Packed, other: Packed) -> bool:
    return one.spec == other.spec and all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
