"""What the tests of vector_nm share: random weights, operands, and a float64 reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from semisparse.formats import Packed, get_format
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from semisparse.runtime import device as runtime_device
from tests.cuda_emulator import gpu
from tests.formats.cases import build, random

VECTOR_NM = get_format("vector_nm")


def pack(pattern: str, n: int, k: int, dtype: torch.dtype = torch.float16) -> Packed:
    return VECTOR_NM.pack(build(parse_pattern(pattern), random, n, k).to(dtype), pattern)


def operands(packed: Packed, m: int) -> tuple[Tensor, Tensor]:
    """Return a random x [M, K] and bias [N] in the weight's dtype, where it is."""
    n, k = packed.shape
    generator = torch.Generator().manual_seed(m)
    x, bias = torch.randn(m, k, generator=generator), torch.randn(n, generator=generator)
    return x.to(packed.device, packed.dtype), bias.to(packed.device, packed.dtype)


def check(y: Tensor, x: Tensor, packed: Packed, bias: Tensor | None = None) -> None:
    """Compare with float64: the error of K float32 additions, then one rounding to y's dtype (two with a bias)."""
    added = torch.zeros(packed.shape[0], device=x.device).double() if bias is None else bias.double()
    wide_x, weight = x.double(), packed.unpack().double()
    exact = wide_x @ weight.T + added
    magnitude = wide_x.abs() @ weight.abs().T + added.abs()
    facts = torch.finfo(y.dtype)
    allowed = (packed.shape[1] + 2) * 2.0**-23 * magnitude
    allowed += facts.eps * (exact.abs() + allowed + added.abs()) + facts.smallest_normal * facts.eps
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    off = ((y.double() - exact).abs() / allowed).nan_to_num(nan=float("inf"))
    assert off.max() <= 1, f"{off.max()} times what rounding explains at {(off == off.max()).nonzero()[0].tolist()}"


def check_kernel(prepare, packed: Packed, m: int) -> None:
    """Compare a kernel with the reference, with and without a bias; two calls give the same bits."""
    x, bias = operands(packed, m)
    product = prepare(problem_of(x, packed))
    for added in (None, bias):
        y = product(x, packed, added)
        check(y, x, packed, added)
        assert torch.equal(y, product(x, packed, added))


def emulate_gpu(monkeypatch: pytest.MonkeyPatch, **facts: int) -> None:
    """Change the GPU that the fixture `emulated` emulates: ``sms``, ``shared_per_cta``."""
    monkeypatch.setattr(runtime_device, "_cpu_facts", lambda threads: replace(gpu(), **facts))
