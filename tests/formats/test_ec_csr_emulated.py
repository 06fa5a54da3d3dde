"""The GPU kernels' own sources of ec_csr, run thread by thread on a CPU: tiles of any shape, lists out of step."""

import pytest
import torch
from torch import Tensor

from semisparse.formats import Packed, get_format
from semisparse.formats.ec_csr import cuda, layout, tiles, unpack
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from tests.formats import emulated
from tests.formats.cases import build, random
from tests.formats.test_contract import check_product, random_operands

EC_CSR = get_format("ec_csr")

pytestmark = [
    pytest.mark.skipif(emulated.COMPILER is None, reason="no g++ to compile the emulation"),
    pytest.mark.usefixtures("emulated_kernels", "nan_filled_memory"),
]


@pytest.fixture
def emulated_kernels(monkeypatch: pytest.MonkeyPatch):
    emulated.stand_in(monkeypatch, cuda, tiles, unpack)
    for module in (cuda, tiles):
        monkeypatch.setattr(module, "shared_limit", lambda _: 227 << 10)
    _forget_kernels()
    yield
    _forget_kernels()


def _forget_kernels() -> None:
    cuda._banks_kernel.cache_clear()
    tiles._kernels.cache_clear()
    unpack._kernel.cache_clear()


def out_of_step(n: int, k: int) -> Tensor:
    """Weights that lanes have in rows far apart: lane 3 in all rows, lane 4 in the last two, others in every third."""
    weight = torch.zeros(n, k)
    weight[:, 3::32] = 1.5
    weight[-2:, 4::32] = -0.75
    weight[::3, 5::7] = 2.0
    return weight


def packed_weight(kind: str, n: int, k: int, pattern: str, dtype: torch.dtype, bits: int) -> Packed:
    weight = out_of_step(n, k) if kind == "out of step" else build(parse_pattern(pattern), random, n, k)
    return EC_CSR.pack(weight.to(dtype), pattern, delta_bits=bits)


@pytest.mark.parametrize(
    ("kind", "n", "k", "pattern", "dtype", "bits"),
    [
        ("random", 40, 300, "70%", torch.float16, 4),
        ("random", 70, 430, "50%", torch.bfloat16, 8),
        ("random", 33, 172, "90%", torch.float32, 8),
        ("random", 1, 33, "0%", torch.float32, 4),
        ("random", 65, 900, "99%", torch.float16, 4),
        ("out of step", 100, 320, "0%", torch.float16, 8),
        ("out of step", 64, 700, "0%", torch.bfloat16, 4),
    ],
)
def test_the_weight_unpacked_for_many_tokens(monkeypatch, kind, n, k, pattern, dtype, bits):
    """In tiles of whole panels, and so small that most segments reach none."""
    for processors, tile_bytes in ((132, 64 << 10), (1, 4096)):
        monkeypatch.setattr(layout, "PROCESSORS", processors)
        monkeypatch.setattr(unpack, "TILE_BYTES", tile_bytes)
        unpack._kernel.cache_clear()
        packed = packed_weight(kind, n, k, pattern, dtype, bits)
        for emulated.adverse[0] in (False, True):
            found = unpack.prepare_unpack(problem_of(torch.empty(0, k), packed))(packed)
            assert torch.equal(found, packed.unpack())
            assert found.stride() == (-(-k // 32) * 32, 1)


@pytest.mark.parametrize(
    ("group", "kind", "m", "n", "k", "pattern", "dtype", "bits"),
    [
        (8, "random", 16, 40, 300, "70%", torch.float16, 4),
        (4, "random", 5, 40, 430, "50%", torch.bfloat16, 8),
        (8, "random", 9, 1, 33, "0%", torch.float16, 8),
        (2, "random", 3, 20, 700, "90%", torch.float16, 4),
        (2, "out of step", 13, 100, 320, "0%", torch.float16, 4),
        (4, "out of step", 8, 64, 512, "0%", torch.bfloat16, 8),
    ],
)
def test_tokens_in_one_pass(monkeypatch, group, kind, m, n, k, pattern, dtype, bits):
    monkeypatch.setattr(tiles, "SHARES", ((group, 1),))
    monkeypatch.setattr(layout, "PROCESSORS", 2)
    packed = packed_weight(kind, n, k, pattern, dtype, bits)
    x, bias = random_operands(packed, m, dtype, "cpu")
    results = []
    for emulated.adverse[0] in (False, True):
        results.append(tiles.prepare_tiles(problem_of(x, packed))(x, packed, bias))
        check_product(results[-1], x, packed, bias)
    assert torch.equal(*results)


@pytest.mark.parametrize(("each", "expected"), [(1, 2), (2, 2), (3, 3), (4, 2), (5, 2), (6, 2), (9, 3)])
def test_blocks_of_a_processor_leave_few_places_empty(each: int, expected: int):
    params = packed_weight("random", 40, 300, "70%", torch.float16, 4).params
    assert cuda._resident_blocks(each, params, torch.float16, 1, torch.device("cpu")) == expected
    assert cuda._resident_blocks(3, {**params, "k": 16384}, torch.float16, 1, torch.device("cpu")) == 2


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "pattern", "dtype", "bits"),
    [
        ("random", 1, 40, 300, "70%", torch.float16, 4),
        ("random", 1, 65, 2000, "50%", torch.float16, 8),
        ("random", 2, 33, 500, "50%", torch.float32, 4),
        ("random", 7, 1, 33, "0%", torch.float32, 8),
        ("out of step", 3, 100, 1000, "0%", torch.bfloat16, 4),
    ],
)
def test_few_tokens(monkeypatch, kind, m, n, k, pattern, dtype, bits):
    monkeypatch.setattr(layout, "PROCESSORS", 2)
    packed = packed_weight(kind, n, k, pattern, dtype, bits)
    x, bias = random_operands(packed, m, dtype, "cpu")
    results = []
    for processors in (1, 132):
        monkeypatch.setattr(cuda, "device_facts", lambda _, processors=processors: emulated.hopper(processors))
        for emulated.adverse[0] in (False, True):
            results.append(cuda.prepare_banks(problem_of(x, packed))(x, packed, bias))
    check_product(results[0], x, packed, bias)
    assert all(torch.equal(results[0], other) for other in results)
