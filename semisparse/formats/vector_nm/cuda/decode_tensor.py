"""Kernel `decode_tensor`: GEMV and skinny GEMM (M <= 16) on tensor cores, straight from the packed weight.

Panels, slots and groups are those of `decode_schedule`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.errors import KernelError
from semisparse.formats.base import Packed
from semisparse.formats.kernel import NOTHING_FUSED, FusedOperands, FusedProduct, Problem, Product
from semisparse.formats.vector_nm.cuda import decode
from semisparse.formats.vector_nm.cuda.decode_schedule import (
    CHUNK_COLUMNS,
    FUSED_ONE_WAVE,
    FUSED_WAVES,
    TENSOR_VECTOR_LENGTHS,
    TILE_SLOTS,
    DecodeTensorSchedule,
    choose_decode_tensor,
    choose_fused,
)
from semisparse.formats.vector_nm.storage.disk import groups_and_slots, vectors_of
from semisparse.patterns import VectorNM
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.operands import aligned, bias_as

UNFUSED: Defines = {"RMS_NORM": 0, "ADD_RESIDUAL": 0, "SILU_MUL": 0}

SOURCE = CudaSource(
    Path(__file__).with_name("decode_tensor.cu"),
    tuple(  # schedules: tile_m, warps, stages, tiles_at_once, ctas_per_sm
        {**DecodeTensorSchedule(VectorNM(*pattern), dtype, *schedule).defines, **UNFUSED, **fusion}
        for pattern, dtype, schedule, fusion in (
            ((16, 32, 32), torch.float16, (1, 16, 2, 1, 2), {}),
            ((16, 32, 32), torch.float16, (8, 16, 2), {}),
            ((16, 32, 32), torch.bfloat16, (16, 16, 2), {}),
            ((5, 7, 16), torch.bfloat16, (8, 16, 2), {}),
            ((5, 7, 128), torch.float16, (1, 16, 2, 1, 2), {}),
            ((16, 32, 32), torch.bfloat16, (1, *FUSED_WAVES[:2], 1, FUSED_WAVES[2]), {"RMS_NORM": 1}),
            ((16, 32, 32), torch.float16, (1, *FUSED_WAVES[:2], 2, FUSED_WAVES[2]), {"RMS_NORM": 1, "SILU_MUL": 1}),
            ((16, 32, 32), torch.bfloat16, (1, *FUSED_ONE_WAVE[:2], 1, FUSED_ONE_WAVE[2]), {"ADD_RESIDUAL": 1}),
            ((16, 32, 32), torch.float16, (8, 16, 2, 2), {"RMS_NORM": 1, "SILU_MUL": 1}),
            ((5, 7, 16), torch.bfloat16, (8, 16, 2), {"ADD_RESIDUAL": 1}),
        )
    ),
)


def refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot compute ``problem``; None if it can."""
    reason = decode.refusal(problem, TENSOR_VECTOR_LENGTHS)
    if reason is None and schedule_for(problem) is None:
        return f"no panel of x for {problem.pattern} fits shared memory"
    return reason


def schedule_for(problem: Problem) -> DecodeTensorSchedule | None:
    """Return the schedule for ``problem``; None if no panel of x fits shared memory."""
    limit = device_facts(problem.device).shared_per_cta
    return choose_decode_tensor(vectors_of(problem.pattern), problem.dtype, problem.m, problem.k, limit)


def prepare(problem: Problem, schedule: DecodeTensorSchedule | None = None) -> Product:
    """Return the matmul for ``problem``: x, w and y all float16 or all bfloat16; accumulators are float32.

    Args:
        schedule: overrides that of `schedule_for`.
    Raises:
        KernelError: no panel of x fits shared memory.
    """
    return _prepared(problem, schedule or schedule_for(problem))


def fuse(problem: Problem) -> FusedProduct | None:
    """As `prepare`, for a problem with a prologue or an epilogue; None if no schedule can fuse them."""
    schedule = choose_fused(problem, device_facts(problem.device))
    return None if schedule is None else _prepared(problem, schedule)


def _prepared(problem: Problem, schedule: DecodeTensorSchedule | None) -> FusedProduct:
    (n, k), facts = problem.spec.shape, device_facts(problem.device)
    windows = schedule.windows_per_panel(k, facts.shared_per_cta) if schedule else None
    if schedule is None or windows is None:
        raise KernelError(f"no panel of x for {problem.pattern} fits shared memory")
    _, slots = groups_and_slots(problem.spec)
    width = n // 2 if problem.epilogue == "silu_mul" else n
    slot_tiles, row_tiles = -(-slots // TILE_SLOTS), -(-width // schedule.tile_n)
    panel_tiles = -(-windows * schedule.pattern.keep // TILE_SLOTS)
    sizes = {
        "n": n,
        "k": k,
        "slots": slots,
        "row_tiles": row_tiles,
        "panel_tiles": panel_tiles,
        "panel_chunks": schedule.panel_chunks(windows),
        "panels": -(-slot_tiles // panel_tiles),
        "steps": schedule.steps(min(slot_tiles, panel_tiles)),
        "aligned": int(k % CHUNK_COLUMNS == 0),
    }
    grid = (schedule.ctas(row_tiles, facts.sms), 1, 1)
    defines = {**schedule.defines, **problem.fusion_defines}
    build = SOURCE.build("semisparse_vector_nm_decode_tensor", defines, schedule.shared_bytes(windows))
    kernel, threads = build.load(problem.device), 32 * schedule.warps

    def decode_tensor(x: Tensor, packed: Packed, bias: Tensor | None, fused: FusedOperands = NOTHING_FUSED) -> Tensor:
        x, values, bias = aligned(x), aligned(packed.tensors["values"]), bias_as(bias, x.dtype)
        y = x.new_empty(x.shape[0], width)
        operands = {"x": x, "values": values, "positions": packed.tensors["positions"].contiguous(), "bias": bias}
        kernel(
            grid, threads, pdl=facts.has_pdl, **operands, y=y, m=x.shape[0], norm_weight=fused.norm_weight,
            residual=fused.residual, epsilon=fused.epsilon, **sizes,
        )  # fmt: skip
        return y

    return decode_tensor
