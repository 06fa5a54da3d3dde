"""The CPU kernel against the paper's steps in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semisparse.formats import linear
from semisparse.formats.product import problem_of
from semisparse.formats.slide24.cpu import kernel
from semisparse.formats.slide24.storage.disk import KINDS as DTYPES
from semisparse.formats.slide24.storage.disk import unpack_lifted
from semisparse.quant.symmetric import quantise_rows
from semisparse.runtime import cpp
from tests.formats.slide24 import reference
from tests.formats.slide24.reference import SLIDE24, lift, lifted_linear, packed_weight, random_weight

pytestmark = pytest.mark.skipif(cpp.refusal() is not None, reason=str(cpp.refusal()))


@pytest.mark.parametrize(
    ("pattern", "kind", "m"),
    [
        ("2:4", "int8", 7),
        ("6:8", "int8", 1),
        ("14:16", "int8", 40),
        ("2:4", "fp8", 1),
        ("6:8", "fp8", 40),
        ("8:10", "fp8", 7),
    ],
)
def test_matmuls_of_quantised_weights_are_exact(pattern, kind, m, nan_filled_memory):
    packed = packed_weight(pattern, 33, 172, kind)
    x = torch.randn(m, 172, generator=torch.Generator().manual_seed(m)).half()
    x[m // 2] *= m == 1
    for bias in (None, torch.linspace(-1, 1, 33).half()):
        y = linear(x, packed, bias, "cpu")
        assert torch.equal(y, lifted_linear(x, packed, bias))


@pytest.mark.parametrize(
    ("pattern", "m", "w_dtype", "x_dtype"),
    [
        ("2:4", 1, torch.float32, torch.float32),
        ("6:8", 32, torch.bfloat16, torch.bfloat16),
        ("8:10", 7, torch.float16, torch.float32),
        ("6:8", 33, torch.bfloat16, torch.float32),
        ("14:16", 70, torch.float16, torch.float16),
    ],
)
def test_matmuls_of_weights_as_they_are(pattern, m, w_dtype, x_dtype, nan_filled_memory):
    packed = packed_weight(pattern, 33, 172, dtype=w_dtype)
    x = torch.randn(m, 172, generator=torch.Generator().manual_seed(m)).to(x_dtype)
    bias = torch.linspace(-1, 1, 33).to(x_dtype)
    exact = x.double() @ packed.unpack().double().T + bias.double()
    magnitude = x.double().abs() @ packed.unpack().double().abs().T + 1
    y = linear(x, packed, bias, "cpu")
    assert y.dtype == x_dtype
    assert SLIDE24.choose(problem_of(x, packed)).name == "cpu"
    assert ((y.double() - exact).abs() <= 172 * 2**-24 * magnitude + torch.finfo(x_dtype).eps * exact.abs()).all()


@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
def test_threads_change_no_bit(kind, monkeypatch):
    packed, x = packed_weight("6:8", 33, 172, kind), torch.randn(5, 172)
    one = linear(x, packed, None, "cpu")
    for threads in (2, 7, 50):
        monkeypatch.setattr(cpp, "threads_for", lambda work, threads=threads: threads)
        assert torch.equal(linear(x, packed, None, "cpu"), one)


@settings(max_examples=100)
@given(half=st.integers(2, 8), k=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_the_lifted_integer_matmul_is_the_original(half, k, seed):
    """Equation 3: Phi(w) Psi(x) = w x."""
    pattern = f"{2 * half - 2}:{2 * half}"
    weight, x = random_weight(pattern, 5, k, seed), torch.randn(3, k, generator=torch.Generator().manual_seed(seed))
    packed = SLIDE24.pack(weight, pattern, kind="int8")
    quantised_x, _ = quantise_rows(x, torch.int8)
    quantised_w, _ = quantise_rows(weight, torch.int8)
    lifted = lift(quantised_x, 2 * half).long() @ unpack_lifted(packed).long().T
    assert torch.equal(lifted, quantised_x.long() @ quantised_w.long().T)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_x_is_quantised_as_algorithm_1_says(dtype):
    x = torch.randn(4, 130, generator=torch.Generator().manual_seed(0)).half()
    x[1] = 0
    x[2] = torch.finfo(torch.float16).max
    x[3, :2] = torch.tensor([-8.0, 4.0])
    quantised, scale = quantise_rows(x, dtype)
    lifted, expected_scale = reference.quantise_and_lift(x, dtype, 6)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(lift(quantised, 6).float(), lifted.float())
    assert scale[1] == 1
    assert not quantised[1].float().any()


def test_the_kernel_unpacks_for_many_tokens_and_needs_no_compiler_then(monkeypatch):
    monkeypatch.setattr(cpp, "refusal", lambda: "no C++ compiler found")
    few, many = (torch.zeros(m, 40, dtype=torch.bfloat16) for m in (32, 33))
    plain, rounded = (packed_weight("6:8", 5, 40, kind) for kind in (None, "int8"))
    assert kernel.refusal(problem_of(few, plain)) == "no C++ compiler found"
    assert kernel.refusal(problem_of(many, plain)) is None
    assert SLIDE24.choose(problem_of(many, rounded)).name == "reference"
