"""The decode kernels on the emulator: ragged shapes, several panels of x, several row tiles per CTA."""

from dataclasses import replace

import pytest
import torch

from semisparse.formats import Packed, Problem
from semisparse.formats.kernel import Product
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cuda import decode, decode_schedule, decode_tensor
from semisparse.formats.vector_nm.cuda.decode_schedule import DecodeTensorSchedule
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, emulated, needs_compiler
from tests.formats.fusion import check_fused
from tests.formats.vector_nm.reference import VECTOR_NM, check, check_kernel, emulate_gpu, operands, pack

__all__ = ["emulated"]
pytestmark = needs_compiler

DECODE_TENSOR = next(kernel for kernel in VECTOR_NM.kernels if kernel.name == "decode_tensor")


@pytest.mark.parametrize(
    ("pattern", "n", "k", "m", "dtype", "panel"),
    mostly_slow(
        [
            ("5:7v8", 9, 50, 1, torch.float16, decode_schedule.PANEL_BYTES),
            ("4:32v128", 130, 336, 11, torch.bfloat16, 2048),
        ],
        1,
    ),
)
def test_decode(emulated, monkeypatch, pattern: str, n: int, k: int, m: int, dtype: torch.dtype, panel: int):
    monkeypatch.setattr(decode_schedule, "PANEL_BYTES", panel)
    check_kernel(decode.prepare, pack(pattern, n, k, dtype), m)


@pytest.mark.parametrize(
    ("pattern", "n", "k", "m", "dtype", "warps_stages", "shared", "panels"),
    mostly_slow(
        [
            ("16:32v32", 70, 172, 1, torch.float16, (4, 2), 99 << 10, 1),
            ("16:32v32", 70, 1600, 1, torch.float16, (4, 2), 18 << 10, 3),
            ("4:32v16", 33, 336, 8, torch.bfloat16, (2, 3), 99 << 10, 1),
            ("5:7v128", 130, 777, 11, torch.float16, (4, 2), 33000, 4),  # rows of x are not aligned
        ],
        1,
        3,
    ),
)
def test_decode_tensor(emulated, monkeypatch, pattern, n, k, m, dtype, warps_stages, shared, panels):
    """From 2 tokens on one CTA computes all row tiles: it takes the panels forth and back."""
    emulate_gpu(monkeypatch, sms=1, shared_per_cta=shared)
    packed = pack(pattern, n, k, dtype)
    tile_m = next(tile for tile in decode_schedule.TENSOR_TILE_M if tile >= m)
    schedule = DecodeTensorSchedule(packed.pattern, dtype, tile_m, *warps_stages)
    assert -(-k // (schedule.windows_per_panel(k, shared) * packed.pattern.window)) == panels
    check_kernel(lambda problem: decode_tensor.prepare(problem, schedule), packed, m)


def prepare_with_4_warps(problem: Problem) -> Product:
    schedule = DecodeTensorSchedule(problem.pattern, problem.dtype, 16, 4, 2)
    return decode_tensor.prepare(problem, schedule)


@pytest.mark.parametrize(
    ("prepare", "pattern", "k", "dtype"),
    [(decode.prepare, "4:32v128", 330, torch.bfloat16), (prepare_with_4_warps, "5:7v128", 773, torch.float16)],
)
def test_tokens_do_not_mix_and_tensors_may_begin_anywhere(emulated, prepare, pattern: str, k: int, dtype: torch.dtype):
    """Values stored past column K must not be multiplied by the next token's first columns. Views are not aligned."""
    packed = pack(pattern, 130, k, dtype)
    values = packed.tensors["values"]
    shifted = torch.empty(values.numel() + 1, dtype=dtype)[1:].view_as(values).copy_(values)
    assert shifted.data_ptr() % 16
    moved = Packed(packed.spec, {**packed.tensors, "values": shifted})
    x, bias = operands(packed, 11)
    x[1] = torch.inf
    y = prepare(problem_of(x, packed))(x, moved, bias.float())
    others = torch.arange(11) != 1
    assert not y[1].isfinite().any()
    check(y[others], x[others], packed, bias)


@pytest.mark.parametrize(
    ("pattern", "n", "k", "m", "dtype", "prologue", "epilogue", "shared"),
    mostly_slow(
        [
            ("16:32v32", 128, 520, 1, torch.bfloat16, "rms_norm", "silu_mul", 227 << 10),
            ("5:7v128", 130, 4400, 1, torch.float16, "rms_norm", "none", 227 << 10),  # two chunks of x per thread
            ("16:32v32", 70, 12000, 1, torch.bfloat16, "none", "add", 84 << 10),  # two panels
            ("4:32v16", 96, 4208, 2, torch.float16, "rms_norm", "silu_mul", 227 << 10),
            ("16:32v32", 300, 336, 2, torch.bfloat16, "rms_norm", "none", 227 << 10),
            ("5:7v16", 50, 776, 2, torch.float16, "none", "add", 227 << 10),
        ],
        0,
        3,
    ),
)
def test_fused(emulated, monkeypatch, pattern, n, k, m, dtype, prologue, epilogue, shared):
    emulate_gpu(monkeypatch, sms=2, shared_per_cta=shared)
    packed = pack(pattern, n, k, dtype)
    check_fused(DECODE_TENSOR, packed, packed.unpack(), m, prologue, epilogue, bias=m % 2 == 1)


def test_what_is_not_fused(monkeypatch: pytest.MonkeyPatch):
    emulate(monkeypatch)
    problem = problem_of(torch.zeros(1, 64).half(), pack("16:32v32", 96, 64))
    assert decode_tensor.fuse(replace(problem, epilogue="silu_mul")) is None  # 48 rows of a gate
    odd = problem_of(torch.zeros(1, 60).half(), pack("16:32v32", 96, 60))
    assert decode_tensor.fuse(replace(odd, epilogue="add")) is None  # rows of x are not aligned
    wide = problem_of(torch.zeros(2, 14000).half(), pack("16:32v32", 32, 14000))
    assert decode_tensor.fuse(replace(wide, prologue="rms_norm")) is None  # 224 KB of x
