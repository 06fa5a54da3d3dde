"""The dense baselines: what they store, and every product that can run here."""

import pytest
import torch

from semisparse.errors import FormatError
from semisparse.formats import Packed, get_format, linear
from semisparse.formats.base import replace_tensors
from semisparse.formats.dense import int4
from semisparse.formats.product import problem_of
from semisparse.quant.symmetric import FP8_MAX, quantise_rows

DENSE = get_format("dense")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

KINDS = ("int8", "fp8", "fp8_tensor", "int4")


def weight(n: int = 64, k: int = 256, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "bits", "error"),
    [("int8", 8.125, 0.01), ("fp8", 8.125, 0.03), ("fp8_tensor", 8.002, 0.03), ("int4", 5, 0.09)],
)
def test_a_rounded_weight_is_near_and_as_large_as_declared(kind, bits, error):
    """Errors of a normal weight: amax 3 to 4 over 254, 15 or so levels, or e4m3's 3 bits of mantissa."""
    packed = DENSE.pack(weight(), "0%", kind=kind)
    DENSE.validate(packed)
    assert packed.bits_per_weight == pytest.approx(bits, abs=1e-3)
    assert packed.unpack().dtype == torch.bfloat16
    relative = (packed.unpack().float() - weight().float()).norm() / weight().float().norm()
    assert error / 4 < relative < error


def test_zero_weights_are_exact_in_every_kind():
    for kind in KINDS:
        packed = DENSE.pack(torch.zeros(8, 128), "0%", kind=kind)
        assert not packed.unpack().any(), kind


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(FormatError, match="no kind 'int3'; it has int8, fp8, fp8_tensor, int4"):
        DENSE.pack(weight(), "0%", kind="int3")


def test_int4_says_what_it_tiles():
    with pytest.raises(FormatError, match="N in multiples of 8 and K of 128"):
        DENSE.pack(weight(64, 172), "0%", kind="int4")


def test_scales_that_are_not_finite_are_refused():
    packed = DENSE.pack(weight(), "0%", kind="int8")
    bad = packed.tensors["scale"].clone()
    bad[3] = torch.inf
    with pytest.raises(FormatError, match="scale"):
        DENSE.validate(replace_tensors(packed, {**packed.tensors, "scale": bad}))


def test_int4_places_each_value_where_the_tensor_core_wants_it():
    """Lane, word and shift of single values, worked out by hand from the fragment of mma.m16n8k16."""
    groups = torch.arange(16.0).repeat(8, 8)
    for row, column, lane, word, shift in [
        (0, 0, 0, 0, 0),
        (1, 3, 5, 0, 16),
        (7, 9, 28, 0, 20),
        (2, 31, 11, 0, 28),
        (0, 66, 1, 2, 0),
    ]:
        raised = groups.clone()
        raised[row, column] = 15.0 - raised[row, column]
        before, after = (int4.pack(w)["values"][0, 0].long() for w in (groups, raised))
        changed = (before != after).nonzero().tolist()
        assert changed == [[lane, word]]
        difference = (before[lane, word] ^ after[lane, word]) & 0xFFFFFFFF
        assert difference.item() == 15 << shift


@pytest.mark.skipif(DEVICE == "cpu", reason="torch's int4 packer needs a GPU")
def test_int4_is_torchs_own_layout():
    packed = DENSE.pack(weight(), "0%", kind="int4")
    scale, zero = packed.tensors["scale_and_zero"].float().transpose(0, 1).unbind(-1)
    codes = ((packed.unpack().float().unflatten(1, (-1, 32)) - zero[..., None]) / scale[..., None] + 8).round()
    codes = codes.flatten(1).to(torch.uint8)
    expected = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    assert torch.equal(packed.tensors["values"], expected)


def expected_product(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """The product in float64, with x rounded as the kind says."""
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


MULTIPLIES = {
    "blas": (None,),
    "triton_int8": ("int8",),
    "int_mm": ("int8",),
    "scaled_mm": ("fp8", "fp8_tensor"),
    "int4pack_mm": ("int4",),
}


@pytest.mark.parametrize("m", [1, 7, 16, 17, 129])
@pytest.mark.parametrize(("kernel", "kind"), [(name, kind) for name, kinds in MULTIPLIES.items() for kind in kinds])
def test_every_baseline_that_can_run_here(kernel, kind, m):
    (kernel,) = (found for found in DENSE.kernels if found.name == kernel)
    packed = DENSE.pack(weight(), "0%", **({} if kind is None else {"kind": kind}))
    x = torch.randn(m, 256, generator=torch.Generator().manual_seed(m)).bfloat16().to(DEVICE)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    reason = kernel.refusal(problem_of(x, packed))
    if reason:
        pytest.skip(f"dense {kernel.name}: {reason}")
    for given in (None, bias):
        y = linear(x, packed, given, kernel.name)
        expected = expected_product(x, packed) + (0 if given is None else given.double())
        # At most three roundings to bfloat16 on the way: of int4's dequantised weights, the product and the sum.
        relative = (y.double() - expected).norm() / expected.norm()
        assert relative < 3 * 2**-9
        assert torch.equal(y, linear(x, packed, given, kernel.name))


@pytest.mark.parametrize(("m", "n", "k"), [(5, 33, 173), (17, 64, 256), (70, 40, 130), (600, 300, 256)])
def test_the_triton_int8_product_is_exact(m, n, k):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")
    from semisparse.formats.dense.triton_int8 import int8_product

    generator = torch.Generator().manual_seed(m)
    x, w = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, generator=generator).to(DEVICE) for rows in (m, n))
    x_scale, w_scale, bias = (torch.rand(size, generator=generator).to(DEVICE) for size in (m, n, n))
    exact = (x.double() @ w.double().T) * x_scale.double()[:, None] * w_scale.double() + bias.double()
    for given in (None, bias):
        y = int8_product(x, x_scale, w, w_scale, given, torch.float32)
        wanted = exact if given is not None else exact - bias.double()
        # The sum is exact; four float32 operations follow.
        torch.testing.assert_close(y.double(), wanted, rtol=4 * 2**-24, atol=4 * 2**-24 * exact.abs().max().item())


def test_the_readmes_example():
    packed = DENSE.pack(torch.tensor([[127, -1, 0, 63.5], [0, 0, 0, 0]]), "0%", kind="int8")
    assert packed.tensors["values"].numpy().tobytes().hex(" ") == "7f ff 00 40 00 00 00 00"
    assert packed.tensors["scale"].numpy().tobytes().hex(" ") == "00 00 80 3f 00 00 80 3f"
