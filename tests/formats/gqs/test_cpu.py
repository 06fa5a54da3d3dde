"""The CPU kernels, every kind and size, against float64."""

import pytest
import torch

from semisparse.errors import KernelError
from semisparse.formats import linear
from semisparse.quant.group import KINDS
from tests.formats.gqs.reference import check, operands, packed_weight, quantised, stored_weight


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float16) for kind in KINDS), ("w4", torch.bfloat16), ("w2", torch.float32)]
)
def test_every_kind_and_size(kind: str, dtype: torch.dtype):
    for size, m in zip((4, 8, 16, 32, 64, 128)[kind == "w3" :], (1, 3, 7, 8, 12, 32), strict=False):
        packed = packed_weight(21, 150, f"g{size}@50%", dtype, kind=kind)
        x, bias = operands(packed, m)
        y = linear(x, packed, bias, kernel="cpu")
        check(y, quantised(x) if kind == "w4a8" else x, stored_weight(packed), bias)


def test_the_number_of_threads_changes_no_bit():
    packed = packed_weight(200, 512)
    x, _ = operands(packed, 5)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(linear(x, packed, kernel="cpu"))
    torch.set_num_threads(1)
    assert torch.equal(*results)


@pytest.mark.parametrize("m", [1, 9, 40])
def test_w4a8_has_8_bit_activations_for_any_number_of_tokens(m: int):
    """The kernel of `auto` multiplies the quantised x: its result is far from that of the unquantised x."""
    packed = packed_weight(30, 200, kind="w4a8")
    x, bias = operands(packed, m)
    weight = packed.unpack().double()
    exact, unquantised = (a @ weight.T + bias.double() for a in (quantised(x), x.double()))
    assert (linear(x, packed, bias).double() - exact).norm() <= 0.1 * (unquantised - exact).norm()


def test_what_the_kernels_refuse():
    packed = packed_weight(20, 40)
    with pytest.raises(KernelError, match="takes up to 32 tokens, got 48"):
        linear(operands(packed, 33)[0], packed, kernel="cpu")
