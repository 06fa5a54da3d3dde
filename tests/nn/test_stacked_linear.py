"""Several packed weights on one input."""

import pytest
import torch

import semisparse
from semisparse.errors import KernelError
from semisparse.formats import get_format, product
from semisparse.formats.base import reference_kernel
from semisparse.nn import StackedLinear


def weights(*patterns: str) -> list[semisparse.formats.base.Packed]:
    torch.manual_seed(0)
    return [
        semisparse.pack(w * semisparse.patterns.parse_pattern(p).mask(w.abs()), format="bitmask", pattern=p)
        for p in patterns
        for w in [torch.randn(24, 128)]
    ]


def test_neighbours_of_one_pattern_are_one_matmul_and_all_are_computed():
    parts = weights("32:64", "32:64", "16:64")
    stacked, x, bias = StackedLinear(parts), torch.randn(3, 128), torch.randn(72)
    dense = torch.cat([part.unpack() for part in parts])
    assert stacked.sizes == [48, 24]
    torch.testing.assert_close(stacked(x, bias), x @ dense.T + bias, rtol=0, atol=1e-4)


def test_after_prepare_no_number_of_tokens_needs_another_kernel():
    stacked = StackedLinear(weights("32:64", "24:64"))
    stacked.prepare(70, torch.float32)
    before = product._prepared.cache_info().misses
    for m in range(1, 71):
        stacked(torch.randn(m, 128))
    assert product._prepared.cache_info().misses == before


def test_a_weight_that_only_the_reference_kernel_multiplies_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    stacked = StackedLinear(weights("32:64"))
    monkeypatch.setattr(StackedLinear, "device", torch.device("cuda"))
    form = get_format("bitmask")
    monkeypatch.setattr(type(form), "choose", lambda self, problem, kernel="auto": reference_kernel)
    with pytest.raises(KernelError, match=r"no kernel for bfloat16 and 1 tokens here .* cannot be captured"):
        stacked.prepare(4, torch.bfloat16)
