"""Slide24 on a GPU: every kernel there against float64, what a layer in use saves, and capture."""

import pytest
import torch
from torch import Tensor

from semisparse.formats import linear
from semisparse.formats.base import Packed
from semisparse.formats.product import problem_of
from semisparse.formats.slide24 import layouts
from semisparse.formats.slide24.pack import stored_dtype, unpack_stored
from semisparse.quant.symmetric import quantise_rows
from tests.formats.test_slide24 import SLIDE24, random_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="slide24's GPU kernels: no GPU here")

KINDS = (None, "int8", "fp8")
SHAPES = ((1, 1), (33, 130), (333, 1000), (700, 3584))
LAYOUTS = {
    "hopper": (layouts.in_tiles, layouts.tiles_refusal),
    "cusparselt": (layouts.compressed, layouts.compressed_refusal),
}


def packed_for(kernel: str, pattern: str, n: int, k: int, kind: str | None, dtype: torch.dtype) -> Packed:
    options = {} if kind is None else {"kind": kind}
    rows = SLIDE24.pack(random_weight(pattern, n, k, 0).to(dtype).cuda(), pattern, **options)
    arrange, refuse = LAYOUTS[kernel]
    reason = refuse(stored_dtype(rows.params) or dtype, rows.device)
    if reason:
        pytest.skip(f"slide24's kernel {kernel} refuses: {reason}")
    return arrange(rows)


def exact_product(x: Tensor, packed: Packed, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Give the product in float64, of rounded operands where the weight is rounded, and of the magnitudes."""
    weight, dtype = unpack_stored(layouts.in_rows(packed)).double(), stored_dtype(packed.params)
    wide, scales = x.double(), torch.ones((), dtype=torch.float64, device=x.device)
    if dtype is not None:
        rounded, token_scales = quantise_rows(x, dtype)
        wide = rounded.double()
        scales = token_scales.double()[:, None] * packed.tensors["scale"].double()
    added = torch.zeros((), dtype=torch.float64, device=x.device) if bias is None else bias.double()
    return wide @ weight.T * scales + added, wide.abs() @ weight.abs().T * scales + added.abs()


def roundings(packed: Packed, kernel: str) -> float:
    """Give the error of a sum as a share of its magnitudes.

    fp8's tensor cores keep some 14 bits of a sum (7.3e-4 of the norm was seen); others add in int32 or float32.
    """
    if packed.params.get("kind") == "fp8":
        return 2.0**-12
    return 2.0**-20 if packed.params.get("kind") == "int8" else packed.shape[1] * 2.0**-23


@pytest.mark.parametrize("m", [1, 7, 65, 300, 1025])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["2:4", "6:8", "8:10"])
@pytest.mark.parametrize("kernel", LAYOUTS)
def test_products(kernel, pattern, kind, dtype, m):
    for n, k in SHAPES:
        packed = packed_for(kernel, pattern, n, k, kind, dtype)
        generator = torch.Generator("cuda").manual_seed(m)
        x = torch.randn(m, k, generator=generator, device="cuda").to(dtype)
        bias = torch.randn(n, generator=generator, device="cuda").to(dtype)
        for given in (None, bias):
            torch.full((m, n), torch.nan, dtype=dtype, device="cuda")  # most likely the output's memory
            y = linear(x, packed, given, kernel)
            exact, magnitude = exact_product(x, packed, given)
            # cuSPARSELt's sums of a bfloat16 x are rounded once more before they are scaled.
            steps = 2 if kernel == "cusparselt" else 1
            allowed = steps * torch.finfo(dtype).eps / 2 * exact.abs() + roundings(packed, kernel) * magnitude + 1e-6
            if steps == 2:
                allowed += torch.finfo(dtype).eps / 2 * magnitude.clamp(max=0.0 if given is None else torch.inf)
            assert ((y.double() - exact).abs() <= allowed).all(), (n, k, given is not None)
            assert torch.equal(y, linear(x, packed, given, kernel)), "two calls differ"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", LAYOUTS)
def test_a_weight_that_was_on_a_gpu_is_stored_as_before(kernel, kind):
    for n, k in SHAPES:
        packed = packed_for(kernel, "6:8", n, k, kind, torch.bfloat16)
        SLIDE24.validate(packed)
        before, after = layouts.in_rows(packed).to("cpu"), packed.to("cpu")
        expected = SLIDE24.pack(
            random_weight("6:8", n, k, 0).bfloat16().cuda(), "6:8", **({} if kind is None else {"kind": kind})
        )
        assert after.params == before.params == ({} if kind is None else {"kind": kind})
        for name, tensor in expected.tensors.items():
            assert torch.equal(after.tensors[name].view(torch.uint8), tensor.cpu().view(torch.uint8)), name


@pytest.mark.parametrize("kernel", LAYOUTS)
def test_a_captured_product_follows_its_inputs(kernel):
    packed = packed_for(kernel, "6:8", 256, 512, "int8", torch.bfloat16)
    x = torch.randn(40, 512, device="cuda").bfloat16()
    linear(x, packed, None, kernel)  # plans and builds are made at the first call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, packed, None, kernel)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, linear(x, packed, None, kernel))


def test_auto_takes_sparse_tensor_cores_where_they_are():
    packed = SLIDE24.pack(random_weight("6:8", 64, 128, 0).bfloat16(), "6:8", kind="int8").to("cuda")
    x = torch.zeros(2, 128, dtype=torch.bfloat16, device="cuda")
    expected = {"tiles": "hopper", "compressed": "cusparselt", "rows": "reference"}
    layout = packed.params.get("layout", "rows")
    assert SLIDE24.choose(problem_of(x, packed)).name in (expected[layout], "unpack")
