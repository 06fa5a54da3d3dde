"""`gemm`: its sources in the emulator, with every kind, size of groups and schedule; on a GPU, real launches."""

import pytest
import torch

from semisparse.formats.gqs.cuda import gemm
from semisparse.formats.gqs.cuda.gemm_schedule import GemmSchedule
from semisparse.formats.kernel import Problem
from semisparse.formats.product import problem_of
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.gqs.reference import (
    GQS,
    check,
    check_operands_of_any_layout,
    check_product,
    operands,
    packed_weight,
)

HALF, BFLOAT = torch.float16, torch.bfloat16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the gemm kernel: no GPU here")

KINDS_AND_SIZES = [
    (kind, (HALF, BFLOAT)[(i + j) % 2], size)
    for i, kind in enumerate(("w4", "w8", "w3", "w2"))
    for j, size in enumerate((16, 8, 32, 64, 128))
]

SCHEDULES = [  # kind, dtype, m, n, k, pattern, then the fields of GemmSchedule in their order
    ("w4", HALF, 20, 100, 552, "g16@50%", (8, 2, 2, 2, 32, 2, 3, 1, 2)),  # three m tiles, two row CTAs
    ("w3", HALF, 3, 16, 2600, "g8@50%", (8, 1, 1, 1, 64, 2, 2, 1, 1)),  # three windows of headers
    ("w3", BFLOAT, 9, 40, 2600, "g8@80%", (16, 1, 2, 2, 32, 4, 3, 1, 1)),  # two windows, and what lies past K
    ("w4", BFLOAT, 13, 33, 1000, "g128@50%", (16, 1, 1, 2, 64, 1, 3, 1, 3)),  # K is cut inside of a chunk
    ("w8", BFLOAT, 7, 50, 1496, "g128@50%", (8, 1, 4, 1, 32, 2, 4, 1, 2)),  # warps with nothing to multiply
    ("w2", HALF, 5, 20, 136, "g64@50%", (8, 4, 1, 1, 32, 2, 2, 1, 2)),  # warps past the last row tile
    ("w2", BFLOAT, 25, 36, 700, "g32@30%", (24, 2, 2, 1, 64, 2, 3, 1, 1)),  # K is no multiple of 8
    ("w8", HALF, 11, 67, 513, "g16@0%", (8, 2, 1, 1, 64, 2, 2, 1, 5)),  # neither is this, and K is split
    ("w4", HALF, 50, 48, 512, "g16@50%", (48, 1, 2, 1, 32, 1, 2, 1, 1)),
    ("w4a8", HALF, 5, 40, 512, "g16@50%", (8, 1, 2, 2, 32, 2, 3, 1, 1)),
]


@needs_compiler
@pytest.mark.parametrize(("kind", "dtype", "size"), mostly_slow(KINDS_AND_SIZES, 0))
def test_every_kind_and_size(emulated, monkeypatch, kind: str, dtype: torch.dtype, size: int):
    """Weights are those of `Packed.unpack`: a token that has a single 1 shows a column of them."""
    emulate(monkeypatch, 2)
    k = 4 * size + 56
    packed = packed_weight(21, k, f"g{size}@30%", dtype, kind=kind)
    weight, x = packed.unpack(), torch.zeros(16, k, dtype=dtype)
    for i, column in enumerate(range(0, k, -(-k // 16))):
        x[i, column] = 1
    y = gemm.prepare(problem_of(x, packed))(x, packed, None)
    assert torch.equal(y, x @ weight.T)
    x, bias = operands(packed, 16)
    check_product(gemm.prepare(problem_of(x, packed))(x, packed, bias), x, packed, bias)


@needs_compiler
@pytest.mark.parametrize(("kind", "dtype", "m", "n", "k", "pattern", "schedule"), mostly_slow(SCHEDULES, 0))
def test_every_schedule(emulated, kind, dtype, m, n, k, pattern, schedule):
    packed = packed_weight(n, k, pattern, dtype, kind=kind)
    x, bias = operands(packed, m)
    product = gemm.prepare(problem_of(x, packed), GemmSchedule(*schedule))
    y = product(x, packed, bias)
    check_product(y, x, packed, bias)
    check_product(product(x, packed, None), x, packed, None)
    assert torch.equal(y, product(x, packed, bias))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("splits", "capability"), [(1, (9, 0)), (2, (8, 0))])
def test_chunks_and_rows_that_keep_nothing(emulated, monkeypatch, splits: int, capability: tuple[int, int]):
    """M and the number of kept groups are read at each call; a weight may keep none."""
    emulate(monkeypatch, capability=capability)
    weight = torch.randn(50, 512, generator=torch.Generator().manual_seed(1)).half()
    weight[:16, 64:192] = 0
    weight[16:32] = 0
    weight[:, 448:] = 0
    some, none = GQS.pack(weight, "g16@0%", kind="w4"), GQS.pack(weight * 0, "g16@0%", kind="w4")
    problem = Problem(8, GQS.structure(some.spec), HALF, torch.device("cpu"))
    product = gemm.prepare(problem, GemmSchedule(8, 2, 2, 1, 32, 2, 3, 1, splits))
    for packed in (some, none):
        for m in (5, 8):
            x, bias = operands(packed, m)
            check(product(x, packed, bias), x, packed.unpack(), bias)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("k", "dtype", "m"), [(300, BFLOAT, 9), (512, HALF, 3)])
def test_operands_of_any_layout(emulated, k: int, dtype: torch.dtype, m: int):
    """x strided or not aligned to 16 bytes, tensors that begin anywhere, bias of another dtype."""
    check_operands_of_any_layout(gemm.prepare, k, dtype, m)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
def test_what_is_infinite_stays_in_its_token(emulated, splits: int):
    """A warp whose range of K is shorter than the others' multiplies zeros, not the next part of x: 0 * inf is NaN."""
    packed = GQS.pack(torch.ones(16, 700).half(), "g16@0%", kind="w4")
    x = torch.zeros(3, 700).half()
    x[1, 400] = torch.inf  # the second part's first k-tile, one after the first part's three
    product = gemm.prepare(problem_of(x, packed), GemmSchedule(8, 1, 2, 1, 32, 2, 2, 1, splits))
    assert torch.equal(product(x, packed, None)[:, 0], torch.tensor([0.0, torch.inf, 0.0]).half())


@pytest.mark.parametrize(
    ("dtype", "pattern", "reason"),
    [
        (torch.float32, "g16@50%", "both float16 or both bfloat16"),
        (BFLOAT, "g16@50%", "both float16 or both bfloat16, got torch.bfloat16 and torch.float16"),
        (HALF, "g4@50%", "takes groups of 8, 16, 32, 64, 128, this weight has groups of 4"),
    ],
)
def test_what_the_kernel_refuses(monkeypatch, dtype, pattern, reason):
    emulate(monkeypatch)
    packed = packed_weight(20, 64, pattern, HALF, kind="w4")
    assert reason in gemm.refusal(problem_of(torch.empty(1, 64, dtype=dtype), packed))


@needs_gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_a_gpu(schedule):
    kind, dtype, m, n, k, pattern, fields = schedule
    packed = packed_weight(n, k, pattern, dtype, kind=kind).to("cuda")
    x, bias = operands(packed, m, device="cuda")
    product = gemm.prepare(problem_of(x, packed), GemmSchedule(*fields))
    y = product(x, packed, bias)
    check_product(y, x, packed, bias)
    assert all(torch.equal(y, product(x, packed, bias)) for _ in range(20))
