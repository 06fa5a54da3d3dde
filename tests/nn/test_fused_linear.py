"""The operator of a packed matmul with its prologue and epilogue, beside its parts, eager and traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import semisparse
from semisparse.formats import Packed, kernel, product
from semisparse.nn import fused_linear as module
from semisparse.nn.fused_linear import ADDED, GATED, MAX_FUSED_TOKENS, NORMED, can_fuse, fused_linear
from semisparse.patterns import parse_pattern

N, K, EPSILON = 64, 128, 1e-2


def packed_weight() -> Packed:
    weight, pattern = torch.randn(N, K), parse_pattern("32:64")
    return semisparse.pack(weight * pattern.mask(weight.abs()), format="bitmask", pattern="32:64")


def expected(x: Tensor, packed: Packed, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    """The same in float64."""
    x = x.double()
    if "norm_weight" in options:
        x = x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * options["norm_weight"].double()
    y = x @ packed.unpack().double().T + (0 if bias is None else bias.double())
    if options.get("gated"):
        return y[:, : N // 2] / (1 + (-y[:, : N // 2]).exp()) * y[:, N // 2 :]
    return y + options["residual"].double() if "residual" in options else y


CASES: dict[str, dict[str, Any]] = {
    "normed": {"norm_weight": torch.rand(K), "epsilon": EPSILON},
    "gated": {"norm_weight": torch.rand(K), "epsilon": EPSILON, "gated": True},
    "added": {"residual": torch.ones(3, N)},
    "alone": {},
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_its_parts_do(case: str, with_bias: bool):
    packed, x = packed_weight(), torch.randn(3, K)
    bias = torch.randn(N) if with_bias else None
    wanted = expected(x, packed, bias, CASES[case])
    assert (fused_linear(x, packed, bias, **CASES[case]).double() - wanted).norm() <= 1e-5 * wanted.norm()

    def traced(x: Tensor) -> Tensor:
        options = {"norm_weight": None, "epsilon": 0.0, "residual": None, "gated": False, **CASES[case]}
        tensors = [packed.tensors[name] for name in sorted(packed.tensors)]
        return torch.ops.semisparse.fused_linear(x, tensors, bias, packed.spec.json, *options.values())

    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), fused_linear(x, packed, bias, **CASES[case]))


class _Cuda:
    """A weight that says it is on a GPU."""

    def __init__(self, packed: Packed) -> None:
        self.spec, self.device = packed.spec, torch.device("cuda")


def test_a_matmul_can_be_fused_if_each_number_of_tokens_can(monkeypatch: pytest.MonkeyPatch):
    packed: Any = _Cuda(packed_weight())
    asked = []
    for refused in (None, MAX_FUSED_TOKENS):
        asked.clear()

        def one(packed: Any, m: int, dtype: torch.dtype, *fusion: str, refused: int | None = refused) -> object:
            asked.append((m, fusion))
            return None if m == refused else object()

        monkeypatch.setattr(module, "fused_product", one)
        for fusion in (NORMED, GATED, ADDED):
            assert can_fuse(packed, torch.float16, fusion) is (refused is None)
        assert {m for m, _ in asked} == {kernel.bucket_of(m) for m in range(1, MAX_FUSED_TOKENS + 1)}
    assert not can_fuse(packed_weight(), torch.float16, NORMED)


def test_nothing_is_fused_with_more_tokens():
    assert product.fused_product(packed_weight(), MAX_FUSED_TOKENS + 1, torch.float16, *NORMED) is None
