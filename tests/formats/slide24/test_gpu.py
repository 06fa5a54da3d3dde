"""Every kernel on a GPU: against float64, moved back to the same bytes, and captured in a CUDA graph."""

import pytest
import torch

from semisparse.formats import Packed, linear, product
from semisparse.formats.product import problem_of
from semisparse.formats.slide24.cuda import schedule
from semisparse.formats.slide24.storage import gpu
from semisparse.formats.slide24.storage.disk import value_dtype
from semisparse.runtime.kernel import hopper_refusal
from tests.formats.checking import sum_error
from tests.formats.slide24 import reference
from tests.formats.slide24.lifting import lift_into_tiles, rows_of
from tests.formats.slide24.reference import KINDS, SLIDE24, assert_same_bits, exact_linear, packed_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="slide24's GPU kernels: no GPU here")

LAYOUTS = {"gemm": (gpu.in_tiles, gpu.tiles_refusal), "cusparselt": (gpu.in_compressed, gpu.compressed_refusal)}
COMPUTED = [(None, torch.float16), (None, torch.bfloat16), ("int8", torch.bfloat16), ("fp8", torch.float16)]


@pytest.fixture
def needs_hopper():
    reason = hopper_refusal(torch.device("cuda"))
    if reason:
        pytest.skip(reason)


@pytest.fixture
def prepared_anew():
    """Clear the cache of prepared products, before and after."""
    product._prepared.cache_clear()
    yield
    product._prepared.cache_clear()


def packed_for(kernel: str, pattern: str, n: int, k: int, kind: str | None, dtype: torch.dtype) -> Packed:
    """Return a weight on the GPU in the layout of a kernel; skip where the kernel cannot run."""
    rows = packed_weight(pattern, n, k, kind, dtype)
    on_gpu = Packed(rows.spec, {name: tensor.cuda() for name, tensor in rows.tensors.items()})
    arrange, refuse = LAYOUTS[kernel]
    reason = refuse(value_dtype(rows.spec), on_gpu.device)
    if reason:
        pytest.skip(f"slide24's kernel {kernel} refuses: {reason}")
    return arrange(on_gpu)


def check_linear(kernel: str, packed: Packed, m: int, dtype: torch.dtype) -> None:
    n, k = packed.shape
    generator = torch.Generator("cuda").manual_seed(m)
    x = torch.randn(m, k, generator=generator, device="cuda").to(dtype)
    bias = torch.randn(n, generator=generator, device="cuda").to(dtype)
    unbiased, magnitude = exact_linear(x, packed)
    half = torch.finfo(dtype).eps / 2
    error = 2.0**-20 if packed.params.get("kind") == "int8" else sum_error(packed)  # int8 sums are exact until scaled
    for given, exact in ((None, unbiased), (bias, unbiased + bias.double())):
        y = linear(x, packed, given, kernel)
        # cuSPARSELt's sums for a bfloat16 x are rounded once before they are scaled; ours only at the end.
        before = half * unbiased.abs() if kernel == "cusparselt" else 0
        allowed = before + half * exact.abs() + error * magnitude + 1e-6
        assert ((y.double() - exact).abs() <= allowed).all(), given is not None
        assert torch.equal(y, linear(x, packed, given, kernel)), "two calls differ"


@pytest.mark.parametrize(
    ("pattern", "kind", "dtype", "m", "n", "k"),
    [
        ("6:8", None, torch.float16, 1, 1, 1),
        ("2:4", "int8", torch.bfloat16, 7, 33, 130),
        ("8:10", "fp8", torch.float16, 65, 40, 172),
        ("6:8", None, torch.bfloat16, 300, 334, 1000),
        ("6:8", "int8", torch.bfloat16, 1025, 700, 3584),
        ("2:4", "fp8", torch.float16, 1025, 700, 3584),
        ("8:10", None, torch.float16, 130, 900, 18944),
    ],
)
@pytest.mark.parametrize("kernel", LAYOUTS)
def test_linear(kernel, pattern, kind, dtype, m, n, k, nan_filled_memory):
    check_linear(kernel, packed_for(kernel, pattern, n, k, kind, dtype), m, dtype)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("tile", schedule.CTA_TILES, ids=lambda tile: f"{tile.tokens}x{64 * tile.warpgroups}")
def test_every_tile(tile, splits, monkeypatch, prepared_anew, nan_filled_memory):
    monkeypatch.setattr(schedule, "choose", lambda *shape: schedule.Schedule(tile, splits))
    for kind, dtype in COMPUTED:
        packed = packed_for("gemm", "6:8", 900, 1000, kind, dtype)
        for m in (1, 257, 600):
            check_linear("gemm", packed, m, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", LAYOUTS)
def test_a_weight_that_was_on_a_gpu_is_stored_as_before(kernel, kind):
    for n, k in ((1, 1), (33, 130), (333, 1000), (700, 3584)):
        expected = packed_weight("6:8", n, k, kind)
        packed = packed_for(kernel, "6:8", n, k, kind, torch.bfloat16)
        SLIDE24.validate(packed)
        back = packed.to("cpu")
        assert back.spec == expected.spec
        for name, tensor in expected.tensors.items():
            assert_same_bits(back.tensors[name], tensor, name)


@pytest.mark.parametrize("kernel", LAYOUTS)
def test_a_captured_call_follows_its_inputs(kernel):
    packed = packed_for(kernel, "6:8", 256, 512, "int8", torch.bfloat16)
    x = torch.randn(40, 512, device="cuda").bfloat16()
    linear(x, packed, None, kernel)  # plans and builds are made at the first call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, packed, None, kernel)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, linear(x, packed, None, kernel))


def test_auto_takes_the_kernel_of_the_layout():
    packed = packed_weight("6:8", 64, 128, "int8").to("cuda")
    x = torch.zeros(2, 128, dtype=torch.bfloat16, device="cuda")
    expected = {"tiles": "gemm", "compressed": "cusparselt", "rows": "unpack"}
    assert SLIDE24.choose(problem_of(x, packed)).name == expected[gpu.layout_of(packed.params)]


def test_auto_unpacks_where_the_gemm_does_not_pay(needs_hopper):
    packed = packed_weight("6:8", 64, 4096).to("cuda")
    names = [
        SLIDE24.choose(problem_of(torch.empty(m, 4096, dtype=torch.bfloat16, device="cuda"), packed)).name
        for m in (2048, 4096)
    ]
    assert names == ["gemm", "unpack"]


@pytest.mark.parametrize("window", [4, 8, 34])
@pytest.mark.parametrize(
    ("x_dtype", "dtype"),
    [(torch.float16, None), (torch.bfloat16, torch.int8), (torch.float16, torch.float8_e4m3fn)],
    ids=str,
)
def test_lifting_gives_the_bits_of_algorithm_1(x_dtype, dtype, window, needs_hopper):
    for m, k in ((1, 1), (3, 173), (9, 130), (2, 9000), (33, 512), (1, 40_000)):
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(x_dtype)
        x[m // 2] *= m == 1
        for given in (x.cuda(), torch.cat((x[:1, :1], x.flatten()[None]), 1).cuda()[0, 1:].view(m, k)):  # aligned, not
            arrivals = torch.full((5,), 3, dtype=torch.int32, device="cuda")
            tiles, scales = lift_into_tiles(given, dtype, window, m + 7, arrivals)
            expected, of_tokens = (
                (reference.lift(x, window), None) if dtype is None else reference.quantise_and_lift(x, dtype, window)
            )
            rows = rows_of(tiles.cpu(), m)
            assert arrivals.eq(0).all()
            assert scales is None or torch.equal(scales.cpu(), of_tokens)
            assert_same_bits(rows[:, : expected.shape[1]], expected)
            assert not rows[:, expected.shape[1] :].view(torch.uint8).any()


@pytest.mark.parametrize(("pattern", "kind"), [("2:4", "int8"), ("6:8", "fp8"), ("8:10", None), ("14:16", "int8")])
def test_unpacked_weights_are_multiplied(pattern, kind, nan_filled_memory):
    for n, k in ((1, 1), (65, 173), (300, 3584)):
        packed = packed_weight(pattern, n, k, kind).to("cuda")
        x = torch.eye(min(k, 512), k, dtype=torch.bfloat16, device="cuda")
        assert torch.equal(linear(x, packed, None, "unpack"), packed.unpack()[:, : len(x)].T)
