"""Plans and searches of cuSPARSELt against a stand-in for the library, and the pass after its GEMM."""

import contextlib
from types import SimpleNamespace

import numpy
import pytest
import torch

from semisparse.errors import KernelError
from semisparse.formats.product import problem_of
from semisparse.formats.slide24.cuda import cusparselt as kernel
from semisparse.formats.slide24.cuda import cusparselt_library as cusparselt
from semisparse.formats.slide24.cuda.cusparselt_library import Shape
from semisparse.formats.slide24.storage import gpu
from semisparse.runtime import device as runtime_device
from tests.cuda_emulator import gpu as emulated_gpu
from tests.formats.slide24.reference import DEVICE, packed_weight

SHAPE = Shape(0, 48, 64, 96, torch.int8, torch.bfloat16)


class Library:
    """Counts its calls; its search selects algorithm 7."""

    ComputeType = SimpleNamespace(COMPUTE_32I=0, COMPUTE_32F=2)
    MatmulAlg = SimpleNamespace(DEFAULT=0)
    Sparsity = SimpleNamespace(SPARSITY_50_PERCENT=0)

    def __init__(self) -> None:
        self.MatmulAlgAttribute = {name: name for name in (*cusparselt.SEARCHED, "SEARCH_ITERATIONS")}
        self.searches, self.matmuls, self.settings = [], [], []
        self.selections: list[dict] = []

    def __getattr__(self, name: str):
        return lambda *arguments: 0  # descriptors, plans and sizes

    def get_version(self, handle):
        return 800

    def sp_mma_compressed_size2(self, handle, weight):
        return 100, 10

    def matmul_alg_selection_init(self, handle, product, algorithm):
        self.selections.append(dict.fromkeys(self.MatmulAlgAttribute, 0))
        return len(self.selections) - 1

    def matmul_alg_set_attribute(self, handle, selection, name, pointer, size):
        value = numpy.ctypeslib.as_array((numpy.ctypeslib.ctypes.c_int32 * 1).from_address(pointer))[0]
        self.selections[selection][name] = int(value)
        self.settings.append((name, int(value)))

    def matmul_alg_get_attribute(self, handle, selection, name, pointer, size):
        numpy.ctypeslib.as_array((numpy.ctypeslib.ctypes.c_int32 * 1).from_address(pointer))[0] = self.selections[
            selection
        ][name]

    def matmul_search(self, *arguments):
        self.searches.append(arguments)
        self.selections[-1]["CONFIG_ID"] = 7

    def matmul(self, *arguments):
        self.matmuls.append(arguments)


@pytest.fixture
def library(monkeypatch, tmp_path) -> Library:
    found = Library()
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path))
    monkeypatch.setattr(cusparselt, "_library", lambda: found)
    monkeypatch.setattr(cusparselt, "unavailable", lambda device: None)
    monkeypatch.setattr(cusparselt, "_handle", lambda device: 0)
    monkeypatch.setattr(cusparselt, "_type", lambda dtype: 0)
    monkeypatch.setattr(cusparselt, "device_facts", lambda device: SimpleNamespace(name="a GPU"))
    monkeypatch.setattr(cusparselt, "_search", lambda shape: plan_of(shape).search(*operands(shape)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 11, raising=False)
    forget()
    yield found
    forget()


def forget() -> None:
    """Clear all caches, so that a test starts as a new process does."""
    cusparselt._plans.clear()
    cusparselt._searched.cache_clear()
    cusparselt._default_plan.cache_clear()


def plan_of(shape: Shape) -> cusparselt.Plan:
    return cusparselt.Plan(shape, {"SEARCH_ITERATIONS": cusparselt.ITERATIONS})


def operands(shape: Shape):
    return torch.zeros(shape.m, shape.k, dtype=torch.int8), torch.zeros(100, dtype=torch.uint8)


def test_a_shape_is_searched_once_and_its_plan_kept(library):
    for _ in range(3):
        y = cusparselt.plan_for(SHAPE).multiply(*operands(SHAPE))
    assert y.shape == (48, 64)
    assert y.dtype == torch.bfloat16
    assert len(library.searches) == 1
    assert len(library.matmuls) == 3
    assert len(library.selections) == 2  # one to search with, one to multiply with
    assert library.selections[1]["CONFIG_ID"] == 7


def test_token_counts_up_to_the_next_power_of_two_share_a_search(library):
    for m in (48, 64, 80, 16384, 4096):
        cusparselt.plan_for(Shape(0, m, 64, 96, torch.int8, torch.bfloat16))
    assert len(library.searches) == 3  # 64, 128, and 4,096 for all that is more
    cusparselt.plan_for(Shape(0, 48, 64, 96, torch.int8, torch.int32))
    assert len(library.searches) == 4


def test_another_process_reads_what_was_searched(library):
    cusparselt.plan_for(SHAPE)
    forget()
    library.selections.clear()
    cusparselt.plan_for(SHAPE)
    assert len(library.searches) == 1
    assert [selection["CONFIG_ID"] for selection in library.selections] == [7]


def test_nothing_is_searched_while_a_graph_is_captured(library, monkeypatch):
    cusparselt.plan_for(SHAPE)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cusparselt.plan_for(SHAPE).multiply(*operands(SHAPE))  # has its plan
    with pytest.raises(KernelError, match=r"M, N, K = 16, 64, 96 .* call the layer once with as many tokens before"):
        cusparselt.plan_for(Shape(0, 16, 64, 96, torch.int8, torch.bfloat16))


def test_matmuls_run_on_the_current_stream_with_the_operands_given(library):
    x, compressed = operands(SHAPE)
    plan = cusparselt.plan_for(SHAPE)
    y = plan.multiply(x, compressed)
    _, _, one, w_at, x_at, zero, c_at, y_at, workspace, streams, count = library.matmuls[-1]
    assert (w_at, x_at, c_at, y_at) == (compressed.data_ptr(), x.data_ptr(), y.data_ptr(), y.data_ptr())
    assert workspace == 0
    assert count == 1
    read = numpy.ctypeslib.ctypes
    assert read.c_uint64.from_address(streams).value == 11
    assert read.c_float.from_address(one).value == 1
    assert read.c_float.from_address(zero).value == 0


def test_decompressing_again_makes_no_plan(library):
    for _ in range(3):
        weight = cusparselt.decompress(torch.zeros(100, dtype=torch.uint8), 64, 8192 + 32, torch.int8)
        assert weight.shape == (64, 8192 + 32)
        assert len(library.selections) == 2  # 4,096 columns at a time, then 32


@pytest.fixture
def compressed(library, monkeypatch):
    """Return a weight in the layout ``compressed``, on an Ampere GPU of the stand-in."""
    monkeypatch.setattr(runtime_device, "_cpu_facts", lambda threads: emulated_gpu(108, (8, 0)))
    return gpu.in_compressed(packed_weight("6:8", 33, 130, "int8"))


def test_the_kernel_searches_by_the_bucket_and_plans_by_the_exact_m(library, compressed, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")
    from semisparse.formats.slide24.cuda import lift_triton, scale_triton

    lifted = lambda x, dtype, window, tokens: (torch.zeros(tokens, 288, dtype=dtype), torch.ones(len(x)))  # noqa: E731
    monkeypatch.setattr(lift_triton, "quantise_and_lift", lifted)
    monkeypatch.setattr(scale_triton, "scale_and_add", lambda y, scales, bias, m, n, dtype: y[:m, :n].to(dtype))
    assert compressed.tensors["compressed"].numel() == 100
    xs = [torch.randn(m, 130).bfloat16() for m in (65, 90, 96)]
    problem = problem_of(xs[0], compressed)
    assert kernel.refusal(problem) is None
    matmul = kernel.prepare(problem)
    assert [len(library.searches), len(cusparselt._plans)] == [1, 1]
    for x in xs:
        y = matmul(x, compressed, torch.ones(66)[::2])
        assert (y.shape, y.dtype) == ((len(x), 33), torch.bfloat16)
    assert [len(library.searches), len(library.matmuls)] == [1, 3]
    assert {shape.m for shape in cusparselt._plans} == {80, 96}
    assert {(shape.n, shape.k) for shape in cusparselt._plans} == {(64, 288)}


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((7, 5), torch.int8, "needs compute capability 8.0"),
        ((8, 0), torch.float8_e4m3fn, "needs compute capability 8.9"),
        ((9, 0), torch.float16, "illegal instruction on Hopper"),
        ((8, 0), torch.float32, "2:4 kernels take"),
        ((10, 0), torch.float16, None),
    ],
)
def test_where_the_library_computes(library, monkeypatch, capability, dtype, reason):
    monkeypatch.setattr(runtime_device, "_cpu_facts", lambda threads: emulated_gpu(108, capability))
    refusal = gpu.compressed_refusal(dtype, torch.device("cpu"))
    assert refusal is None if reason is None else reason in refusal


@pytest.mark.parametrize(
    ("dtype", "m", "n"),
    [(torch.float16, 1, 1), (torch.bfloat16, 9, 513), (torch.float32, 9, 513), (torch.float16, 16, 64)],
)
def test_the_pass_after_a_gemm(dtype, m, n):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")
    from semisparse.formats.slide24.cuda.scale_triton import scale_and_add

    generator = torch.Generator().manual_seed(n)
    unscaled = torch.randint(-100, 100, (m + 3, n + 5), generator=generator, dtype=torch.int32).to(DEVICE)
    scales = tuple((torch.rand(size, generator=generator) + 0.5).to(DEVICE) for size in (m, n))
    bias = torch.randn(2 * n, generator=generator).to(dtype).to(DEVICE)[::2]
    # Triton's interpreter (3.9) cuts a bfloat16 off where hardware rounds.
    step = torch.finfo(dtype).eps / (1 if DEVICE == "cpu" and dtype == torch.bfloat16 else 2)
    for given_scales, given_bias in ((scales, None), (scales, bias), (None, bias)):
        expected = unscaled[:m, :n].double()
        if given_scales is not None:
            expected = expected * scales[0].double()[:, None] * scales[1].double()
        if given_bias is not None:
            expected = expected + bias.double()
        y = scale_and_add(unscaled, given_scales, given_bias, m, n, dtype)
        assert y.dtype == dtype
        # Three roundings of float32 at most 230, then one to the result's dtype.
        torch.testing.assert_close(y.double(), expected, rtol=step, atol=3 * 230 * 2**-24)
