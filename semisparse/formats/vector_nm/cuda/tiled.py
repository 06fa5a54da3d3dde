"""What `gemm` and `gemm_fp32` share on the host: x transposed and column information first, then one tiled GEMM."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.errors import KernelError
from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.cuda import column_info
from semisparse.formats.vector_nm.cuda.operands import aligned, bias_like, operands_refusal
from semisparse.formats.vector_nm.cuda.schedule import TILES, GemmSchedule, choose_gemm, gemm_lengths, gemm_schedule
from semisparse.formats.vector_nm.storage.disk import groups_and_slots, vectors_of
from semisparse.patterns import VectorNM
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import KernelBuild
from semisparse.runtime.nvrtc import Defines


def common_defines(dtype: torch.dtype, shortest: VectorNM) -> tuple[Defines, ...]:
    """Return the macros of each tile, with whole and with packed stages, and of the shortest vectors."""
    tiles = TILES[dtype.itemsize]
    half, eighth = VectorNM(16, 32, 32), VectorNM(4, 32, 32)
    wanted = [(pattern, tile, pattern is eighth) for tile in tiles for pattern in (half, eighth)]
    wanted.append((shortest, tiles[1], False))
    schedules = [gemm_schedule(pattern, tile, dtype, packed) for pattern, tile, packed in wanted]
    return tuple(schedule.defines for schedule in schedules if schedule)


def refusal(problem: Problem) -> str | None:
    """Say why no tiled GEMM can compute ``problem``, or None if one can."""
    reason = operands_refusal(problem)
    if reason is None and _schedule(problem) is None:
        lengths = ", ".join(map(str, gemm_lengths(problem.dtype.itemsize)))
        return f"takes vectors of {lengths} rows whose stages fit shared memory, not {problem.pattern}"
    return reason


def schedule_for(problem: Problem) -> GemmSchedule:
    """Return the schedule for a problem.

    Raises:
        KernelError: no stage fits shared memory.
    """
    schedule = _schedule(problem)
    if schedule is None:
        raise KernelError(f"no tile of {problem.pattern} fits shared memory")
    return schedule


def _schedule(problem: Problem) -> GemmSchedule | None:
    facts = device_facts(problem.device)
    pattern = vectors_of(problem.pattern)
    return choose_gemm(pattern, problem.m, problem.n, problem.dtype, facts.sms, facts.shared_per_cta)


def prepare(problem: Problem, schedule: GemmSchedule, build: KernelBuild) -> Product:
    """Prepare to multiply with a schedule and the kernel that is compiled for it."""
    n, (groups, slots) = problem.n, groups_and_slots(problem.spec)
    info, kernel = column_info.prepare(problem, schedule), build.load(problem.device)
    row_tiles, threads = -(-n // schedule.tile.n), schedule.threads
    sizes = {
        "n": n,
        "groups": groups,
        "slots": slots,
        "stages": -(-slots // schedule.slots),
        "aligned": int(n * problem.dtype.itemsize % 16 == 0),
    }

    def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x, values, bias = aligned(x), aligned(packed.tensors["values"]), bias_like(x, bias)
        x_t, columns, offsets = info(x, packed.tensors["positions"].contiguous())
        m, pitch = x.shape[0], x_t.shape[1]
        y = x.new_empty(m, n)
        operands = {"x_t": x_t, "values": values, "columns": columns, "offsets": offsets, "bias": bias, "y": y}
        kernel((pitch // schedule.tile.m, row_tiles, 1), threads, pdl=False, **operands, m=m, pitch=pitch, **sizes)
        return y

    return multiply
