"""`full`: its source in the emulator, with every kind, size of groups and schedule; on a GPU, real launches."""

from dataclasses import replace

import pytest
import torch

from semisparse.formats import linear
from semisparse.formats.base import Packed
from semisparse.formats.gqs.cuda import full
from semisparse.formats.gqs.cuda.full_schedule import FullSchedule, can_multiply_codes
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from semisparse.quant.group import KINDS
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.fusion import check_fused
from tests.formats.gqs.reference import GQS, check, operands, quantised, stored_weight

HALF, BFLOAT = torch.float16, torch.bfloat16
KERNEL = next(kernel for kernel in GQS.kernels if kernel.name == "full")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel full: no GPU here")

SCHEDULES = [  # kind, dtype, group size, m, n, k, then the fields of FullSchedule in their order
    ("w4", HALF, 128, 5, 48, 648, (8, 2, 2, 1, 3, 1, True)),  # warps past the last row tile; K ends inside a group
    ("w4", BFLOAT, 128, 11, 80, 1408, (16, 2, 2, 2, 2, 1, True)),  # three groups in the last chunk
    ("w3", HALF, 128, 3, 16, 256, (8, 1, 4, 1, 4, 1, True)),  # more warps than k-tiles, fewer than stages
    ("w3", BFLOAT, 128, 9, 32, 896, (16, 1, 1, 2, 3, 1, True)),
    ("w2", HALF, 64, 8, 64, 1152, (8, 4, 1, 1, 4, 1, True)),  # two groups in the last chunk
    ("w2", BFLOAT, 64, 16, 32, 384, (8, 2, 1, 1, 3, 1, True)),  # two m tiles
    ("w2", HALF, 128, 2, 16, 512, (8, 1, 1, 1, 3, 1, True)),
    ("w4", HALF, 64, 7, 32, 384, (8, 1, 2, 2, 3, 1, True)),
    ("w4", BFLOAT, 64, 7, 32, 384, (8, 1, 2, 2, 3, 1, True)),
    ("w4", HALF, 32, 20, 32, 640, (32, 2, 2, 1, 3, 1, False)),
    ("w4", BFLOAT, 16, 33, 48, 384, (64, 3, 1, 1, 2, 1, False)),
    ("w4", HALF, 16, 40, 32, 640, (16, 2, 1, 1, 3, 1, False)),
    ("w3", HALF, 64, 4, 32, 384, (8, 2, 1, 1, 3, 1, False)),
    ("w3", BFLOAT, 32, 12, 32, 384, (16, 1, 3, 2, 3, 1, False)),
    ("w2", BFLOAT, 32, 12, 32, 256, (16, 1, 2, 2, 3, 1, False)),
    ("w2", HALF, 16, 6, 16, 384, (8, 1, 1, 1, 3, 1, False)),
    ("w8", HALF, 128, 24, 32, 520, (24, 1, 2, 2, 3, 1, False)),
    ("w8", BFLOAT, 64, 6, 32, 640, (8, 1, 2, 1, 3, 1, False)),
    ("w8", HALF, 32, 6, 32, 256, (8, 1, 2, 1, 3, 1, False)),
    ("w8", BFLOAT, 16, 6, 32, 256, (8, 2, 1, 1, 3, 1, False)),
    ("w4", BFLOAT, 128, 25, 64, 384, (32, 2, 1, 2, 3, 1, True)),
    ("w4a8", HALF, 128, 5, 32, 512, (8, 1, 2, 1, 3, 1, True)),
    ("w4", HALF, 128, 5, 48, 1928, (8, 2, 1, 1, 3, 1, True, 0, 4)),  # three spans of x and a part of one
    ("w4", BFLOAT, 64, 12, 64, 1664, (16, 1, 2, 2, 4, 1, True, 0, 2)),
    ("w2", HALF, 32, 30, 32, 1280, (32, 2, 1, 1, 2, 1, False, 0, 8)),
    ("w4", HALF, 128, 1, 48, 648, (8, 2, 2, 1, 3, 1, True, 1)),  # all of x in shared memory
    ("w4", BFLOAT, 128, 1, 32, 896, (8, 1, 3, 2, 3, 1, True, 2)),
    ("w2", HALF, 64, 7, 32, 384, (8, 1, 2, 2, 3, 1, True, 8)),
    ("w4", HALF, 32, 3, 64, 384, (8, 2, 1, 1, 3, 1, False, 4)),
]


def full_weight(n: int, k: int, size: int, dtype: torch.dtype, kind: str) -> Packed:
    """Pack a random weight [N, K] of which no group is zero."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 1000 + k))
    return GQS.pack(weight.to(dtype), f"g{size}@0%", kind=kind)


def check_product(y, x, packed: Packed, bias, codes: bool) -> None:
    """Compare with the weight as it is stored if codes are multiplied, else as it is unpacked."""
    multiplied = quantised(x).float().to(x.dtype) if packed.params["kind"] == "w4a8" else x
    check(y, multiplied, stored_weight(packed) if codes else packed.unpack(), bias)


@needs_compiler
@pytest.mark.parametrize(("kind", "dtype", "size", "m", "n", "k", "schedule"), mostly_slow(SCHEDULES, 0, 10))
def test_every_schedule(emulated, kind, dtype, size, m, n, k, schedule):
    packed = full_weight(n, k, size, dtype, kind)
    x, bias = operands(packed, m)
    product = full.prepare(problem_of(x, packed), FullSchedule(*schedule))
    y = product(x, packed, bias)
    check_product(y, x, packed, bias, schedule[6])
    check_product(product(x, packed, None), x, packed, None, schedule[6])
    assert torch.equal(y, product(x, packed, bias))


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "dtype", "size", "m", "n", "k", "prologue", "epilogue"),
    mostly_slow(
        [
            ("w4", HALF, 128, 1, 96, 648, "rms_norm", "silu_mul"),
            ("w4", BFLOAT, 128, 2, 64, 1408, "rms_norm", "none"),
            ("w2", HALF, 64, 2, 160, 384, "none", "add"),
            ("w4", BFLOAT, 32, 1, 64, 640, "none", "silu_mul"),
            ("w8", HALF, 128, 1, 48, 256, "rms_norm", "add"),
        ],
        0,
    ),
)
def test_fused(emulated, kind, dtype, size, m, n, k, prologue, epilogue):
    packed = full_weight(n, k, size, dtype, kind)
    codes = can_multiply_codes(KINDS[kind], size)
    weight = stored_weight(packed) if codes else packed.unpack()
    check_fused(KERNEL, packed, weight, m, prologue, epilogue)


def test_what_is_not_fused(monkeypatch):
    emulate(monkeypatch)
    packed = full_weight(48, 256, 128, HALF, "w4")
    problem = problem_of(torch.empty(1, 256).half(), packed)
    assert full.fuse(replace(problem, m=8, prologue="rms_norm")) is None
    assert full.fuse(replace(problem, epilogue="silu_mul")) is None  # three row tiles
    quantised_x = full_weight(48, 256, 128, HALF, "w4a8")
    assert full.fuse(replace(problem_of(torch.empty(1, 256).half(), quantised_x), epilogue="add")) is None


@pytest.mark.parametrize(
    ("dtype", "n", "k", "pattern", "kind", "reason"),
    [
        (BFLOAT, 32, 256, "g128@0%", "w4", "both float16 or both bfloat16, got torch.bfloat16 and torch.float16"),
        (HALF, 24, 256, "g128@0%", "w4", "multiples of 16"),
        (HALF, 32, 252, "g128@0%", "w4", "multiples of 8"),
        (HALF, 32, 192, "g32@0%", "w4", "fewer than 128 columns must fill whole tiles"),
        (HALF, 32, 256, "g8@0%", "w4", "this weight has groups of 8"),
        (HALF, 32, 256, "g16@0%", "w3", "this weight has groups of 16"),
        (HALF, 32, 256, "g128@50%", "w4", "no group is dropped"),
    ],
)
def test_what_the_kernel_refuses(monkeypatch, dtype, n, k, pattern, kind, reason):
    emulate(monkeypatch)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)).half()
    packed = GQS.pack(weight * parse_pattern(pattern).mask(weight.abs()), pattern, kind=kind)
    assert reason in full.refusal(problem_of(torch.empty(1, k, dtype=dtype), packed))


def test_a_zero_group_is_dropped_whatever_the_pattern(monkeypatch):
    emulate(monkeypatch)
    weight = torch.ones(32, 256).half()
    weight[5, 128:] = 0
    packed = GQS.pack(weight, "g128@0%", kind="w4")
    assert "all zero" in full.refusal(problem_of(torch.empty(1, 256).half(), packed))


@needs_gpu
@pytest.mark.parametrize("m", [1, 7, 16, 40, 64])
@pytest.mark.parametrize(
    ("kind", "dtype", "size", "n", "k"),
    [
        ("w4", HALF, 128, 4096, 4096),
        ("w4", BFLOAT, 128, 720, 11008),
        ("w4", BFLOAT, 64, 2048, 2944),
        ("w4", HALF, 16, 512, 1024),
        ("w3", HALF, 128, 1024, 2432),
        ("w3", BFLOAT, 64, 336, 1920),
        ("w2", HALF, 64, 4096, 11008),
        ("w2", BFLOAT, 64, 1024, 4096),
        ("w8", BFLOAT, 128, 1008, 2600),
        ("w8", HALF, 32, 2048, 4096),
    ],
)
def test_on_a_gpu(kind: str, dtype: torch.dtype, size: int, n: int, k: int, m: int, nan_filled_memory):
    packed = full_weight(n, k, size, dtype, kind).to("cuda")
    x, bias = operands(packed, m, device="cuda")
    y = linear(x, packed, bias, kernel="full")
    # Whether codes are multiplied depends on the schedule: the error is that of either weight.
    expected = x.double() @ stored_weight(packed).double().T + bias.double()
    assert (y.double() - expected).norm() <= 2e-3 * expected.norm() * (4 if dtype == BFLOAT else 1)
    assert torch.equal(y, linear(x, packed, bias, kernel="full"))
    assert torch.equal(y, linear(x * 1, packed, bias, kernel="full"))  # after a kernel that it overlaps
    unaligned = torch.cat((x[0, :1], x.flatten()))[1:].view(x.shape)
    assert torch.equal(y, linear(unaligned, packed, bias, kernel="full"))


@needs_gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_a_gpu(schedule):
    kind, dtype, size, m, n, k, fields = schedule
    packed = full_weight(n, k, size, dtype, kind).to("cuda")
    x, bias = operands(packed, m, device="cuda")
    product = full.prepare(problem_of(x, packed), FullSchedule(*fields))
    y = product(x, packed, bias)
    check_product(y, x, packed, bias, fields[6])
    assert all(torch.equal(y, product(x, packed, bias)) for _ in range(20))
