"""Every dense product that can run here, against float64 with x rounded as the kind says."""

import pytest
import torch
from torch import Tensor

from semisparse.formats import Packed, get_format, linear
from semisparse.formats.dense.cuda import int4pack_mm
from semisparse.formats.product import problem_of
from semisparse.quant.symmetric import FP8_MAX, quantise_rows

DENSE = get_format("dense")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

TOKENS = (1, 7, 17, 129) if DEVICE == "cuda" else (1, 7, 17)


def packed_weight(kind: str | None, n: int = 64, k: int = 256) -> Packed:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).bfloat16()
    return DENSE.pack(weight, "0%", kind=kind).to(DEVICE)


def random_x(m: int, k: int = 256) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16().to(DEVICE)


def expected_product(x: Tensor, packed: Packed) -> Tensor:
    """Compute the product in float64, with x rounded as the kind says."""
    kind = packed.params.get("kind")
    if kind in ("int8", "fp8"):
        rounded, scale = quantise_rows(x, torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        x = rounded.double() * scale.double()[:, None]
        w = packed.tensors["values"].double() * packed.tensors["scale"].double()[:, None]
    elif kind == "fp8_tensor":
        scale = x.abs().amax().float() / FP8_MAX
        x = (x.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()
        w = packed.tensors["values"].double() * packed.tensors["scale"].double()
    else:
        w = packed.unpack().double()
    return x.double() @ w.T


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blas", None),
        ("int8_gemm", "int8"),
        ("int_mm", "int8"),
        ("scaled_mm", "fp8"),
        ("scaled_mm", "fp8_tensor"),
        ("int4pack_mm", "int4"),
    ],
)
def test_every_product_that_can_run_here(name: str, kind: str | None, m: int):
    packed, x = packed_weight(kind), random_x(m)
    (kernel,) = (kernel for kernel in DENSE.kernels if kernel.name == name)
    cpu_only = kernel.device == "cpu" and DEVICE == "cuda"
    # Not `refusal`: Triton's interpreter runs on a CPU.
    reason = "runs on a CPU" if cpu_only else kernel.supports(problem_of(x, packed))
    if reason:
        pytest.skip(f"dense {name}: {reason}")
    product = kernel.prepare(problem_of(x, packed))
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    for given in (None, bias, torch.stack((bias, bias), 1)[:, 0]):
        y = product(x, packed, given)
        expected = expected_product(x, packed) + (0 if given is None else given.double())
        # At most three roundings to bfloat16 on the way: of int4's dequantised weights, the product and the sum.
        assert (y.double() - expected).norm() < 3 * 2**-9 * expected.norm()
        for same_x in (x, torch.stack((x, x), -1)[..., 0], x.T.contiguous().T):
            assert torch.equal(y, product(same_x, packed, given))


@pytest.mark.parametrize(("m", "n", "k"), [(5, 33, 173), (17, 64, 256), (70, 40, 130), (600, 300, 256)])
def test_the_triton_int8_gemm_is_exact(m: int, n: int, k: int):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")
    from semisparse.formats.dense.cuda.int8_gemm_triton import choose_config, int8_gemm

    generator = torch.Generator().manual_seed(m)
    x, w = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, generator=generator).to(DEVICE) for rows in (m, n))
    x_scale, w_scale, bias = (torch.rand(size, generator=generator).to(DEVICE) for size in (m, n, n))
    exact = (x.double() @ w.double().T) * x_scale.double()[:, None] * w_scale.double() + bias.double()
    for given in (None, bias):
        y = int8_gemm(x, x_scale, w, w_scale, given, torch.float32, choose_config(m))
        wanted = exact if given is not None else exact - bias.double()
        # The accumulators are exact; four float32 operations follow.
        torch.testing.assert_close(y.double(), wanted, rtol=4 * 2**-24, atol=4 * 2**-24 * exact.abs().max().item())


def unaligned(x: Tensor) -> Tensor:
    """Return the same x, two bytes behind a multiple of 16."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x)
    assert memory.data_ptr() % 16 == 2
    return memory.copy_(x)


def test_an_unaligned_x_is_copied_before_torchs_int4_gemm(monkeypatch: pytest.MonkeyPatch):
    """torch does not check the alignment, and a "misaligned address" error destroys the CUDA context."""
    received = []
    monkeypatch.setattr(torch, "_weight_int4pack_mm", lambda x, *rest: received.append(x) or x.new_zeros(len(x), 64))
    packed, x = packed_weight("int4"), random_x(3)
    product = int4pack_mm.prepare(problem_of(x, packed))
    for given in (unaligned(x), x.T.contiguous().T, x):
        product(given, packed, None)
        assert received[-1].data_ptr() % 16 == 0
        assert received[-1].is_contiguous()
        assert torch.equal(received[-1], x)
    assert received[-1] is x, "an aligned x is not copied"


@pytest.mark.skipif(DEVICE == "cpu", reason="torch's int4 GEMM runs on a GPU")
def test_an_unaligned_x_of_torchs_int4_gemm_on_a_gpu():
    packed, x = packed_weight("int4"), random_x(3)
    assert torch.equal(linear(unaligned(x), packed, None, "int4pack_mm"), linear(x, packed, None, "int4pack_mm"))
    torch.cuda.synchronize()
