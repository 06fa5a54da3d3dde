"""The CUDA kernels' own sources, thread by thread on a CPU, against float64: indices, copies, barriers.

Reads past the end of a tensor are not seen here: `make test-gpu SANITIZE=memcheck` sees them.
"""

import itertools

import pytest
import torch

from semisparse.formats import get_format
from semisparse.formats.base import replace_tensors
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm import cuda, decode_tensor, tiled
from semisparse.formats.vector_nm.tiling import SHARED_LIMIT, SIMT, TENSOR, Shape, Tiling, tile
from semisparse.patterns import parse_pattern
from tests.formats import emulated
from tests.formats.cases import build, random
from tests.formats.test_contract import check_product, random_operands

VECTOR_NM = get_format("vector_nm")

pytestmark = [
    pytest.mark.skipif(emulated.COMPILER is None, reason="no g++ to compile the emulation"),
    pytest.mark.usefixtures("emulated_kernels", "nan_filled_memory"),
]


@pytest.fixture
def emulated_kernels(monkeypatch: pytest.MonkeyPatch):
    emulated.stand_in(monkeypatch, cuda, decode_tensor, tiled)
    for module in (decode_tensor, tiled):
        monkeypatch.setattr(module, "shared_limit", lambda device: SHARED_LIMIT)


def multiply(prepare, x, packed, bias, *options):
    return prepare(problem_of(x, packed), *options)(x, packed, bias)


def check(prepare, pattern: str, n: int, k: int, m: int, dtype: torch.dtype, *options):
    """Compare in both orders of threads and copies, with and without a bias, and the two orders with each other."""
    packed = VECTOR_NM.pack(build(parse_pattern(pattern), random, n, k).to(dtype), pattern)
    x, bias = random_operands(packed, m, dtype, "cpu")
    results = []
    for emulated.adverse[0], given in itertools.product((False, True), (None, bias)):
        results.append(multiply(prepare, x, packed, given, *options))
        check_product(results[-1], x, packed, given)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


def tiling(pattern: str, shape: Shape, dtype: torch.dtype, packed: bool) -> Tiling:
    return tile(parse_pattern(pattern), shape, dtype.itemsize, packed)


@pytest.mark.parametrize(
    ("pattern", "shape", "packed", "sizes"),
    [
        ("16:32v32", SIMT[-1], False, (70, 100, 40)),
        ("4:32v16", SIMT[1], True, (129, 101, 65)),
        ("5:7v4", SIMT[1], True, (70, 50, 3)),
        ("12:16v128", SIMT[1], False, (150, 33, 64)),
        ("8:32v64", SIMT[0], True, (130, 172, 5)),
    ],
)
def test_simt(pattern: str, shape: Shape, packed: bool, sizes: tuple[int, int, int]):
    chosen = tiling(pattern, shape, torch.float32, packed)
    check(tiled.prepare_tiled, pattern, *sizes, torch.float32, chosen)


@pytest.mark.parametrize(
    ("pattern", "shape", "packed", "sizes", "dtype"),
    [
        ("16:32v32", TENSOR[-1], False, (70, 100, 40), torch.float16),
        ("4:32v16", TENSOR[-1], True, (65, 101, 65), torch.bfloat16),
        ("8:16v8", TENSOR[-1], False, (33, 33, 1), torch.bfloat16),
        ("7:32v128", TENSOR[-1], True, (140, 172, 17), torch.float16),
        ("16:32v32", TENSOR[1], False, (100, 64, 9), torch.float16),
    ],
)
def test_tensor(pattern: str, shape: Shape, packed: bool, sizes: tuple[int, int, int], dtype: torch.dtype):
    chosen = tiling(pattern, shape, dtype, packed)
    check(tiled.prepare_tiled, pattern, *sizes, dtype, chosen)


@pytest.mark.parametrize(
    ("pattern", "sizes", "dtype", "panel"),
    [
        ("16:32v32", (33, 172, 1), torch.float16, cuda.PANEL_BYTES),
        ("5:7v8", (9, 50, 3), torch.bfloat16, cuda.PANEL_BYTES),
        ("4:32v128", (130, 333, 11), torch.bfloat16, 2048),
    ],
)
def test_decode(pattern: str, sizes: tuple[int, int, int], dtype: torch.dtype, panel: int, monkeypatch):
    monkeypatch.setattr(cuda, "PANEL_BYTES", panel)
    check(cuda.prepare_decode, pattern, *sizes, dtype)


@pytest.mark.parametrize(
    ("pattern", "sizes", "dtype", "division", "limit"),
    [
        ("16:32v32", (70, 172, 1), torch.float16, (4, 2), SHARED_LIMIT),
        ("4:32v16", (33, 333, 8), torch.bfloat16, (2, 3), SHARED_LIMIT),
        ("5:7v64", (130, 100, 9), torch.float16, (2, 1), SHARED_LIMIT),
        ("16:32v32", (100, 512, 3), torch.bfloat16, (4, 2), 24 << 10),  # 2 panels
        ("5:7v128", (130, 777, 11), torch.bfloat16, (4, 2), 33000),  # 4 panels, x of no whole units
        ("12:32v32", (70, 1600, 1), torch.float16, (2, 2), 10 << 10),  # 2 panels of one token
    ],
)
def test_decode_on_tensor_cores(pattern, sizes, dtype, division, limit, monkeypatch):
    """One block of threads takes all strips: panels go back and forth between them."""
    monkeypatch.setattr(decode_tensor, "shared_limit", lambda device: limit)
    tokens = next(count for count in decode_tensor.TOKENS if count >= sizes[2])
    build = decode_tensor.Build(parse_pattern(pattern), dtype, tokens, *division)
    check(decode_tensor.prepare_build, pattern, *sizes, dtype, build)


@pytest.mark.parametrize(
    ("pattern", "n", "k", "dtype"),
    [
        ("16:32v32", 70, 172, torch.float16),
        ("5:7v1", 33, 100, torch.float32),
        ("2:5v3", 65, 33, torch.bfloat16),
        ("40:200v100", 150, 333, torch.float16),
        ("4:32v16", 40, 130, torch.float32),
    ],
)
def test_unpack(pattern: str, n: int, k: int, dtype: torch.dtype):
    packed = VECTOR_NM.pack(build(parse_pattern(pattern), random, n, k).to(dtype), pattern)
    for emulated.adverse[0] in (False, True):
        unpack = cuda.prepare_unpack(problem_of(torch.empty(1, k, dtype=dtype), packed))
        assert torch.equal(unpack(packed), packed.unpack())


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_any_number_of_buffers(stages: int):
    """One buffer is the paper's V2 (V1 with whole windows), more are its V3."""
    chosen = Tiling(SIMT[-1], 8, 8, 32, stages, True, 4)
    check(tiled.prepare_tiled, "3:8v8", 33, 90, 3, torch.float32, chosen)


@pytest.mark.parametrize(
    ("prepare", "dtype"),
    [(cuda.prepare_decode, torch.float16), (decode_tensor.prepare, torch.float16), (tiled.prepare, torch.float32)],
)
def test_values_that_begin_anywhere(prepare, dtype: torch.dtype):
    """A view into another tensor may begin where no 16-byte load can."""
    packed = VECTOR_NM.pack(build(parse_pattern("16:32v32"), random, 33, 172).to(dtype), "16:32v32")
    values = packed.tensors["values"]
    shifted = torch.empty(values.numel() + 1, dtype=dtype)[1:].view_as(values).copy_(values)
    assert shifted.data_ptr() % 16
    moved = replace_tensors(packed, {**packed.tensors, "values": shifted})
    x, bias = random_operands(packed, 1, dtype, "cpu")
    check_product(multiply(prepare, x, moved, bias), x, packed, bias)


@pytest.mark.parametrize(
    ("prepare", "dtype"),
    [(cuda.prepare_decode, torch.float16), (decode_tensor.prepare, torch.float16), (tiled.prepare, torch.float32)],
)
def test_an_infinity_stays_in_its_token(prepare, dtype: torch.dtype):
    """What is stored past column K must not meet the next token's first columns."""
    packed = VECTOR_NM.pack(build(parse_pattern("16:32v32"), random, 33, 165).to(dtype), "16:32v32")
    x, _ = random_operands(packed, 2, dtype, "cpu")
    x[1] = torch.inf
    assert multiply(prepare, x, packed, None)[0].isfinite().all()
