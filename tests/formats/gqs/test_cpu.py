"""The CPU kernels, every kind and size, against float64."""

from pathlib import Path

import pytest
import torch

from semisparse.formats import linear
from semisparse.formats.gqs.cpu import kernel as cpu
from semisparse.quant.group import KINDS
from semisparse.runtime.row_matmul import load, operand_dtype
from tests.formats.gqs.reference import check, operands, packed_weight, quantised, stored_weight


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, dtype) for kind in KINDS for dtype in (torch.float16, torch.bfloat16)), ("w2", torch.float32)],
)
def test_every_kind_and_size(kind: str, dtype: torch.dtype):
    matmul = load(Path(cpu.__file__).with_name("kernel.cpp"), "gqs", 16)
    for size, m in zip((4, 8, 16, 32, 64, 128)[kind == "w3" :], (1, 3, 7, 8, 12, 32), strict=False):
        packed = packed_weight(21, 150, f"g{size}@50%", dtype, kind=kind)
        x, bias = operands(packed, m)
        y = linear(x, packed, bias, kernel="cpu")
        rounds = operand_dtype(dtype, dtype, matmul.has_bfloat16) == torch.bfloat16 and kind != "w4a8"
        weight = packed.unpack() if rounds else stored_weight(packed)
        check(y, quantised(x) if kind == "w4a8" else x, weight, bias)


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
