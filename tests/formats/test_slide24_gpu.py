"""Slide24 on a GPU: every kernel there against float64, what a layer in use saves, and capture."""

import pytest
import torch
from torch import Tensor

from semisparse.formats import linear, product
from semisparse.formats.base import Packed
from semisparse.formats.product import problem_of
from semisparse.formats.slide24 import gpu, hopper, layouts
from semisparse.formats.slide24.lift import lift, quantise_and_lift
from semisparse.formats.slide24.pack import stored_dtype, unpack_stored
from semisparse.quant.symmetric import quantise_rows
from tests.formats.lifted_tiles import lifted, rows_in
from tests.formats.test_slide24 import SLIDE24, random_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="slide24's GPU kernels: no GPU here")

KINDS = (None, "int8", "fp8")
SOME_DIVISIONS = [d for d in hopper.DIVISIONS if d.parts in (1, 2, 5)]
COMPUTED = [(None, torch.float16), (None, torch.bfloat16), ("int8", torch.bfloat16), ("fp8", torch.float16)]
SHAPES = ((1, 1), (33, 130), (333, 1000), (700, 3584))
LAYOUTS = {
    "hopper": (layouts.in_tiles, layouts.tiles_refusal),
    "cusparselt": (layouts.compressed, layouts.compressed_refusal),
}


@pytest.fixture
def chosen_anew():
    """Forget what was prepared, before and after."""
    product._prepared.cache_clear()
    yield
    product._prepared.cache_clear()


def packed_for(kernel: str, pattern: str, n: int, k: int, kind: str | None, dtype: torch.dtype) -> Packed:
    options = {} if kind is None else {"kind": kind}
    rows = SLIDE24.pack(random_weight(pattern, n, k, 0).to(dtype).cuda(), pattern, **options)
    arrange, refuse = LAYOUTS[kernel]
    reason = refuse(stored_dtype(rows.params) or dtype, rows.device)
    if reason:
        pytest.skip(f"slide24's kernel {kernel} refuses: {reason}")
    return arrange(rows)


def exact_product(x: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Give the product in float64, of rounded operands where the weight is rounded, and that of the magnitudes."""
    weight, dtype = unpack_stored(layouts.in_rows(packed)).double(), stored_dtype(packed.params)
    if dtype is None:
        return x.double() @ weight.T, x.double().abs() @ weight.abs().T
    rounded, token_scales = quantise_rows(x, dtype)
    scales = token_scales.double()[:, None] * packed.tensors["scale"].double()
    return rounded.double() @ weight.T * scales, rounded.double().abs() @ weight.abs().T * scales


def sum_error(packed: Packed) -> float:
    """Give the error of a sum as a share of its magnitudes: fp8's tensor cores keep some 14 bits, float32's cut off."""
    return {"int8": 2.0**-20, "fp8": 2.0**-10}.get(packed.params.get("kind"), packed.shape[1] * 2.0**-23)


def check_products(kernel: str, packed: Packed, m: int, dtype: torch.dtype) -> None:
    n, k = packed.shape
    generator = torch.Generator("cuda").manual_seed(m)
    x = torch.randn(m, k, generator=generator, device="cuda").to(dtype)
    bias = torch.randn(n, generator=generator, device="cuda").to(dtype)
    product, magnitude = exact_product(x, packed)
    half = torch.finfo(dtype).eps / 2
    for given, exact in ((None, product), (bias, product + bias.double())):
        torch.full((m, n), torch.nan, dtype=dtype, device="cuda")  # most likely the output's memory
        y = linear(x, packed, given, kernel)
        # cuSPARSELt's sums for a bfloat16 x are rounded once before they are scaled; ours only at the end.
        before = half * product.abs() if kernel == "cusparselt" else 0
        allowed = before + half * exact.abs() + sum_error(packed) * magnitude + 1e-6
        assert ((y.double() - exact).abs() <= allowed).all(), given is not None
        assert torch.equal(y, linear(x, packed, given, kernel)), "two calls differ"


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 33, 130), (65, 40, 172), (300, 334, 1000), (1025, 700, 3584)])
@pytest.mark.parametrize(("kind", "dtype"), COMPUTED, ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "6:8", "8:10"])
@pytest.mark.parametrize("kernel", LAYOUTS)
def test_products(kernel, pattern, kind, dtype, m, n, k):
    check_products(kernel, packed_for(kernel, pattern, n, k, kind, dtype), m, dtype)


@pytest.mark.parametrize(
    "division", SOME_DIVISIONS, ids=lambda d: f"{d.tiling.tokens}x{64 * d.tiling.groups}/{d.parts}"
)
@pytest.mark.parametrize(("kind", "dtype"), COMPUTED, ids=str)
def test_every_division(kind, dtype, division, monkeypatch, chosen_anew):
    packed = packed_for("hopper", "6:8", 900, 1000, kind, dtype)
    monkeypatch.setattr(hopper, "choose_division", lambda *problem: division)
    for m in (1, 257, 600):
        check_products("hopper", packed, m, dtype)


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


@pytest.mark.parametrize("window", [4, 6, 8, 10, 34])
@pytest.mark.parametrize("of_x", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_lifting_into_tiles_gives_the_bits_of_the_reference(dtype, of_x, window):
    if hopper.refusal(torch.device("cuda")):
        pytest.skip("lift.cu is for Hopper")
    for m, k in ((1, 1), (3, 173), (9, 130), (2, 9000), (33, 512), (1, 40_000)):
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(of_x)
        x[m // 2] *= m == 1
        tokens, counters = m + 7, torch.full((5,), 3, dtype=torch.int32, device="cuda")
        for given in (x.cuda(), torch.cat((x[:1, :1], x.flatten()[None]), 1).cuda()[0, 1:].view(m, k)):  # aligned, not
            found, scales = lifted(given, dtype, window, tokens, counters)
            expected, expected_scales = (
                (lift(x, window), None) if dtype is None else quantise_and_lift(x, dtype, window)
            )
            assert counters.eq(0).all()
            assert scales is None or torch.equal(scales.cpu(), expected_scales)
            assert torch.equal(
                rows_in(found.cpu(), m)[:, : expected.shape[1]].view(torch.uint8), expected.view(torch.uint8)
            )
            assert not rows_in(found.cpu(), m)[:, expected.shape[1] :].view(torch.uint8).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["2:4", "6:8", "8:10", "14:16"])
def test_tiles_are_unpacked_for_a_dense_product(pattern, kind):
    if hopper.refusal(torch.device("cuda")):
        pytest.skip("unpack.cu is for Hopper")
    for n, k in ((1, 1), (65, 173), (300, 3584)):
        packed = packed_for("hopper", pattern, n, k, kind, torch.bfloat16)
        assert torch.equal(gpu._unpacked(packed), layouts.unpack(packed))
