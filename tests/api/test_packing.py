"""Packing one weight, and multiplying with it."""

import torch

import semisparse
from semisparse.patterns import parse_pattern


def test_pack_and_linear_agree_with_torch():
    torch.manual_seed(0)
    weight = torch.randn(20, 100)
    weight *= parse_pattern("32:64").mask(weight.abs())
    x, bias = torch.randn(3, 100), torch.randn(20)
    packed = semisparse.pack(weight, format="auto", pattern="32:64")
    # 100 products below 4 * 4 each: float32 sums in two orders differ by less than 100 * 16 * 2^-24.
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).float()
    torch.testing.assert_close(semisparse.linear(x, packed, bias), expected, rtol=0, atol=100 * 16 * 2**-24)


def test_auto_takes_the_lossless_format_with_the_fewest_bytes():
    weight = torch.ones(64, 256)
    assert semisparse.pack(weight, format="auto", pattern="0%").spec.format == "dense"
    weight[:, 32:] = 0
    packed = semisparse.pack(weight, format="auto", pattern="80%")
    assert packed.spec.format != "dense"
    assert packed.nbytes <= weight.numel() * 4 * (0.125 + 1 / 32) + 8 * 65  # no more than a bit mask and the values
