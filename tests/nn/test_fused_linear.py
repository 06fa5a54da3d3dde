"""The operator of a packed matmul with its prologue and epilogue, beside its parts, eager and traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import semisparse
from semisparse.formats import Packed, get_format, kernel, product
from semisparse.nn import fused_linear as module
from semisparse.nn.fused_linear import ADDED, GATED, MAX_FUSED_TOKENS, NORMED, can_fuse, fused_linear
from semisparse.patterns import parse_pattern
from tests.cuda_emulator import emulate, needs_compiler

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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU pass for a GPU: the CUDA kernels that fuse are emulated."""

    def product_of(packed: Packed, m: int, dtype: torch.dtype, prologue: str, epilogue: str) -> Any:
        problem = kernel.Problem(kernel.bucket_of(m), packed.spec, dtype, torch.device("cpu"), prologue, epilogue)
        products = (own.fuse(problem) for own in get_format(packed.spec.format).kernels if own.device == "cuda")
        return next((found for found in products if found is not None), None)

    emulate(monkeypatch)
    monkeypatch.setattr("semisparse.runtime.kernel.unavailable", lambda: None)
    monkeypatch.setattr(module, "fused_product", product_of)


@needs_compiler
@pytest.mark.parametrize(
    ("form", "pattern", "options"),
    # Both numbers of tokens compile the same kernels: they run in one process.
    [
        pytest.param(*case, marks=pytest.mark.xdist_group(f"fused {number}"))
        for number, case in enumerate(
            [("bitmask", "32:64", {}), ("bitmask", "32:64", {"kind": "w4"}), ("gqs", "g16@50%", {})]
        )
    ],
)
@pytest.mark.parametrize("tokens", range(1, MAX_FUSED_TOKENS + 1))
def test_one_kernel_computes_it_on_a_gpu(
    gpu, form: str, pattern: str, options: dict[str, str], tokens: int, monkeypatch
):
    weight, parsed = torch.randn(N, K, dtype=torch.float16), parse_pattern(pattern)
    stored = semisparse.pack(weight * parsed.mask(weight.abs()), format=form, pattern=pattern, **options)
    packed, x = get_format(form).arrange(stored, "cuda"), torch.randn(tokens, K, dtype=torch.float16)
    monkeypatch.setattr(module, "linear", None)  # the parts are not computed one by one
    for fusion, case in ((NORMED, "normed"), (GATED, "gated"), (ADDED, "added")):
        assert can_fuse(packed, x.dtype, fusion)
        given = {
            name: v[:tokens].half() if isinstance(v, Tensor) and v.dim() == 2 else v for name, v in CASES[case].items()
        }
        given |= {"norm_weight": given["norm_weight"].half()} if "norm_weight" in given else {}
        wanted = expected(x, stored, None, given)
        tensors = [packed.tensors[name] for name in sorted(packed.tensors)]
        arguments = {"norm_weight": None, "epsilon": 0.0, "residual": None, "gated": False, **given}
        y = torch.ops.semisparse.fused_linear(x, tensors, None, packed.spec.json, *arguments.values())
        assert (y.double() - wanted).norm() <= 2e-3 * wanted.norm()


def test_a_matmul_can_be_fused_if_each_number_of_tokens_can(monkeypatch: pytest.MonkeyPatch):
    packed, asked = packed_weight(), []
    for refused in (None, MAX_FUSED_TOKENS):
        asked.clear()

        def one(packed: Any, m: int, dtype: torch.dtype, *fusion: str, refused: int | None = refused) -> object:
            asked.append((m, fusion))
            return None if m == refused else object()

        monkeypatch.setattr(module, "fused_product", one)
        for fusion in (NORMED, GATED, ADDED):
            assert can_fuse(packed, torch.float16, fusion) is (refused is None)
        assert {m for m, _ in asked} == {kernel.bucket_of(m) for m in range(1, MAX_FUSED_TOKENS + 1)}


def test_no_kernel_of_a_cpu_fuses():
    assert not any(can_fuse(packed_weight(), torch.float16, fusion) for fusion in (NORMED, GATED, ADDED))


def test_nothing_is_fused_with_more_tokens():
    assert product.fused_product(packed_weight(), MAX_FUSED_TOKENS + 1, torch.float16, *NORMED) is None
