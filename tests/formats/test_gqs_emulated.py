"""The GPU kernels' own sources, run thread by thread on a CPU: layout, Stream-K and barriers."""

import pytest
import torch

from semisparse.formats import get_format
from semisparse.formats.gqs import activations, cuda, unpack
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from semisparse.quant.symmetric import quantise_rows
from tests.formats import emulated
from tests.formats.cases import build, random
from tests.formats.test_contract import check_product, random_operands
from tests.formats.test_gqs import as_multiplied

GQS = get_format("gqs")

pytestmark = [
    pytest.mark.skipif(emulated.COMPILER is None, reason="no g++ to compile the emulation"),
    pytest.mark.usefixtures("emulated_kernels", "nan_filled_memory"),
]


@pytest.fixture
def emulated_kernels(monkeypatch: pytest.MonkeyPatch):
    emulated.stand_in(monkeypatch, activations, cuda, unpack)
    for module in (activations, unpack):
        monkeypatch.setattr(module, "device_facts", lambda _: emulated.hopper())
    _forget_kernels()
    yield
    _forget_kernels()


def _forget_kernels() -> None:
    cuda._decode_kernel.cache_clear()
    unpack._unpack_kernel.cache_clear()
    activations._round_kernel.cache_clear()


@pytest.mark.parametrize(
    ("kind", "dtype", "m", "n", "k", "pattern"),
    [
        ("w4", torch.float16, 1, 40, 1024, "g16@50%"),
        ("w4", torch.bfloat16, 13, 23, 684, "g16@50%"),
        ("w8", torch.float16, 9, 16, 1400, "g16@0%"),
        ("w8", torch.bfloat16, 5, 70, 200, "g16@80%"),
        ("w4", torch.float16, 2, 33, 172, "g16@50%"),
        ("w4", torch.float16, 3, 20, 512, "g16@0%"),
        ("w4", torch.bfloat16, 1, 36, 512, "g16@50%"),
        ("w4", torch.bfloat16, 4, 17, 300, "g16@50%"),
        ("w4a8", torch.float16, 1, 40, 1024, "g16@50%"),
        ("w4a8", torch.bfloat16, 3, 23, 172, "g16@50%"),
        ("w4a8", torch.float16, 4, 16, 512, "g16@0%"),
        ("w4a8", torch.float16, 6, 20, 300, "g16@50%"),
        ("w8", torch.float16, 1, 67, 512, "g16@0%"),
        ("w4a8", torch.float16, 1, 130, 1024, "g16@80%"),
        ("w4", torch.float16, 1, 120, 700, "g16@30%"),
    ],
)
def test_any_division_of_the_work(monkeypatch, kind: str, dtype: torch.dtype, m: int, n: int, k: int, pattern: str):
    """From one block for all tiles to one for each, whose warps share several or have it alone."""
    weight = build(parse_pattern(pattern), random, n, k).to(dtype)
    weight[3] = 0
    packed = GQS.pack(weight, pattern, kind=kind)
    x, bias = random_operands(packed, m, dtype, "cpu")
    multiplied = as_multiplied(x, packed, torch.float64 if m <= 2 else dtype)
    monkeypatch.setattr(cuda, "WARPS", 2)
    monkeypatch.setattr(cuda, "PROCESSOR_WARPS", 1)  # a block of a processor
    for blocks, own in ((1, 0), (2, 0), (4, 0), (99, 0), (99, 1)):
        monkeypatch.setattr(cuda, "OWN_TILES", own)
        monkeypatch.setattr(cuda, "device_facts", lambda _, blocks=blocks: emulated.hopper(blocks))
        results = []
        for emulated.adverse[0] in (False, True):
            results.append(cuda.prepare_decode(problem_of(x, packed))(x, packed, bias))
            check_product(results[-1], x, packed, bias, multiplied)
        assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [100, 256])
def test_tokens_are_rounded_as_elsewhere(monkeypatch: pytest.MonkeyPatch, k: int, dtype: torch.dtype):
    """Weights of one 15 a row show the codes of x: halves to even, scales of each token, zeros as they are."""
    monkeypatch.setattr(cuda, "device_facts", lambda _: emulated.hopper(2))
    packed = GQS.pack(15 * torch.eye(k).to(dtype), "g16@0%", kind="w4a8")
    halves = torch.arange(k) % 64 - 31.5
    halves[3] = 127
    for tokens in (torch.stack((halves, halves * 3)), torch.stack((torch.zeros(k), 1e-3 * halves)), halves[None]):
        x = tokens.to(dtype)
        codes, scale = quantise_rows(x, torch.int8)
        found = cuda.prepare_decode(problem_of(x, packed))(x, packed, None)
        assert torch.equal(found, (codes.float() * scale[:, None] * 15).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("kind", "n", "k", "pattern"),
    [
        ("w4", 40, 300, "g16@50%"),
        ("w8", 17, 172, "g16@0%"),
        ("w3", 5, 700, "g128@30%"),
        ("w2", 16, 130, "g4@50%"),
        ("w4", 1, 33, "g8@50%"),
        ("w8", 3, 50, "g4@80%"),
        ("w3", 18, 64, "g32@50%"),
    ],
)
def test_the_weight_unpacked_for_many_tokens(kind: str, n: int, k: int, pattern: str, dtype: torch.dtype):
    weight = build(parse_pattern(pattern), random, n, k).to(dtype)
    weight[-1] = 0
    packed = GQS.pack(weight, pattern, kind=kind)
    found = unpack.prepare_unpack(problem_of(torch.empty(0, k), packed))(packed)
    assert torch.equal(found, packed.unpack())
    assert found.stride() == (-(-k // 8) * 8, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 33), (5, 700), (2, 1400)])
def test_tokens_rounded_in_one_launch_have_the_bits_of_the_reference(m: int, k: int, dtype: torch.dtype):
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(dtype)
    x[m // 2, : k // 2] *= 100
    x[-1] *= m == 1
    assert torch.equal(activations.rounded_on_gpu(x), activations.rounded(x, dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_stays_so(bad: float):
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(1)).half()
    x[1, 69] = bad
    finite = activations.rounded_on_gpu(x).isfinite()
    assert finite[[0, 2]].all()
    assert not finite[1, 69]
